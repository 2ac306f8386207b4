"""From chains to a priced Plan: samples, devices, order of stages."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.price import with_prediction
from planner.local_batches import allocate, equal_shares
from planner.plan import PipelinePlan, Plan, StagePlan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.exact.chains import Chain
from planner.search.exact.placement import Order, Placed, place
from planner.search.exact.pool import Pool


class Assembler:
    """Makes Plans of one request."""

    def __init__(self, request: PlanRequest, pool: Pool, profile: ProfileTable) -> None:
        self._request, self._pool, self._profile = request, pool, profile
        self.count = 0

    def busy(self, chains: Sequence[Chain]) -> tuple[list[Chain], list[int]]:
        """The chains that get samples, and how many; with equal batches as many chains as there are
        samples."""
        batch = self._request.global_batch_size
        if self._request.equal_batches:
            chains = chains[:batch]
            shares = equal_shares(len(chains), global_batch_size=batch)
        else:
            shares = allocate([chain.pace for chain in chains], global_batch_size=batch)
        used = [(chain, share) for chain, share in zip(chains, shares, strict=True) if share]
        return [chain for chain, _ in used], [share for _, share in used]

    def placed(self, chains: Sequence[Chain], order: Order) -> Placed | None:
        """Devices of every stage; None if the nodes cannot be cut that way."""
        return place(self._pool, chains, order=order)

    def plan(self, chains: Sequence[Chain], placed: Placed, samples: Sequence[int]) -> Plan:
        """A priced Plan of these pipelines, all other devices idle."""
        request = self._request
        pipelines = tuple(
            _pipeline(index, chain, share, placed[index])
            for index, (chain, share) in enumerate(zip(chains, samples, strict=True))
        )
        busy = {device for pipeline in pipelines for device in pipeline.devices}
        used = {device.type for device in request.cluster.devices}
        plan = Plan(
            strategy=request.strategy,
            model=request.model,
            cluster=request.cluster,
            global_batch_size=request.global_batch_size,
            sequence_length=request.sequence_length,
            dtypes=request.dtypes,
            emulation=request.emulation,
            idle_devices=tuple(d.id for d in request.cluster.devices if d.id not in busy),
            profiles=tuple(source for source in self._profile.sources() if source.type in used),
            pipelines=pipelines,
        )
        self.count += 1
        return with_prediction(plan, profile=self._profile)


def _pipeline(index: int, chain: Chain, samples: int, placed: Sequence[tuple[str, ...]]) -> PipelinePlan:
    size, stages, first = chain.micro_batch_size, [], 0
    for number, stage in enumerate(chain.stages):
        stages.append(
            StagePlan(
                devices=placed[number],
                tp=stage.choice.tp,
                dp=len(stage.choice.rows),
                rows=stage.choice.rows,
                layers=(first, first + stage.layers),
                embedding=number == 0,
                head=number == len(chain.stages) - 1,
            )
        )
        first += stage.layers
    return PipelinePlan(
        id=index,
        micro_batch_size=size,
        samples=samples,
        local_batch_size=-(-samples // size) * size,
        stages=tuple(stages),
    )


def iteration_seconds(plan: Plan) -> float:
    """The price of a plan that has one."""
    assert plan.predicted is not None
    return plan.predicted.iteration_seconds
