"""The profile file: measured times of one model's operators on one device type, and of its links.

One JSON file per (device type, model). Figures that a source does not give are null, never made up.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import date as Date
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from planner.errors import Contract, UserError, parse
from planner.model_spec import Family, ModelSpec
from planner.plan import Precision
from planner.profile.interpolate import interpolate
from planner.profile.table import Scope
from planner.units import Seconds

Part = Literal["embedding", "layer", "head"]
LinkOperation = Literal["p2p", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

# Frameworks pad the vocabulary to a multiple of up to this, so that it divides by the TP degree.
VOCABULARY_PADDING = 1024


class Shape(Contract):
    """Sizes that decide the operators' times; a size that the source does not tell is null.

    Layers are alike, so their number is not in here. `vocab_size` includes the framework's padding.
    """

    family: Family
    hidden_size: int = Field(ge=1)
    ffn_hidden_size: int = Field(ge=1)
    heads: int | None = Field(default=None, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    vocab_size: int | None = Field(default=None, ge=2)

    @property
    def hash(self) -> str:
        """Short name of the shape: equal shapes, equal hashes."""
        return _sha256(self.model_dump(mode="json"))[:16]

    def unlike(self, model: ModelSpec) -> list[str]:
        """Each size in which a model differs, as `heads = 32 (the model has 16)`; unknown ones do not."""
        found = []
        for field in ("family", "hidden_size", "ffn_hidden_size", "heads", "kv_heads"):
            own, wanted = getattr(self, field), getattr(model, field)
            if own is not None and own != wanted:
                found.append(f"{field} = {own} (the model has {wanted})")
        if self.vocab_size is not None and not _is_padded(self.vocab_size, model.vocab_size):
            found.append(f"vocab_size = {self.vocab_size} (the model has {model.vocab_size})")
        return found


class OperatorTime(Contract):
    """One measured case of a group of operators, on one TP rank.

    `saved_bytes` maps each storage kept for backward to its bytes: groups that name the same storage share
    it, so it counts once. `total_bytes` is for sources that tell nothing finer: state and activations
    together. `spread_seconds` is the deviation of forward plus backward over repetitions.
    """

    tp: int = Field(ge=1)
    samples: int = Field(ge=1)
    sequence_length: int = Field(ge=1)
    precision: Precision
    forward_seconds: float = Field(ge=0, allow_inf_nan=False)
    backward_seconds: float = Field(ge=0, allow_inf_nan=False)
    spread_seconds: float | None = Field(default=None, ge=0)
    parameter_bytes: int | None = Field(default=None, ge=0)
    saved_bytes: dict[str, int] | None = None
    workspace_bytes: int | None = Field(default=None, ge=0)
    total_bytes: int | None = Field(default=None, ge=0)


class ProfiledGroup(Contract):
    """Operators that were timed together, of one part of the model."""

    name: str = Field(min_length=1)
    part: Part
    operators: tuple[str, ...] = Field(min_length=1)
    times: tuple[OperatorTime, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        cases = [(t.tp, t.samples, t.sequence_length, t.precision) for t in self.times]
        twice = [case for case in cases if cases.count(case) > 1]
        if twice:
            tp, samples, length, precision = twice[0]
            raise ValueError(
                f"{self.name}: tp {tp}, {samples} samples of {length} tokens in {precision} is timed twice;"
                " keep one of them"
            )
        return self


class LinkPoint(Contract):
    message_bytes: int = Field(ge=1)
    seconds: float = Field(gt=0, allow_inf_nan=False)


class LinkTimes(Contract):
    """Time over message size of one operation in a group of `members`; points ascend by size."""

    scope: Scope
    operation: LinkOperation
    members: int = Field(ge=2)
    precision: Precision | None = Field(default=None, description="of the run it was measured with")
    source: str
    points: tuple[LinkPoint, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        sizes = [point.message_bytes for point in self.points]
        if any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"points of {self.source} must ascend by message_bytes, each size once")
        return self

    def seconds(self, message_bytes: float) -> float | None:
        """On a straight line between measured sizes; None outside them."""
        sizes = [point.message_bytes for point in self.points]
        return interpolate(sizes, [point.seconds for point in self.points], message_bytes)


class Calibration(Contract):
    """How an operator's time inside a training run follows from its time alone:
    (seconds - `launch_seconds`) x `factor`, forward and backward each, never below 0."""

    factor: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    launch_seconds: Seconds = 0.0

    def apply(self, seconds: float) -> float:
        return max(0.0, seconds - self.launch_seconds) * self.factor


class DeviceProfile(Contract):
    """Everything measured of one model on one device type. `date` is when the file was written.

    `assumptions` says in words what the figures rest on beside the measurement.
    """

    version: Literal[1] = 1
    device_type: str = Field(min_length=1)
    model: str = Field(min_length=1)
    shape: Shape
    shape_hash: str = ""
    provenance: Literal["measured", "analytic", "imported"]
    source: str
    date: Date
    versions: dict[str, str] = Field(default_factory=dict)
    includes_tp_collectives: bool
    calibration: Calibration = Calibration()
    assumptions: tuple[str, ...] = ()
    groups: tuple[ProfiledGroup, ...] = Field(min_length=1)
    links: tuple[LinkTimes, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shape_hash not in ("", self.shape.hash):
            raise ValueError(
                f"shape_hash = {self.shape_hash!r} is not that of shape, {self.shape.hash!r}; leave it out"
            )
        operators = [operator for group in self.groups for operator in group.operators]
        twice = [operator for operator in operators if operators.count(operator) > 1]
        if twice:
            raise ValueError(f"groups: operator {twice[0]!r} is in two groups; keep it in one")
        return self

    @property
    def file_name(self) -> str:
        return f"{_plain(self.device_type)}-{_plain(self.model)}.json"

    @property
    def precisions(self) -> tuple[str, ...]:
        return tuple(sorted({time.precision for group in self.groups for time in group.times}))

    @property
    def sha256(self) -> str:
        """Hash of the content but its date: the same measurements, the same hash."""
        return _sha256(self.model_dump(mode="json", exclude={"date"}))

    def to_json(self) -> str:
        """The file's text, one line a measurement."""
        content = self.model_copy(update={"shape_hash": self.shape.hash}).model_dump(mode="json")
        return _pretty(content) + "\n"


