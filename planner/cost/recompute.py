"""The fewest operators to recompute so that a stage fits its devices (design: most bytes per second first).

A stage climbs its ladder (planner/cost/ladder.py) layer by layer: some of its first layers stand on one rung,
the others on the one below. Backward replays what a layer gave up, so the price is seconds of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from planner.catalogue import DeviceType
from planner.cost.ladder import Rung, ladder
from planner.cost.layer_flow import Recompute, recompute_of
from planner.cost.memory import MemoryModel, StageLoad, most_tensor_bytes
from planner.cost.stages import StageCost
from planner.operators import GATHERING_OPERATORS, SUMMED_OPERATORS, layer_operators

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Replay:
    """What a stage recomputes, and the seconds that adds to the backward of a micro-batch, by replica."""

    recompute: Recompute
    seconds: tuple[float, ...]


class RecomputeModel:
    """Answers for one job; everything asked twice is kept."""

    def __init__(self, cost: StageCost, memory: MemoryModel) -> None:
        self._cost, self._memory = cost, memory
        self._ladders: dict[tuple[str, int, int, bool], tuple[Rung, ...]] = {}
        self._around: dict[tuple[int, int, int, bool, bool, int, bool], _Around] = {}

    def ladder(
        self, *, device_type: str, tp: int, rows: int, sequence_parallel: bool = False
    ) -> tuple[Rung, ...]:
        """The rungs of a replica's layers; the first is nothing, the last keeps only the layers' inputs."""
        key = (device_type, tp, rows, sequence_parallel)
        if key not in self._ladders:
            cost, model = self._cost, self._cost.model
            groups, whole = (
                cost.profile.groups(device_type).layer,
                cost.activation_all_reduce(device_type, tp, rows),
            )
            names = layer_operators(model)
            moved = dict.fromkeys(SUMMED_OPERATORS, whole)
            if sequence_parallel:
                both = (*SUMMED_OPERATORS, *GATHERING_OPERATORS)
                moved = {name: whole / 2 for name in both if name in names}
            self._ladders[key] = ladder(
                self._memory.rows_bytes(tp, rows, sequence_parallel).values,
                names,
                groups,
                {
                    group.name: cost.group_step(group, device_type, tp, rows, sequence_parallel).forward
                    for group in groups
                },
                moved,
            )
        return self._ladders[key]

    def fewest(self, loads: Sequence[tuple[str, StageLoad]]) -> Replay | None:
        """The least replay with which a stage fits every one of its devices; None if no replay is enough.

        `loads` are the device type and load of each distinct replica: alike but for type and rows. The
        stage recomputes the same in all of them, climbing the ladder of one; of these the quickest counts.
        """
        found = [
            replay for type_, load in loads if (replay := self._climb(self._ladder_of(type_, load), loads))
        ]
        return min(found, key=lambda replay: max(replay.seconds)) if found else None

    def _ladder_of(self, device_type: str, load: StageLoad) -> tuple[Rung, ...]:
        return self.ladder(
            device_type=device_type,
            tp=load.tp,
            rows=load.rows,
            sequence_parallel=load.sequence_parallel,
        )

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
        rungs = self._ladder_of(device_type, load)
        saved = self._memory.rows_bytes(load.tp, load.rows, load.sequence_parallel).layer_saved
        device = self._cost.device_types[device_type]
        ends = load.embedding, load.head
        key = (load.tp, load.rows, load.layers, *ends, most_in_flight, load.sequence_parallel)
        if key not in self._around:
            self._around[key] = _Around(self._memory, load, most_in_flight)
        room = _Room(self._memory, self._around[key], load, device, slack=1.0 if relaxed else 0.5)
        table = _relaxed(room, rungs, saved) if relaxed else _whole(room, rungs, saved)
        table[0] = np.inf
        return table

    def _climb(self, rungs: Sequence[Rung], loads: Sequence[tuple[str, StageLoad]]) -> Replay | None:
        """The first place on a ladder where all fit: memory only falls on the way up."""
        layers = loads[0][1].layers
        low, high = 0, (len(rungs) - 1) * layers
        if not self._fits(loads, recompute_on(rungs, layers, high)):
            return None
        while low < high:
            middle = (low + high) // 2
            if self._fits(loads, recompute_on(rungs, layers, middle)):
                high = middle
            else:
                low = middle + 1
        recompute = recompute_on(rungs, layers, low)
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

    def _fits(self, loads: Sequence[tuple[str, StageLoad]], recompute: Recompute) -> bool:
        types = self._cost.device_types
        return all(
            self._memory.fits(replace(load, recompute=recompute), types[type_]) for type_, load in loads
        )


def recompute_on(rungs: Sequence[Rung], layers: int, place: int) -> Recompute:
    """What a stage recomputes at a place of its ladder: `place` counts single steps of single layers."""
    if not place:
        return ()
    rung, further = divmod(place, layers)
    counts = dict.fromkeys(rungs[rung].operators, layers)
    if further:
        counts = dict.fromkeys(rungs[rung + 1].operators, further) | counts
    return recompute_of(counts)


class _Around:
    """What a stage holds beside its state and what its layers keep, by micro-batches in flight and layers: bytes that
    depend neither on the device nor on ZeRO."""

    def __init__(self, memory: MemoryModel, load: StageLoad, most_in_flight: int) -> None:
        self.layers = np.arange(load.layers + 1, dtype=np.float64)
        self.in_flight = np.arange(most_in_flight + 1, dtype=np.float64)[:, None]
        self.once = np.maximum(self.in_flight, 1)
        bases = [memory.step_bases(one) for one in _few_layers(load)]

        def by_layers(name: str) -> FloatArray:
            return _by_layers([float(getattr(base, name) or 0.0) for base in bases], load.layers)

        self.bytes = self.in_flight * by_layers("in_flight") + by_layers("messages")
        self.layer, self.head = by_layers("layer"), by_layers("head")
        self.embedding = by_layers("embedding") - by_layers("embedding_kept") if load.embedding else None


class _Room:
    """Bytes that the layers of a stage may keep of one micro-batch, by micro-batches in flight and layers.

    `ends` is what head and embedding leave them; `layer` what a layer's backward leaves, if the last layer
    gives up nothing that is alive again then. -inf where nothing fits.
    """

    def __init__(
        self, memory: MemoryModel, around: _Around, load: StageLoad, device: DeviceType, slack: float
    ) -> None:
        """`slack` of a byte above the largest whole number of bytes that fits still counts as fitting."""
        self.layers, self.in_flight, self.once = around.layers, around.in_flight, around.once
        # What a narrow wire needs stops growing at some number of layers.
        counts = _all_layers(load) if memory.narrow_wire else _few_layers(load)
        known = [memory.state_bytes(one) for one in counts]
        state, update = (_by_layers(list(line), load.layers) for line in zip(*known, strict=True))
        left = (most_tensor_bytes(device) + slack) / memory.memory_scale - state
        room = left - around.bytes
        room[:, update > left] = -np.inf
        self.layer = (room - around.layer) / self.once
        self.ends = (room - around.head) / self.once
        if around.embedding is not None:
            # The oldest micro-batch's layers are freed by then.
            others = room - around.embedding
            most = np.where(others < 0, -np.inf, others / np.maximum(self.in_flight - 1, _NONE))
            self.ends = np.minimum(self.ends, most)

    def kept(self, given_up: float) -> FloatArray:
        """What all layers may keep together when the last gives up so many bytes."""
        return np.minimum(self.ends, self.layer - given_up / self.once)


def _all_layers(load: StageLoad) -> list[StageLoad]:
    """The stage with every number of layers, from 0."""
    return [replace(load, layers=count, recompute=()) for count in range(load.layers + 1)]


def _few_layers(load: StageLoad) -> list[StageLoad]:
    """The stage with 0, 1 and 2 layers, as far as it has them."""
    return _all_layers(replace(load, layers=min(load.layers, 2), recompute=()))


def _by_layers(known: list[float], layers: int) -> FloatArray:
    """A figure for every number of layers, of those with 0, 1 and 2: layers are alike, so each beyond the first adds
    as much as the second. (Or of all of them.)"""
    if len(known) == layers + 1:
        return np.array(known)
    none, one, two = known
    found = one + (two - one) * np.arange(-1.0, layers)
    found[0] = none
    return found


# Divides what is left by no micro-batch at all: there is room for any.
_NONE = 1e-30


def _whole(room: _Room, rungs: Sequence[Rung], saved: float) -> FloatArray:
    """Some layers on a rung, the others on the one below."""
    layers, top = room.layers, rungs[-1].saved_bytes
    allowed = room.kept(0.0)
    table = np.where(layers * saved <= allowed, 0.0, np.inf)
    # What does not fit on the highest rung fits on none; a hair more, so that rounding leaves none out.
    fits = layers * (saved - top) * (1 - 1e-9) <= room.kept(top) * (1 + 1e-9)
    open_ = np.flatnonzero(np.isinf(table) & fits)
    for below, rung in pairwise(rungs):
        if not open_.size:
            break
        count = layers[open_ % len(layers)]
        kept_below, kept = saved - below.saved_bytes, saved - rung.saved_bytes
        needed = (count * kept_below - allowed.ravel()[open_]) / (kept_below - kept)
        steps = np.clip(np.ceil(needed), 1, count)
        allowed = room.kept(rung.saved_bytes)
        reached = count * kept <= allowed.ravel()[open_]
        seconds = steps * rung.seconds + (count - steps) * below.seconds
        table.ravel()[open_[reached]] = seconds[reached]
        open_ = open_[~reached]
    return table


def _relaxed(room: _Room, rungs: Sequence[Rung], saved: float) -> FloatArray:
    """Layers give up any part, at the price of the hull: the larger of what ends and layers ask for."""
    with np.errstate(invalid="ignore"):
        each = (room.layers * saved - room.ends) / np.maximum(room.layers, 1)
    each = np.where(room.layers > 0, each, np.where(room.ends < 0, np.inf, 0.0))
    ends = _hull_seconds(each, np.maximum(room.layers, 1), rungs)
    return np.maximum(ends, _relaxed_layers(room, rungs, saved))


def _relaxed_layers(room: _Room, rungs: Sequence[Rung], saved: float) -> FloatArray:
    """What the last layer gives up counts once less, being alive again in its backward.

    Least (l - 1) h(x) + h(y) with p (l - 1) x + (p - 1) y >= need for p micro-batches in flight: the hull h has
    corners, and at the least x or y is at one.
    """
    every = room.once * (room.layers * saved - room.layer)
    table = np.where(every <= 0, 0.0, np.inf)
    # Nothing helps beyond full recomputation of all layers.
    full = np.maximum(room.once * room.layers - 1, 0) * rungs[-1].saved_bytes
    open_ = (every > 0) & (every <= full * (1 + 1e-9))
    if open_.any():
        once, layers = (np.broadcast_to(one, every.shape)[open_] for one in (room.once, room.layers))
        table[open_] = _split_seconds(every[open_], once, layers, rungs)
    return table


def _split_seconds(
    need: FloatArray, in_flight: FloatArray, layers: FloatArray, rungs: Sequence[Rung]
) -> FloatArray:
    """The least seconds, by place of a table that needs so many bytes."""
    others = np.maximum(layers - 1, 0)
    weights = in_flight * others, (in_flight - 1) * (layers > 0)
    one = (layers > 0).astype(float)
    corners = np.array([[rung.saved_bytes] for rung in rungs])
    seconds = np.array([[rung.seconds] for rung in rungs])
    x = _solved(need - weights[1] * corners, weights[0])
    y = _solved(need - weights[0] * corners, weights[1])
    least = np.minimum(
        _hull_seconds(x, others, rungs) + one * seconds, others * seconds + _hull_seconds(y, one, rungs)
    )
    return least.min(axis=0)


def _solved(need: FloatArray, weight: FloatArray) -> FloatArray:
    """Least z >= 0 with weight * z >= need; inf if there is none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(need <= 0, 0.0, np.where(weight > 0, need / weight, np.inf))


def _hull_seconds(saved_bytes: FloatArray, layers: FloatArray, rungs: Sequence[Rung]) -> FloatArray:
    """Least seconds in which layers give up so many bytes each; inf for more than full recomputation does."""
    seconds = np.interp(saved_bytes, [rung.saved_bytes for rung in rungs], [rung.seconds for rung in rungs])
    return np.where(saved_bytes <= rungs[-1].saved_bytes, layers * seconds, np.inf)
