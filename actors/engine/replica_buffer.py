"""The gradients of a rank that shares them with the other replicas of its stage (planner/replica_shards.py).

Each part of a block has a room, where backward puts it whole, and in it or beside it a piece, where the
replica's share of the stage's sum grows. Under ZeRO-2 the rooms of all regions share one region's memory: when
backward has made all of a region, its rooms are reduced and scattered to the replicas' pieces, and are free again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from actors.engine.gradient_buffer import CallData, HeldParameter, ParameterGradients, Piece, Place
from actors.engine.gradient_transport import Steps
from planner.gradient_calls import GradientCall
from planner.replica_shards import Part, Range


@dataclass(frozen=True)
class HeldPart:
    """A part as a rank holds it.

    `room` is flat, rounded up to equal rows, one a replica of the stage; `piece` is the size of a row and, unless
    rooms are shared, is the rank's own row.
    """

    part: Part
    rank: int
    room: torch.Tensor
    piece: torch.Tensor

    @property
    def own_row(self) -> torch.Tensor:
        """The row of the room that is the rank's piece."""
        first = self.part.stand(self.rank).replica * self.piece.numel()
        return self.room[first : first + self.piece.numel()]

    @property
    def shared_room(self) -> bool:
        """Whether the room is other parts' too, and so holds nothing for long."""
        return self.own_row.data_ptr() != self.piece.data_ptr()

    def in_piece(self, ranges: Sequence[Range]) -> list[torch.Tensor]:
        """Views of ranges of the part that lie in the piece."""
        first, _ = self.part.piece(self.rank)
        return [self.piece[start - first : stop - first] for start, stop in ranges]

    def in_room(self, ranges: Sequence[Range]) -> list[torch.Tensor]:
        """Views of ranges of the part."""
        return [self.room[start:stop] for start, stop in ranges]


@dataclass(frozen=True)
class HeldRegion:
    """All that a rank holds of a region: layer, embedding, final norm or head."""

    order: int
    parts: tuple[HeldPart, ...]
    pieces: tuple[Piece, ...]


class ReplicaBuffer(ParameterGradients):
    """Rooms and pieces of a rank's parts.

    Args:
        parts: the rank's, by section and region.
        scatter: sums each micro-batch's gradients over `replicas`, the ranks that hold what this one holds; None
            where rooms keep the whole gradient until the end.
    """

    def __init__(
        self,
        *,
        handles: Sequence[HeldParameter],
        parts: Sequence[Part],
        rank: int,
        replicas: tuple[int, ...],
        scatter: Steps | None,
    ) -> None:
        self._rank, self._replicas = rank, replicas
        self._scatter = scatter if len(replicas) > 1 else None
        sizes = [part.stand(rank).piece_size(part.numel) for part in parts]
        rooms = [size * len(replicas) for size in sizes]
        if self._scatter is None:
            starts, staged, apart = _starts(rooms), sum(rooms), 0
        else:
            starts, staged = _shared_starts(parts, rooms)
            apart = sum(sizes)
        flat = torch.zeros(staged + apart, dtype=torch.float32, device=handles[0].local.device)
        super().__init__(handles=handles, flat=flat, places=_places(parts, starts))
        filled, held = (
            sum(part.numel for part in parts),
            sum(piece.gradient.numel() for piece in self._pieces),
        )
        assert held == filled, f"parts hold {filled} elements, parameters {held}"
        piece_starts = _starts(sizes, staged)
        if self._scatter is None:
            rows = [part.stand(rank).replica * size for part, size in zip(parts, sizes, strict=True)]
            piece_starts = [start + row for start, row in zip(starts, rows, strict=True)]
        self._parts = [
            HeldPart(part, rank, flat[start : start + room], flat[piece : piece + size])
            for part, start, room, piece, size in zip(parts, starts, rooms, piece_starts, sizes, strict=True)
        ]
        self._region_of = {handle.spec.name: handle.spec.region.order for handle in handles}
        self._parameters = Counter(self._region_of.values())
        self.regions = tuple(self._region(order) for order in sorted(self._parameters))
        self._waiting: list[str] = []
        self._listener: Callable[[str], None] | None = None
        self.on_arrival(None)

    @property
    def parts(self) -> list[HeldPart]:
        """By section and region."""
        return list(self._parts)

    def parts_of(self, call: GradientCall) -> list[HeldPart]:
        """A call's parts, by region."""
        return [held for held in self._parts if held.part.call == call]

    def call_data(self, call: GradientCall, rank: int) -> CallData:
        """What a call takes: the rooms of its parts, or their pieces where rooms are shared."""
        parts = self.parts_of(call)
        views = [held.room if self._scatter is None else held.piece for held in parts]
        first, last = views[0].storage_offset(), views[-1].storage_offset() + views[-1].numel()
        data = self.flat[first:last]
        weight = parts[0].part.weight(rank)
        return CallData(
            call,
            data,
            [(data, weight)] if weight != 1.0 else [],
            frozenset(atom.parameter for held in parts for atom in held.part.atoms),
        )

    def on_arrival(self, callback: Callable[[str], None] | None) -> None:
        """As its base; where rooms are shared, a region's last gradient is in the pieces before it is told."""
        self._listener = callback
        self._listen(callback if self._scatter is None else self._arrived)

    def close(self) -> None:
        """As its base, and let go of the replicas' group."""
        super().close()
        if self._scatter is not None:
            self._scatter.close()

    def _arrived(self, parameter: str) -> None:
        """Keep count of a region's gradients; when all are there, scatter them and tell of them."""
        self._waiting.append(parameter)
        orders = {self._region_of[name] for name in self._waiting}
        assert len(orders) == 1, f"backward is in two regions at once: {self._waiting}"
        (region,) = (region for region in self.regions if region.order in orders)
        if len(self._waiting) < self._parameters[region.order]:
            return
        self._scatter_rooms(region)
        names, self._waiting = self._waiting, []
        if self._listener is not None:
            for name in names:
                self._listener(name)

    def _scatter_rooms(self, region: HeldRegion) -> None:
        assert self._scatter is not None
        for held in region.parts:
            held.piece.add_(self._scatter.reduce_scatter(self._replicas, held.room))
        for held in region.parts:
            held.room.zero_()

    def _region(self, order: int) -> HeldRegion:
        return HeldRegion(
            order,
            tuple(held for held in self._parts if held.part.region == order),
            tuple(piece for piece in self._pieces if self._region_of[piece.name] == order),
        )


def _starts(sizes: Sequence[int], first: int = 0) -> list[int]:
    return list(itertools.accumulate(sizes, initial=first))[:-1]


def _shared_starts(parts: Sequence[Part], rooms: Sequence[int]) -> tuple[list[int], int]:
    """Where each room starts if every region's begin at zero, and how much the largest region takes."""
    taken: dict[int, int] = {}
    starts = []
    for part, room in zip(parts, rooms, strict=True):
        starts.append(taken.setdefault(part.region, 0))
        taken[part.region] += room
    return starts, max(taken.values(), default=0)


def _places(parts: Sequence[Part], starts: Sequence[int]) -> dict[str, list[Place]]:
    places: dict[str, list[Place]] = {}
    for part, start in zip(parts, starts, strict=True):
        for atom, offset in zip(part.atoms, _starts([atom.numel for atom in part.atoms], start), strict=True):
            places.setdefault(atom.parameter, []).append((atom.tp_range, offset))
    return places
