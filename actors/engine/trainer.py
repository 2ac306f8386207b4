"""One rank's training, from its groups to its last iteration."""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from actors.engine.batches import ReplicaBatches
from actors.engine.data import Samples
from actors.engine.device import Device, make_device
from actors.engine.emulate import PacedCalls, PacedMessages
from actors.engine.errors import NonFiniteLoss
from actors.engine.exchange import Exchange, MessageKind, MessageTransport
from actors.engine.exchange import GroupTransport as GroupMessages
from actors.engine.gradient_buffer import GradientBuffer
from actors.engine.gradient_sync import CallTime, GradientSync
from actors.engine.gradient_transport import CallTransport, make_transport
from actors.engine.model.stage import ParameterHandle, StageModel, build_stage
from actors.engine.optimizer import Optimizer
from actors.engine.process_groups import ProcessGroups
from actors.engine.stage_runner import StageRunner, StepTime
from actors.engine.support import check_supported
from actors.engine.tokens import TokenFile
from actors.engine.weights import initial_parameter, save_weights, shard
from actors.job import Training
from planner.gradient_blocks import gradient_blocks, rank_blocks
from planner.gradient_calls import GradientLayout, gradient_layout
from planner.plan import Plan, RankPlace, StagePlan
from planner.timeline import Event, Kind

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

MEASURED_ITERATIONS = 2
"""Iterations whose memory is watched: the second is like all that follow."""


@dataclass(frozen=True)
class TrainerConfig:
    """What every rank of a job is told. `tokens` is the token file, at the same path on every host.

    `deterministic` refuses operations that may add in another order from run to run. On the host's processor
    there are none: runs of one plan agree to the bit with or without it.
    """

    plan: Plan
    training: Training
    tokens: Path
    timeout_seconds: float
    deterministic: bool = False


@dataclass(frozen=True)
class IterationReport:
    """One iteration of one rank. Times are `time.monotonic()`: comparable between processes of one host.

    `loss` (mean over the global batch's counted tokens) and `gradient_norm` (before clipping) are the
    world's, the same on every rank. `steps` counts forward, backward and optimizer steps of this
    iteration, `late_steps` those in which an emulated device's host could not keep up.
    `peak_tensor_bytes` is the most so far; of an emulated device, in its own bytes. `events` count wall
    seconds from `start_time`.
    """

    iteration: int
    loss: float
    gradient_norm: float
    learning_rate: float
    start_time: float
    compute_end_time: float
    sync_end_time: float
    end_time: float
    steps: int
    late_steps: int
    peak_tensor_bytes: int
    events: tuple[Event, ...] = ()


@dataclass(frozen=True)
class Gradients:
    """What `compute_gradients` found, the same on every rank, and when its parts ended."""

    loss: float
    norm: float
    compute_end_time: float
    sync_end_time: float
    steps: tuple[StepTime, ...]
    calls: tuple[CallTime, ...]


