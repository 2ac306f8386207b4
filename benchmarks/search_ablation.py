"""What each part of the paper's search is worth (its Fig. 13): all off, +cache, +skipping, +order, +dp, then the
exact solver; and the tolerance `alpha` of early skipping from 0.5 to 4. Plan quality stands beside each time.

* 4 + 4 devices, in full: every row looks at all device groups and may evaluate what it likes.
* 32 + 32 devices, where there are 1.7e12 device groups: every row has the same number of evaluations, and shows the
  best plan until then and the part of all groups it covers.

Seconds are CPU seconds of one core. `evaluations` are pipeline configurations; a device group looked at counts as
many as it has pipelines, a whole plan's price as many as there are devices. All rows but the last leave out the
exact solver. Its row is the product's default: the solver's plan, refined. One JSON line last.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from planner.cluster import from_short_form
from planner.model_spec import PRESETS
from planner.plan import Plan
from planner.request import PlanRequest
from planner.search import find_plan
from planner.search.control import SearchControl, SearchOptions

# Rows in the order of the paper's figure: the parts that are still off.
ROWS = (
    ("all off", ("cache", "skipping", "order", "dp")),
    ("+cache", ("skipping", "order", "dp")),
    ("+skipping", ("order", "dp")),
    ("+order", ("dp",)),
    ("+dp", ()),
)
ALPHAS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
FEW_ALPHAS = (0.5, 1.0, 2.0, 4.0)
UNLIMITED = 10**9
GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH = 1024, 2048


@dataclass(frozen=True)
class Job:
    """A model on a cluster; `evaluations` for each row, UNLIMITED for a complete search."""

    name: str
    model: str
    cluster: str
    evaluations: int

    def request(self) -> PlanRequest:
        return PlanRequest(
            model=PRESETS[self.model],
            cluster=from_short_form(self.cluster),
            global_batch_size=GLOBAL_BATCH_SIZE,
            sequence_length=SEQUENCE_LENGTH,
            # One ZeRO stage, so that each row goes over the device groups once.
            zero_stages=(1,),
            bound=False,
        )


@dataclass(frozen=True)
class Row:
    """One search."""

    job: str
    parts: str
    alpha: float
    cpu_seconds: float
    iteration_seconds: float
    evaluations: int
    to_best: int
    """Evaluations until the main search had its best plan."""
    device_groups: int
    skipped: int
    pipelines_searched: int
    cache_hits: int
    arrangements: int
    covered: float | None
    """Of all device groups, the part that was looked at or is a cut of the sorted devices."""
    complete: bool


def search(job: Job, parts: str, *, without: Sequence[str], alpha: float) -> Row:
    """One row, timed on a clean slate."""
    request = job.request()
    options = SearchOptions(frozenset(without), alpha=alpha, evaluations=job.evaluations)
    gc.collect()
    start = time.process_time()
    plan = find_plan(request, control=SearchControl(options))
    return _row(job.name, parts, alpha, time.process_time() - start, plan)


def exact(job: Job) -> Row:
    """The default strategy without bound and peers."""
    gc.collect()
    start = time.process_time()
    plan = find_plan(job.request(), control=SearchControl(SearchOptions(frozenset({"peers"}))))
    return _row(job.name, "exact solver, refined", 0.0, time.process_time() - start, plan)


def _row(job: str, parts: str, alpha: float, seconds: float, plan: Plan) -> Row:
    assert plan.search is not None and plan.predicted is not None
    found = plan.search
    return Row(
        job=job,
        parts=parts,
        alpha=alpha,
        cpu_seconds=round(seconds, 2),
        iteration_seconds=plan.predicted.iteration_seconds,
        evaluations=found["evaluations"],
        to_best=found.get("evaluations_to_best", 0),
        device_groups=found.get("device_groups_seen", 0),
        skipped=found.get("device_groups_skipped", 0),
        pipelines_searched=found.get("pipelines_searched", 0),
        cache_hits=found.get("cache_hits", 0),
        arrangements=found.get("arrangements", 0),
        covered=found.get("fraction_covered"),
        complete=found.get("complete", False),
    )


def head(job: Job) -> None:
    """The job, and what the columns are."""
    print(f"\n{job.model} on {job.cluster}: global batch {GLOBAL_BATCH_SIZE}, sequence {SEQUENCE_LENGTH}")
    print(
        f"{'parts':<22}{'alpha':>6}{'CPU s':>9}{'iteration s':>13}{'evaluations':>13}{'to best':>9}{'groups':>8}"
        f"{'skipped':>9}{'searched':>10}{'cached':>8}{'rows':>6}{'covered':>10}",
        flush=True,
    )


def shown(row: Row) -> Row:
    """The row, printed."""
    covered = "-" if row.covered is None else f"{row.covered:.3g}"
    alpha = f"{row.alpha:g}" if row.alpha else "-"
    print(
        f"{row.parts:<22}{alpha:>6}{row.cpu_seconds:>9.2f}{row.iteration_seconds:>13.4f}"
        f"{row.evaluations:>13}{row.to_best:>9}{row.device_groups:>8}{row.skipped:>9}{row.pipelines_searched:>10}"
        f"{row.cache_hits:>8}{row.arrangements:>6}{covered:>10}",
        flush=True,
    )
    return row


def rows_of(job: Job) -> list[Row]:
    """The ablation and the tolerances of one job."""
    head(job)
    found = [
        shown(search(job, name, without=["exact", *off], alpha=SearchOptions.alpha)) for name, off in ROWS
    ]
    found.append(shown(exact(job)))
    complete = job.evaluations == UNLIMITED
    for name, off in (ROWS[-2], ROWS[-1]) if complete else (ROWS[-1],):
        for alpha in ALPHAS if complete else FEW_ALPHAS:
            found.append(shown(search(job, name, without=["exact", *off], alpha=alpha)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evaluations", type=int, default=100_000, help="for each row on 32 + 32 devices")
    parser.add_argument("--only", choices=("4+4", "32+32"), help="one of the two clusters")
    arguments = parser.parse_args()
    jobs = [
        Job("4+4", "gpt3-1.3b", "2x2:910B2,2x2:910B4", UNLIMITED),
        Job("32+32", "gpt3-13b", "4x8:910B2,4x8:910B4", arguments.evaluations),
    ]
    # Imports and first calls are not what is compared.
    search(Job("warm up", "gpt3-350m", "1x1:910B2,1x1:910B4", 500), "", without=["exact"], alpha=1.5)
    rows = [row for job in jobs if arguments.only in (None, job.name) for row in rows_of(job)]
    print(json.dumps({"benchmark": "search_ablation", "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
