"""Reports of ranks to rows, rows to the end of a run, and what a terminal shows of both."""

from __future__ import annotations

import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console as Terminal

from actors.engine.checkpoint import SavedCheckpoint
from actors.engine.evaluation import Validation
from actors.engine.iteration import IterationReport
from actors.metrics import Measurements, data_wait_share, finish_spread
from actors.report import Console, checkpoint_line, iteration_line
from actors.run_folder import RunFolder
from actors.summary import summarize
from planner.cluster import resolve_cluster
from planner.cost.price import with_prediction
from planner.plan import Plan, PlanEmulation
from tests.plans import make_model, make_plan

SCALE = 100.0


def report(iteration: int, *, start: float, compute_seconds: float) -> IterationReport:
    return IterationReport(
        iteration=iteration,
        loss=2.0,
        gradient_norm=0.5,
        learning_rate=1e-3,
        start_time=start,
        compute_end_time=start + compute_seconds,
        sync_end_time=start + 8.5,
        end_time=start + 9.0,
        steps=10,
        late_steps=1,
        peak_tensor_bytes=1000,
        data_wait_seconds=0.002 * iteration,
    )


def emulated_plan() -> Plan:
    cluster = resolve_cluster({"nodes": [{"emulate": True, "devices": [{"type": "A100", "count": 3}]}]})
    plan = make_plan(
        make_model(),
        [[(1, 1, 2), (1, 1, 2)], [(1, 1, 4)]],
        cluster=cluster,
        micro_batch_sizes=[1, 1],
        samples=[6, 2],
        emulation=PlanEmulation(time_scale=SCALE),
    )
    return with_prediction(plan)


def reports(iteration: int, start: float) -> dict[int, IterationReport]:
    """Pipeline 0 is ranks 0 and 1; rank 2's host has another clock: only differences mean anything."""
    starts, seconds = [start, start, 1e6 + start], [8.0, 6.0, 4.0]
    return {rank: report(iteration, start=starts[rank], compute_seconds=seconds[rank]) for rank in range(3)}


def test_a_row_holds_device_seconds_and_every_pipeline_s_share() -> None:
    plan = emulated_plan()
    assert plan.predicted is not None
    measurements = Measurements(plan)
    measurements.row(reports(1, 100.0))
    row = measurements.row(reports(2, 110.0))
    assert row["iteration"] == 2
    # From the end of the iteration before, at 109, to the end of this one, at 119.
    assert row["wall_seconds"] == pytest.approx(10.0)
    assert row["iteration_seconds"] == pytest.approx(10.0 / SCALE)
    assert row["samples_per_second"] == pytest.approx(8 / 0.1)
    assert row["tokens_per_second"] == pytest.approx(8 * 32 / 0.1)
    assert [p["samples_per_second"] for p in row["pipelines"]] == pytest.approx([60.0, 20.0])
    assert [p["end_seconds"] for p in row["pipelines"]] == pytest.approx([0.08, 0.04])
    assert row["late_step_share"] == pytest.approx(0.1)
    assert row["predicted_iteration_seconds"] == plan.predicted.iteration_seconds
    for pipeline, predicted in zip(row["pipelines"], plan.predicted.pipelines, strict=True):
        # The last backward, which is before the pipeline's last gradient block.
        assert 0 < pipeline["predicted_end_seconds"] < predicted.end_seconds
    assert finish_spread([row]) == pytest.approx(0.5)


def test_waiting_for_data_is_told_where_it_is_more_than_a_trifle() -> None:
    measurements = Measurements(emulated_plan())
    slow = reports(2, 110.0)
    slow[1] = replace(slow[1], data_wait_seconds=2.5)
    rows = [measurements.row(reports(1, 100.0)), measurements.row(slow)]
    # Of the rank that waited longest, in device seconds; iterations of 9 and 10 s.
    assert [row["data_wait_seconds"] * SCALE for row in rows] == pytest.approx([0.002, 2.5])
    assert data_wait_share(rows) == pytest.approx(2.502 / 19)
    del rows[0]["data_wait_seconds"]
    assert data_wait_share(rows) == pytest.approx(2.5 / 10), "rows of older runs do not tell"
    assert data_wait_share(rows[:1]) is None
    lines = [iteration_line(row, steps=3, seconds_left=None) for row in rows]
    assert "data" not in lines[0] and "waited for data 25% of the time" in lines[1]


