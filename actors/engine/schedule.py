"""1F1B: the order of forward and backward steps on one stage."""

from __future__ import annotations

from typing import Literal, NamedTuple

StepKind = Literal["forward", "backward"]


class Step(NamedTuple):
    """One step of a stage on one micro-batch, counted from 0."""

    kind: StepKind
    micro_batch: int


def warm_up(*, stages: int, stage: int, micro_batches: int) -> int:
    """Forward steps before the first pair: as many as there are stages behind, if the batch has so many."""
    return min(stages - stage - 1, micro_batches)


def one_f_one_b(*, stages: int, stage: int, micro_batches: int) -> list[Step]:
    """The steps of a stage: warm-up forwards, then pairs of a forward and a backward, then the rest.

    Never more than `stages - stage` micro-batches are between their forward and their backward.
    """
    ahead = warm_up(stages=stages, stage=stage, micro_batches=micro_batches)
    steps = [Step("forward", index) for index in range(ahead)]
    for index in range(micro_batches):
        if index + ahead < micro_batches:
            steps.append(Step("forward", index + ahead))
        steps.append(Step("backward", index))
    return steps
