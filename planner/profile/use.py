"""A planning request priced by imported or measured profiles: the table, and the links that were measured."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from planner.cluster import Cluster
from planner.errors import UserError
from planner.plan import Plan
from planner.profile.links import LinkSource, links_from_profiles
from planner.profile.load import load_profiles
from planner.profile.measured import MeasuredProfile
from planner.request import PlanRequest

Job = TypeVar("Job", PlanRequest, Plan)


def with_profiles(job: Job, place: Path) -> tuple[Job, MeasuredProfile, tuple[LinkSource, ...]]:
    """The request or plan with the measured links, the table, and where each link comes from.

    UserError if a device type has no profile, or one that was not measured in the job's precision or at
    its sequence length.
    """
    table = load_profiles(place, model=job.model, cluster=job.cluster)
    _check_cases(table, job.cluster, precision=job.dtypes.param, length=job.sequence_length)
    links, sources = links_from_profiles(job.cluster.links, table.profiles, precision=job.dtypes.param)
    cluster = job.cluster.model_copy(update={"links": links})
    return job.model_copy(update={"cluster": cluster}), table, sources


def _check_cases(table: MeasuredProfile, cluster: Cluster, *, precision: str, length: int) -> None:
    """Refuse what no plan could be priced for, in words that name what was measured."""
    for device_type in cluster.counts:
        profile = table.profile(device_type)
        times = [time for group in profile.groups for time in group.times]
        where = f"the {device_type} profile of {profile.model}"
        if precision not in profile.precisions:
            raise UserError(
                f"precision = {precision}: {where} was measured in {', '.join(profile.precisions)};"
                f" plan with --precision {profile.precisions[0]}, or measure {precision}"
            )
        lengths = sorted({time.sequence_length for time in times if time.precision == precision})
        if length not in lengths:
            raise UserError(
                f"sequence_length = {length}: {where} was measured at {', '.join(map(str, lengths))} tokens;"
                f" plan with --sequence-length {lengths[-1]}, or measure {length}"
            )