def test_an_evaluation_counts_for_no_iteration_and_stays_in_the_rows() -> None:
    measurements = Measurements(emulated_plan())
    measurements.row(reports(1, 100.0))
    evaluated = {
        rank: replace(
            report, validation=Validation(iteration=2, loss=3.0, samples=8, tokens=256, seconds=5.0)
        )
        for rank, report in reports(2, 110.0).items()
    }
    rows = [measurements.row(evaluated), measurements.row(reports(3, 124.0))]
    # It ended at 119, evaluated until 124, and the next one began at once.
    assert [row["wall_seconds"] for row in rows] == pytest.approx([10.0, 9.0])
    expected = {"iteration": 2, "loss": 3.0, "samples": 8, "tokens": 256}
    for row in rows:
        assert {key: row["validation"][key] for key in expected} == expected
        assert row["validation"]["perplexity"] == pytest.approx(math.exp(3.0))
        assert row["validation"]["seconds"] == pytest.approx(5.0 / SCALE)
    assert "validation loss 3.0000 (perplexity 20.09)" in iteration_line(rows[0], steps=3, seconds_left=None)
    assert "validation" not in iteration_line(rows[1], steps=3, seconds_left=None)


def test_the_end_says_what_was_measured_and_where_it_lies(tmp_path: Path) -> None:
    plan = emulated_plan()
    assert plan.predicted is not None
    measurements = Measurements(plan)
    rows = [measurements.row(reports(i, 10.0 * i)) for i in (1, 2, 3)]
    rows[-1]["loss"] = 1.5
    summary = summarize(
        rows,
        state="succeeded",
        folder=RunFolder(tmp_path),
        iterations=3,
        steps=3,
        emulated=True,
        wall_seconds=61.0,
        failure=None,
    )
    screen = StringIO()
    console = Console(Terminal(file=screen, width=300))
    console.planned(plan, folder=tmp_path, steps=3)
    for row in rows:
        console.iteration(row)
    console.finished(summary)
    text = screen.getvalue()
    assert "EMULATED" in text.splitlines()[0]
    assert "2/3  loss 2.0000  100 ms (predicted" in text
    assert "80 samples/s  [0] 60 samples/s 1.92k tokens/s  [1] 20 samples/s" in text
    assert "loss: 2.0000 -> 1.5000 (75% of the first)" in text
    assert "pipelines finish within 50.0% of each other" in text and "waited" not in text
    assert summary.data_wait_share == pytest.approx(0.01 / 20)
    assert f"run folder: {tmp_path}" in text.splitlines()[-1]


def test_a_run_s_plan_shows_what_it_recomputes_and_shards(tmp_path: Path) -> None:
    data = emulated_plan().model_dump()
    data["pipelines"][0]["stages"][0]["recompute"] = {"softmax": 2, "attention_dropout": 1}
    plan = with_prediction(Plan.model_validate(data | {"zero_stage": 2, "predicted": None}))
    screen = StringIO()
    Console(Terminal(file=screen, width=300)).planned(plan, folder=tmp_path, steps=3)
    text = screen.getvalue()
    assert "Recompute" in text and "2 AS, 1 AD" in text
    assert "Recomputed in backward: AS softmax, AD attention dropout." in text
    assert "ZeRO 2: optimizer state and gradients inside a stage sharded" in text


def test_a_run_that_never_iterated_has_an_end_too(tmp_path: Path) -> None:
    summary = summarize(
        [],
        state="failed",
        folder=RunFolder(tmp_path),
        iterations=0,
        steps=3,
        emulated=True,
        wall_seconds=1.0,
        failure="rank 0 failed",
    )
    screen = StringIO()
    Console(Terminal(file=screen, width=300)).finished(summary)
    assert "cause: rank 0 failed" in screen.getvalue()
    assert summary.last_loss is None


def test_a_save_after_which_nothing_could_be_deleted_is_told_as_whole() -> None:
    saved = SavedCheckpoint(7, Path("step-00000007"), bytes=2048, seconds=2.0, pause_seconds=0.5)
    whole = checkpoint_line(saved)
    told = checkpoint_line(replace(saved, prune_error="deletion is forbidden"))
    assert "could NOT be deleted" not in whole and told.startswith(whole)
    assert "older checkpoints could NOT be deleted" in told and "deletion is forbidden" in told
