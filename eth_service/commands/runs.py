"""`eth runs`: what the run folders of this machine hold, one by one and side by side. Knows no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from actors.checkpoints import Checkpoint

app = typer.Typer(name="runs", help="List, show and compare run folders.", no_args_is_help=True)

PlotOption = Annotated[
    Path | None,
    typer.Option(
        help="PNG to draw: losses over iterations and over time, samples a second of every pipeline"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of a table")]


@dataclass(frozen=True)
class RunLine:
    """One run in figures. `state` is the summary's; `unfinished` while there is none: it goes on, or was killed."""

    folder: str
    name: str
    model: str
    devices: str
    state: str
    iterations: int
    steps: int
    first_loss: float | None
    loss: float | None
    validation_loss: float | None
    validation_perplexity: float | None
    iteration_seconds: float | None
    samples_per_second: float | None
    data_wait_share: float | None
    checkpoints: int | None


@app.command("list")
def list_(
    folder: Annotated[Path, typer.Argument(help="folder of run folders")] = Path("runs"),
    json_: JsonOption = False,
) -> None:
    """Show every run below a folder, the newest last."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name the one that holds the run folders")
    with _readable(folder):
        found = [path for path in _open_folders(folder) if _is_run(path)]
        found.sort(key=lambda path: (path / "job.yaml").stat().st_mtime)
    if not found:
        raise UserError(f"{folder} holds no run folder; eth train makes them")
    lines = [line for path in found if (line := _listed(path)) is not None]
    if not lines:
        raise UserError(f"{folder} holds no run folder that can be read")
    _print(lines, as_json=json_)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="run folder")],
    json_: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Show one run: its end, its plan, what it ran with, its losses on the way, its checkpoints."""
    from actors.plan_table import plan_table
    from eth_service.run_files import failed_saves, last_start

    _check_run(run)
    found = _kept(run)
    line, kept = _line(run, found), found or []
    _plot([run], [line], plot)
    if json_:
        paths = [str(checkpoint.path) for checkpoint in kept]
        more = {"checkpoints": paths, "failed_saves": failed_saves(run), "environment": last_start(run)}
        print(json.dumps(asdict(line) | more))
        return
    from eth_service.commands.common import console
    from planner.plan import read_plan

    out = console()
    out.print(_table([line]))
    if (run / "plan.json").exists():
        out.print(plan_table(read_plan(run / "plan.json")))
    if (start := last_start(run)) is not None:
        out.print(_started(start), markup=False, highlight=False, soft_wrap=True)
    for row in _sampled(run, most=10):
        out.print(f"iteration {row['iteration']}: loss {_number(row['loss'])}", highlight=False)
    if line.validation_loss is not None:
        from actors.report import validation_figures

        out.print(validation_figures(line.validation_loss, line.validation_perplexity), highlight=False)
    if line.data_wait_share is not None:
        out.print(f"ranks waited for data for {line.data_wait_share:.2%} of the time", highlight=False)
    for saved in failed_saves(run):
        out.print(
            f"checkpoint after {saved['iteration']} could NOT be saved: {saved['error']}",
            style="bold red",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    for checkpoint in kept:
        out.print(
            f"checkpoint after {checkpoint.iteration}: {checkpoint.path}", highlight=False, soft_wrap=True
        )


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="run folders, two or more")],
    json_: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Show runs side by side, with their losses at the same iterations."""
    if len(runs) < 2:
        raise UserError("eth runs compare needs two run folders or more; name another")
    for run in runs:
        _check_run(run)
    lines = [_line(run, _kept(run)) for run in runs]
    _plot(runs, lines, plot)
    losses = [{row["iteration"]: row["loss"] for row in _rows(run)} for run in runs]
    common = sorted(set.intersection(*(set(loss) for loss in losses)))
    shown = [common[round(i * (len(common) - 1) / 9)] for i in range(10)] if len(common) > 10 else common
    at = [{"iteration": i, "losses": [loss[i] for loss in losses]} for i in shown]
    unlike = _unlike_versions(runs)
    if json_:
        print(json.dumps({"runs": [asdict(line) for line in lines], "losses": at, "versions": unlike}))
        return
    from rich.table import Table

    from eth_service.commands.common import console

    table = Table("Iteration", *_names(runs, lines), pad_edge=False)
    for row in at:
        table.add_row(str(row["iteration"]), *map(_number, row["losses"]))
    out = console()
    out.print(_table(lines))
    out.print(table if at else "no iteration is there in all of them")
    for name, found in unlike.items():
        out.print(f"versions differ: {name} {', '.join(found)}", highlight=False, soft_wrap=True)


def _started(start: dict[str, Any]) -> str:
    """What a run ran with, in a line; `start` is its last row of environment.jsonl."""
    versions = start.get("versions", {})
    named = [
        f"{name} {versions[name]}" for name in ("eth-service", "python", "torch", "ray") if name in versions
    ]
    again = f", to go on after iteration {start['iteration']}" if start.get("iteration") else ""
    return f"started {start.get('started')} on {start.get('host')}{again}: {', '.join(named)}"


def _unlike_versions(runs: list[Path]) -> dict[str, list[str]]:
    """The packages of which runs, as they were started last, had not the same version."""
    from eth_service.run_files import last_start

    found = [start.get("versions", {}) if (start := last_start(run)) is not None else None for run in runs]
    known = [versions for versions in found if versions is not None]
    names = sorted({name for versions in known for name in versions}, key=str.lower)
    return {
        name: ["unknown" if versions is None else versions.get(name, "none") for versions in found]
        for name in names
        if len({versions.get(name) for versions in known}) > 1
    }


def _plot(runs: list[Path], lines: list[RunLine], file: Path | None) -> None:
    if file is None:
        return
    from eth_service.run_plots import PlottedRun, plot_runs

    names = _names(runs, lines)
    plot_runs([PlottedRun(name, _rows(run)) for name, run in zip(names, runs, strict=True)], file)
    from eth_service.commands.common import tell

    tell(f"drew {file}")


def _names(runs: list[Path], lines: list[RunLine]) -> list[str]:
    """What tells runs apart: their jobs' names, or their folders where jobs share one."""
    names = [line.name for line in lines]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def _is_run(path: Path) -> bool:
    return os.path.isfile(path / "job.yaml") and os.path.isfile(path / "metrics.jsonl")


