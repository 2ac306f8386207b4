"""Pipeline device groups, how many there are, and their order: against named devices and by hand."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search.paper.device_groups import (
    Group,
    compositions,
    count_groups,
    count_sorted_groups,
    device_groups,
    most_pipelines,
    parts,
)
from planner.search.paper.dynamic import Row, arrangements
from planner.search.paper.order import GroupOrder, group_cost, inter_variance, intra_variance

COUNTS = [(1,), (4,), (2, 2), (3, 1), (1, 0, 2), (2, 1, 2), (3, 3)]


def every_group(counts: tuple[int, ...], pipelines: int | None = None, unit: int = 1) -> list[Group]:
    numbers = range(1, most_pipelines(counts, unit) + 1) if pipelines is None else [pipelines]
    return [group for n in numbers for group in device_groups(counts, pipelines=n, unit=unit)]


def set_partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for partition in set_partitions(rest):
        for index, block in enumerate(partition):
            yield [*partition[:index], [first, *block], *partition[index + 1 :]]
        yield [[first], *partition]


def vector(kinds: list[int], width: int) -> tuple[int, ...]:
    return tuple(kinds.count(kind) for kind in range(width))


@pytest.mark.parametrize("counts", COUNTS)
def test_every_multiset_of_pipelines_comes_once(counts: tuple[int, ...]) -> None:
    devices = [kind for kind, count in enumerate(counts) for _ in range(count)]
    expected = set()
    for blocks in set_partitions(list(range(len(devices)))):
        pipelines = [vector([devices[i] for i in block], len(counts)) for block in blocks]
        expected.add(tuple(sorted(pipelines, reverse=True)))
    found = every_group(counts)
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert count_groups(counts) == len(expected)


def test_the_number_of_groups_of_two_kinds_is_that_of_the_literature() -> None:
    # Bipartite partitions of (n, n).
    assert [count_groups((n, n)) for n in range(1, 8)] == [2, 9, 31, 109, 339, 1043, 2998]
    total = count_groups((32, 32))
    assert total is not None and 1e12 < total < 2e12
    assert count_groups((512, 512)) is None


@pytest.mark.parametrize(("counts", "unit"), [((5, 4), 2), ((7,), 3), ((4, 2), 4)])
def test_larger_units_hand_out_whole_units_and_one_rest(counts: tuple[int, ...], unit: int) -> None:
    found = every_group(counts, unit=unit)
    assert found and len(found) == len(set(found))
    assert set(found) <= set(every_group(counts))
    for group in found:
        assert vector_sum(group) == counts
        for kind, count in enumerate(counts):
            odd = [part[kind] for part in group if part[kind] % unit]
            assert odd == [] or (len(odd) == 1 and odd[0] % unit == count % unit)
    assert set(compositions(counts, unit)) == {part for group in found for part in group}


def vector_sum(group: Group) -> tuple[int, ...]:
    return tuple(map(sum, zip(*group, strict=True)))


def test_parts_leave_nothing_behind() -> None:
    assert parts((2,), 1) == ((2,), (1,))
    assert parts((5,), 4) == ((5,), (4,), (1,))


def test_variances_and_cost_by_hand() -> None:
    # Two V of power 10 and two T of power 6: <V,V>, <T>, <T>.
    group: Group = ((2, 0), (0, 1), (0, 1))
    powers = (10.0, 6.0)
    # Powers 20, 6, 6: mean 32/3.
    assert inter_variance(group, powers) == pytest.approx(((20 - 32 / 3) ** 2 + 2 * (6 - 32 / 3) ** 2) / 3)
    assert intra_variance(group, powers) == 0
    # <V,T>, <V,T>: equal pipelines, each of variance 4.
    assert inter_variance(((1, 1), (1, 1)), powers) == 0
    assert intra_variance(((1, 1), (1, 1)), powers) == pytest.approx(8)
    assert group_cost(group, powers, global_batch_size=4, layers=2) == pytest.approx(
        inter_variance(group, powers) / 4
    )
    assert group_cost(((1, 1), (1, 1)), powers, global_batch_size=4, layers=2) == pytest.approx(8 / 2)


def test_two_pipelines_come_in_the_order_of_equation_9() -> None:
    order = GroupOrder((2, 2), (10.0, 6.0), global_batch_size=4, layers=8)
    # Eq. 9 by hand: <VT><VT> 8/8 = 1; <VV><TT> 16/4 = 4; <VVT><T> (26, 6) 100/4 + (32/9)/8; <VTT><V> (22, 10) 36/4
    # + (32/9)/8.
    assert list(order.groups(2)) == [
        ((1, 1), (1, 1)),
        ((2, 0), (0, 2)),
        ((1, 2), (1, 0)),
        ((2, 1), (0, 1)),
    ]


@settings(max_examples=40, deadline=None)
@given(
    counts=st.sampled_from([(3, 3), (4, 2), (2, 2, 2), (6,), (5, 1)]),
    powers=st.tuples(*[st.floats(1, 500)] * 3),
    batch=st.integers(1, 64),
    layers=st.integers(1, 48),
    unit=st.sampled_from([1, 2]),
)
def test_the_order_holds_every_group_once_least_cost_first(
    counts: tuple[int, ...], powers: tuple[float, ...], batch: int, layers: int, unit: int
) -> None:
    order = GroupOrder(counts, powers[: len(counts)], batch, layers, unit=unit)
    for pipelines in range(1, most_pipelines(counts, unit) + 1):
        groups = list(order.groups(pipelines))
        assert sorted(groups) == sorted(every_group(counts, pipelines, unit))
        costs = [group_cost(g, order.powers, global_batch_size=batch, layers=layers) for g in groups]
        assert all(a <= b + 1e-9 * max(1, costs[-1]) for a, b in itertools.pairwise(costs))


def test_the_order_is_made_on_the_way_where_groups_are_too_many_to_sort() -> None:
    order = GroupOrder((16, 16), (376.0, 280.0), global_batch_size=1024, layers=40)
    first = list(itertools.islice(order.groups(6), 300))
    costs = [group_cost(g, order.powers, global_batch_size=1024, layers=40) for g in first]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(costs))
    # No balanced group of like pipelines costs less than the first.
    assert costs[0] <= group_cost(
        ((8, 0), (8, 0), (0, 4), (0, 4), (0, 4), (0, 4)), order.powers, global_batch_size=1024, layers=40
    )


@pytest.mark.parametrize("counts", [(2, 3), (3, 3), (2, 2, 2), (1, 0, 3), (4,)])
def test_groups_that_a_sorted_row_can_be_cut_into_are_counted(counts: tuple[int, ...]) -> None:
    row = tuple(kind for kind, count in enumerate(counts) for _ in range(count))
    cuts = set()
    for places in itertools.product([False, True], repeat=len(row) - 1):
        blocks, start = [], 0
        for place, cut in enumerate([*places, True], start=1):
            if cut:
                blocks.append(vector(list(row[start:place]), len(counts)))
                start = place
        cuts.add(tuple(sorted(blocks, reverse=True)))
    assert count_sorted_groups(counts) == len(cuts)
    known = Row(row, counts, 1)
    assert {group for group in every_group(counts) if known.holds(group)} == cuts


def test_few_devices_are_arranged_in_every_way_so_that_all_groups_are_covered() -> None:
    rows = [Row(row, (3, 2), 1) for row in arrangements((3, 2), 1)]
    for group in every_group((3, 2)):
        assert any(row.holds(group) for row in rows)
    # The sorted row does not hold two pipelines that both mix kinds.
    assert not rows[0].holds(((1, 1), (1, 1), (1, 0)))
