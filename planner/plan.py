"""Plan: the contract between planner, actors, dashboard and outside tools."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from planner.cluster import Cluster
from planner.errors import Contract, UserError, parse, read_yaml
from planner.model_spec import ModelSpec
from planner.plan_check import check_plan

Precision = Literal["fp32", "bf16", "fp16"]
GradientSync = Literal["block", "tensor", "device"]
# Local batches are handed out one by one; a larger number is a slip of the pen and would take for ever.
MAX_GLOBAL_BATCH_SIZE = 1_000_000


class Dtypes(Contract):
    """Precision of parameters, of gradients in the buffer, of gradients on the wire, of optimizer state."""

    param: Precision = "bf16"
    grad: Precision = "fp32"
    wire: Precision = "fp32"
    optimizer: Precision = "fp32"

    @classmethod
    def for_precision(cls, precision: Precision) -> Dtypes:
        """fp32 master weights, gradients and optimizer state, whatever the parameters' precision."""
        return cls(param=precision)


class StagePlan(Contract):
    """One stage: `devices` are row-major [dp][tp]; `layers` is half open; `rows` sums to the micro-batch."""

    devices: tuple[str, ...] = Field(min_length=1)
    tp: int = Field(ge=1)
    dp: int = Field(ge=1)
    rows: tuple[int, ...]
    layers: tuple[int, int]
    embedding: bool = False
    head: bool = False
    sequence_parallel: bool = False
    recompute: dict[str, int] = Field(default_factory=dict)

    @property
    def layer_count(self) -> int:
        return self.layers[1] - self.layers[0]

    def tp_group(self, replica: int) -> tuple[str, ...]:
        """Devices of one DP replica."""
        return self.devices[replica * self.tp : (replica + 1) * self.tp]

    def row_range(self, replica: int) -> tuple[int, int]:
        """Half-open range of the micro-batch's rows that a DP replica takes."""
        start = sum(self.rows[:replica])
        return start, start + self.rows[replica]


class PipelinePlan(Contract):
    """One independent pipeline. `local_batch_size` is `samples` rounded up to whole micro-batches."""

    id: int = Field(ge=0)
    schedule: Literal["1f1b"] = "1f1b"
    micro_batch_size: int = Field(ge=1)
    samples: int = Field(ge=1)
    local_batch_size: int = Field(ge=1)
    stages: tuple[StagePlan, ...] = Field(min_length=1)

    @property
    def micro_batches(self) -> int:
        return self.local_batch_size // self.micro_batch_size

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(device for stage in self.stages for device in stage.devices)


class PredictedStage(Contract):
    """Seconds for one micro-batch of the slowest replica; bytes of the fullest device of the stage.

    `exchange_seconds` is the part of forward and backward spent receiving from neighbours;
    `recompute_seconds` the part of backward spent replaying operators; `all_reduce_seconds` is when the
    stage's last gradient block ends, after its own last backward.
    """

    forward_seconds: float
    backward_seconds: float
    exchange_seconds: float
    recompute_seconds: float = 0.0
    all_reduce_seconds: float
    end_seconds: float
    tensor_bytes: int
    device_bytes: int
    memory_limit_bytes: int


class PredictedPipeline(Contract):
    end_seconds: float
    stages: tuple[PredictedStage, ...]


class Bound(Contract):
    """What the lower bound bounds: the price it is a bound of, and what was relaxed to get it."""

    price: Literal["eq5", "replay"] = "eq5"
    relaxations: tuple[str, ...] = ()


class CollectiveSources(Contract):
    """How many collectives (calls of gradients, or stages with TP) were priced by what: measured times, the
    link formula, or not at all since the profile's operators include them."""

    measured: int = 0
    links: int = 0
    operators: int = 0


