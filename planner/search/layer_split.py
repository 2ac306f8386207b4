"""The best layer split over fixed stages: exact, since a stage's seconds are convex in its layers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SplitStage:
    """A stage for the layer split: `table[l] + extra` seconds with l layers, `fewest` to `most` of them."""

    table: tuple[float, ...]
    extra: float
    fewest: int
    most: int

    def seconds(self, layers: int) -> float:
        return self.table[layers] + self.extra


@dataclass(frozen=True)
class Split:
    """Layers of each stage, the sum of stage seconds (fill) and the largest (period)."""

    layers: tuple[int, ...]
    fill_seconds: float
    period_seconds: float

    def latency(self, micro_batches: int) -> float:
        """Eq. 1."""
        return self.fill_seconds + self.period_seconds * (micro_batches - 1)


def best_splits(stages: Sequence[SplitStage], *, layers: int, micro_batches: Sequence[int]) -> list[Split]:
    """For each count of micro-batches the split of least Eq. 1; empty if the layers do not fit.

    For a bound on the slowest stage, the least fill is reached by giving every layer where it costs least.
    The candidates for that bound are the stages' possible seconds from the least feasible one upwards; the
    search ends where the bound alone outweighs what fill could still be saved.
    """
    fewest = sum(stage.fewest for stage in stages)
    if fewest > layers or sum(stage.most for stage in stages) < layers:
        return []
    if any(stage.most < stage.fewest for stage in stages):
        return []
    fastest = _least_period(stages, layers)
    leanest = _least_fill(stages, layers, fastest.period_seconds)
    assert leanest is not None
    ideal = _least_fill(stages, layers, float("inf"))
    assert ideal is not None
    best = [leanest] * len(micro_batches)
    bounds = sorted(
        {
            seconds
            for stage in stages
            for count in range(stage.fewest, stage.most + 1)
            if fastest.period_seconds < (seconds := stage.seconds(count)) <= ideal.period_seconds
        }
    )
    for bound in bounds:
        if all(
            ideal.fill_seconds + bound * (n - 1) >= split.latency(n)
            for n, split in zip(micro_batches, best, strict=True)
        ):
            break
        split = _least_fill(stages, layers, bound)
        assert split is not None
        best = [
            split if split.latency(n) < old.latency(n) else old
            for n, old in zip(micro_batches, best, strict=True)
        ]
    return best


def _least_period(stages: Sequence[SplitStage], layers: int) -> Split:
    """Each next layer goes to the stage that is then least slow: min-max, since seconds grow with layers."""
    counts = [stage.fewest for stage in stages]
    heap = [
        (stage.seconds(stage.fewest + 1), index)
        for index, stage in enumerate(stages)
        if stage.most > stage.fewest
    ]
    heapq.heapify(heap)
    for _ in range(layers - sum(counts)):
        _, index = heap[0]
        counts[index] += 1
        stage = stages[index]
        if counts[index] < stage.most:
            heapq.heapreplace(heap, (stage.seconds(counts[index] + 1), index))
        else:
            heapq.heappop(heap)
    return _split(stages, counts)


def _least_fill(stages: Sequence[SplitStage], layers: int, bound: float) -> Split | None:
    """The split of least fill among those with no stage slower than `bound`; None if there is none."""
    counts = [stage.fewest for stage in stages]
    if any(stage.seconds(stage.fewest) > bound for stage in stages):
        return None
    left = layers - sum(counts)
    heap = [
        (stage.table[stage.fewest + 1] - stage.table[stage.fewest], index)
        for index, stage in enumerate(stages)
        if stage.most > stage.fewest
    ]
    heapq.heapify(heap)
    while left:
        if not heap:
            return None
        _, index = heapq.heappop(heap)
        stage = stages[index]
        nxt = counts[index] + 1
        if stage.seconds(nxt) > bound:
            continue
        counts[index] = nxt
        left -= 1
        if nxt < stage.most:
            heapq.heappush(heap, (stage.table[nxt + 1] - stage.table[nxt], index))
    return _split(stages, counts)


def _split(stages: Sequence[SplitStage], counts: Sequence[int]) -> Split:
    seconds = [stage.seconds(count) for stage, count in zip(stages, counts, strict=True)]
    return Split(tuple(counts), sum(seconds), max(seconds))
