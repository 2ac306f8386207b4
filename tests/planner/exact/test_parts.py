"""The programs of the exact solver, each against plain enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog

from planner.search.exact.bound_cells import Cells, Group, cut_together, least_values
from planner.search.exact.chains import make_chain
from planner.search.exact.columns import Box, first_periods, fullest_chain, least_periods
from planner.search.exact.envelope import undominated
from planner.search.exact.knapsack import Knapsack
from planner.search.exact.linear_program import linear_program
from planner.search.exact.priced_chains import PricedChains, join, least_seconds
from planner.search.exact.ranking import Ranking
from planner.search.exact.sequences import least_sum
from planner.search.exact.stage_table import StageTable, with_in_flight, without_dominated
from tests.planner.exact.naive import (
    after_first,
    counts_of,
    every_chain,
    random_table,
    stage_seconds,
)

SEEDS = range(12)
PRICES = np.array([0.7, 1.1])
PACES = np.array([1.0, 2.5, 6.0])


def naive_value(table: StageTable, stages: int, pace: float, limit: float) -> float:
    """The least sum of m T / P, the first stage's gradients at that rate, and the price of the devices."""
    values = [
        (sum(stage_seconds(table, specs)) + after_first(table, specs)) * table.micro_batch_size / pace
        + float(np.dot(PRICES, counts_of(table, specs)))
        for specs in every_chain(table, stages)
        if max(stage_seconds(table, specs)) <= limit
    ]
    return min(values, default=np.inf)


@pytest.mark.parametrize("seed", SEEDS)
def test_priced_chains_are_the_cheapest(seed: int) -> None:
    table = random_table(seed)
    priced = PricedChains(table, PRICES, paces=PACES, limits=PACES * 1.5)
    for cell, pace in enumerate(PACES):
        naive = [naive_value(table, stages, pace, pace * 1.5) for stages in (1, 2, 3)]
        assert priced.values[cell, : priced.known] == pytest.approx(naive[: priced.known])
        # Beyond the numbers of stages that are known the value is a bound, and none is better than the best.
        assert (priced.values[cell, priced.known :] <= np.array(naive[priced.known :]) + 1e-9).all()
        assert priced.values[cell].min() == pytest.approx(min(naive))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [0.9, 1.0, 1.3])
def test_values_below_what_is_enough_are_exact_and_others_no_lower(seed: int, share: float) -> None:
    table = random_table(seed)
    naive = np.array(
        [[naive_value(table, stages, pace, pace * 1.5) for stages in (1, 2, 3)] for pace in PACES]
    )
    enough = np.where(np.isfinite(naive.min(axis=1)), naive.min(axis=1) * share, 1.0)
    priced = PricedChains(table, PRICES, paces=PACES, limits=PACES * 1.5, enough=enough)
    below = naive < enough[:, None] * (1 - 1e-9)
    assert below.any() == (share > 1)
    assert priced.values[below] == pytest.approx(naive[below])
    above = ~below
    assert (priced.values[above] <= naive[above] * (1 + 1e-9)).all()
    assert (priced.values >= np.minimum(naive, enough[:, None]) * (1 - 1e-9)).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [0.9, 1.3, np.inf])
