"""Layers of a chain: the min-max split of least Eq. 1, within the memory of every stage.

A stage recomputes no more than makes its layers fit. What that takes is part of its seconds by layers, so a
split gives layers to stages with room before it lets others recompute. Under TP a stage cuts activations by
position (sequence parallelism) where its layers then take less time, or fit only so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.baselines.forms import Form
from planner.baselines.memory_savers import Zero
from planner.baselines.sketch import Chain
from planner.cost.exchange import Replica
from planner.cost.layer_flow import Recompute
from planner.cost.memory import MemoryModel, StageLoad
from planner.cost.recompute import RecomputeModel, Replay
from planner.cost.stage_shape import StageShape
from planner.cost.stages import StageCost
from planner.operators import cuts_positions
from planner.search.layer_split import Split, SplitStage, best_splits

FloatArray = npt.NDArray[np.float64]
Nodes = tuple[int, ...]
"""Nodes of a stage's replicas."""
Variants = Sequence[SplitStage]
"""A stage with activations whole and, where it may, cut by position."""


@dataclass(frozen=True)
class Role:
    """A form at its place in a pipeline: what its seconds and its memory depend on beside layers."""

    form: Form
    embedding: bool
    head: bool
    zero: Zero
    cut: bool = False
    """Activations are cut by position."""


@dataclass(frozen=True)
class LayerPlan:
    """Layers and recomputation of every stage, and whether it cuts activations by position; the sum of stage seconds
    (fill) and the largest (period)."""

    layers: tuple[int, ...]
    cuts: tuple[bool, ...]
    recompute: tuple[Recompute, ...]
    fill_seconds: float
    period_seconds: float


