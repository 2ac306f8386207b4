"""`eth runs` on folders as runs leave them, finished, resumed and cut off."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from eth_service.cli import main


def make_run(folder: Path, name: str, losses: list[float | None], *, ended: bool = True) -> Path:
    """A run folder with a row for each loss."""
    run = folder / name
    run.mkdir(parents=True)
    job = {
        "name": name,
        "model": "gpt3-nano",
        "data": {"path": "python-stdlib"},
        "training": {"global_batch_size": 4, "sequence_length": 16, "steps": 20},
    }
    (run / "job.yaml").write_text(yaml.safe_dump(job))
    rows = [{"iteration": i, "loss": loss} for i, loss in enumerate(losses, start=1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if ended:
        summary = {"state": "succeeded", "iteration_seconds": 0.25, "samples_per_second": 16.0}
        (run / "summary.json").write_text(json.dumps(summary))
    return run


def eth(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code and output of `eth runs`."""
    sys.argv = ["eth", "runs", *map(str, arguments)]
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code, *capsys.readouterr()


def test_runs_are_listed_with_how_they_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "whole", [3.0, 2.5, 2.0])
    make_run(tmp_path, "cut", [3.0, None], ended=False)
    (tmp_path / "other").mkdir()
    code, out, _ = eth(capsys, "list", tmp_path, "--json")
    found = {line["name"]: line for line in map(json.loads, out.splitlines())}
    assert code == 0 and found.keys() == {"whole", "cut"}
    whole, cut = found["whole"], found["cut"]
    assert (whole["state"], whole["iterations"], whole["steps"], whole["loss"]) == ("succeeded", 3, 20, 2.0)
    assert (cut["state"], cut["iterations"], cut["loss"]) == ("unfinished", 2, 3.0)
    assert "succeeded" in eth(capsys, "list", tmp_path)[1]


def test_a_run_is_shown_with_losses_that_a_resumed_run_repeated_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, "resumed", [3.0, 2.5, 2.4])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 3, "loss": 2.25}) + "\n")
    code, out, _ = eth(capsys, "show", run)
    assert code == 0 and "iteration 3: loss 2.2500" in out and "2.4000" not in out


def test_runs_are_compared_where_both_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = make_run(tmp_path, "one", [3.0, 2.0, 1.0]), make_run(tmp_path, "other", [3.0, 2.5])
    code, out, _ = eth(capsys, "compare", one, other, "--json")
    assert code == 0
    assert json.loads(out)["losses"] == [
        {"iteration": 1, "losses": [3.0, 3.0]},
        {"iteration": 2, "losses": [2.0, 2.5]},
    ]
    assert "2.5000" in eth(capsys, "compare", one, other)[1]


def test_what_is_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no run folder" in eth(capsys, "list", tmp_path)[2]
    assert "is not a folder" in eth(capsys, "list", tmp_path / "none")[2]
    code, _, err = eth(capsys, "show", tmp_path)
    assert code == 2 and "is not a run folder" in err
    run = make_run(tmp_path, "one", [1.0])
    assert "needs two run folders" in eth(capsys, "compare", run)[2]
