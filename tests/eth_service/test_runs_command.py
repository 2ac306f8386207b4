"""`eth runs` on folders as runs leave them, finished, resumed and cut off."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from actors.storage import RemotePath
from eth_service.cli import main
from eth_service.run_plots import PlottedRun, run_figure
from tests.eth_service.test_checkpoint_command import make_checkpoint
from tests.object_storage import BUCKET, ObjectStorage


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
    times = {"iteration_seconds": 0.25, "data_wait_seconds": 0.001}
    rows = [{"iteration": i, "loss": loss, **times} for i, loss in enumerate(losses, start=1)]
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


def test_a_run_that_cannot_be_read_is_told_and_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("whole", "job", "plan", "rows", "closed")
    whole, job, plan, rows, closed = (make_run(tmp_path, name, [3.0, 2.0]) for name in names)
    (job / "job.yaml").write_text("name: [")
    (plan / "plan.json").write_text("{")
    # A file that not even root can read.
    (rows / "metrics.jsonl").unlink()
    (rows / "metrics.jsonl").symlink_to("/proc/self/mem")
    # Permissions would not keep root out.
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed)
    code, out, err = eth(capsys, "list", tmp_path, "--json")
    assert code == 0 and [json.loads(line)["folder"] for line in out.splitlines()] == [str(whole)]
    assert err.count("\n") == 4
    assert f"eth: {rows} is left out: {rows} cannot be read: Input/output error; make it readable\n" in err
    assert f"eth: {closed} cannot be looked into and is left out\n" in err
    assert eth(capsys, "show", rows)[::2] == (
        2,
        f"eth: {rows} cannot be read: Input/output error; make it readable\n",
    )
    assert f"eth: {job} is left out: job file {job}/job.yaml is not valid YAML or JSON" in err
    assert f"eth: {plan} is left out: plan file {plan}/plan.json is not valid YAML or JSON" in err
    shutil.rmtree(whole)
    code, out, err = eth(capsys, "list", tmp_path)
    assert code == 2 and err.endswith(f"eth: {tmp_path} holds no run folder that can be read\n")


def test_a_run_is_shown_with_losses_that_a_resumed_run_repeated_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, "resumed", [3.0, 2.5, 2.4])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 3, "loss": 2.25}) + "\n")
    code, out, _ = eth(capsys, "show", run)
    assert code == 0 and "iteration 3: loss 2.2500" in out and "2.4000" not in out
    assert "ranks waited for data for 0.40% of the time" in out


def test_checkpoints_are_looked_for_where_the_job_has_them(
    storage: ObjectStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    near, far, lost = (make_run(tmp_path, name, [3.0, 2.0]) for name in ("near", "far", "lost"))
    place = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    for run, directory in ((far, place), (lost, "s3://none/folder")):
        job = yaml.safe_load((run / "job.yaml").read_text())
        job["checkpoint"] = {"every": 1, "directory": directory}
        (run / "job.yaml").write_text(yaml.safe_dump(job))
    make_checkpoint(near / "checkpoints", 1)
    make_checkpoint(near / "checkpoints", 2)
    saved = make_checkpoint(RemotePath(place), 2)
    code, out, err = eth(capsys, "list", tmp_path, "--json")
    found = {line["name"]: line["checkpoints"] for line in map(json.loads, out.splitlines())}
    assert code == 0 and found == {"near": 2, "far": 1, "lost": None}
    assert err.count("\n") == 1 and "s3://none/folder" in err
    assert json.loads(eth(capsys, "show", far, "--json")[1])["checkpoints"] == [str(saved)]
    code, out, err = eth(capsys, "show", lost)
    assert code == 0 and "unknown" in out and err.count("cannot be used") == 1


def test_runs_are_compared_where_both_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = make_run(tmp_path, "one", [3.0, 2.0, 1.0]), make_run(tmp_path, "other", [3.0, 2.5])
    code, out, _ = eth(capsys, "compare", one, other, "--json")
    assert code == 0
    assert json.loads(out)["losses"] == [
        {"iteration": 1, "losses": [3.0, 3.0]},
        {"iteration": 2, "losses": [2.0, 2.5]},
    ]
    assert "2.5000" in eth(capsys, "compare", one, other)[1]
    none = make_run(tmp_path, "none", [])
    assert "no iteration is there in all of them" in eth(capsys, "compare", one, none)[1]


def test_what_runs_ran_with_is_shown_and_where_it_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, older = (make_run(tmp_path, name, [3.0, 2.0]) for name in ("one", "other", "older"))
    start = {"started": "2030-01-02T03:04:05+00:00", "host": "[here]", "iteration": 0}
    versions = {"python": "3.11.7", "torch": "2.9.0", "ray": "2.50.0"}
    for run, later in ((one, {}), (other, {"torch": "2.10.0", "fsspec": "2026.9.0"})):
        rows = [
            start | {"versions": {"torch": "1.0"}},
            start | {"iteration": 2, "versions": versions | later},
        ]
        (run / "environment.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = eth(capsys, "show", one)[1]
    assert (
        "started 2030-01-02T03:04:05+00:00 on [here], to go on after iteration 2:"
        " python 3.11.7, torch 2.9.0, ray 2.50.0\n"
    ) in shown
    assert json.loads(eth(capsys, "show", one, "--json")[1])["environment"]["versions"] == versions
    # A run of which nothing is known differs in nothing.
    out = eth(capsys, "compare", one, other, older)[1]
    assert "versions differ: torch 2.9.0, 2.10.0, unknown\n" in out
    assert "versions differ: fsspec none, 2026.9.0, unknown\n" in out and "python" not in out
    assert json.loads(eth(capsys, "compare", one, older, "--json")[1])["versions"] == {}
    assert json.loads(eth(capsys, "show", older, "--json")[1])["environment"] is None


def test_runs_of_one_job_are_told_apart_by_their_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (make_run(tmp_path, name, [3.0, 2.0]) for name in ("one", "other"))
    (other / "job.yaml").write_bytes((one / "job.yaml").read_bytes())
    monkeypatch.chdir(tmp_path)
    headings = eth(capsys, "compare", "one", "other")[1].split("Iteration")[-1].splitlines()[0]
    assert "one" in headings and "other" in headings


def with_evaluations(run: Path) -> None:
    """Rows as a run of two pipelines that evaluates every second iteration writes them."""
    rows, latest = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()], None
    for row in rows:
        if row["iteration"] % 2 == 0:
            latest = {"iteration": row["iteration"], "loss": row["loss"] + 0.5, "perplexity": 20.0}
        row |= {
            "iteration_seconds": 0.25,
            "pipelines": [{"id": i, "samples_per_second": 10.0 * (i + 1)} for i in range(2)],
        } | ({"validation": latest} if latest else {})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = make_run(tmp_path, "one", [3.0, 2.5, None, 2.0]), make_run(tmp_path, "other", [3.0, 2.0])
    with_evaluations(other)
    both = tmp_path / "both.png"
    code, out, err = eth(capsys, "compare", one, other, "--plot", both)
    assert code == 0 and "2.5000" in out and f"drew {both}" in err
    assert both.read_bytes().startswith(b"\x89PNG\r\n") and both.stat().st_size > 10_000
    code, out, _ = eth(capsys, "show", other, "--plot", tmp_path / "alone.png")
    assert code == 0 and "validation loss 2.5000 (perplexity 20)" in out
    assert (tmp_path / "alone.png").exists()
    assert "must end in .png" in eth(capsys, "show", one, "--plot", tmp_path / "plot.pdf")[2]
    assert "cannot be written" in eth(capsys, "show", one, "--plot", tmp_path / "none" / "plot.png")[2]
    empty = make_run(tmp_path, "empty", [])
    assert "nothing to draw" in eth(capsys, "show", empty, "--plot", both)[2]


def test_what_is_drawn_is_what_was_measured() -> None:
    evaluation = {"iteration": 2, "loss": 2.5}
    rows: list[dict[str, Any]] = [
        {"iteration": 1, "loss": 3.0, "iteration_seconds": 2.0, "pipelines": [{"samples_per_second": 8.0}]},
        {"iteration": 2, "loss": None, "iteration_seconds": 4.0, "validation": evaluation, "emulated": True},
        {"iteration": 3, "loss": 1.0, "iteration_seconds": 1.0, "validation": evaluation},
    ]
    by_iteration, by_time, speed = run_figure([PlottedRun("one", rows)]).axes
    for axes, places in ((by_iteration, [1, 2, 3]), (by_time, [2.0, 6.0, 7.0])):
        training, validation = axes.lines
        assert np.asarray(training.get_xdata()).tolist() == places
        assert np.asarray(training.get_ydata()).tolist() == pytest.approx([3.0, math.nan, 1.0], nan_ok=True)
        assert np.asarray(validation.get_xydata()).tolist() == [[places[1], 2.5]]
    assert np.asarray(speed.lines[0].get_ydata()).tolist() == pytest.approx(
        [8.0, math.nan, math.nan], nan_ok=True
    )
    assert "emulated" in by_time.get_xlabel() and "emulated" in speed.get_ylabel()


def test_what_is_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no run folder" in eth(capsys, "list", tmp_path)[2]
    assert "is not a folder" in eth(capsys, "list", tmp_path / "none")[2]
    code, _, err = eth(capsys, "show", tmp_path)
    assert code == 2 and "is not a run folder" in err
    run = make_run(tmp_path, "one", [1.0])
    assert "needs two run folders" in eth(capsys, "compare", run)[2]
