"""How evaluations are shared out over stage device groups (paper 6, which shares out time)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pvariance

from planner.search.exact.pool import Pool
from planner.search.paper.configuration import StageGroups

# A variance is taken for at least and at most so many times its peers' mean.
_NARROWEST, _WIDEST = 0.5, 2.0
_FEWEST = 4


def evaluation_shares(groups: Sequence[StageGroups], pool: Pool, *, precision: str, each: int) -> list[int]:
    """Evaluations for each of the stage device groups of a pipeline, `each` on average over peers.

    Unlike stages make a poor pipeline, so a group gets the less the more its stages' memory and computing power
    vary, as against its peers: those with as many stages. The paper divides by both normalised variances;
    they are kept within bounds here, since a variance of 0 would take everything.
    """
    peers: dict[int, list[int]] = {}
    for index, stages in enumerate(groups):
        peers.setdefault(len(stages), []).append(index)
    memory = [float(kind.device.memory_bytes) for kind in pool.kinds]
    power = [kind.device.tflops(precision) for kind in pool.kinds]
    shares = [0] * len(groups)
    for indices in peers.values():
        weights = [1.0] * len(indices)
        for amounts in (memory, power):
            variances = [_variance(groups[index], amounts) for index in indices]
            for place, normalised in enumerate(_normalised(variances)):
                weights[place] /= normalised
        scale = each / fmean(weights)
        for index, weight in zip(indices, weights, strict=True):
            shares[index] = max(_FEWEST, round(weight * scale))
    return shares


def _variance(stages: StageGroups, amounts: Sequence[float]) -> float:
    """Between the stages' totals of what each device has."""
    return pvariance([sum(n * one for n, one in zip(stage, amounts, strict=True)) for stage in stages])


def _normalised(variances: Sequence[float]) -> list[float]:
    mean = fmean(variances)
    if mean == 0:
        return [1.0] * len(variances)
    return [min(_WIDEST, max(_NARROWEST, variance / mean)) for variance in variances]
