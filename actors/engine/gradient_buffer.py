"""One flat gradient buffer a rank, laid out in block order: backward adds where the collectives read.

A block's part is contiguous, so synchronising it copies nothing. The price is paid in strides: the
gradient of one parameter may lie in several blocks (a rank with a lower TP degree than another holder),
so each parameter sees the buffer through one or a few N-dimensional strided views.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from planner.gradient_blocks import GradientBlock
from planner.gradient_calls import GradientCall, Section
from planner.parameters import Parameter


class HeldParameter(Protocol):
    """A parameter as a stage holds it; `local` is the rank's shard, sharing the leaf's storage."""

    @property
    def spec(self) -> Parameter: ...
    @property
    def leaf(self) -> torch.nn.Parameter: ...
    @property
    def local(self) -> torch.Tensor: ...
    @property
    def tp(self) -> int: ...
    @property
    def tp_rank(self) -> int: ...


@dataclass(frozen=True)
class Run:
    """Pieces of a parameter of one length, at one distance from each other in the buffer.

    `start` and `stop` are logical indices along `tp_dim` (None: the whole, replicated parameter).
    `offset` is the first piece's place in the buffer, `distance` from one piece to the next, in elements.
    """

    start: int
    stop: int
    count: int
    offset: int
    distance: int


@dataclass(frozen=True)
class Piece:
    """A view of a parameter and the view of the buffer that holds its gradient, of equal shapes.

    `tp_range` is the piece's half-open logical range along `tp_dim`; None is the whole parameter. When
    the gradient lies in several blocks at equal distances, `tp_dim` is split in two: [blocks, length].
    """

    name: str
    tp_dim: int | None
    tp_range: tuple[int, int] | None
    split: bool
    parameter: torch.Tensor
    gradient: torch.Tensor
    decays: bool

    def logical(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the piece's shape (say, optimizer state) as the logical slice that it stands for."""
        if not self.split:
            return tensor
        assert self.tp_dim is not None
        return tensor.flatten(self.tp_dim, self.tp_dim + 1)


Place = tuple[tuple[int, int] | None, int]
"""An atom's logical range along `tp_dim`, and where its gradient lies in the buffer."""


