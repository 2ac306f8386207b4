"""StageTable: the seconds of every way to run one stage, the only thing the exact solver reads.

A stage is described without devices: its choice (kinds, TP, rows), its role in the pipeline, its position
counted from the end (the number of micro-batches it holds in flight under 1F1B) and its layers. Any profile
and any memory model slot in here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from planner.cost.gradient import update_bytes_per_value
from planner.cost.held import held_values
from planner.cost.memory import MemoryModel, StageLoad
from planner.cost.stages import StageCost
from planner.profile.analytic import PRECISION_BYTES
from planner.search.exact.choices import StageChoice
from planner.search.exact.covers import Cover
from planner.search.exact.pool import Pool, Vector
from planner.search.exact.role import Role
from planner.search.exact.surroundings import Surroundings

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StageTable:
    """One micro-batch through one stage, by choice c, position p from the end and layers l.

    `forward[role, c, l]` and `backward` are operators and TP collectives, `receive[role, c]` is receiving
    from all neighbours. `most[role, c, p]` is the most layers that fit with p micro-batches in flight, -1
    where not even none do (and for p = 0, which is unused). `gradient_bytes[role, c, l]` are the bytes a
    device has to synchronise, `update` the seconds of its optimizer step, and `after` the seconds from the
    stage's last backward to the end of the iteration: both, for the number of pipelines that the table was
    last told.
    """

    micro_batch_size: int
    layers: int
    choices: tuple[StageChoice, ...]
    counts: tuple[Vector, ...]
    forward: FloatArray
    backward: FloatArray
    receive: FloatArray
    most: IntArray
    gradient_bytes: FloatArray
    update: FloatArray
    after: FloatArray
    covers: tuple[Cover, ...] = ()
    """Of a table for bounds, the last choices stand for every stage that mixes types: these."""

    @cached_property
    def seconds(self) -> FloatArray:
        """Forward, backward and receiving: [role, c, l]."""
        total: FloatArray = self.forward + self.backward + self.receive[..., None]
        return total

    @property
    def max_stages(self) -> int:
        return self.most.shape[2] - 1

    @property
    def usable(self) -> bool:
        """Whether any stage fits at all."""
        return bool((self.most >= 0).any())

    def fitting(self) -> npt.NDArray[np.bool_]:
        """[role, choice, layers]: whether some position has room."""
        fits: npt.NDArray[np.bool_] = np.arange(self.layers + 1) <= self.most.max(axis=2)[:, :, None]
        fits[Role.MIDDLE, :, 0] = False
        return fits

    def for_pipelines(self, surroundings: Surroundings, pipelines: float) -> StageTable:
        """The table for so many pipelines that share every gradient."""
        replicas = [len(choice.rows) for choice in self.choices] + [2] * len(self.covers)
        rates = [surroundings.gradient_byte_seconds(pipelines - 1 + count) for count in replicas]
        return replace(self, after=self.gradient_bytes * np.array(rates)[:, None] + self.update)

    def capped(self, after_seconds: float) -> StageTable:
        """The table without stages that need longer after their last backward."""
        within = (self.after <= after_seconds).sum(axis=2) - 1
        return replace(self, most=np.minimum(self.most, within[:, :, None]))

    def cost(self, prices: FloatArray) -> FloatArray:
        """What the devices of each choice cost, of covers at least."""
        plain = np.array(self.counts, dtype=float).reshape(-1, len(prices)) @ prices
        return np.concatenate([plain, [cover.cost(prices) for cover in self.covers]])

    def kept(self, choices: Sequence[int]) -> StageTable:
        """Some of the choices."""
        arrays = {
            field.name: getattr(self, field.name)[:, list(choices)]
            for field in fields(self)
            if isinstance(getattr(self, field.name), np.ndarray)
        }
        return replace(
            self,
            choices=tuple(self.choices[i] for i in choices),
            counts=tuple(self.counts[i] for i in choices),
            **arrays,
        )


def build_table(
    cost: StageCost,
    memory: MemoryModel,
    pool: Pool,
    choices: Sequence[StageChoice],
    surroundings: Surroundings,
    *,
    micro_batch_size: int,
    max_stages: int,
) -> StageTable:
    """The table of one micro-batch size, for a single pipeline."""
    layers = cost.model.layers
    shape = (len(Role), len(choices))
    forward, backward, gradient, update = (np.zeros((*shape, layers + 1)) for _ in range(4))
    receive = np.zeros(shape)
    most = np.full((*shape, max_stages + 1), -1, dtype=np.int64)
    fits = Fits(memory, pool, layers, max_stages)
    for index, choice in enumerate(choices):
        for role in Role:
            forward[role, index], backward[role, index] = _lines(cost, pool, choice, role)
            receive[role, index] = surroundings.receive_seconds(choice, sides=role.sides)
            rooms = [fits.of(kind, choice.tp, rows, role) for kind, rows in choice.loads]
            most[role, index] = np.min(rooms, axis=0)
            gradient[role, index], update[role, index] = _after_lines(cost, pool, choice, role)
    counts = tuple(choice.counts(len(pool.kinds)) for choice in choices)
    table = StageTable(
        micro_batch_size,
        layers,
        tuple(choices),
        counts,
        forward,
        backward,
        receive,
        most,
        gradient,
        update,
        after=update,
    )
    return _without_dominated(table)


def _lines(cost: StageCost, pool: Pool, choice: StageChoice, role: Role) -> tuple[FloatArray, FloatArray]:
    """Forward and backward seconds by number of layers: the slowest replica's, each apart."""
    layers = np.arange(cost.model.layers + 1)
    forward = np.zeros(len(layers))
    backward = np.zeros(len(layers))
    for kind, rows in sorted(choice.loads):
        ends, one = (
            cost.replica_step(
                device_type=pool.kinds[kind].type,
                tp=choice.tp,
                rows=rows,
                layers=count,
                embedding=role.embedding,
                head=role.head,
            )
            for count in (0, 1)
        )
        forward = np.maximum(forward, ends.forward + layers * (one.forward - ends.forward))
        backward = np.maximum(backward, ends.backward + layers * (one.backward - ends.backward))
    return forward, backward


