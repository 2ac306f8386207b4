"""From a job to a plan that can run: data, cluster, search or the user's own plan, emulation, price."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from actors.checkpoints import DataIdentity, data_identity
from actors.data_settings import TextSource
from actors.engine.documents import Documents, TextWindows
from actors.engine.mixture import open_tokens, sources_of, write_mixture
from actors.engine.support import check_supported
from actors.engine.tokens import HeldOut, TokenFile, check_vocabulary
from actors.engine.windows import WindowSplit
from actors.inventory import read_inventory
from actors.job import Emulation, Job
from actors.plan_task import plan_on_head
from actors.storage import StoragePath
from actors.text.text import prepare_text
from actors.time_scale import HostMeasurement, auto_time_scale
from planner.cluster import Cluster
from planner.cost.price import check_memory, price_plan, with_prediction
from planner.errors import UserError, parse
from planner.local_batches import with_equal_batches
from planner.plan import Dtypes, Plan, PlanEmulation
from planner.request import PlanRequest
from planner.simulate import simulate

if TYPE_CHECKING:
    from actors.engine.trainer import TrainerConfig


# Prices that differ by less are equal.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Prepared:
    """What of a job could be settled without Ray: its token file or mixture, what of it is held out, what boundaries of
    documents do, and its plan where the job holds one."""

    tokens: Path
    held_out: HeldOut
    documents: Documents
    plan: Plan | None

    def data_identity(self) -> DataIdentity:
        """What a checkpoint of the job says of its data."""
        return data_identity(open_tokens(self.tokens), self.held_out, self.documents)

    def end_of_document(self) -> int | None:
        """The token that ends a document in every text; None where ids came as they are."""
        headers = [source.header for source in sources_of(open_tokens(self.tokens))]
        return next((one.end_of_document for one in headers if one.end_of_document is not None), None)

    def trainer_config(
        self, job: Job, plan: Plan, *, resume_from: StoragePath | None = None
    ) -> TrainerConfig:
        """What every rank is told; `resume_from` is the checkpoint to begin with."""
        from actors.engine.trainer import TrainerConfig

        return TrainerConfig(
            plan=plan,
            training=job.training,
            tokens=self.tokens,
            held_out=self.held_out,
            documents=self.documents,
            evaluation=job.evaluation,
            timeout_seconds=job.runtime.timeout_seconds,
            deterministic=job.runtime.deterministic,
            on_nan=job.runtime.on_nan,
            keep_checkpoints=job.checkpoint.keep,
            keep_best_checkpoints=job.checkpoint.keep_best,
            resume_from=resume_from,
            weights=job.weights_path(),
        )


def cache_folder() -> Path:
    """Where token files are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eth-service" / "tokens"


def prepare(job: Job, *, equal_batches: bool = False, say: Callable[[str], None] = print) -> Prepared:
    """All checks and work that need no Ray, so that most mistakes are told at once. Raises UserError."""
    plan = None
    if isinstance(job.plan, Plan):
        plan = emulated_plan(job.plan, job.emulation)
        check_supported(plan)
        plan = _equal(plan) if equal_batches else plan
        check_memory(plan)
    if (weights := job.weights_path()) is not None:
        # Loads torch, which other jobs' drivers do without.
        from actors.engine.weight_files import check_weights

        check_weights(weights, job.model)
    texts = job.texts()
    made = [_tokens(job, text, say) for text in texts]
    held_out = _held_out(job, dict(zip(texts, made, strict=True)), say)
    if job.data.mixture is None:
        return Prepared(made[0].path, held_out, _documents(job), plan)
    shares = [source.weight for source in job.data.mixture]
    mixture = write_mixture(list(zip(made, shares, strict=True)), cache_folder())
    return Prepared(mixture.path, held_out, _documents(job), plan)


def _documents(job: Job) -> Documents:
    return Documents(attention=job.data.document_attention, packing=job.data.packing)


def _tokens(job: Job, source: TextSource, say: Callable[[str], None]) -> TokenFile:
    tokens = prepare_text(source, cache_dir=cache_folder(), say=say)
    check_vocabulary(tokens, job.model.vocab_size)
    return tokens


def _held_out(job: Job, texts: Mapping[TextSource, TokenFile], say: Callable[[str], None]) -> HeldOut:
    """What training never sees. UserError if it, or what it leaves of any text, is less than a sample."""
    length, held_out = job.training.sequence_length, job.data.held_out
    share = held_out if isinstance(held_out, float) else 0.0
    for source, tokens in texts.items():
        windows = TextWindows(
            tokens, sequence_length=length, documents=_documents(job), told=source.told("the data")
        )
        WindowSplit(windows.count, share, told=source.told("the text"))
    if (text := job.held_out_text()) is None:
        return HeldOut(share=share)
    other = _tokens(job, text, say)
    for tokens in texts.values():
        if "none" not in (tokens.tokenizer, other.tokenizer) and tokens.tokenizer != other.tokenizer:
            raise UserError(
                f"data.held_out.path = {str(text.path)!r} was made into tokens by another tokenizer ({other.tokenizer})"
                f" than the text ({tokens.tokenizer}); name the text's in data.tokenizer, or prepare both with one"
            )
    other.windows(length)
    return HeldOut(tokens=other.path)


