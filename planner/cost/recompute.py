"""The fewest operators to recompute so that a stage fits its devices (design: most bytes per second first).

A stage climbs its ladder (planner/cost/ladder.py) layer by layer: some of its first layers stand on one rung,
the others on the one below. Backward replays what a layer gave up, so the price is seconds of backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from planner.cost.ladder import Rung, ladder
from planner.cost.layer_flow import Recompute, recompute_of
from planner.cost.memory import MemoryModel, StageLoad, most_tensor_bytes
from planner.cost.room import Around, Room
from planner.cost.stages import StageCost
from planner.operators import GATHERING_OPERATORS, SUMMED_OPERATORS, layer_operators

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Replay:
    """What a stage recomputes, and the seconds that adds to the backward of a micro-batch, by replica."""

    recompute: Recompute
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class _Steps:
    """The rungs of a ladder, with figures of one layer and one micro-batch by rung: columns [rung, 1]."""

    rungs: tuple[Rung, ...]
    kept: FloatArray
    """Bytes that the layer keeps."""
    revived: FloatArray
    """Bytes that its backward needs more (`RowBytes.layer_revived`)."""
    seconds: FloatArray
    pieces: dict[int, list[tuple[FloatArray, FloatArray, FloatArray]]] = field(default_factory=dict)
    """`_pieces` of the rungs by the most micro-batches in flight."""


class RecomputeModel:
    """Answers for one job; everything asked twice is kept."""

    def __init__(self, cost: StageCost, memory: MemoryModel) -> None:
        self._cost, self._memory = cost, memory
        self._ladders: dict[tuple[str, int, int, bool], _Steps] = {}
        self._around: dict[tuple[int, int, int, bool, bool, int, bool, int], Around] = {}

    def ladder(
        self, *, device_type: str, tp: int, rows: int, sequence_parallel: bool = False
    ) -> tuple[Rung, ...]:
        """The rungs of a replica's layers; the first is nothing, the last keeps only the layers' inputs."""
        return self._steps(device_type, tp, rows, sequence_parallel).rungs

    def _steps(self, device_type: str, tp: int, rows: int, sequence_parallel: bool) -> _Steps:
        key = (device_type, tp, rows, sequence_parallel)
        if key not in self._ladders:
            rungs = self._rungs(*key)
            sizes = self._memory.rows_bytes(tp, rows, sequence_parallel)
            sets = [frozenset(rung.operators) for rung in rungs]
            self._ladders[key] = _Steps(
                rungs,
                np.array([[sizes.layer_saved - rung.saved_bytes] for rung in rungs]),
                np.array([[sizes.layer_revived(operators)] for operators in sets]),
                np.array([[rung.seconds] for rung in rungs]),
            )
        return self._ladders[key]

    def _rungs(self, device_type: str, tp: int, rows: int, sequence_parallel: bool) -> tuple[Rung, ...]:
        cost, model = self._cost, self._cost.model
        groups = cost.profile.groups(device_type).layer
        whole = cost.activation_all_reduce(device_type, tp, rows)
        names = layer_operators(model)
        moved = dict.fromkeys(SUMMED_OPERATORS, whole)
        if sequence_parallel:
            both = (*SUMMED_OPERATORS, *GATHERING_OPERATORS)
            moved = {name: whole / 2 for name in both if name in names}
        return ladder(
            self._memory.rows_bytes(tp, rows, sequence_parallel).values,
            names,
            groups,
            {
                group.name: cost.group_step(group, device_type, tp, rows, sequence_parallel).forward
                for group in groups
            },
            moved,
        )

    def fewest(self, loads: Sequence[tuple[str, StageLoad]]) -> Replay | None:
        """The least replay with which a stage fits every one of its devices; None if no replay is enough.

        `loads` are the device type and load of each distinct replica: alike but for type and rows. The
        stage recomputes the same in all of them, climbing the ladder of one; of these the quickest counts.
        """
        found = [
            replay
            for type_, load in loads
            if (replay := self._climb(self._steps_of(type_, load).rungs, loads))
        ]
        return min(found, key=lambda replay: max(replay.seconds)) if found else None

    def _steps_of(self, device_type: str, load: StageLoad) -> _Steps:
        return self._steps(device_type, load.tp, load.rows, load.sequence_parallel)

    def recompute_at(self, *, device_type: str, load: StageLoad) -> Recompute | None:
        """`fewest` of a stage of one kind of replica, without the seconds."""
        replay = self.fewest([(device_type, load)])
        return replay.recompute if replay else None

    def seconds_table(
        self, device_type: str, load: StageLoad, *, most_in_flight: int, relaxed: bool = False
    ) -> FloatArray:
        """Extra seconds of a micro-batch's backward by micro-batches in flight and layers, from 0 each.

        `[in_flight, layers]` up to `most_in_flight` and `load.layers`: what `fewest` would say; inf where
        nothing fits, as with 0 in flight. With `relaxed` layers may be recomputed in part, which no choice of
        operators for each layer can beat.
        """
        return self.seconds_tables(device_type, [load], most_in_flight=most_in_flight, relaxed=relaxed)[0]

    def seconds_tables(
        self, device_type: str, loads: Sequence[StageLoad], *, most_in_flight: int, relaxed: bool = False
    ) -> FloatArray:
        """`seconds_table` of loads that differ in nothing but ZeRO: [load, in_flight, layers]."""
        load = loads[0]
        steps = self._steps_of(device_type, load)
        sizes = self._memory.rows_bytes(load.tp, load.rows, load.sequence_parallel)
        device = self._cost.device_types[device_type]
        around = [self._around_of(one, most_in_flight) for one in loads]
        room = Room(self._memory, around, loads, device, slack=1.0 if relaxed else 0.5)
        if relaxed:
            table = _relaxed(room, steps, sizes.layer_saved, sizes.never_alive)
        else:
            table = _whole(room, steps)
        table[:, 0] = np.inf
        return table

    def _around_of(self, load: StageLoad, most_in_flight: int) -> Around:
        ends = load.embedding, load.head
        # Under ZeRO-2 gradients of an end arrive from the other replicas while it runs backward.
        dp = load.dp if load.zero_stage == 2 and any(ends) else 1
        key = (load.tp, load.rows, load.layers, *ends, most_in_flight, load.sequence_parallel, dp)
        if key not in self._around:
            self._around[key] = Around(self._memory, load, most_in_flight)
        return self._around[key]

    def _climb(self, rungs: Sequence[Rung], loads: Sequence[tuple[str, StageLoad]]) -> Replay | None:
        """The first place on a ladder where all fit."""
        layers = loads[0][1].layers
        fits = np.logical_and.reduce([self._fits_at(rungs, type_, load) for type_, load in loads])
        if not fits.any():
            return None
        recompute = recompute_on(rungs, layers, int(fits.argmax()))
        return Replay(
            recompute,
            tuple(
                self._cost.replay_seconds(
                    device_type=type_,
                    tp=load.tp,
                    rows=load.rows,
                    layers=layers,
                    recompute=recompute,
                    sequence_parallel=load.sequence_parallel,
                )
                for type_, load in loads
            ),
        )

    def _fits_at(self, rungs: Sequence[Rung], type_: str, load: StageLoad) -> npt.NDArray[np.bool_]:
        """`MemoryModel.fits` by place on a ladder."""
        sizes, layers = self._memory.rows_bytes(load.tp, load.rows, load.sequence_parallel), load.layers
        kept, revived = (
            np.array([figure(frozenset(rung.operators)) for rung in rungs])[:, None]
            for figure in (sizes.layer_kept, sizes.layer_revived)
        )
        # Of two rungs: those on the higher one, the first, and those behind them. Which are freed before.
        higher = np.arange(layers)
        behind = (layers - higher) * kept[:-1]
        needs = np.where(higher > 0, np.maximum(revived[:-1], revived[1:] - behind), revived[:-1])
        phases = self._memory.step_bases(load).phases(
            in_flight=load.in_flight,
            layers_kept=np.append(behind + higher * kept[1:], layers * kept[-1]),
            revived=np.append(needs, revived[-1]),
        )
        state, update = self._memory.state_bytes(load)
        bytes_ = (state + reduce(np.maximum, phases, np.float64(update))) * self._memory.memory_scale
        fits: npt.NDArray[np.bool_] = np.floor(bytes_) <= most_tensor_bytes(self._cost.device_types[type_])
        return fits


def recompute_on(rungs: Sequence[Rung], layers: int, place: int) -> Recompute:
    """What a stage recomputes at a place of its ladder: `place` counts single steps of single layers."""
    if not place:
        return ()
    rung, further = divmod(place, layers)
    counts = dict.fromkeys(rungs[rung].operators, layers)
    if further:
        counts = dict.fromkeys(rungs[rung + 1].operators, further) | counts
    return recompute_of(counts)


def _whole(room: Room, ladder: _Steps) -> FloatArray:
    """Some layers on a rung, the others on the one below."""
    layers, kept = room.layers, ladder.kept
    roomiest = room.kept(0.0)
    table = np.where(layers * kept[0] <= roomiest, 0.0, np.inf)
    # What does not fit although nothing is alive again fits on no rung; a hair more, for rounding.
    fits = layers * kept[-1] * (1 - 1e-9) <= roomiest * (1 + 1e-9)
    open_ = np.flatnonzero(np.isinf(table) & fits)
    if not open_.size or len(kept) == 1:
        return table
    count, once = layers[open_ % len(layers)], np.broadcast_to(room.once, table.shape).ravel()[open_]
    # [rung, cell], of all rungs together: that takes less time than one after the other.
    last = room.layer.ravel()[open_] - ladder.revived / once
    room_for = np.minimum(room.ends.ravel()[open_], last)
    # Not all layers: the backward of the last one, and that of the last on the rung, when those behind are freed.
    saved, behind = kept[:-1] - kept[1:], count * kept[:-1]
    steps = np.maximum(np.ceil((behind - room_for[:-1]) / saved), 1)
    left = last[1:] - behind * (1 - 1 / once)
    slope = saved - kept[:-1] / once
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(slope > 0, np.maximum(steps, np.ceil(-left / slope)), steps)
    mixed = (steps < count) & (left + steps * slope >= 0)
    steps = np.where(mixed, steps, count)
    reached = mixed | (count * kept[1:] <= room_for[1:])
    again = ladder.seconds
    seconds = np.where(reached, steps * again[1:] + (count - steps) * again[:-1], np.inf)
    # Of the lowest rung that is reached.
    table.ravel()[open_] = seconds[reached.argmax(axis=0), np.arange(len(open_))]
    return table


def _relaxed(room: Room, ladder: _Steps, saved: float, not_alive: float) -> FloatArray:
    """Layers give up any part, at the price of the hull. The larger of two needs: that of layers of which nothing is
    alive again, and that where all but so many bytes of the last one is."""
    return np.maximum(
        _relaxed_alike(room, ladder.rungs, saved), _relaxed_last(room, ladder, saved, not_alive)
    )


def _relaxed_alike(room: Room, rungs: Sequence[Rung], saved: float) -> FloatArray:
    """Every layer gives up as much, at the least seconds of the hull."""
    need = room.layers * saved - room.kept(0.0)
    with np.errstate(invalid="ignore"):
        fits = np.where(
            room.layers > 0, need / np.maximum(room.layers, 1) <= rungs[-1].saved_bytes, need <= 0
        )
    need = np.where(fits, need, 0.0)
    seconds = np.zeros(need.shape)
    for below, above in pairwise(rungs):
        slope = _slope(below, above)
        line = need * slope + room.layers * (below.seconds - slope * below.saved_bytes)
        np.maximum(seconds, line, out=seconds)
    return np.where(fits, seconds, np.inf)


def _relaxed_last(room: Room, ladder: _Steps, saved: float, not_alive: float) -> FloatArray:
    """What the last layer gives up counts once less, being alive again in its backward but for some bytes.

    Least (l - 1) h(x) + h(y) with p (l - 1) x + (p - 1) y >= need for p micro-batches in flight. The hull h is
    convex, so x and y take its pieces in the order of seconds for each byte that is needed: the least seconds are a
    convex function of the need, the highest of the lines through its pieces.
    """
    rungs = ladder.rungs
    need = room.once * (room.layers * saved - room.layer) - not_alive
    # Nothing helps beyond full recomputation of all layers.
    full = np.maximum(room.once * room.layers - 1, 0) * rungs[-1].saved_bytes
    fits = need <= full * (1 + 1e-9)
    seconds = np.zeros(need.shape)
    if len(rungs) > 1 and (fits & (need > 0)).any():
        need = np.where(fits, need, 0.0)
        others = np.maximum(room.layers - 1, 0)
        most = len(room.once)
        if most not in ladder.pieces:
            ladder.pieces[most] = list(_pieces(rungs, room.once))
        for slope, each, once in ladder.pieces[most]:
            np.maximum(seconds, need * slope + (others * each + once), out=seconds)
    return np.where(fits, seconds, np.inf)


def _pieces(
    rungs: Sequence[Rung], in_flight: FloatArray
) -> Iterator[tuple[FloatArray, FloatArray, FloatArray]]:
    """Lines below the least seconds by micro-batches in flight: seconds for each byte needed, and the seconds at no
    need, for each layer but the last and once: columns."""
    slopes = np.array([_slope(below, above) for below, above in pairwise(rungs)])
    starts = np.array([(below.saved_bytes, below.seconds) for below in rungs])
    pieces = len(slopes)
    # Last layers: in the order of seconds for each byte needed, one micro-batch less counts.
    weights = np.concatenate([in_flight.repeat(pieces, 1), (in_flight - 1).repeat(pieces, 1)], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        prices = np.where(weights > 0, np.tile(slopes, 2) / weights, np.inf)
    order = np.argsort(prices, axis=1, kind="stable")
    taken = np.zeros((len(in_flight), 2), dtype=int)
    rows = np.arange(len(in_flight))
    for place in range(2 * pieces):
        piece = order[:, place]
        last = (piece >= pieces).astype(int)
        price = prices[rows, piece][:, None]
        usable = np.isfinite(price)
        price = np.where(usable, price, 0.0)
        before, alone = starts[taken[:, 0]], starts[taken[:, 1]]
        each = before[:, 1:] - price * in_flight * before[:, :1]
        once = alone[:, 1:] - price * (in_flight - 1) * alone[:, :1]
        # With one in flight nothing that the last layer gives up helps.
        yield price, np.where(usable, each, 0.0), np.where(usable, once, 0.0)
        taken[rows, last] += 1


def _slope(below: Rung, above: Rung) -> float:
    """Seconds a byte."""
    return (above.seconds - below.seconds) / (above.saved_bytes - below.saved_bytes)
