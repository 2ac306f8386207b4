"""Which relaxation of the lower bound makes the gap between a plan and its bound.

For every row of Table 2 (and, with `--imported`, of the imported profiles) the plan of `eth`, its gap, and the gap
left by the bound with one relaxation tightened alone to what the plan has (`planner/search/exact/tightened.py`), with
all of them, and with all but one: what that one relaxation still costs when the others are gone. A tightened bound
holds for plans of that kind only; it is at most the plan's own seconds, so a gap is never below zero.

Gradients and receiving are tightened to what the solver expects of a plan, not to the plan's own devices: where it
expects too much, the bound ends at the plan's seconds, a gap of zero, and says nothing. Gaps differ by up to 0.2 %
without meaning, since cells of the bound are cut until they are small enough, each bound's apart. Where the
plan has a stage that mixes device types, such stages stay. Not tightened are cells of periods and of seconds after the
last backward, which the bound rounds down by 0.3 %, gradients that are apart for every stage, and fractions of
pipelines. What fractions are worth is estimated apart, on the solver's own tables: `fractions` are the seconds of its
linear program over the chains it found (within 0.3 % of all chains), `whole` those of the best set of whole pipelines
it found by the same tables, so their ratio is what whole pipelines, and a search that is not complete, cost.

Each row is planned and bounded in a process of its own; seconds are CPU seconds. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import imported_profiles
from plan_measure import Row
from table2 import CLUSTERS, MODELS, make_request

from planner.cost.price import iteration_seconds
from planner.cost.zero import stage_ways
from planner.plan import Plan
from planner.request import PlanRequest
from planner.search import find_plan
from planner.search.exact.pool import every_pool
from planner.search.exact.solution import Solution
from planner.search.exact.solve import ExactSolver
from planner.search.exact.strategy import bound_seconds
from planner.search.exact.tightened import ALL_RELAXED, Tightened


def in_own_process(make: Callable[[], PlanRequest], profiles: Path | None, *, but_one: bool) -> Row:
    """`measured` in a fresh process, so that caches are this row's alone."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measured, make(), profiles, but_one=but_one).result()


def measured(request: PlanRequest, profiles: Path | None, *, but_one: bool) -> Row:
    """The plan, and its gap to each bound."""
    table = None
    if profiles is not None:
        from planner.profile.use import with_profiles

        request, table, _ = with_profiles(request, profiles)
    plan = find_plan(request.model_copy(update={"bound": False}), profile=table)
    solver = ExactSolver(request, profile=table)
    solution = solver.solve()
    assert solution is not None, "the solver found nothing, so there is no bound"
    seconds, pool = iteration_seconds(plan), every_pool(request.cluster, request.model)
    prices, bounds = solution.prices_for(pool), []
    for name, tightened in variants(plan, but_one=but_one):
        started = time.process_time()
        least = bound_seconds(solver, pool, prices, upper=seconds, tightened=tightened)
        spent = time.process_time() - started
        bounds.append(
            {
                "tightened": name,
                "bound_seconds": least,
                "gap": seconds / least - 1,
                "cpu_seconds": round(spent, 2),
            }
        )
    return {
        "model": request.model.name,
        "devices": len(request.cluster.devices),
        "iteration_seconds": seconds,
        "pipelines": len(plan.pipelines),
        "zero_stage": plan.zero_stage,
        "mixes_types": mixes_types(plan),
        "bounds": bounds,
    } | pipelines_apart(solution)


def variants(plan: Plan, *, but_one: bool) -> Iterator[tuple[str, Tightened]]:
    """Names and switches of the bounds to compare with a plan; `but_one`: also all but one."""
    yield "nothing", ALL_RELAXED
    every = switches(plan)
    for name, fields in every.items():
        yield name, replace(ALL_RELAXED, **fields)
    together = replace(
        ALL_RELAXED, **{field: to for fields in every.values() for field, to in fields.items()}
    )
    yield "all", together
    if but_one:
        for name, fields in every.items():
            yield (
                f"all but {name}",
                replace(together, **{field: getattr(ALL_RELAXED, field) for field in fields}),
            )