class Splitter:
    """Splits chains of one model; what is asked twice is kept."""

    def __init__(
        self,
        cost: StageCost,
        memory: MemoryModel,
        *,
        recompute: RecomputeModel | None,
        by_position: bool = False,
        upper: float = float("inf"),
    ) -> None:
        """`recompute` None: nothing is recomputed. Splits that take `upper` seconds by Eq. 1 are of no use, and given
        up on. `by_position`: stages whose TP can cut activations by position may."""
        self._upper, self._by_position = upper, by_position
        self.cost, self.memory = cost, memory
        self.layers = cost.model.layers
        self._recompute = recompute
        self._layer_seconds: dict[Form, float] = {}
        self._tables: dict[tuple[Form, bool, bool, bool], tuple[float, ...]] = {}
        self._ways_of: dict[tuple[Role, int], tuple[Role, ...]] = {}
        self._caps: dict[tuple[Role, int, bool], int] = {}
        self._replays: dict[Role, FloatArray] = {}
        self._least: dict[tuple[Role, int, int], Replay | None] = {}
        self._receives: dict[tuple[object, ...], tuple[float, float]] = {}
        self._splits: dict[tuple[object, ...], LayerPlan | None] = {}

    def layer_seconds(self, form: Form) -> float:
        """Seconds that one more layer of a micro-batch takes, with activations whole or cut, whichever is quicker."""
        if form not in self._layer_seconds:
            ways = (False, True) if self._may_cut(form) else (False,)
            tables = [self._table(form, False, False, cut) for cut in ways]
            self._layer_seconds[form] = min(table[1] - table[0] for table in tables)
        return self._layer_seconds[form]

    def may_fit(self, chain: Chain, micro_batches: int, zero: Zero) -> bool:
        """Whether the model fits a chain, with everything recomputed where that is allowed."""
        return bool(self._limits(chain, micro_batches, zero, recomputed=self._recompute is not None))

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
        extra = self._received(chain, nodes)
        in_flight = [min(len(chain) - stage, micro_batches) for stage in range(len(chain))]
        ways = [self._ways(role, alive) for role, alive in zip(_roles(chain, zero), in_flight, strict=True)]
        tables = [[self._seconds(way, place) for way in own] for own, place in zip(ways, nodes, strict=True)]

        def stages(*, recomputed: bool) -> list[Variants]:
            """What fits, with the seconds of recomputing nothing; empty if the model does not fit."""
            limits = self._limits(chain, micro_batches, zero, recomputed=recomputed)
            if not limits:
                return []
            return [
                [
                    SplitStage(table, more, fewest, self._cap(way, alive, recomputed))
                    for table, way in zip(of_ways, own, strict=True)
                ]
                for of_ways, own, more, alive, (fewest, _) in zip(
                    tables, ways, extra, in_flight, limits, strict=True
                )
            ]

        plain = stages(recomputed=False)
        best = self._of(plain, layers, micro_batches) if plain else None
        if self._recompute is not None:
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
        replays = self._replay_seconds(way, in_flight)
        held = int(np.isfinite(replays).sum()) - 1
        table = tuple(a + b for a, b in zip(stage.table, replays.tolist(), strict=True))
        return replace(stage, table=table, most=min(stage.most, held))

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
            replay = self._fewest(own[index], layers, alive)
            if replay is None:
                return None
            expected = float(self._replay_seconds(own[index], alive)[layers])
            cuts.append(own[index].cut)
            recompute.append(replay.recompute)
            seconds.append(of_ways[index].seconds(layers) + max(0.0, max(replay.seconds) - expected))
        return LayerPlan(split.layers, tuple(cuts), tuple(recompute), sum(seconds), max(seconds))

    def _fewest(self, role: Role, layers: int, in_flight: int) -> Replay | None:
        if layers <= self._cap(role, in_flight, False):
            return Replay((), (0.0,))
        key = (role, layers, in_flight)
        if key not in self._least:
            assert self._recompute is not None
            loads = [(type_, self._load(role, rows, layers, in_flight)) for type_, rows in role.form.loads]
            self._least[key] = self._recompute.fewest(loads)
        return self._least[key]

    def _of(
        self, variants: Sequence[Variants], layers: Sequence[int] | None, micro_batches: int
    ) -> Split | None:
        stages = [_merged(of_ways) for of_ways in variants]
        if layers is None:
            found = best_splits(stages, layers=self.layers, micro_batches=[micro_batches])
            return found[0] if found else None
        if any(count > stage.most for stage, count in zip(stages, layers, strict=True)):
            return None
        seconds = [stage.seconds(count) for stage, count in zip(stages, layers, strict=True)]
        return Split(tuple(layers), sum(seconds), max(seconds))

    def _limits(
        self, chain: Sequence[Form], micro_batches: int, zero: Zero, *, recomputed: bool
    ) -> list[tuple[int, int]]:
        """(fewest, most) layers of every stage; empty if the model does not fit."""
        count, found = len(chain), []
        for stage, role in enumerate(_roles(chain, zero)):
            fewest = 0 if role.embedding or role.head else 1
            alive = min(count - stage, micro_batches)
            most = max(self._cap(way, alive, recomputed) for way in self._ways(role, alive))
            if most < fewest:
                return []
            found.append((fewest, most))
        return found if sum(most for _, most in found) >= self.layers else []

    def _cap(self, role: Role, in_flight: int, recomputed: bool) -> int:
        """Most layers that fit, with nothing or with everything recomputed."""
        key = (role, in_flight, recomputed)
        if key not in self._caps:
            self._caps[key] = self._most_layers(role, in_flight, recomputed)
        return self._caps[key]

    def _most_layers(self, role: Role, in_flight: int, recomputed: bool) -> int:
        if self._recompute is not None:
            replays = self._replay_seconds(role, in_flight)
            return int((np.isfinite(replays) if recomputed else replays == 0).sum()) - 1
        return min(
            self.memory.most_layers(
                self._load(role, rows, self.layers, in_flight), self.cost.device_types[type_]
            )
            for type_, rows in role.form.loads
        )

    def _replay_seconds(self, role: Role, in_flight: int) -> FloatArray:
        """[layers] -> seconds of recomputation in a micro-batch's backward; inf where nothing fits."""
        known = self._replays.get(role)
        if known is None or len(known) <= in_flight:
            assert self._recompute is not None
            most = in_flight if known is None else 2 * in_flight
            tables = [
                self._recompute.seconds_table(
                    type_, self._load(role, rows, self.layers, most), most_in_flight=most
                )
                for type_, rows in role.form.loads
            ]
            known = self._replays[role] = np.maximum.reduce(tables)
        row: FloatArray = known[in_flight]
        return row

    def _seconds(self, role: Role, nodes: Nodes) -> tuple[float, ...]:
        """Seconds of a micro-batch by layers, without receiving and recomputation."""
        form, table = role.form, self._table(role.form, role.embedding, role.head, role.cut)
        if role.zero.stage < 2 or len(form.replicas) < 2:
            return table
        shape = replace(_shape(form, nodes), embedding=role.embedding, head=role.head, zero_stage=2)
        none, one, two = (self.cost.scatter_seconds(replace(shape, layers=n)) for n in (0, 1, 2))
        return (table[0] + none, *(s + one + (two - one) * n for n, s in enumerate(table[1:])))

    def _table(self, form: Form, embedding: bool, head: bool, cut: bool) -> tuple[float, ...]:
        key = (form, embedding, head, cut)
        if key not in self._tables:
            self._tables[key] = self.cost.layer_table(
                form.loads,
                tp=form.tp,
                most_layers=self.layers,
                embedding=embedding,
                head=head,
                sequence_parallel=cut,
            )
        return self._tables[key]

    def _ways(self, role: Role, in_flight: int) -> tuple[Role, ...]:
        """The role with activations whole and, where that may be better, cut by position."""
        key = (role, in_flight)
        if key not in self._ways_of:
            cut = replace(role, cut=True)
            better = self._may_cut(role.form) and (
                self._cap(role, in_flight, False) < self.layers or self._is_ever_quicker(cut, role)
            )
            self._ways_of[key] = (role, cut) if better else (role,)
        return self._ways_of[key]

    def _is_ever_quicker(self, one: Role, other: Role) -> bool:
        """For any number of layers, with nothing recomputed."""
        tables = [self._table(role.form, role.embedding, role.head, role.cut) for role in (one, other)]
        return any(a < b for a, b in zip(*tables, strict=True))

    def _may_cut(self, form: Form) -> bool:
        return self._by_position and cuts_positions(tp=form.tp, sequence_length=self.cost.sequence_length)

    def _load(self, role: Role, rows: int, layers: int, in_flight: int) -> StageLoad:
        form, zero = role.form, role.zero
        return StageLoad(
            tp=form.tp,
            rows=rows,
            layers=layers,
            embedding=role.embedding,
            head=role.head,
            in_flight=in_flight,
            zero_stage=zero.stage,
            zero_ways=zero.ways(len(form.replicas)),
            dp=len(form.replicas),
            sequence_parallel=role.cut,
        )

    def _received(self, chain: Chain, nodes: Sequence[Nodes]) -> list[float]:
        received = [0.0] * len(chain)
        for stage in range(len(chain) - 1):
            forward, backward = self._boundary(chain[stage], nodes[stage], chain[stage + 1], nodes[stage + 1])
            received[stage + 1] += forward
            received[stage] += backward
        return received

    def _boundary(self, a: Form, nodes_a: Nodes, b: Form, nodes_b: Nodes) -> tuple[float, float]:
        """Seconds that b receives activations from a, and a gradients from b."""
        least = min(*nodes_a, *nodes_b)
        near_a, near_b = tuple(n - least for n in nodes_a), tuple(n - least for n in nodes_b)
        key = (a, near_a, b, near_b)
        if key not in self._receives:
            one, other = _shape(a, near_a), _shape(b, near_b)
            self._receives[key] = (
                max(self.cost.receive(one, other)),
                max(self.cost.receive(other, one)),
            )
        return self._receives[key]


def _roles(chain: Sequence[Form], zero: Zero) -> list[Role]:
    last = len(chain) - 1
    return [Role(form, stage == 0, stage == last, zero) for stage, form in enumerate(chain)]


def _merged(of_ways: Variants) -> SplitStage:
    """The stage run, for each number of layers, in the quickest way in which they fit.

    Its seconds grow with layers, so the least period is still found; where they are not convex, of splits with that
    period one with a little more fill may be taken.
    """
    if len(of_ways) == 1:
        return of_ways[0]
    most = max(stage.most for stage in of_ways)
    table = tuple(
        min(stage.table[count] for stage in of_ways if count <= stage.most) for count in range(most + 1)
    )
    return replace(of_ways[0], table=table, most=most)


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


def _shape(form: Form, nodes: Sequence[int]) -> StageShape:
    replicas = (Replica(node, type_, rows) for node, (type_, rows) in zip(nodes, form.replicas, strict=True))
    return StageShape(form.tp, tuple(replicas), 0)
