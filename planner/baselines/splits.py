"""Layers of a chain: the min-max split of least Eq. 1, within the memory of every stage."""

from __future__ import annotations

from collections.abc import Sequence

from planner.baselines.forms import Form
from planner.baselines.sketch import Chain
from planner.cost.exchange import Replica
from planner.cost.memory import MemoryModel, StageLoad
from planner.cost.stages import StageCost, StageShape
from planner.search.layer_split import Split, SplitStage, best_splits


class Splitter:
    """Splits chains of one model; what is asked twice is kept."""

    def __init__(self, cost: StageCost, memory: MemoryModel) -> None:
        self.cost, self.memory = cost, memory
        self.layers = cost.model.layers
        self._layer_seconds: dict[Form, float] = {}
        self._tables: dict[tuple[Form, bool, bool], tuple[float, ...]] = {}
        self._caps: dict[tuple[Form, bool, bool, int], int] = {}
        self._receives: dict[tuple[object, ...], tuple[float, float]] = {}
        self._splits: dict[tuple[object, ...], Split | None] = {}

    def layer_seconds(self, form: Form) -> float:
        """Seconds that one more layer of a micro-batch takes."""
        if form not in self._layer_seconds:
            table = self._table(form, False, False)
            self._layer_seconds[form] = table[1] - table[0]
        return self._layer_seconds[form]

    def _table(self, form: Form, embedding: bool, head: bool) -> tuple[float, ...]:
        key = (form, embedding, head)
        if key not in self._tables:
            self._tables[key] = self.cost.layer_table(
                form.loads, tp=form.tp, most_layers=self.layers, embedding=embedding, head=head
            )
        return self._tables[key]

    def _cap(self, form: Form, embedding: bool, head: bool, in_flight: int) -> int:
        key = (form, embedding, head, in_flight)
        if key not in self._caps:
            self._caps[key] = min(
                self.memory.most_layers(
                    StageLoad(form.tp, rows, self.layers, embedding, head, in_flight),
                    self.cost.device_types[type_],
                )
                for type_, rows in form.loads
            )
        return self._caps[key]

    def limits(self, chain: Chain, micro_batches: int) -> list[tuple[int, int]]:
        """(fewest, most) layers of every stage; empty if the model does not fit."""
        count = len(chain)
        found = []
        for stage, form in enumerate(chain):
            first, last = stage == 0, stage == count - 1
            fewest = 0 if first or last else 1
            most = self._cap(form, first, last, min(count - stage, micro_batches))
            if most < fewest:
                return []
            found.append((fewest, most))
        return found if sum(most for _, most in found) >= self.layers else []

    def split(
        self,
        chain: Chain,
        devices: Sequence[tuple[str, ...]],
        micro_batches: int,
        layers: Sequence[int] | None,
    ) -> Split | None:
        """The layers of least Eq. 1, or `layers`; None if they do not fit."""
        count, limits = len(chain), self.limits(chain, micro_batches)
        if not limits:
            return None
        nodes = self._node_pattern(chain, devices)
        key = (chain, nodes, micro_batches, layers and tuple(layers))
        if key not in self._splits:
            received = self._received(chain, nodes)
            stages = [
                SplitStage(self._table(form, stage == 0, stage == count - 1), extra, fewest, most)
                for stage, (form, extra, (fewest, most)) in enumerate(
                    zip(chain, received, limits, strict=True)
                )
            ]
            split = _fixed(stages, layers) if layers else _balanced(stages, self.layers, micro_batches)
            self._splits[key] = split
        return self._splits[key]

    def _node_pattern(self, chain: Chain, devices: Sequence[tuple[str, ...]]) -> tuple[tuple[int, ...], ...]:
        """Nodes of every stage's replicas, numbered as they appear."""
        seen: dict[str, int] = {}
        found = []
        for form, ids in zip(chain, devices, strict=True):
            names = (ids[start].rsplit("/", 1)[0] for start in range(0, len(ids), form.tp))
            found.append(tuple(seen.setdefault(name, len(seen)) for name in names))
        return tuple(found)

    def _received(self, chain: Chain, nodes: Sequence[tuple[int, ...]]) -> list[float]:
        received = [0.0] * len(chain)
        for stage in range(len(chain) - 1):
            forward, backward = self._boundary(chain[stage], nodes[stage], chain[stage + 1], nodes[stage + 1])
            received[stage + 1] += forward
            received[stage] += backward
        return received

    def _boundary(
        self, a: Form, nodes_a: tuple[int, ...], b: Form, nodes_b: tuple[int, ...]
    ) -> tuple[float, float]:
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


def _shape(form: Form, nodes: Sequence[int]) -> StageShape:
    replicas = (Replica(node, type_, rows) for node, (type_, rows) in zip(nodes, form.replicas, strict=True))
    return StageShape(form.tp, tuple(replicas), 0)


def _balanced(stages: Sequence[SplitStage], layers: int, micro_batches: int) -> Split | None:
    found = best_splits(stages, layers=layers, micro_batches=[micro_batches])
    return found[0] if found else None


def _fixed(stages: Sequence[SplitStage], layers: Sequence[int]) -> Split | None:
    """These layers, if they fit."""
    if any(count > stage.most for stage, count in zip(stages, layers, strict=True)):
        return None
    seconds = [stage.seconds(count) for stage, count in zip(stages, layers, strict=True)]
    return Split(tuple(layers), sum(seconds), max(seconds))
