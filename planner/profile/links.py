"""Links from measured transfers: bandwidth and latency fitted to time over message size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.cluster import Link, Links
from planner.errors import UserError
from planner.profile.file import DeviceProfile, LinkOperation, LinkTimes
from planner.profile.table import Scope


@dataclass(frozen=True)
class LinkSource:
    """Where the link between two devices of `device_type` comes from.

    `worst_error` is the largest relative error of the fitted line over the measured messages; None for a
    link that the cluster file gives.
    """

    device_type: str
    scope: Scope
    link: Link
    source: str
    worst_error: float | None = None


def fit_link(times: LinkTimes) -> tuple[Link, float]:
    """(link, worst relative error): latency + bytes / bandwidth, least squares of the relative error."""
    sizes = np.array([point.message_bytes for point in times.points], dtype=float)
    seconds = np.array([point.seconds for point in times.points])
    if len(sizes) == 1:
        return Link(bandwidth=float(sizes[0] / seconds[0]), latency=0.0), 0.0
    slope, latency = _relative_line(sizes, seconds)
    link = Link(bandwidth=1 / slope, latency=latency)
    return link, float(np.max(np.abs((latency + sizes * slope) / seconds - 1)))


def _relative_line(sizes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """(slope, intercept) that minimise the relative residuals, the intercept not below 0 nor the slope."""
    columns = np.stack([sizes / seconds, 1 / seconds], axis=1)
    slope, latency = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
    if latency < 0 or slope <= 0:
        ratio = sizes / seconds
        return float(ratio.sum() / (ratio @ ratio)), 0.0
    return float(slope), float(latency)


def links_from_profiles(
    links: Links, profiles: Mapping[str, DeviceProfile], *, precision: str | None = None
) -> tuple[Links, tuple[LinkSource, ...]]:
    """The cluster's links with the measured ones put in, and where each comes from.

    Profiles tell links between devices of one type. What they lack (links between unlike types, scopes that
    were not measured) stays as the cluster has it, and so does a pair that its `overrides` name. With a
    `precision`, the measurement that was made with it is preferred.
    """
    overrides = dict(links.overrides)
    sources = []
    for name, profile in profiles.items():
        for scope, key in (("intra_node", f"{name}@intra"), ("inter_node", name)):
            times = find_link_times(profile, scope=scope, operation="p2p", members=2, precision=precision)  # type: ignore[arg-type]
            if times is None or _overridden(links, name, key):
                link = links.between(type_a=name, type_b=name, same_node=scope == "intra_node")
                sources.append(LinkSource(name, scope, link, "cluster"))  # type: ignore[arg-type]
                continue
            overrides[key], error = fit_link(times)
            sources.append(LinkSource(name, scope, overrides[key], times.source, error))  # type: ignore[arg-type]
    return links.model_copy(update={"overrides": overrides}), tuple(sources)


def _overridden(links: Links, name: str, key: str) -> bool:
    pair = f"{name}/{name}" + key.removeprefix(name)
    return key in links.overrides or pair in links.overrides


def find_link_times(
    profile: DeviceProfile,
    *,
    scope: Scope,
    operation: LinkOperation,
    members: int,
    precision: str | None = None,
) -> LinkTimes | None:
    """The measurement of an operation; of several, the one made with `precision`."""
    found = [
        times
        for times in profile.links
        if (times.scope, times.operation, times.members) == (scope, operation, members)
    ]
    return next((times for times in found if times.precision == precision), found[0] if found else None)


def collective_seconds(
    profile: DeviceProfile,
    *,
    scope: Scope,
    operation: LinkOperation,
    members: int,
    message_bytes: float,
    precision: str | None = None,
) -> float:
    """Measured seconds of an operation, between measured sizes on a straight line.

    UserError that names the group size or the message size that was not measured.
    """
    times = find_link_times(profile, scope=scope, operation=operation, members=members, precision=precision)
    where = f"the {profile.device_type} profile of {profile.model}"
    if times is None:
        held = sorted({(t.operation, t.scope, t.members) for t in profile.links})
        told = ", ".join(f"{name} of {n} ({place})" for name, place, n in held) or "none"
        raise UserError(
            f"{where} has no {operation} of {members} devices ({scope}); it has {told}: measure it,"
            " or price it from the link"
        )
    seconds = times.seconds(message_bytes)
    if seconds is None:
        sizes = [point.message_bytes for point in times.points]
        raise UserError(
            f"{where} has {operation} of {members} devices ({scope}) for messages of {sizes[0]} to"
            f" {sizes[-1]} bytes, not {message_bytes:.0f}; measure it, or price it from the link"
        )
    return seconds
