"""`eth train` on wrong input: one clear line, exit code 2, and no Ray is started to find out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from eth_service.cli import main
from tests.e2e.runs import write_job

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(**options: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on standard error of a command that is refused."""
    sys.argv = ["eth", "train", *arguments]
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("eth: ") and err.count("\n") == 1, err
    return err


def edited(folder: Path, *, job: Edit | None = None, plan: Edit | None = None) -> str:
    """The path of a sound job with something changed in it or in its plan."""
    path = write_job(folder, steps=2)
    if job is not None:
        content = yaml.safe_load(path.read_text())
        job(content)
        path.write_text(yaml.safe_dump(content))
    if plan is not None:
        content = json.loads((folder / "plan.json").read_text())
        plan(content)
        (folder / "plan.json").write_text(json.dumps(content))
    return str(path)


FIRST, LAST = ("pipelines", 0, "stages", 0), ("pipelines", 1, "stages", 1)


def put(*keys: Any, value: Any) -> Edit:
    """Set a value deep inside."""

    def edit(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (put(*FIRST, "devices", value=["new/7"]), "names 'new/7', which the cluster does not have"),
        (put(*LAST, "layers", value=[0, 2]), "layers = [0, 2] overlaps the stage before it"),
        (
            put("pipelines", 0, "local_batch_size", value=5),
            "local_batch_size = 5 must be samples = 5 rounded",
        ),
        (put("dtypes", "grad", value="bf16"), "dtypes.grad = 'bf16' is not supported"),
        (put("emulation", "memory_scale", value=1e6), "more than its"),
    ],
)
def test_a_wrong_plan(edit: Edit, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told in refusal(capsys, edited(tmp_path, plan=edit))


def merge_stages(*, tp: int, dp: int) -> Edit:
    """Make the second pipeline one stage of its two devices."""

    def edit(plan: dict[str, Any]) -> None:
        first, second = plan["pipelines"][1]["stages"]
        first |= {"devices": first["devices"] + second["devices"], "layers": [0, 2], "head": True}
        first |= {"tp": tp, "dp": dp}
        plan["pipelines"][1]["stages"] = [first]

    return edit


def test_a_tp_degree_that_does_not_divide_the_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def both(plan: dict[str, Any]) -> None:
        merge_stages(tp=2, dp=1)(plan)
        plan["model"] |= {"heads": 3, "kv_heads": 3}

    path = edited(tmp_path, job=lambda job: job["model"].update(heads=3, kv_heads=3), plan=both)
    assert "tp = 2 does not divide the model's heads = 3" in refusal(capsys, path)


def test_a_dp_degree_that_does_not_fit_the_micro_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refusal(capsys, edited(tmp_path, plan=merge_stages(tp=1, dp=2)))
    assert "must be dp = 2 positive numbers that sum to micro_batch_size = 1" in told


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (put("training", "global_batch_size", value=2), "global_batch_size = 2 (the plan says 8) differs"),
        (put("training", "sequence_length", value=64), "is more than the model's max_sequence_length = 32"),
        (put("training", "step", value=3), "training.step is not a known key"),
        (put("data", "path", value="nowhere.txt"), "does not exist"),
    ],
)
def test_a_wrong_job(edit: Edit, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told in refusal(capsys, edited(tmp_path, job=edit))


def test_an_unknown_device_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(job: dict[str, Any]) -> None:
        job |= {"plan": "auto", "cluster": "1x2:A1000"}

    assert "device type 'A1000' is not known; use one of" in refusal(capsys, edited(tmp_path, job=change))


@pytest.mark.parametrize(("text", "told"), [("", "no text"), ("short", "needs 33 tokens of text")])
def test_too_little_text(text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = edited(tmp_path)
    (tmp_path / "text.txt").write_text(text)
    assert told in refusal(capsys, path)


def test_a_folder_that_holds_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = edited(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    told = refusal(capsys, path, "--output", str(tmp_path / "run"))
    assert "is not empty; name another folder, add --resume" in told


def test_a_run_to_resume_is_named_and_holds_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = edited(tmp_path), str(tmp_path / "run")
    assert "--resume needs --output" in refusal(capsys, path, "--resume")
    missing = refusal(capsys, path, "--resume", "--output", folder)
    assert f"--resume: {folder}/checkpoints is not there" in missing and "leave --resume out" in missing
    assert not Path(folder).exists()
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert "no whole checkpoint" in refusal(capsys, path, "--resume", "--output", folder)
    both = refusal(capsys, path, "--resume", "--overwrite", "--output", folder)
    assert "--overwrite and --resume exclude each other" in both


def test_what_is_not_there_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in refusal(capsys, str(tmp_path / "none.yaml"))


def test_ctrl_c_before_the_run_began_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("actors.driver.run_job", interrupted)
    sys.argv = ["eth", "train", edited(tmp_path)]
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130
    assert capsys.readouterr().err == "eth: stopped\n"
