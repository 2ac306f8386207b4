"""Predicts 15 measured training runs on GH200 nodes from the imported operator profile of that device.

Hardware truth for the cost model: every run of the table becomes a Plan, priced by the product's own cost
model with the imported profile and links. Nothing but one factor on the operators' seconds is ever fitted to
the runs; beside its error stands the leave-one-out error, each run predicted with the factor of the others.

The runs are priced with whole rows sent from each TP rank to its peer, as pipelines of one TP degree are wont to
do; `--exchange cheaper` prices them as this project's engine would exchange, in slices where the links make that
quicker.

Two things about the profile have to be read one way or the other, and all four readings are shown:
- dropout: the profile's operators ran with it. The runs' memory grows by 3.1 GiB a sample, which leaves no
  room for the mask and output of attention dropout (4.9 GiB a sample with them), so the runs had none.
- launch: an operator timed alone takes some 35 us even with next to no work (the same time for twice the
  samples), which a training run hides. That time is read from the profile, not fitted.

One JSON line last. Skipped where the shared folder of profiles is absent.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import minimize_scalar

from planner.cluster import Cluster, from_short_form
from planner.cost.exchange import WAYS, Way
from planner.cost.price import price_plan
from planner.model_spec import PRESETS, ModelSpec
from planner.plan import Dtypes, PipelinePlan, Plan, Predicted, StagePlan
from planner.profile.calibration import launch_seconds
from planner.profile.file import Calibration, DeviceProfile
from planner.profile.importers import import_folder
from planner.profile.links import LinkSource, links_from_profiles
from planner.profile.measured import MeasuredProfile
from planner.simulate import simulate
from planner.units import format_bytes, format_seconds

PROFILES = Path(__file__).resolve().parents[1].parent / "shared" / "profiles" / "gh-96"
RUNS = "measured_runs_opt-350.csv"
DEVICES_PER_NODE = 4
SEQUENCE_LENGTH = 2048
TARGET = 0.08
KINDS = ("plain", "calibrated", "leave_one_out")


@dataclass(frozen=True)
class Run:
    """One measured training run, as its row tells it."""

    name: str
    units: tuple[int, ...]
    dp: int
    tp: int
    micro_batch_size: int
    global_batch_size: int
    iteration_seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class Outcome:
    run: Run
    predicted: Predicted
    simulated_seconds: float

    @property
    def error(self) -> float:
        return self.predicted.iteration_seconds / self.run.iteration_seconds - 1

    @property
    def memory_bytes(self) -> int:
        """Of the fullest device; the runs recorded what the device had given out, so `device_bytes`."""
        return max(s.device_bytes for p in self.predicted.pipelines for s in p.stages)

    @property
    def memory_error(self) -> float:
        return self.memory_bytes / self.run.memory_bytes - 1


def read_runs(path: Path) -> list[Run]:
    runs = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            degrees = {int(dp) for dp in row["dp_per_stage"].split()}
            assert len(degrees) == 1, row
            runs.append(
                Run(
                    name=row["name"],
                    units=tuple(map(int, row["units_per_stage"].split())),
                    dp=degrees.pop(),
                    tp=int(row["tp"]),
                    micro_batch_size=int(row["micro_batch_size"]),
                    global_batch_size=int(row["global_batch_size"]),
                    iteration_seconds=float(row["iteration_seconds"]),
                    memory_bytes=int(row["max_memory_bytes"]),
                )
            )
    return runs


def make_cluster(nodes: int) -> Cluster:
    return from_short_form(f"{nodes}x{DEVICES_PER_NODE}:GH200")


def make_plan(run: Run, model: ModelSpec, profile: MeasuredProfile) -> tuple[Plan, tuple[LinkSource, ...]]:
    """The run as a Plan: one pipeline, a node a replica; links measured with the profile.

    A row's micro-batch is a replica's, the Plan's is the pipeline's. Units count the embedding and the head.
    """
    cluster = make_cluster(len(run.units) * run.dp * run.tp // DEVICES_PER_NODE)
    links, sources = links_from_profiles(cluster.links, profile.profiles, precision="fp32")
    cluster = cluster.model_copy(update={"links": links})
    devices = [device.id for device in cluster.devices]
    stages, layer = [], 0
    for number, units in enumerate(run.units):
        first, last = number == 0, number == len(run.units) - 1
        layers = units - first - last
        per_stage = run.dp * run.tp
        stages.append(
            StagePlan(
                devices=tuple(devices[number * per_stage : (number + 1) * per_stage]),
                tp=run.tp,
                dp=run.dp,
                rows=(run.micro_batch_size,) * run.dp,
                layers=(layer, layer + layers),
                embedding=first,
                head=last,
            )
        )
        layer += layers
    pipeline = PipelinePlan(
        id=0,
        micro_batch_size=run.micro_batch_size * run.dp,
        samples=run.global_batch_size,
        local_batch_size=run.global_batch_size,
        stages=tuple(stages),
    )
    plan = Plan(
        model=model,
        cluster=cluster,
        global_batch_size=run.global_batch_size,
        sequence_length=SEQUENCE_LENGTH,
        dtypes=Dtypes.for_precision("fp32"),
        pipelines=(pipeline,),
    )
    return plan, sources


@dataclass(frozen=True)
class Reading:
    """One way to read the profile."""

    dropout: bool
    launch_seconds: float

    @property
    def title(self) -> str:
        dropout = "dropout on" if self.dropout else "dropout off"
        launch = (
            f"{self.launch_seconds * 1e6:.0f} us of launch off"
            if self.launch_seconds
            else "times as they are"
        )
        return f"{dropout}, {launch}"


class Predictor:
    """All runs predicted under one reading, as a function of the calibration factor."""

    def __init__(
        self, runs: Sequence[Run], profile: DeviceProfile, reading: Reading, ways: Sequence[Way]
    ) -> None:
        self.runs = runs
        self.reading = reading
        self.ways = ways
        self.model = PRESETS["gpt3-350m"].model_copy(update={"dropout": 0.1 if reading.dropout else 0.0})
        self.table = MeasuredProfile(self.model, {"GH200": profile}, make_cluster(1).device_types)
        self.measured = np.array([run.iteration_seconds for run in runs])
        # A price is piecewise linear in the factor: exact at these, straight lines between.
        self._factors = np.linspace(0.5, 2.0, 16)
        self._prices = np.array(
            [[o.predicted.iteration_seconds for o in self.outcomes(float(f))] for f in self._factors]
        )

    def outcomes(self, factor: float) -> list[Outcome]:
        """Every run priced exactly."""
        calibration = Calibration(factor=factor, launch_seconds=self.reading.launch_seconds)
        table = self.table.calibrated("GH200", calibration)
        found = []
        for run in self.runs:
            plan, _ = make_plan(run, self.model, table)
            replayed = simulate(plan, profile=table, ways=self.ways, events=False).iteration_seconds
            found.append(Outcome(run, price_plan(plan, profile=table, ways=self.ways), replayed))
        return found

    def seconds(self, factor: float) -> np.ndarray:
        return np.array([np.interp(factor, self._factors, self._prices[:, i]) for i in range(len(self.runs))])

    def best_factor(self, kept: np.ndarray | None = None) -> float:
        """The factor of least mean absolute relative error over all runs, or over those kept."""
        kept = np.ones(len(self.runs), dtype=bool) if kept is None else kept

        def error(factor: float) -> float:
            return float(np.mean(np.abs(self.seconds(factor) / self.measured - 1)[kept]))

        # The error is convex in pieces only, so a grid finds the valley and a search its floor.
        grid = np.linspace(0.6, 1.9, 131)
        near = float(grid[int(np.argmin([error(float(factor)) for factor in grid]))])
        return float(minimize_scalar(error, bounds=(near - 0.01, near + 0.01), method="bounded").x)

    def leave_one_out(self) -> np.ndarray:
        """Error of each run with the factor fitted on all others."""
        errors = []
        for index in range(len(self.runs)):
            kept = np.arange(len(self.runs)) != index
            errors.append(self.seconds(self.best_factor(kept))[index] / self.measured[index] - 1)
        return np.array(errors)


def summary(predictor: Predictor) -> dict[str, float | bool]:
    """Mean and worst absolute error: plain, with one factor, leave-one-out."""
    factor = predictor.best_factor()
    found: dict[str, float | bool] = {
        "dropout": predictor.reading.dropout,
        "launch_us": round(predictor.reading.launch_seconds * 1e6, 1),
        "factor": round(factor, 4),
    }
    errors = {
        "plain": predictor.seconds(1.0) / predictor.measured - 1,
        "calibrated": predictor.seconds(factor) / predictor.measured - 1,
        "leave_one_out": predictor.leave_one_out(),
    }
    for name, values in errors.items():
        found[f"{name}_mean_error"] = round(float(np.abs(values).mean()), 4)
        found[f"{name}_worst_error"] = round(float(np.abs(values).max()), 4)
    return found


def show(title: str, outcomes: Sequence[Outcome]) -> None:
    print(f"\n{title}")
    print(f"{'run':<14} {'measured':>9} {'predicted':>9} {'error':>7} {'replayed':>9}  ", end="")
    print(f"{'memory':>9} {'predicted':>9} {'error':>7}")
    for outcome in outcomes:
        run = outcome.run
        print(
            f"{run.name:<14} {run.iteration_seconds:>8.3f}s {outcome.predicted.iteration_seconds:>8.3f}s"
            f" {outcome.error:>+7.1%} {outcome.simulated_seconds:>8.3f}s  {format_bytes(run.memory_bytes):>9}"
            f" {format_bytes(outcome.memory_bytes):>9} {outcome.memory_error:>+7.1%}"
        )
    times = [abs(outcome.error) for outcome in outcomes]
    memory = [abs(outcome.memory_error) for outcome in outcomes]
    print(
        f"mean absolute error {np.mean(times):.1%}, worst {max(times):.1%};"
        f" memory {np.mean(memory):.1%}, worst {max(memory):.1%}"
    )


def show_links(sources: Sequence[LinkSource]) -> None:
    for source in sources:
        link = source.link
        fitted = "" if source.worst_error is None else f", fitted within {source.worst_error:.0%}"
        print(
            f"{source.scope}: {link.bandwidth / 1e9:.1f} GB/s, {format_seconds(link.latency)}"
            f" ({source.source}{fitted})"
        )


def show_readings(summaries: Sequence[dict[str, float | bool]]) -> None:
    print("\nMean / worst absolute error by reading of the profile")
    columns = ("no factor", "one factor", "leave-one-out")
    print(f"{'dropout':>7} {'launch':>8} {'factor':>7}" + "".join(f" {column:>15}" for column in columns))
    for row in summaries:
        cells = [f"{row[f'{name}_mean_error']:.1%} / {row[f'{name}_worst_error']:.1%}" for name in KINDS]
        print(
            f"{'on' if row['dropout'] else 'off':>7} {row['launch_us']:>5} us {row['factor']:>7.3f}"
            + "".join(f" {cell:>15}" for cell in cells)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", type=Path, default=PROFILES, help="folder of the GH-96 profile")
    parser.add_argument("--exchange", choices=("whole", "cheaper"), default="whole", help="between stages")
    arguments = parser.parse_args()
    folder: Path = arguments.profiles
    ways: tuple[Way, ...] = ("whole",) if arguments.exchange == "whole" else WAYS
    if not (folder / RUNS).is_file():
        print(f"{folder / RUNS} is absent: nothing to compare with")
        print(json.dumps({"benchmark": "predict_gh200", "skipped": True}))
        return
    profile = import_folder(folder, device_type="GH200")[0].profile
    launch = launch_seconds(profile)
    runs = read_runs(folder / RUNS)
    predictors = [
        Predictor(runs, profile, Reading(dropout, seconds), ways)
        for dropout in (True, False)
        for seconds in (0.0, launch)
    ]
    as_imported, chosen = predictors[0], predictors[-1]
    show_links(make_plan(runs[0], chosen.model, chosen.table)[1])
    show(f"Without calibration ({as_imported.reading.title})", as_imported.outcomes(1.0))
    factor = chosen.best_factor()
    show(f"With one factor of {factor:.3f} ({chosen.reading.title})", chosen.outcomes(factor))
    summaries = [summary(predictor) for predictor in predictors]
    show_readings(summaries)
    memory = [abs(outcome.memory_error) for outcome in chosen.outcomes(1.0)]
    result = {
        "benchmark": "predict_gh200",
        "runs": len(runs),
        "exchange": arguments.exchange,
        "mean_error": summaries[-1]["calibrated_mean_error"],
        "worst_error": summaries[-1]["calibrated_worst_error"],
        "leave_one_out_mean_error": summaries[-1]["leave_one_out_mean_error"],
        "uncalibrated_mean_error": summaries[0]["plain_mean_error"],
        "memory_mean_error": round(float(np.mean(memory)), 4),
        "memory_worst_error": round(max(memory), 4),
        "target_mean_error": TARGET,
        "readings": summaries,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
