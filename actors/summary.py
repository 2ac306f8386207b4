"""The end of a run in figures, and the interface of whoever watches one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Protocol

from actors.metrics import Row, data_wait_share, finish_spread
from actors.run_folder import SUMMARY, RunFolder
from planner.plan import Plan

if TYPE_CHECKING:
    from actors.engine.checkpoint import SavedCheckpoint


@dataclass(frozen=True)
class Summary:
    """The end of a run. `state` is `succeeded`, `failed` or `stopped`; figures are None before iteration 1.

    `iteration_seconds`, `samples_per_second` and `late_step_share` are medians over the iterations without
    the first, which warms up; `finish_spread` is that of `metrics.finish_spread` over the same, and
    `data_wait_share` the part of their time for which the rank that waited longest stood still for its samples.
    `validation_loss` and `validation_perplexity` are of the last evaluation. `failed_saves` counts the checkpoints that
    could not be saved.
    """

    state: str
    folder: str
    written: list[str]
    iterations: int
    steps: int
    emulated: bool
    wall_seconds: float
    first_loss: float | None = None
    last_loss: float | None = None
    validation_loss: float | None = None
    validation_perplexity: float | None = None
    iteration_seconds: float | None = None
    predicted_iteration_seconds: float | None = None
    samples_per_second: float | None = None
    finish_spread: float | None = None
    late_step_share: float | None = None
    data_wait_share: float | None = None
    failure: str | None = None
    failed_saves: int = 0


class Observer(Protocol):
    """Who watches a run. Calls come from the driver, in this order."""

    def status(self, text: str) -> None:
        """The driver begins something that takes seconds."""

    def planned(self, plan: Plan, *, folder: Path, steps: int) -> None:
        """The plan is fixed and priced; nothing has been started for it yet."""

    def iteration(self, row: Row) -> None:
        """An iteration has ended; `row` is what metrics.jsonl has of it."""

    def checkpoint(self, saved: SavedCheckpoint) -> None:
        """A checkpoint is whole, or could not be saved: training goes on in both cases."""

    def finished(self, summary: Summary) -> None:
        """The run has ended, well or not; nothing of it is left but the run folder."""


class Silent:
    """An Observer that shows nothing."""

    def status(self, text: str) -> None:
        return

    def planned(self, plan: Plan, *, folder: Path, steps: int) -> None:
        return

    def iteration(self, row: Row) -> None:
        return

    def checkpoint(self, saved: SavedCheckpoint) -> None:
        return

    def finished(self, summary: Summary) -> None:
        return


def summarize(
    rows: Sequence[Row],
    *,
    state: str,
    folder: RunFolder,
    iterations: int,
    steps: int,
    emulated: bool,
    wall_seconds: float,
    failure: str | None,
    failed_saves: int = 0,
) -> Summary:
    """The summary of a run from its rows of metrics."""
    common = {
        "state": state,
        "folder": str(folder.path),
        "written": [*folder.written(), SUMMARY] if folder.path.exists() else [],
        "iterations": iterations,
        "steps": steps,
        "emulated": emulated,
        "wall_seconds": wall_seconds,
        "failure": failure,
        "failed_saves": failed_saves,
    }
    if not rows:
        return Summary(**common)  # type: ignore[arg-type]
    steady = rows[1:] or rows
    validation = rows[-1].get("validation") or {}
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    return Summary(
        **common,  # type: ignore[arg-type]
        first_loss=next(iter(losses), None),
        last_loss=losses[-1] if losses else None,
        validation_loss=validation.get("loss"),
        validation_perplexity=validation.get("perplexity"),
        iteration_seconds=median(row["iteration_seconds"] for row in steady),
        predicted_iteration_seconds=rows[-1]["predicted_iteration_seconds"],
        samples_per_second=median(row["samples_per_second"] for row in steady),
        finish_spread=finish_spread(steady),
        late_step_share=median(row["late_step_share"] for row in steady) if emulated else None,
        data_wait_share=data_wait_share(steady),
    )
