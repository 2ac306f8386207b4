"""Sequence parallel in the planner: what it moves, what it keeps, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost.plan_memory import PlanMemory
from planner.cost.price import pipeline_stages, price_plan, replica_seconds
from planner.cost.stages import StageCost
from planner.errors import UserError, parse
from planner.operators import layer_operators
from planner.plan import Plan
from tests.engine.law_plans import by_position, with_recompute
from tests.plans import Degrees, make_model, make_plan

MODEL = make_model(layers=6, hidden_size=768, max_sequence_length=512)


def plan_with(stages: list[Degrees], *, bandwidth: float = 1e9, **fields: Any) -> Plan:
    plan = make_plan(MODEL, [stages], micro_batch_sizes=[4], samples=[16], **fields)
    link = {"bandwidth": bandwidth, "latency": 0.0}
    cluster = plan.cluster.model_dump() | {"links": {"intra_node": link, "inter_node": link}}
    return Plan.model_validate(plan.model_dump() | {"cluster": cluster})


def step(plan: Plan, stage: int) -> tuple[float, float]:
    seconds = replica_seconds(plan, pipeline=0, stage=stage, replica=0)
    return seconds.forward, seconds.backward


@pytest.mark.parametrize("tp", [2, 4])
def test_collectives_move_as_much_forward_and_half_as_much_again_backward(tp: int) -> None:
    """Where links are so slow that nothing else counts, in units of one all-reduce of an activation."""
    plan = plan_with([(tp, 1, 2)] * 3, bandwidth=1e3)
    one = StageCost.of_plan(plan).activation_all_reduce("910B2", tp, 4)
    cut = by_position(plan)
    plain = [tuple(part / one for part in step(plan, stage)) for stage in range(3)]
    moved = [tuple(part / one for part in step(cut, stage)) for stage in range(3)]
    # Two layers: an all-reduce behind attention and behind the MLP; the embedding's; the head's.
    assert plain == [pytest.approx(pair, rel=1e-2) for pair in ((5, 4), (4, 4), (4, 5))]
    # First stage: scatter and last gather forward, a gather for the embedding backward. Each layer gathers
    # twice more in backward.
    assert moved == [pytest.approx(pair, rel=1e-2) for pair in ((5, 6.5), (4.5, 6.5), (4.5, 7.5))]


def test_norms_and_residuals_take_a_share_of_their_time() -> None:
    fast = plan_with([(4, 1, 6)], bandwidth=1e15)
    cost = StageCost.of_plan(fast)
    names = {"attention_norm", "attention_residual", "mlp_norm", "mlp_residual"}
    groups = [group for group in cost.profile.groups("910B2").layer if names.issuperset(group.operators)]
    assert {name for group in groups for name in group.operators} == names
    saved = 6 * 3 / 4 * sum(cost.group_step(group, "910B2", 4, 4).forward for group in groups)
    plain, cut = step(fast, 0)[0], step(by_position(fast), 0)[0]
    assert plain - cut == pytest.approx(saved, rel=1e-4)


def test_replays_gather_and_scatter_too() -> None:
    """Full recomputation repeats forward's collectives but the last scatter, which nothing reads."""
    plan = plan_with([(2, 1, 6)], bandwidth=1e3)
    one = StageCost.of_plan(plan).activation_all_reduce("910B2", 2, 4)
    again = with_recompute(by_position(plan), dict.fromkeys(layer_operators(MODEL), 6))
    more = (step(again, 0)[1] - step(by_position(plan), 0)[1]) / one
    assert more == pytest.approx(6 * 1.5, rel=1e-2)


def test_activations_shrink_with_the_degree() -> None:
    saved = []
    for tp in (2, 4):
        plan = plan_with([(tp, 1, 3), (tp, 1, 3)])
        loads = [PlanMemory(p).load(pipeline=0, stage=0, replica=0) for p in (plan, by_position(plan))]
        model = PlanMemory(plan).model
        saved.append(model.tensor_bytes(loads[0]) - model.tensor_bytes(loads[1]))
    hidden = 4 * 512 * 768 * 2
    # Four activations a layer, three layers, two micro-batches in flight; what is gathered again is live.
    for tp, bytes_ in zip((2, 4), saved, strict=True):
        kept = 24 * hidden * (1 - 1 / tp)
        assert kept - 3 * hidden < bytes_ < kept


def test_it_means_nothing_without_tp() -> None:
    plan = plan_with([(1, 2, 3), (1, 1, 3)])
    data = plan.model_dump()
    for stage in data["pipelines"][0]["stages"]:
        stage["sequence_parallel"] = True
    assert price_plan(Plan.model_validate(data)) == price_plan(plan)


def test_stage_times_and_replicas_agree() -> None:
    plan = by_position(plan_with([(2, 1, 3), (2, 1, 3)]))
    cost = StageCost.of_plan(plan)
    for number, stage in enumerate(pipeline_stages(plan, 0, cost)):
        forward, backward = step(plan, number)
        assert stage.step.forward == pytest.approx(forward + stage.receive.forward)
        assert stage.step.backward == pytest.approx(backward + stage.receive.backward)


def test_a_degree_that_does_not_divide_the_sequence_is_refused() -> None:
    plan = plan_with([(3, 1, 6)]).model_dump() | {"sequence_length": 511}
    plan["pipelines"][0]["stages"][0]["sequence_parallel"] = True
    with pytest.raises(
        UserError, match=r"cuts sequences by tp = 3, which does not divide sequence_length = 511"
    ):
        parse(Plan, plan, source="plan")
