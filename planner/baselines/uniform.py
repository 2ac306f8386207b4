"""Strategy `uniform`: the best rectangle TP x PP x DP with equal layers, as Megatron-LM would be configured.

The peer (Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*,
SC 2021) knows no device types: one TP degree, one PP degree that divides the layers, one DP degree, one
micro-batch size with which the global batch divides. The slowest device sets everybody's pace.

Here: all rectangles that fit into the cluster, on the types that its user would launch it on (every subset
of the types, the fastest devices first; the others stay idle). TP groups are chosen and ranked in every way
where they are few, else with like devices side by side, the fastest first or last; stages or replicas are
outermost in that order. Every DP replica is a pipeline of the Plan. For clusters of up to 64 devices the
cheapest is proven: rectangles are priced in the order of Eq. 1, which their price is never below, until it
exceeds the best price.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from planner.baselines.bench import Bench, micro_batch_sizes
from planner.baselines.forms import Form, pure
from planner.baselines.sketch import Chain, Settled, Sketch
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
    offer: Offer = ignore,
) -> Plan:
    """The best rectangle. UserError if none fits."""
    bench = Bench(request, profile=profile, offer=offer)

    def settle(sketch: Sketch) -> Settled | None:
        shares = [request.global_batch_size // len(sketch.pipelines)] * len(sketch.pipelines)

        def share(paces: Sequence[Pace]) -> list[int]:
            return shares

        stages = len(sketch.pipelines[0])
        return bench.settle(sketch, share, expected=shares, layers=[bench.layers // stages] * stages)

    progress("uniform: rectangles")
    found = sorted(_settled(bench, settle), key=lambda settled: settled.end_seconds)
    best: tuple[float, Plan] | None = None
    for index, settled in enumerate(found):
        if best is not None and settled.end_seconds >= best[0]:
            break
        if index >= bench.budget.priced and len(request.cluster.devices) > _MOST_DEVICES:
            break
        ((seconds, _, priced),) = bench.priced([settled])
        if best is None or seconds < best[0]:
            best = seconds, priced
    if best is None:
        raise bench.cannot_fit("no rectangle TP x PP x DP with equal layers holds it")
    return best[1].model_copy(update={"search": bench.statistics()})


def _settled(bench: Bench, settle: Callable[[Sketch], Settled | None]) -> list[Settled]:
    """All rectangles that fit; of a large cluster the most promising."""
    sketches = dict.fromkeys(_sketches(bench))
    if len(bench.request.cluster.devices) > _MOST_DEVICES:
        batch = bench.request.global_batch_size
        return bench.settled(
            sketches,
            settle,
            micro_batches=lambda sketch: batch // (len(sketch.pipelines) * sketch.micro_batch_size),
        )
    covered = (s for s in sketches if all(bench.covers(form) for chain in s.pipelines for form in chain))
    return [settled for sketch in covered if (settled := settle(sketch)) is not None]


def _sketches(bench: Bench) -> Iterator[Sketch]:
    batch = bench.request.global_batch_size
    stage_counts = [pp for pp in range(1, bench.layers + 1) if bench.layers % pp == 0]
    for types in _subsets(list(bench.counts)):
        degrees = set.intersection(*(set(bench.degrees(type_)) for type_ in types))
        for size in micro_batch_sizes(min(batch, _LARGEST_MICRO_BATCH)):
            for tp in sorted(degrees):
                groups = _groups(bench, types, tp, size)
                for pp in stage_counts:
                    for dp in _replica_counts(len(groups) // pp, batch, size):
                        for chosen in _chosen(groups, pp * dp):
                            yield from _arranged(chosen, pp, dp, size)


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
