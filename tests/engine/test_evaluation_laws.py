"""Evaluation: the same loss under every plan as in one process, and no trace of it in training."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from actors.checkpoints import checkpoint_path, checkpoints
from actors.engine.data import HeldOutSamples
from actors.engine.evaluation import HeldOutBatches, Validation, perplexity
from actors.engine.iteration import IterationReport
from actors.engine.model.dropout import Draws
from actors.engine.model.loss import NOT_COUNTED
from actors.engine.tokens import HeldOut, TokenFile
from actors.engine.trainer import TrainerConfig
from actors.engine.weights import initial_parameter
from actors.job import Evaluation, LearningRate
from planner.model_spec import ModelSpec
from planner.parameters import model_parameters
from planner.plan import Plan
from tests.engine import reference
from tests.engine.law_plans import LLAMA, MODEL, by_position, plan_of, whole_layers, with_recompute
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import Part, held_parameters, make_trainer, training_of, write_tokens

HELD_OUT = HeldOut(share=0.1)
# With global batches of 7: one whole round, and one of which each pipeline has less than its part.
SAMPLES = 11
UNLIKE: list[Any] = [[(2, 1, 2), (1, 2, 2)], [(1, 1, 4)]]
DROPPED = MODEL.model_copy(update={"dropout": 0.2})


class PartlyLabelled(HeldOutSamples):
    """Every third label does not count, another third in each sample."""

    def batch(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = super().batch(first, last)
        labels = labels.clone()  # a single row shares its memory with the inputs
        for row, sample in enumerate(range(first, last)):
            labels[row, sample % 3 :: 3] = NOT_COUNTED
        return inputs, labels


@dataclass(frozen=True)
class Outcome:
    before: Validation
    reports: list[IterationReport]
    parameters: list[Part]


def evaluate_and_train(rank: int, config: TrainerConfig) -> Outcome:
    """The loss of the first values, of which some labels do not count; then training."""
    with mock.patch("actors.engine.trainer.HeldOutSamples", PartlyLabelled):
        trainer = make_trainer(config, rank)
    before = trainer.evaluate(0)
    reports = [trainer.run_iteration(iteration) for iteration in range(1, config.training.steps + 1)]
    parameters = held_parameters(trainer)
    trainer.close()
    return Outcome(before, reports, parameters)


def train_alone(rank: int, config: TrainerConfig) -> Outcome:
    """The same without any evaluation."""
    trainer = make_trainer(config, rank)
    reports = [trainer.run_iteration(iteration) for iteration in range(1, config.training.steps + 1)]
    parameters = held_parameters(trainer)
    trainer.close()
    return Outcome(Validation(0, 0.0, 0, 0, 0.0), reports, parameters)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def expected_loss(plan: Plan, tokens: Path) -> tuple[float, int]:
    """Loss of the first values and the counted tokens, sample by sample, in one process."""
    dtype = reference.PRECISIONS[plan.dtypes.param]
    model = plan.model.model_copy(update={"dropout": 0.0})
    values = {p.name: initial_parameter(p, model=model, seed=0).to(dtype) for p in model_parameters(model)}
    samples = PartlyLabelled(TokenFile(tokens), HELD_OUT, sequence_length=plan.sequence_length)
    total, counted = 0.0, 0
    for index in range(SAMPLES):
        inputs, labels = samples.batch(index, index + 1)
        nothing = reference.Dropped(0.0, Draws(0, 1, first_sample=0))
        output = reference.logits(model, values, inputs, nothing).float().flatten(0, 1)
        total += float(F.cross_entropy(output, labels.flatten(), reduction="sum", ignore_index=NOT_COUNTED))
        counted += int((labels != NOT_COUNTED).sum())
    return total / counted, counted


def config_of(plan: Plan, tokens: Path, *, steps: int, every: int | None) -> TrainerConfig:
    return TrainerConfig(
        plan=plan,
        training=training_of(plan, steps=steps),
        tokens=tokens,
        timeout_seconds=30,
        held_out=HELD_OUT,
        evaluation=Evaluation(every=every, samples=SAMPLES),
    )


CASES: list[Any] = [
    # Dropout, uneven batches with surplus samples, TP and DP; then ZeRO and replayed operators.
    pytest.param(DROPPED, "fp32", 0, 1e-6, id="gpt3"),
    pytest.param(LLAMA, "fp32", 2, 1e-6, id="llama"),
    pytest.param(MODEL, "bf16", 1, 2e-3, id="bf16"),
    pytest.param(LLAMA, "fp16", 1, 1e-3, id="fp16"),
]


@pytest.mark.parametrize(("model", "precision", "zero_stage", "tolerance"), CASES)
def test_any_plan_evaluates_as_one_process_and_trains_as_without(
    rank_pool: RankPool, tokens: Path, model: ModelSpec, precision: str, zero_stage: int, tolerance: float
) -> None:
    plan: Plan = plan_of(
        *UNLIKE, model=model, samples=[4, 3], dtypes={"param": precision}, zero_stage=zero_stage
    )
    assert_evaluates_as_one_process(rank_pool, plan, tokens, tolerance=tolerance)


CUT: list[Any] = [[(2, 1, 2), (2, 1, 2)], [(1, 1, 4)]]
# Stages cut by position hold a part of each sample, those that recompute have nothing to replay it for.
OTHERWISE: dict[str, Plan] = {
    "by position, everything recomputed": with_recompute(
        by_position(plan_of(*CUT, model=LLAMA, samples=[4, 3])), *[whole_layers(LLAMA, n) for n in (2, 2, 4)]
    ),
    "by position, dropout": by_position(plan_of(*CUT, model=DROPPED, samples=[4, 3])),
    "replicas of cut stages, some operators recomputed, ZeRO-2": with_recompute(
        by_position(plan_of([(2, 2, 2), (2, 1, 2)], model=DROPPED, samples=[7], zero_stage=2)),
        {"softmax": 2, "attention_dropout": 1, "mlp_norm": 2},
        {"attention_norm": 1, "activation": 2, "mlp_residual": 1},
    ),
    "everything recomputed, unlike pipelines": with_recompute(
        plan_of(*UNLIKE, model=DROPPED, samples=[4, 3]), *[whole_layers(DROPPED, n) for n in (2, 2, 4)]
    ),
}
QUICK = "by position, everything recomputed"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in OTHERWISE]
)
def test_stages_cut_by_position_and_recomputed_ones_evaluate_as_one_process(
    rank_pool: RankPool, tokens: Path, name: str
) -> None:
    assert_evaluates_as_one_process(rank_pool, OTHERWISE[name], tokens, tolerance=1e-6)


def assert_evaluates_as_one_process(
    rank_pool: RankPool, plan: Plan, tokens: Path, *, tolerance: float
) -> None:
    """The loss is one process's, of the same samples and labels; training goes on as without any evaluation."""
    config = config_of(plan, tokens, steps=3, every=2)
    outcomes: list[Outcome] = rank_pool.run(evaluate_and_train, config, world_size=plan.world_size)
    loss, counted = expected_loss(plan, tokens)
    told = {tuple((v.loss, v.tokens, v.samples) for v in validations(outcome)) for outcome in outcomes}
    assert len(told) == 1, "ranks differ in what they report of the world"
    before = outcomes[0].before
    assert (before.samples, before.tokens) == (SAMPLES, counted)
    assert before.loss == pytest.approx(loss, rel=tolerance)
    assert before.perplexity == pytest.approx(math.exp(loss), rel=10 * tolerance)
    # After every second iteration, and after the last.
    assert [report.validation is not None for report in outcomes[0].reports] == [False, True, True]

    alone: list[Outcome] = rank_pool.run(
        train_alone, replace(config, evaluation=Evaluation()), world_size=plan.world_size
    )
    for mine, theirs in zip(outcomes, alone, strict=True):
        assert [r.loss for r in mine.reports] == [r.loss for r in theirs.reports]
        assert [r.gradient_norm for r in mine.reports] == [r.gradient_norm for r in theirs.reports]
        for one, other in zip(mine.parameters, theirs.parameters, strict=True):
            assert torch.equal(one.value, other.value), one.name
        # What was alive at once in training is not passed by an evaluation, but for a message or two that happened
        # to be still on its way: they are about a hundredth here, a micro-batch's logits are far more.
        assert mine.reports[-1].peak_tensor_bytes <= 1.03 * theirs.reports[-1].peak_tensor_bytes


