"""`eth train` from job file to run folder, and how it ends when it is not left alone."""

from __future__ import annotations

import json
import math
import os
import signal
from datetime import datetime
from importlib import metadata
from pathlib import Path

import pytest
from safetensors import safe_open

from actors.job import read_job
from actors.planning import plan_request
from planner.errors import UserError
from planner.parameters import model_parameters
from planner.plan import read_plan
from planner.search import find_plan
from tests.e2e.runs import Run, rows, wait_until, write_job
from tests.plans import make_llama

STEPS = 6


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Run]:
    """A run that went to its end: its folder, what it printed, and its process."""
    folder = tmp_path_factory.mktemp("finished")
    job = write_job(
        folder,
        steps=STEPS,
        data={"path": "text.txt", "held_out": 0.2},
        evaluation={"every": 4, "samples": 12},
    )
    run = Run([str(job), "--output", str(folder / "run")], folder)
    code, out, err = run.end()
    assert code == 0, err
    return folder / "run", out, run


def test_every_iteration_has_a_row_with_every_pipeline(finished: tuple[Path, str, Run]) -> None:
    found = rows(finished[0])
    assert [row["iteration"] for row in found] == list(range(1, STEPS + 1))
    assert found[-1]["loss"] < found[0]["loss"]
    for row in found:
        assert math.isfinite(row["gradient_norm"]) and row["learning_rate"] == 0.01
        assert row["iteration_seconds"] == pytest.approx(row["wall_seconds"] / row["time_scale"])
        assert row["samples_per_second"] == pytest.approx(8 / row["iteration_seconds"])
        assert row["tokens_per_second"] == pytest.approx(32 * row["samples_per_second"])
        assert [pipeline["samples"] for pipeline in row["pipelines"]] == [5, 3]
        assert row["samples_per_second"] == pytest.approx(
            sum(pipeline["samples_per_second"] for pipeline in row["pipelines"])
        )
        for pipeline in row["pipelines"]:
            assert 0 < pipeline["end_seconds"] <= row["iteration_seconds"] * 1.01
            assert pipeline["predicted_end_seconds"] > 0


def test_held_out_samples_are_evaluated_on_the_way_and_at_the_end(finished: tuple[Path, str, Run]) -> None:
    folder, out, _ = finished
    found = rows(folder)
    assert ["validation" in row for row in found] == [iteration >= 4 for iteration in range(1, STEPS + 1)]
    assert [row["validation"]["iteration"] for row in found[3:]] == [4, 4, STEPS]
    last = found[-1]["validation"]
    assert (last["samples"], last["tokens"]) == (12, 12 * 32)
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    assert last["loss"] < math.log(257) and last["loss"] < found[3]["validation"]["loss"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["validation_loss"] == last["loss"]
    assert out.count(f"validation loss {last['loss']:.4f} (perplexity") == 2


def test_the_weights_are_those_of_the_unsharded_model(finished: tuple[Path, str, Run]) -> None:
    model = read_job(finished[0] / "job.yaml").model
    expected = {parameter.name: parameter.shape for parameter in model_parameters(model)}
    with safe_open(finished[0] / "weights.safetensors", framework="numpy") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert found == expected


def test_the_end_is_told_and_nothing_is_left(finished: tuple[Path, str, Run]) -> None:
    folder, out, run = finished
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["state"], summary["iterations"]) == ("succeeded", STEPS)
    assert "EMULATED" in out
    assert str(folder) in out.splitlines()[-1]
    assert {path.name for path in folder.iterdir()} == {*summary["written"]}
    assert run.leaves_nothing()


def test_a_run_keeps_what_it_said_and_what_it_was_started_in(finished: tuple[Path, str, Run]) -> None:
    folder, out, run = finished
    stamped = [line.partition("  ") for line in (folder / "log.txt").read_text().splitlines()]
    times = [datetime.fromisoformat(time) for time, _, _ in stamped]
    assert times == sorted(times) and all(time.tzinfo for time in times)
    # The two reckon the time left by themselves.
    logged, shown = [line for *_, line in stamped], out.splitlines()
    assert [line.split("  ETA ")[0].rstrip() for line in shown] == [
        line.split("  ETA ")[0] for line in logged
    ]
    (row,) = map(json.loads, (folder / "environment.jsonl").read_text().splitlines())
    assert row["iteration"] == 0 and row["command"][1:] == ["train", *run.arguments]
    assert row["versions"]["torch"] == metadata.version("torch")
    (host,) = row["hosts"]
    assert host["name"] == row["host"] and host["resources"]["CPU"] >= 1


@pytest.mark.slow
def test_a_run_is_evaluated_as_it_was_on_the_way_whatever_the_plan(
    finished: tuple[Path, str, Run], tmp_path: Path
) -> None:
    folder = finished[0]
    told = rows(folder)[-1]["validation"]
    write_job(tmp_path, steps=1)
    content = json.loads((tmp_path / "plan.json").read_text())
    # One pipeline alone, on the device of the first.
    content["pipelines"] = content["pipelines"][:1]
    content["pipelines"][0] |= {"samples": 8, "local_batch_size": 8}
    content["idle_devices"] = ["old/0", "old/1"]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    for options in ([], ["--plan", str(other)]):
        run = Run([str(folder), "--samples", "12", "--json", *options], folder.parent, command="evaluate")
        code, out, err = run.end()
        assert code == 0, err
        found = json.loads(out.splitlines()[-1])
        assert (found["iteration"], found["samples"], found["tokens"]) == (STEPS, 12, 12 * 32)
        assert found["loss"] == pytest.approx(told["loss"], rel=1e-6)
        assert run.leaves_nothing()
    run = Run([str(folder), "--checkpoint", "3"], folder.parent, command="evaluate")
    assert run.end()[0] == 2


