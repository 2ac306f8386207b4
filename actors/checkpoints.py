"""Checkpoints on disk: which of a folder are whole, what each is of, whether its bytes are still those that
were written.

A checkpoint is a folder `step-<iteration>` of torch's distributed checkpoint files, on a disk or in other storage
(`actors.storage`). `manifest.json` is written last: without it the folder is what a crash left, and nothing reads it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar, cast

from pydantic import Field

from actors.file_sums import FileSum, file_sum
from actors.job import Training
from actors.storage import StoragePath, base_name, reason, remove_tree, rename, unusable
from planner.errors import Contract, UserError, parse, read_yaml
from planner.model_spec import ModelSpec
from planner.plan import Plan

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")

Place = TypeVar("Place", bound=StoragePath)


class DataIdentity(Contract):
    """The token file: its name is a hash of the text and of the tokenizer. `held_out` is the share that is never
    trained on, or the name of the token file to validate with; empty if there is neither. `tokenizer` is `byte`, a hash
    of the tokenizer.json, or `none` where token ids came as they are. `weights` are those of a
    mixture, whose name is a hash of its texts and these; empty for one text. `document_attention` and `packing` are the
    job's."""

    name: str
    tokens: int
    held_out: str = ""
    tokenizer: str = "byte"
    weights: tuple[float, ...] = ()
    document_attention: bool = False
    packing: bool = False


class Progress(Contract):
    """What a training run knows beside tensors, the same on every rank.

    `iteration` is the last that ended; samples, schedule and dropout follow from it and the seed. `updates`
    counts those that changed parameters. `loss_scale` and `finite_iterations` are those of dynamic loss scaling.
    """

    iteration: int = Field(ge=0)
    updates: int = Field(ge=0)
    loss_scale: float = 1.0
    finite_iterations: int = 0