def _after_lines(
    cost: StageCost, pool: Pool, choice: StageChoice, role: Role
) -> tuple[FloatArray, FloatArray]:
    """Bytes of gradients of a device, and seconds of its optimizer step, by number of layers."""
    none, one = (
        held_values(cost.model, choice.tp, layers, role.embedding, role.head).numel for layers in (0, 1)
    )
    values = none + np.arange(cost.model.layers + 1, dtype=np.float64) * (one - none)
    streaming = max(
        cost.profile.streaming_seconds(device_type=pool.kinds[kind].type, moved_bytes=1.0)
        for kind in set(choice.kinds)
    )
    wire = PRECISION_BYTES[cost.dtypes.wire]
    return values * wire, values * (update_bytes_per_value(cost.dtypes) * streaming)


class Fits:
    """Most layers that fit by micro-batches in flight, worked out once for every load."""

    def __init__(self, memory: MemoryModel, pool: Pool, layers: int, max_stages: int) -> None:
        self._memory, self._pool = memory, pool
        self._layers, self._stages = layers, max_stages
        self._known: dict[tuple[str, int, int, Role], IntArray] = {}

    def of(self, kind: int, tp: int, rows: int, role: Role) -> IntArray:
        """By position from the end; -1 where nothing fits."""
        key = (self._pool.kinds[kind].type, tp, rows, role)
        if key not in self._known:
            self._known[key] = self._most(kind, tp, rows, role)
        return self._known[key]

    def _most(self, kind: int, tp: int, rows: int, role: Role) -> IntArray:
        """A single or last stage has one micro-batch in flight, and no other position."""
        device = self._pool.kinds[kind].device

        def most_layers(position: int, at_most: int) -> int:
            load = StageLoad(tp, rows, at_most, role.embedding, role.head, position)
            return self._memory.most_layers(load, device)

        most = np.full(self._stages + 1, -1, dtype=np.int64)
        most[1] = most_layers(1, self._layers)
        if not role.head and self._stages > 1:
            most[-1] = most_layers(self._stages, int(most[1]))
            self._fill(most, 1, self._stages, most_layers)
        if role is Role.MIDDLE:
            most[most < 1] = -1
        return most

    def _fill(self, most: IntArray, first: int, last: int, most_layers: Callable[[int, int], int]) -> None:
        """Positions between two known ones: more in flight never leaves room for more layers."""
        if most[first] == most[last]:
            most[first:last] = most[first]
            return
        if last - first > 1:
            middle = (first + last) // 2
            most[middle] = most_layers(middle, int(most[first]))
            self._fill(most, first, middle, most_layers)
            self._fill(most, middle, last, most_layers)


def _without_dominated(table: StageTable) -> StageTable:
    """Leave out choices that another with the same devices beats in every respect; of equal ones keep the
    first."""
    kept: list[int] = []
    for index in range(len(table.choices)):
        if not (table.most[:, index] >= 0).any():
            continue
        rivals = [i for i in kept if table.counts[i] == table.counts[index]]
        if any(_beats(table, i, index) for i in rivals):
            continue
        kept = [i for i in kept if i not in rivals or not _beats(table, index, i)] + [index]
    return table.kept(kept)


def _beats(table: StageTable, one: int, other: int) -> bool:
    return bool(
        len(table.choices[one].rows) <= len(table.choices[other].rows)
        and all(
            (array[:, one] <= array[:, other]).all()
            for array in (-table.most, table.seconds, table.backward, table.gradient_bytes, table.update)
        )
    )
