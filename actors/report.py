"""What a terminal shows of a run: the plan, a line an iteration, the end."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console as Terminal

from actors.metrics import Row, data_wait_share
from actors.plan_table import plan_table, saver_lines
from actors.summary import Summary
from planner.describe import describe
from planner.plan import Plan
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from actors.engine.checkpoint import SavedCheckpoint

_EMULATED = (
    "EMULATED: this host plays the devices; times are device seconds and support claims about balance only"
)

LOG_COLUMNS = 130
# Below this share late steps say nothing about the run.
_LATE_SHARE = 0.02
# Below this share the data is read fast enough.
_WAIT_SHARE = 0.005


class Console:
    """An Observer that prints plain lines, in colour where standard output is a terminal."""

    def __init__(self, terminal: Terminal | None = None) -> None:
        self._out = terminal or _terminal()
        self._steps = 0
        self._began = 0.0
        self._first: int | None = None

    def status(self, text: str) -> None:
        """A dim line, so that a pause is explained."""
        self._say(f"{text} ...", style="dim")

    def planned(self, plan: Plan, *, folder: Path, steps: int) -> None:
        """The plan as a table, and where the run writes."""
        self._steps = steps
        if plan.cluster.emulated:
            self._say(_EMULATED, style="bold yellow")
            self._say(f"one device second takes {plan.emulation.time_scale:g} s of this host")
        self._out.print(plan_table(plan))
        for line in plan_lines(plan):
            self._say(line)
        self._say(f"run folder: {folder}")

    def iteration(self, row: Row) -> None:
        """One line: loss, measured against predicted, each pipeline's speed, time left."""
        if self._first is None:
            # The first iteration warms up; time left is reckoned from those after it.
            self._first, self._began = row["iteration"], time.monotonic()
        left = self._seconds_left(row["iteration"])
        self._say(iteration_line(row, steps=self._steps, seconds_left=left))

    def checkpoint(self, saved: SavedCheckpoint) -> None:
        """A line: where the state lies now, or why the save failed."""
        self._say(checkpoint_line(saved), style="bold red" if saved.error or saved.prune_error else "")

    def finished(self, summary: Summary) -> None:
        """How it ended and what there is to look at."""
        for line in summary_lines(summary):
            self._say(line, style="bold" if line.startswith(("EMULATED", summary.state)) else "")

    def _say(self, line: str, *, style: str = "") -> None:
        self._out.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def _seconds_left(self, iteration: int) -> float | None:
        done = iteration - (self._first or iteration)
        if done < 1:
            return None
        return (time.monotonic() - self._began) / done * (self._steps - iteration)


class _Output(Terminal):
    """Whoever reads the output may end first (`| head`): then the run is stopped, in order, and says no more."""

    def on_broken_pipe(self) -> None:
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()
        raise KeyboardInterrupt


def _terminal() -> Terminal:
    # A log or a pipe has no width of its own; the plan's table needs more than the usual 80 columns.
    return _Output() if sys.stdout.isatty() else _Output(width=LOG_COLUMNS)


def iteration_line(row: Row, *, steps: int, seconds_left: float | None) -> str:
    """One iteration: loss, measured against predicted time, every pipeline's speed, time left."""
    measured, predicted = row["iteration_seconds"], row["predicted_iteration_seconds"]
    off = measured / predicted - 1
    parts = [
        f"{row['iteration']:>{len(str(steps))}}/{steps}",
        f"loss {row['loss']:.4f}" if row["loss"] is not None else "loss not finite",
        *validation_words(row),
        f"{format_seconds(measured)} (predicted {format_seconds(predicted)}, {off:+.0%})",
        f"{_count(row['samples_per_second'])} samples/s",
    ]
    parts += [
        f"[{p['id']}] {_count(p['samples_per_second'])} samples/s {_count(p['tokens_per_second'])} tokens/s"
        for p in row["pipelines"]
    ]
    if (share := row.get("late_step_share", 0.0)) > _LATE_SHARE:
        parts.append(f"host late in {share:.0%} of steps")
    if (share := data_wait_share([row]) or 0.0) > _WAIT_SHARE:
        parts.append(f"waited for data {share:.0%} of the time")
    if row.get("skipped"):
        parts.append(f"skipped (loss scale {row['loss_scale']:g})" if row["loss_scale"] != 1 else "skipped")
    if seconds_left is not None:
        parts.append(f"ETA {_clock(seconds_left)}")
    return "  ".join(parts)