def test_the_least_value_of_a_cell_is_exact_where_it_alone_is_asked_for(seed: int, share: float) -> None:
    table = random_table(seed)
    naive = np.array(
        [[naive_value(table, stages, pace, pace * 1.5) for stages in (1, 2, 3)] for pace in PACES]
    )
    best = naive.min(axis=1)
    enough = None if share == np.inf else np.where(np.isfinite(best), best * share, 1.0)
    priced = PricedChains(table, PRICES, paces=PACES, limits=PACES * 1.5, enough=enough, least=True)
    assert (priced.values <= naive * (1 + 1e-9)).all()
    fits, least = np.isfinite(best), priced.values.min(axis=1)
    if enough is not None:
        assert (least >= np.minimum(best, enough) * (1 - 1e-9)).all()
    if share < 1:
        return
    assert least[fits] == pytest.approx(best[fits])
    for cell in np.flatnonzero(fits):
        stages = int(priced.values[cell].argmin()) + 1
        chain = priced.trace(int(cell), stages)
        spent = sum(stage_seconds(table, chain.specs)) + after_first(table, chain.specs)
        cost = float(np.dot(PRICES, counts_of(table, chain.specs)))
        assert spent * table.micro_batch_size / PACES[cell] + cost == pytest.approx(best[cell])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_traced_chain_has_the_value_that_was_found(seed: int) -> None:
    table = random_table(seed)
    priced = PricedChains(table, PRICES, paces=PACES, limits=PACES * 1.5)
    for cell, stages in zip(*np.nonzero(np.isfinite(priced.values[:, : priced.known])), strict=True):
        chain = priced.trace(int(cell), int(stages) + 1)
        assert max(stage_seconds(table, chain.specs)) <= PACES[cell] * 1.5
        spent = sum(stage_seconds(table, chain.specs)) + after_first(table, chain.specs)
        cost = float(np.dot(PRICES, counts_of(table, chain.specs)))
        value = spent * table.micro_batch_size / PACES[cell] + cost
        assert value == pytest.approx(priced.values[cell, stages])
        assert sum(layers for _, layers in chain.specs) == table.layers


@pytest.mark.parametrize("seed", SEEDS)
def test_the_quick_bound_is_below_the_program(seed: int) -> None:
    table = random_table(seed)
    priced = PricedChains(table, PRICES, paces=PACES, limits=PACES * 1.5, each=0.2)
    quick = least_seconds(table, table.cost(PRICES), paces=PACES, limits=PACES * 1.5, each=0.2)
    assert (quick <= priced.seconds.min(axis=1) + 1e-9).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("in_flight", [1, 2, 9])
def test_cells_bound_every_chain_in_them(seed: int, in_flight: int) -> None:
    """g of a cell is at most m (W + W') / P + the price of any chain with that period and that W' after it."""
    table = random_table(seed)
    low, high = np.array([0.5, 1.0, 2.0, 4.0]), np.array([1.0, 2.0, 4.0, 9.0])
    middle = 1.0
    cells = Cells(
        np.tile(low, 2), np.tile(high, 2), np.repeat([0.0, middle], 4), np.repeat([middle, np.inf], 4)
    )
    few = with_in_flight(table, in_flight)
    values = least_values(few, Ranking(few, few.cost(PRICES)), cells, stages=(1, 3))
    checked = 0
    for stages in (1, 2, 3):
        for specs in every_chain(table, stages):
            chain, seconds = make_chain(table, specs), stage_seconds(table, specs)
            period = max(seconds)
            left = chain.pace.fill_seconds - sum(seconds)
            cost = float(np.dot(PRICES, counts_of(table, specs)))
            inside = (cells.low <= period) & (period <= cells.high)
            inside &= (cells.after_low <= left) & (left <= cells.after_high)
            for cell in np.flatnonzero(inside):
                rate = table.micro_batch_size / cells.low[cell]
                assert values[cell, stages - 1] <= (sum(seconds) + left) * rate + cost + 1e-9
                checked += 1
    assert checked > 20


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_are_cut_together_as_each_alone(seed: int) -> None:
    table = random_table(seed)
    low, high = np.array([0.5, 1.0, 2.0, 4.0]), np.array([1.0, 2.0, 4.0, 9.0])
    cells = Cells(low, high, np.zeros(4), np.full(4, np.inf))
    ranking = Ranking(table, table.cost(PRICES))

    def group_of(stages: tuple[int, int]) -> Group:
        values = least_values(table, ranking, cells, stages=stages)
        return Group(table, ranking, stages, cells, values, np.inf, 1e-9)

    def groups() -> list[Group]:
        return [group_of(stages) for stages in ((1, 1), (2, 3), (3, 3))]

    cuts = [np.array(which) for which in ([True, False, True, True], [False, True, True, False], [True] * 4)]
    together, alone = groups(), groups()
    cut_together(list(zip(together, cuts, strict=True)), 8.0)
    for group, which in zip(alone, cuts, strict=True):
        group.cut(which, 8.0)
    for one, other, which in zip(together, alone, cuts, strict=True):
        assert len(one.cells) == 4 + which.sum()
        assert np.array_equal(one.values, other.values)
        assert np.array_equal(one.paying, other.paying)
        assert np.array_equal(one.cells.low, other.cells.low)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("counts", [(2, 2), (3, 2), (1, 4)])
