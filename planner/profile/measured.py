"""ProfileTable over measured times: interpolates between micro-batch sizes, refuses all else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from planner.catalogue import DeviceType
from planner.errors import UserError
from planner.model_spec import ModelSpec
from planner.plan import ProfileSource
from planner.profile.analytic import AnalyticProfile
from planner.profile.file import Calibration, DeviceProfile, OperatorTime
from planner.profile.interpolate import interpolate
from planner.profile.links import find_link_times
from planner.profile.table import OperatorGroup, OperatorGroups, Scope, StepSeconds, model_operators

REMEDY = "measure or import that case, or plan without it"


@dataclass(frozen=True)
class _Curve:
    """Times of one group over the samples, all else fixed."""

    samples: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]


# (group, tp, sequence length, precision)
_Case = tuple[str, int, int, str]


class MeasuredProfile:
    """Times of one model's operators from one profile a device type.

    Times follow the measurements wherever they go: they need not fall with the TP degree or rise with the
    samples. Steps that only move memory (the optimizer's) are not in the profiles: `device_types` give
    their bandwidth. Every profile's calibration is applied to its operator times.
    """

    def __init__(
        self,
        model: ModelSpec,
        profiles: Mapping[str, DeviceProfile],
        device_types: Mapping[str, DeviceType],
    ) -> None:
        self.model = model
        self.profiles = dict(profiles)
        self._device_types = dict(device_types)
        self._datasheets = AnalyticProfile(model, device_types)
        self._groups = {name: _groups(profile, model) for name, profile in self.profiles.items()}
        self._curves = {name: _curves(profile) for name, profile in self.profiles.items()}
        self._covered: dict[tuple[str, int, int, int, str], bool] = {}

    def calibrated(self, device_type: str, calibration: Calibration) -> Self:
        """The same table with another calibration of one device type."""
        changed = self.profile(device_type).model_copy(update={"calibration": calibration})
        return type(self)(self.model, self.profiles | {device_type: changed}, self._device_types)

    def groups(self, device_type: str) -> OperatorGroups:
        self.profile(device_type)
        return self._groups[device_type]

    def profile(self, device_type: str) -> DeviceProfile:
        """The profile of a device type; UserError if there is none."""
        if device_type not in self.profiles:
            raise UserError(
                f"device type {device_type} has no profile; there are profiles of"
                f" {', '.join(sorted(self.profiles)) or 'no type'}: import one with"
                f" `eth profile import FOLDER --as {device_type}`"
            )
        return self.profiles[device_type]

    def includes_tp_collectives(self, device_type: str) -> bool:
        return self.profile(device_type).includes_tp_collectives

    def covers(
        self, *, device_type: str, tp: int, samples: int, sequence_length: int, precision: str
    ) -> bool:
        key = (device_type, tp, samples, sequence_length, precision)
        if key not in self._covered:
            self._covered[key] = device_type in self.profiles and all(
                (curve := self._curves[device_type].get((group.name, tp, sequence_length, precision)))
                is not None
                and curve.samples[0] <= samples <= curve.samples[-1]
                for group in self.profiles[device_type].groups
            )
        return self._covered[key]

    def operator_seconds(
        self,
        *,
        device_type: str,
        operator: str,
        tp: int,
        samples: int,
        sequence_length: int,
        precision: str,
    ) -> StepSeconds:
        profile = self.profile(device_type)
        curve = self._curves[device_type].get((operator, tp, sequence_length, precision))
        if curve is None:
            raise _missing(profile, (operator, tp, sequence_length, precision))
        if operator == "attention_dropout" and not self.model.dropout:
            return StepSeconds(0.0, 0.0)
        forward = interpolate(curve.samples, curve.forward, samples)
        backward = interpolate(curve.samples, curve.backward, samples)
        if forward is None or backward is None:
            raise UserError(
                f"the {device_type} profile of {profile.model} has {operator} at tp {tp} for micro-batches of"
                f" {curve.samples[0]} to {curve.samples[-1]} samples, not {samples}; {REMEDY}"
            )
        apply = profile.calibration.apply
        return StepSeconds(apply(forward), apply(backward))

    def operator_memory(
        self, *, device_type: str, operator: str, tp: int, samples: int, sequence_length: int, precision: str
    ) -> OperatorTime | None:
        """The measured case with its bytes; None where that very case was not measured."""
        group = next((g for g in self.profile(device_type).groups if g.name == operator), None)
        wanted = (tp, samples, sequence_length, precision)
        return next(
            (
                time
                for time in (group.times if group else ())
                if (time.tp, time.samples, time.sequence_length, time.precision) == wanted
            ),
            None,
        )

    def all_reduce_seconds(
        self,
        *,
        device_type: str,
        scope: Scope,
        members: int,
        message_bytes: float,
        precision: str,
    ) -> float | None:
        times = find_link_times(
            self.profile(device_type),
            scope=scope,
            operation="all_reduce",
            members=members,
            precision=precision,
        )
        if times is None:
            return None
        smallest, largest = times.points[0].message_bytes, times.points[-1].message_bytes
        # A call may always be cut into smaller ones, or padded: nothing is read beyond what was measured.
        pieces = max(1, math.ceil(message_bytes / largest))
        seconds = times.seconds(max(message_bytes / pieces, smallest))
        assert seconds is not None
        return pieces * seconds

    def least_all_reduce_rate(self) -> float:
        return min(
            (
                point.seconds / point.message_bytes
                for profile in self.profiles.values()
                for times in profile.links
                if times.operation == "all_reduce"
                for point in times.points
            ),
            default=math.inf,
        )

    def streaming_seconds(self, *, device_type: str, moved_bytes: float) -> float:
        return self._datasheets.streaming_seconds(device_type=device_type, moved_bytes=moved_bytes)

    def sources(self) -> tuple[ProfileSource, ...]:
        return tuple(
            ProfileSource(type=name, sha256=profile.sha256, provenance=profile.provenance)
            for name, profile in sorted(self.profiles.items())
        )


def _groups(profile: DeviceProfile, model: ModelSpec) -> OperatorGroups:
    """The profile's groups by part; UserError if one of the model's operators is in none."""
    held = [operator for group in profile.groups for operator in group.operators]
    wanted = model_operators(model)
    if missing := [operator for operator in wanted if operator not in held]:
        raise UserError(
            f"the {profile.device_type} profile of {profile.model} lacks operator {', '.join(missing)};"
            f" it has {', '.join(held)}: measure or import the missing ones"
        )
    if unknown := [operator for operator in held if operator not in wanted]:
        raise UserError(
            f"the {profile.device_type} profile of {profile.model} has operator {', '.join(unknown)},"
            f" which {model.name} ({model.family}) does not run; use a profile of the same family"
        )

    def of_part(part: str) -> tuple[OperatorGroup, ...]:
        found = [OperatorGroup(g.name, g.operators) for g in profile.groups if g.part == part]
        return tuple(sorted(found, key=lambda group: wanted.index(group.operators[0])))

    return OperatorGroups(of_part("embedding"), of_part("layer"), of_part("head"))


def _curves(profile: DeviceProfile) -> dict[_Case, _Curve]:
    cases: dict[_Case, list[OperatorTime]] = {}
    for group in profile.groups:
        for time in group.times:
            cases.setdefault((group.name, time.tp, time.sequence_length, time.precision), []).append(time)
    curves = {}
    for case, times in cases.items():
        times.sort(key=lambda time: time.samples)
        curves[case] = _Curve(
            tuple(time.samples for time in times),
            tuple(time.forward_seconds for time in times),
            tuple(time.backward_seconds for time in times),
        )
    return curves


def _missing(profile: DeviceProfile, case: _Case) -> UserError:
    """What of a case the profile lacks: the first of operator, precision, sequence length, TP degree."""
    name, tp, sequence_length, precision = case
    where = f"the {profile.device_type} profile of {profile.model}"
    group = next((group for group in profile.groups if group.name == name), None)
    if group is None:
        held = ", ".join(group.name for group in profile.groups)
        return UserError(f"{where} has no operator {name!r}; it has {held}: {REMEDY}")
    times = [time for time in group.times if time.precision == precision]
    if not times:
        held = ", ".join(sorted({time.precision for time in group.times}))
        return UserError(f"{where} has {name} in {held}, not in {precision}; {REMEDY}")
    times = [time for time in times if time.sequence_length == sequence_length]
    if not times:
        held = _listed(t.sequence_length for t in group.times if t.precision == precision)
        return UserError(
            f"{where} has {name} for sequences of {held} tokens, not {sequence_length}; {REMEDY}"
        )
    held = _listed(time.tp for time in times)
    return UserError(f"{where} has {name} at tp {held}, not {tp}; {REMEDY}")


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(values))))