@pytest.mark.slow
def test_what_only_fits_with_recomputation_is_planned_and_trained(tmp_path: Path) -> None:
    """The devices refuse an allocation beyond their memory, whatever the planner believed."""
    job = write_job(
        tmp_path,
        steps=3,
        model=make_llama(layers=4, hidden_size=48, dropout=0.1, max_sequence_length=64).model_dump(),
        training={"global_batch_size": 8, "sequence_length": 64, "steps": 3},
        plan="auto",
        zero_stages=[0],
        cluster={"nodes": [{"name": "n", "emulate": True, "devices": [{"type": "RTX3090", "count": 2}]}]},
        emulation={"memory_scale": 14_000},
    )
    with pytest.raises(UserError, match="does not fit"):
        find_plan(plan_request(read_job(job)).model_copy(update={"recompute": False}))
    run = Run([str(job), "--output", str(tmp_path / "run")], tmp_path)
    code, _, err = run.end()
    assert code == 0, err
    stages = [s for pipeline in read_plan(tmp_path / "run" / "plan.json").pipelines for s in pipeline.stages]
    assert any(count for stage in stages for count in stage.recompute.values())
    assert [row["iteration"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    assert run.leaves_nothing()


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_and_is_named(tmp_path: Path) -> None:
    run = Run([str(write_job(tmp_path, steps=100_000)), "--output", str(tmp_path / "run")], tmp_path)
    assert wait_until(lambda: len(rows(tmp_path / "run")) >= 2)
    victim = run.processes(name="ray::Worker")[0]
    os.kill(victim, signal.SIGKILL)
    code, out, err = run.end(seconds=60)
    assert code == 1
    assert err.startswith("eth: rank ") and f"died: its process {victim} on " in err
    assert ("pipeline 0, stage 0" in err) or ("pipeline 1, stage" in err)
    assert "failed after" in out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["state"] == "failed"
    assert run.leaves_nothing()


@pytest.mark.slow
def test_a_stopped_worker_ends_the_run_soon_and_failure_txt_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = write_job(tmp_path, steps=100_000, runtime={"timeout_seconds": 5})
    run = Run([str(job), "--output", str(folder)], tmp_path)
    assert wait_until(lambda: len(rows(folder)) >= 2)
    os.kill(run.processes(name="ray::Worker")[0], signal.SIGSTOP)
    code, out, err = run.end(seconds=60)
    assert code == 1
    (told,) = [line for line in err.splitlines() if line.startswith("eth: ")]
    assert "hung: its process does not answer" in told
    assert "failed after" in out
    failure = (folder / "failure.txt").read_text()
    assert failure.startswith(told.removeprefix("eth: "))
    # The stopped process has no stack to show: a peer's stands in for it.
    assert "timed out waiting for a peer" in failure and "Traceback" in failure
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["state"] == "failed" and summary["failure"] == told.removeprefix("eth: ")
    assert "failure.txt" in summary["written"]
    assert run.leaves_nothing()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_stopped_run_says_what_it_wrote_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    run = Run([str(write_job(tmp_path, steps=100_000)), "--output", str(tmp_path / "run")], tmp_path)
    assert wait_until(lambda: len(rows(tmp_path / "run")) >= 2)
    if number is signal.SIGINT:
        # As Ctrl-C does: to the whole process group of the terminal.
        os.killpg(run.process.pid, number)
    else:
        run.process.send_signal(number)
    code, out, err = run.end(seconds=60)
    assert code == 130, err
    assert "stopped after iteration" in err
    assert (
        f"run folder: {tmp_path / 'run'} (job.yaml, plan.json, metrics.jsonl, environment.jsonl, log.txt, summary.json)"
        in out
    )
    assert run.leaves_nothing()


@pytest.mark.slow
def test_a_killed_driver_takes_everything_with_it(tmp_path: Path) -> None:
    run = Run([str(write_job(tmp_path, steps=100_000)), "--output", str(tmp_path / "run")], tmp_path)
    assert wait_until(lambda: len(rows(tmp_path / "run")) >= 2)
    run.process.kill()
    run.process.wait()
    assert run.leaves_nothing()


def test_a_model_that_cannot_fit_is_a_user_s_mistake(tmp_path: Path) -> None:
    job = write_job(
        tmp_path,
        steps=1,
        model="gpt3-175b",
        plan="auto",
        cluster={"nodes": [{"emulate": True, "devices": [{"type": "RTX3090", "count": 2}]}]},
    )
    run = Run([str(job), "--output", str(tmp_path / "run")], tmp_path)
    code, _, err = run.end()
    assert code == 2
    # Ray's own log lines, which begin with a time, may come between on a busy host.
    (told,) = [line for line in err.splitlines() if not line.startswith("[20")]
    assert told.startswith("eth: ")
    assert "stage" in err and "GiB" in err
    assert not (tmp_path / "run").exists()
    assert run.leaves_nothing()
