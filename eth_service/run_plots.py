"""What runs did, as one picture: losses over iterations and over time, every pipeline's samples a second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
_INCHES = (9, 11)


@dataclass(frozen=True)
class PlottedRun:
    """A run's name in the legend, and its rows of metrics in the order of iterations."""

    name: str
    rows: Sequence[Row]

    @property
    def seconds(self) -> list[float]:
        """When each row's iteration had ended: the sum of all iterations' device seconds, evaluations left out."""
        return list(accumulate(row.get("iteration_seconds") or 0.0 for row in self.rows))

    @property
    def emulated(self) -> bool:
        return any(row.get("emulated") for row in self.rows)


def plot_runs(runs: Sequence[PlottedRun], file: Path) -> None:
    """Draw runs into a PNG. UserError if it has another name, cannot be written, or nothing was measured."""
    if file.suffix.lower() != ".png":
        raise UserError(f"--plot {file} must end in .png; that is what is drawn")
    if not any(run.rows for run in runs):
        raise UserError("--plot: no iteration has ended in these runs, so there is nothing to draw")
    figure = run_figure(runs)
    try:
        figure.savefig(file, dpi=110)
    except OSError as error:
        raise UserError(f"--plot {file} cannot be written: {error.strerror}; choose another file") from None


def run_figure(runs: Sequence[PlottedRun]) -> Figure:
    """The picture: losses over iterations, losses over time, samples a second over iterations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    by_iteration, by_time, speed = figure.subplots(3)
    for run in runs:
        iterations = [row["iteration"] for row in run.rows]
        _losses(by_iteration, run, iterations)
        _losses(by_time, run, run.seconds)
        for label, points in _speeds(run, alone=len(runs) == 1):
            _line(speed, iterations, points, label)
    emulated = ", emulated devices" if any(run.emulated for run in runs) else ""
    _describe(by_iteration, "iteration", "loss (nats a token)")
    _describe(by_time, f"device seconds{emulated}", "loss (nats a token)")
    _describe(speed, "iteration", f"samples a second{emulated}")
    speed.set_ylim(bottom=0)
    return figure


def _losses(axes: Axes, run: PlottedRun, places: Sequence[float]) -> None:
    """The training loss as a line, held-out samples' as dots of its colour where they were measured."""
    colour = _line(axes, places, [row.get("loss") for row in run.rows], run.name)
    measured = [
        (place, row["validation"]["loss"])
        for place, row in zip(places, run.rows, strict=True)
        if row.get("validation") and row["validation"]["iteration"] == row["iteration"]
    ]
    shown = [(place, loss) for place, loss in measured if loss is not None]
    if shown:
        axes.plot(
            *zip(*shown, strict=True), "o--", color=colour, markersize=4, label=f"{run.name}, validation"
        )


def _speeds(run: PlottedRun, *, alone: bool) -> Iterator[tuple[str, list[float | None]]]:
    """Each pipeline's samples a second, by label."""
    count = max((len(row.get("pipelines", ())) for row in run.rows), default=0)
    for index in range(count):
        label = f"pipeline {index}" if alone else f"{run.name}, pipeline {index}"
        yield label, [_speed(row, index) for row in run.rows]


def _speed(row: Row, index: int) -> float | None:
    pipelines = row.get("pipelines", ())
    return pipelines[index].get("samples_per_second") if index < len(pipelines) else None


def _line(axes: Axes, places: Sequence[float], values: Sequence[float | None], label: str) -> Any:
    """A line with gaps where nothing finite was measured; its colour."""
    (drawn,) = axes.plot(places, [float("nan") if value is None else value for value in values], label=label)
    return drawn.get_color()


def _describe(axes: Axes, across: str, up: str) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
