"""Refining a plan: never worse, better where there is room, devices stay where they are, and it stays cheap."""

import random

import pytest

from planner.cost.price import check_memory, with_prediction
from planner.local_batches import with_samples
from planner.plan import Plan
from planner.profile.analytic import AnalyticProfile
from planner.request import PlanRequest
from planner.search import find_plan
from planner.search.paper.budget import EvaluationBudget
from planner.search.paper.refine_plan import refine_plan
from tests.planner.exact.jobs import random_plans
from tests.planner.paper.paper_jobs import CLUSTERS, make_request, seconds_of


def refined(plan: Plan, request: PlanRequest, evaluations: int = 1500) -> tuple[Plan, EvaluationBudget]:
    budget = EvaluationBudget(evaluations)
    profile = AnalyticProfile(request.model, request.cluster.device_types)
    return refine_plan(plan, request, profile=profile, budget=budget), budget


@pytest.mark.parametrize("nodes", CLUSTERS)
def test_any_plan_is_refined_to_one_that_is_no_worse_on_the_same_devices(
    nodes: list[dict[str, int]],
) -> None:
    better = 0
    for seed in range(6):
        request = make_request(seed, nodes, batch=12, layers=4)
        for plan in random_plans(request, random.Random(seed), sizes=(1, 2, 4), tries=4):
            priced = with_prediction(plan)
            found, budget = refined(priced, request)
            check_memory(found)
            Plan.model_validate(found.model_dump())
            assert seconds_of(found) <= seconds_of(priced)
            assert budget.used <= 1500
            better += seconds_of(found) < seconds_of(priced) * (1 - 1e-6)
            for old, new in zip(priced.pipelines, found.pipelines, strict=True):
                assert [set(stage.devices) for stage in old.stages] == [
                    set(stage.devices) for stage in new.stages
                ]
    assert better > 0


def test_samples_of_a_badly_shared_plan_are_shared_out_again() -> None:
    request = make_request(7, [{"fast": 1}, {"slow": 1}], batch=40, layers=2)
    plan = next(
        plan
        for plan in random_plans(request, random.Random(1), sizes=(1,), tries=200)
        if len(plan.pipelines) == 2 and all(len(pipeline.stages) == 1 for pipeline in plan.pipelines)
    )
    worst = plan.model_copy(
        update={
            "pipelines": tuple(
                with_samples(pipeline, count) for pipeline, count in zip(plan.pipelines, (1, 39), strict=True)
            )
        }
    )
    priced = with_prediction(Plan.model_validate(worst.model_dump()))
    found, _ = refined(priced, request)
    assert seconds_of(found) < seconds_of(priced)
    assert sorted(pipeline.samples for pipeline in found.pipelines) != [1, 39]


def test_no_budget_means_the_same_plan() -> None:
    request = make_request(3, CLUSTERS[0], batch=8)
    plan = find_plan(request)
    same, budget = refined(plan, request, evaluations=1)
    assert same.pipelines == plan.pipelines and budget.used <= 1


@pytest.mark.parametrize("seed", range(2))
def test_the_default_plan_is_no_worse_than_the_solver_alone_and_says_what_was_refined(seed: int) -> None:
    request = make_request(seed, CLUSTERS[0], batch=16, layers=4)
    plan = find_plan(request)
    assert plan.search is not None and plan.predicted is not None
    assert {"cache", "skipping", "order", "dp", "exact"} <= set(plan.search["parts"])
    assert plan.search["evaluations"] > 0 and plan.search["refined"] in (True, False)
    if plan.predicted.lower_bound_seconds is not None:
        assert plan.predicted.lower_bound_seconds <= seconds_of(plan) * (1 + 1e-9)
