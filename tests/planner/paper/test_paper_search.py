"""The paper's search: right plans with every part on or off, the same every time, within its budget."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cluster import resolve_cluster
from planner.errors import UserError
from planner.model_spec import resolve_model
from planner.plan import Plan
from planner.request import PlanRequest
from planner.search import find_plan
from planner.search.control import SearchControl, SearchOptions
from tests.planner.brute_force import best_price
from tests.planner.paper.paper_jobs import (
    CLUSTERS,
    SWITCHES,
    check_plan_is_right,
    make_request,
    search,
    seconds_of,
)

UNLIMITED = 10**9
# Enough for a part of what a complete search of these jobs evaluates.
FEW = 1500


def plan_or_none(request: PlanRequest, **options: Any) -> Plan | None:
    try:
        return search(request, **options)
    except UserError as error:
        assert "does not fit" in str(error)
        return None


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    nodes=st.sampled_from(CLUSTERS),
    batch=st.sampled_from([1, 3, 8, 12]),
    without=st.sets(st.sampled_from(SWITCHES)),
    fields=st.sampled_from([{}, {"equal_batches": True}, {"recompute": False}, {"zero_stages": (2, 0)}]),
)
def test_plans_are_right_whatever_is_switched_off(
    seed: int, nodes: list[dict[str, int]], batch: int, without: set[str], fields: dict[str, Any]
) -> None:
    request = make_request(seed, nodes, batch=batch, **fields)
    plan = plan_or_none(request, without=without, evaluations=FEW)
    if plan is None:
        return
    check_plan_is_right(plan, request)
    assert plan.search is not None
    assert set(plan.search["parts"]) == set(SWITCHES) - without
    if request.equal_batches:
        samples = [pipeline.samples for pipeline in plan.pipelines]
        assert max(samples) - min(samples) <= 1


@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), nodes=st.sampled_from(CLUSTERS[:4]), batch=st.sampled_from([4, 9]))
def test_cache_and_order_do_not_change_what_a_complete_search_finds(
    seed: int, nodes: list[dict[str, int]], batch: int
) -> None:
    request = make_request(seed, nodes, batch=batch, zero_stages=(0,))
    found = []
    for without in itertools.chain.from_iterable(
        itertools.combinations(["cache", "order"], count) for count in range(3)
    ):
        plan = plan_or_none(request, without={"skipping", "dp", *without}, evaluations=UNLIMITED)
        if plan is not None:
            assert plan.search is not None and plan.search["complete"]
            assert plan.search["fraction_covered"] == 1
        found.append(None if plan is None else seconds_of(plan))
    assert found == [found[0]] * 4


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    nodes=st.sampled_from([[{"fast": 1}, {"slow": 2}], [{"fast": 2}, {"slow": 1}], [{"fast": 3}]]),
    batch=st.sampled_from([3, 6]),
)
def test_small_plans_are_near_the_best_of_all_plans(
    seed: int, nodes: list[dict[str, int]], batch: int
) -> None:
    request = make_request(seed, nodes, batch=batch, layers=2, recompute=False, zero_stages=(0,))
    plan = plan_or_none(request, evaluations=UNLIMITED)
    best = best_price(request, micro_batch_sizes=(1, 2, 4))
    if plan is not None:
        # It may use micro-batches that the oracle does not; its stage search is local and its pipelines are
        # tuned before they know their samples.
        assert seconds_of(plan) <= best * 1.15


@pytest.mark.parametrize("without", [(), ("cache",), ("order", "dp"), ("skipping",)])
@pytest.mark.parametrize("evaluations", [60, 500, 3000])
def test_the_budget_is_kept(evaluations: int, without: tuple[str, ...]) -> None:
    request = make_request(1, [{"fast": 4}, {"slow": 4}], batch=64, layers=6)
    try:
        plan = search(request, evaluations=evaluations, without=without)
    except UserError as error:
        assert evaluations == 60 and f"--evaluations = {evaluations} are too few" in str(error)
        return
    assert plan.search is not None
    assert plan.search["evaluation_limit"] == evaluations
    assert plan.search["evaluations"] <= evaluations
    if not plan.search["complete"]:
        # Something was left undone, so no more than what is kept for idle devices is left over.
        assert plan.search["evaluations"] >= evaluations * 0.7


def test_the_same_request_gives_the_same_plan() -> None:
    request = make_request(5, [{"fast": 3}, {"slow": 3}], batch=24, layers=5)
    first, second = (search(request, evaluations=4000) for _ in range(2))
    assert first.fingerprint() == second.fingerprint()
    assert first.search is not None and second.search is not None
    assert first.search | {"seconds": 0} == second.search | {"seconds": 0}


def test_naming_nodes_in_another_order_changes_nothing() -> None:
    nodes = [{"fast": 2}, {"slow": 2}, {"fast": 1}]
    plans = [
        search(make_request(9, order, batch=12, zero_stages=(0,)), evaluations=FEW)
        for order in itertools.permutations(nodes)
    ]
    assert len({round(seconds_of(plan), 12) for plan in plans}) == 1


def test_a_large_cluster_is_planned_in_larger_units_with_all_devices_at_hand() -> None:
    request = PlanRequest(
        model=resolve_model("gpt3-2.6b"),
        cluster=resolve_cluster("6x8:910B2,5x8:910B4"),
        global_batch_size=256,
        sequence_length=2048,
    )
    plan = search(request, evaluations=8000)
    check_plan_is_right(plan, request)
    assert plan.search is not None and plan.search["unit"] > 1
    assert 0 < plan.search["fraction_covered"] < 1e-3
    assert len(plan.idle_devices) < 8


def test_skipped_groups_and_the_dynamic_program_show_in_the_record() -> None:
    request = make_request(2, [{"fast": 3}, {"slow": 2}], batch=32, layers=4, zero_stages=(0,))
    plain = search(request, without=SWITCHES).search
    full = search(request, without=["dp"], alpha=1.0).search
    combined = search(request, without=["skipping"]).search
    assert plain is not None and full is not None and combined is not None
    assert plain["device_groups_seen"] == plain["device_groups_evaluated"] == plain["device_groups_total"]
    assert plain["cache_hits"] == plain["device_groups_skipped"] == plain["arrangements"] == 0
    assert full["device_groups_skipped"] > 0
    assert combined["arrangements"] > 0 and combined["device_groups_covered"] > 0
    assert combined["cache_hits"] > 0
    assert full["pipelines_searched"] < plain["pipelines_searched"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"without": ["cach", "dp"]},
            "--without = 'cach' is not a part of the search; switch off some of cache, skipping, order, dp",
        ),
        ({"without": [], "alpha": 0.0}, "--alpha = 0.0 must be more than 0; the paper's range is 0.5 to 4"),
        ({"without": [], "alpha": float("nan")}, "--alpha = nan must be more than 0"),
        ({"without": [], "evaluations": 0}, "--evaluations = 0 must be from 1 to 1000000000"),
        ({"without": [], "time_budget": -1.0}, "--time-budget = -1.0 must be more than 0 seconds"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        SearchOptions.named(**options)
    assert str(caught.value).startswith(message)


def test_names_may_be_repeated_or_separated_by_commas() -> None:
    options = SearchOptions.named(["cache, dp", "exact"])
    assert options.without == {"cache", "dp", "exact"}
    assert options.on("order") and not options.on("dp")


def test_too_few_evaluations_for_any_plan_say_so() -> None:
    with pytest.raises(UserError, match=r"^--evaluations = 3 are too few to find a plan of model m"):
        search(make_request(1, CLUSTERS[0], batch=8), evaluations=3)


def test_a_model_that_does_not_fit_says_what_would_help() -> None:
    request = make_request(1, CLUSTERS[0], batch=8)
    tight = request.model_copy(
        update={"emulation": request.emulation.model_copy(update={"memory_scale": 1e4})}
    )
    with pytest.raises(UserError, match="model m does not fit"):
        search(tight)


@pytest.mark.parametrize("options", [{"without": frozenset({"cache"})}, {"alpha": 2.0}, {"evaluations": 9}])
def test_the_parts_belong_to_our_strategy(options: dict[str, Any]) -> None:
    request = make_request(1, CLUSTERS[0], batch=8, strategy="uniform")
    with pytest.raises(UserError, match="strategy = 'uniform' has no parts to choose"):
        find_plan(request, control=SearchControl(SearchOptions(**options)))