def test_columns_hold_the_model_from_the_least_period_on(seed: int, counts: tuple[int, int]) -> None:
    table, box = random_table(seed), Box(counts, 1)
    periods = np.geomspace(0.5, 12, 40)
    index = least_periods(table, box, periods=periods, max_stages=3)
    for stages in (1, 2, 3):
        naive = min(
            (
                max(stage_seconds(table, s))
                for s in every_chain(table, stages)
                if counts_of(table, s) == counts
            ),
            default=np.inf,
        )
        found = int(index[(stages - 1, *counts)])
        assert found <= np.searchsorted(periods, naive)
        if found < len(periods):
            specs = fullest_chain(table, box, stages=stages, period=float(periods[found]))
            assert specs is not None
            assert counts_of(table, tuple(specs)) == counts
            assert sum(layers for _, layers in specs) >= table.layers


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("counts", [(2, 2), (3, 2), (1, 4)])
def test_the_first_periods_are_the_least_over_all_devices(seed: int, counts: tuple[int, int]) -> None:
    table, box = random_table(seed), Box(counts, 1)
    periods = np.geomspace(0.5, 12, 40)
    index = least_periods(table, box, periods=periods, max_stages=3)
    first = first_periods(table, box, periods=periods, max_stages=3)
    assert first.tolist() == index.reshape(3, -1).min(axis=1).tolist()


@pytest.mark.parametrize("rows", [1, 7, 60])
def test_a_join_is_the_least_over_all_splits(rows: int) -> None:
    random = np.random.default_rng(rows)
    behind, ahead = (np.where(x < 0.2, np.inf, x) for x in random.random((2, rows, 9)))
    found = join(behind, ahead)
    for row in range(rows):
        for layers in range(9):
            sums = [behind[row, layers - taken] + ahead[row, taken] for taken in range(layers + 1)]
            assert found[row, layers] == min(sums)
    assert np.isinf(join(behind, np.full_like(ahead, np.inf))).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("period", [2.0, 4.0, 9.0])
def test_the_least_sum_on_given_devices(seed: int, period: float) -> None:
    table, counts = random_table(seed), (2, 2)
    for stages in (1, 2, 3):
        naive = min(
            (
                sum(stage_seconds(table, specs)) + after_first(table, specs)
                for specs in every_chain(table, stages)
                if counts_of(table, specs) == counts and max(stage_seconds(table, specs)) <= period
            ),
            default=None,
        )
        chain = least_sum(table, Box(counts, 1), stages=stages, period=period)
        if naive is None:
            assert chain is None
            continue
        assert chain is not None
        found = sum(stage_seconds(table, chain.specs)) + after_first(table, chain.specs)
        assert found == pytest.approx(naive)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("further", [0, 1, 2])
