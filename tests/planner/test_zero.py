"""ZeRO: who shares what, bytes and seconds by hand, and prices worked out again from the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from planner.cluster import Cluster, Device, from_short_form
from planner.collectives import choose_reduction, flat_seconds, half_seconds, reduction_seconds
from planner.cost.plan_memory import PlanMemory, check_memory
from planner.cost.price import price_plan
from planner.cost.stage_shape import stage_shape
from planner.cost.stages import StageCost
from planner.cost.zero import search_zero_ways, stage_ways
from planner.errors import UserError
from planner.items import items_of
from planner.local_batches import with_equal_batches
from planner.parameters import Parameter, model_parameters
from planner.plan import Plan
from planner.simulate import simulate
from tests.planner.numbered_profile import NumberedProfile
from tests.plans import make_model, make_plan

MODEL = make_model()
# Two replicas of the whole model; two stages, the first with TP 2.
UNEVEN = [[(1, 2, 4)], [(2, 1, 2), (1, 1, 2)]]


def one_link(short: str, bandwidth: float, latency: float = 0.0) -> Cluster:
    link = {"bandwidth": bandwidth, "latency": latency}
    base = from_short_form(short)
    return Cluster.model_validate(base.model_dump() | {"links": {"intra_node": link, "inter_node": link}})


def changed(plan: Plan, **fields: Any) -> Plan:
    return Plan.model_validate(plan.model_dump() | fields)


def region_values(wanted: Any) -> int:
    return sum(parameter.numel for parameter in model_parameters(MODEL) if wanted(parameter))


def is_cut(parameter: Parameter) -> bool:
    return parameter.tp_dim is not None


def layer_values(*, cut: bool) -> int:
    """Of one layer: those that TP cuts, or those that every TP rank holds."""
    return region_values(lambda p: p.region.layer == 0 and is_cut(p) is cut)


def test_holders_share_their_blocks_evenly() -> None:
    """Pipeline 0's layers 0-1 have three holders a piece (four of what TP 2 replicates), layers 2-3 three.

    The token table has four: both replicas, the first stage's rank of the piece and the last stage.
    """
    plan = make_plan(MODEL, UNEVEN, zero_stage=1)
    cut, copied = layer_values(cut=True), layer_values(cut=False)
    table = region_values(lambda p: p.name == "embedding.tokens.weight")
    positions = region_values(lambda p: p.name == "embedding.positions.weight")
    norm = region_values(lambda p: p.region.kind == "final_norm")
    whole = table + positions + 4 * (cut + copied) + norm
    kept = table / 4 + positions / 4 + 2 * (cut / 3 + copied / 4) + 2 * (cut + copied) / 3 + norm / 3
    row = 24  # Values of one token; rank 0 holds one more of the 257 tokens.
    first = (129 * row) + positions + 2 * (cut / 2 + copied)
    kept_first = 129 * row / 4 + positions / 4 + 2 * (cut / 2 / 3 + copied / 4)
    last = table + 2 * (cut + copied) + norm
    kept_last = table / 4 + 2 * (cut + copied) / 3 + norm / 3
    ways = stage_ways(plan)
    assert list(ways[0]) == pytest.approx([whole / kept])
    assert list(ways[1]) == pytest.approx([first / kept_first, last / kept_last])
    assert stage_ways(changed(plan, zero_scope="pipeline")) == ((2.0,), (1.0, 1.0))
    assert stage_ways(changed(plan, zero_stage=0)) == ((1.0,), (1.0, 1.0))


def test_a_search_counts_no_more_ways_than_the_plan_has() -> None:
    for scope, expected in (("all", [[3.0], [2.0, 2.0]]), ("pipeline", [[2.0], [1.0, 1.0]])):
        plan = make_plan(MODEL, UNEVEN, zero_stage=1, zero_scope=scope)
        for pipeline, found, wanted in zip(plan.pipelines, stage_ways(plan), expected, strict=True):
            for stage, ways, least in zip(pipeline.stages, found, wanted, strict=True):
                assert least == search_zero_ways(zero_stage=1, zero_scope=scope, pipelines=2, dp=stage.dp)
                assert ways >= least * (1 - 1e-12)
    assert search_zero_ways(zero_stage=0, zero_scope="all", pipelines=9, dp=9) == 1.0


def test_bytes_that_zero_gives_back() -> None:
    """bf16: moments and master copy, 12 bytes a value, are shared; ZeRO-2 adds gradients, 4 bytes a value,
    but for one region's at a time."""
    zero = {stage: make_plan(MODEL, UNEVEN, zero_stage=stage) for stage in (0, 1, 2)}
    bytes_ = {
        stage: {
            (p, s): memory.model.tensor_bytes(memory.load(pipeline=p, stage=s, replica=0))
            for p, s in ((0, 0), (1, 0), (1, 1))
        }
        for stage, plan in zero.items()
        for memory in [PlanMemory(plan)]
    }
    values = {(0, 0): region_values(lambda p: True)}
    table = region_values(lambda p: p.name == "embedding.tokens.weight")
    values[1, 1] = table + 2 * (layer_values(cut=True) + layer_values(cut=False)) + 2 * 24
    ways = stage_ways(zero[1])
    for place in ((0, 0), (1, 1)):
        shared = 12 * values[place] * (1 - 1 / ways[place[0]][place[1]])
        assert bytes_[0][place] - bytes_[1][place] == pytest.approx(shared, abs=2)
    # Only pipeline 0 has replicas. Its largest region: a layer.
    layer = layer_values(cut=True) + layer_values(cut=False)
    assert bytes_[1][0, 0] - bytes_[2][0, 0] == pytest.approx(4 * (values[0, 0] / 2 - layer), abs=2)
    assert bytes_[1][1, 0] == bytes_[2][1, 0] and bytes_[1][1, 1] == bytes_[2][1, 1]


