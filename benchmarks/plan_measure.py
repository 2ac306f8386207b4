"""What the planning benchmarks share: one request planned in a process of its own, and what that took."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from planner.compare import Comparison, compare
from planner.request import PlanRequest
from planner.why import TERM_WORDS

PEERS = ("metis", "hexiscale", "type-split", "uniform")
Row = dict[str, Any]


def in_own_process(make: Callable[[], PlanRequest], *, peers: Sequence[str], profiles: Path | None) -> Row:
    """`measured` in a fresh process, so that memory and caches are this row's alone."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measured, make(), tuple(peers), profiles).result()


def measured(request: PlanRequest, peers: Sequence[str], profiles: Path | None) -> Row:
    """The plan of `eth` with its bound, what finding both took in CPU seconds and memory, then the peers."""
    table = None
    if profiles is not None:
        from planner.profile.use import with_profiles

        request, table, _ = with_profiles(request, profiles)
    started = time.process_time()
    ours = compare(request, strategies=["eth"], profile=table)
    cpu_seconds = time.process_time() - started
    # Kilobytes on Linux.
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    theirs = compare(request, strategies=peers, profile=table).rows if peers else ()
    found = Comparison((*ours.rows, *theirs), ours.ideal_seconds, ours.achieved_flops)
    row: Row = {
        "model": request.model.name,
        "devices": len(request.cluster.devices),
        "cluster": ", ".join(f"{count} x {name}" for name, count in request.cluster.counts.items()),
        "global_batch_size": request.global_batch_size,
        "ideal_seconds": found.ideal_seconds,
        "cpu_seconds": round(cpu_seconds, 3),
        "peak_bytes": peak_bytes,
    }
    return row | _ours(found) | {"peers": [_theirs(found, name) for name in peers]}


def _ours(found: Comparison) -> Row:
    own = found.rows[0]
    if own.plan is None or own.terms is None:
        return {"reason": own.reason, "iteration_seconds": None}
    predicted, search = own.plan.predicted, own.plan.search or {}
    assert predicted is not None
    bound = predicted.lower_bound_seconds
    return {
        "iteration_seconds": predicted.iteration_seconds,
        "simulated_seconds": predicted.simulated_seconds,
        "lower_bound_seconds": bound,
        "gap": predicted.iteration_seconds / bound - 1 if bound else None,
        "over_ideal": predicted.iteration_seconds / found.ideal_seconds,
        "plan_seconds": search.get("seconds"),
        "bound_seconds": search.get("bound_seconds"),
        "found_by": search.get("found_by"),
        "zero_stage": own.plan.zero_stage,
        "recomputes": any(stage.recompute for p in own.plan.pipelines for stage in p.stages),
        "pipelines": len(own.plan.pipelines),
        "idle_devices": len(own.plan.idle_devices),
        "terms": asdict(own.terms),
    }


def _theirs(found: Comparison, name: str) -> Row:
    """A peer's ratio, and the term that explains most of it."""
    row = next(row for row in found.rows if row.strategy == name)
    difference = found.main_difference(row)
    return {
        "strategy": name,
        "iteration_seconds": row.seconds,
        "ratio": found.ratio(row),
        "term": None if difference is None else difference[0],
        "term_seconds": None if difference is None else difference[1],
        "reason": row.reason or None,
    }


def show_header(*, peers: Sequence[str]) -> None:
    """The columns of `show`."""
    print(
        f"{'model':<12} {'cluster':<26} {'iteration':>9} {'ideal':>8} {'bound':>8} {'gap':>6} {'plan':>7}"
        f" {'bounding':>8} {'memory':>8} {'found by':<10} "
        + "".join(f" {'/ ' + name:>12} {'because of':<20}" for name in peers),
        flush=True,
    )


def show(row: Row) -> None:
    """One line of the table; CPU seconds."""
    start = f"{row['model']:<12} {row['cluster']:<26} "
    if row["iteration_seconds"] is None:
        print(start + str(row["reason"]), flush=True)
        return
    print(
        start + f"{row['iteration_seconds']:>8.3f}s {row['ideal_seconds']:>7.3f}s"
        f" {_or_none(row['lower_bound_seconds'], '.3f', 's'):>8} {_or_none(row['gap'], '.1%', ''):>6}"
        f" {row['plan_seconds']:>6.2f}s {_or_none(row['bound_seconds'], '.2f', 's'):>8}"
        f" {row['peak_bytes'] / 2**20:>5.0f}MiB {row['found_by'] or '':<10} "
        + "".join(_peer_cells(peer) for peer in row["peers"]),
        flush=True,
    )


def _or_none(value: float | None, form: str, unit: str) -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _peer_cells(peer: Row) -> str:
    if peer["ratio"] is None:
        return f" {'-':>12} {'does not fit':<20}"
    words = TERM_WORDS[peer["term"]] if peer["ratio"] > 1 + 1e-6 and peer["term"] else ""
    return f" {peer['ratio']:>12.3f} {words:<20.20}"


def worst_ratio(rows: Sequence[Row], peers: Sequence[str]) -> dict[str, float | None]:
    """The least ratio of each peer: below 1 it was better than `eth` somewhere."""
    found: dict[str, float | None] = {}
    for name in peers:
        ratios = [
            peer["ratio"]
            for row in rows
            for peer in row["peers"]
            if peer["strategy"] == name and peer["ratio"]
        ]
        found[name] = min(ratios, default=None)
    return found