def test_the_cheapest_choice_is_among_the_undominated(seed: int, further: int) -> None:
    """At any rate, and any limits of seconds and of further figures."""
    draw = np.random.default_rng(seed)
    price = np.sort(draw.integers(0, 9, 14) / 4)
    seconds, *others = draw.integers(1, 12, (1 + further, 14, 5)) / 3
    seconds[draw.random((14, 5)) < 0.2] = np.inf
    ranked = undominated(seconds, *others)
    for rate, limit, *room in draw.uniform(0.1, 5, (60, 2 + further)):
        allowed = seconds <= limit
        for other, most in zip(others, room, strict=True):
            allowed &= other <= most
        weights = np.where(allowed, seconds * rate + price[:, None], np.inf)
        kept = np.take_along_axis(weights, ranked, axis=0)
        assert (kept.min(axis=0) == weights.min(axis=0)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_leaving_dominated_choices_out_costs_nothing(seed: int) -> None:
    table = random_table(seed)
    # A second choice of the same devices that is worse in every way.
    worse = table.kept([0, 0, 1, 2, 3])
    worse.forward[:, 1] += 0.1
    fewer = without_dominated(worse)
    assert fewer.choices == table.choices
    one, other = (PricedChains(t, PRICES, paces=PACES, limits=PACES) for t in (table, fewer))
    assert one.values == pytest.approx(other.values)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("most", [1, 3, 50])
def test_the_knapsack_is_that_of_enumeration(seed: int, most: int) -> None:
    draw = np.random.default_rng(seed)
    limits = (4, 3)
    items = [tuple(map(int, item)) for item in draw.integers(0, 4, (5, 2)) if item.any()]
    worth = [int(value) for value in draw.integers(1, 40, len(items))]
    total, taken = Knapsack(limits, items, worth).best(most)
    best = 0
    for copies in itertools.product(range(5), repeat=len(items)):
        used = [sum(n * item[k] for n, item in zip(copies, items, strict=True)) for k in (0, 1)]
        if sum(copies) <= most and all(u <= limit for u, limit in zip(used, limits, strict=True)):
            best = max(best, sum(n * value for n, value in zip(copies, worth, strict=True)))
    assert total == best
    assert sum(worth[i] for i in taken) >= total
    assert len(taken) <= most
    assert all(sum(items[i][k] for i in taken) <= limits[k] for k in (0, 1))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("most", [1, 3, 50])
def test_items_that_another_beats_are_of_no_use_to_the_knapsack(seed: int, most: int) -> None:
    draw = np.random.default_rng(seed)
    needs = draw.integers(0, 4, (12, 2))
    needs = needs[needs.any(axis=1)]
    worth = draw.integers(1, 10, len(needs))
    limits = (5, 4)
    every = Knapsack(limits, [tuple(map(int, item)) for item in needs], [int(value) for value in worth])
    fewer, kept = Knapsack.of(limits, needs, worth)
    assert 0 < len(kept) < len(needs)
    total, taken = fewer.best(most)
    assert total == every.best(most)[0]
    assert sum(int(worth[kept[i]]) for i in taken) >= total
    assert (needs[kept[taken]].sum(axis=0) <= limits).all()


def test_prices_of_the_linear_program_are_worth_what_is_there() -> None:
    columns = np.array([[1.0, 0.0, 1.0], [0.0, 2.0, 1.0], [1.0, 1.0, 1.0]])
    worth, limits = np.array([3.0, 4.0, 6.0]), np.array([4.0, 4.0, 3.0])
    found = linear_program(columns, worth, limits)
    assert found.prices @ limits == pytest.approx(found.worth)
    # No column is worth more than what it uses.
    assert (columns @ found.prices >= worth - 1e-9).all()
    assert (found.amounts @ columns <= limits + 1e-9).all()


@pytest.mark.parametrize("seed", range(20))
def test_the_linear_program_is_that_of_another_solver(seed: int) -> None:
    """Also where limits are 0 and many columns are alike, so that steps gain nothing."""
    draw = np.random.default_rng(seed)
    columns = draw.integers(0, 4, (60, 3)).astype(float)
    columns[:, -1] = 1
    worth, limits = draw.integers(-1, 9, 60).astype(float), draw.integers(0, 9, 3).astype(float)
    found = linear_program(columns, worth, limits)
    known = linprog(-worth, A_ub=columns.T, b_ub=limits, method="highs")
    assert found.worth == pytest.approx(-known.fun)
    assert found.amounts @ worth == pytest.approx(found.worth)
    assert found.prices @ limits == pytest.approx(found.worth)
    assert (columns @ found.prices >= worth - 1e-9).all() and (found.prices >= 0).all()
    assert (found.amounts @ columns <= limits + 1e-9).all() and (found.amounts >= 0).all()