def test_what_fits_only_with_zero_is_refused_without() -> None:
    plan = make_plan(MODEL, [[(1, 2, 4)]], zero_stage=1)
    memory = PlanMemory(plan)
    load = memory.load(pipeline=0, stage=0, replica=0)
    limit = plan.cluster.type_of("node0/0").memory_bytes
    needed = [memory.model.tensor_bytes(dataclasses.replace(load, zero_stage=stage)) for stage in (0, 1)]
    assert needed[1] < needed[0]
    scale = {"emulation": {"memory_scale": 0.97 * (limit - 2 * 1024**3) / needed[1]}}
    check_memory(changed(plan, **scale))
    with pytest.raises(UserError, match=r"pipelines\[0\]\.stages\[0\] needs"):
        check_memory(changed(plan, zero_stage=0, **scale))


def test_zero_1_by_hand() -> None:
    """Two equal pipelines of one device: half a ring with 4 bytes a value, half the update, half with 2."""
    plan = make_plan(MODEL, [[(1, 1, 4)], [(1, 1, 4)]], cluster=one_link("2x1:A100", 1e9), zero_stage=1)
    profile = NumberedProfile(MODEL)
    priced, plain = (
        price_plan(plan, profile=profile),
        price_plan(changed(plan, zero_stage=0), profile=profile),
    )
    values = region_values(lambda p: True)
    stage = priced.pipelines[0].stages[0]
    # Sections are padded to whole shards.
    assert stage.all_reduce_seconds == pytest.approx(4 * values / 2 / 1e9, rel=1e-3)
    assert priced.gather_seconds == pytest.approx(2 * values / 2 / 1e9, rel=1e-3)
    assert priced.optimizer_seconds == pytest.approx(plain.optimizer_seconds / 2)
    assert plain.gather_seconds == 0
    assert plain.pipelines[0].stages[0].all_reduce_seconds == pytest.approx(2 * stage.all_reduce_seconds)
    end = max(pipeline.end_seconds for pipeline in priced.pipelines)
    assert priced.iteration_seconds == pytest.approx(end + priced.optimizer_seconds + priced.gather_seconds)


def test_within_a_pipeline_shards_are_reduced_between_them() -> None:
    """Two pipelines of two replicas: half inside, an all-reduce of halves between, and half back inside."""
    plan = make_plan(
        MODEL,
        [[(1, 2, 4)], [(1, 2, 4)]],
        cluster=one_link("4x1:A100", 1e9),
        zero_stage=1,
        zero_scope="pipeline",
    )
    priced = price_plan(plan, profile=NumberedProfile(MODEL))
    values = region_values(lambda p: True)
    inside, between = 4 * values / 2 / 1e9, 2 * (4 * values / 2) / 2 / 1e9
    assert priced.pipelines[0].stages[0].all_reduce_seconds == pytest.approx(inside + between, rel=1e-3)
    assert priced.gather_seconds == pytest.approx(2 * values / 2 / 1e9, rel=1e-3)
    # Scope `all` has shards of a quarter, and no sum between pipelines.
    everyone = price_plan(changed(plan, zero_scope="all"), profile=NumberedProfile(MODEL))
    assert everyone.pipelines[0].stages[0].all_reduce_seconds == pytest.approx(
        4 * values * 3 / 4 / 1e9, rel=1e-3
    )
    assert everyone.gather_seconds == pytest.approx(2 * values * 3 / 4 / 1e9, rel=1e-3)


def test_zero_2_by_hand() -> None:
    """Gradients are scattered over two replicas with every micro-batch, six regions of which pay latency; what
    is left at the end is the other pipeline's half of each half."""
    plan = make_plan(
        MODEL,
        [[(1, 2, 4)], [(1, 2, 4)]],
        cluster=one_link("4x1:A100", 1e9, latency=1e-6),
        zero_stage=2,
    )
    priced = price_plan(plan, profile=NumberedProfile(MODEL))
    first = price_plan(changed(plan, zero_stage=1), profile=NumberedProfile(MODEL))
    values = region_values(lambda p: True)
    scatter = 6 * 1e-6 + 4 * values / 2 / 1e9
    stage, before = priced.pipelines[0].stages[0], first.pipelines[0].stages[0]
    assert stage.backward_seconds - before.backward_seconds == pytest.approx(scatter)
    assert stage.forward_seconds == before.forward_seconds
    # Two calls: the tied table, and all the rest.
    assert stage.all_reduce_seconds == pytest.approx(2 * 1e-6 + 4 * (values / 2) / 2 / 1e9, rel=1e-3)
    assert priced.gather_seconds == pytest.approx(first.gather_seconds)
    assert priced.optimizer_seconds == pytest.approx(first.optimizer_seconds)
    assert items_of(plan, profile=NumberedProfile(MODEL)).pipelines[0].stages[0].scatter == pytest.approx(
        scatter
    )


