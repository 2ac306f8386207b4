"""One rank's training, from its groups to its last iteration."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from actors.checkpoints import data_identity
from actors.engine.agreement import Agreed, OnNan, agree, updates
from actors.engine.batches import ReplicaBatches
from actors.engine.checkpoint import SavedCheckpoint
from actors.engine.data import HeldOutSamples, Samples
from actors.engine.device import Device, make_device
from actors.engine.documents import PLAIN, Documents
from actors.engine.evaluation import Evaluator, HeldOutBatches, Validation
from actors.engine.exchange import Exchange
from actors.engine.gradient_buffer import ParameterGradients, Piece
from actors.engine.iteration import Gradients, IterationReport, events_of
from actors.engine.loss_scale import LossScale
from actors.engine.mixture import Tokens, open_tokens
from actors.engine.model.stage import ParameterHandle, StageModel, build_stage
from actors.engine.process_groups import ProcessGroups
from actors.engine.read_ahead import ReadAhead
from actors.engine.stage_runner import StageRunner
from actors.engine.support import check_supported
from actors.engine.tokens import NOTHING_HELD_OUT, HeldOut
from actors.engine.training_state import TrainingState
from actors.engine.transports import message_transports, slice_gather
from actors.engine.update import UpdateMaker
from actors.engine.weight_files import open_weights
from actors.engine.weights import DTYPES, initial_parameter, save_weights, shard
from actors.job import Evaluation, Training
from actors.storage import StoragePath
from planner.plan import Plan, RankPlace, StagePlan

MEASURED_ITERATIONS = 2
"""Iterations whose memory is watched: the second is like all that follow."""


@dataclass(frozen=True)
class TrainerConfig:
    """What every rank of a job is told. `tokens` is the token file, at the same path on every host;
    `held_out` is what training sees nothing of, `documents` what the boundaries of documents do.

    `deterministic` refuses operations that may add in another order from run to run. On the host's processor
    there are none: runs of one plan agree to the bit with or without it. `weights` are files of first values, or a
    checkpoint with some, in place of those that the seed makes; `resume_from` is a checkpoint to go on from.
    """

    plan: Plan
    training: Training
    tokens: Path
    timeout_seconds: float
    held_out: HeldOut = NOTHING_HELD_OUT
    documents: Documents = PLAIN
    evaluation: Evaluation = field(default_factory=Evaluation)
    deterministic: bool = False
    on_nan: OnNan = "stop"
    keep_checkpoints: int = 2
    keep_best_checkpoints: int = 0
    resume_from: StoragePath | None = None
    weights: StoragePath | None = None


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
        self._loss_scale = LossScale.of(self._plan.dtypes.param)
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
                self._update = UpdateMaker(
                    plan=self._plan,
                    rank=rank,
                    training=config.training,
                    handles=self._handles,
                    groups=self._groups,
                    device=self._device,
                    dtype=DTYPES[self._plan.dtypes.param],
                ).make()
            tokens = open_tokens(config.tokens)
            self._batches = _batches(config, tokens, self._place, self._device)
            self._runner = self._make_runner()
            self._evaluator = self._make_evaluator(tokens)
            self._state = TrainingState(
                plan=self._plan,
                rank=rank,
                training=config.training,
                data=data_identity(tokens, config.held_out, config.documents),
                handles=self._handles,
                optimizer=self._update.optimizer,
                loss_scale=self._loss_scale,
                group=self._groups.checkpoints(),
                keep=config.keep_checkpoints,
                keep_best=config.keep_best_checkpoints,
            )
            done = 0 if config.resume_from is None else self._state.load(config.resume_from)
            # While the other ranks still come up.
            self._batches.begin(done + 1)
        except BaseException:
            self._groups.close()
            raise

    @property
    def place(self) -> RankPlace:
        return self._place

    @property
    def buffer(self) -> ParameterGradients:
        """Where the rank's gradients are."""
        return self._update.buffer

    def show_gradients(self, gradients: Gradients, take: Callable[[Sequence[Piece]], None]) -> None:
        """Hand over, after `compute_gradients`, what a single process's gradients would be: not clipped, not scaled,
        and under ZeRO whole, in the parameters' precision. Each piece of the rank comes once, its view valid until
        the next come. A collective; `apply_gradients` must not follow."""
        self._update.buffer.flat.div_(gradients.loss_scale)
        self._update.show_gradients(take)

    @property
    def handles(self) -> list[ParameterHandle]:
        """The rank's parameters."""
        return self._handles

    def run_iteration(self, iteration: int, checkpoint: StoragePath | None = None) -> IterationReport:
        """One iteration, counted from 1; afterwards begin to save its state as `checkpoint`. If it fails, the
        peers are cut off, so that they fail as well."""
        try:
            report = self._run_iteration(iteration)
            if self._evaluates(iteration, saves=checkpoint is not None):
                report = self._with_validation(report)
            if checkpoint is not None:
                validation_loss = None if report.validation is None else report.validation.loss
                self.save_checkpoint(
                    checkpoint, iteration=iteration, loss=report.loss, validation_loss=validation_loss
                )
            return replace(report, saved=self._state.poll())
        except BaseException:
            self._batches.close()
            self._update.close()
            self._groups.abort()
            raise

    def evaluate(self, iteration: int) -> Validation:
        """The loss of held-out samples under the parameters as they are; a collective."""
        with self._device.measuring():
            return self._evaluator.run(iteration)

    def _evaluates(self, iteration: int, *, saves: bool) -> bool:
        """Whether to evaluate after an iteration; also what may stay as one of the best is measured itself."""
        evaluation = self._config.evaluation
        competes = saves and evaluation.every is not None and self._config.keep_best_checkpoints > 0
        return competes or evaluation.due(iteration, steps=self._config.training.steps)

    def _with_validation(self, report: IterationReport) -> IterationReport:
        validation = self.evaluate(report.iteration)
        return replace(report, validation=validation, peak_tensor_bytes=self._device.peak_tensor_bytes())

    def _run_iteration(self, iteration: int) -> IterationReport:
        self._iterations += 1
        steps, late_steps = self._device.steps, self._device.late_steps
        waited, start = self._batches.waited_seconds, time.monotonic()
        with self._measuring():
            gradients = self.compute_gradients(iteration)
        update_start = time.monotonic()
        update = self._decide(iteration, gradients.agreed)
        if update:
            self.apply_gradients(iteration, gradients)
            self._state.updates += 1
        end = time.monotonic()
        return IterationReport(
            iteration=iteration,
            loss=gradients.agreed.loss,
            gradient_norm=gradients.agreed.norm,
            learning_rate=self._learning_rate(iteration),
            start_time=start,
            compute_end_time=gradients.compute_end_time,
            sync_end_time=gradients.sync_end_time,
            end_time=end,
            steps=self._device.steps - steps,
            late_steps=self._device.late_steps - late_steps,
            peak_tensor_bytes=self._device.peak_tensor_bytes(),
            data_wait_seconds=self._batches.waited_seconds - waited,
            skipped=not update,
            loss_scale=gradients.loss_scale,
            events=tuple(events_of(self._place, gradients, start=start, update=update_start, end=end)),
        )

    def compute_gradients(self, iteration: int) -> Gradients:
        """Forward, backward and synchronisation: the buffer then holds the global batch's gradients."""
        self._update.buffer.zero()
        # Of all ranks: each knows it without a message. A batch of which nothing counts has loss 0.
        counted = max(1, self._batches.counted(iteration))
        self._runner.loss_scale = self._loss_scale.value / counted
        result = self._runner.run(
            lambda index: self._batches.micro_batch(iteration, index),
            lambda index: self._batches.draws(iteration, index),
            lambda index: self._batches.documents(iteration, index),
        )
        self._device.synchronize()
        compute_end = time.monotonic()
        self._update.sync.start()
        self._update.sync.finish()
        self._device.synchronize()
        sync_end = time.monotonic()
        scale = self._loss_scale.value
        agreed = agree(
            self._plan,
            self._place,
            losses=result.losses,
            square_sum=self._update.sync.square_sum(),
            loss_scale=scale,
        )
        return Gradients(
            agreed, scale, compute_end, sync_end, tuple(result.times), tuple(self._update.sync.times)
        )

    def apply_gradients(self, iteration: int, gradients: Gradients) -> None:
        """Clip and update the parameters."""
        # Not measured: copies that a save needs are no memory of the device.
        self._state.before_update()
        with self._measuring():
            with self._device.step("optimizer"):
                self._update.optimizer.step(
                    gradient_norm=gradients.agreed.norm,
                    learning_rate=self._learning_rate(iteration),
                    loss_scale=gradients.loss_scale,
                )
            self._update.optimizer.gather()
            self._device.synchronize()

    def _measuring(self) -> contextlib.AbstractContextManager[None]:
        """Watches the memory of the first iterations."""
        measured = self._iterations <= MEASURED_ITERATIONS
        return self._device.measuring() if measured else contextlib.nullcontext()

    def _learning_rate(self, iteration: int) -> float:
        training = self._config.training
        return training.learning_rate.at(iteration, steps=training.steps)

    def _decide(self, iteration: int, agreed: Agreed) -> bool:
        """Whether to update. A gradient that overflowed in fp16 only asks for a smaller scale, while there is
        one."""
        overflow = self._loss_scale.dynamic and not agreed.finite and not agreed.bad_pipelines
        if overflow and not self._loss_scale.exhausted:
            self._loss_scale.saw(finite=False)
            return False
        self._loss_scale.saw(finite=agreed.finite)
        return updates(agreed, iteration=iteration, on_nan=self._config.on_nan, place=self._place)

    def save_checkpoint(
        self, path: StoragePath, *, iteration: int, loss: float, validation_loss: float | None = None
    ) -> None:
        """Begin to save the state after an iteration, on every rank; later reports and `finish_checkpoints` tell
        what became of it."""
        self._device.synchronize()
        self._state.save(path, iteration=iteration, loss=loss, validation_loss=validation_loss)

    def finish_checkpoints(self) -> tuple[SavedCheckpoint, ...]:
        """Wait for the save under way, and tell of it."""
        return self._state.finish()

    def save_weights(self, path: Path) -> None:
        """Write the whole model to one safetensors file on rank 0's host."""
        save_weights(path, plan=self._plan, handles=self._handles, rank=self._place.rank)

    def close(self) -> None:
        """Leave the process groups. Peers that still wait for this rank get an error."""
        self._batches.close()
        self._state.finish()
        self._update.close()
        self._groups.close()
        if self._config.deterministic:
            use_deterministic_algorithms(False)

    def _make_runner(self) -> StageRunner:
        plan, place = self._plan, self._place
        pipeline = plan.pipelines[place.pipeline]
        exchange = Exchange(
            plan=plan,
            place=place,
            transports=message_transports(plan, place, self._groups),
            dtype=DTYPES[plan.dtypes.param],
            device=self._device.torch_device,
            gather=slice_gather(plan, place, self._groups),
        )
        return StageRunner(
            model=self._model,
            exchange=exchange,
            device=self._device,
            stages=len(pipeline.stages),
            stage=place.stage,
            micro_batches=pipeline.micro_batches,
            before_last_backward=self._update.sync.arm if plan.overlap else None,
        )

    def _make_evaluator(self, tokens: Tokens) -> Evaluator:
        held_out = HeldOutSamples(
            tokens,
            self._config.held_out,
            sequence_length=self._plan.sequence_length,
            documents=self._config.documents,
        )
        batches = HeldOutBatches(
            plan=self._plan,
            place=self._place,
            held_out=held_out,
            samples=self._config.evaluation.samples,
        )
        return Evaluator(
            place=self._place,
            runner=self._runner,
            batches=batches,
            device=self._device,
            reads_tokens=_reads_tokens(self._plan, self._place),
        )


