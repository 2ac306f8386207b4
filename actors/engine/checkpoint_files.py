"""Files of torch's distributed checkpoint, on a disk or in other storage, summed while they are written."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemBase, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from actors.engine.late_copy import PIECE_BYTES, LateCopies
from actors.file_sums import FileSum, Summing
from actors.storage import RemotePath, StoragePath, rename

METADATA = ".metadata"
# Of niceness, the most there is: where training wants all cores too, 1.5 % of one. Of 10 it was a tenth.
_LEAST_URGENT = 19
# All that torch writes into `.metadata`, beside the names of dtypes.
_NAMES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "StorageMeta",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    # The place of checkpoints that were written before other storage was known.
    "pathlib": ("PosixPath",),
}


def give_way() -> None:
    """Let this thread have a small part of a core that training wants too: where all cores are busy, a save takes
    longer and training hardly does. Linux alone knows priorities of threads."""
    if sys.platform == "linux":
        # A container may forbid it.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_URGENT)


class CheckpointFileWriter(dcp.FileSystemWriter):
    """Writes one rank's file of a checkpoint, of the slices of `copies`, and on rank 0 `.metadata`; `sums` then has
    what it wrote."""

    def __init__(self, folder: StoragePath, copies: LateCopies) -> None:
        # What is closed is there: only a disk has more to do.
        super().__init__(str(folder), sync_files=isinstance(folder, Path))
        self._copies = copies
        self._files = _Files()
        self.fs = self._files  # type: ignore[assignment]
        self.path = folder  # type: ignore[assignment]

    @property
    def sums(self) -> dict[str, FileSum]:
        """The files that this process has written, by name."""
        return dict(self._files.sums)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As torch's own, to the byte, but for where a tensor's bytes come from: its writer would want whole tensors,
        which nothing changes."""
        # Not sooner: planning is short and keeps the interpreter, and so must not be kept from a core.
        give_way()
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        with self._files.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
            results = [self._write_item(stream, name, item) for item in plan.items]
            if self.sync_files:
                stream.flush()
                os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_item(self, stream: _Summing, name: str, item: WriteItem) -> WriteResult:
        assert item.index.offset is not None
        address = item.index.fqn, tuple(item.index.offset)
        tensor, start = self._copies.slice(address).tensor, stream.bytes
        head, foot = _frame(tuple(tensor.shape), tensor.dtype)
        stream.write(head)
        for piece in self._copies.pieces(address):
            stream.write(piece)
        stream.write(foot)
        length = stream.bytes - start
        assert length == len(head) + tensor.nbytes + len(foot)
        return WriteResult(item.index, length, _StorageInfo(name, start, length))

    @property
    def checkpoint_id(self) -> str:
        """What `.metadata` says of its own place."""
        return str(self.path)


class CheckpointFileReader(dcp.FileSystemReader):
    """Reads of each file just the bytes that are asked for."""

    def __init__(self, folder: StoragePath) -> None:
        super().__init__(str(folder))
        self.fs = _Files()  # type: ignore[assignment]
        self.path = folder  # type: ignore[assignment]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Which rectangle lies where. UnpicklingError if the file holds anything else."""
        with self.fs.create_stream(self._get_metadata_path(None), "rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"{METADATA} holds no metadata of a checkpoint")
        place = metadata.storage_meta or StorageMeta()
        return dataclasses.replace(metadata, storage_meta=dataclasses.replace(place, load_id=self.load_id))

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        if isinstance(self.path, Path):
            return super()._slice_file(file, sinfo)
        # One request a tensor: torch reads its end first, and a storage's own reading ahead would fetch far too much.
        place: RemotePath = self.path / sinfo.relative_path
        return io.BytesIO(place.read_range(sinfo.offset, sinfo.length))


class _Files(FileSystemBase):
    """The file system that torch's writer and reader ask, in terms of StoragePath."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with path.open(mode) as stream:
            if "w" not in mode:
                yield stream
                return
            summing = _Summing(stream)
            yield summing
            self.sums[path.name] = summing.sum()

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def init_path(self, path: Any) -> Any:
        return path

    def rename(self, path: Any, new_path: Any) -> None:
        rename(path, new_path)
        self.sums[new_path.name] = self.sums.pop(path.name)

    def mkdir(self, path: Any) -> None:
        path.mkdir(parents=True, exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return bool(path.exists())

    def rm_file(self, path: Any) -> None:
        path.unlink()


class _Summing:
    """A stream that sums what passes: the sum is of the bytes meant, whatever becomes of them on the way."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._summing = stream, Summing()
        self.bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self._summing.update(piece)
            self._stream.write(piece)
        self.bytes += view.nbytes
        return view.nbytes

    def sum(self) -> FileSum:
        return self._summing.sum()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@cache
def _frame(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What torch.save writes before and after the elements of a contiguous tensor: the same for every one of its shape.

    Torch takes a fifth of a millisecond each time, in dozens of small parts, and has the interpreter meanwhile. The
    thread that saves must not: of low priority, it may keep training waiting for long.
    """
    frame = _Frame()
    # Sums of its own that torch would add to every tensor tell nothing that ours of the files do not.
    torch.serialization.set_crc32_options(False)
    # Torch leaves room for what the tensor holds: this one's memory is never touched, and so takes none.
    tensor = torch.empty(shape, dtype=dtype)
    with torch.serialization.skip_data():
        torch.save(tensor, cast(IO[bytes], frame))
    head, foot = frame.parts
    if frame.room != tensor.nbytes:
        raise RuntimeError(f"torch left room for {frame.room} bytes of a tensor of {tensor.nbytes}")
    return bytes(head), bytes(foot)


class _Frame:
    """A stream that takes what torch writes of one tensor, in parts between which it left room."""

    def __init__(self) -> None:
        self.parts = [bytearray()]
        self.room = 0

    def write(self, data: Any) -> int:
        self.parts[-1] += data
        return len(data)

    def seek(self, size: int, whence: int) -> None:
        assert whence == os.SEEK_CUR, whence
        self.room += size
        self.parts.append(bytearray())

    def flush(self) -> None:
        """There is nothing behind it."""


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what torch writes into `.metadata` and nothing else: a pickle could name any function."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which no checkpoint holds")
        return super().find_class(module, name)