class ParameterGradients:
    """The gradients of a rank's parameters, added to `flat` as soon as backward has made them, and freed.

    Where a whole parameter lies in one piece in its own precision, autograd adds to it there (`leaf.grad` is
    a view of `flat`); elsewhere a hook on the leaf does. Padding of vocabulary shards has no place there.

    Args:
        places: by parameter name, of each of its atoms.
    """

    def __init__(
        self, *, handles: Sequence[HeldParameter], flat: torch.Tensor, places: dict[str, list[Place]]
    ) -> None:
        self.flat = flat
        self._pieces: list[Piece] = []
        self._hooks: list[RemovableHandle] = []
        self._direct: list[HeldParameter] = []
        self._direct_hooks: list[RemovableHandle] = []
        self._on_arrival: Callable[[str], None] | None = None
        for handle in handles:
            shape = handle.spec.padded_shard_shape(tp=handle.tp)
            assert handle.local.shape == shape, f"{handle.spec.name}: {handle.local.shape} is not {shape}"
            targets = [
                (run, _buffer_view(self.flat, handle.spec, run)) for run in layout_runs(handle, places)
            ]
            self._pieces += [_piece(handle, run, view) for run, view in targets]
            views = [view for _, view in targets]
            if _takes(handle, views):
                handle.leaf.grad = views[0]
                self._direct.append(handle)
            else:
                hook = self._accumulator(handle, targets)
                self._hooks.append(handle.leaf.register_post_accumulate_grad_hook(hook))

    def zero(self) -> None:
        """Forget the gradients of the last iteration."""
        self.flat.zero_()

    def pieces(self) -> list[Piece]:
        """Every parameter element of the rank once, padding left out."""
        return list(self._pieces)

    def on_arrival(self, callback: Callable[[str], None] | None) -> None:
        """Call back with a parameter's name after each time that its gradient was added."""
        self._listen(callback)

    def close(self) -> None:
        """Remove the hooks, and let go of the leaves."""
        self._listen(None)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for handle in self._direct:
            handle.leaf.grad = None
        self._direct.clear()

    def _listen(self, callback: Callable[[str], None] | None) -> None:
        self._on_arrival = callback
        # Hooks cost a few microseconds each time, so leaves that need none otherwise have them only now.
        for hook in self._direct_hooks:
            hook.remove()
        self._direct_hooks = [] if callback is None else [_told(handle, callback) for handle in self._direct]

    def _accumulator(
        self, handle: HeldParameter, targets: Sequence[tuple[Run, torch.Tensor]]
    ) -> Callable[[torch.Tensor], None]:
        """A hook that adds a leaf's new gradient to the buffer, in the buffer's precision, and frees it."""
        shape = handle.local.shape

        def accumulate(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            gradient = _local_gradient(leaf.grad)
            # Broadcasting would add a gradient of another shape without a word.
            assert gradient.shape == shape, f"{handle.spec.name}: {gradient.shape}"
            for run, view in targets:
                view.add_(_local_view(handle, gradient, run))
            leaf.grad = None
            if self._on_arrival is not None:
                self._on_arrival(handle.spec.name)

        return accumulate


@dataclass(frozen=True)
class CallData:
    """A call as one rank sees it: its data, what of it the rank scales first, whose gradients it takes."""

    call: GradientCall
    data: torch.Tensor
    weighted: list[tuple[torch.Tensor, float]]
    parameters: frozenset[str]


class SyncedGradients(Protocol):
    """What `GradientSync` needs of a rank's gradients."""

    flat: torch.Tensor

    def call_data(self, call: GradientCall, rank: int) -> CallData: ...
    def on_arrival(self, callback: Callable[[str], None] | None) -> None: ...


class GradientBuffer(ParameterGradients):
    """All gradients of a rank, block by block.

    `blocks` are those that the rank holds; `sections` say where they lie, by default one after the other. What
    no block of the rank fills (the rounding of sections, the padding of device-wise ones) is zero until a
    collective writes there.
    """

    def __init__(
        self,
        *,
        handles: Sequence[HeldParameter],
        blocks: Sequence[GradientBlock],
        sections: Sequence[Section] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if sections is None:
            sections = [Section(block.index, block.holders, (block,), block.numel) for block in blocks]
        starts = _starts([section.numel for section in sections])
        self._sections = {s.index: (s, start) for s, start in zip(sections, starts, strict=True)}
        self._offsets = {
            block.index: begin + start
            for section, begin in self._sections.values()
            for block, start in section.places()
        }
        self._held = frozenset(block.index for block in blocks)
        flat = torch.zeros(
            sum(section.numel for section in sections), dtype=dtype, device=handles[0].local.device
        )
        super().__init__(handles=handles, flat=flat, places=_places(blocks, self._offsets))
        held, filled = sum(piece.gradient.numel() for piece in self._pieces), sum(b.numel for b in blocks)
        assert held == filled, f"blocks hold {filled} elements, parameters {held}"

    def block_view(self, block: GradientBlock) -> torch.Tensor:
        """A block's part of the buffer: flat and contiguous."""
        return self.flat.narrow(0, self._offsets[block.index], block.numel)

    def call_view(self, call: GradientCall) -> torch.Tensor:
        """What a collective sums: flat and contiguous."""
        return self.flat.narrow(0, self._sections[call.section][1] + call.start, call.numel)

    def section_view(self, section: Section) -> torch.Tensor:
        """A section's part of the buffer, its rounding included."""
        return self.flat.narrow(0, self._sections[section.index][1], section.numel)

    def call_data(self, call: GradientCall, rank: int) -> CallData:
        """What a call of the rank takes."""
        data = self.call_view(call)
        section, _ = self._sections[call.section]
        weighted, parameters = [], set[str]()
        for block, start in section.places():
            if block.index not in self._held:
                continue
            first, last = max(call.start, start), min(call.stop, start + block.numel)
            if first < last and (weight := block.weight(rank)) != 1.0:
                weighted.append((data[first - call.start : last - call.start], weight))
            for atom in block.atoms:
                if start < call.stop and start + atom.numel > call.start:
                    parameters.add(atom.parameter)
                start += atom.numel
        return CallData(call, data, weighted, frozenset(parameters))


def _takes(handle: HeldParameter, views: Sequence[torch.Tensor]) -> bool:
    """Whether the leaf's own `grad` can be the buffer's view."""
    leaf = handle.leaf
    return (
        not isinstance(leaf, DTensor)
        and [view.shape for view in views] == [leaf.shape]
        and views[0].dtype == leaf.dtype
        and views[0].is_contiguous()
    )


def _told(handle: HeldParameter, callback: Callable[[str], None]) -> RemovableHandle:
    name = handle.spec.name
    return handle.leaf.register_post_accumulate_grad_hook(lambda _: callback(name))


def _piece(handle: HeldParameter, run: Run, gradient: torch.Tensor) -> Piece:
    spec = handle.spec
    return Piece(
        name=spec.name,
        tp_dim=spec.tp_dim,
        tp_range=None if spec.tp_dim is None else (run.start, run.stop),
        split=run.count > 1,
        # A tensor of its own, whose `grad` is not the leaf's.
        parameter=_local_view(handle, handle.local.detach(), run),
        gradient=gradient,
        decays=spec.decays,
    )


def _local_gradient(gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, DTensor):
        assert not any(placement.is_partial() for placement in gradient.placements), gradient.placements
        return gradient.to_local()
    return gradient


def _places(blocks: Sequence[GradientBlock], offsets: dict[int, int]) -> dict[str, list[Place]]:
    """By parameter name: the logical range of each of its atoms, and where it lies in the buffer."""
    places: dict[str, list[Place]] = {}
    for block in blocks:
        starts = _starts([atom.numel for atom in block.atoms])
        for atom, start in zip(block.atoms, starts, strict=True):
            places.setdefault(atom.parameter, []).append((atom.tp_range, offsets[block.index] + start))
    return places


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes, initial=0))[:-1]


