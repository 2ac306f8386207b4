"""Metis-style layer JSON, `DeviceType.<type>_tp<t>_bs<b>.json`: milliseconds and MiB a layer.

The lists start with the embedding and end with the head; layers lie between. Forward and backward are given
together, so their split is an assumption that the profile records; Eq. 1 does not depend on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated

from pydantic import BaseModel, Field

from planner.catalogue import canonical_name
from planner.errors import UserError, parse
from planner.model_spec import ModelSpec
from planner.operators import layer_operators
from planner.parameters import model_parameters
from planner.plan import Precision
from planner.profile.file import OperatorTime, Part, ProfiledGroup, Shape
from planner.profile.table import EMBEDDING_OPERATORS, HEAD_OPERATORS

MIB = 1024**2
FILE_NAME = re.compile(r"^DeviceType\.(?P<type>.+?)_tp(?P<tp>\d+)_bs(?P<samples>\d+)\.json$")

# Two products in backward for one in forward.
FORWARD_SHARE = 1 / 3
ASSUMPTIONS = (
    "forward is taken as one third of the layer times, which are given for both passes together",
    "TP collectives are taken to be inside the layer times, as its planner does",
)

# A vector's or a rounding's worth: parameter bytes decide whether the right model was named.
_TOLERANCE = 0.02

_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Times(BaseModel):
    layer_compute_total_ms: list[_Number] = Field(min_length=3)


class _Memory(BaseModel):
    layer_memory_total_mb: list[_Number] = Field(min_length=3)


class _Parameters(BaseModel):
    parameters_per_layer_bytes: list[int] | None = None


class _Model(BaseModel):
    parameters: _Parameters = _Parameters()


class _LayerJson(BaseModel):
    """The part of the format that is used; other keys are for other tools."""

    model: _Model = _Model()
    execution_time: _Times
    execution_memory: _Memory


@dataclass(frozen=True)
class LayerFile:
    path: Path
    device_type: str
    tp: int
    samples: int
    milliseconds: tuple[float, ...]
    mebibytes: tuple[float, ...]
    parameter_bytes: tuple[int, ...] | None


def read_layer_file(path: Path) -> LayerFile:
    match = FILE_NAME.match(path.name)
    assert match is not None, path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    content = parse(_LayerJson, data, source=str(path))
    times = content.execution_time.layer_compute_total_ms
    memory = content.execution_memory.layer_memory_total_mb
    parameters = content.model.parameters.parameters_per_layer_bytes
    for name, values in (("layer_memory_total_mb", memory), ("parameters_per_layer_bytes", parameters)):
        if values is not None and len(values) != len(times):
            raise UserError(
                f"{path}: {name} has {len(values)} entries and layer_compute_total_ms {len(times)}; they are"
                " the same layers"
            )
    return LayerFile(
        path,
        match["type"],
        int(match["tp"]),
        int(match["samples"]),
        tuple(times),
        tuple(memory),
        tuple(parameters) if parameters else None,
    )


def of_type(folder: Path, files: Sequence[LayerFile], device_type: str) -> list[LayerFile]:
    """The files of a device type; of a folder's only type, whatever it is called there."""
    found = sorted({file.device_type for file in files})
    wanted = [name for name in found if (canonical_name(name) or name) == device_type]
    if not wanted and len(found) > 1:
        raise UserError(
            f"{folder} holds device types {', '.join(found)}, none of them {device_type}; import each with"
            " --as its name, or from a folder of its own"
        )
    return [file for file in files if file.device_type in (wanted or found)]


def check_parameters(files: Sequence[LayerFile], model: ModelSpec) -> None:
    """UserError where a layer's parameter bytes, if given, are not those of the named model."""
    layer = [p for p in model_parameters(model) if p.region.kind == "layer" and p.region.layer == 0]
    for file in files:
        if file.parameter_bytes is None:
            continue
        values = sum(parameter.shard_numel(tp=file.tp, tp_rank=0) for parameter in layer)
        bytes_ = fmean(file.parameter_bytes[1:-1])
        if not any(abs(bytes_ / (values * width) - 1) < _TOLERANCE for width in (2, 4)):
            raise UserError(
                f"{file.path}: a layer has {bytes_:.0f} bytes of parameters at tp {file.tp}, which a layer of"
                f" {model.name} ({values} values) cannot have; name the model that was measured with --model"
            )


def stated_shape(model: ModelSpec) -> Shape:
    """The shape is the named model's: layer JSON tells none."""
    return Shape(
        family=model.family,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        heads=model.heads,
        kv_heads=model.kv_heads,
        vocab_size=model.vocab_size,
    )


def groups_of(
    files: Sequence[LayerFile], model: ModelSpec, *, precision: Precision, sequence_length: int
) -> tuple[ProfiledGroup, ...]:
    """The embedding, one layer (the mean of all) and the head as a group each."""

    def group(name: str, part: Part, operators: tuple[str, ...]) -> ProfiledGroup:
        times = [_time(file, part, precision, sequence_length) for file in files]
        times.sort(key=lambda time: (time.tp, time.samples))
        return ProfiledGroup(name=name, part=part, operators=operators, times=tuple(times))

    return (
        group("embedding", "embedding", EMBEDDING_OPERATORS),
        group("layer", "layer", layer_operators(model)),
        group("head", "head", HEAD_OPERATORS),
    )


def _time(file: LayerFile, part: Part, precision: Precision, sequence_length: int) -> OperatorTime:
    places = {"embedding": slice(0, 1), "layer": slice(1, -1), "head": slice(-1, None)}[part]
    times = [value * 1e-3 for value in file.milliseconds[places]]
    seconds = fmean(times)
    parameters = file.parameter_bytes[places] if file.parameter_bytes else None
    return OperatorTime(
        tp=file.tp,
        samples=file.samples,
        sequence_length=sequence_length,
        precision=precision,
        forward_seconds=seconds * FORWARD_SHARE,
        backward_seconds=seconds * (1 - FORWARD_SHARE),
        spread_seconds=pstdev(times) or None,
        parameter_bytes=round(fmean(parameters)) if parameters else None,
        total_bytes=round(fmean(file.mebibytes[places]) * MIB),
    )
