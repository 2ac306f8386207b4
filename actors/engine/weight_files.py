"""First values of parameters, a shard at a time: from safetensors files, ours or Hugging Face's, or a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from actors.checkpoints import Checkpoint, check_whole, is_checkpoint_folder, read_manifest
from actors.engine.hugging_face import from_theirs, their_shapes, their_tensor
from actors.engine.remote_tensors import RemoteTensors
from actors.model_files import is_weight_file
from actors.storage import RemotePath, StoragePath, unusable
from planner.errors import UserError
from planner.model_spec import ModelSpec
from planner.parameters import Parameter, model_parameters

OUR_FILE = "weights.safetensors"
INDEX = "model.safetensors.index.json"
_GPT2_PREFIX = "transformer."
# Constants that older files hold beside the parameters.
_CONSTANTS = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)$")
# By the names that safetensors gives them; integers and 8-bit floats would need scales that no ModelSpec has.
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

Shapes = dict[str, tuple[int, ...]]


class Weights(Protocol):
    """The parameters of a model, read as they are asked for. Tensors are new, on the host, in the stored precision."""

    def dtype(self, parameter: Parameter) -> torch.dtype: ...

    def parameter(self, parameter: Parameter) -> torch.Tensor:
        """A whole parameter."""
        ...

    def shard(self, parameter: Parameter, *, tp: int, tp_rank: int) -> torch.Tensor:
        """A TP rank's part of a parameter, padded with zeros to `padded_shard_shape`."""
        ...


def open_weights(path: StoragePath, model: ModelSpec) -> Weights:
    """The weights in a run folder, a weights.safetensors, a Hugging Face folder or a checkpoint.

    UserError where they are not whole, or not of this model, or cannot be reached.
    """
    try:
        if is_checkpoint_folder(path):
            from actors.engine.checkpoint_weights import CheckpointWeights

            return CheckpointWeights(path, model)
        return WeightFiles(path, model)
    except OSError as error:
        raise unusable(path, error, field="weights") from None


def check_weights(path: StoragePath, model: ModelSpec) -> None:
    """UserError unless `path` holds weights of a model, by what the files say of themselves; of a checkpoint, which
    has sums, every byte is looked at."""
    open_weights(path, model)
    if is_checkpoint_folder(path):
        check_whole(Checkpoint(path, read_manifest(path)))


def padded_shard(parameter: Parameter, part: torch.Tensor, *, tp: int) -> torch.Tensor:
    """A TP rank's part as the engine holds it, with zeros behind it up to `padded_shard_shape`."""
    shape = parameter.padded_shard_shape(tp=tp)
    if part.shape == torch.Size(shape):
        return part
    assert parameter.tp_dim is not None
    padded = part.new_zeros(shape)
    padded.narrow(parameter.tp_dim, 0, part.shape[parameter.tp_dim]).copy_(part)
    return padded