def validations(outcome: Outcome) -> list[Validation]:
    return [outcome.before, *(r.validation for r in outcome.reports if r.validation is not None)]


def test_two_plans_agree_after_training(rank_pool: RankPool, tokens: Path) -> None:
    found = []
    for plan in (
        plan_of(*UNLIKE, model=DROPPED, samples=[4, 3]),
        with_recompute(
            by_position(plan_of([(1, 1, 1), (2, 1, 3)], model=DROPPED, samples=[7])),
            whole_layers(DROPPED, 1),
            {"softmax": 3, "attention_norm": 2},
        ),
    ):
        config = config_of(plan, tokens, steps=4, every=2)
        found.append(validations(rank_pool.run(evaluate_and_train, config, world_size=plan.world_size)[0]))
    one, other = found
    assert [v.tokens for v in one] == [v.tokens for v in other]
    assert [v.loss for v in one] == pytest.approx([v.loss for v in other], rel=1e-6)
    assert one[-1].loss < one[0].loss


def train_and_save(rank: int, config: TrainerConfig, folder: Path) -> list[IterationReport]:
    """Train and save after every iteration."""
    trainer = make_trainer(config, rank)
    steps = range(1, config.training.steps + 1)
    reports = [trainer.run_iteration(step, checkpoint_path(folder, step)) for step in steps]
    trainer.finish_checkpoints()
    trainer.close()
    return reports


