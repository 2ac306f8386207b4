"""Metrics: what the ranks report of an iteration, as one row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from planner.describe import compute_end_seconds
from planner.plan import Plan

if TYPE_CHECKING:
    from actors.engine.evaluation import Validation
    from actors.engine.iteration import IterationReport

Row = dict[str, Any]


class Measurements:
    """Turns each iteration's reports into a row of `metrics.jsonl`.

    Times are device seconds: on emulated devices wall seconds divided by the time scale. A rank's times are
    compared with its own clock only, so that hosts need not agree on the time.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._scale = plan.emulation.time_scale if plan.cluster.emulated else 1.0
        self._ended: dict[int, float] = {}
        self._validation: Row | None = None

    def row(self, reports: Mapping[int, IterationReport]) -> Row:
        """The row of one iteration from the reports of all ranks."""
        plan = self._plan
        first = reports[0]
        # From the end of the iteration before: what passes between two iterations counts as well.
        wall = max(r.end_time - self._ended.get(rank, r.start_time) for rank, r in reports.items())
        self._ended = {rank: _ready_time(report) for rank, report in reports.items()}
        if first.validation is not None:
            self._validation = _validation_row(first.validation, scale=self._scale)
        seconds = wall / self._scale
        row: Row = {
            "iteration": first.iteration,
            "loss": finite(first.loss),
            "gradient_norm": finite(first.gradient_norm),
            "learning_rate": first.learning_rate,
            "skipped": first.skipped,
            "loss_scale": first.loss_scale,
            "iteration_seconds": seconds,
            "predicted_iteration_seconds": plan.predicted.iteration_seconds if plan.predicted else None,
            "wall_seconds": wall,
            "data_wait_seconds": max(report.data_wait_seconds for report in reports.values()) / self._scale,
            "samples_per_second": plan.global_batch_size / seconds,
            "tokens_per_second": plan.global_batch_size * plan.sequence_length / seconds,
            "pipelines": [self._pipeline(index, reports, seconds) for index in range(len(plan.pipelines))],
        }
        if self._validation is not None:
            # Every row has the latest, so that the last row alone says how the run stands.
            row["validation"] = self._validation
        if plan.cluster.emulated:
            steps = sum(report.steps for report in reports.values())
            late = sum(report.late_steps for report in reports.values())
            row |= {"emulated": True, "time_scale": self._scale, "late_step_share": late / max(1, steps)}
        return row

    def _pipeline(self, index: int, reports: Mapping[int, IterationReport], seconds: float) -> Row:
        plan = self._plan
        samples = plan.pipelines[index].samples
        ranks = [place.rank for place in plan.ranks if place.pipeline == index]
        end = max(reports[rank].compute_end_time - reports[rank].start_time for rank in ranks) / self._scale
        return {
            "id": index,
            "samples": samples,
            "samples_per_second": samples / seconds,
            "tokens_per_second": samples * plan.sequence_length / seconds,
            "end_seconds": end,
            "predicted_end_seconds": _predicted_end(plan, index),
            "peak_tensor_bytes": max(reports[rank].peak_tensor_bytes for rank in ranks),
        }


def _ready_time(report: IterationReport) -> float:
    """When a rank could begin the next iteration: an evaluation between the two counts for neither."""
    return report.end_time + (report.validation.seconds if report.validation else 0.0)


def _validation_row(validation: Validation, *, scale: float) -> Row:
    """An evaluation as rows show it; `seconds` are device seconds."""
    return {
        "iteration": validation.iteration,
        "loss": finite(validation.loss),
        "perplexity": finite(validation.perplexity),
        "samples": validation.samples,
        "tokens": validation.tokens,
        "seconds": validation.seconds / scale,
    }


def finite(value: float) -> float | None:
    """A number as JSON can hold it: None for what is not finite."""
    return value if math.isfinite(value) else None


def _predicted_end(plan: Plan, pipeline: int) -> float | None:
    """When a pipeline's last backward should end: what gradient blocks add is not a pipeline's own."""
    return None if plan.predicted is None else compute_end_seconds(plan.predicted.pipelines[pipeline])


def finish_spread(rows: Sequence[Row]) -> float:
    """How much later the last pipeline ends its work than the first, as a share of the last one's time.

    Of each pipeline's median over the rows, so that a moment's disturbance of the host does not count.
    """
    by_pipeline = zip(*([p["end_seconds"] for p in row["pipelines"]] for row in rows), strict=True)
    ends = [median(seconds) for seconds in by_pipeline]
    return (max(ends) - min(ends)) / max(ends)


def data_wait_share(rows: Sequence[Row]) -> float | None:
    """The part of the rows' time for which, in each, the rank that waited longest stood still for its samples. Rows of
    older runs do not tell: None if none does."""
    told = [row for row in rows if "data_wait_seconds" in row]
    if not told:
        return None
    return float(
        sum(row["data_wait_seconds"] for row in told) / sum(row["iteration_seconds"] for row in told)
    )
