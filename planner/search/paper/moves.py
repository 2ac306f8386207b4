"""The moves that relieve a pipeline's bottleneck (paper 4.2.3), device groups being fixed.

The bottleneck is the fullest stage while any does not fit, else the slowest. Recomputation is no move: every
stage's is derived anew whenever its layers, degrees or micro-batch change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.search.paper.configuration import Configuration, Evaluator, Tuned
from planner.search.paper.stage_figures import StageShop

MOST_MICRO_BATCH = 64


def bottleneck(tuned: Tuned) -> int:
    """The stage to relieve; of equal ones the first."""
    stages = tuned.stages
    if not tuned.fits:
        return max(range(len(stages)), key=lambda index: stages[index].fullness)
    return max(range(len(stages)), key=lambda index: stages[index].seconds)


def moves(tuned: Tuned, evaluator: Evaluator) -> list[Configuration]:
    """Every configuration one move away, each once."""
    stage = bottleneck(tuned)
    found: dict[Configuration, None] = {}
    for other in _shifts(tuned, stage):
        found[other] = None
    for degrees in _other_degrees(tuned, stage, evaluator.shop):
        moved = evaluator.in_proportion(tuned.configuration.micro_batch_size, degrees)
        if moved is not None:
            found[moved] = None
    for size in _other_sizes(tuned):
        moved = with_size(evaluator, size, tuned.configuration.degrees)
        if moved is not None:
            found[moved] = None
    found.pop(tuned.configuration, None)
    return list(found)


def with_size(evaluator: Evaluator, size: int, degrees: Sequence[int]) -> Configuration | None:
    """Another micro-batch size; stages whose replicas it does not divide between get the next TP degree that
    works, wider ones first. None if some stage has none."""
    fitting = []
    for counts, wanted in zip(evaluator.groups, degrees, strict=True):
        able = evaluator.shop.able(counts, size)
        if not able:
            return None
        wider = [tp for tp in able if tp >= wanted]
        fitting.append(wider[0] if wider else able[-1])
    return evaluator.in_proportion(size, fitting)


def _shifts(tuned: Tuned, stage: int) -> Iterator[Configuration]:
    """Layers shifted along the chain to the least loaded and to the emptiest stage: one, and enough to even the
    two out."""
    stages, layers = tuned.stages, tuned.configuration.layers
    others = [index for index in range(len(stages)) if index != stage]
    if not others:
        return
    calmest = min(others, key=lambda index: stages[index].seconds)
    emptiest = min(others, key=lambda index: stages[index].fullness)
    load = (lambda i: stages[i].fullness) if not tuned.fits else (lambda i: stages[i].seconds)
    for target in dict.fromkeys([emptiest, calmest] if not tuned.fits else [calmest, emptiest]):
        gap = (load(stage) - load(target)) / max(load(stage), 1e-30)
        for count in {1, int(gap * layers[stage] / 2)}:
            spare = layers[stage] - (0 < stage < len(stages) - 1)
            if 1 <= count <= spare:
                moved = list(layers)
                moved[stage] -= count
                moved[target] += count
                yield tuned.configuration._replace(layers=tuple(moved))


def _other_degrees(tuned: Tuned, stage: int, shop: StageShop) -> Iterator[tuple[int, ...]]:
    """The stage's TP degree one step down (its DP up) or up; for it alone, and for all stages like it."""
    degrees, groups = tuned.configuration.degrees, tuned.groups
    able = shop.degrees(groups[stage])
    place = able.index(degrees[stage])
    down, up = able[:place][-1:], able[place + 1 : place + 2]
    for tp in (*down, *up) if tuned.fits else (*up, *down):
        yield tuple(tp if index == stage else old for index, old in enumerate(degrees))
        yield tuple(
            tp if (groups[index], old) == (groups[stage], degrees[stage]) else old
            for index, old in enumerate(degrees)
        )


def _other_sizes(tuned: Tuned) -> Iterator[int]:
    """Double and half the micro-batch."""
    size = tuned.configuration.micro_batch_size
    if size % 2 == 0:
        yield size // 2
    if 2 * size <= min(MOST_MICRO_BATCH, tuned.batch):
        yield 2 * size
