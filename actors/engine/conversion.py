"""Whole models between Hugging Face folders and ours, a tensor or a file at a time."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors.engine.hugging_face import their_shapes, their_tensor, to_theirs
from actors.engine.weight_files import INDEX, OUR_FILE, WeightFiles, Weights
from actors.engine.weights import DTYPES, write_model_file
from actors.storage import StoragePath
from planner.errors import UserError
from planner.hugging_face import hugging_face_config
from planner.model_spec import ModelSpec
from planner.parameters import model_parameters
from planner.plan import Precision


@dataclass(frozen=True)
class Imported:
    """How much was written, and the precision of most of it."""

    bytes: int
    precision: Precision


def import_hugging_face(source: StoragePath, target: Path, model: ModelSpec) -> Imported:
    """Write the weights of a Hugging Face folder as `weights.safetensors` in `target`, every bit as it was.

    One parameter is in memory at a time. UserError names a tensor that is missing, misshapen or not finite.
    """
    files = WeightFiles(source, model)
    parameters = model_parameters(model)

    def checked() -> Iterator[torch.Tensor]:
        for parameter in parameters:
            tensor = files.parameter(parameter)
            if not bool(torch.isfinite(tensor).all()):
                raise UserError(
                    f"weights {source}: {their_tensor(model, parameter).name} holds values that are not finite; its"
                    " file was altered: download it again"
                )
            yield tensor

    dtypes = {parameter.name: files.dtype(parameter) for parameter in parameters}
    write_model_file(target / OUR_FILE, model, checked(), dtypes=dtypes)
    sizes = dict.fromkeys(DTYPES, 0)
    for parameter in parameters:
        precision = next(name for name, dtype in DTYPES.items() if dtype == dtypes[parameter.name])
        sizes[precision] += parameter.numel * dtypes[parameter.name].itemsize
    return Imported(sum(sizes.values()), max(sizes, key=lambda name: sizes[name]))


def export_hugging_face(
    weights: Weights,
    target: Path,
    model: ModelSpec,
    *,
    shard_bytes: int,
    say: Callable[[str], None],
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Write weights as a Hugging Face folder, a file of at most `shard_bytes` at a time (more only where one tensor
    has more): config.json comes last. `origin` is the config.json that the model came with: what it says beyond the
    architecture stays. OSError if a file cannot be written."""
    parameters = {parameter.name: parameter for parameter in model_parameters(model)}
    tensors = to_theirs(model, lambda name: weights.parameter(parameters[name]))
    files = _split(_their_bytes(weights, model), shard_bytes)
    total, placed = 0, dict[str, str]()
    for number, names in enumerate(files, start=1):
        single = len(files) == 1
        file = "model.safetensors" if single else f"model-{number:05}-of-{len(files):05}.safetensors"
        content = dict(next(tensors) for _ in names)
        assert list(content) == names
        say(f"writing {target / file}")
        _save(content, target / file)
        placed |= dict.fromkeys(names, file)
        total += sum(tensor.nbytes for tensor in content.values())
    if len(files) > 1:
        _write_json(target / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})
    dtype = str(weights.dtype(model_parameters(model)[0])).removeprefix("torch.")
    _write_json(target / "config.json", hugging_face_config(model, dtype=dtype, origin=origin))


def _save(content: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(content, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # A full disk is an error of its own kind there.
        raise OSError(errno.EIO, str(error), str(path)) from None


def _their_bytes(weights: Weights, model: ModelSpec) -> dict[str, int]:
    """Bytes of each of their tensors, in the order in which they are written."""
    sizes = dict.fromkeys(their_shapes(model), 0)
    for parameter in model_parameters(model):
        name = their_tensor(model, parameter).name
        sizes[name] += parameter.numel * weights.dtype(parameter).itemsize
    return sizes


def _split(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Tensors in order, cut into files of at most so many bytes where a tensor is not larger itself."""
    files: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room or not files:
            files.append([])
            room = most
        files[-1].append(name)
        room -= size
    return files


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
