"""Job: what a user submits. The contract between files, command line, REST service and driver."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from actors.data_settings import Data, TextSource, placed
from actors.named_model import named_model
from actors.storage import StoragePath, storage_path
from planner.cluster import Cluster, Links, resolve_cluster
from planner.errors import Contract, UserError, parse, read_yaml
from planner.model_spec import ModelSpec
from planner.plan import MAX_GLOBAL_BATCH_SIZE, GradientSync, Plan, Precision, read_plan
from planner.units import Seconds, parse_seconds

# A week. Process groups cannot count much longer times.
MAX_TIMEOUT_SECONDS = 7 * 24 * 3600


class Optimizer(Contract):
    """AdamW with decoupled weight decay, or SGD with momentum; norms and biases do not decay."""

    name: Literal["adamw", "sgd"] = "adamw"
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="of adamw")
    epsilon: float = Field(default=1e-8, gt=0, description="of adamw")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of sgd")
    weight_decay: float = Field(default=0.1, ge=0)

    @model_validator(mode="after")
    def _only_its_own(self) -> Self:
        foreign = {"adamw": ("momentum",), "sgd": ("betas", "epsilon")}[self.name]
        for field in foreign:
            # A job that was written out holds every field: what is as it comes says nothing.
            if getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(
                    f"{field} is not an option of {self.name}; remove it or choose the other optimizer"
                )
        return self

    @field_validator("betas")
    @classmethod
    def _betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"betas = {value}: both must be at least 0 and below 1")
        return value


class LearningRate(Contract):
    """Linear warm-up to `peak`, then `schedule` down to `minimum` at the last step.

    `wsd` (warm-up, stable, decay) stays at the peak and goes down linearly over the last `decay_steps`.
    """

    peak: float = Field(gt=0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    decay_steps: int | None = Field(default=None, ge=1, description="of wsd")
    minimum: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _decay(self) -> Self:
        if (self.schedule == "wsd") != (self.decay_steps is not None):
            raise ValueError(
                f"decay_steps = {self.decay_steps} with schedule = {self.schedule!r}: wsd needs decay_steps, the"
                " other schedules have none"
            )
        return self

    def at(self, iteration: int, *, steps: int) -> float:
        """Rate of an iteration counted from 1."""
        if iteration <= self.warmup_steps:
            return self.peak * iteration / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        # Iteration `steps` is the last, and the first to reach the minimum.
        begin = (
            self.warmup_steps
            if self.decay_steps is None
            else max(self.warmup_steps, steps - self.decay_steps)
        )
        done = max(0.0, (iteration - begin) / max(1, steps - begin))
        left = 0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1 - done
        return self.minimum + (self.peak - self.minimum) * max(0.0, left)


class Training(Contract):
    global_batch_size: int = Field(ge=1, le=MAX_GLOBAL_BATCH_SIZE, description="samples an iteration")
    sequence_length: int = Field(ge=1, description="tokens a sample")
    steps: int = Field(ge=1, description="iterations")
    seed: int = Field(default=0, ge=0, lt=2**63)
    optimizer: Optimizer = Optimizer()
    learning_rate: LearningRate = LearningRate(peak=3e-4)
    precision: Precision = "fp32"
    gradient_clip: float | None = Field(default=1.0, gt=0, description="largest global norm; null for none")

    @field_validator("learning_rate", mode="before")
    @classmethod
    def _bare_number(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return {"peak": value}
        if not isinstance(value, Mapping | LearningRate):
            raise ValueError(
                f"learning_rate = {value!r}: write a number, or a mapping with peak and schedule"
            )
        return value


class Runtime(Contract):
    """How the plan is executed. `timeout_seconds` bounds every wait for a peer.

    A job that brings its own plan takes from it what this section does not state.
    """

    gradient_sync: GradientSync = Field(default="block", description="what one collective of gradients takes")
    wire_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="precision in which gradients travel; they are summed and kept in fp32"
    )
    overlap: bool = Field(
        default=True, description="synchronise gradients while the last micro-batch's backward goes on"
    )
    deterministic: bool = Field(
        default=False, description="refuse operations whose result may differ from run to run"
    )
    timeout_seconds: Seconds = Field(default=60.0, gt=0, le=MAX_TIMEOUT_SECONDS)
    on_nan: Literal["stop", "skip", "continue"] = Field(
        default="stop",
        description="an iteration whose loss or gradient is not finite: fail, skip its update, go on",
    )


class Checkpointing(Contract):
    """When the state of training is saved, to go on from later (`eth train --resume`)."""

    every: int | str | None = Field(
        default=None, description="iterations (a number) or time (`10 min`) between two saves; null: none"
    )
    keep: int = Field(default=2, ge=1, description="how many of the newest stay")
    keep_best: int = Field(
        default=0,
        ge=0,
        description="how many of the lowest loss stay besides; with evaluation each is evaluated when it is saved",
    )
    on_stop: bool = Field(
        default=True, description="save also when the run is stopped, before it ends; needs `every`"
    )
    directory: str | None = Field(
        default=None,
        min_length=1,
        description="folder for checkpoints, or its URL (`s3://bucket/folder`); the run folder's `checkpoints`"
        " unless given",
    )

    @field_validator("every", mode="before")
    @classmethod
    def _iterations_or_time(cls, value: Any) -> Any:
        # Before the types are checked: a union would answer with a line for each of them.
        if isinstance(value, str):
            seconds = parse_seconds(value)
            good = isinstance(seconds, float) and 0 < seconds < math.inf
        else:
            good = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
        if not good:
            raise ValueError(
                f"every = {value!r} must be a number of iterations, 1 or more, or a time such as '10 min'"
            )
        return value

    @property
    def every_seconds(self) -> float | None:
        """Seconds between two saves, where a time was given."""
        if not isinstance(self.every, str):
            return None
        seconds = parse_seconds(self.every)
        assert isinstance(seconds, float)
        return seconds


class Evaluation(Contract):
    """When the loss of held-out samples is measured while training goes on; it changes nothing of training."""

    every: int | None = Field(
        default=None,
        ge=1,
        description="iterations between two evaluations, the last step besides; null: none",
    )
    samples: int = Field(default=256, ge=1, description="how many held-out samples, if there are so many")

    def due(self, iteration: int, *, steps: int) -> bool:
        """Whether to evaluate after an iteration, counted from 1, of so many."""
        return self.every is not None and (iteration % self.every == 0 or iteration == steps)


class Emulation(Contract):
    """Emulated devices: `time_scale` wall seconds stand for one device second (`auto` picks the least
    that the host can keep up with); a byte measured on the host counts as `memory_scale` device bytes;
    `links` replaces the cluster's links, for example to keep a tiny model's ratio of compute to traffic
    that of a large one."""

    time_scale: Literal["auto"] | float = "auto"
    memory_scale: float = Field(default=1.0, gt=0)
    links: Links | None = None

    @field_validator("time_scale", mode="before")
    @classmethod
    def _positive(cls, value: Any) -> Any:
        # Before the types are checked: a union would answer with a line for each of them.
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value != "auto" and not (number and 0 < value < math.inf):
            raise ValueError(f"time_scale = {value!r} must be a number above 0, or auto")
        return value


class Job(Contract):
    """One training job. Relative paths start at the job file's folder (`base`)."""

    version: Literal[1] = 1
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    model: ModelSpec
    weights: str | None = Field(
        default=None,
        min_length=1,
        description="first values of the parameters: a Hugging Face folder, a run folder, its"
        " weights.safetensors or one of its checkpoints, by path or URL (`s3://bucket/folder`); null draws"
        " them by the seed",
    )
    data: Data
    training: Training
    cluster: Literal["auto"] | Cluster = "auto"
    plan: Literal["auto"] | Plan = "auto"
    strategy: str = "eth"
    zero_stages: tuple[Literal[0, 1, 2], ...] = Field(
        default=(0, 1, 2), min_length=1, description="ZeRO stages that a searched plan may use"
    )
    runtime: Runtime = Runtime()
    checkpoint: Checkpointing = Checkpointing()
    evaluation: Evaluation = Evaluation()
    emulation: Emulation | None = None

    _base: Path = PrivateAttr(default=Path())

    @field_validator("strategy")
    @classmethod
    def _known(cls, value: str) -> str:
        # Asked here, before anything is started for the job.
        from planner.search import strategy_named

        strategy_named(value)
        return value

    @model_validator(mode="after")
    def _agree(self) -> Job:
        if self.training.sequence_length > self.model.max_sequence_length:
            raise ValueError(
                f"training.sequence_length = {self.training.sequence_length} is more than the model's"
                f" max_sequence_length = {self.model.max_sequence_length}; shorten it"
            )
        if self.evaluation.every is not None and self.data.held_out == 0:
            raise ValueError(
                f"evaluation.every = {self.evaluation.every}, but nothing is held out to evaluate on; set"
                " data.held_out to a share such as 0.01, or to another text"
            )
        if self.emulation is not None and isinstance(self.cluster, Cluster) and not self.cluster.emulated:
            raise ValueError("emulation is given, but no node of the cluster says emulate: true")
        if isinstance(self.plan, Plan):
            self._agree_with_plan(self.plan)
        elif 0 not in self.zero_stages and self.runtime.gradient_sync != "block":
            raise ValueError(
                f"zero_stages = {list(self.zero_stages)}: runtime.gradient_sync = {self.runtime.gradient_sync!r}"
                " shares nothing among ranks; set it to block, or add 0 to zero_stages"
            )
        return self

    def _agree_with_plan(self, plan: Plan) -> None:
        stated = [
            ("model", self.model, plan.model),
            ("training.global_batch_size", self.training.global_batch_size, plan.global_batch_size),
            ("training.sequence_length", self.training.sequence_length, plan.sequence_length),
            ("training.precision", self.training.precision, plan.dtypes.param),
            *self._stated_runtime(plan),
        ]
        if isinstance(self.cluster, Cluster):
            stated.append(("cluster", self.cluster, plan.cluster))
        if "zero_stages" in self.model_fields_set and plan.zero_stage not in self.zero_stages:
            raise ValueError(
                f"zero_stages = {list(self.zero_stages)} leaves out the plan's zero_stage = {plan.zero_stage};"
                " make them agree, or use plan: auto"
            )
        for field, mine, planned in stated:
            if mine != planned:
                shown = "" if not isinstance(mine, str | int) else f" = {mine} (the plan says {planned})"
                raise ValueError(
                    f"{field}{shown} differs from the plan's; make them agree, or use plan: auto"
                )

    def _stated_runtime(self, plan: Plan) -> Iterator[tuple[str, str | bool, str | bool | None]]:
        """What the job states of the plan's own fields: (field, the job's value, the plan's)."""
        runtime = self.runtime
        stated = runtime.model_fields_set
        if "gradient_sync" in stated:
            yield "runtime.gradient_sync", runtime.gradient_sync, plan.gradient_sync
        if "wire_dtype" in stated:
            yield "runtime.wire_dtype", runtime.wire_dtype, plan.dtypes.wire
        if "overlap" in stated and plan.overlap is not None:
            yield "runtime.overlap", runtime.overlap, plan.overlap

    @property
    def base(self) -> Path:
        """Folder that relative paths start at."""
        return self._base

    def texts(self) -> tuple[TextSource, ...]:
        """What is trained on, where it lies: one text, or those of the mixture."""
        return self.data.sources(self.base)

    def held_out_text(self) -> TextSource | None:
        """What is validated with, if it is a text of its own."""
        held_out = self.data.held_out
        if isinstance(held_out, float):
            return None
        return self.data.source(self.base, held_out, field="data.held_out")

    def placed(self, path: str) -> Path:
        """A path of the data section from anywhere."""
        return placed(self.base, path)

    def weights_path(self) -> StoragePath | None:
        """Where the first values come from. UserError for a URL that cannot be it."""
        if self.weights is None or "://" not in self.weights:
            return None if self.weights is None else Path(self.base, self.weights).expanduser()
        return storage_path(self.weights, base=self.base, field="weights")

    def checkpoint_folder(self, run_folder: Path) -> StoragePath:
        """Where the checkpoints of a run lie. UserError for a URL that cannot be it."""
        if self.checkpoint.directory is None:
            return run_folder / "checkpoints"
        return storage_path(self.checkpoint.directory, base=self.base, field="checkpoint.directory")


