"""The collectives of every scheme, and the buffer that they read, for any plan."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings

from planner.cluster import from_short_form
from planner.cost.backward import backward_ends
from planner.cost.gradient import schedule_calls
from planner.cost.price import price_plan
from planner.cost.stages import StageCost
from planner.gradient_blocks import gradient_blocks
from planner.gradient_calls import gradient_layout, most_chunks, reduction_groups
from planner.model_spec import PRESETS
from planner.parameters import model_parameters
from planner.plan import Plan
from tests.gradient_plans import unlike_plans, variant
from tests.plans import make_model, make_plan

FIGURE_5 = make_plan(make_model(vocab_size=256), [[(1, 2, 4)], [(2, 1, 4)]])

TABLE_3 = make_plan(
    PRESETS["gpt3-13b"],
    [
        [(4, 1, 4), (4, 1, 4), (4, 1, 5), *[(2, 2, 5)] * 3, *[(1, 4, 6)] * 2],
        [(8, 1, 8), (8, 1, 9), (4, 2, 11), (4, 2, 12)],
    ],
    cluster=from_short_form("4x8:910B4,4x8:910B2"),
    micro_batch_sizes=(4, 8),
    samples=(344, 680),
)


def test_figure_5_device_wise_all_four_present_the_whole_model() -> None:
    layout = gradient_layout(variant(FIGURE_5, "device", overlap=False))
    (section,) = layout.sections
    whole = sum(parameter.numel for parameter in model_parameters(FIGURE_5.model))
    assert (section.holders, section.numel) == ((0, 1, 2, 3), whole)
    (call,) = layout.calls
    assert (call.start, call.stop, call.holders) == (0, whole, (0, 1, 2, 3))


def test_figure_5_tensor_wise_every_half_of_every_tensor_is_a_call() -> None:
    calls = gradient_layout(variant(FIGURE_5, "tensor", overlap=False)).calls
    cut = [parameter for parameter in model_parameters(FIGURE_5.model) if parameter.tp_dim is not None]
    whole = [parameter for parameter in model_parameters(FIGURE_5.model) if parameter.tp_dim is None]
    assert Counter(call.holders for call in calls) == {
        (0, 1, 2): len(cut),
        (0, 1, 3): len(cut),
        (0, 1, 2, 3): len(whole),
    }


def test_table_3_plan_has_as_many_calls_as_blocks_unless_they_are_cut_for_overlap() -> None:
    blocks = [block for block in gradient_blocks(TABLE_3) if len(block.holders) > 1]
    calls = gradient_layout(variant(TABLE_3, "block", overlap=False)).calls
    assert [(call.block, call.holders) for call in calls] == [(b.index, b.holders) for b in blocks]
    overlapped = variant(TABLE_3, "block", overlap=True)
    cut = Counter(call.block for call in gradient_layout(overlapped).calls)
    assert set(cut) == {block.index for block in blocks}
    for block in blocks:
        assert cut[block.index] <= most_chunks(overlapped, block)
    assert max(cut.values()) > 4


def test_chunks_pay_for_their_latency() -> None:
    """A block is cut into the square root of its time over its latency: here sqrt(T / 8 us)."""
    links = {"intra_node": {"bandwidth": 1e9, "latency": 2e-6}}
    cluster = from_short_form("1x3:910B2")
    cluster = cluster.model_validate(cluster.model_dump() | {"links": links})
    plan = make_plan(make_model(), [[(1, 3, 4)]], cluster=cluster)
    block = max(gradient_blocks(plan), key=lambda block: block.numel)
    seconds = 4 * (2e-6 + 4 * block.numel / 3 / 1e9)
    assert most_chunks(plan, block) == round((seconds / 8e-6) ** 0.5) > 1


@pytest.mark.parametrize("scheme", ["block", "tensor", "device"])
@pytest.mark.parametrize("overlap", [False, True])
@settings(max_examples=25, deadline=None)
@given(plan=unlike_plans())
def test_calls_sum_every_shared_element_once(scheme: str, overlap: bool, plan: Plan) -> None:
    plan = variant(plan, scheme, overlap)
    layout = gradient_layout(plan)
    assert [call.index for call in layout.calls] == list(range(len(layout.calls)))
    laid = [block for section in layout.sections for block in section.blocks]
    assert sorted(block.index for block in laid) == [block.index for block in gradient_blocks(plan)]
    for section in layout.sections:
        filled = sum(block.numel for block in section.blocks)
        assert filled <= section.numel < filled + len(section.holders)
        assert section.numel % len(section.holders) == 0
        held = {rank for block in section.blocks for rank in block.holders}
        assert held <= set(section.holders)
        assert scheme == "device" or all(block.holders == section.holders for block in section.blocks)
        ranges = sorted((call.start, call.stop) for call in layout.calls if call.section == section.index)
        if len(section.holders) == 1:
            assert not ranges
            continue
        assert all(left[1] == right[0] for left, right in pairwise(ranges))
        assert ranges[0][0] == 0
        # A tensor's call leaves out the section's rounding, the others send it along.
        assert ranges[-1][1] == (filled if scheme == "tensor" else section.numel)


@settings(max_examples=25, deadline=None)
@given(plan=unlike_plans())
def test_a_call_is_complete_with_the_lowest_region_it_reaches(plan: Plan) -> None:
    plan = variant(plan, "block", overlap=True)
    regions = {parameter.name: parameter.region.order for parameter in model_parameters(plan.model)}
    layout = gradient_layout(plan)
    sections = {section.index: section for section in layout.sections}
    for call in layout.calls:
        reached = []
        for block, start in sections[call.section].places():
            for atom in block.atoms:
                if start < call.stop and start + atom.numel > call.start:
                    reached.append(regions[atom.parameter])
                start += atom.numel
        assert min(reached) == call.region
        assert call.start % len(call.holders) == 0


@settings(max_examples=25, deadline=None)
@given(plan=unlike_plans())
def test_shards_of_a_section_are_equal_and_cover_it(plan: Plan) -> None:
    for section in gradient_layout(plan).sections:
        shards = [section.shard(rank) for rank in section.holders]
        assert shards[0][0] == 0 and shards[-1][1] == section.numel
        assert all(left[1] == right[0] for left, right in pairwise(shards))
        assert len({stop - start for start, stop in shards}) == 1


@pytest.mark.parametrize("scheme", ["block", "tensor", "device"])
def test_every_call_has_its_group(scheme: str) -> None:
    plan = variant(TABLE_3, scheme, overlap=True)
    groups = reduction_groups(plan)
    assert len(set(groups)) == len(groups)
    assert {call.holders for call in gradient_layout(plan).calls} <= set(groups)
    assert all(len(group) > 1 and list(group) == sorted(group) for group in groups)


def _exposed(plan: Plan) -> float:
    """Seconds from the last backward of all to the last collective's end."""
    stages = [stage for pipeline in _predicted(plan) for stage in pipeline]
    return max(end for end, _ in stages) - max(end - sync for end, sync in stages)


