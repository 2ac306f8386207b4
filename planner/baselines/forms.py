"""Form: a stage without devices or layers. Devices of one type are alike, so counts are all that matters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from planner.cost.stages import StageCost
from planner.model_spec import ModelSpec

# Stages that mix types are only tried where their replicas differ by less than this factor in time.
_MOST_WASTE = 1.5


@dataclass(frozen=True)
class Part:
    """Replicas of one device type: each takes `rows` of a micro-batch."""

    type: str
    replicas: int
    rows: int


@dataclass(frozen=True, eq=False)
class Form:
    """A stage of `tp` devices a replica; more than one part if it mixes device types.

    Made by `make_form` alone, once for each content, and compared by identity, since chains are hashed often.
    """

    tp: int
    parts: tuple[Part, ...]

    @cached_property
    def replicas(self) -> tuple[tuple[str, int], ...]:
        """(device type, rows) of every replica."""
        return tuple((part.type, part.rows) for part in self.parts for _ in range(part.replicas))

    @cached_property
    def loads(self) -> tuple[tuple[str, int], ...]:
        """The distinct ones."""
        return tuple((part.type, part.rows) for part in self.parts)

    @property
    def devices(self) -> int:
        return self.tp * len(self.replicas)

    @property
    def counts(self) -> dict[str, int]:
        """Devices by type."""
        return {part.type: self.tp * part.replicas for part in self.parts}


@cache
def make_form(tp: int, parts: tuple[Part, ...]) -> Form:
    """The one form of this content."""
    return Form(tp, parts)


def pure(type_: str, *, tp: int, dp: int, micro_batch_size: int) -> Form:
    """A stage of one type, with equal rows."""
    assert micro_batch_size % dp == 0
    return make_form(tp, (Part(type_, dp, micro_batch_size // dp),))


def filled(type_: str, count: int, *, tp: int, dp: int, micro_batch_size: int) -> tuple[Form, ...]:
    """`count` devices as stages of (tp, dp); what is left over becomes narrower stages of at most that tp.

    The dp of a narrower stage divides the micro-batch too. All devices are used.
    """
    forms = [pure(type_, tp=tp, dp=dp, micro_batch_size=micro_batch_size)] * (count // (tp * dp))
    left = count % (tp * dp)
    while left:
        tp = next(degree for degree in range(min(tp, left), 0, -1) if tp % degree == 0)
        dp = max(n for n in range(1, left // tp + 1) if micro_batch_size % n == 0)
        forms.append(pure(type_, tp=tp, dp=dp, micro_batch_size=micro_batch_size))
        left -= tp * dp
    return tuple(forms)


def mixed(cost: StageCost, counts: Mapping[str, int], *, tp: int, micro_batch_size: int) -> Form | None:
    """A stage of several types whose rows make its slowest replica quickest; None if there is none.

    Every type's devices must make whole TP groups, and every replica needs a row.
    """
    if any(count % tp for count in counts.values()):
        return None
    types = list(counts)
    replicas = [counts[type_] // tp for type_ in types]
    best, best_seconds = None, float("inf")
    for rows in _row_vectors(replicas, micro_batch_size):
        seconds = [_layer_seconds(cost, type_, tp, n) for type_, n in zip(types, rows, strict=True)]
        if max(seconds) < best_seconds:
            best, best_seconds = rows, max(seconds)
    if best is None:
        return None
    return make_form(tp, tuple(map(Part, types, replicas, best)))


def balanced_mixes(
    cost: StageCost, counts: Mapping[str, int], *, tp: int, most_rows: int
) -> Iterator[tuple[int, Form]]:
    """(micro-batch size, stage of all these devices) whose replicas take nearly the same time."""
    if len(counts) < 2 or any(count % tp for count in counts.values()):
        return
    types = list(counts)
    replicas = [counts[type_] // tp for type_ in types]
    tables = [[_layer_seconds(cost, type_, tp, n) for n in range(1, most_rows + 1)] for type_ in types]
    for first, target in enumerate(tables[0], start=1):
        if target == float("inf"):
            continue
        rows = [first, *(_rows_within(table, target) for table in tables[1:])]
        seconds = [table[n - 1] for table, n in zip(tables, rows, strict=True)]
        if max(seconds) < _MOST_WASTE * min(seconds):
            size = sum(n * count for n, count in zip(rows, replicas, strict=True))
            yield size, make_form(tp, tuple(map(Part, types, replicas, rows)))


def tp_degrees(model: ModelSpec, most: int) -> tuple[int, ...]:
    """TP degrees up to `most` that divide heads and feed-forward width."""
    sizes = (model.heads, model.kv_heads, model.ffn_hidden_size)
    return tuple(tp for tp in range(1, most + 1) if all(size % tp == 0 for size in sizes))


def covered(cost: StageCost, form: Form) -> bool:
    """Whether the profile knows the times of all its replicas."""
    return all(cost.covers(device_type=type_, tp=form.tp, rows=rows) for type_, rows in form.loads)


def _row_vectors(replicas: Sequence[int], left: int) -> Iterator[tuple[int, ...]]:
    """Rows of each type's replicas, at least one, that use up the micro-batch."""
    first, others = replicas[0], replicas[1:]
    if not others:
        if left >= first and left % first == 0:
            yield (left // first,)
        return
    for rows in range(1, (left - sum(others)) // first + 1):
        for rest in _row_vectors(others, left - first * rows):
            yield (rows, *rest)


def _rows_within(table: Sequence[float], target: float) -> int:
    """The rows that take closest to `target` seconds, of seconds by rows from 1."""
    return min(range(1, len(table) + 1), key=lambda rows: abs(table[rows - 1] - target))


def _layer_seconds(cost: StageCost, type_: str, tp: int, rows: int) -> float:
    if not cost.covers(device_type=type_, tp=tp, rows=rows):
        return float("inf")
    return cost.replica_step(device_type=type_, tp=tp, rows=rows, layers=1).total
