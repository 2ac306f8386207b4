"""Trains a plan on the pool's ranks, and puts what they hold together to whole tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from actors.data_settings import TextSource
from actors.engine.documents import PLAIN, Documents
from actors.engine.gradient_buffer import Piece
from actors.engine.iteration import IterationReport
from actors.engine.trainer import Trainer, TrainerConfig
from actors.job import LearningRate, Optimizer, Training
from actors.text.text import prepare_text, prepare_tokens
from planner.parameters import Parameter, model_parameters
from planner.plan import Plan
from tests.engine.rank_pool import RankPool
from tests.engine.reference import Tensors, Trained


@dataclass(frozen=True)
class Part:
    """A rank's part of a whole tensor: the half-open range along the parameter's `tp_dim`; None is all."""

    name: str
    tp_range: tuple[int, int] | None
    value: torch.Tensor


@dataclass(frozen=True)
class RankOutcome:
    reports: list[IterationReport]
    gradients: list[Part]
    parameters: list[Part]


def leave_pool_groups(rank: int) -> dist.Store:
    """End the pool's own group, since torch has one world a process; the store for another one."""
    store = dist.distributed_c10d._get_default_store()
    size = dist.get_world_size()
    # Not before all have joined it: a rank that leaves early breaks the connections of those that still come.
    store.set(f"joined{rank}", "")
    store.wait([f"joined{other}" for other in range(size)])
    dist.destroy_process_group()
    return dist.PrefixStore("own groups", store)


def make_trainer(config: TrainerConfig, rank: int) -> Trainer:
    """A Trainer in a process of the pool."""
    return Trainer(config=config, rank=rank, store=leave_pool_groups(rank))


def train_rank(rank: int, config: TrainerConfig) -> RankOutcome:
    """A rank's whole training."""
    trainer = make_trainer(config, rank)
    reports, gradients = [], list[Part]()
    for iteration in range(1, config.training.steps + 1):
        if iteration == 1:
            # Before the first update: the gradient as synchronised, not clipped.
            trainer.show_gradients(
                trainer.compute_gradients(1), lambda pieces: gradients.extend(map(_gradient, pieces))
            )
        reports.append(trainer.run_iteration(iteration))
    parameters = held_parameters(trainer)
    trainer.close()
    return RankOutcome(reports, gradients, parameters)


def start_and_save(rank: int, config: TrainerConfig, path: Path, checkpoint: Path | None = None) -> None:
    """Write the weights that training would start from, and a checkpoint of them."""
    trainer = make_trainer(config, rank)
    trainer.save_weights(path)
    if checkpoint is not None:
        trainer.save_checkpoint(checkpoint, iteration=1, loss=1.0)
        assert all(saved.error is None for saved in trainer.finish_checkpoints())
    trainer.close()


def held_parameters(trainer: Trainer) -> list[Part]:
    """Copies of a rank's parameters."""
    return [
        Part(piece.name, piece.tp_range, piece.logical(piece.parameter).clone())
        for piece in trainer.buffer.pieces()
    ]


def _gradient(piece: Piece) -> Part:
    return Part(piece.name, piece.tp_range, piece.logical(piece.gradient).clone())


def train_plan(
    pool: RankPool, plan: Plan, training: Training, tokens: Path, *, documents: Documents = PLAIN
) -> Trained:
    """Train on real ranks. Asserts on the way that all holders of an element hold the same bits."""
    config = TrainerConfig(
        plan=plan, training=training, tokens=tokens, timeout_seconds=30, documents=documents
    )
    outcomes: Sequence[RankOutcome] = pool.run(train_rank, config, world_size=plan.world_size)
    told = {tuple((r.loss, r.gradient_norm) for r in outcome.reports) for outcome in outcomes}
    assert len(told) == 1, "ranks differ in what they report of the world"
    whole = {parameter.name: parameter for parameter in model_parameters(plan.model)}
    return Trained(
        losses=[report.loss for report in outcomes[0].reports],
        norms=[report.gradient_norm for report in outcomes[0].reports],
        gradients=assembled(whole, (part for outcome in outcomes for part in outcome.gradients)),
        parameters=assembled(whole, (part for outcome in outcomes for part in outcome.parameters)),
    )


def assembled(whole: dict[str, Parameter], parts: Iterable[Part]) -> Tensors:
    """Whole tensors; where parts overlap, they must be the same to the bit (laws 4 and 6)."""
    found: Tensors = {}
    covered: Tensors = {}
    for part in parts:
        parameter = whole[part.name]
        tensor = found.setdefault(part.name, part.value.new_zeros(parameter.shape))
        known = covered.setdefault(part.name, torch.zeros(parameter.shape, dtype=torch.bool))
        if part.tp_range is not None:
            assert parameter.tp_dim is not None
            start, stop = part.tp_range
            tensor = tensor.narrow(parameter.tp_dim, start, stop - start)
            known = known.narrow(parameter.tp_dim, start, stop - start)
        assert torch.equal(tensor[known], part.value[known]), f"holders of {part.name} differ"
        tensor.copy_(part.value)
        known.fill_(True)
    missing = [name for name in whole if name not in covered or not bool(covered[name].all())]
    assert not missing, f"no rank holds all of {missing}"
    return found


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of `b`, in fp64."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def write_tokens(folder: Path) -> Path:
    """A token file of made-up text, enough for many samples."""
    text = folder / "text.txt"
    text.write_text(
        "".join(f"{i} times {i} is {i * i}, and {i} is no {chr(97 + i % 26)}.\n" for i in range(2000))
    )
    return prepare_tokens(text, cache_dir=folder).path


def write_documents(folder: Path, *, longest: int) -> Path:
    """A token file of 400 documents of unlike lengths, of 2 to `longest` tokens."""
    text = folder / "documents.jsonl"
    with text.open("w") as stream:
        for i in range(400):
            words = " ".join(f"{i} by {k} is {i * k}" for k in range(longest))
            stream.write(json.dumps({"text": words[: 1 + i * i % (longest - 1)]}) + "\n")
    return prepare_text(TextSource(text), cache_dir=folder).path


def training_of(
    plan: Plan, *, steps: int, gradient_clip: float | None = None, optimizer: Optimizer | None = None
) -> Training:
    """Settings for a plan. The rate is low: larger ones amplify round-off chaotically (law 1)."""
    return Training(
        global_batch_size=plan.global_batch_size,
        sequence_length=plan.sequence_length,
        steps=steps,
        learning_rate=LearningRate(peak=1e-4, schedule="cosine", warmup_steps=3),
        precision=plan.dtypes.param,
        gradient_clip=gradient_clip,
        optimizer=optimizer or Optimizer(),
    )
