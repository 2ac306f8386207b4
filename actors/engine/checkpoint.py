"""Saving and loading training state by torch's distributed checkpoint (DCP), under any plan (law 8)."""

from __future__ import annotations

import contextlib
import io
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from actors.checkpoints import (
    MANIFEST,
    Manifest,
    prune,
    write_manifest,
)
from actors.engine.checkpoint_files import CheckpointFileReader, CheckpointFileWriter
from actors.engine.late_copy import Address, LateCopies
from actors.engine.state_slices import StateSlice
from actors.file_sums import FileSum
from actors.storage import StoragePath, remove_tree
from planner.errors import UserError


@dataclass(frozen=True)
class SavedCheckpoint:
    """How a save went, as rank 0 knows it. `seconds` counts from its begin; `pause_seconds` of them training
    stood still, to copy. A save that failed has an `error` and has left nothing; with a `prune_error` it is whole,
    but older ones that should have gone could not be deleted."""

    iteration: int
    path: StoragePath
    bytes: int
    seconds: float
    pause_seconds: float
    error: str | None = None
    prune_error: str | None = None


class CheckpointWriter:
    """Saves in the background, one checkpoint at a time. Every rank of the world begins and ends the same saves.

    `group` is a CPU group of the whole world that nothing else uses: its collectives run on this writer's thread,
    beside those of training. The newest `keep` checkpoints of a folder stay, and the best `keep_best`.

    What it saves is written from where training holds it for as long as that changes nothing (`LateCopies`). Before it
    does, training must call `before_update`, and stands still for a copy of what is not written yet: in host memory at
    most one shard, and with a core to spare little or nothing. The copies' memory is kept for the next save: fresh
    pages would make training stand still for longer, and giving them back and taking them again disturbs it.
    """

    def __init__(self, *, rank: int, group: dist.ProcessGroup, keep: int, keep_best: int) -> None:
        self._rank, self._group = rank, group
        self._keep, self._keep_best = keep, keep_best
        self._kept: dict[Address, torch.Tensor] = {}
        self._copies: LateCopies | None = None
        self._thread: threading.Thread | None = None
        self._saved: list[SavedCheckpoint] = []

    def begin(self, path: StoragePath, slices: Iterable[StateSlice], manifest: Manifest) -> None:
        """Write what this rank saves while training goes on. Waits for the save before it."""
        start = time.monotonic()
        self._join()
        waited = time.monotonic() - start
        self._copies = LateCopies((piece for piece in slices if piece.owned), self._kept)
        self._thread = threading.Thread(
            target=self._save,
            args=(path, self._copies, manifest, start, waited),
            name="checkpoint",
            daemon=True,
        )
        self._thread.start()

    def before_update(self) -> None:
        """Training is about to change what is saved: copy what the save under way has not written yet."""
        if self._copies is not None:
            self._copies.take()

    def poll(self) -> tuple[SavedCheckpoint, ...]:
        """The saves that have ended since the last call; on ranks other than 0 none."""
        saved, self._saved = self._saved, []
        return tuple(saved)

    def finish(self) -> tuple[SavedCheckpoint, ...]:
        """Wait for the save under way, then as `poll`."""
        self._join()
        return self.poll()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = self._copies = None

    def _save(
        self, path: StoragePath, copies: LateCopies, manifest: Manifest, start: float, waited: float
    ) -> None:
        error, prune_error, size = None, None, 0
        try:
            size = _write(path, copies, manifest, rank=self._rank, group=self._group)
        # A save that fails, on a full disk say, must not end training.
        except (Exception, dcp.api.CheckpointException) as failure:
            error = _cause(failure)
            if self._rank == 0:
                # What is half written would only fill the disk further.
                with contextlib.suppress(OSError):
                    (path / MANIFEST).unlink(missing_ok=True)
                    remove_tree(path)
        finally:
            copies.close()
        if self._rank == 0:
            seconds, pause = time.monotonic() - start, waited + copies.pause_seconds
            if error is None:
                prune_error = self._prune(path.parent)
            self._saved.append(
                SavedCheckpoint(manifest.progress.iteration, path, size, seconds, pause, error, prune_error)
            )

    def _prune(self, folder: StoragePath) -> str | None:
        """Delete the checkpoints that need not stay; why it failed. The new one is whole and stays in any case:
        storage may forbid deletion, or an older manifest be unreadable."""
        try:
            prune(folder, keep=self._keep, keep_best=self._keep_best)
        except (OSError, UserError) as failure:
            return _cause(failure)
        return None


