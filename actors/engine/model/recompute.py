"""Operators that backward replays instead of keeping what they made.

planner/cost/layer_flow.py says which values a layer then keeps: what some backward reads and no replay makes,
and what replays read. Here the same is done storage by storage. Forward runs a replayed operator, and those
that read what it made, with hooks on what autograd saves: a tensor in a storage of a replayed operator is
replaced by a note of where it comes from. The first note that backward reads runs all replayed operators of
the layer once more, in forward order; each storage is let go of when its last note has been read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.autograd.graph import saved_tensors_hooks

from actors.engine.model.flow import Operator

Run = Callable[..., Any]


@dataclass(frozen=True)
class Source:
    """A tensor that a replayed operator makes: an output, or the so-manieth that autograd saves in it."""

    step: int
    kind: Literal["output", "saved"]
    index: int


@dataclass(frozen=True)
class Note:
    """A view of a replayed tensor's storage."""

    source: Source
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Kept:
    """An operand that replay does not make; without its graph."""

    value: Any
    requires_grad: bool


@dataclass
class _Step:
    operator: Operator
    run: Run
    operands: list[Note | Kept]


class Recording:
    """One layer's forward pass of one micro-batch, and its replay."""

    def __init__(self, replayed: frozenset[str], parameters: frozenset[int]) -> None:
        """`parameters` are the layer's `storages`, which are never made anew."""
        self._replayed = replayed
        self._parameters = parameters
        self._steps: list[_Step] = []
        # Of values under way: the replayed tensor whose storage they lie in. Others are not listed.
        self._sources: dict[str, Source] = {}
        self._unread: Counter[Source] = Counter()
        self._revived: dict[Source, torch.Tensor] | None = None

    def run(self, operator: Operator, run: Run, operands: Sequence[Any]) -> tuple[Any, ...]:
        """An operator's outputs."""
        made_anew: dict[int, Source | None] = {}
        for name, operand in zip(operator.inputs, operands, strict=True):
            if isinstance(operand, torch.Tensor):
                made_anew[_storage(operand)] = self._sources.get(name)
        if operator.name in self._replayed:
            outputs = self._run_replayed(operator, run, operands, made_anew)
        elif any(source is not None for source in made_anew.values()):
            with saved_tensors_hooks(partial(self._note_or_keep, made_anew), self._read):
                outputs = _as_tuple(run(*operands))
        else:
            outputs = _as_tuple(run(*operands))
        step = len(self._steps) - 1
        for index, (name, output) in enumerate(zip(operator.outputs, outputs, strict=True)):
            # An operator may hand on what it read, such as dropout of probability 0.
            own = Source(step, "output", index) if operator.name in self._replayed else None
            source = made_anew.get(_storage(output), own)
            self._sources.pop(name, None)
            if source is not None:
                self._sources[name] = source
        return outputs

    def _run_replayed(
        self, operator: Operator, run: Run, operands: Sequence[Any], known: dict[int, Source | None]
    ) -> tuple[Any, ...]:
        step = _Step(operator, run, [self._operand(value, known) for value in operands])
        self._steps.append(step)
        number, saved = len(self._steps) - 1, 0

        def pack(tensor: torch.Tensor) -> Any:
            nonlocal saved
            index, saved = saved, saved + 1
            key = _storage(tensor)
            if key in known or key in self._parameters:
                return self._note_or_keep(known, tensor)
            return self._note(tensor, Source(number, "saved", index))

        with saved_tensors_hooks(pack, self._read):
            return _as_tuple(run(*operands))

    def _operand(self, value: Any, known: dict[int, Source | None]) -> Note | Kept:
        if not isinstance(value, torch.Tensor):
            return Kept(value, requires_grad=False)
        source = known[_storage(value)]
        return Kept(value.detach(), value.requires_grad) if source is None else self._note(value, source)

    def _note_or_keep(self, known: dict[int, Source | None], tensor: torch.Tensor) -> torch.Tensor | Note:
        source = known.get(_storage(tensor))
        # Detached: an output that its own graph held would never be freed.
        return tensor.detach() if source is None else self._note(tensor, source)

    def _note(self, tensor: torch.Tensor, source: Source) -> Note:
        self._unread[source] += 1
        return Note(source, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _read(self, saved: torch.Tensor | Note) -> torch.Tensor:
        """What a note stands for; the last reader of a storage leaves none behind."""
        if isinstance(saved, torch.Tensor):
            return saved
        if self._revived is None:
            self._revived = {}
            self._replay()
        tensor = self._revived[saved.source]
        self._unread[saved.source] -= 1
        if not self._unread[saved.source]:
            del self._revived[saved.source]
        return tensor.as_strided(saved.size, saved.stride, saved.offset)

    def _replay(self) -> None:
        for number, step in enumerate(self._steps):
            operands = []
            for operand in step.operands:
                if isinstance(operand, Kept):
                    operands.append(_leaf(operand.value, requires_grad=operand.requires_grad))
                else:
                    operands.append(_leaf(self._read(operand), requires_grad=True))
            step.operands.clear()
            self._replay_step(number, step, operands)

    def _replay_step(self, number: int, step: _Step, operands: list[Any]) -> None:
        """Run an operator again and keep, of what it makes, what notes stand for."""
        revived, saved = self._revived, 0
        assert revived is not None

        def pack(tensor: torch.Tensor) -> None:
            nonlocal saved
            source, saved = Source(number, "saved", saved), saved + 1
            if self._unread[source]:
                revived[source] = tensor.detach()

        # The graph of the replay is of no use: only what it would save is.
        with torch.enable_grad(), saved_tensors_hooks(pack, _unreadable):
            outputs = _as_tuple(step.run(*operands))
        for index, output in enumerate(outputs):
            source = Source(number, "output", index)
            if self._unread[source]:
                revived[source] = output.detach()


def storages(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Identities of the tensors' storages, valid while they live."""
    return frozenset(map(_storage, tensors))


def _unreadable(_: None) -> torch.Tensor:
    raise AssertionError("nothing runs backward through a replay")


def _leaf(value: Any, *, requires_grad: bool) -> Any:
    return value.detach().requires_grad_(requires_grad) if isinstance(value, torch.Tensor) else value


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
