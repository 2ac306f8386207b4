"""Bytes of the tensors that are alive, counted by storage, as a tensor tracker sees them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveTensors:
    """Counts the storages that operations return while watching, until they are freed (also after it).

    Args:
        on_growth: called with the live bytes after each new storage; may raise to refuse it.
    """

    def __init__(self, on_growth: Callable[[int], None] | None = None) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._on_growth = on_growth
        self._sizes: dict[int, int] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Every operation of this thread inside is seen; it costs some ten microseconds each."""
        with _Watch(self):
            yield

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage if it is not counted yet."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes or not size:
            return
        self._sizes[key] = size
        weakref.finalize(storage, self._remove, key).atexit = False
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self._on_growth is not None:
            self._on_growth(self.live_bytes)

    def _remove(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)


class _Watch(TorchDispatchMode):
    def __init__(self, live: LiveTensors) -> None:
        super().__init__()
        self._live = live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, torch.Tensor) and _is_wrapper(kind) for kind in types):
            # A DTensor runs the operation on its local tensors; those come by here again.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor) and _has_memory(value):
                self._live.add(value)
        return result


def _has_memory(value: torch.Tensor) -> bool:
    # DTensor works out shapes on fake tensors of the whole size, once for each operation that it has not met before.
    return value.device.type != "meta" and not isinstance(value, FakeTensor) and not _is_wrapper(type(value))


def _is_wrapper(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")
