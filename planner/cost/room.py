"""What the layers of a stage may keep for backward: the room that its state and everything else leave them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from planner.catalogue import DeviceType
from planner.cost.memory import MemoryModel, StageLoad, most_tensor_bytes

FloatArray = npt.NDArray[np.float64]

# Divides what is left by no micro-batch at all: there is room for any.
_NONE = 1e-30


class Around:
    """What a stage holds beside its state and what its layers keep, by micro-batches in flight and layers: bytes that
    depend neither on the device nor on how many share the state."""

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


class Room:
    """Bytes that the layers of a stage may keep of one micro-batch, by load, micro-batches in flight and layers.

    `ends` is what head and embedding leave them; `layer` what a layer's backward leaves, if nothing that the last
    layer gives up is alive again then. -inf where nothing fits.
    """

    def __init__(
        self,
        memory: MemoryModel,
        every: Sequence[Around],
        loads: Sequence[StageLoad],
        device: DeviceType,
        slack: float,
    ) -> None:
        """`slack` of a byte above the largest whole number of bytes that fits still counts as fitting.

        `every` is what is around the state of each load.
        """
        around = every[0]
        self.layers, self.in_flight, self.once = around.layers, around.in_flight, around.once
        state, update = (
            np.array(lines)[:, None]
            for lines in zip(*(_state_by_layers(memory, load) for load in loads), strict=True)
        )
        left = (most_tensor_bytes(device) + slack) / memory.memory_scale - state
        room = np.where(update > left, -np.inf, left - around.bytes)
        self.layer = (room - around.layer) / self.once
        self.ends = (room - np.array([one.head for one in every])[:, None]) / self.once
        if around.embedding is not None:
            # The oldest micro-batch's layers are freed by then.
            others = room - np.array([one.embedding for one in every])[:, None]
            most = np.where(others < 0, -np.inf, others / np.maximum(self.in_flight - 1, _NONE))
            self.ends = np.minimum(self.ends, most)

    def kept(self, revived: float) -> FloatArray:
        """What all layers may keep together when the last one's backward needs so many bytes more for recomputing."""
        return np.minimum(self.ends, self.layer - revived / self.once)


def _state_by_layers(memory: MemoryModel, load: StageLoad) -> tuple[FloatArray, FloatArray]:
    """`MemoryModel.state_bytes` by number of layers."""
    # What a narrow wire needs stops growing at some number of layers.
    most = load.layers if memory.narrow_wire else min(load.layers, 2)
    known = [memory.state_bytes(load, layers=count) for count in range(most + 1)]
    state, update = (_by_layers(list(line), load.layers) for line in zip(*known, strict=True))
    return state, update


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
