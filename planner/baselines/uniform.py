"""Strategy `uniform`: the best rectangle TP x PP x DP with equal layers, as Megatron-LM would be configured.

The peer (Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*,
SC 2021) knows no device types: one TP degree, one PP degree that divides the layers, one DP degree, one
micro-batch size with which the global batch divides. The slowest device sets everybody's pace.

Here: all rectangles that fit into the cluster, on the types that its user would launch it on (every subset
of the types, the fastest devices first; the others stay idle). TP groups are chosen and ranked in every way
where they are few, else with like devices side by side, the fastest first or last; stages or replicas are
outermost in that order. Every DP replica is a pipeline of the Plan. Of these the cheapest is proven: they are
settled in the order of what their layers take at least, and priced in the order of Eq. 1, which their price is
never below, until that exceeds the best price.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from planner.baselines.bench import Bench, Budget
from planner.baselines.forms import Form, pure
from planner.baselines.memory_savers import ZeroStage
from planner.baselines.sketch import Chain, Settled, Sketch
from planner.baselines.stage_figures import SharedFigures
from planner.local_batches import Pace
from planner.plan import Plan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.shortlist import Offer, ignore

_LARGEST_MICRO_BATCH = 64
# Of so many TP groups any are tried, in every order.
_MOST_ORDERED = 5
# Up to so many devices every number of replicas is tried; of larger clusters, those that use more than half.
_MOST_DEVICES = 64


def plan(
    request: PlanRequest,
    *,
    profile: ProfileTable,
    progress: Callable[[str], None],
    figures: SharedFigures | None = None,
    offer: Offer = ignore,
    budget: Budget | None = None,
) -> Plan:
    """The best rectangle. UserError if none fits."""
    bench = Bench(request, profile=profile, figures=figures, offer=offer, budget=budget)

    def settle(zero_stage: ZeroStage, sketch: Sketch) -> Settled | None:
        shares = [request.global_batch_size // len(sketch.pipelines)] * len(sketch.pipelines)

        def share(paces: Sequence[Pace]) -> list[int]:
            return shares

        stages = len(sketch.pipelines[0])
        layers = [bench.layers // stages] * stages
        return bench.settle_with(zero_stage, sketch, share, expected=shares, layers=layers)

    progress("uniform: rectangles")
    best = _cheapest(bench, settle)
    if best is None:
        raise bench.cannot_fit("no rectangle TP x PP x DP with equal layers holds it")
    return best.model_copy(update={"search": bench.statistics()})


def _cheapest(bench: Bench, settle: Callable[[ZeroStage, Sketch], Settled | None]) -> Plan | None:
    """Rectangles in the order of what they take at least, settled and then priced as long as that is below
    the best price."""
    best: tuple[float, Plan] | None = None
    waiting: list[tuple[float, int, Settled]] = []
    for number, (least, sketch) in enumerate([*_ordered(bench), (math.inf, None)]):
        limit = min(best[0] if best else math.inf, bench.budget.upper)
        while waiting and waiting[0][0] <= least and waiting[0][0] < limit:
            settled = heapq.heappop(waiting)[2]
            for seconds, _, plan in bench.priced([settled]):
                if best is None or seconds < best[0]:
                    best = seconds, plan
                    limit = min(limit, seconds)
        if sketch is None or least >= limit:
            break
        for stage in bench.zero_stages:
            found = settle(stage, sketch)
            if found is not None:
                heapq.heappush(waiting, (found.end_seconds, number * len(bench.zero_stages) + stage, found))
    return best[1] if best else None


def _ordered(bench: Bench) -> list[tuple[float, Sketch]]:
    """All rectangles with Eq. 1 of their layers alone, the least first; those that a profile covers and that may be
    quicker than what is to be beaten."""
    found: dict[Sketch, float] = {}
    for least, sketch in _sketches(bench):
        found.setdefault(sketch, least)
    return sorted(((least, sketch) for sketch, least in found.items()), key=lambda one: one[0])


def _sketches(bench: Bench) -> Iterator[tuple[float, Sketch]]:
    batch = bench.request.global_batch_size
    stage_counts = [pp for pp in range(1, bench.layers + 1) if bench.layers % pp == 0]
    for types in _subsets(list(bench.counts)):
        degrees = set.intersection(*(set(bench.degrees(type_)) for type_ in types))
        for size in bench.micro_batch_sizes(min(batch, _LARGEST_MICRO_BATCH)):
            for tp in sorted(degrees):
                groups = _groups(bench, types, tp, size)
                for pp in stage_counts:
                    for dp in _replica_counts(len(groups) // pp, batch, size):
                        for chosen in _chosen(groups, pp * dp):
                            slowest = max(bench.layer_seconds(form) for form in set(chosen))
                            least = slowest * bench.layers / pp * (batch // (dp * size))
                            if least < bench.budget.upper:
                                yield from ((least, sketch) for sketch in _arranged(chosen, pp, dp, size))


def _subsets(types: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for count in range(len(types), 0, -1):
        yield from itertools.combinations(types, count)


def _groups(bench: Bench, types: Sequence[str], tp: int, size: int) -> list[Form]:
    """TP groups of these types, the fastest first; a node's devices beyond whole groups stay idle."""
    forms = []
    for type_ in types:
        form = pure(type_, tp=tp, dp=1, micro_batch_size=size)
        if bench.covers(form):
            held = (
                sum(entry.count for entry in node.devices if entry.type == type_)
                for node in bench.request.cluster.nodes
            )
            forms.append((bench.layer_seconds(form), form, sum(count // tp for count in held)))
    ordered = sorted(forms, key=lambda one: (one[0], one[1].parts[0].type))
    return [form for _, form, count in ordered for _ in range(count)]


def _chosen(groups: Sequence[Form], count: int) -> list[tuple[Form, ...]]:
    """The groups to use: the fastest; of few groups, any."""
    if len(groups) <= _MOST_ORDERED:
        return list(dict.fromkeys(itertools.combinations(groups, count)))
    return [tuple(groups[:count])]


def _replica_counts(most: int, batch: int, size: int) -> list[int]:
    fewest = 1 if most * size <= _MOST_DEVICES else most // 2 + 1
    return [dp for dp in range(fewest, most + 1) if batch % (dp * size) == 0]


def _arranged(groups: Sequence[Form], pp: int, dp: int, size: int) -> Iterator[Sketch]:
    """The orders of the ranks, near in activations or in gradients."""
    for chains in dict.fromkeys(chains for order in _orders(groups) for chains in _cut(order, pp, dp)):
        yield Sketch(size, chains)
        if dp > 1:
            yield Sketch(size, chains, aligned=True)


def _cut(order: Sequence[Form], pp: int, dp: int) -> Iterator[tuple[Chain, ...]]:
    """The pipelines of a rank order, with stages outermost and with replicas outermost."""
    yield tuple(tuple(order[stage * dp + replica] for stage in range(pp)) for replica in range(dp))
    yield tuple(tuple(order[replica * pp : (replica + 1) * pp]) for replica in range(dp))


def _orders(groups: Sequence[Form]) -> list[tuple[Form, ...]]:
    """Every order of the groups where they are few, else the fastest first and the fastest last."""
    if len(groups) <= _MOST_ORDERED:
        return list(dict.fromkeys(itertools.permutations(groups)))
    return list(dict.fromkeys([tuple(groups), tuple(groups[::-1])]))
