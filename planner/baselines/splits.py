"""Layers of a chain: the min-max split of least Eq. 1, within the memory of every stage.

A stage recomputes no more than makes its layers fit. What that takes is part of its seconds by layers, so a
split gives layers to stages with room before it lets others recompute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True)
class Role:
    """A form at its place in a pipeline: what its seconds and its memory depend on beside layers."""

    form: Form
    embedding: bool
    head: bool
    zero: Zero


@dataclass(frozen=True)
class LayerPlan:
    """Layers and recomputation of every stage, the sum of stage seconds (fill) and the largest (period)."""

    layers: tuple[int, ...]
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
        up on. `by_position`: stages whose TP can cut activations by position do."""
        self._upper, self._by_position = upper, by_position
        self.cost, self.memory = cost, memory
        self.layers = cost.model.layers
        self._recompute = recompute
        self._layer_seconds: dict[Form, float] = {}
        self._tables: dict[tuple[Form, bool, bool], tuple[float, ...]] = {}
        self._caps: dict[tuple[Role, int, bool], int] = {}
        self._replays: dict[Role, FloatArray] = {}
        self._least: dict[tuple[Role, int, int], Replay | None] = {}
        self._receives: dict[tuple[object, ...], tuple[float, float]] = {}
        self._splits: dict[tuple[object, ...], LayerPlan | None] = {}

    def layer_seconds(self, form: Form) -> float:
        """Seconds that one more layer of a micro-batch takes."""
        if form not in self._layer_seconds:
            table = self._table(form, False, False)
            self._layer_seconds[form] = table[1] - table[0]
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
        roles, extra = _roles(chain, zero), self._received(chain, nodes)
        seconds = [self._seconds(role, place) for role, place in zip(roles, nodes, strict=True)]
        plain = self._limits(chain, micro_batches, zero, recomputed=False)
        best = self._of(_stages(seconds, extra, plain), layers, micro_batches) if plain else None
        if self._recompute is not None:
            most = self._limits(chain, micro_batches, zero, recomputed=True)
            # What it would be if recomputing took no time.
            free = self._of(_stages(seconds, extra, most), layers, micro_batches) if most else None
            if free is None or free.latency(micro_batches) >= self._upper:
                return None
            if _is_quicker(free, best, micro_batches):
                in_flight = [min(len(roles) - stage, micro_batches) for stage in range(len(roles))]
                stages = list(self._recomputing(_stages(seconds, extra, most), roles, in_flight))
                split = self._of(stages, layers, micro_batches)
                if split and _is_quicker(split, best, micro_batches):
                    found = self._settled(roles, stages, split, in_flight)
                    if found and _is_quicker(found, best, micro_batches):
                        return found
        if best is None:
            return None
        return LayerPlan(best.layers, ((),) * len(chain), best.fill_seconds, best.period_seconds)

    def _recomputing(
        self, stages: Sequence[SplitStage], roles: Sequence[Role], in_flight: Sequence[int]
    ) -> Iterator[SplitStage]:
        """The stages with the seconds of what they must recompute."""
        for stage, role, alive in zip(stages, roles, in_flight, strict=True):
            replays = self._replay_seconds(role, alive)
            held = int(np.isfinite(replays).sum()) - 1
            table = tuple(a + b for a, b in zip(stage.table, replays.tolist(), strict=True))
            yield replace(stage, table=table, most=min(stage.most, held))

    def _settled(
        self, roles: Sequence[Role], stages: Sequence[SplitStage], split: Split, in_flight: Sequence[int]
    ) -> LayerPlan | None:
        """What each stage recomputes in the end. Unlike replicas recompute the same, which may take longer."""
        recompute, seconds = [], []
        for role, stage, layers, alive in zip(roles, stages, split.layers, in_flight, strict=True):
            replay = self._fewest(role, layers, alive)
            if replay is None:
                return None
            expected = float(self._replay_seconds(role, alive)[layers])
            recompute.append(replay.recompute)
            seconds.append(stage.seconds(layers) + max(0.0, max(replay.seconds) - expected))
        return LayerPlan(split.layers, tuple(recompute), sum(seconds), max(seconds))

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
        self, stages: Sequence[SplitStage], layers: Sequence[int] | None, micro_batches: int
    ) -> Split | None:
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
            most = self._cap(role, min(count - stage, micro_batches), recomputed)
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
        form, table = role.form, self._table(role.form, role.embedding, role.head)
        if role.zero.stage < 2 or len(form.replicas) < 2:
            return table
        shape = replace(_shape(form, nodes), embedding=role.embedding, head=role.head, zero_stage=2)
        none, one, two = (self.cost.scatter_seconds(replace(shape, layers=n)) for n in (0, 1, 2))
        return (table[0] + none, *(s + one + (two - one) * n for n, s in enumerate(table[1:])))

    def _table(self, form: Form, embedding: bool, head: bool) -> tuple[float, ...]:
        key = (form, embedding, head)
        if key not in self._tables:
            self._tables[key] = self.cost.layer_table(
                form.loads,
                tp=form.tp,
                most_layers=self.layers,
                embedding=embedding,
                head=head,
                sequence_parallel=self.cuts(form),
            )
        return self._tables[key]

    def cuts(self, form: Form) -> bool:
        """Whether such a stage cuts activations by position."""
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
            sequence_parallel=self.cuts(form),
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


def _stages(
    seconds: Sequence[tuple[float, ...]], extra: Sequence[float], limits: Sequence[tuple[int, int]]
) -> list[SplitStage]:
    return [
        SplitStage(table, more, fewest, most)
        for table, more, (fewest, most) in zip(seconds, extra, limits, strict=True)
    ]


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
