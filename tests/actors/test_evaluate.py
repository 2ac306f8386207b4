"""What `eth evaluate` measures: a run's job, on its own text or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.data_settings import TextSource
from actors.engine.tokens import TokenFile
from actors.evaluate import evaluation_job
from actors.job import Job, read_job
from actors.planning import prepare
from actors.run_folder import RunFolder
from actors.text.files import silent
from actors.text.prepared import write_prepared
from planner.errors import UserError
from planner.plan import Plan
from tests.actors.test_tokenizers import TEXT, trained_tokenizer
from tests.e2e.runs import write_job
from tests.plans import make_model


def test_another_text_becomes_tokens_as_the_prepared_one_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that learns prepared tokens says nothing of what made them, nor of what ends their documents."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = trained_tokenizer(tmp_path / "tokenizer.json", end="<over>", vocabulary=258)
    (tmp_path / "a.txt").write_text(TEXT * 20)
    source = TextSource(tmp_path / "a.txt", tokenizer=tokenizer, end_of_document="<over>")
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    made = write_prepared(source, tokens, processes=1, say=silent, progress=silent)
    model = make_model(name="small", layers=2, hidden_size=24, heads=2, vocab_size=258)

    def job_of(**data: Any) -> Job:
        return read_job(
            write_job(
                tmp_path, steps=2, data={"path": "tokens"} | data, model=model.model_dump(), plan="auto"
            )
        )

    job = job_of()
    run = RunFolder.check(tmp_path / "run", overwrite=False)
    run.create()
    run.write_job(job, end_of_document=prepare(job).end_of_document())
    run.close()
    (tmp_path / "b.txt").write_text(TEXT * 10)
    with pytest.raises(
        UserError, match=r"data.held_out.path = .*b.txt' .* by another tokenizer \(byte\) than"
    ):
        prepare(job_of(held_out={"path": "b.txt"}))
    plan = read_job(write_job(tmp_path, steps=2)).plan
    assert isinstance(plan, Plan)
    (tmp_path / "plan.json").write_text(plan.model_copy(update={"model": model}).model_dump_json())
    evaluated = evaluation_job(run.path, data=tmp_path / "b.txt", plan=tmp_path / "plan.json")
    held_out = prepare(evaluated).held_out.tokens
    assert held_out is not None and TokenFile(held_out).tokenizer == made.tokenizer
    assert made.tokenizer.endswith("end of document 0")


def test_what_does_not_fit_a_run_is_named_by_its_option(tmp_path: Path) -> None:
    run = RunFolder.check(tmp_path / "run", overwrite=False)
    run.create()
    job = read_job(write_job(tmp_path, steps=2))
    run.write_job(job)
    run.close()
    plan = job.plan
    assert isinstance(plan, Plan)
    other = plan.model_copy(
        update={"model": plan.model.model_copy(update={"name": "other", "vocab_size": 300})}
    )
    (tmp_path / "other.json").write_text(other.model_dump_json())
    with pytest.raises(
        UserError, match=r"--plan .*other.json is for the model other, .* the run's small; give"
    ):
        evaluation_job(run.path, data=None, plan=tmp_path / "other.json")
    longer = plan.model_copy(update={"sequence_length": 16})
    (tmp_path / "longer.json").write_text(longer.model_dump_json())
    with pytest.raises(
        UserError, match=r"--plan .*longer.json: training.sequence_length = 32 \(the plan says 16"
    ):
        evaluation_job(run.path, data=None, plan=tmp_path / "longer.json")
    with pytest.raises(UserError, match=r"--data .*none.txt does not exist; give a text file"):
        evaluation_job(run.path, data=tmp_path / "none.txt", plan=tmp_path / "plan.json")