def switches(plan: Plan) -> dict[str, dict[str, Any]]:
    """What the plan has, by relaxation; without those that it shares with every plan or cannot have."""
    ways = max(max(stages) for stages in stage_ways(plan))
    found: dict[str, dict[str, Any]] = {
        "links of gradients": {"gradients": True},
        "holders of gradients": {"pipelines": len(plan.pipelines)},
        "receiving": {"receiving": True},
        "stages of one type": {"one_type": True},
        "whole layers": {"whole_layers": True},
        "optimizer's memory": {"most_ways": ways},
        "one ZeRO stage": {"zero_stage": plan.zero_stage},
    }
    if len(plan.pipelines) <= ALL_RELAXED.pipelines:
        del found["holders of gradients"]
    if mixes_types(plan) or len(plan.cluster.counts) == 1:
        del found["stages of one type"]
    return found


def mixes_types(plan: Plan) -> bool:
    """Whether any stage has devices of several types."""
    types = plan.cluster.device_by_id
    return any(
        len({types[name].type for name in stage.devices}) > 1
        for pipeline in plan.pipelines
        for stage in pipeline.stages
    )


def pipelines_apart(solution: Solution) -> Row:
    """Seconds of the best fractions of pipelines and of the best whole ones, by the solver's tables."""
    fractions = min(one.priced.prices.seconds for one in solution.proposals)
    whole = min(seconds for one in solution.proposals for seconds, _ in one.sets)
    return {
        "fractions_seconds": fractions,
        "whole_seconds": whole,
        "whole_over_fractions": whole / fractions - 1,
    }


def show(row: Row) -> None:
    """A row's gaps, one line each."""
    print(
        f"{row['model']} {row['pair']}: {row['iteration_seconds']:.3f} s, {row['pipelines']} pipelines,"
        f" ZeRO-{row['zero_stage']}; whole pipelines over fractions {row['whole_over_fractions']:.2%}"
        f" ({row['whole_seconds']:.3f} s over {row['fractions_seconds']:.3f} s)"
    )
    for one in row["bounds"]:
        print(
            f"  {one['tightened']:<30} {one['bound_seconds']:>9.3f}s {one['gap']:>7.2%} {one['cpu_seconds']:>7.1f}s",
            flush=True,
        )


def rows_of_table_2(models: list[str], clusters: list[str], *, but_one: bool) -> Iterator[Row]:
    for model in models:
        for name in clusters:
            make = partial(make_request, model, CLUSTERS[name])
            yield {"pair": name} | in_own_process(make, None, but_one=but_one)


def rows_of_imported(models: list[str], root: Path, *, but_one: bool) -> Iterator[Row]:
    """Those of `imported_profiles.py` on two types."""
    for case in imported_profiles.CASES:
        if case.model not in models:
            continue
        types = tuple(type_ for _, type_ in case.folders)
        found = [imported_profiles.imported(root, *folder, case.model) for folder in case.folders]
        with tempfile.TemporaryDirectory() as folder:
            for one in found:
                path = Path(folder) / one.profile.file_name
                path.write_text(one.profile.to_json(), encoding="utf-8")
            make = partial(imported_profiles.make_request, found[0].model, case, types)
            yield {"pair": "/".join(types)} | in_own_process(make, Path(folder), but_one=but_one)


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="of Table 2, separated by commas")
    parser.add_argument("--clusters", default=",".join(CLUSTERS), help="some of them, separated by commas")
    parser.add_argument("--imported", default="", help="models of imported profiles, separated by commas")
    parser.add_argument("--profiles-root", type=Path, default=imported_profiles.PROFILES_ROOT)
    parser.add_argument(
        "--but-one", action="store_true", help="also all tightened but one, which takes longer"
    )
    options = parser.parse_args()
    rows = []
    for found in (
        rows_of_table_2(names(options.models), names(options.clusters), but_one=options.but_one),
        rows_of_imported(names(options.imported), options.profiles_root, but_one=options.but_one),
    ):
        for row in found:
            show(row)
            rows.append(row)
    print(json.dumps({"benchmark": "bound_gap", "rows": rows}))


if __name__ == "__main__":
    main()
