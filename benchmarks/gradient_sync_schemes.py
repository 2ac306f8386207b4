"""What block-, tensor- and device-wise synchronisation of the same gradients take, cell by cell."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gradient_sync_plans import FAMILIES, SEEDS, changed, host_cluster, make_plan, model_of
from gradient_sync_ranks import SchemeResult, synchronise
from rank_processes import run_ranks

from planner.gradient_blocks import gradient_blocks
from planner.plan import Plan

SCHEMES = ("block", "tensor", "device")
TARGETS = {"tensor": 2.0, "device": 3.0}


def minimum_bytes(plan: Plan) -> int:
    """Least bytes that all ranks together must send."""
    transfers = 0.0
    for block in gradient_blocks(plan):
        if (holders := len(block.holders)) > 1:
            transfers += block.numel * (sum(block.weights) - 1 + holders - 1)
    return round(4 * transfers)


def minimum_calls(plan: Plan, rank: int) -> int:
    """Sets of ranks that a rank shares elements with: a collective sums over one set."""
    return len({block.holders for block in gradient_blocks(plan) if rank in block.holders} - {(rank,)})


@dataclass(frozen=True)
class Cell:
    """Ranks, family and depth, over all seeds. Ratios are medians of paired runs of the slowest ranks."""

    ranks: int
    family: str
    depth: int
    seconds: dict[str, float]
    ratios: dict[str, float]
    bytes_over_minimum: dict[str, float]
    megabytes_sent: dict[str, float]
    busiest_megabytes: dict[str, float]
    calls: dict[str, int]
    minimum_calls: int
    median_call_kilobytes: dict[str, float]
    extra_megabytes: dict[str, float]
    difference: float


def measure_schemes(ranks: int, depths: Sequence[int], hidden: int, repetitions: int) -> list[Cell]:
    keys = [(family, depth, seed) for family in FAMILIES[ranks] for depth in depths for seed in SEEDS]
    plans = [
        make_plan(
            model_of(depth, hidden, sequence=64),
            FAMILIES[ranks][family],
            host_cluster(ranks),
            random.Random(1000 * depth + seed),
            samples=4,
        )
        for family, depth, seed in keys
    ]
    cells = [[changed(plan, gradient_sync=scheme) for scheme in SCHEMES] for plan in plans]
    by_rank = run_ranks(synchronise, ranks, cells, repetitions)
    found = []
    for family in FAMILIES[ranks]:
        for depth in depths:
            places = [i for i, key in enumerate(keys) if key[:2] == (family, depth)]
            results = [[rank[i] for rank in by_rank] for i in places]
            found.append(summarise(ranks, family, depth, [plans[i] for i in places], results))
    return found


def summarise(
    ranks: int, family: str, depth: int, plans: list[Plan], results: list[list[list[SchemeResult]]]
) -> Cell:
    """`results[seed][rank][scheme]`."""
    seconds: dict[str, list[float]] = {scheme: [] for scheme in SCHEMES}
    for by_rank in results:
        for index, scheme in enumerate(SCHEMES):
            runs = zip(*(rank[index].seconds for rank in by_rank), strict=True)
            seconds[scheme] += [max(run) for run in runs]

    def total(index: int, field: str) -> float:
        return statistics.median(sum(getattr(rank[index], field) for rank in by_rank) for by_rank in results)

    def most(index: int, field: str) -> int:
        return max(getattr(rank[index], field) for by_rank in results for rank in by_rank)

    named = dict(enumerate(SCHEMES))
    return Cell(
        ranks=ranks,
        family=family,
        depth=depth,
        seconds={scheme: statistics.median(seconds[scheme]) for scheme in SCHEMES},
        ratios={
            scheme: statistics.median(
                other / block for other, block in zip(seconds[scheme], seconds["block"], strict=True)
            )
            for scheme in TARGETS
        },
        bytes_over_minimum={
            scheme: statistics.median(
                sum(rank[index].sent_bytes for rank in by_rank) / minimum_bytes(plan)
                for plan, by_rank in zip(plans, results, strict=True)
            )
            for index, scheme in named.items()
        },
        megabytes_sent={scheme: total(index, "sent_bytes") / 1e6 for index, scheme in named.items()},
        busiest_megabytes={
            scheme: statistics.median(
                max(rank[index].sent_bytes for rank in by_rank) / 1e6 for by_rank in results
            )
            for index, scheme in named.items()
        },
        calls={scheme: most(index, "calls") for index, scheme in named.items()},
        minimum_calls=max(minimum_calls(plan, rank) for plan in plans for rank in range(ranks)),
        median_call_kilobytes={
            scheme: statistics.median(
                size for by_rank in results for rank in by_rank for size in rank[index].call_bytes
            )
            / 1e3
            for index, scheme in named.items()
        },
        extra_megabytes={
            scheme: (most(index, "padding_bytes") + most(index, "scratch_bytes")) / 1e6
            for index, scheme in named.items()
        },
        difference=max(result.difference for by_rank in results for rank in by_rank for result in rank),
    )
