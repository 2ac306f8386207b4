"""From chains to a priced Plan: samples, devices, order of stages, and what they recompute to fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from planner.cost.layer_flow import Recompute
from planner.cost.memory import StageLoad
from planner.cost.plan_memory import PlanMemory
from planner.cost.price import with_prediction
from planner.cost.recompute import RecomputeModel
from planner.cost.stages import StageCost
from planner.local_batches import allocate, equal_shares
from planner.operators import cuts_positions
from planner.plan import PipelinePlan, Plan, StagePlan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.exact.chains import Chain
from planner.search.exact.placement import Order, Placed, place
from planner.search.exact.pool import Pool


class Assembler:
    """Makes Plans of one request."""

    def __init__(
        self,
        request: PlanRequest,
        pool: Pool,
        profile: ProfileTable,
        *,
        cost: StageCost,
        recompute: RecomputeModel | None,
        zero_stage: Literal[0, 1, 2],
        by_position: bool = False,
    ) -> None:
        """`recompute` None: nothing is recomputed; `by_position`: stages whose TP can cut activations by position
        do."""
        self._request, self._pool, self._profile, self._cost = request, pool, profile, cost
        self._recompute, self._zero_stage, self._by_position = recompute, zero_stage, by_position
        self._fewest: dict[tuple[tuple[str, StageLoad], ...], Recompute | None] = {}
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

    def end_seconds(self, chains: Sequence[Chain]) -> float:
        """When the last of the pipelines ends, by their own paces."""
        busy, samples = self.busy(chains)
        return max(
            chain.pace.end_seconds(chain.pace.micro_batches(share))
            for chain, share in zip(busy, samples, strict=True)
        )

    def placed(self, chains: Sequence[Chain], order: Order) -> Placed | None:
        """Devices of every stage; None if the nodes cannot be cut that way."""
        return place(self._pool, chains, order=order)

    def plan(self, chains: Sequence[Chain], placed: Placed, samples: Sequence[int]) -> Plan | None:
        """A priced Plan of these pipelines, all other devices idle; None if it does not fit."""
        request = self._request
        pipelines = tuple(
            self._pipeline(index, chain, share, placed[index])
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
            zero_stage=self._zero_stage,
            zero_scope=request.zero_scope,
            idle_devices=tuple(d.id for d in request.cluster.devices if d.id not in busy),
            profiles=tuple(source for source in self._profile.sources() if source.type in used),
            pipelines=pipelines,
        )
        self.count += 1
        fitting = self._fitting(plan)
        return with_prediction(fitting, cost=self._cost) if fitting else None

    def _fitting(self, plan: Plan) -> Plan | None:
        """The plan with the fewest recomputed operators for its true micro-batches in flight."""
        memory = PlanMemory(plan)
        pipelines = []
        for index, pipeline in enumerate(plan.pipelines):
            stages = []
            for number, stage in enumerate(pipeline.stages):
                loads = {
                    (
                        plan.cluster.device_by_id[stage.tp_group(replica)[0]].type,
                        memory.load(pipeline=index, stage=number, replica=replica),
                    )
                    for replica in range(stage.dp)
                }
                needed = self._needed(tuple(sorted(loads, key=lambda one: (one[0], one[1].rows))), memory)
                if needed is None:
                    return None
                stages.append(stage.model_copy(update={"recompute": dict(needed)}) if needed else stage)
            pipelines.append(pipeline.model_copy(update={"stages": tuple(stages)}))
        return plan.model_copy(update={"pipelines": tuple(pipelines)})

    def _needed(self, loads: tuple[tuple[str, StageLoad], ...], memory: PlanMemory) -> Recompute | None:
        if loads not in self._fewest:
            types = self._request.cluster.device_types
            if self._recompute is not None:
                replay = self._recompute.fewest(loads)
                found = replay.recompute if replay else None
            else:
                found = () if all(memory.model.fits(load, types[type_]) for type_, load in loads) else None
            self._fewest[loads] = found
        return self._fewest[loads]

    def _pipeline(
        self, index: int, chain: Chain, samples: int, placed: Sequence[tuple[str, ...]]
    ) -> PipelinePlan:
        size, stages, first = chain.micro_batch_size, [], 0
        for number, stage in enumerate(chain.stages):
            tp = stage.choice.tp
            stages.append(
                StagePlan(
                    devices=placed[number],
                    tp=tp,
                    dp=len(stage.choice.rows),
                    rows=stage.choice.rows,
                    layers=(first, first + stage.layers),
                    embedding=number == 0,
                    head=number == len(chain.stages) - 1,
                    sequence_parallel=self._by_position
                    and cuts_positions(tp=tp, sequence_length=self._request.sequence_length),
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