def _predicted(plan: Plan) -> list[list[tuple[float, float]]]:
    return [
        [(stage.end_seconds, stage.all_reduce_seconds) for stage in pipeline.stages]
        for pipeline in price_plan(plan).pipelines
    ]


def test_the_price_knows_schemes_and_overlap() -> None:
    block, tensor, device = (
        _exposed(variant(TABLE_3, s, overlap=False)) for s in ("block", "tensor", "device")
    )
    assert block < tensor < device
    assert _exposed(variant(TABLE_3, "block", overlap=True)) < 0.8 * block


def _slow_links(plan: Plan) -> Plan:
    """On links without latency every block is cut into its layers."""
    links = {"intra_node": {"bandwidth": 1e6, "latency": 0.0}}
    return Plan.model_validate(plan.model_dump() | {"cluster": plan.cluster.model_dump() | {"links": links}})


def test_an_overlapped_call_starts_when_backward_has_passed_its_layers_on_all_holders() -> None:
    plan = make_plan(make_model(layers=4), [[(1, 1, 4)], [(1, 1, 4)]])
    plan = variant(_slow_links(plan), "block", overlap=True)
    cost = StageCost.of_plan(plan)
    times = schedule_calls(plan, [5.0, 7.0], cost=cost)
    assert [time.call.region for time in times] == [4, 3, 2, 1, 0, 0]
    free = 0.0
    for time in times:
        left = 0.0
        if time.call.region:
            step = cost.replica_step(
                device_type="910B2", tp=1, rows=1, layers=time.call.region - 1, embedding=True
            )
            left = step.backward
        assert time.start_seconds == pytest.approx(max(7.0 - left, free))
        free = time.end_seconds


@settings(max_examples=25, deadline=None)
@given(plan=unlike_plans())
def test_no_call_waits_behind_one_that_can_only_start_later(plan: Plan) -> None:
    plan = variant(_slow_links(plan), "block", overlap=True)
    cost = StageCost.of_plan(plan)
    ends = backward_ends(plan, cost)
    times = schedule_calls(plan, [ends[p.pipeline][p.stage] for p in plan.ranks], cost=cost)
    starts = [time.start_seconds for time in times]
    assert starts == sorted(starts)
