"""Strategy `hexiscale`: several pipelines with the same number of samples each, DP 1 inside a stage.

The peer (Yan et al., *HexiScale: Accommodating Large Language Model Training over Heterogeneous
Environment*) partitions the devices into pipelines of about equal compute, which may be composed
differently, and each pipeline into stages that are one tensor-parallel group each, with a degree of its
own; layers are balanced over the stages within memory. Every pipeline takes the same number of samples, so
the slowest one sets the pace.

Here: for every number of pipelines, micro-batch size, TP degree a type and order of the types, TP groups
are dealt out, the fastest first, each to the pipeline that has least speed so far; where the counts divide,
that makes identical pipelines. The best are then changed a stage at a time: a TP group in two, two
neighbours as one, in all like pipelines at once. Layers are split by the exact min-max split of ours, and
all is priced by our cost model. Samples that the pipelines cannot share equally make them differ by one.
All devices are used.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

from planner.baselines.bench import Bench, Budget
from planner.baselines.both_ways import both_ways
from planner.baselines.forms import Form, filled, pure
from planner.baselines.sketch import Chain, Settled, Sketch, replaced
from planner.baselines.stage_figures import SharedFigures
from planner.local_batches import Pace, equal_shares
from planner.plan import Plan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.shortlist import Offer, ignore

# Combinations of the types' TP degrees, and orders of the types.
_MOST_COMBINATIONS = 256
_MOST_ORDERS = 6
_LARGEST_MICRO_BATCH = 16
_ROUNDS = 16


@both_ways
def plan(
    request: PlanRequest,
    *,
    profile: ProfileTable,
    progress: Callable[[str], None],
    figures: SharedFigures | None = None,
    offer: Offer = ignore,
    budget: Budget | None = None,
) -> Plan:
    """The best such pipelines. UserError if none fit."""
    bench = Bench(request, profile=profile, figures=figures, offer=offer, budget=budget)
    batch = request.global_batch_size

    def settle(sketch: Sketch) -> Settled | None:
        shares = equal_shares(len(sketch.pipelines), global_batch_size=batch)

        def share(paces: Sequence[Pace]) -> list[int]:
            return shares

        return bench.settle(sketch, share, expected=shares)

    progress("hexiscale: pipelines with one TP degree a type")
    priced = bench.best(
        _sketches(bench),
        settle,
        micro_batches=lambda sketch: -(-batch // (len(sketch.pipelines) * sketch.micro_batch_size)),
    )
    if not priced:
        raise bench.cannot_fit("no number of equal pipelines of TP groups holds it")
    best = None
    for start in priced[: bench.budget.starts]:
        progress(f"hexiscale: {start[0]:.4g} s, stage by stage")
        found = _improved(bench, start, settle)
        best = found if best is None or found[0] < best[0] else best
    assert best is not None
    return bench.finished(*best[1:])


def _sketches(bench: Bench) -> Iterator[Sketch]:
    batch = bench.request.global_batch_size
    types = list(bench.counts)
    orders = list(itertools.islice(itertools.permutations(range(len(types))), _MOST_ORDERS))
    degrees = [bench.degrees(type_) for type_ in types]
    for size in bench.micro_batch_sizes(min(batch, _LARGEST_MICRO_BATCH)):
        for tps in itertools.islice(itertools.product(*degrees), _MOST_COMBINATIONS):
            groups = [
                filled(type_, bench.counts[type_], tp=tp, dp=1, micro_batch_size=size)
                for type_, tp in zip(types, tps, strict=True)
            ]
            if not all(bench.covers(form) for forms in groups for form in set(forms)):
                continue
            fastest = _fastest_first(bench, groups)
            total = sum(speed for speed, _, _ in fastest)
            stages = sum(map(len, groups))
            for count in _pipeline_counts(stages, batch):
                # Of the pipelines' periods over their speeds the largest is no less than all periods over all speeds.
                periods = stages + count * (-(-batch // (count * size)) - 1)
                if size > -(-batch // count) or not bench.may_be_of_use(total, periods):
                    continue
                dealt = _dealt(bench, groups, fastest, count)
                if dealt is None:
                    continue
                for order in orders:
                    chains = tuple(tuple(itertools.chain(*(held[k] for k in order))) for held in dealt)
                    yield Sketch(size, chains)
                    if count > 1:
                        yield Sketch(size, chains, aligned=True)


def _pipeline_counts(groups: int, batch: int) -> list[int]:
    """Every small number, then those that share the batch equally."""
    return [n for n in range(1, min(groups, batch) + 1) if n <= 8 or batch % n == 0]


def _fastest_first(bench: Bench, groups: Sequence[Chain]) -> list[tuple[float, int, Form]]:
    """(layers a second, type, TP group) of every group."""
    every = [(1 / bench.layer_seconds(form), k, form) for k, forms in enumerate(groups) for form in forms]
    return sorted(every, key=lambda one: (-one[0], one[1]))


def _dealt(
    bench: Bench, groups: Sequence[Chain], fastest: Sequence[tuple[float, int, Form]], count: int
) -> list[list[Chain]] | None:
    """Each pipeline's groups by type; None if a pipeline would have more stages than layers allow."""
    if sum(map(len, groups)) > count * (bench.layers + 2):
        return None
    if all(len(forms) % count == 0 and len(set(forms)) <= 1 for forms in groups):
        return [[forms[: len(forms) // count] for forms in groups]] * count
    speeds: list[tuple[float, int]] = [(0.0, index) for index in range(count)]
    held: list[list[list[Form]]] = [[[] for _ in groups] for _ in range(count)]
    for speed, k, form in fastest:
        total, index = speeds[0]
        held[index][k].append(form)
        heapq.heapreplace(speeds, (total + speed, index))
    return sorted(([tuple(forms) for forms in own] for own in held), key=lambda own: list(map(len, own)))


def _improved(
    bench: Bench, found: tuple[float, Settled, Plan], settle: Callable[[Sketch], Settled | None]
) -> tuple[float, Settled, Plan]:
    """Changes one stage, or two neighbours, of all like pipelines, as long as the price falls."""
    for _ in range(_ROUNDS if sum(bench.counts.values()) <= 256 else _ROUNDS // 2):
        settled = found[1]
        sketch = settled.sketch
        others = [
            Sketch(
                sketch.micro_batch_size,
                tuple(other if chain == own else chain for chain in sketch.pipelines),
                sketch.aligned,
            )
            for own in dict.fromkeys(sketch.pipelines)
            for other in dict.fromkeys(_changes(bench, own, sketch.micro_batch_size))
        ]
        changed = [settle(other) for other in others]
        promising = sorted(
            (one for one in changed if one is not None and one.estimate < settled.estimate * 1.01),
            key=lambda one: one.estimate,
        )
        priced = bench.priced(promising[:4])
        if not priced or priced[0][0] >= found[0] * (1 - 1e-9):
            return found
        found = priced[0]
    return found


def _changes(bench: Bench, chain: Chain, size: int) -> Iterator[Chain]:
    """A TP group cut in two, or two like neighbours joined; of a run of like groups at its ends."""
    for place, form in enumerate(chain):
        type_ = form.parts[0].type
        at_end = place in (0, len(chain) - 1) or chain[place - 1] != form or chain[place + 1] != form
        if not at_end:
            continue
        if form.tp % 2 == 0 and form.tp // 2 in bench.degrees(type_):
            half = pure(type_, tp=form.tp // 2, dp=1, micro_batch_size=size)
            if bench.covers(half):
                yield replaced(chain, place, [half, half])
        if place + 1 < len(chain) and chain[place + 1] == form and 2 * form.tp in bench.degrees(type_):
            double = pure(type_, tp=2 * form.tp, dp=1, micro_batch_size=size)
            if bench.covers(double):
                yield replaced(chain, place, [double], count=2)
