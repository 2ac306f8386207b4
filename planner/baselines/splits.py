"""Layers of a chain: the min-max split of least Eq. 1, within the memory of every stage.

A stage recomputes no more than makes its layers fit. What that takes is part of its seconds by layers, so a
split gives layers to stages with room before it lets others recompute. Under TP a stage cuts activations by
position (sequence parallelism) where its layers then take less time, or fit only so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.baselines.least_seconds import LeastSeconds, Table
from planner.baselines.memory_savers import Zero
from planner.baselines.sketch import Chain, LayerPlan
from planner.baselines.stage_figures import Nodes, Role, StageFigures
from planner.search.layer_split import Split, SplitStage, best_splits

# Of sums of the same seconds in another order.
ROUND_OFF = 1e-9

Variants = Sequence[SplitStage]
"""A stage with activations whole and, where it may, cut by position."""


class Splitter:
    """Splits chains of one model; what is asked twice is kept."""

    def __init__(self, figures: StageFigures, *, upper: float = float("inf")) -> None:
        """Splits that take `upper` seconds by Eq. 1 are of no use, and given up on."""
        self._figures, self._upper = figures, upper
        self._least = LeastSeconds(figures)
        self._splits: dict[tuple[object, ...], LayerPlan | None] = {}
        self._recomputed: dict[tuple[Role, int, Table], tuple[Table, int]] = {}
        self._merged: dict[tuple[tuple[Table, int], ...], Table] = {}

    def is_hopeless(self, chain: Chain, micro_batches: int, layers: Sequence[int] | None) -> bool:
        """Whether `split` would give up on the chain, told by its seconds alone; where nothing is recomputed it never
        does."""
        if not self._figures.recomputes or self._upper == float("inf"):
            return False
        return self._least.of(chain, micro_batches, layers) * (1 - ROUND_OFF) >= self._upper

    def may_fit(self, chain: Chain, micro_batches: int, zero: Zero) -> bool:
        """Whether the model fits a chain, with everything recomputed where that is allowed."""
        return bool(self._limits(chain, micro_batches, zero, recomputed=self._figures.recomputes))

    def split(
        self,
        chain: Chain,
        devices: Sequence[tuple[str, ...]],
        micro_batches: int,
        layers: Sequence[int] | None,
        zero: Zero,
    ) -> LayerPlan | None:
        """The layers of least Eq. 1, or `layers`; None if they do not fit."""
        nodes = _node_pattern(chain, devices)
        key = (chain, nodes, micro_batches, layers and tuple(layers), zero)
        if key not in self._splits:
            self._splits[key] = self._split(chain, nodes, micro_batches, layers, zero)
        return self._splits[key]

    def _split(
        self,
        chain: Chain,
        nodes: Sequence[Nodes],
        micro_batches: int,
        layers: Sequence[int] | None,
        zero: Zero,
    ) -> LayerPlan | None:
        extra = self._figures.received(chain, nodes)
        in_flight = [min(len(chain) - stage, micro_batches) for stage in range(len(chain))]
        ways = [
            self._figures.ways(role, alive)
            for role, alive in zip(self._figures.roles(chain, zero), in_flight, strict=True)
        ]
        tables = [
            [self._figures.seconds(way, place) for way in own] for own, place in zip(ways, nodes, strict=True)
        ]

        def stages(*, recomputed: bool) -> list[Variants]:
            """What fits, with the seconds of recomputing nothing; empty if the model does not fit."""
            limits = self._limits(chain, micro_batches, zero, recomputed=recomputed)
            if not limits:
                return []
            return [
                [
                    SplitStage(table, more, fewest, self._figures.cap(way, alive, recomputed))
                    for table, way in zip(of_ways, own, strict=True)
                ]
                for of_ways, own, more, alive, (fewest, _) in zip(
                    tables, ways, extra, in_flight, limits, strict=True
                )
            ]

        plain = stages(recomputed=False)
        best = self._of(plain, layers, micro_batches) if plain else None
        if self._figures.recomputes:
            most = stages(recomputed=True)
            # What it would be if recomputing took no time.
            free = self._of(most, layers, micro_batches) if most else None
            if free is None or free.latency(micro_batches) >= self._upper:
                return None
            if _is_quicker(free, best, micro_batches):
                every = [
                    [self._recomputing(stage, way, alive) for stage, way in zip(of_ways, own, strict=True)]
                    for of_ways, own, alive in zip(most, ways, in_flight, strict=True)
                ]
                split = self._of(every, layers, micro_batches)
                if split and _is_quicker(split, best, micro_batches):
                    found = self._settled(ways, every, split, in_flight)
                    if found and _is_quicker(found, best, micro_batches):
                        return found
        if best is None:
            return None
        cuts = tuple(
            own[_quickest(of_ways, count)].cut
            for own, of_ways, count in zip(ways, plain, best.layers, strict=True)
        )
        return LayerPlan(best.layers, cuts, ((),) * len(chain), best.fill_seconds, best.period_seconds)

    def _recomputing(self, stage: SplitStage, way: Role, in_flight: int) -> SplitStage:
        """The stage with the seconds of what it must recompute."""
        key = (way, in_flight, stage.table)
        if key not in self._recomputed:
            replays = self._figures.replay_seconds(way, in_flight)
            table = tuple(a + b for a, b in zip(stage.table, replays.tolist(), strict=True))
            self._recomputed[key] = table, int(np.isfinite(replays).sum()) - 1
        table, held = self._recomputed[key]
        return SplitStage(table, stage.extra, stage.fewest, min(stage.most, held))

    def _settled(
        self,
        ways: Sequence[Sequence[Role]],
        stages: Sequence[Variants],
        split: Split,
        in_flight: Sequence[int],
    ) -> LayerPlan | None:
        """What each stage recomputes in the end. Unlike replicas recompute the same, which may take longer."""
        cuts, recompute, seconds = [], [], []
        for own, of_ways, layers, alive in zip(ways, stages, split.layers, in_flight, strict=True):
            index = _quickest(of_ways, layers)
            replay = self._figures.fewest_replay(own[index], layers, alive)
            if replay is None:
                return None
            expected = float(self._figures.replay_seconds(own[index], alive)[layers])
            cuts.append(own[index].cut)
            recompute.append(replay.recompute)
            seconds.append(of_ways[index].seconds(layers) + max(0.0, max(replay.seconds) - expected))
        return LayerPlan(split.layers, tuple(cuts), tuple(recompute), sum(seconds), max(seconds))

    def _of(
        self, variants: Sequence[Variants], layers: Sequence[int] | None, micro_batches: int
    ) -> Split | None:
        stages = [self._merge(of_ways) for of_ways in variants]
        if layers is None:
            found = best_splits(stages, layers=self._figures.layers, micro_batches=[micro_batches])
            return found[0] if found else None
        if any(count > stage.most for stage, count in zip(stages, layers, strict=True)):
            return None
        seconds = [stage.seconds(count) for stage, count in zip(stages, layers, strict=True)]
        return Split(tuple(layers), sum(seconds), max(seconds))

    def _merge(self, of_ways: Variants) -> SplitStage:
        """The stage run, for each number of layers, in the quickest way in which they fit.

        Its seconds grow with layers, so the least period is still found; where they are not convex, of splits with
        that period one with a little more fill may be taken.
        """
        first = of_ways[0]
        if len(of_ways) == 1:
            return first
        key = tuple((stage.table, stage.most) for stage in of_ways)
        if key not in self._merged:
            most = max(stage.most for stage in of_ways)
            self._merged[key] = tuple(
                min(stage.table[count] for stage in of_ways if count <= stage.most)
                for count in range(most + 1)
            )
        table = self._merged[key]
        return SplitStage(table, first.extra, first.fewest, len(table) - 1)

    def _limits(
        self, chain: Chain, micro_batches: int, zero: Zero, *, recomputed: bool
    ) -> list[tuple[int, int]]:
        """(fewest, most) layers of every stage; empty if the model does not fit."""
        count, found = len(chain), []
        for stage, role in enumerate(self._figures.roles(chain, zero)):
            fewest = 0 if role.embedding or role.head else 1
            alive = min(count - stage, micro_batches)
            most = max(self._figures.cap(way, alive, recomputed) for way in self._figures.ways(role, alive))
            if most < fewest:
                return []
            found.append((fewest, most))
        return found if sum(most for _, most in found) >= self._figures.layers else []


def _quickest(of_ways: Variants, layers: int) -> int:
    """The first of the ways that take so many layers in least time."""
    able = [index for index, stage in enumerate(of_ways) if layers <= stage.most]
    return min(able, key=lambda index: of_ways[index].table[layers])


def _is_quicker(one: Split | LayerPlan, other: Split | None, micro_batches: int) -> bool:
    """By Eq. 1, by more than round-off."""
    if other is None:
        return True
    latency = one.fill_seconds + one.period_seconds * (micro_batches - 1)
    return latency < other.latency(micro_batches) * (1 - 1e-9)


def _node_pattern(chain: Chain, devices: Sequence[tuple[str, ...]]) -> tuple[Nodes, ...]:
    """Nodes of every stage's replicas, numbered as they appear."""
    seen: dict[str, int] = {}
    found = []
    for form, ids in zip(chain, devices, strict=True):
        names = (ids[start].rsplit("/", 1)[0] for start in range(0, len(ids), form.tp))
        found.append(tuple(seen.setdefault(name, len(seen)) for name in names))
    return tuple(found)