class Trainer:
    """Plays one rank of a plan. Every method that talks to other ranks must be called on all of them.

    Raises UserError before any communication if the runtime cannot execute the plan; DeviceOutOfMemory,
    NonFiniteLoss and NonFiniteGradientError for failures of its own; torch.distributed's errors, within
    the timeout, when a peer fails. After an error, only `close` may be called; it makes the peers fail too.
    """

    def __init__(self, *, config: TrainerConfig, rank: int, store: dist.Store) -> None:
        check_supported(config.plan)
        self._config = config
        self._plan = config.plan
        self._place = self._plan.ranks[rank]
        self._iterations = 0
        self._device = make_device(self._plan, self._place)
        if config.deterministic:
            use_deterministic_algorithms(True)
        self._groups = ProcessGroups.open(
            plan=self._plan,
            rank=rank,
            store=store,
            timeout_seconds=config.timeout_seconds,
            device=self._device.torch_device,
        )
        try:
            self._model, self._handles = _build_model(config, self._place, self._device, self._groups)
            with self._device.measuring():
                layout = gradient_layout(self._plan)
                self._buffer = GradientBuffer(
                    handles=self._handles,
                    blocks=rank_blocks(gradient_blocks(self._plan), rank),
                    sections=layout.sections_of(rank),
                )
                transport = _gradient_transport(self._plan, rank, layout, self._groups, self._device)
                self._optimizer = Optimizer(
                    buffer=self._buffer,
                    settings=config.training.optimizer,
                    gradient_clip=config.training.gradient_clip,
                )
            self._sync = GradientSync(
                buffer=self._buffer,
                layout=layout,
                rank=rank,
                transport=transport,
                before_launch=self._device.passed,
            )
            self._batches = _batches(config, self._place, self._device)
            self._runner = self._make_runner()
        except BaseException:
            self._groups.close()
            raise

    @property
    def place(self) -> RankPlace:
        return self._place

    @property
    def buffer(self) -> GradientBuffer:
        """The rank's gradients: after `compute_gradients`, those of the global batch, not clipped."""
        return self._buffer

    @property
    def handles(self) -> list[ParameterHandle]:
        """The rank's parameters."""
        return self._handles

    def run_iteration(self, iteration: int) -> IterationReport:
        """One iteration, counted from 1. If it fails, the peers are cut off, so that they fail as well."""
        try:
            return self._run_iteration(iteration)
        except BaseException:
            self._sync.close()
            self._groups.abort()
            raise

    def _run_iteration(self, iteration: int) -> IterationReport:
        self._iterations += 1
        steps, late_steps = self._device.steps, self._device.late_steps
        start = time.monotonic()
        measured = self._iterations <= MEASURED_ITERATIONS
        with self._device.measuring() if measured else contextlib.nullcontext():
            gradients = self.compute_gradients(iteration)
            update_start = time.monotonic()
            rate = self.apply_gradients(iteration, gradients.norm)
        end = time.monotonic()
        return IterationReport(
            iteration=iteration,
            loss=gradients.loss,
            gradient_norm=gradients.norm,
            learning_rate=rate,
            start_time=start,
            compute_end_time=gradients.compute_end_time,
            sync_end_time=gradients.sync_end_time,
            end_time=end,
            steps=self._device.steps - steps,
            late_steps=self._device.late_steps - late_steps,
            peak_tensor_bytes=self._device.peak_tensor_bytes(),
            events=tuple(_events(self._place, gradients, start=start, update=update_start, end=end)),
        )

    def compute_gradients(self, iteration: int) -> Gradients:
        """Forward, backward and synchronisation: the buffer then holds the global batch's gradients."""
        self._buffer.zero()
        result = self._runner.run(lambda index: self._batches.micro_batch(iteration, index))
        self._device.synchronize()
        compute_end = time.monotonic()
        self._sync.start()
        self._sync.finish()
        self._device.synchronize()
        sync_end = time.monotonic()
        loss, norm = self._agree(iteration, result.losses)
        return Gradients(loss, norm, compute_end, sync_end, tuple(result.times), tuple(self._sync.times))

    def apply_gradients(self, iteration: int, norm: float) -> float:
        """Clip and update the parameters; returns the learning rate."""
        training = self._config.training
        rate = training.learning_rate.at(iteration, steps=training.steps)
        with self._device.step("optimizer"):
            self._optimizer.step(iteration=iteration, gradient_norm=norm, learning_rate=rate)
        self._device.synchronize()
        return rate

    def save_weights(self, path: Path) -> None:
        """Write the whole model to one safetensors file on rank 0's host."""
        save_weights(path, plan=self._plan, handles=self._handles, rank=self._place.rank)

    def close(self) -> None:
        """Leave the process groups. Peers that still wait for this rank get an error."""
        self._sync.close()
        self._buffer.close()
        self._groups.close()
        if self._config.deterministic:
            use_deterministic_algorithms(False)

    def _agree(self, iteration: int, losses: list[torch.Tensor]) -> tuple[float, float]:
        """Loss and gradient norm of the world, and whether they are finite: one collective for all.

        Each pipeline's loss has an entry of its own, so that a bad one is named.
        """
        entries = [0.0] * len(self._plan.pipelines)
        # TP ranks hold the same loss: the first speaks for all.
        if losses and self._place.tp_rank == 0:
            entries[self._place.pipeline] = math.fsum(torch.stack(losses).tolist())
        told = torch.tensor(entries, dtype=torch.float32, device=self._device.torch_device)
        shared = torch.cat([told, self._sync.square_sum().reshape(1)])
        dist.all_reduce(shared)
        *by_pipeline, square = shared.tolist()
        bad = [str(index) for index, loss in enumerate(by_pipeline) if not math.isfinite(loss)]
        if bad:
            raise NonFiniteLoss(
                f"iteration {iteration}: the loss of pipeline {', '.join(bad)} is not finite; lower"
                " learning_rate, or train in fp32",
                place=self._place,
            )
        return math.fsum(by_pipeline), math.sqrt(square) if square >= 0 else math.nan

    def _make_runner(self) -> StageRunner:
        plan, place = self._plan, self._place
        pipeline = plan.pipelines[place.pipeline]
        exchange = Exchange(
            plan=plan,
            place=place,
            transports=_message_transports(plan, place, self._groups),
            dtype=DTYPES[plan.dtypes.param],
            device=self._device.torch_device,
        )
        return StageRunner(
            model=self._model,
            exchange=exchange,
            device=self._device,
            stages=len(pipeline.stages),
            stage=place.stage,
            micro_batches=pipeline.micro_batches,
            # Every token of the global batch counts: the text has no unlabelled ones.
            loss_scale=1.0 / (plan.global_batch_size * plan.sequence_length),
            before_last_backward=self._sync.arm if plan.overlap else None,
        )