class Manifest(Contract):
    """What a checkpoint is of, and the sums of its files. `plan` is the one that wrote it, in a line.

    `loss` is that of the iteration's own batch, `validation_loss` of the held-out samples under just these parameters;
    None where it was not finite, or they were not evaluated, which `evaluated` tells apart.
    """

    version: Literal[1] = 1
    progress: Progress
    model: ModelSpec
    training: Training
    data: DataIdentity
    plan: str
    loss: float | None = None
    validation_loss: float | None = None
    evaluated: bool = False
    written: str = Field(description="local time, ISO 8601")
    torch: str
    files: dict[str, FileSum] = Field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint."""

    path: StoragePath
    manifest: Manifest

    @property
    def iteration(self) -> int:
        return self.manifest.progress.iteration

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.manifest.files.values())

    @property
    def metric(self) -> tuple[str, float] | None:
        """By what the best is chosen, the lower the better: `validation_loss`, or `loss` where there was no evaluation;
        None if that is not finite."""
        if self.manifest.validation_loss is not None:
            return "validation_loss", self.manifest.validation_loss
        if self.manifest.evaluated:
            # A model whose validation loss is no number is none of the best, however well it did on its own batch.
            return None
        return None if self.manifest.loss is None else ("loss", self.manifest.loss)


class Tokens(Protocol):
    """What names a token file."""

    @property
    def path(self) -> Path: ...
    @property
    def count(self) -> int: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def weights(self) -> tuple[float, ...]: ...


class HeldOutOf(Protocol):
    """What names the part of the data that is never trained on."""

    @property
    def identity(self) -> str: ...


class DocumentsOf(Protocol):
    """What the boundaries of documents do."""

    @property
    def attention(self) -> bool: ...
    @property
    def packing(self) -> bool: ...


def data_identity(tokens: Tokens, held_out: HeldOutOf, documents: DocumentsOf) -> DataIdentity:
    """The text behind a token file, which is named by a hash of it, what of it is held out, and how it is read."""
    return DataIdentity(
        name=tokens.path.stem,
        tokens=tokens.count,
        held_out=held_out.identity,
        tokenizer=tokens.tokenizer,
        weights=tokens.weights,
        document_attention=documents.attention,
        packing=documents.packing,
    )


def plan_line(plan: Plan) -> str:
    """A plan in a few words: devices, pipelines as stages of TP x DP, ZeRO."""
    counts = ", ".join(f"{count} x {type_}" for type_, count in plan.cluster.counts.items())
    pipelines = " | ".join(
        " > ".join(f"tp{stage.tp} dp{stage.dp}" for stage in pipeline.stages) for pipeline in plan.pipelines
    )
    return f"{counts}: {pipelines}, ZeRO-{plan.zero_stage}"


def checkpoint_path(folder: Place, iteration: int) -> Place:
    """Where the checkpoint after an iteration lies."""
    return cast(Place, folder / f"step-{iteration:08d}")


def checkpoints(folder: StoragePath) -> list[Checkpoint]:
    """The whole checkpoints of a folder, oldest first; empty if there is no such folder."""
    return [
        Checkpoint(path, read_manifest(path))
        for path in checkpoint_folders(folder)
        if (path / MANIFEST).exists()
    ]


def readable(folder: StoragePath) -> tuple[list[Checkpoint], list[str]]:
    """As `checkpoints`, but those whose manifest cannot be read do not stand in the way: why, a line each."""
    found: list[Checkpoint] = []
    broken: list[str] = []
    for path in checkpoint_folders(folder):
        try:
            if (path / MANIFEST).exists():
                found.append(Checkpoint(path, read_manifest(path)))
        except OSError as error:
            broken.append(str(unusable(path, error)))
        except UserError as error:
            broken.append(f"{error}; delete it (eth checkpoint delete {path})")
    return found, broken


def incomplete(folder: StoragePath) -> list[StoragePath]:
    """What saves that did not end have left."""
    return [path for path in checkpoint_folders(folder) if not (path / MANIFEST).exists()]


def latest(folder: StoragePath) -> Checkpoint:
    """The newest whole checkpoint of a folder; older ones are not looked at. UserError if there is none, or its
    manifest cannot be read."""
    for path in reversed(checkpoint_folders(folder)):
        if (path / MANIFEST).exists():
            try:
                return Checkpoint(path, read_manifest(path))
            except UserError as error:
                raise UserError(
                    f"{error}; delete this checkpoint (eth checkpoint delete {path}) and use another, such as the"
                    " one before it"
                ) from None
    raise UserError(
        f"{folder} holds no whole checkpoint to go on from; train again with --overwrite, with checkpoint.every"
        " in the job"
    )


def read_manifest(path: StoragePath) -> Manifest:
    """The manifest of a checkpoint. UserError if it cannot be read."""
    file = path / MANIFEST
    if not file.exists():
        raise UserError(f"{path} is not a whole checkpoint: it has no {MANIFEST}; name another")
    return parse(Manifest, read_yaml(file, what="checkpoint manifest"), source=str(file))


def write_manifest(path: StoragePath, manifest: Manifest) -> None:
    """Make a checkpoint whole: the manifest appears in one step, after everything that it lists."""
    partial = path / f".{MANIFEST}.writing"
    with partial.open("wb") as stream:
        stream.write(manifest.model_dump_json(indent=1).encode() + b"\n")
        if isinstance(path, Path):
            stream.flush()
            os.fsync(stream.fileno())
    rename(partial, path / MANIFEST)


@dataclass(frozen=True)
class Problem:
    """What is wrong with a file of a checkpoint, in a line. One that may not be read is not `lost`: it may be whole."""

    told: str
    lost: bool = True


def problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    """What is wrong with a checkpoint's files; nothing if every byte is as it was written."""
    for name, expected in checkpoint.manifest.files.items():
        path = checkpoint.path / name
        try:
            found = file_sum(path, expected.algorithm)
        except OSError as error:
            yield Problem(
                f"{path} cannot be read: {reason(error)}", lost=not isinstance(error, PermissionError)
            )
            continue
        if found.bytes != expected.bytes:
            yield Problem(f"{path} has {found.bytes} bytes and not {expected.bytes}")
        elif found != expected:
            yield Problem(f"{path} was changed after it was written: its checksum is another")


def check_whole(checkpoint: Checkpoint) -> None:
    """UserError that names the first file of a checkpoint that is not as it was written."""
    for problem in problems(checkpoint):
        if not problem.lost:
            raise UserError(f"{problem.told}; make it readable, or use another checkpoint")
        raise UserError(
            f"{problem.told}; delete this checkpoint (eth checkpoint delete {checkpoint.path}) and use another,"
            " such as the one before it"
        )


def _listed(weights: Sequence[float]) -> str:
    return ", ".join(f"{weight:g}" for weight in weights) or "none"


