"""Pairwise covering sets: few rows in which every two values of every two factors meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, object]
Pair = tuple[tuple[str, object], tuple[str, object]]

_TRIES = 60


def covering_rows(
    factors: Mapping[str, Sequence[object]], allowed: Callable[[Row], bool] = lambda _: True
) -> list[Row]:
    """Rows of one value a factor, all allowed, that cover every pair that some allowed row has.

    Greedy, and the same every time: each row is the best of some that hold the first pair still missing.
    """
    missing = dict.fromkeys(_possible_pairs(factors, allowed))
    chance, rows = random.Random(0), list[Row]()
    while missing:
        wanted = dict(next(iter(missing)))
        tries = (
            {name: wanted.get(name, chance.choice(values)) for name, values in factors.items()}
            for _ in range(_TRIES)
        )
        row = max(filter(allowed, tries), key=lambda row: sum(pair in missing for pair in _pairs(row)))
        rows.append(row)
        for pair in _pairs(row):
            missing.pop(pair, None)
    return rows


def _pairs(row: Row) -> Iterator[Pair]:
    return combinations(row.items(), 2)


def _possible_pairs(
    factors: Mapping[str, Sequence[object]], allowed: Callable[[Row], bool]
) -> Iterator[Pair]:
    """Pairs that an allowed row can have, the other factors at any of their values."""
    chance = random.Random(1)
    for (first, ones), (second, others) in combinations(factors.items(), 2):
        for one, other in product(ones, others):
            for _ in range(_TRIES):
                row = {name: chance.choice(values) for name, values in factors.items()}
                if allowed(row | {first: one, second: other}):
                    yield ((first, one), (second, other))
                    break
