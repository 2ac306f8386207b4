"""A cluster that a test moves by hand, and a run folder written as a driver writes it.

They stand in for Ray where the question is what the service makes of an answer; the tests of the real
thing are in test_serve.py and test_ray_jobs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.job import parse_job
from actors.run_folder import RunFolder
from eth_service.backend import AttemptReport, AttemptStatus, ClusterUnreachable, SubmissionRefused
from planner.catalogue import lookup
from planner.cluster import Cluster, DeviceCount, Node
from planner.plan import Plan, Predicted, PredictedPipeline, PredictedStage
from tests.plans import make_model, make_plan


class ClusterDouble:
    """A Backend whose submissions are entries of a dict that a test changes."""

    def __init__(self) -> None:
        self.reports: dict[str, AttemptReport] = {}
        self.commands: dict[str, list[str]] = {}
        self.outputs: dict[str, str] = {}
        self.stops: list[str] = []
        self.reachable = True
        self.refusal: str | None = None

    def check(self) -> None:
        if not self.reachable:
            raise ClusterUnreachable("the double is switched off")

    def submit(self, submission_id: str, command: Sequence[str]) -> None:
        self.check()
        if self.refusal is not None:
            raise SubmissionRefused(self.refusal)
        assert submission_id not in self.reports, f"{submission_id} was submitted twice"
        self.commands[submission_id] = list(command)
        self.reports[submission_id] = AttemptReport(AttemptStatus.PENDING)

    def report(self, submission_id: str) -> AttemptReport:
        self.check()
        return self.reports.get(submission_id, AttemptReport(AttemptStatus.UNKNOWN))

    def stop(self, submission_id: str) -> None:
        self.check()
        self.stops.append(submission_id)

    def output(self, submission_id: str) -> str:
        self.check()
        return self.outputs.get(submission_id, "")

    def set(self, submission_id: str, status: AttemptStatus, message: str = "") -> None:
        self.reports[submission_id] = AttemptReport(status, message)


def job_values(**changes: Any) -> dict[str, Any]:
    """A job file that needs nothing but itself."""
    values: dict[str, Any] = {
        "name": "double",
        "model": "gpt3-nano",
        "data": {"path": "python-stdlib"},
        "training": {"global_batch_size": 6, "sequence_length": 32, "steps": 20},
        "cluster": {"nodes": [{"devices": [{"type": "910B2", "count": 3}], "emulate": True}]},
    }
    return values | changes


def example_plan() -> Plan:
    """Two unlike pipelines on three emulated devices, with a prediction."""
    kinds = (("910B2", 2), ("910B4", 1))
    devices = tuple(DeviceCount(type=kind, count=count) for kind, count in kinds)
    cluster = Cluster(
        device_types={kind: lookup(kind)[1] for kind, _ in kinds},
        nodes=(Node(name="node0", devices=devices, emulate=True),),
    )
    plan = make_plan(
        make_model(layers=2), [[(1, 1, 1), (1, 1, 1)], [(1, 1, 2)]], cluster=cluster, samples=(4, 2)
    )
    pipelines = tuple(_priced(len(pipeline.stages)) for pipeline in plan.pipelines)
    predicted = Predicted(iteration_seconds=0.5, samples_per_second=12.0, pipelines=pipelines)
    return plan.model_copy(update={"predicted": predicted})


def _priced(stages: int) -> PredictedPipeline:
    stage = PredictedStage(
        forward_seconds=0.05, backward_seconds=0.1, exchange_seconds=0.0, all_reduce_seconds=0.01,
        end_seconds=0.4, tensor_bytes=1 << 20, device_bytes=1 << 21, memory_limit_bytes=1 << 30,
    )  # fmt: skip
    return PredictedPipeline(end_seconds=0.4, stages=(stage,) * stages)


class DriverDouble:
    """Writes a run folder step by step, with the real driver's own RunFolder."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self.plan = example_plan()

    def make_plan(self) -> None:
        self.folder.create()
        self.folder.write_job(parse_job(job_values(), base=Path("/")))
        self.folder.write_plan(self.plan)

    def iterate(self, iteration: int, *, loss: float = 2.0, validated: int | None = None) -> None:
        """`validated` is the iteration that the latest evaluation followed."""
        row = metrics_row(iteration, loss=loss)
        if validated is not None:
            row["validation"] = {"iteration": validated, "loss": 2.5, "perplexity": 12.18, "tokens": 64}
        self.folder.append_metrics(row)

    def end(self, state: str, *, failure: str | None = None) -> None:
        self.folder.write_summary({"state": state, "failure": failure})


def metrics_row(iteration: int, *, loss: float = 2.0) -> dict[str, Any]:
    """A row as actors.metrics makes it, of the example plan."""
    pipelines = [
        {"id": 0, "samples": 4, "samples_per_second": 6.5, "tokens_per_second": 208.0, "end_seconds": 0.45},
        {"id": 1, "samples": 2, "samples_per_second": 3.25, "tokens_per_second": 104.0, "end_seconds": 0.44},
    ]
    return {
        "iteration": iteration,
        "loss": loss,
        "iteration_seconds": 0.62,
        "data_wait_seconds": 0.0155,
        "samples_per_second": 9.75,
        "tokens_per_second": 312.0,
        "pipelines": pipelines,
        "emulated": True,
    }
