"""What a stage of one model takes by its layers: seconds, recomputation that fits, and room.

Searches of one request ask for the same stages, so they share what was worked out for one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.baselines.forms import Form
from planner.baselines.memory_savers import Zero, ZeroStage
from planner.baselines.sketch import Chain
from planner.cost.exchange import Replica
from planner.cost.memory import StageLoad
from planner.cost.models import CostModels
from planner.cost.recompute import Replay
from planner.cost.stage_shape import StageShape
from planner.operators import cuts_positions
from planner.request import PlanRequest

FloatArray = npt.NDArray[np.float64]
Nodes = tuple[int, ...]
"""Nodes of a stage's replicas."""


@dataclass(frozen=True, eq=False)
class Role:
    """A form at its place in a pipeline: what its seconds and its memory depend on beside layers.

    Made by `StageFigures.role` alone, once for each content, and compared by identity.
    """

    form: Form
    embedding: bool
    head: bool
    zero_stage: ZeroStage
    zero_ways: float
    """Over how many devices the optimizer state is shared."""
    cut: bool
    """Activations are cut by position."""


class StageFigures:
    """Figures of the stages of one model; what is asked twice is kept."""

    def __init__(self, models: CostModels, *, recompute: bool = True, by_position: bool = False) -> None:
        """`recompute`: stages may recompute. `by_position`: those whose TP can cut activations by position may."""
        self.cost, self.memory = models.cost, models.memory
        self.layers = self.cost.model.layers
        self.recomputes, self._by_position = recompute, by_position
        self._recompute = models.recompute
        self._roles: dict[tuple[Form, bool, bool, ZeroStage, float, bool], Role] = {}
        self._layer_seconds: dict[Form, float] = {}
        self._tables: dict[tuple[Form, bool, bool, bool], tuple[float, ...]] = {}
        self._ways_of: dict[tuple[Role, int], tuple[Role, ...]] = {}
        self._caps: dict[tuple[Role, int, bool], int] = {}
        self._replays: dict[Role, FloatArray] = {}
        self._least: dict[tuple[Role, int, int], Replay | None] = {}
        self._receives: dict[tuple[object, ...], tuple[float, float]] = {}

    def roles(self, chain: Chain, zero: Zero) -> list[Role]:
        """Of the stages, with activations whole."""
        between = {form: self._role(form, False, False, zero) for form in set(chain[1:-1])}
        first, last = (
            self._role(chain[0], True, len(chain) == 1, zero),
            self._role(chain[-1], False, True, zero),
        )
        return [first, *(between[form] for form in chain[1:-1]), last][: len(chain)]

    def _role(self, form: Form, embedding: bool, head: bool, zero: Zero) -> Role:
        return self._interned(form, embedding, head, zero.stage, zero.ways(len(form.replicas)), False)

    def _interned(
        self, form: Form, embedding: bool, head: bool, zero_stage: ZeroStage, zero_ways: float, cut: bool
    ) -> Role:
        key = (form, embedding, head, zero_stage, zero_ways, cut)
        if key not in self._roles:
            self._roles[key] = Role(*key)
        return self._roles[key]

    def layer_seconds(self, form: Form) -> float:
        """Seconds that one more layer of a micro-batch takes, with activations whole or cut, whichever is quicker."""
        if form not in self._layer_seconds:
            tables = self._tables_of(form, False, False)
            self._layer_seconds[form] = min(table[1] - table[0] for table in tables)
        return self._layer_seconds[form]

    def quickest_table(self, form: Form, embedding: bool, head: bool) -> tuple[float, ...]:
        """Seconds of a micro-batch by layers, for each number of them in the quicker way."""
        return tuple(map(min, zip(*self._tables_of(form, embedding, head), strict=True)))

    def _tables_of(self, form: Form, embedding: bool, head: bool) -> list[tuple[float, ...]]:
        """With activations whole and, where that is possible, cut by position."""
        ways = (False, True) if self._may_cut(form) else (False,)
        return [self._table(form, embedding, head, cut) for cut in ways]

    def fewest_replay(self, role: Role, layers: int, in_flight: int) -> Replay | None:
        """What the stage must recompute to fit; None if nothing is enough."""
        if layers <= self.cap(role, in_flight, False):
            return Replay((), (0.0,))
        key = (role, layers, in_flight)
        if key not in self._least:
            assert self.recomputes
            loads = [(type_, self._load(role, rows, layers, in_flight)) for type_, rows in role.form.loads]
            self._least[key] = self._recompute.fewest(loads)
        return self._least[key]

    def cap(self, role: Role, in_flight: int, recomputed: bool) -> int:
        """Most layers that fit, with nothing or with everything recomputed."""
        key = (role, in_flight, recomputed)
        if key not in self._caps:
            self._caps[key] = self._most_layers(role, in_flight, recomputed)
        return self._caps[key]

    def _most_layers(self, role: Role, in_flight: int, recomputed: bool) -> int:
        if self.recomputes:
            replays = self.replay_seconds(role, in_flight)
            return int((np.isfinite(replays) if recomputed else replays == 0).sum()) - 1
        return min(
            self.memory.most_layers(
                self._load(role, rows, self.layers, in_flight), self.cost.device_types[type_]
            )
            for type_, rows in role.form.loads
        )

    def replay_seconds(self, role: Role, in_flight: int) -> FloatArray:
        """[layers] -> seconds of recomputation in a micro-batch's backward; inf where nothing fits."""
        known = self._replays.get(role)
        if known is None or len(known) <= in_flight:
            assert self.recomputes
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

    def seconds(self, role: Role, nodes: Nodes) -> tuple[float, ...]:
        """Seconds of a micro-batch by layers, without receiving and recomputation."""
        form, table = role.form, self._table(role.form, role.embedding, role.head, role.cut)
        if role.zero_stage < 2 or len(form.replicas) < 2:
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

    def ways(self, role: Role, in_flight: int) -> tuple[Role, ...]:
        """The role with activations whole and, where that may be better, cut by position."""
        key = (role, in_flight)
        if key not in self._ways_of:
            cut = self._interned(role.form, role.embedding, role.head, role.zero_stage, role.zero_ways, True)
            better = self._may_cut(role.form) and (
                self.cap(role, in_flight, False) < self.layers or self._is_ever_quicker(cut, role)
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
        return StageLoad(
            tp=role.form.tp,
            rows=rows,
            layers=layers,
            embedding=role.embedding,
            head=role.head,
            in_flight=in_flight,
            zero_stage=role.zero_stage,
            zero_ways=role.zero_ways,
            dp=len(role.form.replicas),
            sequence_parallel=role.cut,
        )

    def received(self, chain: Chain, nodes: Sequence[Nodes]) -> list[float]:
        received = [0.0] * len(chain)
        for stage in range(len(chain) - 1):
            forward, backward = self._boundary(chain[stage], nodes[stage], chain[stage + 1], nodes[stage + 1])
            received[stage + 1] += forward
            received[stage] += backward
        return received

    def _boundary(self, a: Form, nodes_a: Nodes, b: Form, nodes_b: Nodes) -> tuple[float, float]:
        """Seconds that b receives activations from a, and a gradients from b."""
        key = (a, nodes_a, b, nodes_b)
        if key not in self._receives:
            # Nodes numbered as they appear: where in its pipeline a boundary is does not matter.
            seen: dict[int, int] = {}
            near_a, near_b = (tuple(seen.setdefault(n, len(seen)) for n in of) for of in (nodes_a, nodes_b))
            alike = (a, near_a, b, near_b)
            if alike not in self._receives:
                one, other = _shape(a, near_a), _shape(b, near_b)
                self._receives[alike] = (
                    max(self.cost.receive(one, other)),
                    max(self.cost.receive(other, one)),
                )
            self._receives[key] = self._receives[alike]
        return self._receives[key]


class SharedFigures:
    """The figures of one request, for searches of it that may make use of all that it allows or of less."""

    def __init__(self, models: CostModels) -> None:
        self.models = models
        self._known: dict[tuple[bool, bool], StageFigures] = {}

    def of(self, request: PlanRequest) -> StageFigures:
        """Those of stages that do what the request allows."""
        key = (request.recompute, request.sequence_parallel)
        if key not in self._known:
            self._known[key] = StageFigures(
                self.models, recompute=request.recompute, by_position=request.sequence_parallel
            )
        return self._known[key]


def _shape(form: Form, nodes: Sequence[int]) -> StageShape:
    replicas = (Replica(node, type_, rows) for node, (type_, rows) in zip(nodes, form.replicas, strict=True))
    return StageShape(form.tp, tuple(replicas), 0)