def layout_runs(handle: HeldParameter, places: dict[str, list[Place]]) -> list[Run]:
    """The fewest runs, taken greedily, that cover a parameter's pieces; none if it is all padding."""
    spec, runs = handle.spec, list[Run]()
    if spec.tp_dim is None:
        ((_, offset),) = places[spec.name]
        return [Run(0, 0, 1, offset, 0)]
    for tp_range, offset in sorted(places.get(spec.name, []), key=lambda place: place[0] or (0, 0)):
        assert tp_range is not None
        grown = _grown(runs[-1], *tp_range, offset) if runs else None
        if grown is None:
            runs.append(Run(*tp_range, 1, offset, 0))
        else:
            runs[-1] = grown
    start, stop = spec.shard_range(tp=handle.tp, tp_rank=handle.tp_rank)
    covered = (runs[0].start, runs[-1].stop) if runs else (stop, stop)
    assert covered == (start, stop), f"{spec.name}: blocks cover {covered} of {(start, stop)}"
    return runs


def _grown(run: Run, start: int, stop: int, offset: int) -> Run | None:
    """The run with one more piece, if that has its length and comes at its distance."""
    length = (run.stop - run.start) // run.count
    distance = run.distance if run.count > 1 else offset - run.offset
    fits = run.stop == start and stop - start == length and offset == run.offset + run.count * distance
    # A view's strides cannot be negative.
    if not fits or distance <= 0:
        return None
    return Run(run.start, stop, run.count + 1, run.offset, distance)


def _buffer_view(flat: torch.Tensor, spec: Parameter, run: Run) -> torch.Tensor:
    if spec.tp_dim is None:
        return flat.narrow(0, run.offset, spec.numel).view(spec.shape)
    before, after = spec.shape[: spec.tp_dim], spec.shape[spec.tp_dim + 1 :]
    length = (run.stop - run.start) // run.count
    # One piece is contiguous with the shape [before, length, after].
    strides = torch.empty((*before, length, *after), device="meta").stride()
    split = ((run.count, run.distance),) if run.count > 1 else ()
    sizes_and_strides = [
        *zip(before, strides, strict=False),
        *split,
        *zip((length, *after), strides[spec.tp_dim :], strict=True),
    ]
    return flat.as_strided(
        [size for size, _ in sizes_and_strides], [stride for _, stride in sizes_and_strides], run.offset
    )


def _local_view(handle: HeldParameter, tensor: torch.Tensor, run: Run) -> torch.Tensor:
    """The part of a rank's shard (parameter or gradient) that a run stands for."""
    spec = handle.spec
    if spec.tp_dim is None:
        return tensor
    first, _ = spec.shard_range(tp=handle.tp, tp_rank=handle.tp_rank)
    part = tensor.narrow(spec.tp_dim, run.start - first, run.stop - run.start)
    if run.count == 1:
        return part
    return part.unflatten(spec.tp_dim, (run.count, (run.stop - run.start) // run.count))