class WeightFiles:
    """The weights of a model in safetensors files; nothing is read but what is asked for.

    `path` is a run folder, a weights.safetensors, or a Hugging Face folder of GPT-2 or LLaMA, on a disk or in other
    storage. Raises UserError
    where files are missing or cannot be read, or a tensor is missing or has another shape.
    """

    def __init__(self, path: StoragePath, model: ModelSpec) -> None:
        self._path, self._model = path, model
        self.ours = _is_ours(path)
        self._files = _files_by_tensor(path)
        self._open: dict[StoragePath, Any] = {}
        expected: Shapes = (
            {parameter.name: parameter.shape for parameter in model_parameters(model)}
            if self.ours
            else their_shapes(model)
        )
        for name, shape in expected.items():
            self._check(name, shape)
        for name in self._unknown(expected):
            raise UserError(
                f"weights {path}: tensor {name} has no place in a {model.family} model of"
                f" {model.layers} layers; give the model of these weights"
            )

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The precision in which a parameter is stored."""
        name = parameter.name if self.ours else their_tensor(self._model, parameter).name
        return _DTYPES[self._slice(name).get_dtype()]

    def parameter(self, parameter: Parameter) -> torch.Tensor:
        """A whole parameter on the host, in the precision of the file."""
        return self._read(parameter, None)

    def shard(self, parameter: Parameter, *, tp: int, tp_rank: int) -> torch.Tensor:
        """A TP rank's part of a parameter, padded with zeros to `padded_shard_shape`."""
        if parameter.tp_dim is None:
            return self._read(parameter, None)
        start, stop = parameter.shard_range(tp=tp, tp_rank=tp_rank)
        if start == stop:
            return torch.zeros(parameter.padded_shard_shape(tp=tp), dtype=self.dtype(parameter))
        return padded_shard(parameter, self._read(parameter, (start, stop)), tp=tp)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """UserError unless a tensor is there, in a shape and a precision that the model can take."""
        found = self._slice(name)
        if tuple(found.get_shape()) != shape:
            raise UserError(
                f"weights {self._path}: {name} has shape {list(found.get_shape())}, but the model needs"
                f" {list(shape)}; give the model of these weights"
            )
        if found.get_dtype() not in _DTYPES:
            raise UserError(
                f"weights {self._path}: {name} is stored as {found.get_dtype()}, but only {', '.join(_DTYPES)} are"
                " read; save the model unquantised first"
            )

    def _unknown(self, expected: Shapes) -> Iterator[str]:
        """Tensors that belong to no parameter: what they do, the model here would leave out."""
        known = set(expected) | {name.removeprefix(_GPT2_PREFIX) for name in expected}
        if self._model.tied_embedding:
            known |= {"lm_head.weight"}
        return (name for name in self._files if name not in known and not _CONSTANTS.search(name))

    def _read(self, parameter: Parameter, tp_range: tuple[int, int] | None) -> torch.Tensor:
        try:
            if not self.ours:
                return from_theirs(self._model, parameter, self._slice, tp_range=tp_range)
            ranges = [(0, size) for size in parameter.shape]
            if tp_range is not None and parameter.tp_dim is not None:
                ranges[parameter.tp_dim] = tp_range
            found: torch.Tensor = self._slice(parameter.name)[tuple(slice(*bounds) for bounds in ranges)]
            return found
        except SafetensorError as error:
            raise UserError(
                f"weights {self._path}: {parameter.name} cannot be read ({error}); is the file whole?"
            ) from None

    def _slice(self, name: str) -> Any:
        # Files of the bare GPT-2 model leave the prefix out.
        known = next((n for n in (name, name.removeprefix(_GPT2_PREFIX)) if n in self._files), None)
        if known is None:
            raise UserError(
                f"weights {self._path}: tensor {name} is missing; give the folder that the model was saved to"
            )
        file = self._files[known]
        if file not in self._open:
            self._open[file] = _opened(file)
        try:
            return self._open[file].get_slice(known)
        except SafetensorError:
            raise UserError(
                f"{file} holds no tensor {known}, but {INDEX} says so; download both again"
            ) from None


def _is_ours(path: StoragePath) -> bool:
    return is_weight_file(path) or (path / OUR_FILE).exists()


def _files_by_tensor(path: StoragePath) -> dict[str, StoragePath]:
    """Which file holds each tensor."""
    files: list[StoragePath]
    if not path.exists():
        raise UserError(f"weights = {str(path)!r} does not exist; give a run folder or a Hugging Face folder")
    if _is_ours(path):
        files = [path if is_weight_file(path) else path / OUR_FILE]
    elif (index := path / INDEX).exists():
        return _indexed(index)
    else:
        files = sorted((file for file in path.iterdir() if file.name.endswith(".safetensors")), key=str)
    if not files:
        raise UserError(
            f"weights = {str(path)!r} holds no .safetensors file; save the model as safetensors first"
        )
    return {name: file for file in files for name in _opened(file).keys()}  # noqa: SIM118


def _indexed(index: StoragePath) -> dict[str, StoragePath]:
    """Which file holds each tensor, as the index says; UserError if a file is not there."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: index.parent / file for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is no index of weights ({error!r}); download it again") from None
    for file in sorted(set(files.values()), key=str):
        if not file.exists():
            held = sum(other == file for other in files.values())
            raise UserError(f"{file} is missing: {index.name} says that it holds {held} tensors; download it")
    return files


def _opened(file: StoragePath) -> Any:
    try:
        if isinstance(file, RemotePath):
            return RemoteTensors(file)
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} cannot be read as safetensors ({error}); it is not whole: copy or download it again"
        ) from None