def load_slices(path: StoragePath, slices: Iterable[StateSlice]) -> None:
    """Fill slices from a checkpoint, whatever plan wrote it. Each rank reads by itself what it needs.

    UserError if it cannot be read or lacks an element. (`actors.checkpoints.check_whole` tells altered bytes.)
    """
    try:
        with warnings.catch_warnings():
            # That no other rank takes part is what is wanted.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                {},
                storage_reader=CheckpointFileReader(path),
                planner=_SliceLoadPlanner(list(slices)),
                no_dist=True,
            )
    except dcp.api.CheckpointException as failure:
        raise UserError(
            f"checkpoint {path} cannot be read: {_cause(failure)}; go on from another one"
        ) from failure


class _SliceSavePlanner(DefaultSavePlanner):
    """Tells which slices are written; the state dict that DCP passes around stays empty."""

    def __init__(self, slices: Sequence[StateSlice]) -> None:
        super().__init__(flatten_state_dict=False)
        self._slices = slices

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(piece) for piece in self._slices])


class _SliceLoadPlanner(LoadPlanner):
    """Reads into slices, from whatever rectangles the checkpoint holds."""

    def __init__(self, slices: Sequence[StateSlice]) -> None:
        self._slices = {(piece.key, piece.offsets): piece for piece in slices}
        self._metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for piece in self._slices.values() for item in self._read_items(piece)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.storage_index} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        offsets = read_item.dest_index.offset
        assert offsets is not None
        tensor = self._slices[read_item.dest_index.fqn, tuple(offsets)].tensor
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The reader has written into the slice itself."""

    def _read_items(self, piece: StateSlice) -> list[ReadItem]:
        assert self._metadata is not None
        saved = self._metadata.state_dict_metadata.get(piece.key)
        if not isinstance(saved, TensorStorageMetadata) or tuple(saved.size) != piece.size:
            raise UserError(f"it holds no {piece.key} of shape {list(piece.size)}")
        items = create_read_items_for_chunk_list(piece.key, saved, [_chunk(piece)])
        found = sum(torch.Size(item.lengths).numel() for item in items)
        if found != piece.tensor.numel():
            raise UserError(f"it holds {found} of {piece.tensor.numel()} elements of {piece.key}")
        return items


def _chunk(piece: StateSlice) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.tensor.shape)


def _write_item(piece: StateSlice) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(piece.key, torch.Size(piece.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(piece),
            properties=TensorProperties.create_from_tensor(piece.tensor),
            size=torch.Size(piece.size),
        ),
    )


def _write(
    path: StoragePath,
    copies: LateCopies,
    manifest: Manifest,
    *,
    rank: int,
    group: dist.ProcessGroup,
) -> int:
    """Write one checkpoint, a collective of the world: data, sums of every rank's files, manifest. The bytes
    of all of it."""
    writer = CheckpointFileWriter(path, copies)
    dcp.save(
        {},
        storage_writer=writer,
        planner=_SliceSavePlanner(copies.slices),
        process_group=group,
    )
    told: list[dict[str, FileSum]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(told, writer.sums, group=group)
    files = {name: total for sums in told for name, total in sums.items()}
    if rank == 0:
        hidden = [name for name in files if not (path / name).exists()]
        if hidden:
            raise OSError(
                f"{path / hidden[0]} is not seen on the host of rank 0: checkpoint.directory must be on storage"
                " that all hosts share"
            )
        write_manifest(path, manifest.model_copy(update={"files": files}))
    return sum(total.bytes for total in files.values())


def _cause(error: BaseException) -> str:
    """The first thing that went wrong, in a line, with the rank that saw it."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        rank, (failure, _) = min(error.failures.items())
        while failure.__cause__ is not None:
            failure = failure.__cause__
        return f"rank {rank}: {' '.join(str(failure).split()) or type(failure).__name__}"
    return " ".join(str(error).split()) or type(error).__name__
