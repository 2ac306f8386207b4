"""Tokens that were made elsewhere, read where they lie: Megatron's `.bin`/`.idx` pairs and numpy's `.npy`."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.engine.tokens import Part
from actors.text.readers import unreadable
from actors.whole_file import whole_file
from planner.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CHUNK = 1 << 22

Array = npt.NDArray[Any]


def megatron_parts(files: Sequence[Path], cache: Path, say: Callable[[str], None]) -> list[Part]:
    """The parts of `.bin`/`.idx` pairs. UserError where one lacks the other or disagrees with it."""
    parts = []
    for base in dict.fromkeys(file.with_suffix("") for file in files):
        index, data = base.with_name(base.name + ".idx"), base.with_name(base.name + ".bin")
        for file, other in ((index, data), (data, index)):
            if not file.exists():
                raise UserError(
                    f"data file {other} has no {file.name} beside it; give both of a Megatron pair"
                )
        part = _megatron_part(index, data, cache)
        if part is None:
            say(f"{data} holds no tokens and is left out")
        else:
            parts.append(part)
    return parts


def numpy_parts(files: Sequence[Path], cache: Path, say: Callable[[str], None]) -> list[Part]:
    """The parts of `.npy` files: integers, of one dimension (one document) or two (a document a row)."""
    parts = []
    for file in files:
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise unreadable(file, error) from None
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.flags.c_contiguous:
            raise UserError(
                f"data file {file} holds {array.dtype} of shape {array.shape}; save token ids as integers of one or two"
                " dimensions, row after row"
            )
        if not array.size:
            say(f"{file} holds no tokens and is left out")
            continue
        assert isinstance(array, np.memmap)
        rows, width = (1, array.size) if array.ndim == 1 else array.shape
        ends = np.arange(1, rows + 1, dtype="<i8") * width
        parts.append(_part(file, array.dtype, int(array.offset), ends, cache, sums=b""))
    return parts


def _megatron_part(index: Path, data: Path, cache: Path) -> Part | None:
    try:
        content = index.read_bytes()
        held = data.stat().st_size
    except OSError as error:
        raise unreadable(index, error) from None
    sizes, pointers, documents, dtype = _index(index, content)
    wanted = int(sizes.sum(dtype=np.int64)) * dtype.itemsize
    starts = np.cumsum(sizes, dtype=np.int64) - sizes
    if held != wanted or not np.array_equal(pointers, starts * dtype.itemsize):
        told = f"{wanted} bytes" if held != wanted else "its sequences elsewhere"
        raise UserError(
            f"{index} tells of {told} in {data.name} ({len(sizes)} sequences of {dtype.name}), but {data} has"
            f" {held} bytes; they are not of one pair, or one was cut short: copy or make both anew"
        )
    if not wanted:
        return None
    # `documents` holds the sequence that each begins with, and the number of sequences at last.
    after = np.cumsum(sizes, dtype=np.int64)
    ends = np.unique(after[documents[1:][documents[1:] > 0] - 1]) if len(documents) > 1 else after[-1:]
    if ends[-1] != after[-1]:
        ends = np.append(ends, after[-1])
    return _part(data, dtype, 0, ends.astype("<i8"), cache, sums=hashlib.sha256(content).digest())


def _index(path: Path, content: bytes) -> tuple[Array, Array, Array, np.dtype[Any]]:
    """Sizes, byte pointers, documents and the type of tokens in an `.idx`."""
    if len(content) < _HEAD.size or not content.startswith(_MAGIC):
        raise UserError(f"{path} is no index of Megatron's: it does not begin as one; make it anew")
    _, version, code, sequences, documents = _HEAD.unpack_from(content)
    if version != 1 or code not in _DTYPES:
        raise UserError(
            f"{path} is of version {version} and token type {code}; version 1 with integer tokens is read: make it anew"
        )
    needed = _HEAD.size + 12 * sequences + 8 * documents
    if len(content) < needed:
        raise UserError(
            f"{path} has {len(content)} bytes, but its {sequences} sequences and {documents} documents need {needed};"
            " it was cut short: copy or make it anew"
        )
    sizes = np.frombuffer(content, "<i4", sequences, _HEAD.size)
    pointers = np.frombuffer(content, "<i8", sequences, _HEAD.size + 4 * sequences)
    starts = np.frombuffer(content, "<i8", documents, _HEAD.size + 12 * sequences)
    if (sizes < 0).any() or (documents and (starts.min() < 0 or starts.max() > sequences)):
        raise UserError(f"{path} tells of sequences that cannot be; it was damaged: copy or make it anew")
    return sizes, pointers, starts, np.dtype(_DTYPES[code])


def _part(file: Path, dtype: np.dtype[Any], offset: int, ends: Array, cache: Path, *, sums: bytes) -> Part:
    scan = _scan(file, dtype, offset, int(ends[-1]), cache)
    name = hashlib.sha256(sums + ends.tobytes() + scan["sha256"].encode()).hexdigest()[:32]
    target = cache / f"{name}.ends"
    if not target.exists():
        with whole_file(target) as partial:
            ends.tofile(partial)
    if scan["smallest"] < 0:
        raise UserError(
            f"data file {file}: token {scan['smallest_at']} is {scan['smallest']}; ids start at 0: give token ids"
        )
    return Part(
        path=str(file.resolve()),
        dtype=dtype.str,
        offset=offset,
        tokens=int(ends[-1]),
        ends=target.name,
        documents=len(ends),
        largest=scan["largest"],
        largest_at=scan["largest_at"],
    )


def _scan(file: Path, dtype: np.dtype[Any], offset: int, tokens: int, cache: Path) -> dict[str, Any]:
    """Hash, least and greatest id of a file, looked through once as long as the file is not written again."""
    state = file.stat()
    known = f"{file.resolve()} {state.st_size} {state.st_mtime_ns} {state.st_ino} {dtype.str} {offset}"
    kept = cache / f"{hashlib.sha256(known.encode()).hexdigest()[:32]}.scan"
    if kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    array = np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=tokens)
    digest = hashlib.sha256()
    found = {"largest": -1, "largest_at": 0, "smallest": 0, "smallest_at": 0}
    for first in range(0, tokens, _CHUNK):
        chunk = np.asarray(array[first : first + _CHUNK])
        digest.update(chunk.data)
        high, low = int(chunk.argmax()), int(chunk.argmin())
        if chunk[high] > found["largest"]:
            found |= {"largest": int(chunk[high]), "largest_at": first + high}
        if chunk[low] < found["smallest"]:
            found |= {"smallest": int(chunk[low]), "smallest_at": first + low}
    found["sha256"] = digest.hexdigest()
    with whole_file(kept) as partial:
        partial.write_text(json.dumps(found))
    return found
