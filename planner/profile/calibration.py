"""From operators timed alone to operators inside a training run: launch overhead off, one factor on."""

from __future__ import annotations

from itertools import pairwise

from planner.profile.file import DeviceProfile, OperatorTime

# Twice the samples in the same time, give or take this: the time is not the work's.
_FLAT = 0.05
# Nor is it then far above the least time of all.
_NEAR_LEAST = 1.3


def launch_seconds(profile: DeviceProfile) -> float:
    """Seconds that an operator timed alone takes even with next to no work; 0 if no measurement shows it.

    That is the least time of all, if one near it does not grow although the samples do: launching and
    timing, which a training run hides behind the operators before.
    """
    curves = _curves(profile)
    flat = [
        first
        for curve in curves
        for (small, first), (large, second) in pairwise(curve)
        if large >= 2 * small and abs(second / first - 1) < _FLAT
    ]
    least = min((seconds for curve in curves for _, seconds in curve), default=0.0)
    return least if flat and min(flat) <= _NEAR_LEAST * least else 0.0


def _curves(profile: DeviceProfile) -> list[list[tuple[int, float]]]:
    """(samples, seconds) of every operator and pass, all else fixed, by rising samples; zeros left out."""
    cases: dict[tuple[object, ...], list[OperatorTime]] = {}
    for group in profile.groups:
        for time in group.times:
            cases.setdefault((group.name, time.tp, time.sequence_length, time.precision), []).append(time)
    curves = []
    for times in cases.values():
        times.sort(key=lambda time: time.samples)
        for seconds in ("forward_seconds", "backward_seconds"):
            points = [(time.samples, float(getattr(time, seconds))) for time in times]
            curves.append([point for point in points if point[1] > 0])
    return curves
