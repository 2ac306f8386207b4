"""Memory of the devices of a plan: loads of its stages, the fullest device of each, and what does not fit."""

from __future__ import annotations

from dataclasses import replace

from planner.cluster import Device
from planner.cost.layer_flow import recompute_of
from planner.cost.memory import MemoryModel, StageLoad
from planner.cost.zero import stage_ways
from planner.errors import UserError
from planner.gradient_calls import gradient_layout
from planner.plan import Plan
from planner.units import format_bytes


class PlanMemory:
    """Bytes of every device of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ways = stage_ways(plan)
        self.model = MemoryModel(
            model=plan.model,
            sequence_length=plan.sequence_length,
            dtypes=plan.dtypes,
            memory_scale=plan.emulation.memory_scale,
        )

    def load(self, *, pipeline: int, stage: int, replica: int) -> StageLoad:
        """The memory load of a replica."""
        planned = self._plan.pipelines[pipeline]
        place = planned.stages[stage]
        in_flight = min(len(planned.stages) - stage, planned.micro_batches)
        return StageLoad(
            tp=place.tp,
            rows=place.rows[replica],
            layers=place.layer_count,
            embedding=place.embedding,
            head=place.head,
            in_flight=in_flight,
            recompute=recompute_of(place.recompute),
            zero_stage=self._plan.zero_stage,
            zero_ways=self._ways[pipeline][stage],
            dp=place.dp,
            sequence_parallel=place.sequence_parallel and place.tp > 1,
            largest_call=self._largest_call(pipeline, stage) if self.model.narrow_wire else None,
            further=planned.micro_batches - in_flight,
        )

    def _largest_call(self, pipeline: int, stage: int) -> int:
        layout = gradient_layout(self._plan)
        ranks = [
            place.rank for place in self._plan.ranks if (place.pipeline, place.stage) == (pipeline, stage)
        ]
        return max((call.numel for rank in ranks for call in layout.calls_of(rank)), default=0)

    def fullest(self, pipeline: int, stage: int) -> tuple[int, int, Device]:
        """(tensor_bytes, device_bytes, device) of the stage's device with the least left."""
        cluster, place = self._plan.cluster, self._plan.pipelines[pipeline].stages[stage]
        alike: dict[tuple[str, int], tuple[int, Device]] = {}
        for replica, rows in enumerate(place.rows):
            device = cluster.device_by_id[place.tp_group(replica)[0]]
            alike.setdefault((device.type, rows), (replica, device))
        candidates = []
        for replica, device in alike.values():
            type_ = cluster.device_types[device.type]
            load = self.load(pipeline=pipeline, stage=stage, replica=replica)
            # What must fit is what a search counts with, which does not know how many micro-batches there will be.
            needed = self.model.device_bytes(replace(load, further=None), type_)
            candidates.append((needed - type_.memory_bytes, self.model.tensor_bytes(load), needed, device))
        _, tensors, needed, device = max(candidates, key=lambda candidate: candidate[0])
        return tensors, needed, device


def check_memory(plan: Plan) -> None:
    """Raise UserError naming the first stage that does not fit its devices, and by how many bytes."""
    memory = PlanMemory(plan)
    for index, pipeline in enumerate(plan.pipelines):
        for number in range(len(pipeline.stages)):
            _, needed, device = memory.fullest(index, number)
            limit = plan.cluster.type_of(device.id).memory_bytes
            if needed > limit:
                raise UserError(
                    f"pipelines[{index}].stages[{number}] needs {format_bytes(needed)} on {device.id}"
                    f" ({device.type}), {format_bytes(needed - limit)} more than its {format_bytes(limit)};"
                    " give it fewer layers, a higher tp, a smaller micro-batch or bf16"
                )