def test_copies_of_tp_ranks_are_not_replicas() -> None:
    """Without replicas ZeRO-2 is ZeRO-1: what TP copies is still summed at the end."""
    plan = make_plan(MODEL, [[(2, 1, 4)]], zero_stage=1)
    assert price_plan(plan).pipelines[0].stages[0].all_reduce_seconds > 0
    assert price_plan(changed(plan, zero_stage=2)) == price_plan(plan)


def test_a_stage_without_replicas_scatters_nothing() -> None:
    plan = make_plan(MODEL, [[(1, 1, 2), (1, 2, 2)]], zero_stage=2)
    cost = StageCost.of_plan(plan)
    scatters = [
        cost.scatter_seconds(stage_shape(stage, plan.cluster, zero_stage=2))
        for stage in plan.pipelines[0].stages
    ]
    assert scatters[0] == 0 < scatters[1]


def random_zero_plans() -> list[Plan]:
    shapes: list[Any] = [
        UNEVEN,
        [[(1, 2, 4)]],
        [[(2, 2, 1), (1, 4, 3)], [(4, 1, 4)], [(1, 1, 2), (2, 1, 2)]],
    ]
    recompute = {"softmax": 1, "scores": 1, "activation": 1}
    plans = []
    for shape in shapes:
        for stage in (0, 1, 2):
            for scope in ("all", "pipeline"):
                plan = make_plan(MODEL, shape, zero_stage=stage, zero_scope=scope)
                data = plan.model_dump()
                for pipeline in data["pipelines"]:
                    for number, place in enumerate(pipeline["stages"]):
                        if number == 0:
                            place["recompute"] = recompute
                plans.append(Plan.model_validate(data))
    return plans


@pytest.mark.parametrize("plan", random_zero_plans(), ids=lambda p: f"{p.zero_stage}-{p.zero_scope}")
def test_every_view_of_a_plan_has_the_same_price(plan: Plan) -> None:
    """Items add up to the price; the replay, which knows that light stages hide, is at most that."""
    priced, items = price_plan(plan), items_of(plan)
    assert items.iteration == pytest.approx(priced.iteration_seconds)
    assert simulate(plan).iteration_seconds <= priced.iteration_seconds * (1 + 1e-9)
    for found, pipeline in zip(items.pipelines, priced.pipelines, strict=True):
        for stage, told in zip(found.stages, pipeline.stages, strict=True):
            assert stage.recompute == told.recompute_seconds
            assert stage.backward + stage.receive_backward == pytest.approx(told.backward_seconds)
            assert stage.memory_bytes == told.device_bytes
        assert found.stages[0].recompute > 0
    events = [event for event in simulate(plan).events if event.kind == "gradient_sync"]
    assert max((event.end_seconds for event in events), default=0.0) <= priced.iteration_seconds


def test_a_single_stage_is_replayed_to_the_second() -> None:
    plan = make_plan(MODEL, [[(1, 2, 4)]], samples=[8], zero_stage=2)
    assert simulate(plan).iteration_seconds == pytest.approx(price_plan(plan).iteration_seconds)


def test_zero_keeps_its_price_through_a_file() -> None:
    plan = make_plan(MODEL, UNEVEN, zero_stage=1)
    again = Plan.model_validate_json(plan.model_dump_json())
    assert price_plan(again) == price_plan(plan)
    assert with_equal_batches(plan).zero_stage == 1


def test_padding_to_others_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match=r"zero_stage = 1 shares gradients .* use gradient_sync 'block'"):
        make_plan(MODEL, UNEVEN, zero_stage=1, gradient_sync="device")


@pytest.mark.parametrize("short", ["1x4:A100", "2x4:A100", "1x2:A100,1x3:A100", "4x1:A100"])
def test_two_halves_are_an_all_reduce_but_over_uneven_nodes_a_ring(short: str) -> None:
    cluster = from_short_form(short)
    links, members = cluster.links, cluster.devices
    for numel in (64, 10**7, 10**7 + 4):
        chosen = choose_reduction(links, members, numel=numel, element_bytes=4)

        def ring(group: Sequence[Device], size: float) -> float:
            return flat_seconds(links, group, message_bytes=size)

        whole = reduction_seconds(chosen, links, members, message_bytes=4 * numel, ring=ring)
        assert whole == pytest.approx(chosen.seconds)
        half = half_seconds(chosen, members, message_bytes=4 * numel, ring=ring)
        # Leaders have no shards of their own nodes' alone.
        expected = ring(members, 4.0 * numel) if chosen.algorithm == "leader" else whole
        assert half == pytest.approx(expected / 2)
