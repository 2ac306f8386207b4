"""The stage search: groups of devices, layers in proportion, moves, the bounded depth-first search, shares."""

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.pipeline import pipeline_seconds, stage_end_seconds
from planner.cost.price import price_plan
from planner.profile.analytic import AnalyticProfile
from planner.profile.table import StepSeconds
from planner.request import PlanRequest
from planner.search.exact.pool import pools
from planner.search.paper.bottleneck import BottleneckSearch, starts
from planner.search.paper.budget import EvaluationBudget
from planner.search.paper.configuration import Configuration, Evaluator, Tuned, _proportional
from planner.search.paper.moves import bottleneck, moves
from planner.search.paper.shares import evaluation_shares
from planner.search.paper.stage_device_groups import stage_device_groups
from planner.search.paper.stage_figures import StageShop
from tests.planner.paper.paper_jobs import make_request, search


def evaluator_of(
    request: PlanRequest, groups: tuple[tuple[int, ...], ...], *, batch: int, evaluations: int = 10_000
) -> Evaluator:
    pool = pools(request.cluster, request.model)[0]
    profile = AnalyticProfile(request.model, request.cluster.device_types)
    shop = StageShop(request, pool, profile=profile, pipelines=1)
    return Evaluator(shop, groups, batch=batch, budget=EvaluationBudget(evaluations))


def evaluated(evaluator: Evaluator, configuration: Configuration) -> Tuned:
    tuned = evaluator.evaluate(configuration)
    assert tuned is not None
    return tuned


def ordered_compositions(counts: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    if not any(counts):
        yield ()
    for first in itertools.product(*(range(count + 1) for count in counts)):
        if any(first):
            left = tuple(a - b for a, b in zip(counts, first, strict=True))
            for rest in ordered_compositions(left):
                yield (first, *rest)


@pytest.mark.parametrize("counts", [(4,), (2, 2), (3, 1), (1, 1, 2)])
def test_every_ordered_cut_into_stages_comes_once(counts: tuple[int, ...]) -> None:
    powers = [1.0] * len(counts)
    found = stage_device_groups(counts, powers=powers, most=10_000, most_stages=sum(counts))
    assert len(found) == len(set(found))
    assert set(found) == set(ordered_compositions(counts))
    few = stage_device_groups(counts, powers=powers, most=10_000, most_stages=2)
    assert set(few) == {stages for stages in found if len(stages) <= 2}


def test_of_too_many_cuts_the_regular_ones_are_searched() -> None:
    found = stage_device_groups((8, 8), powers=[2.0, 1.0], most=40, most_stages=10)
    assert 20 < len(found) <= 40
    for stages in found:
        assert tuple(map(sum, zip(*stages, strict=True))) == (8, 8)
        assert len(stages) <= 10
    assert ((8, 8),) in found and ((4, 4), (4, 4)) in found
    # Twice the slow ones balance the fast ones, in either order.
    assert ((2, 0),) * 4 + ((0, 4),) * 2 in found and ((0, 4),) * 2 + ((2, 0),) * 4 in found


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(0, 60),
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=8),
    data=st.data(),
)
def test_layers_in_proportion_are_whole_and_near_their_share(
    total: int, weights: list[float], data: st.DataObject
) -> None:
    fewest = [data.draw(st.integers(0, 1)) for _ in weights]
    if sum(fewest) > total:
        return
    found = _proportional(total, weights, fewest)
    assert sum(found) == total
    assert all(count >= least for count, least in zip(found, fewest, strict=True))
    if not any(fewest):
        shares = [total * weight / sum(weights) for weight in weights]
        assert all(abs(count - share) < 1 + 1e-9 for count, share in zip(found, shares, strict=True))


def test_a_configuration_is_priced_by_equations_1_and_5() -> None:
    request = make_request(3, [{"fast": 4}], batch=8, layers=3)
    tuned = evaluated(evaluator_of(request, ((2,), (2,)), batch=8), Configuration(2, (1, 2), (2, 1)))
    steps = [StepSeconds(stage.forward, stage.backward) for stage in tuned.stages]
    ends = stage_end_seconds(steps, micro_batches=4)
    assert max(ends) == pytest.approx(pipeline_seconds(steps, micro_batches=4))
    expected = max(end + stage.after for end, stage in zip(ends, tuned.stages, strict=True))
    assert tuned.seconds == pytest.approx(expected)
    assert tuned.throughput == pytest.approx(8 / expected)


def test_the_estimate_is_near_the_price_of_the_plan() -> None:
    request = make_request(3, [{"fast": 4}], batch=8, layers=3, zero_stages=(0,))
    plan = search(request)
    profile = AnalyticProfile(request.model, request.cluster.device_types)
    (pipeline, *others) = plan.pipelines
    if others:
        pytest.skip("this job is best run as several pipelines")
    groups = tuple((len(stage.devices),) for stage in pipeline.stages)
    configuration = Configuration(
        pipeline.micro_batch_size,
        tuple(stage.tp for stage in pipeline.stages),
        tuple(stage.layer_count for stage in pipeline.stages),
    )
    tuned = evaluated(evaluator_of(request, groups, batch=pipeline.samples), configuration)
    assert tuned.seconds == pytest.approx(price_plan(plan, profile=profile).iteration_seconds, rel=0.1)


