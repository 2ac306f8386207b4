"""Law 1 of docs/architecture.md: a plan on real ranks against one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.engine.documents import PLAIN, Documents
from actors.job import Training
from planner.plan import Plan
from tests.engine import reference
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import relative_difference, train_plan, training_of
from tests.engine.reference import Trained

STEPS = 20


def one_process(
    plan: Plan, training: Training, tokens: Path, *, exact: bool = False, documents: Documents = PLAIN
) -> Trained:
    """What one process makes of the plan's task; `exact` in fp64."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return reference.train(plan.model, training, tokens, exact=exact, documents=documents)
    finally:
        torch.set_num_threads(threads)


def assert_same_training(got: Trained, expected: Trained, exact: Callable[[], Trained]) -> None:
    """Law 1 in fp32. `exact()` trains in fp64, for parameters that fp32 itself does not settle."""
    for name, gradient in expected.gradients.items():
        if name.endswith("attention.key.bias"):
            # Softmax ignores what all keys share, so the true gradient is zero.
            assert got.gradients[name].abs().max() < 1e-5, name
        else:
            assert relative_difference(got.gradients[name], gradient) < 1e-5, name
    assert got.norms == pytest.approx(expected.norms, rel=1e-5)
    assert got.losses == pytest.approx(expected.losses, rel=1e-6)
    amplified = []
    for name, parameter in expected.parameters.items():
        if name.endswith("attention.key.bias"):
            assert (got.parameters[name] - parameter).abs().max() < 1e-5, name
        elif relative_difference(got.parameters[name], parameter) >= 1e-5:
            amplified.append(name)
    if amplified:
        _assert_no_further_than_round_off(amplified, got, expected, exact())


def _assert_no_further_than_round_off(
    names: list[str], got: Trained, expected: Trained, exact: Trained
) -> None:
    """AdamW divides a gradient element by its own size, so the round-off of one near zero moves a bias that
    began at zero by more than 1e-5, in one process too: not more than twice as far from fp64 as there."""
    for name in names:
        truth = exact.parameters[name]
        alone = relative_difference(expected.parameters[name].double(), truth)
        assert relative_difference(got.parameters[name].double(), truth) < max(1e-5, 2 * alone), name


def assert_trains_as_one_process(
    pool: RankPool,
    plan: Plan,
    tokens: Path,
    *,
    steps: int = STEPS,
    clip: float | None = None,
    documents: Documents = PLAIN,
) -> None:
    """Law 1 in fp32, on real ranks; with `clip`, of gradients that are all longer than that."""
    training = training_of(plan, steps=steps, gradient_clip=clip)
    expected = one_process(plan, training, tokens, documents=documents)
    if clip is not None:
        assert min(expected.norms) > clip, "clipping is meant to happen"
    got = train_plan(pool, plan, training, tokens, documents=documents)
    assert_same_training(
        got, expected, lambda: one_process(plan, training, tokens, exact=True, documents=documents)
    )