def use_deterministic_algorithms(on: bool) -> None:
    """From now on in this process, every operation is deterministic or raises; or as torch likes again."""
    # cuBLAS reads this when it is first used; other values let it choose among streams' workspaces.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on)


def _stage(plan: Plan, place: RankPlace) -> StagePlan:
    return plan.pipelines[place.pipeline].stages[place.stage]


def _build_model(
    config: TrainerConfig, place: RankPlace, device: Device, groups: ProcessGroups
) -> tuple[StageModel, list[ParameterHandle]]:
    """The rank's part of the model with its initial values, which depend on the seed alone."""
    plan = config.plan
    with device.measuring():
        model, handles = build_stage(
            model=plan.model,
            stage=_stage(plan, place),
            sequence_length=plan.sequence_length,
            dtype=DTYPES[plan.dtypes.param],
            device=device.torch_device,
            mesh=groups.tp_mesh(place, device.torch_device),
            tp_rank=place.tp_rank,
        )
    for handle in handles:
        # Made on the host, one parameter at a time, and not measured: a real device never sees it whole.
        whole = initial_parameter(handle.spec, model=plan.model, seed=config.training.seed)
        handle.local.copy_(shard(handle.spec, whole, tp=handle.tp, tp_rank=handle.tp_rank))
    return model, handles


def _batches(config: TrainerConfig, place: RankPlace, device: Device) -> ReplicaBatches:
    samples = Samples(
        TokenFile(config.tokens),
        sequence_length=config.plan.sequence_length,
        global_batch_size=config.plan.global_batch_size,
        seed=config.training.seed,
    )
    return ReplicaBatches(plan=config.plan, place=place, samples=samples, device=device.torch_device)


def _message_transports(
    plan: Plan, place: RankPlace, groups: ProcessGroups
) -> dict[MessageKind, MessageTransport]:
    kinds: tuple[MessageKind, ...] = ("activations", "gradients")
    found: dict[MessageKind, MessageTransport] = {}
    for kind in kinds:
        group = groups.exchange(kind, place.pipeline)
        if group is not None:
            found[kind] = GroupMessages(group)
    if plan.cluster.emulated:
        return {kind: PacedMessages(inner, plan=plan, place=place) for kind, inner in found.items()}
    return found


def _gradient_transport(
    plan: Plan, rank: int, layout: GradientLayout, groups: ProcessGroups, device: Device
) -> CallTransport:
    reductions = groups.reductions()
    transport = make_transport(
        plan, reductions, rank=rank, calls=layout.calls_of(rank), device=device.torch_device
    )
    return PacedCalls(transport, groups=reductions, plan=plan) if plan.cluster.emulated else transport


def _events(
    place: RankPlace, gradients: Gradients, *, start: float, update: float, end: float
) -> list[Event]:
    def event(
        kind: Kind, micro_batch: int | None, first: float, last: float, block: int | None = None
    ) -> Event:
        return Event(
            place.device, place.pipeline, place.stage, kind, micro_batch, first - start, last - start, block
        )

    return [
        *(event(step.kind, step.micro_batch, step.start, step.end) for step in gradients.steps),
        *(
            event("gradient_sync", None, time.span.start, time.span.end, time.call.block)
            for time in gradients.calls
        ),
        event("optimizer", None, update, end),
    ]