def read_profile(path: Path) -> DeviceProfile:
    """A DeviceProfile from its file; UserError with one line that names the field."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"profile file {path} does not exist; check the path") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"profile file {path} cannot be read: {error}") from None
    return parse(DeviceProfile, data, source=str(path))


def read_profiles(place: Path) -> dict[Path, DeviceProfile]:
    """The profile file at `place`, or all that lie in that folder; UserError if there is none."""
    if place.is_file():
        return {place: read_profile(place)}
    if not place.is_dir():
        raise UserError(f"profiles = {str(place)!r} is neither a file nor a folder; check the path")
    files = sorted(place.glob("*.json"))
    if not files:
        raise UserError(f"profiles = {str(place)!r} holds no .json file; make one with `eth profile import`")
    return {path: read_profile(path) for path in files}


def _is_padded(padded: int, vocab_size: int) -> bool:
    return vocab_size <= padded <= -(-vocab_size // VOCABULARY_PADDING) * VOCABULARY_PADDING


def _sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)


def _pretty(value: object, indent: str = "") -> str:
    """JSON with a line for every flat mapping: thousands of measurements stay readable and comparable."""
    inner = indent + " "
    if isinstance(value, dict) and any(isinstance(item, dict | list) and item for item in value.values()):
        if set(value) >= {"tp", "samples"}:
            return json.dumps(value)
        lines = [f"{inner}{json.dumps(key)}: {_pretty(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(inner + _pretty(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value)
