"""Whether a model fits a cluster at all: one pipeline, as sparing of memory as it can be.

Every type's devices stand in stages of one (tp, dp), in every order of the types, with as much recomputed, sharded
and cut by position as it takes, of what the request allows. A plan that needs less memory than all of these is rare: it
would have unlike stages of one type.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.baselines.bench import Bench
from planner.baselines.forms import filled
from planner.baselines.sketch import Chain, Sketch
from planner.catalogue import DeviceType
from planner.cost.plan_memory import PlanMemory
from planner.local_batches import Pace
from planner.plan import Plan
from planner.profile.analytic import AnalyticProfile
from planner.profile.table import ProfileTable
from planner.request import PlanRequest

_MOST_COMBINATIONS = 64
_MOST_ORDERS = 6
# Memory is searched for as a multiple of what the devices have, up to this one and within this factor.
_MOST_MEMORY = 2.0**20
_CLOSE = 1.02


@dataclass(frozen=True)
class Shortage:
    """The stage that lacks most in the pipeline that needs the least multiple of the devices' memory."""

    plan: Plan
    stage: int
    type: str
    needed_bytes: int
    excess_bytes: int


def fits(request: PlanRequest, *, profile: ProfileTable | None = None) -> bool:
    """Whether such a pipeline fits."""
    return _sparing_plan(request, profile, 1.0) is not None


def shortage(request: PlanRequest, *, profile: ProfileTable | None = None) -> Shortage | None:
    """What is missing; None if no memory would be enough: too few samples, or more devices than layers."""
    low, high = 1.0, 2.0
    while (plan := _sparing_plan(request, profile, high)) is None:
        low, high = high, high * 2
        if high > _MOST_MEMORY:
            return None
    while high / low > _CLOSE:
        middle = (low * high) ** 0.5
        found = _sparing_plan(request, profile, middle)
        if found is None:
            low = middle
        else:
            high, plan = middle, found
    return _worst(request, plan)


def _worst(request: PlanRequest, plan: Plan) -> Shortage:
    memory, (pipeline,) = PlanMemory(plan), plan.pipelines
    found = []
    for stage in range(len(pipeline.stages)):
        _, needed, device = memory.fullest(0, stage)
        excess = needed - request.cluster.device_types[device.type].memory_bytes
        found.append(Shortage(plan, stage, device.type, needed, excess))
    return max(found, key=lambda one: one.excess_bytes)


def _sparing_plan(request: PlanRequest, profile: ProfileTable | None, factor: float) -> Plan | None:
    """A plan of the first pipeline that fits, were memory so many times larger; None if none does."""
    types = {name: _enlarged(type_, factor) for name, type_ in request.cluster.device_types.items()}
    cluster = request.cluster.model_copy(update={"device_types": types})
    changed = request.model_copy(update={"cluster": cluster, "zero_stages": (max(request.zero_stages),)})
    bench = Bench(changed, profile=profile or _analytic(changed))

    def everything(paces: Sequence[Pace]) -> list[int]:
        return [changed.global_batch_size]

    for sketch in _sketches(bench):
        settled = bench.settle(sketch, everything, expected=[changed.global_batch_size])
        if settled is not None:
            return bench.plan(settled.pipelines, settled.zero_stage)
    return None


def _sketches(bench: Bench) -> Iterator[Sketch]:
    """Wide stages last: the narrow ones need the smallest micro-batch."""
    layers, batch = bench.layers, bench.request.global_batch_size
    for types in _subsets(list(bench.counts)):
        degrees = [bench.degrees(type_)[::-1] for type_ in types]
        orders = list(itertools.islice(itertools.permutations(range(len(types))), _MOST_ORDERS))
        for dp in _powers(min(batch, max(bench.counts[type_] for type_ in types))):
            for tps in itertools.islice(itertools.product(*degrees), _MOST_COMBINATIONS):
                parts = [
                    filled(type_, bench.counts[type_], tp=tp, dp=dp, micro_batch_size=dp)
                    for type_, tp in zip(types, tps, strict=True)
                ]
                if sum(map(len, parts)) > layers + 2:
                    continue
                if all(bench.covers(form) for part in parts for form in set(part)):
                    for order in orders:
                        chain: Chain = tuple(itertools.chain(*(parts[k] for k in order)))
                        yield Sketch(dp, (chain,))


def _subsets(types: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for count in range(len(types), 0, -1):
        yield from itertools.combinations(types, count)


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _enlarged(device: DeviceType, factor: float) -> DeviceType:
    return device.model_copy(update={"memory_bytes": int(device.memory_bytes * factor)})


def _analytic(request: PlanRequest) -> ProfileTable:
    return AnalyticProfile(request.model, request.cluster.device_types)
