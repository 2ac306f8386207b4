"""Event simulation of 1F1B for any Plan: every replica of every stage, transfers, blocks, optimizer.

Eq. 1 paces a pipeline by its slowest stage throughout; the replay knows that light stages hide in the
schedule and that receiving overlaps with computing, so its figure is at most Eq. 1's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.cost.exchange import WAYS, Way, row_overlaps
from planner.cost.gradient import finish
from planner.cost.price import plan_shapes
from planner.cost.stage_shape import StageShape
from planner.cost.stages import StageCost
from planner.plan import Plan
from planner.profile.table import ProfileTable, StepSeconds
from planner.timeline import Event, Kind, Timeline, ordered


def simulate(
    plan: Plan,
    *,
    profile: ProfileTable | None = None,
    ways: Sequence[Way] = WAYS,
    events: bool = True,
) -> Timeline:
    """Replay one iteration, stages exchanging in the cheapest of `ways`. Without `events` only the times are worked
    out."""
    cost = StageCost.of_plan(plan, profile=profile, ways=ways)
    pipelines = [_PipelineReplay(plan, index, cost, events) for index in range(len(plan.pipelines))]
    for pipeline in pipelines:
        pipeline.run()
    ready = [pipelines[place.pipeline].free[place.stage][place.replica] for place in plan.ranks]
    last = finish(plan, ready, cost=cost)
    synced, optimizer = last.synced_seconds, last.optimizer_seconds
    found: list[Event] = []
    if events:
        found = [event for pipeline in pipelines for event in pipeline.events]
        for time in (*last.calls, *last.gathers):
            found += _sync_events(
                plan, time.call.holders, time.call.block, time.start_seconds, time.end_seconds
            )
        found += [
            Event(place.device, place.pipeline, place.stage, "optimizer", None, synced, synced + optimizer)
            for place in plan.ranks
        ]
    return Timeline(
        iteration_seconds=last.end_seconds,
        pipeline_end_seconds=tuple(
            max(end for stage in pipeline.free for end in stage) for pipeline in pipelines
        ),
        events=ordered(found),
    )


def one_forward_one_backward(*, stages: int, stage: int, micro_batches: int) -> Iterator[tuple[Kind, int]]:
    """The 1F1B order of one stage: warm-up forwards, then forward and backward in turn, then the rest."""
    warm_up = min(stages - 1 - stage, micro_batches)
    for index in range(warm_up):
        yield "forward", index
    for index in range(micro_batches - warm_up):
        yield "forward", warm_up + index
        yield "backward", index
    for index in range(micro_batches - warm_up, micro_batches):
        yield "backward", index


def _sync_events(plan: Plan, holders: tuple[int, ...], block: int, start: float, end: float) -> list[Event]:
    places = (plan.ranks[rank] for rank in holders)
    return [
        Event(place.device, place.pipeline, place.stage, "gradient_sync", None, start, end, block)
        for place in places
    ]


@dataclass(frozen=True)
class _Arrivals:
    """How the replicas of a stage receive from a neighbour: from whom, for how long, and how long each then gathers
    its slices."""

    senders: list[list[int]]
    seconds: tuple[float, ...]
    gather: tuple[float, ...]


class _PipelineReplay:
    """1F1B of one pipeline, replica by replica (the TP ranks of a replica move together)."""

    def __init__(self, plan: Plan, index: int, cost: StageCost, keep_events: bool) -> None:
        self._plan, self._index, self._keep = plan, index, keep_events
        self._pipeline = plan.pipelines[index]
        self._count = self._pipeline.micro_batches
        shapes = plan_shapes(plan, index)
        self._steps = [_replica_steps(shape, cost) for shape in shapes]
        pairs = list(itertools.pairwise(shapes))
        self._from_before: list[_Arrivals | None] = [None, *(_arrivals(a, b, cost) for a, b in pairs)]
        self._from_behind: list[_Arrivals | None] = [*(_arrivals(b, a, cost) for a, b in pairs), None]
        self._orders = [
            list(one_forward_one_backward(stages=len(shapes), stage=number, micro_batches=self._count))
            for number in range(len(shapes))
        ]
        self._done: dict[tuple[Kind, int, int], list[float]] = {}
        self.free = [[0.0] * len(shape.replicas) for shape in shapes]
        """When each replica of each stage is free: at the end, when it ended its last backward."""
        self.events: list[Event] = []

    def run(self) -> None:
        """Let every stage do its next step as soon as its input was made, until all steps are done."""
        next_step = [0] * len(self._orders)
        progress = True
        while progress:
            progress = False
            for stage, order in enumerate(self._orders):
                while next_step[stage] < len(order) and self._try(stage, *order[next_step[stage]]):
                    next_step[stage] += 1
                    progress = True
        assert all(done == len(order) for done, order in zip(next_step, self._orders, strict=True))

    def _try(self, stage: int, kind: Kind, micro_batch: int) -> bool:
        """Do one step of a stage if its input is on the way; replicas wait for their own rows only."""
        forward = kind == "forward"
        arrivals = (self._from_before if forward else self._from_behind)[stage]
        sent: list[float] = []
        if arrivals is not None:
            neighbour = stage - 1 if forward else stage + 1
            key = (kind, neighbour, micro_batch)
            if key not in self._done:
                return False
            sent = self._done[key]
        ends = []
        for replica, step in enumerate(self._steps[stage]):
            start = self.free[stage][replica]
            if arrivals is not None:
                made = max(sent[sender] for sender in arrivals.senders[replica])
                arrived = made + arrivals.seconds[replica]
                self._note(stage, replica, "receive", micro_batch, made, arrived)
                begun = max(start, arrived)
                start = begun + arrivals.gather[replica]
                if start > begun:
                    self._note(stage, replica, "receive", micro_batch, begun, start)
            end = start + (step.forward if forward else step.backward)
            self._note(stage, replica, kind, micro_batch, start, end)
            self.free[stage][replica] = end
            ends.append(end)
        self._done[kind, stage, micro_batch] = ends
        return True

    def _note(self, stage: int, replica: int, kind: Kind, micro_batch: int, start: float, end: float) -> None:
        if self._keep:
            for device in self._pipeline.stages[stage].tp_group(replica):
                self.events.append(Event(device, self._index, stage, kind, micro_batch, start, end))


def _replica_steps(shape: StageShape, cost: StageCost) -> list[StepSeconds]:
    scatter = StepSeconds(0.0, cost.scatter_seconds(shape))
    return [
        cost.replica_step(
            device_type=replica.type,
            tp=shape.tp,
            rows=replica.rows,
            layers=shape.layers,
            embedding=shape.embedding,
            head=shape.head,
            recompute=shape.recompute,
            sequence_parallel=shape.sequence_parallel,
        ).plus(scatter)
        for replica in shape.replicas
    ]


def _arrivals(sender: StageShape, receiver: StageShape, cost: StageCost) -> _Arrivals:
    senders: list[list[int]] = [[] for _ in receiver.replicas]
    for overlap in row_overlaps(
        [replica.rows for replica in sender.replicas], [replica.rows for replica in receiver.replicas]
    ):
        senders[overlap.receiver].append(overlap.sender)
    exchange = cost.exchange(sender, receiver)
    return _Arrivals(senders, exchange.arrival, exchange.gather)