def _open_folders(folder: Path) -> Iterator[Path]:
    """What lies in a folder; folders that cannot be looked into are told."""
    from eth_service.commands.common import tell

    for path in sorted(folder.iterdir()):
        if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK):
            tell(f"{path} cannot be looked into and is left out")
        else:
            yield path


@contextmanager
def _readable(what: Path) -> Iterator[None]:
    """UserError for files that cannot be read, of what was named."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or what} cannot be read: {error.strerror}; make it readable"
        ) from None


def _check_run(run: Path) -> None:
    if not _is_run(run):
        raise UserError(f"{run} is not a run folder: it holds no job.yaml and metrics.jsonl; name another")


def _line(run: Path, kept: list[Checkpoint] | None) -> RunLine:
    with _readable(run):
        return _read_line(run, kept)


def _read_line(run: Path, kept: list[Checkpoint] | None) -> RunLine:
    from actors.job import read_job
    from actors.metrics import data_wait_share
    from eth_service.run_files import read_summary
    from planner.plan import read_plan

    job, summary, rows = read_job(run / "job.yaml"), read_summary(run), _rows(run)
    plan = read_plan(run / "plan.json") if (run / "plan.json").exists() else None
    validation = (rows[-1].get("validation") if rows else None) or {}
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    counts = plan.cluster.counts.items() if plan else ()
    return RunLine(
        folder=str(run),
        name=job.name,
        model=job.model.name,
        devices=", ".join(f"{count} x {type_}" for type_, count in counts),
        state=summary.get("state", "unfinished"),
        iterations=rows[-1]["iteration"] if rows else 0,
        steps=job.training.steps,
        first_loss=losses[0] if losses else None,
        loss=losses[-1] if losses else None,
        validation_loss=validation.get("loss"),
        validation_perplexity=validation.get("perplexity"),
        iteration_seconds=summary.get("iteration_seconds"),
        samples_per_second=summary.get("samples_per_second"),
        data_wait_share=data_wait_share(rows[1:] or rows),
        checkpoints=None if kept is None else len(kept),
    )


def _listed(run: Path) -> RunLine | None:
    """A run among others; None, and a line that says why, if its files cannot be read."""
    from eth_service.commands.common import tell

    try:
        line = _line(run, None)
    except UserError as error:
        tell(f"{run} is left out: {error}")
        return None
    kept = _kept(run)
    return replace(line, checkpoints=None if kept is None else len(kept))


def _kept(run: Path) -> list[Checkpoint] | None:
    """A run's whole checkpoints, where its job has them; None, and a line that says why, if they cannot be looked at:
    other storage may be out of reach."""
    from actors.checkpoints import readable
    from actors.job import read_job
    from eth_service.commands.common import tell

    try:
        found, broken = readable(read_job(run / "job.yaml").checkpoint_folder(run))
    except UserError as error:
        tell(str(error))
        return None
    for line in broken:
        tell(line)
    return found


def _rows(run: Path) -> list[dict[str, Any]]:
    """Rows by iteration; those that a resumed run repeated count once."""
    from eth_service.run_files import MetricsFile

    return MetricsFile(run / "metrics.jsonl").rows(since=0, limit=10**9)


def _sampled(run: Path, *, most: int) -> list[dict[str, Any]]:
    rows = _rows(run)
    if len(rows) <= most:
        return rows
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _print(lines: list[RunLine], *, as_json: bool) -> None:
    if as_json:
        for line in lines:
            print(json.dumps(asdict(line)))
        return
    from eth_service.commands.common import console

    console().print(_table(lines))


def _table(lines: list[RunLine]) -> Table:
    from rich.table import Table

    from planner.units import format_seconds

    table = Table(pad_edge=False)
    for heading in (
        "Run",
        "Model",
        "Devices",
        "State",
        "Iterations",
        "Loss",
        "Validation",
        "Iteration",
        "Checkpoints",
    ):
        table.add_column(heading, overflow="fold")
    for line in lines:
        seconds = line.iteration_seconds
        table.add_row(
            line.folder,
            line.model,
            line.devices,
            line.state,
            f"{line.iterations}/{line.steps}",
            "" if line.first_loss is None else f"{_number(line.first_loss)} -> {_number(line.loss)}",
            "" if line.validation_loss is None else _number(line.validation_loss),
            "" if seconds is None else format_seconds(seconds),
            "unknown" if line.checkpoints is None else str(line.checkpoints),
        )
    return table
