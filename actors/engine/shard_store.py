"""Where a rank's shards lie in its gradient buffer, and how what is made of them comes back to whole parameters.

The buffer plays two parts. Until the update it holds gradients, summed where this rank answers for them; then the
new parameters, of which each holder gathers the others' shards, and from which every parameter, whatever its
shape, is written through the same strided views that its gradient went in by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from actors.engine.gradient_buffer import GradientBuffer, Piece
from actors.engine.replica_buffer import HeldPart, HeldRegion, ReplicaBuffer
from actors.engine.replica_shards import PartTransport
from actors.engine.shard_transport import Shard, ShardTransport, gather_all
from planner.gradient_blocks import Atom
from planner.gradient_calls import GradientCall, Section
from planner.replica_shards import Range, uncovered

# Copies are updated in slices: so many of a region, unless that makes them smaller than so many elements.
_SLICES, _LEAST_SLICE = 16, 1 << 14

Take = Callable[[Sequence[Piece]], None]
"""Told of pieces whose views of the buffer are whole, until the next are."""


@dataclass(frozen=True)
class Share:
    """Something to update, flat and contiguous: what lies at `start` where `atoms` lie one after the other.

    `decays`: whether weight decay applies to it. `owned` marks the one copy that checkpoints save.
    """

    view: torch.Tensor
    decays: bool
    atoms: tuple[Atom, ...]
    start: int
    owned: bool = True

    def by_atom(self) -> Iterator[tuple[Atom, int, int, int]]:
        """The atoms in it: the atom, its own elements' range, and where in the share they begin. Rounding at the
        end belongs to none."""
        place, stop = 0, self.start + self.view.numel()
        for atom in self.atoms:
            first, last = max(self.start, place), min(stop, place + atom.numel)
            if first < last:
                yield atom, first - place, last - place, first - self.start
            place += atom.numel

    def split(self, most: int) -> Iterator[Share]:
        """In shares of at most so many elements."""
        for first in range(0, self.view.numel(), most):
            yield replace(self, view=self.view[first : first + most], start=self.start + first)


class ShardStore(Protocol):
    """The shards of a rank, in the buffer that its gradients are summed in."""

    @property
    def copied(self) -> bool:
        """Whether other ranks update copies of the shares, cut at other places: all must get the same bits."""
        ...

    def shares(self) -> list[list[Share]]:
        """What the rank updates, in batches that are updated one after the other."""
        ...

    def counted(self) -> list[torch.Tensor]:
        """What of the sums the rank answers for: every element of the model once in the world."""
        ...

    def load(self, batch: int) -> None:
        """Fill a batch's shares with the parameters' values."""
        ...

    def gather(self, take: Take) -> None:
        """Fill the buffer from the shards of all holders, gradients before the update, parameters after it; a
        collective. `take` is handed every piece of the rank once."""
        ...


class CallShards:
    """ZeRO-1 over all holders: of every call each holder has an equal shard.

    Args:
        calls: the rank's, in launch order: in which parameters are gathered too.
        decays: by parameter name, whether weight decay applies.
    """

    def __init__(
        self,
        *,
        buffer: GradientBuffer,
        sections: Sequence[Section],
        shards: Sequence[Shard],
        calls: Sequence[GradientCall],
        transport: ShardTransport,
        decays: Mapping[str, bool],
    ) -> None:
        self._buffer, self._calls, self._transport = buffer, calls, transport
        self._sections = {section.index: section for section in sections}
        self._shards, self._decays = shards, decays
        self.copied = False

    def shares(self) -> list[list[Share]]:
        """One batch, by shard, cut where weight decay changes."""
        found = []
        for shard in self._shards:
            section = self._sections[shard.section]
            atoms = tuple(atom for block in section.blocks for atom in block.atoms)
            view = self._buffer.section_view(section)
            for start, stop, decays in _decay_ranges(atoms, (shard.start, shard.stop), self._decays):
                found.append(Share(view[start:stop], decays, atoms, start))
        return [found]

    def counted(self) -> list[torch.Tensor]:
        """The shards, a section's rounding included: it is zero."""
        return [
            self._buffer.section_view(self._sections[shard.section])[shard.start : shard.stop]
            for shard in self._shards
        ]

    def load(self, batch: int) -> None:
        """Lay the parameters out as their gradients are."""
        assert batch == 0
        _load(self._buffer.pieces())

    def gather(self, take: Take) -> None:
        """All calls one after the other, then all pieces."""
        gather_all(self._transport, self._calls, self._buffer.call_view)
        take(self._buffer.pieces())


