"""Profiles of a folder -> the table for one model on one cluster, and the links that were measured there."""

from __future__ import annotations

from pathlib import Path

from planner.catalogue import canonical_name
from planner.cluster import Cluster
from planner.errors import UserError
from planner.model_spec import ModelSpec
from planner.profile.file import DeviceProfile, read_profiles
from planner.profile.measured import MeasuredProfile


def load_profiles(place: Path, *, model: ModelSpec, cluster: Cluster) -> MeasuredProfile:
    """The table from the profile files at `place`, a file or a folder: one for each of the cluster's types.

    A profile serves every model of its shape, whatever the number of layers. UserError that names every
    device type without a profile, and what there is instead.
    """
    found = read_profiles(place)
    chosen: dict[str, DeviceProfile] = {}
    problems: list[str] = []
    for device_type in cluster.counts:
        of_type = {path: p for path, p in found.items() if _same_type(p.device_type, device_type)}
        fitting = {path: p for path, p in of_type.items() if not p.shape.unlike(model)}
        if len(fitting) > 1:
            named = {path: p for path, p in fitting.items() if p.model == model.name}
            fitting = named or fitting
        if len(fitting) == 1:
            chosen[device_type] = next(iter(fitting.values()))
        elif fitting:
            files = ", ".join(path.name for path in fitting)
            problems.append(f"{device_type} has several that fit ({files}): keep one of them there")
        else:
            problems.append(_why_none(device_type, of_type, model))
    if problems:
        raise UserError(f"profiles = {str(place)!r}: {'; '.join(problems)}. {_contents(found)}")
    return MeasuredProfile(model, chosen, cluster.device_types)


def _why_none(device_type: str, of_type: dict[Path, DeviceProfile], model: ModelSpec) -> str:
    if not of_type:
        return f"device type {device_type} has no profile: `eth profile import FOLDER --as {device_type}`"
    reasons = (f"{path.name} has {', '.join(p.shape.unlike(model))}" for path, p in of_type.items())
    return f"device type {device_type} has no profile of {model.name}'s shape: {'; '.join(reasons)}"


def _contents(found: dict[Path, DeviceProfile]) -> str:
    return "There are: " + ", ".join(f"{p.device_type} of {p.model}" for p in found.values())


def _same_type(a: str, b: str) -> bool:
    return a == b or (canonical_name(a) or a) == (canonical_name(b) or b)
