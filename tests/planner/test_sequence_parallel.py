"""Sequence parallel in the planner: what it moves, what it keeps, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from planner.baselines.both_ways import better_of_both
from planner.baselines.forms import pure
from planner.baselines.memory_savers import Zero
from planner.baselines.splits import Splitter
from planner.baselines.stage_figures import StageFigures
from planner.cluster import Cluster, from_short_form
from planner.compare import compare
from planner.cost.memory import StageLoad
from planner.cost.models import CostModels
from planner.cost.plan_memory import PlanMemory, check_memory
from planner.cost.price import iteration_seconds, pipeline_stages, price_plan, replica_seconds
from planner.cost.stages import StageCost
from planner.errors import UserError, parse
from planner.model_spec import PRESETS, ModelSpec
from planner.operators import layer_operators
from planner.plan import Plan, StagePlan
from planner.profile.analytic import AnalyticProfile
from planner.request import PlanRequest
from planner.search import find_plan
from planner.search.control import SearchControl, SearchOptions
from planner.search.diagnose import fits
from planner.search.exact.pool import every_pool
from planner.search.paper.stage_figures import StageKey, StageShop
from planner.search.peers import PEERS
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


def request_of(devices: str, *, batch: int, model: ModelSpec = MODEL, **fields: Any) -> PlanRequest:
    """Links inside nodes so quick that TP pays."""
    cluster = from_short_form(devices).model_dump()
    links = {"intra_node": {"bandwidth": 3e11, "latency": 2e-6}}
    return PlanRequest(
        model=model,
        cluster=Cluster.model_validate(cluster | {"links": links}),
        global_batch_size=batch,
        sequence_length=model.max_sequence_length,
        **fields,
    )


def found(request: PlanRequest, *without: str) -> Plan:
    return find_plan(request, control=SearchControl(options=SearchOptions(frozenset({"peers", *without}))))


def stages_of(plan: Plan) -> list[StagePlan]:
    return [stage for pipeline in plan.pipelines for stage in pipeline.stages]


def test_the_search_cuts_where_it_pays_and_the_bound_holds_for_it() -> None:
    request = request_of("1x8:A100", batch=16, model=PRESETS["gpt3-13b"])
    plain, cut = found(request, "sequence_parallel"), found(request)
    assert not any(stage.sequence_parallel for stage in stages_of(plain))
    assert any(stage.sequence_parallel for stage in stages_of(cut))
    assert iteration_seconds(cut) < iteration_seconds(plain)
    # Less is kept, so less is recomputed.
    assert sum(sum(s.recompute.values()) for s in stages_of(cut)) < sum(
        sum(s.recompute.values()) for s in stages_of(plain)
    )
    bounds = []
    for plan in (plain, cut):
        assert plan.predicted is not None and plan.predicted.lower_bound_seconds is not None
        bounds.append(plan.predicted.lower_bound_seconds)
        assert bounds[-1] <= iteration_seconds(plan)
        assert price_plan(plan).iteration_seconds == iteration_seconds(plan)
        check_memory(plan)
    # Of more plans.
    assert bounds[1] <= bounds[0]
    assert "sequence_parallel" in cut.search["parts"]  # type: ignore[index]


def test_every_strategy_cuts_where_it_pays_unless_that_is_forbidden() -> None:
    request = request_of("1x8:A100", batch=8, model=PRESETS["gpt3-13b"], bound=False)
    forbidding = SearchOptions(frozenset({"sequence_parallel"}))
    rows = compare(request, strategies=["eth", *PEERS]).rows
    plain_rows = compare(request, strategies=["eth", *PEERS], options=forbidding).rows
    for row, plain in zip(rows, plain_rows, strict=True):
        assert row.plan is not None and plain.plan is not None, row.reason or plain.reason
        assert any(stage.sequence_parallel for stage in stages_of(row.plan)), row.strategy
        assert not any(stage.sequence_parallel for stage in stages_of(plain.plan)), row.strategy
        assert iteration_seconds(row.plan) < iteration_seconds(plain.plan) * 0.995
        assert price_plan(row.plan).iteration_seconds == iteration_seconds(row.plan)
        check_memory(row.plan)
        # None is quicker than the first, which is that of eth.
        assert rows[0].plan is not None
        assert iteration_seconds(rows[0].plan) <= iteration_seconds(row.plan) * (1 + 1e-9)


def test_of_a_peer_s_plans_with_and_without_cuts_the_quicker_is_taken() -> None:
    request = request_of("1x8:A100", batch=8, model=PRESETS["gpt3-13b"], bound=False, strategy="metis")
    plans = {
        cuts: find_plan(request.model_copy(update={"sequence_parallel": cuts})) for cuts in (True, False)
    }
    assert iteration_seconds(plans[True]) < iteration_seconds(plans[False])
    fails: set[bool] = set()

    def searched(one: PlanRequest) -> Plan:
        if one.sequence_parallel in fails:
            raise UserError(f"nothing fits, cuts {one.sequence_parallel}")
        return plans[one.sequence_parallel]

    assert better_of_both(request, searched) is plans[True]
    plans = {True: plans[False], False: plans[True]}
    assert better_of_both(request, searched) is plans[False]
    assert better_of_both(request.model_copy(update={"sequence_parallel": False}), searched) is plans[False]
    for failing in (True, False):
        fails = {failing}
        assert better_of_both(request, searched) is plans[not failing]
    fails = {True, False}
    with pytest.raises(UserError, match="nothing fits, cuts True"):
        better_of_both(request, searched)


@pytest.mark.parametrize("bandwidth", [2e10, 4e10])
def test_a_peer_s_stage_is_cut_where_its_micro_batch_is_quicker_with_what_it_recomputes(
    bandwidth: float,
) -> None:
    """Of two stages with 20 layers each, at memories from too little to ample; worked out way by way."""
    request = request_of("1x8:A100", batch=8, model=PRESETS["gpt3-13b"])
    link = {"bandwidth": bandwidth, "latency": 2e-6}
    cluster = request.cluster.model_dump() | {"links": {"intra_node": link, "inter_node": link}}
    request = request.model_copy(update={"cluster": Cluster.model_validate(cluster)})
    profile = AnalyticProfile(request.model, request.cluster.device_types)
    chain, zero = (pure("A100", tp=4, dp=1, micro_batch_size=4),) * 2, Zero(1)
    devices = [tuple(f"node0/{index}" for index in range(start, start + 4)) for start in (0, 4)]
    seen = set()
    for gib in (24, 26, 27, 28, 29, 30, 31, 32, 34, 36, 40, 80):
        one = with_memory(request, gib * 2**30)
        models = CostModels.of_request(one, profile=profile)
        splitter = Splitter(StageFigures(models, by_position=True))
        found = splitter.split(chain, devices, 8, [20, 20], zero)
        best = [
            min(
                (
                    (step + replay.seconds[0], cut)
                    for cut in (False, True)
                    for step, load in [_stage(models, stage, cut)]
                    if (replay := models.recompute.fewest([("A100", load)])) is not None
                ),
                default=None,
            )
            for stage in range(2)
        ]
        if None in best:
            assert found is None
            continue
        assert found is not None
        assert found.cuts == tuple(one[1] for one in best if one)
        # Receiving comes on top, the same either way.
        received = found.fill_seconds - sum(one[0] for one in best if one)
        assert 0 < received < 0.02 * found.fill_seconds
        seen.add(found.cuts)
    assert len(seen) > 1


def _stage(models: CostModels, stage: int, cut: bool) -> tuple[float, StageLoad]:
    """Seconds of 20 layers on four devices without recomputation, and what they hold."""
    ends: dict[str, Any] = {"embedding": stage == 0, "head": stage == 1}
    step = models.cost.replica_step(
        device_type="A100", tp=4, rows=4, layers=20, sequence_parallel=cut, **ends
    )
    load = StageLoad(4, 4, 20, in_flight=2 - stage, zero_stage=1, sequence_parallel=cut, **ends)
    return step.total, load


@pytest.mark.parametrize("strategy", PEERS)
def test_a_peer_plans_what_fits_only_so(strategy: str) -> None:
    cut = request_of("1x4:A100", batch=4, recompute=False, strategy=strategy)
    whole = cut.model_copy(update={"sequence_parallel": False})
    memory_bytes = (least_memory(cut) + least_memory(whole)) // 2
    with pytest.raises(UserError, match="does not fit"):
        find_plan(with_memory(whole, memory_bytes))
    plan = find_plan(with_memory(cut, memory_bytes))
    assert any(stage.sequence_parallel for stage in stages_of(plan))
    check_memory(plan)


def test_the_paper_s_moves_cut_a_stage_that_fits_only_so() -> None:
    """Of two ways to run a stage the figures are those of the better: quicker, or the one that fits."""
    request = request_of("1x4:A100", batch=8, model=PRESETS["gpt3-13b"], recompute=False)
    pool = every_pool(request.cluster, request.model)
    profile = AnalyticProfile(request.model, request.cluster.device_types)
    shops = [
        StageShop(request, pool, profile=profile, pipelines=1, by_position=by_position)
        for by_position in (False, True)
    ]
    fitting = []
    for layers in range(1, 40):
        for in_flight in (1, 2, 4):
            key = StageKey((4,), 4, 8, layers, True, False, in_flight)
            plain, cut = (shop.figures(key) for shop in shops)
            assert plain is not None and cut is not None
            assert max(cut.fullness, 1) <= max(plain.fullness, 1)
            if plain.fullness <= 1:
                assert cut.seconds <= plain.seconds
            elif cut.fullness <= 1:
                assert cut.by_position
                fitting.append(key)
    assert fitting


def least_memory(request: PlanRequest) -> int:
    """Bytes a device with which one pipeline fits, to a ten-thousandth."""
    low, high = 2**24, 2**36
    while high > low * 1.0001:
        middle = int((low * high) ** 0.5)
        low, high = (low, middle) if fits(with_memory(request, middle)) else (middle, high)
    return high


def with_memory(request: PlanRequest, memory_bytes: int) -> PlanRequest:
    types = {
        name: type_.model_copy(update={"memory_bytes": memory_bytes})
        for name, type_ in request.cluster.device_types.items()
    }
    cluster = request.cluster.model_copy(update={"device_types": types})
    return request.model_copy(update={"cluster": cluster})


@pytest.mark.parametrize(
    ("devices", "fields"),
    [("1x4:A100", {"recompute": False}), ("1x4:A100,1x4:V100", {"recompute": False, "zero_stages": (0,)})],
)
def test_a_model_that_fits_only_so_is_planned_so(devices: str, fields: dict[str, Any]) -> None:
    cut = request_of(devices, batch=4, **fields)
    whole = cut.model_copy(update={"sequence_parallel": False})
    least, most = least_memory(cut), least_memory(whole)
    assert least < most * 0.999
    memory_bytes = (least + most) // 2
    with pytest.raises(UserError, match=r"it fits with sequence parallel \(leave out"):
        find_plan(with_memory(whole, memory_bytes))
    plans = [found(with_memory(cut, memory_bytes), *without) for without in ([], ["exact"])]
    for plan in plans:
        assert any(stage.sequence_parallel for stage in stages_of(plan))
        check_memory(plan)
        assert price_plan(plan).iteration_seconds == iteration_seconds(plan)
    plan = plans[0]
    assert plan.predicted is not None and plan.predicted.lower_bound_seconds is not None
    assert plan.predicted.lower_bound_seconds <= iteration_seconds(plan)
    assert price_plan(plan).iteration_seconds == iteration_seconds(plan)
