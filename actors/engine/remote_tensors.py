"""Tensors of a safetensors file in other storage: only the bytes that are asked for travel.

The file begins with the length of its header (8 bytes, little-endian) and the header: JSON of each tensor's dtype,
shape and byte range behind it. The interface is that of `safetensors.safe_open`, as far as weights need it.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from safetensors import SafetensorError

from actors.storage import RemotePath

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000
"""What the format allows; more is no header."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class RemoteTensors:
    """The tensors of one file. OSError if it cannot be reached, SafetensorError if it is no such file."""

    def __init__(self, file: RemotePath) -> None:
        self._file = file
        length = int.from_bytes(file.read_range(0, _LENGTH_BYTES), "little")
        if not 0 < length <= _MOST_HEADER_BYTES:
            raise SafetensorError("its header is too large or empty")
        header = file.read_range(_LENGTH_BYTES, length)
        try:
            found: dict[str, dict[str, Any]] = json.loads(header)
            self._tensors = {
                name: (str(entry["dtype"]), tuple(entry["shape"]), tuple(entry["data_offsets"]))
                for name, entry in found.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SafetensorError(f"its header is not whole: {error!r}") from None
        self._start = _LENGTH_BYTES + length
        end = max((stop for *_, (_, stop) in self._tensors.values()), default=0)
        if end and not file.read_range(self._start + end - 1, 1):
            raise SafetensorError("the file ends before its tensors do")

    def keys(self) -> list[str]:
        """The names of all tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> RemoteSlice:
        """A tensor that is read when it is indexed. SafetensorError if there is none of the name."""
        if name not in self._tensors:
            raise SafetensorError(f"no tensor {name}")
        dtype, shape, (start, _) = self._tensors[name]
        return RemoteSlice(self._file, dtype, shape, self._start + start)


class RemoteSlice:
    """One tensor of a file, `start` being its first byte there."""

    def __init__(self, file: RemotePath, dtype: str, shape: tuple[int, ...], start: int) -> None:
        self._file, self._dtype, self._shape, self._start = file, dtype, shape, start

    def get_dtype(self) -> str:
        """By the name that safetensors gives it."""
        return self._dtype

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, ranges: tuple[slice, ...]) -> torch.Tensor:
        """A rectangle, a range a dim; whole rows of the first dim are read, in one request."""
        assert len(ranges) == len(self._shape) > 0
        dtype = _DTYPES[self._dtype]
        first, last, _ = ranges[0].indices(self._shape[0])
        row = math.prod(self._shape[1:]) * dtype.itemsize
        content = bytearray(self._file.read_range(self._start + first * row, (last - first) * row))
        if len(content) != (last - first) * row:
            raise SafetensorError("the file ends before its tensors do")
        rows = torch.frombuffer(content, dtype=dtype).view(last - first, *self._shape[1:])
        return rows[(slice(None), *ranges[1:])].contiguous()