def validation_words(row: Row) -> list[str]:
    """What an evaluation right after an iteration found; empty for other iterations."""
    validation = row.get("validation")
    if validation is None or validation["iteration"] != row["iteration"]:
        return []
    if validation["loss"] is None:
        return ["validation loss not finite"]
    return [validation_figures(validation["loss"], validation["perplexity"])]


def validation_figures(loss: float, perplexity: float | None) -> str:
    """Loss of held-out samples, and what it means."""
    return f"validation loss {loss:.4f} (perplexity {'beyond numbers' if perplexity is None else f'{perplexity:.4g}'})"


def checkpoint_line(saved: SavedCheckpoint) -> str:
    """How a save went."""
    if saved.error is not None:
        return (
            f"checkpoint after iteration {saved.iteration} FAILED: {saved.error}; training goes on, older"
            " checkpoints stay"
        )
    line = (
        f"checkpoint after iteration {saved.iteration}: {format_bytes(saved.bytes)} in"
        f" {format_seconds(saved.seconds)}, of which training waited {format_seconds(saved.pause_seconds)}"
    )
    if saved.prune_error is not None:
        line += f"; older checkpoints could NOT be deleted and take up space: {saved.prune_error}"
    return line


def summary_lines(summary: Summary) -> list[str]:
    """The end of a run in a few lines, the run folder last."""
    lines = [
        f"{summary.state} after {summary.iterations} of {summary.steps} iterations,"
        f" {_clock(summary.wall_seconds)} in all"
    ]
    if summary.failure:
        lines.append(f"cause: {summary.failure}")
    if summary.failed_saves:
        lines.append(f"{summary.failed_saves} checkpoints could NOT be saved; saves.jsonl says why")
    if summary.emulated and summary.iterations:
        lines.append(_EMULATED)
    if summary.first_loss is not None and summary.last_loss is not None:
        share = summary.last_loss / summary.first_loss
        lines.append(f"loss: {summary.first_loss:.4f} -> {summary.last_loss:.4f} ({share:.0%} of the first)")
    if summary.validation_loss is not None:
        lines.append(validation_figures(summary.validation_loss, summary.validation_perplexity))
    if summary.iteration_seconds is not None and summary.predicted_iteration_seconds is not None:
        off = summary.iteration_seconds / summary.predicted_iteration_seconds - 1
        lines.append(
            f"iteration: {format_seconds(summary.iteration_seconds)} measured,"
            f" {format_seconds(summary.predicted_iteration_seconds)} predicted ({off:+.1%});"
            f" {summary.samples_per_second:.4g} samples/s"
        )
    if summary.finish_spread is not None:
        lines.append(f"pipelines finish within {summary.finish_spread:.1%} of each other")
    if summary.late_step_share:
        lines.append(f"the host was too slow for {summary.late_step_share:.1%} of the steps")
    if summary.data_wait_share is not None and summary.data_wait_share > _WAIT_SHARE:
        lines.append(f"ranks waited for data for {summary.data_wait_share:.1%} of the time")
    lines.append(f"run folder: {summary.folder} ({', '.join(summary.written) or 'nothing written'})")
    return lines


def plan_lines(plan: Plan) -> list[str]:
    """What the table does not say: what is trained on what, how balanced it is, how long it should take."""
    assert plan.predicted is not None
    counts = ", ".join(f"{count} x {type_}" for type_, count in plan.cluster.counts.items())
    lines = [
        f"{plan.model.name} on {counts}: {plan.global_batch_size} samples of {plan.sequence_length} tokens,"
        f" predicted {format_seconds(plan.predicted.iteration_seconds)} an iteration",
        *saver_lines(plan),
    ]
    if len(plan.pipelines) > 1:
        spread = describe(plan).balance.pipeline_spread
        lines.append(f"pipelines should end their work within {spread:.1%} of each other")
    if plan.idle_devices:
        lines.append(f"idle, since they would only slow it down: {', '.join(plan.idle_devices)}")
    return lines


def _count(number: float) -> str:
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
