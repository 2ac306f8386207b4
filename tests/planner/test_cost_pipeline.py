"""Eq. 1, Eq. 5, Eq. 6, links and exchange against numbers worked out by hand."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster import Link, Links, from_short_form
from planner.cost.exchange import (
    WAYS,
    Exchange,
    Replica,
    Side,
    Way,
    choose_exchange,
    messages,
    receive_seconds,
    row_overlaps,
)
from planner.cost.gradient import block_seconds, schedule_calls
from planner.cost.links import all_reduce_seconds, slowest_link
from planner.cost.pipeline import pipeline_seconds, stage_end_seconds
from planner.cost.price import price_plan, replica_seconds, transfer_seconds
from planner.cost.stage_shape import stage_shape
from planner.cost.stages import StageCost
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


LINKS = Links(intra_node=Link(bandwidth=10, latency=1), inter_node=Link(bandwidth=5, latency=2))


def exchange(
    senders: list[Replica], sender_tp: int, receivers: list[Replica], tp: int, ways: Sequence[Way] = WAYS
) -> Exchange:
    sides = Side(sender_tp, tuple(senders)), Side(tp, tuple(receivers))
    return choose_exchange(LINKS, senders=sides[0], receivers=sides[1], row_bytes=10, ways=ways)


def test_receiving_by_hand() -> None:
    near, far = Replica(0, "A", 2), Replica(1, "A", 2)
    both = Replica(0, "A", 4)
    # A rank is alone: whole rows. From near 1 + 2, from far 2 + 4.
    assert exchange([near, far], 1, [both], 1) == Exchange("whole", (9,), (0,))
    # Of two ranks each takes two rows: one from near, the other from far, which so sends once; whole rows would keep
    # far busy for 2 x 6. Then half of an all-reduce of 40 bytes: one step of 1 + 2.
    assert exchange([near, far], 1, [both], 2) == Exchange("sliced", (6,), (3,))
    # A slice is one row. The sender's ranks share them: each sends one inside (2) and one outside (4). Gathering
    # takes 1 + 1.
    assert exchange([both], 2, [near, far], 2) == Exchange("sliced", (6, 6), (2, 2))
    # Inside a node the links between the stages are no slower than those that gather: 2 x (1 + 2) one after the
    # other from a single rank, against 2 x (1 + 1) and 1 + 1.
    assert exchange([near], 1, [near], 2) == Exchange("whole", (6,), (0,))
    # A system that knows no slices: from near twice 1 + 2, from far twice 2 + 4.
    assert exchange([near, far], 1, [both], 2, ["whole"]) == Exchange("whole", (12,), (0,))
    # The sender's ranks at once: 1 + 2.
    assert exchange([near], 2, [near], 2) == Exchange("whole", (3,), (0,))
    assert receive_seconds(
        LINKS, senders=[both], sender_tp=2, receivers=[near, far], receiver_tp=2, row_bytes=10
    ) == [8, 8]


sides = st.tuples(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=4))


@given(sides, sides, st.integers(1, 3), st.sampled_from(["whole", "sliced"]))
def test_every_rank_is_sent_what_its_way_says(
    first: tuple[int, list[int]], second: tuple[int, list[int]], nodes: int, way: Way
) -> None:
    """Whole rows are sent to every rank, slices once over all ranks of a replica; nothing twice to a rank."""
    (sender_tp, rows), (tp, other_rows) = first, second
    total = sum(rows) * sum(other_rows)
    senders = [Replica(i % nodes, "A", n * sum(other_rows)) for i, n in enumerate(rows)]
    receivers = [Replica(i % 2, "A", n * sum(rows)) for i, n in enumerate(other_rows)]
    got: dict[tuple[int, int], list[int]] = {}
    sent: dict[tuple[int, int], int] = {}
    held = _element_ranges(senders, tp)
    sides = Side(sender_tp, tuple(senders)), Side(tp, tuple(receivers))
    for message in messages(way, senders=sides[0], receivers=sides[1]):
        first_held, last_held = held[message.sender[0]]
        assert first_held <= message.start < message.stop <= last_held
        got.setdefault(message.receiver, []).extend(range(message.start, message.stop))
        sent[message.sender] = sent.get(message.sender, 0) + message.stop - message.start
    for replica, (start, stop) in enumerate(_element_ranges(receivers, tp)):
        ranks = [got[replica, rank] for rank in range(tp)]
        if way == "whole":
            assert all(sorted(elements) == list(range(start, stop)) for elements in ranks)
        else:
            assert len({len(elements) for elements in ranks}) == 1
            assert [one for elements in ranks for one in elements] == list(range(start, stop))
    assert sum(sent.values()) == total * tp * (tp if way == "whole" else 1)


def _element_ranges(replicas: list[Replica], parts: int) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(replica.rows * parts for replica in replicas))
    return list(zip([0, *ends[:-1]], ends, strict=True))


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