def check_continues(
    manifest: Manifest, *, model: ModelSpec, training: Training, data: DataIdentity, source: StoragePath
) -> None:
    """UserError unless a job goes on with what a checkpoint began.

    The plan may be any. Of training, `steps`, learning rate, clipping and weight decay may change; what
    decides which samples come next or what the state means may not.
    """
    began = manifest.training
    fixed: list[tuple[str, object, object]] = [
        ("training.seed", training.seed, began.seed),
        ("training.global_batch_size", training.global_batch_size, began.global_batch_size),
        ("training.sequence_length", training.sequence_length, began.sequence_length),
        ("training.precision", training.precision, began.precision),
        ("training.optimizer.name", training.optimizer.name, began.optimizer.name),
        # The moments that were saved are averages of just these lengths.
        ("training.optimizer.betas", list(training.optimizer.betas), list(began.optimizer.betas)),
        ("training.optimizer.epsilon", training.optimizer.epsilon, began.optimizer.epsilon),
        ("training.optimizer.momentum", training.optimizer.momentum, began.optimizer.momentum),
    ]
    for field, mine, theirs in fixed:
        if mine != theirs:
            raise UserError(
                f"{field} = {mine} but checkpoint {source} was trained with {theirs}; write {theirs}, or start"
                " anew with --overwrite"
            )
    if (difference := model_difference(model, manifest.model)) is not None:
        raise UserError(
            f"model = {model.name} is not the model of checkpoint {source}: {difference}; use that model, or start"
            " anew with --overwrite"
        )
    if data.tokenizer != manifest.data.tokenizer:
        raise UserError(
            f"data.tokenizer ({data.tokenizer}) is not the one that checkpoint {source} was trained with"
            f" ({manifest.data.tokenizer}); use that one, or start anew with --overwrite"
        )
    if data.held_out != manifest.data.held_out:
        raise UserError(
            f"data.held_out = {data.held_out or 'none'} but checkpoint {source} was trained with"
            f" {manifest.data.held_out or 'none'}; write that, or start anew with --overwrite"
        )
    if data.weights != manifest.data.weights:
        raise UserError(
            f"data.mixture has weights {_listed(data.weights)} but checkpoint {source} was trained with"
            f" {_listed(manifest.data.weights)}; write those, or start anew with --overwrite"
        )
    for name in ("document_attention", "packing"):
        mine, theirs = (str(getattr(identity, name)).lower() for identity in (data, manifest.data))
        if mine != theirs:
            raise UserError(
                f"data.{name} = {mine} but checkpoint {source} was trained with {theirs}; write {theirs}, or start"
                " anew with --overwrite"
            )
    if data != manifest.data:
        raise UserError(
            f"data: {data.tokens} tokens of another text than checkpoint {source} was trained on"
            f" ({manifest.data.tokens} tokens); give the same text, or start anew with --overwrite"
        )
    if training.steps <= manifest.progress.iteration:
        raise UserError(
            f"training.steps = {training.steps}, but checkpoint {source} has {manifest.progress.iteration} steps"
            " already; raise training.steps"
        )


def best(found: Sequence[Checkpoint], count: int = 1) -> list[Checkpoint]:
    """The checkpoints of the lowest loss, the best first, of equal ones the newer. A training loss, of one batch,
    stands behind every validation loss; a checkpoint without a finite loss is never among them."""
    ranked: list[tuple[bool, float, int, Checkpoint]] = []
    for checkpoint in found:
        if checkpoint.metric is not None:
            name, value = checkpoint.metric
            ranked.append((name != "validation_loss", value, -checkpoint.iteration, checkpoint))
    return [checkpoint for *_, checkpoint in sorted(ranked, key=lambda entry: entry[:3])[:count]]


def prune(folder: StoragePath, *, keep: int, keep_best: int = 0) -> list[StoragePath]:
    """Delete the whole checkpoints that are neither of the newest `keep` nor of the best `keep_best`; returns those
    that are gone. One whose manifest cannot be read is left alone and counts as none."""
    found, _ = readable(folder)
    stay = {checkpoint.iteration for checkpoint in [*found[-keep:], *best(found, keep_best)]}
    gone = [checkpoint.path for checkpoint in found if checkpoint.iteration not in stay]
    for path in gone:
        delete(path)
    return gone


def delete(path: StoragePath) -> None:
    """Delete a checkpoint. Its manifest goes first, so that it is never taken for a whole one."""
    (path / MANIFEST).unlink(missing_ok=True)
    remove_tree(path)


def is_checkpoint_folder(path: StoragePath) -> bool:
    """Whether a path is a checkpoint's, whole or not."""
    return _NAME.fullmatch(base_name(path)) is not None and path.is_dir()


def checkpoint_folders(folder: StoragePath) -> Sequence[StoragePath]:
    """The checkpoints of a folder, oldest first, whole or not; empty if there is no such folder."""
    try:
        if isinstance(folder, Path) and not folder.is_dir():
            return []
        return sorted((path for path in folder.iterdir() if is_checkpoint_folder(path)), key=base_name)
    except OSError as error:
        raise unusable(folder, error) from None


def model_difference(one: ModelSpec, other: ModelSpec) -> str | None:
    """The first field in which two models differ, their names apart; None if none does."""
    for field in type(one).model_fields:
        mine, theirs = getattr(one, field), getattr(other, field)
        if field != "name" and mine != theirs:
            return f"its {field} is {theirs}, not {mine}"
    return None
