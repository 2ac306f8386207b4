"""What a profile lacks, in words: reported at import, refused when a plan needs it."""

from __future__ import annotations

from itertools import product

from planner.model_spec import ModelSpec
from planner.profile.file import DeviceProfile
from planner.profile.table import model_operators

_DEGREES = (1, 2, 4, 8)
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def missing_data(profile: DeviceProfile, model: ModelSpec) -> tuple[str, ...]:
    """One line for every kind of figure that a plan of the model could ask for and the profile lacks."""
    return tuple(_operators(profile, model) + _cases(profile, model) + _links(profile))


def _operators(profile: DeviceProfile, model: ModelSpec) -> list[str]:
    held = {operator for group in profile.groups for operator in group.operators}
    missing = [operator for operator in model_operators(model) if operator not in held]
    return [f"operators: {', '.join(missing)}"] if missing else []


def _cases(profile: DeviceProfile, model: ModelSpec) -> list[str]:
    """TP degrees absent altogether, then single (tp, samples) cases absent from an otherwise full grid."""
    found = []
    for precision in profile.precisions:
        times = [t for group in profile.groups for t in group.times if t.precision == precision]
        degrees = {time.tp for time in times}
        samples = {time.samples for time in times}
        usable = {tp for tp in _DEGREES if model.heads % tp == 0 and model.kv_heads % tp == 0}
        if absent := sorted(usable - degrees):
            found.append(f"{precision}: tp {', '.join(map(str, absent))}")
        holes: dict[tuple[int, int], list[str]] = {}
        for group in profile.groups:
            cases = {(time.tp, time.samples) for time in group.times if time.precision == precision}
            for case in product(degrees, samples):
                if case not in cases:
                    holes.setdefault(case, []).append(group.name)
        for (tp, size), names in sorted(holes.items()):
            which = "all operators" if len(names) == len(profile.groups) else ", ".join(names)
            found.append(f"{precision}: tp {tp} with micro-batches of {size}: {which}")
    return found


def _links(profile: DeviceProfile) -> list[str]:
    held = {(times.scope, times.operation, times.members) for times in profile.links}
    found = [
        f"transfers {where}: links come from the cluster file"
        for scope, where in (("intra_node", "inside a node"), ("inter_node", "between nodes"))
        if (scope, "p2p", 2) not in held
    ]
    degrees = sorted({time.tp for group in profile.groups for time in group.times if time.tp > 1})
    absent = [
        f"{operation} of {members}"
        for operation in _COLLECTIVES
        for members in degrees
        if ("intra_node", operation, members) not in held
    ]
    if absent:
        found.append(f"collectives inside a node: {', '.join(absent)}")
    if not any(scope == "inter_node" and operation != "p2p" for scope, operation, _ in held):
        found.append("collectives between nodes")
    return found
