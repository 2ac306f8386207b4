"""The replay of 1F1B against schedules worked out by hand, and against Eq. 1."""

import itertools
import math
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cluster import Cluster, from_short_form
from planner.cost.price import price_plan
from planner.plan import Plan
from planner.profile.table import OperatorGroups, ProfileTable, StepSeconds, single_operators
from planner.simulate import one_forward_one_backward, simulate
from tests.plans import make_model, make_plan

MODEL = make_model()


class FixedLayers:
    """A layer takes a fixed time, all else nothing."""

    def __init__(self, forward: float, backward: float) -> None:
        self._layer = StepSeconds(forward, backward)

    def groups(self, device_type: str) -> OperatorGroups:
        return single_operators(MODEL)

    def includes_tp_collectives(self, device_type: str) -> bool:
        return True

    def covers(self, **case: Any) -> bool:
        return True

    def operator_seconds(self, *, operator: str, **case: Any) -> StepSeconds:
        return self._layer if operator == "mlp_up" else StepSeconds(0.0, 0.0)

    def all_reduce_seconds(self, **case: Any) -> None:
        return None

    def least_all_reduce_rate(self) -> float:
        return math.inf

    def streaming_seconds(self, *, device_type: str, moved_bytes: float) -> float:
        return 0.0

    def sources(self) -> tuple[()]:
        return ()


def fixed(forward: float, backward: float) -> ProfileTable:
    return FixedLayers(forward, backward)


def free_links(nodes: int, latency: float = 0.0) -> Cluster:
    link = {"bandwidth": 1e30, "latency": latency}
    base = from_short_form(f"{nodes}x1:A100")
    return Cluster.model_validate(base.model_dump() | {"links": {"intra_node": link, "inter_node": link}})


def test_the_order_of_1f1b() -> None:
    def order(stage: int) -> str:
        steps = one_forward_one_backward(stages=3, stage=stage, micro_batches=4)
        return " ".join(kind[0] + str(index) for kind, index in steps)

    assert order(0) == "f0 f1 f2 b0 f3 b1 b2 b3"
    assert order(1) == "f0 f1 b0 f2 b1 f3 b2 b3"
    assert order(2) == "f0 b0 f1 b1 f2 b2 f3 b3"


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (4, 4), (4, 9)])
def test_uniform_stages_take_the_textbook_time(stages: int, micro_batches: int) -> None:
    """(S - 1 + n) x (f + b): Eq. 1 is exact here."""
    model = MODEL.model_copy(update={"layers": stages})
    plan = make_plan(model, [[(1, 1, 1)] * stages], cluster=free_links(stages), samples=[micro_batches])
    profile = fixed(1.0, 2.0)
    timeline = simulate(plan, profile=profile)
    assert timeline.iteration_seconds == pytest.approx((stages - 1 + micro_batches) * 3.0)
    assert price_plan(plan, profile=profile).iteration_seconds == pytest.approx(
        timeline.iteration_seconds, rel=1e-3
    )


def test_a_light_last_stage_hides_in_the_schedule() -> None:
    """Stages of 3 and 1 layers, 2 micro-batches, by hand: f0 f1 b0 b1 on the first, each 3 or 6 seconds."""
    plan = make_plan(MODEL, [[(1, 1, 3), (1, 1, 1)]], cluster=free_links(2), samples=[2])
    timeline = simulate(plan, profile=fixed(1.0, 2.0))
    found = [
        (event.device, event.kind, event.micro_batch, event.start_seconds, event.end_seconds)
        for event in timeline.events
        if event.kind in ("forward", "backward")
    ]
    assert found == [
        ("node0/0", "forward", 0, 0, 3),
        ("node0/0", "forward", 1, 3, 6),
        ("node1/0", "forward", 0, 3, 4),
        ("node1/0", "backward", 0, 4, 6),
        ("node0/0", "backward", 0, 6, 12),
        ("node1/0", "forward", 1, 6, 7),
        ("node1/0", "backward", 1, 7, 9),
        ("node0/0", "backward", 1, 12, 18),
    ]
    assert timeline.pipeline_end_seconds[0] == 18
    assert timeline.busy_seconds("node0/0") == 18


def test_transfers_delay_the_receiver_by_the_link() -> None:
    plan = make_plan(MODEL, [[(1, 1, 2), (1, 1, 2)]], cluster=free_links(2, latency=0.5), samples=[1])
    timeline = simulate(plan, profile=fixed(1.0, 2.0))
    assert timeline.pipeline_end_seconds[0] == pytest.approx(2 + 0.5 + 2 + 4 + 0.5 + 4)
    receives = [event for event in timeline.events if event.kind == "receive"]
    assert [event.end_seconds - event.start_seconds for event in receives] == [0.5, 0.5]


degrees = st.lists(
    st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.integers(1, 3)), min_size=1, max_size=4
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    pipelines = draw(st.lists(degrees, min_size=1, max_size=2))
    layers = max(sum(stage[2] for stage in stages) for stages in pipelines)
    pipelines = [
        [*stages[:-1], (stages[-1][0], stages[-1][1], stages[-1][2] + layers - sum(s[2] for s in stages))]
        for stages in pipelines
    ]
    model = MODEL.model_copy(update={"layers": layers})
    samples = [draw(st.integers(1, 12)) for _ in pipelines]
    return make_plan(model, pipelines, samples=samples)


@given(plans())
@settings(deadline=None, max_examples=60)
def test_the_replay_is_bounded_by_the_price_and_keeps_its_rules(plan: Plan) -> None:
    timeline = simulate(plan)
    assert timeline.iteration_seconds <= price_plan(plan).iteration_seconds * (1 + 1e-9)
    assert simulate(plan, events=False).iteration_seconds == timeline.iteration_seconds
    steps: dict[str, list[Any]] = defaultdict(list)
    for event in timeline.events:
        assert 0 <= event.start_seconds <= event.end_seconds <= timeline.iteration_seconds
        if event.kind in ("forward", "backward", "optimizer"):
            steps[event.device].append(event)
    assert set(steps) == {place.device for place in plan.ranks}
    for place in plan.ranks:
        pipeline = plan.pipelines[place.pipeline]
        events = steps[place.device]
        # One step at a time, each micro-batch once each way, and never more in flight than 1F1B allows.
        for before, after in itertools.pairwise(events):
            assert before.end_seconds <= after.start_seconds + 1e-12
        kinds = [event.kind for event in events]
        assert kinds.count("forward") == kinds.count("backward") == pipeline.micro_batches
        assert kinds[-1] == "optimizer"
        in_flight = list(itertools.accumulate({"forward": 1, "backward": -1}.get(kind, 0) for kind in kinds))
        assert max(in_flight) == min(len(pipeline.stages) - place.stage, pipeline.micro_batches)
