"""Files of torch's distributed checkpoint, on a disk or in other storage, summed while they are written."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from actors.checkpoints import FileSum, Summing
from actors.storage import RemotePath, StoragePath, rename

METADATA = ".metadata"
# What is summed is still in the processor's cache when it is written; and for larger writes Linux looks for larger runs
# of free memory, which may take it several times as long as the writing.
_PIECE_BYTES = 512 << 10
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


class CheckpointFileWriter(dcp.FileSystemWriter):
    """Writes one rank's file of a checkpoint, and on rank 0 `.metadata`; `sums` then has what it wrote."""

    def __init__(self, folder: StoragePath) -> None:
        # What is closed is there: only a disk has more to do.
        super().__init__(str(folder), sync_files=isinstance(folder, Path))
        self._files = _Files()
        self.fs = self._files  # type: ignore[assignment]
        self.path = folder  # type: ignore[assignment]

    @property
    def sums(self) -> dict[str, FileSum]:
        """The files that this process has written, by name."""
        return dict(self._files.sums)

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

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self._summing.update(piece)
            self._stream.write(piece)
        return view.nbytes

    def sum(self) -> FileSum:
        return self._summing.sum()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what torch writes into `.metadata` and nothing else: a pickle could name any function."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which no checkpoint holds")
        return super().find_class(module, name)