def parse_job(data: object, *, base: Path, source: str = "job") -> Job:
    """A Job from decoded YAML/JSON. `model`, `cluster` and `plan` may be names or files under `base`.

    Raises UserError: one line that names the field, the value and the remedy.
    """
    if not isinstance(data, dict):
        raise UserError(f"{source}: a job is a mapping with name, model, data and training")
    filled = dict(data)
    if "model" in filled:
        filled["model"] = named_model(filled["model"], base=base)
    if filled.get("cluster", "auto") != "auto":
        filled["cluster"] = resolve_cluster(filled["cluster"], base=base)
    if filled.get("plan", "auto") != "auto":
        filled["plan"] = _resolve_plan(filled["plan"], base=base)
    job = parse(Job, filled, source=source)
    job._base = base
    return job


def _resolve_plan(value: object, *, base: Path) -> Plan:
    if isinstance(value, Plan):
        return value
    if isinstance(value, Mapping):
        return parse(Plan, value, source="plan")
    if not isinstance(value, str):
        raise UserError(f"plan = {value!r}: write auto, a file or a mapping")
    return read_plan(base / value)


def read_job(path: Path) -> Job:
    """The Job in a YAML or JSON file."""
    return parse_job(read_yaml(path, what="job"), base=path.resolve().parent, source=str(path))
