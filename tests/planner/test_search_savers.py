"""The enumeration with recomputation and ZeRO, against every plan named device by device."""

from __future__ import annotations

import pytest

from planner.cost.price import check_memory, price_plan
from planner.errors import UserError
from planner.plan import Dtypes, Plan, PlanEmulation
from planner.profile.analytic import AnalyticProfile
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search import enumerate_hpp
from planner.search.device_groups import DeviceGrid
from planner.search.savers import Rungs, Savers, settings
from tests.planner.brute_force import best_price
from tests.planner.exact.random_profile import RandomProfile
from tests.planner.test_search import random_request


def enumerated(
    request: PlanRequest,
    *,
    recompute: Rungs = "all-or-none",
    profile: ProfileTable | None = None,
    plain: bool = False,
) -> Plan | None:
    """The plan, checked and priced; None if nothing fits."""
    profile = profile or AnalyticProfile(request.model, request.cluster.device_types)
    try:
        plan = enumerate_hpp.plan(
            request,
            profile=profile,
            progress=lambda message: None,
            recompute="none" if plain else recompute,
            zero_stages=(0,) if plain else request.zero_stages,
        )
    except UserError as error:
        assert "does not fit" in str(error)
        return None
    check_memory(plan)
    return plan


def tight(seed: int, nodes: list[dict[str, int]], *, scale: float, layers: int = 2) -> PlanRequest:
    """A job whose memory figures are multiplied, of a model whose activations weigh as much as its state."""
    request = random_request(seed, nodes, batch=3, layers=layers)
    return request.model_copy(
        update={
            "model": request.model.model_copy(
                update={"hidden_size": 32, "ffn_hidden_size": 128, "vocab_size": 50}
            ),
            "emulation": PlanEmulation(memory_scale=scale),
            "dtypes": Dtypes(param="fp32"),
            "recompute": True,
            "zero_stages": (0, 1, 2),
        }
    )


@pytest.mark.parametrize("seed", range(3))
def test_pipelines_that_leave_too_few_devices_are_not_searched_and_nothing_is_lost(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ZeRO counts on several pipelines, none of them holds the devices of the others."""
    request = tight(seed, [{"fast": 2}, {"slow": 2}], scale=20.0)
    profile = AnalyticProfile(request.model, request.cluster.device_types)

    def runs() -> list[tuple[Plan | None, int]]:
        found = []
        for pipelines in (1, 2, 3, 4):
            savers = Savers("all-or-none", 1, "all", pipelines)
            run = enumerate_hpp.Enumeration(
                request, profile=profile, progress=lambda message: None, savers=savers
            )
            best = run.best()
            found.append((best[0] if best else None, run.counts.pipelines_searched))
        return found

    quick = runs()
    # One device each are all that four pipelines of four devices can have.
    searched = [count for _, count in quick]
    assert searched == sorted(searched, reverse=True) and searched[-1] < searched[0]
    monkeypatch.setattr(DeviceGrid, "units_of", lambda grid, composition: 0)
    monkeypatch.setattr(DeviceGrid, "units", 4)
    assert [plan for plan, _ in runs()] == [plan for plan, _ in quick]
    assert any(plan is not None for plan, _ in quick)


CASES = [
    (seed, nodes, scale)
    for nodes in ([{"fast": 2}], [{"fast": 1, "slow": 1}], [{"fast": 1}, {"slow": 1}])
    for seed, scale in ((0, 55.0), (0, 80.0), (2, 45.0), (2, 60.0), (4, 100.0))
]
CASES += [(seed, [{"fast": 2}, {"slow": 1}], scale) for seed, scale in ((0, 80.0), (2, 60.0))]


@pytest.mark.parametrize(("seed", "nodes", "scale"), CASES)
def test_it_finds_the_best_of_all_plans(seed: int, nodes: list[dict[str, int]], scale: float) -> None:
    request = tight(seed, nodes, scale=scale)
    best = best_price(request, micro_batch_sizes=[1, 2, 3], savers=True)
    plan = enumerated(request)
    if plan is None:
        assert best == float("inf")
        return
    assert best * (1 - 1e-9) <= price_plan(plan).iteration_seconds <= best * 1.01


def test_the_cases_above_need_what_they_test() -> None:
    """Some jobs fit only so, and some plans recompute or shard."""
    used: set[object] = set()
    saved = 0
    for seed, nodes, scale in CASES:
        request = tight(seed, nodes, scale=scale)
        plan = enumerated(request)
        if plan is not None:
            saved += enumerated(request, plain=True) is None
            used |= {"recompute" for p in plan.pipelines for s in p.stages if s.recompute}
            used |= {plan.zero_stage}
    assert saved and "recompute" in used and used & {1, 2}


@pytest.mark.parametrize("seed", range(3))
def test_more_rungs_are_never_slower(seed: int) -> None:
    request = tight(seed, [{"fast": 2}], scale=60.0, layers=3)
    profile = RandomProfile(seed, request.model)
    found = [
        enumerated(request, recompute=which, profile=profile) for which in ("none", "all-or-none", "rungs")
    ]
    seconds = [
        price_plan(plan, profile=profile).iteration_seconds if plan else float("inf") for plan in found
    ]
    assert seconds[2] <= seconds[1] * (1 + 1e-9) and seconds[1] <= seconds[0] * (1 + 1e-9)


def test_settings_count_on_pipelines_only_where_they_share() -> None:
    found = settings(recompute="rungs", zero_stages=(0, 1), zero_scope="all", most_pipelines=3)
    assert [(one.zero_stage, one.pipelines, one.ways(2)) for one in found] == [
        (0, 1, 1.0),
        (1, 1, 2.0),
        (1, 2, 3.0),
        (1, 3, 4.0),
    ]
    inside = settings(recompute="none", zero_stages=(2,), zero_scope="pipeline", most_pipelines=3)
    assert inside == [Savers(zero_stage=2, zero_scope="pipeline")]