def test_the_bottleneck_is_the_fullest_stage_until_all_fit_then_the_slowest() -> None:
    request = make_request(3, [{"fast": 4}], batch=8, layers=3)
    roomy = evaluated(evaluator_of(request, ((2,), (2,)), batch=8), Configuration(2, (1, 1), (3, 0)))
    if roomy.fits:
        assert bottleneck(roomy) == max(range(2), key=lambda i: roomy.stages[i].seconds)
    tight_memory = request.model_copy(
        update={"emulation": request.emulation.model_copy(update={"memory_scale": 200.0})}
    )
    tight = evaluated(evaluator_of(tight_memory, ((2,), (2,)), batch=8), Configuration(2, (1, 1), (0, 3)))
    assert not tight.fits and tight.overflow > 0
    assert bottleneck(tight) == max(range(2), key=lambda i: tight.stages[i].fullness)


def test_moves_keep_devices_and_layers_and_change_one_thing() -> None:
    request = make_request(3, [{"fast": 4}, {"slow": 4}], batch=16, layers=6)
    groups = ((4, 0), (0, 2), (0, 2))
    evaluator = evaluator_of(request, groups, batch=16)
    tuned = evaluated(evaluator, Configuration(4, (2, 1, 1), (2, 2, 2)))
    found = moves(tuned, evaluator)
    assert len(found) == len(set(found)) and tuned.configuration not in found
    stage = bottleneck(tuned)
    kinds = set()
    for other in found:
        assert sum(other.layers) == 6 and other.layers[1] >= 1
        if other.micro_batch_size != 4:
            assert other.micro_batch_size in (2, 8)
            kinds.add("size")
        elif other.degrees != (2, 1, 1):
            changed = [i for i in range(3) if other.degrees[i] != (2, 1, 1)[i]]
            assert stage in changed or groups[stage] in [groups[i] for i in changed]
            kinds.add("degrees")
        else:
            assert other.layers[stage] < 2
            kinds.add("layers")
        evaluated(evaluator, other)
    assert kinds == {"size", "degrees", "layers"}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 500), evaluations=st.integers(1, 60))
def test_the_search_never_ends_worse_than_it_starts_and_keeps_its_evaluations(
    seed: int, evaluations: int
) -> None:
    request = make_request(seed, [{"fast": 4}, {"slow": 2}], batch=12, layers=6)
    groups = ((2, 0), (2, 1), (0, 1))
    evaluator = evaluator_of(request, groups, batch=12, evaluations=10_000)
    budget = evaluator._budget
    start = starts(evaluator)
    found = BottleneckSearch(evaluator, evaluations=evaluations).run(start)
    assert budget.used <= evaluations
    if found is None:
        return
    first = evaluated(evaluator_of(request, groups, batch=12), start[0])
    assert found.rank <= first.rank


def test_the_search_finds_the_best_of_all_configurations_of_a_small_pipeline() -> None:
    near = 0
    for seed in range(12):
        request = make_request(seed, [{"fast": 2}, {"slow": 2}], batch=16, layers=4)
        groups = ((2, 0), (0, 2))
        evaluator = evaluator_of(request, groups, batch=16)
        best = math.inf
        for size, degrees, first in itertools.product(
            (1, 2, 4, 8, 16), itertools.product((1, 2), repeat=2), range(5)
        ):
            tuned = evaluator.evaluate(Configuration(size, degrees, (first, 4 - first)))
            if tuned is not None and tuned.fits:
                best = min(best, tuned.seconds)
        found = BottleneckSearch(evaluator, evaluations=60).run(starts(evaluator))
        assert (found is not None and found.fits) == (best < math.inf)
        if found is not None and found.fits:
            assert found.seconds <= best * 1.15
            near += found.seconds <= best * 1.0001
    assert near >= 6


def test_shares_follow_the_variance_rule_by_hand() -> None:
    request = make_request(3, [{"fast": 4}, {"slow": 4}], batch=8)
    pool = pools(request.cluster, request.model)[0]
    groups = [((2, 2), (2, 2)), ((4, 0), (0, 4)), ((1, 0), (3, 4)), ((4, 4),)]
    shares = evaluation_shares(groups, pool, precision="fp32", each=30)
    # Stages alike get most; a group without peers gets the average.
    assert shares[0] > shares[1] and shares[0] > shares[2]
    assert shares[3] == 30
    assert sum(shares[:3]) == pytest.approx(90, abs=3)
    # Both variances at twice the mean or more: divided by 4; at half of it or less: multiplied by 4.
    assert max(shares[:3]) <= 16 * min(shares[:3])