def use_deterministic_algorithms(on: bool) -> None:
    """From now on in this process, every operation is deterministic or raises; or as torch likes again."""
    # cuBLAS reads this when it is first used; other values let it choose among streams' workspaces.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on)


def _stage(plan: Plan, place: RankPlace) -> StagePlan:
    return plan.pipelines[place.pipeline].stages[place.stage]


def _reads_tokens(plan: Plan, place: RankPlace) -> bool:
    stage = _stage(plan, place)
    return stage.embedding or stage.head


def _build_model(
    config: TrainerConfig, place: RankPlace, device: Device, groups: ProcessGroups
) -> tuple[StageModel, list[ParameterHandle]]:
    """The rank's part of the model with its first values: of the seed alone, or from files."""
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
    files = None if config.weights is None else open_weights(config.weights, plan.model)
    for handle in handles:
        # Made on the host, one parameter at a time, and not measured: a real device never sees it whole.
        if files is None:
            whole = initial_parameter(handle.spec, model=plan.model, seed=config.training.seed)
            part = shard(handle.spec, whole, tp=handle.tp, tp_rank=handle.tp_rank)
        else:
            part = files.shard(handle.spec, tp=handle.tp, tp_rank=handle.tp_rank)
        handle.local.copy_(part)
    return model, handles


def _batches(config: TrainerConfig, tokens: Tokens, place: RankPlace, device: Device) -> ReadAhead:
    samples = Samples(
        tokens,
        sequence_length=config.plan.sequence_length,
        global_batch_size=config.plan.global_batch_size,
        seed=config.training.seed,
        held_out_share=config.held_out.share,
        documents=config.documents,
    )
    return ReadAhead(
        ReplicaBatches(plan=config.plan, place=place, samples=samples),
        micro_batches=config.plan.pipelines[place.pipeline].micro_batches,
        reads_tokens=_reads_tokens(config.plan, place),
        device=device.torch_device,
    )
