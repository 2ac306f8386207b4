"""What the REST service answers with. Requests are the job file itself (`actors.job.Job`)."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from eth_service.states import JobState
from planner.plan import Plan, Predicted


class ValidationFigures(BaseModel):
    """What an evaluation of held-out samples found."""

    model_config = ConfigDict(extra="allow")

    iteration: int = Field(description="the one that it followed")
    loss: float | None = Field(
        description="mean cross-entropy of a counted token, in nats; null if not finite"
    )
    perplexity: float | None = Field(description="exp(loss)")
    samples: int | None = None
    tokens: int | None = None
    seconds: float | None = Field(default=None, description="device seconds")


class JobSummary(BaseModel):
    """One line of the job list."""

    id: str = Field(description="sorts by time of submission")
    name: str
    state: JobState
    reason: str = Field(description="why the job is in this state")
    note: str | None = Field(description="what the job waits for, or what is odd about it; null if nothing")
    created_at: datetime
    state_since: datetime
    attempt: int = Field(description="0 before the first attempt")
    emulated: bool = Field(description="devices are emulated: seconds and bytes are the emulated devices'")
    stop_requested: bool
    unreachable_since: datetime | None = Field(
        description="since when the cluster does not answer; the job may still be running"
    )
    iteration: int = Field(description="iterations done")
    steps: int = Field(description="iterations wanted")
    loss: float | None
    validation: ValidationFigures | None = Field(description="of the latest evaluation; null without one")
    samples_per_second: float | None


class JobList(BaseModel):
    """A page of jobs, newest first."""

    jobs: list[JobSummary]
    next_before: str | None = Field(
        description="pass it as `before` for the next page; null on the last page"
    )


class Transition(BaseModel):
    """The job came into `state` at `time`."""

    state: JobState
    time: datetime
    attempt: int
    reason: str


class StageView(BaseModel):
    """One stage of a pipeline, as the plan has it."""

    devices: dict[str, int] = Field(description="devices by type")
    tp: int
    dp: int
    layers: tuple[int, int] = Field(description="half open")
    embedding: bool
    head: bool
    predicted_bytes: int | None = Field(description="of the fullest device")
    memory_limit_bytes: int | None


class PipelineView(BaseModel):
    """One pipeline: the plan's figures and, beside them, what the latest iteration measured."""

    id: int
    samples: int = Field(description="of each global batch")
    local_batch_size: int = Field(description="samples rounded up to micro-batches")
    micro_batch_size: int
    stages: list[StageView]
    predicted_seconds: float | None = Field(
        description="from the start of an iteration to this pipeline's end"
    )
    measured_seconds: float | None
    predicted_samples_per_second: float | None
    measured_samples_per_second: float | None


class JobDetail(JobSummary):
    """Everything about one job."""

    job: dict[str, Any] = Field(description="the job file, its files read in and its paths made absolute")
    transitions: list[Transition] = Field(description="oldest first")
    run_folder: str | None = Field(description="on the machine of the driver; null before the first attempt")
    plan: Plan | None = Field(description="null until the planner is done")
    pipelines: list[PipelineView]
    predicted: Predicted | None
    latest: MetricsRow | None


class PipelineMetrics(BaseModel):
    """One pipeline in one iteration; seconds are device seconds."""

    model_config = ConfigDict(extra="allow")

    id: int
    samples: int
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    end_seconds: float | None = Field(
        default=None, description="from the iteration's start to its last backward"
    )
    predicted_end_seconds: float | None = None
    peak_tensor_bytes: float | None = None


class MetricsRow(BaseModel):
    """One iteration, as the driver wrote it to metrics.jsonl; further keys are passed on."""

    model_config = ConfigDict(extra="allow")

    iteration: int
    loss: float | None = None
    gradient_norm: float | None = None
    learning_rate: float | None = None
    skipped: bool = Field(default=False, description="nothing was updated: a loss or gradient was not finite")
    loss_scale: float = Field(default=1.0, description="of fp16; 1 otherwise")
    iteration_seconds: float | None = Field(default=None, description="device seconds")
    predicted_iteration_seconds: float | None = None
    wall_seconds: float | None = None
    data_wait_seconds: float | None = Field(
        default=None, description="device seconds for which the rank that waited longest had no samples yet"
    )
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    late_step_share: float | None = Field(
        default=None, description="emulated devices only: share of steps that the host was too slow for"
    )
    validation: ValidationFigures | None = Field(
        default=None, description="of the latest evaluation, which may have followed an earlier iteration"
    )
    pipelines: list[PipelineMetrics] = Field(default_factory=list)


class Metrics(BaseModel):
    """Rows above `since`, oldest first."""

    attempt: int
    rows: list[MetricsRow]
    next_since: int = Field(description="pass it as `since` for what comes after")
    complete: bool = Field(description="nothing will come after these rows")


class LogPart(BaseModel):
    """A piece of what the driver printed. Offsets are bytes of the UTF-8 text."""

    attempt: int
    text: str
    offset: int = Field(description="where `text` starts")
    next_offset: int = Field(description="pass it as `offset` for what comes after")
    complete: bool = Field(description="nothing will come after this piece")


class Health(BaseModel):
    status: str


JobDetail.model_rebuild()