def make_plan(job: Job, prepared: Prepared, *, equal_batches: bool) -> Plan:
    """The plan to run, priced; searched on the Ray cluster unless the job holds one. Raises UserError."""
    wanted = _time_scale(job, prepared.plan)
    if prepared.plan is not None:
        plan = prepared.plan
        host = _measurement(job, plan.cluster, wanted)
    else:
        request = plan_request(job)
        # Measured while the plan is searched: both take a second or two.
        host = _measurement(job, request.cluster, wanted)
        plan = plan_on_head(request).model_copy(update={"gradient_sync": job.runtime.gradient_sync})
        plan = least_sharded(plan, request.zero_stages)
        check_supported(plan)
        plan = _equal(plan) if equal_batches else plan
    if host is not None:
        wanted = auto_time_scale(plan, host.seconds())
    if wanted is not None and plan.cluster.emulated:
        emulation = plan.emulation.model_copy(update={"time_scale": wanted})
        plan = plan.model_copy(update={"emulation": emulation})
    if plan.overlap is None:
        plan = plan.model_copy(update={"overlap": job.runtime.overlap})
    return _priced(plan)


def least_sharded(plan: Plan, zero_stages: Sequence[int]) -> Plan:
    """The same plan at the lowest of the ZeRO stages at which it is as fast and fits: what shards nothing worth it
    is harder to read, and moves more messages."""
    seconds = price_plan(plan).iteration_seconds
    for stage in sorted(stage for stage in zero_stages if stage < plan.zero_stage):
        simpler = plan.model_copy(update={"zero_stage": stage})
        predicted = price_plan(simpler)
        fits = all(
            place.device_bytes <= place.memory_limit_bytes
            for pipeline in predicted.pipelines
            for place in pipeline.stages
        )
        if fits and predicted.iteration_seconds <= seconds * (1 + _ROUNDING):
            return simpler
    return plan


def _priced(plan: Plan) -> Plan:
    """With the price and the event simulator's figure for the plan as it will run."""
    plan = with_prediction(plan)
    assert plan.predicted is not None
    simulated = simulate(plan, events=False).iteration_seconds
    return plan.model_copy(
        update={"predicted": plan.predicted.model_copy(update={"simulated_seconds": simulated})}
    )


def _measurement(job: Job, cluster: Cluster, wanted: float | None) -> HostMeasurement | None:
    if wanted is not None or not cluster.emulated:
        return None
    return HostMeasurement(job.model, job.training.sequence_length)


def _time_scale(job: Job, plan: Plan | None) -> float | None:
    """The time scale that the job or its plan asks for; None when it is to be found out."""
    if job.emulation is not None:
        return None if job.emulation.time_scale == "auto" else job.emulation.time_scale
    if plan is not None and "time_scale" in plan.emulation.model_fields_set:
        return plan.emulation.time_scale
    return None


def plan_request(job: Job) -> PlanRequest:
    """What the planner is asked for a job without a plan. Asks Ray for its devices if the job names none."""
    memory_scale = job.emulation.memory_scale if job.emulation else 1.0
    return PlanRequest(
        model=job.model,
        cluster=_with_links(_cluster(job), job.emulation),
        global_batch_size=job.training.global_batch_size,
        sequence_length=job.training.sequence_length,
        dtypes=Dtypes(param=job.training.precision, wire=job.runtime.wire_dtype),
        strategy=job.strategy,
        emulation=PlanEmulation(memory_scale=memory_scale),
        # The runtime shards block by block only.
        zero_stages=job.zero_stages if job.runtime.gradient_sync == "block" else (0,),
    )


def _cluster(job: Job) -> Cluster:
    return job.cluster if isinstance(job.cluster, Cluster) else read_inventory(ray.nodes()).cluster()


def _equal(plan: Plan) -> Plan:
    """The same pipelines with the samples split equally, so that only the local batches differ."""
    if plan.global_batch_size < len(plan.pipelines):
        raise UserError(
            f"training.global_batch_size = {plan.global_batch_size} cannot be split equally over"
            f" {len(plan.pipelines)} pipelines; raise it or leave out --equal-batches"
        )
    return with_equal_batches(plan)


def emulated_plan(plan: Plan, emulation: Emulation | None) -> Plan:
    """A job's own plan with the job's emulation in place of the plan's, if the job has one."""
    if emulation is None:
        return plan
    if not plan.cluster.emulated:
        raise UserError("emulation is given, but no node of the plan's cluster says emulate: true")
    own = plan.emulation.model_copy(update={"memory_scale": emulation.memory_scale})
    return plan.model_copy(update={"emulation": own, "cluster": _with_links(plan.cluster, emulation)})


def _with_links(cluster: Cluster, emulation: Emulation | None) -> Cluster:
    if emulation is None or emulation.links is None:
        return cluster
    data = cluster.model_dump() | {"links": emulation.links.model_dump()}
    return parse(Cluster, data, source="emulation")
