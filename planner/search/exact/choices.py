"""The ways to build one stage: TP degree, DP replicas and their rows, by kind of device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.cost.stages import StageCost
from planner.search.exact.pool import Pool, Vector

# Stages that mix types: replicas of each type differ in speed, so rows must balance them; of these the ones
# that waste least are kept, so many for each TP degree and pair of kinds.
_MOST_MIXED = 3
_MIXED_WASTE = 1.25
# Up to so many devices more of them are kept, however they waste.
_FEW_DEVICES, _MANY_MIXED = 6, 24


@dataclass(frozen=True)
class StageChoice:
    """DP replicas of `tp` devices; `kinds[i]` and `rows[i]` are those of replica i."""

    tp: int
    kinds: tuple[int, ...]
    rows: tuple[int, ...]

    def counts(self, kinds: int) -> Vector:
        """Devices by kind."""
        return tuple(self.tp * self.kinds.count(kind) for kind in range(kinds))

    @property
    def loads(self) -> set[tuple[int, int]]:
        """Distinct (kind, rows): all that times and memory depend on beside the TP degree."""
        return set(zip(self.kinds, self.rows, strict=True))


def stage_choices(
    cost: StageCost, pool: Pool, *, micro_batch_size: int, mixed: bool
) -> Iterator[StageChoice]:
    """Every stage of one kind with equal rows; with `mixed`, also stages of two types that balance well."""
    for kind, held in enumerate(pool.kinds):
        for tp in held.degrees:
            for dp in range(1, micro_batch_size + 1):
                if micro_batch_size % dp or tp * dp > held.count:
                    continue
                rows = micro_batch_size // dp
                if cost.covers(device_type=held.type, tp=tp, rows=rows):
                    yield StageChoice(tp, (kind,) * dp, (rows,) * dp)
    if mixed and micro_batch_size > 1:
        yield from _mixed_choices(cost, pool, micro_batch_size)


def _mixed_choices(cost: StageCost, pool: Pool, micro_batch_size: int) -> Iterator[StageChoice]:
    kinds = range(len(pool.kinds))
    few = pool.devices <= _FEW_DEVICES
    pairs = [(a, b) for a in kinds for b in kinds if a < b and pool.kinds[a].type != pool.kinds[b].type]
    for a, b in pairs:
        for tp in sorted(set(pool.kinds[a].degrees) & set(pool.kinds[b].degrees)):
            seconds = [_layer_seconds(cost, pool, kind, tp, micro_batch_size) for kind in (a, b)]
            found = []
            for rows in _row_pairs(micro_batch_size):
                choice = _filled(micro_batch_size, tp, (a, b), rows)
                fits = all(n <= c for n, c in zip(choice.counts(len(kinds)), pool.counts, strict=True))
                times = seconds[0][rows[0]], seconds[1][rows[1]]
                if fits and max(times) < np.inf and (few or max(times) < min(times) * _MIXED_WASTE):
                    found.append((max(times) / min(times), choice))
            ranked = sorted(found, key=lambda one: one[0])
            yield from (choice for _, choice in ranked[: _MANY_MIXED if few else _MOST_MIXED])


def _row_pairs(size: int) -> Iterator[tuple[int, int, int, int]]:
    """(rows a, rows b, replicas a, replicas b) that use up a micro-batch."""
    for replicas in range(1, size):
        for rows in range(1, (size - 1) // replicas + 1):
            left = size - replicas * rows
            for others in range(1, left + 1):
                if left % others == 0:
                    yield rows, left // others, replicas, others


def _filled(size: int, tp: int, kinds: tuple[int, int], rows: tuple[int, int, int, int]) -> StageChoice:
    rows_a, rows_b, replicas_a, replicas_b = rows
    assert rows_a * replicas_a + rows_b * replicas_b == size
    return StageChoice(
        tp,
        (kinds[0],) * replicas_a + (kinds[1],) * replicas_b,
        (rows_a,) * replicas_a + (rows_b,) * replicas_b,
    )


def _layer_seconds(cost: StageCost, pool: Pool, kind: int, tp: int, size: int) -> list[float]:
    """Seconds of one layer by rows, infinite where the profile has none."""
    type_ = pool.kinds[kind].type
    return [np.inf] + [
        cost.replica_step(device_type=type_, tp=tp, rows=rows, layers=1).total
        if cost.covers(device_type=type_, tp=tp, rows=rows)
        else np.inf
        for rows in range(1, size + 1)
    ]
