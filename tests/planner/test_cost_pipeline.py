"""Eq. 1, Eq. 5, Eq. 6, links and exchange against numbers worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster import Link, Links, from_short_form
from planner.cost.exchange import Replica, receive_seconds, row_overlaps
from planner.cost.gradient import block_seconds, schedule_calls
from planner.cost.links import all_reduce_seconds, slowest_link
from planner.cost.pipeline import pipeline_seconds, stage_end_seconds
from planner.cost.price import price_plan, replica_seconds, transfer_seconds
from planner.cost.stages import StageCost, stage_shape
from planner.parameters import model_parameters
from planner.plan import Plan
from planner.profile.table import StepSeconds
from tests.plans import make_model, make_plan

steps = st.lists(st.builds(StepSeconds, st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=6)


def test_equation_1_and_5_by_hand() -> None:
    stages = [StepSeconds(1, 2), StepSeconds(2, 3), StepSeconds(1, 1)]
    assert pipeline_seconds(stages, micro_batches=4) == 10 + 5 * 3
    # Forwards 4, pace 15, then the backwards from the last stage to the one in question.
    assert stage_end_seconds(stages, micro_batches=4) == [25, 23, 20]


@given(steps, st.integers(1, 50))
def test_the_first_stage_ends_last_at_equation_1(stages: list[StepSeconds], micro_batches: int) -> None:
    ends = stage_end_seconds(stages, micro_batches=micro_batches)
    assert ends == sorted(ends, reverse=True)
    assert ends[0] == pytest.approx(pipeline_seconds(stages, micro_batches=micro_batches))


def test_an_all_reduce_is_equation_6_on_a_link_without_latency() -> None:
    link = Link(bandwidth=100.0, latency=0.0)
    assert all_reduce_seconds(link, members=4, message_bytes=800) == pytest.approx(2 * 800 * 3 / (4 * 100))
    assert all_reduce_seconds(link, members=1, message_bytes=800) == 0
    late = Link(bandwidth=100.0, latency=0.5)
    assert all_reduce_seconds(late, members=4, message_bytes=800) == pytest.approx(12 + 6 * 0.5)


def test_the_slowest_link_counts_nodes_and_overrides() -> None:
    slow = Link(bandwidth=1e3)
    links = Links(overrides={"A/B": slow})

    def found(*places: tuple[str, str]) -> Link:
        return slowest_link(links, places, message_bytes=1e6)

    assert found(("n0", "A"), ("n0", "A")) == links.intra_node
    assert found(("n0", "A"), ("n1", "A")) == links.inter_node
    assert found(("n0", "A"), ("n0", "B")) == links.intra_node
    assert found(("n0", "A"), ("n1", "B"), ("n0", "B")) == slow


def test_equation_6_is_the_case_of_one_block() -> None:
    """Two equal pipelines of one device: all blocks have the same two holders, one link without latency."""
    link = {"bandwidth": 1e9, "latency": 0.0}
    base = from_short_form("2x1:A100")
    cluster = base.model_validate(base.model_dump() | {"links": {"inter_node": link}})
    plan = make_plan(make_model(), [[(1, 1, 4)], [(1, 1, 4)]], cluster=cluster)
    numel = sum(parameter.numel for parameter in model_parameters(plan.model))
    expected = 2 * 4 * numel * (2 - 1) / (2 * 1e9)
    times = schedule_calls(plan, [3.0, 5.0], cost=StageCost.of_plan(plan))
    assert times[0].start_seconds == 5.0
    # Sections are padded to whole shards.
    assert times[-1].end_seconds == pytest.approx(5.0 + expected, rel=1e-6)
    priced = price_plan(plan).pipelines[0].stages[0]
    assert priced.all_reduce_seconds == pytest.approx(expected, rel=1e-3)


def test_a_collective_waits_for_its_holders_and_their_earlier_ones() -> None:
    plan = make_plan(make_model(), [[(1, 1, 2), (1, 1, 2)], [(1, 1, 4)]])
    ready = [1.0, 2.0, 1.5]
    free = list(ready)
    times = schedule_calls(plan, ready, cost=StageCost.of_plan(plan))
    assert len(times) > 2
    for time in times:
        holders = time.call.holders
        assert time.start_seconds == max(free[rank] for rank in holders)
        assert time.end_seconds == pytest.approx(time.start_seconds + block_seconds(plan, time.call))
        for rank in holders:
            free[rank] = time.end_seconds


@given(st.data())
def test_row_overlaps_cover_both_sides_in_order(data: st.DataObject) -> None:
    rows = st.lists(st.integers(1, 6), min_size=1, max_size=5)
    senders = data.draw(rows)
    receivers = data.draw(rows.filter(lambda r: sum(r) <= sum(senders)))
    receivers.append(sum(senders) - sum(receivers) or 0)
    receivers = [r for r in receivers if r]
    overlaps = row_overlaps(senders, receivers)
    for side, counts in (("sender", senders), ("receiver", receivers)):
        for index, count in enumerate(counts):
            assert sum(o.rows for o in overlaps if getattr(o, side) == index) == count
    assert [(o.sender, o.receiver) for o in overlaps] == sorted((o.sender, o.receiver) for o in overlaps)
    assert all(o.rows > 0 for o in overlaps)


def test_receiving_by_hand() -> None:
    """dp 2 sends 2 rows each to tp 2: each of the two ranks gets 4 rows, each sender gives 2 rows twice."""
    links = Links(intra_node=Link(bandwidth=10, latency=1), inter_node=Link(bandwidth=5, latency=2))
    near, far = Replica(0, "A", 2), Replica(1, "A", 2)
    both = Replica(0, "A", 4)

    def receive(senders: list[Replica], sender_tp: int, receivers: list[Replica], tp: int) -> list[float]:
        return receive_seconds(
            links, senders=senders, sender_tp=sender_tp, receivers=receivers, receiver_tp=tp, row_bytes=10
        )

    # From near 1 + 2, from far 2 + 4; the far sender is busy for 2 x 6.
    assert receive([near, far], 1, [both], 2) == [12]
    assert receive([near, far], 1, [both], 1) == [9]
    # The sender's two ranks share the copies.
    assert receive([both], 2, [near, far], 2) == [9, 9]


def test_stage_times_are_the_slowest_replica_s_plus_receiving() -> None:
    cluster = from_short_form("1x1:A100+1:RTX3090,1x2:A100")
    model = make_model()
    plan = make_plan(model, [[(1, 2, 2), (2, 1, 2)]], cluster=cluster, micro_batch_sizes=[4])
    stages = [
        plan.pipelines[0].stages[0].model_copy(update={"rows": (3, 1)}),
        plan.pipelines[0].stages[1],
    ]
    pipeline = plan.pipelines[0].model_copy(update={"stages": tuple(stages)})
    plan = Plan.model_validate(plan.model_dump() | {"pipelines": [pipeline.model_dump()]})
    steps = [replica_seconds(plan, pipeline=0, stage=0, replica=replica) for replica in range(2)]
    cost = StageCost.of_plan(plan)
    shapes = [stage_shape(stage, cluster) for stage in stages]
    row_bytes = 32 * 24 * 2
    gradients = max(cost.receive(shapes[1], shapes[0]))
    # Each of the two TP ranks sends to one of the replicas.
    assert gradients == pytest.approx(cluster.links.inter_node.seconds(3 * row_bytes))
    priced = price_plan(plan).pipelines[0].stages
    assert priced[0].forward_seconds == pytest.approx(max(step.forward for step in steps))
    assert priced[0].backward_seconds == pytest.approx(max(step.backward for step in steps) + gradients)
    assert priced[0].exchange_seconds == pytest.approx(gradients)


def test_tp_adds_two_all_reduces_a_layer_each_way() -> None:
    cluster = from_short_form("1x2:A100")
    model = make_model()
    plan = make_plan(model, [[(2, 1, 4)]], cluster=cluster, micro_batch_sizes=[1])
    free = cluster.model_validate(
        cluster.model_dump() | {"links": {"intra_node": {"bandwidth": 1e30, "latency": 0.0}}}
    )
    no_traffic = make_plan(model, [[(2, 1, 4)]], cluster=free, micro_batch_sizes=[1])
    with_links = replica_seconds(plan, pipeline=0, stage=0, replica=0)
    without = replica_seconds(no_traffic, pipeline=0, stage=0, replica=0)
    activations = all_reduce_seconds(cluster.links.intra_node, members=2, message_bytes=32 * 24 * 2)
    statistics = all_reduce_seconds(cluster.links.intra_node, members=2, message_bytes=32 * 4)
    assert with_links.forward - without.forward == pytest.approx(9 * activations + 3 * statistics)
    assert with_links.backward - without.backward == pytest.approx(9 * activations)


def test_a_transfer_takes_its_link() -> None:
    plan = make_plan(make_model(), [[(1, 1, 4)], [(1, 1, 4)]], cluster=from_short_form("2x1:A100"))
    seconds = transfer_seconds(plan, sender="node0/0", receiver="node1/0", message_bytes=12.5e9)
    assert seconds == pytest.approx(1.0, rel=1e-4)


def test_a_price_is_equation_5_plus_blocks_plus_optimizer() -> None:
    plan = make_plan(make_model(), [[(1, 1, 2), (1, 1, 2)], [(2, 1, 4)]], samples=[6, 5])
    priced = price_plan(plan)
    for pipeline, planned in zip(priced.pipelines, plan.pipelines, strict=True):
        steps = [StepSeconds(s.forward_seconds, s.backward_seconds) for s in pipeline.stages]
        ends = stage_end_seconds(steps, micro_batches=planned.micro_batches)
        for stage, end in zip(pipeline.stages, ends, strict=True):
            assert stage.end_seconds - stage.all_reduce_seconds == pytest.approx(end)
    ends = [pipeline.end_seconds for pipeline in priced.pipelines]
    assert priced.iteration_seconds == pytest.approx(max(ends) + priced.optimizer_seconds)
    assert priced.samples_per_second == pytest.approx(11 / priced.iteration_seconds)
