"""Strategy `metis`: one pipeline, every stage with its own (tp, dp), layers balanced within memory.

The peer (Um et al., *Metis: Fast Automatic Distributed Training on Heterogeneous GPUs*, ATC 2024) lines the
devices up by type, in every order of the types, and cuts the line into stage device groups of like sizes.
Each group gets data and tensor parallelism of its own. Layers are balanced over the stages by profiled
times until memory forbids it. Where a group crosses from one type to the next, its data is split unevenly
over the replicas. There is one pipeline, so the only thing that balances stages is layers.

Here: for every micro-batch size and order of types, every (tp, dp) a type, all its stages alike (a rest
becomes a smaller stage); and all devices as one stage. The best are then changed, one or more
stages of a run of like ones at a time: data against tensor parallelism, a stage in two, two neighbours as
one (mixed, if they are of unlike types).
Layers are split by the exact min-max split of ours, and all is priced by our cost model, so nothing is lost
to the peer's coarser estimates. All devices are used, as the peer does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from planner.baselines.bench import Bench, Budget
from planner.baselines.both_ways import both_ways
from planner.baselines.forms import Form, balanced_mixes, filled, mixed, pure
from planner.baselines.sketch import Chain, Settled, Sketch, replaced
from planner.baselines.stage_figures import SharedFigures
from planner.local_batches import Pace
from planner.plan import Plan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.shortlist import Offer, ignore

# Combinations of the types' (tp, dp) for one micro-batch size and order.
_MOST_COMBINATIONS = 4096
_MOST_ROWS = 16
# How often a plan is changed so.
_ROUNDS = 24


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
    """The best single pipeline. UserError if none fits."""
    bench = Bench(request, profile=profile, figures=figures, offer=offer, budget=budget)
    found = best_pipeline(bench, progress=progress)
    if found is None:
        raise bench.cannot_fit("one pipeline over all devices cannot hold it")
    return bench.finished(*found)


def best_pipeline(bench: Bench, *, progress: Callable[[str], None]) -> tuple[Settled, Plan] | None:
    """The best pipeline over all devices of the bench's cluster, with the whole batch, and its plan, priced."""
    batch = bench.request.global_batch_size

    def everything(paces: Sequence[Pace]) -> list[int]:
        return [batch]

    def settle(sketch: Sketch) -> Settled | None:
        return bench.settle(sketch, everything, expected=[batch])

    progress("metis: pipelines with one (tp, dp) a type")
    priced = bench.best(
        _sketches(bench), settle, micro_batches=lambda sketch: -(-batch // sketch.micro_batch_size)
    )
    best: tuple[float, Settled, Plan] | None = None
    for found in priced[: bench.budget.starts]:
        progress(f"metis: {found[0]:.4g} s, stage by stage")
        if bench.budget.improves:
            found = _improved(bench, found, settle)
        if best is None or found[0] < best[0]:
            best = found
    return best[1:] if best else None


def _sketches(bench: Bench) -> Iterator[Sketch]:
    devices, batch = sum(bench.counts.values()), bench.request.global_batch_size
    for size in bench.micro_batch_sizes(min(batch, max(8, 2 * devices))):
        micro_batches = -(-batch // size)
        by_type = [_fillings(bench, type_, size) for type_ in bench.counts]
        most = max(1, int(_MOST_COMBINATIONS ** (1 / len(by_type))))
        by_type = _promising(bench, [own[:most] for own in by_type], micro_batches)
        for order in itertools.permutations(range(len(by_type))):
            for parts in itertools.product(*(by_type[k] for k in order)):
                stages, speed = sum(len(chain) for chain, _ in parts), sum(speed for _, speed in parts)
                if stages <= bench.layers + 2 and bench.may_be_of_use(speed, stages + micro_batches - 1):
                    yield Sketch(size, (tuple(itertools.chain(*(chain for chain, _ in parts))),))
    for tp in sorted(set.intersection(*(set(bench.degrees(type_)) for type_ in bench.counts))):
        for size, form in balanced_mixes(bench.cost, bench.counts, tp=tp, most_rows=_MOST_ROWS):
            if size <= batch:
                yield Sketch(size, ((form,),))


def _promising(
    bench: Bench, by_type: Sequence[list[tuple[Chain, float]]], micro_batches: int
) -> list[list[tuple[Chain, float]]]:
    """Those that may be of use beside the quickest ones of the other types, had these no more than a stage each."""
    quickest = [max((speed for _, speed in own), default=0.0) for own in by_type]
    return [
        [
            (chain, speed)
            for chain, speed in own
            if bench.may_be_of_use(
                sum(quickest) - most + speed, len(chain) + len(by_type) - 1 + micro_batches - 1
            )
        ]
        for own, most in zip(by_type, quickest, strict=True)
    ]


def _fillings(bench: Bench, type_: str, size: int) -> list[tuple[Chain, float]]:
    """All devices of a type as stages of one (tp, dp), the quickest layers first; and layers a second of each."""
    count, found = bench.counts[type_], {}
    for tp in bench.degrees(type_):
        for dp in range(1, min(size, count // tp) + 1):
            if size % dp == 0:
                chain = filled(type_, count, tp=tp, dp=dp, micro_batch_size=size)
                forms = set(chain)
                if len(chain) <= bench.layers + 2 and all(map(bench.covers, forms)):
                    speeds = {form: 1 / bench.layer_seconds(form) for form in forms}
                    found[chain] = sum(speeds[form] for form in chain)
    return sorted(found.items(), key=lambda one: (-one[1], len(one[0])))


def _improved(
    bench: Bench, found: tuple[float, Settled, Plan], settle: Callable[[Sketch], Settled | None]
) -> tuple[float, Settled, Plan]:
    """Changes one stage, or two neighbours, as long as the price falls."""
    for _ in range(_ROUNDS if sum(bench.counts.values()) <= 256 else _ROUNDS // 3):
        settled = found[1]
        (chain,), size = settled.sketch.pipelines, settled.sketch.micro_batch_size
        changed = [settle(Sketch(size, (other,))) for other in dict.fromkeys(changes(bench, chain, size))]
        promising = sorted(
            (one for one in changed if one is not None and one.estimate < settled.estimate * 1.01),
            key=lambda one: one.estimate,
        )
        priced = bench.priced(promising[:4])
        if not priced or priced[0][0] >= found[0] * (1 - 1e-9):
            return found
        found = priced[0]
    return found


def changes(bench: Bench, chain: Chain, size: int) -> Iterator[Chain]:
    """Chains in which part of a run of like stages, at either end of it, is built in another way.

    One stage, two, four, ... or all of the run at once; and two neighbours joined, alike or not.
    """
    start = 0
    for form, run in itertools.groupby(chain):
        count = len(list(run))
        for part in _parts(count):
            for forms in _instead(bench, form, size):
                for place in dict.fromkeys((start, start + count - part)):
                    yield replaced(chain, place, forms * part, count=part)
        for pairs in _parts(count // 2):
            for joined in _joined(bench, form, form, size):
                for place in dict.fromkeys((start, start + count - 2 * pairs)):
                    yield replaced(chain, place, [joined] * pairs, count=2 * pairs)
        start += count
        if start < len(chain):
            for joined in _joined(bench, form, chain[start], size):
                yield replaced(chain, start - 1, [joined], count=2)


def _parts(count: int) -> list[int]:
    """1, 2, 4, ... and all."""
    return sorted({2**power for power in range(count.bit_length()) if 2**power <= count} | {count} - {0})


def _instead(bench: Bench, form: Form, size: int) -> Iterator[list[Form]]:
    """A stage in other ways: other degrees, or cut in two."""
    if len(form.parts) > 1:
        return
    (part,), count = form.parts, form.devices
    for tp in bench.degrees(part.type):
        for devices in (count, count // 2):
            dp, rest = divmod(devices, tp)
            if not dp or rest or size % dp or (devices < count and count % 2):
                continue
            other = pure(part.type, tp=tp, dp=dp, micro_batch_size=size)
            if other != form and bench.covers(other):
                yield [other] * (count // devices)


def _joined(bench: Bench, a: Form, b: Form, size: int) -> Iterator[Form]:
    """Two neighbours as one stage."""
    counts = dict(a.counts)
    for type_, count in b.counts.items():
        counts[type_] = counts.get(type_, 0) + count
    degrees = set.intersection(*(set(bench.degrees(type_)) for type_ in counts))
    for tp in sorted(degrees):
        if len(counts) == 1:
            ((type_, count),) = counts.items()
            dp, rest = divmod(count, tp)
            if not rest and size % dp == 0:
                form: Form | None = pure(type_, tp=tp, dp=dp, micro_batch_size=size)
            else:
                form = None
        else:
            form = mixed(bench.cost, counts, tp=tp, micro_batch_size=size)
        if form is not None and bench.covers(form):
            yield form
