"""How finely devices are handed out and how thoroughly pipelines are searched, for a number of evaluations.

Both depend on the request alone, not on how the search goes, so that what a pipeline's search finds does not
depend on which pipelines came before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.search.exact.pool import Vector
from planner.search.paper.device_groups import count_parts
from planner.search.paper.pipelines import Effort

DEFAULT_EVALUATIONS = 100_000

# Evaluations of a stage device group, on average over its peers.
_EACH = 24
_REFINING = 24
# Stage device groups of a pipeline: as many as that where nothing limits them, so few where much does.
_MOST_GROUPS, _FEWEST_GROUPS = 4000, 24
# Of the evaluations the searches of all pipelines may take this part; the rest is for device groups.
_FOR_PIPELINES = 0.75


@dataclass(frozen=True)
class Granularity:
    """Devices are handed out `unit` at a time; `effort` is for one pipeline."""

    unit: int
    effort: Effort


def granularity(counts: Vector, evaluations: int | None) -> Granularity:
    """The finest unit at which every pipeline can be searched a little, and then as much as is left.

    None evaluations: device by device and everything.
    """
    if evaluations is None:
        return Granularity(1, Effort(_MOST_GROUPS, _EACH, _REFINING))
    spent = evaluations * _FOR_PIPELINES
    unit = 1
    while (pipelines := count_parts(counts, unit)) * _FEWEST_GROUPS * _EACH > spent:
        if unit >= max(counts):
            break
        unit *= 2
    groups = min(_MOST_GROUPS, max(_FEWEST_GROUPS, int(spent / pipelines / _EACH)))
    return Granularity(unit, Effort(groups, _EACH, _REFINING))
