"""End times of a pipeline and its stages: the paper's Eq. 1 and Eq. 5."""

from __future__ import annotations

from collections.abc import Sequence

from planner.profile.table import StepSeconds


def pipeline_seconds(stages: Sequence[StepSeconds], *, micro_batches: int) -> float:
    """Eq. 1: the first micro-batch through every stage, the others at the pace of the slowest stage."""
    return sum(step.total for step in stages) + max(step.total for step in stages) * (micro_batches - 1)


def stage_end_seconds(stages: Sequence[StepSeconds], *, micro_batches: int) -> list[float]:
    """Eq. 5 without its all-reduce term: when each stage ends its last backward.

    The first stage ends last, at Eq. 1.
    """
    fill = sum(step.forward for step in stages)
    paced = max(step.total for step in stages) * (micro_batches - 1)
    ends, drain = [], 0.0
    for step in reversed(stages):
        drain += step.backward
        ends.append(fill + paced + drain)
    return ends[::-1]