class Predicted(Contract):
    """The price of a plan: Eq. 5 plus gradient blocks; `simulated_seconds` is the event simulator's.

    Costs are of the devices used, where all have a price; a plan for the objective cost has a bound of its
    cost in place of one of its time.
    """

    iteration_seconds: float
    simulated_seconds: float | None = None
    samples_per_second: float
    lower_bound_seconds: float | None = None
    bound: Bound | None = None
    cost_per_million_tokens: float | None = None
    lower_bound_cost_per_million_tokens: float | None = None
    optimizer_seconds: float = 0.0
    gather_seconds: float = Field(
        default=0.0, description="after the optimizer's step on shards (ZeRO): gathering the parameters"
    )
    gradient_collectives: CollectiveSources | None = None
    tp_collectives: CollectiveSources | None = None
    pipelines: tuple[PredictedPipeline, ...]


class ProfileSource(Contract):
    """Which profile priced the plan."""

    type: str
    sha256: str
    provenance: Literal["measured", "analytic", "imported"]


class PlanEmulation(Contract):
    """How an emulated run stretches the devices: one emulated device second lasts `time_scale` wall
    seconds; one host byte of tensors counts as `memory_scale` device bytes. A part of the plan because
    memory decides what fits."""

    time_scale: float = Field(default=1.0, gt=0)
    memory_scale: float = Field(default=1.0, gt=0)


@dataclass(frozen=True)
class RankPlace:
    """Where a rank sits: ranks follow pipelines, stages, devices (row-major [dp][tp])."""

    rank: int
    device: str
    pipeline: int
    stage: int
    replica: int
    tp_rank: int


class Plan(Contract):
    """A complete configuration of one training job. Validation raises one line for the first problem."""

    version: Literal[1] = 1
    strategy: str = "eth"
    objective: Literal["time", "cost"] = "time"
    model: ModelSpec
    cluster: Cluster
    global_batch_size: int = Field(ge=1, le=MAX_GLOBAL_BATCH_SIZE)
    sequence_length: int = Field(ge=1)
    dtypes: Dtypes = Dtypes()
    zero_stage: Literal[0, 1, 2] = 0
    zero_scope: Literal["all", "pipeline"] = "all"
    gradient_sync: GradientSync = "block"
    overlap: bool | None = Field(
        default=None,
        description="gradients are synchronised while the last backward goes on; null leaves it to the job,"
        " and is priced as after it",
    )
    idle_devices: tuple[str, ...] = ()
    emulation: PlanEmulation = PlanEmulation()
    profiles: tuple[ProfileSource, ...] = ()
    pipelines: tuple[PipelinePlan, ...] = Field(min_length=1)
    predicted: Predicted | None = None
    search: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> Plan:
        check_plan(self)
        return self

    @cached_property
    def ranks(self) -> tuple[RankPlace, ...]:
        """Every rank of the job, in rank order."""
        return tuple(self._places())

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def sample_ranges(self) -> list[tuple[int, int]]:
        """Half-open range of the global batch that each pipeline takes, in plan order."""
        ranges, start = [], 0
        for pipeline in self.pipelines:
            ranges.append((start, start + pipeline.samples))
            start += pipeline.samples
        return ranges

    def fingerprint(self) -> str:
        """Hash of all that decides how the plan runs; predictions and search statistics left out."""
        content = self.model_dump_json(exclude={"predicted", "search"})
        return hashlib.sha256(content.encode()).hexdigest()

    def _places(self) -> Iterator[RankPlace]:
        rank = 0
        for index, pipeline in enumerate(self.pipelines):
            for number, stage in enumerate(pipeline.stages):
                for position, device in enumerate(stage.devices):
                    replica, tp_rank = divmod(position, stage.tp)
                    yield RankPlace(rank, device, index, number, replica, tp_rank)
                    rank += 1


def read_plan(path: Path) -> Plan:
    """A Plan from a JSON or YAML file; UserError with one line per problem."""
    data = read_yaml(path, what="plan")
    if not isinstance(data, dict):
        raise UserError(f"plan file {path} holds no mapping; write one as `eth plan --json` does")
    return parse(Plan, data, source=str(path))
