"""First values of parameters from files: a run's weights.safetensors or a Hugging Face folder, read a shard at a
time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from actors.engine.hugging_face import from_theirs, their_shapes
from planner.errors import UserError
from planner.model_spec import ModelSpec
from planner.parameters import Parameter, model_parameters

OUR_FILE = "weights.safetensors"
_INDEX = "model.safetensors.index.json"
_GPT2_PREFIX = "transformer."

Shapes = dict[str, tuple[int, ...]]


class WeightFiles:
    """The weights of a model in safetensors files; nothing is read but what is asked for.

    `path` is a run folder, a weights.safetensors, or a Hugging Face folder of GPT-2 or LLaMA. Raises UserError
    where files are missing or cannot be read, or a tensor is missing or has another shape.
    """

    def __init__(self, path: Path, model: ModelSpec) -> None:
        self._path, self._model = path, model
        self.ours = _is_ours(path)
        self._files = _files_by_tensor(path)
        self._open: dict[Path, Any] = {}
        expected: Shapes = (
            {parameter.name: parameter.shape for parameter in model_parameters(model)}
            if self.ours
            else their_shapes(model)
        )
        for name, shape in expected.items():
            found = tuple(self._slice(name).get_shape())
            if found != shape:
                raise UserError(
                    f"weights {path}: {name} has shape {list(found)}, but the model needs {list(shape)}; give the"
                    " model of these weights"
                )

    def parameter(self, parameter: Parameter) -> torch.Tensor:
        """A whole parameter on the host, in the precision of the file."""
        return self._read(parameter, None)

    def shard(self, parameter: Parameter, *, tp: int, tp_rank: int) -> torch.Tensor:
        """A TP rank's part of a parameter, padded with zeros to `padded_shard_shape`."""
        if parameter.tp_dim is None:
            return self._read(parameter, None)
        start, stop = parameter.shard_range(tp=tp, tp_rank=tp_rank)
        shape = list(parameter.padded_shard_shape(tp=tp))
        if start == stop:
            return torch.zeros(shape)
        part = self._read(parameter, (start, stop))
        padded = part.new_zeros(shape)
        padded.narrow(parameter.tp_dim, 0, stop - start).copy_(part)
        return padded

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
        return self._open[file].get_slice(known)


def check_weights(path: Path, model: ModelSpec) -> None:
    """UserError unless `path` holds weights of a model, by the headers of the files alone."""
    WeightFiles(path, model)


def _is_ours(path: Path) -> bool:
    return path.is_file() or (path / OUR_FILE).exists()


def _files_by_tensor(path: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    if not path.exists():
        raise UserError(f"weights = {str(path)!r} does not exist; give a run folder or a Hugging Face folder")
    if _is_ours(path):
        files = [path if path.is_file() else path / OUR_FILE]
    elif (index := path / _INDEX).exists():
        return {name: path / file for name, file in _weight_map(index).items()}
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"weights = {str(path)!r} holds no .safetensors file; save the model as safetensors first"
        )
    return {name: file for file in files for name in _opened(file).keys()}  # noqa: SIM118


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index} is no index of weights ({error!r}); download it again") from None
    assert isinstance(found, dict)
    return found


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read as safetensors ({error}); is it whole?") from None


def export_hugging_face(
    source: Path, target: Path, model: ModelSpec, *, max_file_bytes: int, say: Callable[[str], None]
) -> None:
    """Write a run's weights as a Hugging Face folder, a file at a time: config.json comes last."""
    from safetensors.torch import save_file

    from actors.engine.hugging_face import to_theirs
    from planner.hugging_face import hugging_face_config

    weights = WeightFiles(source, model)
    assert weights.ours
    by_name = {parameter.name: parameter for parameter in model_parameters(model)}
    tensors = to_theirs(model, lambda name: weights.parameter(by_name[name]))
    itemsize = weights.parameter(by_name["final_norm.weight"]).element_size()
    files = _split({n: math.prod(s) * itemsize for n, s in their_shapes(model).items()}, max_file_bytes)
    dtype, total, placed = "", 0, dict[str, str]()
    for number, names in enumerate(files, start=1):
        single = len(files) == 1
        file = "model.safetensors" if single else f"model-{number:05}-of-{len(files):05}.safetensors"
        content = dict(next(tensors) for _ in names)
        assert list(content) == names
        say(f"writing {target / file}")
        save_file(content, target / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(names, file)
        total += sum(tensor.nbytes for tensor in content.values())
        dtype = str(next(iter(content.values())).dtype).removeprefix("torch.")
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (target / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    config = hugging_face_config(model, dtype=dtype)
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _split(sizes: dict[str, int], most: int) -> list[list[str]]:
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
