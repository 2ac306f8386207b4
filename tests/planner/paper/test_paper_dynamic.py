"""The dynamic program of Eq. 10 against every way to cut a row."""

import itertools
import random

import pytest

from planner.search.paper.dynamic import Row, arrangements


@pytest.mark.parametrize("seed", range(12))
def test_the_best_cut_of_each_number_of_pipelines_is_that_of_all_cuts(seed: int) -> None:
    draw = random.Random(seed)
    counts = draw.choice([(4, 3), (2, 2, 2), (7,)])
    row = tuple(draw.sample([k for k, n in enumerate(counts) for _ in range(n)], sum(counts)))
    known = Row(row, counts, 1)
    throughputs: dict[tuple[int, ...], float] = {}

    def throughput(part: tuple[int, ...]) -> float:
        return throughputs.setdefault(part, draw.uniform(0, 1) * sum(part) * draw.choice([0, 1]))

    found = known.best_cuts(throughput=throughput, most_pipelines=len(row))
    assert [len(group) for _, group in found] == list(range(1, len(row) + 1))
    for total, group in found:
        best = 0.0
        for inner in itertools.combinations(range(1, len(row)), len(group) - 1):
            ends = [0, *inner, len(row)]
            best = max(best, sum(throughput(known.part(a, b)) for a, b in itertools.pairwise(ends)))
        assert total == pytest.approx(best)
        assert sum(throughput(part) for part in group) == pytest.approx(total)
        assert known.holds(group)


def test_cuts_are_made_every_unit_of_a_run_and_between_runs() -> None:
    assert Row((0,) * 6 + (1,) * 4, (6, 4), 4).places == [0, 4, 6, 10]


@pytest.mark.parametrize("counts", [(4, 4), (32, 32), (10, 20, 30), (5,)])
def test_rows_hold_all_devices_and_none_comes_twice_or_reversed(counts: tuple[int, ...]) -> None:
    rows = list(arrangements(counts, 1))
    assert rows[0] == tuple(kind for kind, count in enumerate(counts) for _ in range(count))
    assert all(tuple(row.count(kind) for kind in range(len(counts))) == counts for row in rows)
    assert len({min(row, row[::-1]) for row in rows}) == len(rows)