class ReplicaShares:
    """Shards that lie inside the pieces of the stage's replicas.

    Args:
        whole_pieces: each pipeline keeps all optimizer state, so the rank updates its whole piece of every part
            (scope `pipeline`); else only what it answers for.
        decays: by parameter name, whether weight decay applies.
    """

    def __init__(
        self,
        *,
        buffer: ReplicaBuffer,
        rank: int,
        transport: PartTransport,
        whole_pieces: bool,
        decays: Mapping[str, bool],
    ) -> None:
        self._buffer, self._rank, self._transport = buffer, rank, transport
        self.copied, self._decays = whole_pieces, decays

    def shares(self) -> list[list[Share]]:
        """By region, and in it by part, cut where weight decay changes."""
        return [self._shares_of_region(region) for region in self._buffer.regions]

    def _shares_of_region(self, region: HeldRegion) -> list[Share]:
        shares = [share for held in region.parts for share in self._shares_of(held)]
        if not self.copied:
            return shares
        # An update that gives copies the same bits makes temporaries of one share at a time: so small ones.
        most = max(_LEAST_SLICE, sum(share.view.numel() for share in shares) // _SLICES)
        return [part for share in shares for part in share.split(most)]

    def _shares_of(self, held: HeldPart) -> Iterator[Share]:
        part = held.part
        owned = part.owned(self._rank)
        others = uncovered(part.piece(self._rank), owned) if self.copied else []
        for own in [*owned, *others]:
            for start, stop, decays in _decay_ranges(part.atoms, own, self._decays):
                (view,) = held.in_piece([(start, stop)])
                yield Share(view, decays, part.atoms, start, owned=own in owned)

    def counted(self) -> list[torch.Tensor]:
        """What the rank sums over all holders, whoever else keeps a copy."""
        return [view for held in self._buffer.parts for view in held.in_piece(held.part.owned(self._rank))]

    def load(self, batch: int) -> None:
        """By way of the region's rooms."""
        region = self._buffer.regions[batch]
        _load(region.pieces)
        for held in region.parts:
            if held.shared_room:
                held.piece.copy_(held.own_row)

    def gather(self, take: Take) -> None:
        """Region by region: all ranks go through regions, and in them through blocks, in one order."""
        for region in self._buffer.regions:
            works = [self._transport.gather(held) for held in region.parts]
            for work in works:
                work.wait()
            take(region.pieces)


def _load(pieces: Sequence[Piece]) -> None:
    if pieces:
        torch._foreach_copy_([piece.gradient for piece in pieces], [piece.parameter for piece in pieces])


def _decay_ranges(
    atoms: Iterable[Atom], own: Range, decays: Mapping[str, bool]
) -> Iterator[tuple[int, int, bool]]:
    """A range of what lies atom by atom, cut where weight decay changes."""
    found: list[tuple[int, int, bool]] = []
    start = 0
    for atom in atoms:
        first, last = max(start, own[0]), min(start + atom.numel, own[1])
        start += atom.numel
        if first >= last:
            continue
        decayed = decays[atom.parameter]
        if found and found[-1][2] == decayed:
            found[-1] = found[-1][0], last, decayed
        else:
            found.append((first, last, decayed))
    yield from found