def test_what_may_stay_as_the_best_is_evaluated_when_it_is_saved(
    rank_pool: RankPool, tokens: Path, tmp_path: Path
) -> None:
    plan = plan_of([(1, 1, 4)], samples=[2])
    config = config_of(plan, tokens, steps=5, every=4)
    # So large steps that the loss rises: the best is not among the newest.
    training = config.training.model_copy(update={"learning_rate": LearningRate(peak=1.0)})
    config = replace(config, training=training, keep_checkpoints=1, keep_best_checkpoints=1)
    reports = rank_pool.run(train_and_save, config, tmp_path, world_size=1)[0]
    losses = {report.iteration: report.validation.loss for report in reports if report.validation}
    assert sorted(losses) == [1, 2, 3, 4, 5]
    best = min(losses, key=lambda iteration: losses[iteration])
    assert best < 5
    assert {found.iteration: found.manifest.validation_loss for found in checkpoints(tmp_path)} == {
        best: losses[best],
        5: losses[5],
    }


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    data=st.data(),
    wanted=st.integers(1, 40),
)
def test_every_held_out_sample_comes_once(
    tokens: Path, sizes: list[int], data: st.DataObject, wanted: int
) -> None:
    samples = [data.draw(st.integers(1, 6)) for _ in sizes]
    plan: Plan = plan_of(*[[(1, 1, 4)] for _ in sizes], micro_batch_sizes=sizes, samples=samples)
    held_out = HeldOutSamples(TokenFile(tokens), HELD_OUT, sequence_length=plan.sequence_length)
    found: list[torch.Tensor] = []
    for place in plan.ranks:
        batches = HeldOutBatches(plan=plan, place=place, held_out=held_out, samples=wanted)
        assert batches.samples == min(wanted, held_out.count)
        for number in range(batches.rounds):
            for index in range(batches.micro_batches(number)):
                inputs, labels = batches.micro_batch(number, index)
                counted = (labels != NOT_COUNTED).all(dim=1)
                assert (
                    counted.any() and (labels[~counted] == NOT_COUNTED).all() and not inputs[~counted].any()
                )
                found += list(labels[counted])
    expected = held_out.batch(0, min(wanted, held_out.count))[1]
    assert sorted(map(torch.Tensor.tolist, found)) == sorted(expected.tolist())


def test_a_perplexity_beyond_numbers_is_infinite() -> None:
    assert perplexity(1e4) == math.inf and math.isnan(perplexity(math.nan))
