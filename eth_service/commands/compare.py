"""`eth compare`: what every strategy would take on one request, and which cost makes the difference."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eth_service.commands import options

if TYPE_CHECKING:
    from rich.table import Table

    from planner.compare import Comparison, Row
    from planner.request import PlanRequest

STRATEGIES = "eth,metis,hexiscale,type-split,uniform"


def compare(
    model: options.Model,
    cluster: options.ClusterOption,
    global_batch_size: options.GlobalBatchSize,
    sequence_length: options.SequenceLength = None,
    precision: options.PrecisionOption = "bf16",
    strategies: Annotated[str, typer.Option(help="which, separated by commas")] = STRATEGIES,
    profiles: options.Profiles = None,
    objective: options.Objective = "time",
    throughput_floor: options.ThroughputFloor = None,
    price: options.Price = None,
    no_recompute: options.NoRecompute = False,
    zero: options.Zero = "0,1,2",
    without: options.Without = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write the table and all plans here")
    ] = None,
) -> None:
    """Plan MODEL on a cluster with every strategy, on the same cost model, and show them side by side."""
    import json

    from eth_service.commands.common import check_writable, make_request, progress, write_text
    from planner.compare import compare as compare_all
    from planner.search.control import SearchOptions

    check_writable(json_file)
    chosen = SearchOptions.named(without or ())
    request, profile = make_request(
        model,
        cluster=cluster,
        global_batch_size=global_batch_size,
        sequence_length=sequence_length,
        precision=precision,
        profiles=profiles,
        objective=objective,
        throughput_floor=throughput_floor,
        prices=price or (),
        recompute=not no_recompute,
        zero=zero,
        sequence_parallel=chosen.on("sequence_parallel"),
        command="eth compare",
    )
    names = [name.strip() for name in strategies.split(",") if name.strip()]
    found = compare_all(request, strategies=names, profile=profile, progress=progress, options=chosen)
    if json_file is not None:
        write_text(json.dumps(_data(request, found), indent=2), json_file)
    _show(request, found)


def _show(request: PlanRequest, found: Comparison) -> None:
    from eth_service.commands.common import console, title

    out = console()
    out.print(title(request), soft_wrap=True)
    out.print(_strategies(found))
    if any(row.terms for row in found.rows):
        out.print(_terms(found))
    speeds = ", ".join(f"{flops / 1e12:.4g} on {type_}" for type_, flops in found.achieved_flops.items())
    out.print(
        f"Compute-only ideal: {found.ideal_seconds:.4g} s, if every device achieved its best TFLOP/s all the"
        f" time: {speeds}.",
        soft_wrap=True,
    )
    for line in _bound_lines(found):
        out.print(line, soft_wrap=True)


def _bound_lines(found: Comparison) -> list[str]:
    """The proven bound of every plan, where a strategy worked it out."""
    if found.objective == "cost":
        costs = [row.plan.predicted for row in found.rows if row.plan and row.plan.predicted]
        least = [p.lower_bound_cost_per_million_tokens for p in costs]
        cheapest = max((cost for cost in least if cost is not None), default=None)
        if cheapest is None:
            return []
        return [f"No plan that is fast enough costs less than {cheapest:.4g} per million tokens."]
    bounds = [row.plan.predicted for row in found.rows if row.plan and row.plan.predicted]
    known = [p.lower_bound_seconds for p in bounds if p.lower_bound_seconds is not None]
    return [f"No plan of our class is predicted below {max(known):.4g} s."] if known else []


def _strategies(found: Comparison) -> Table:
    from rich.table import Table

    table = Table(pad_edge=False)
    table.add_column("Strategy", no_wrap=True)
    reference = found.reference
    columns = ["Iteration", "Samples/s", f"/ {reference.strategy if reference else 'eth'}", "/ ideal"]
    if _priced(found):
        columns.append("Cost/Mtoken")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("Pipelines x stages", "Fullest"):
        table.add_column(column, no_wrap=column == "Fullest")
    table.add_column("Why it takes longer" if found.objective == "time" else "Devices used")
    for row in found.rows:
        table.add_row(row.strategy, *_cells(found, row))
    return table


def _priced(found: Comparison) -> bool:
    return any(row.cost is not None for row in found.rows)


def _cells(found: Comparison, row: Row) -> list[str]:
    from planner.describe import used_words
    from planner.explain import fullest_share
    from planner.why import pipeline_words

    if row.plan is None or row.seconds is None:
        return ["-"] * (7 if _priced(found) else 6) + [row.reason]
    predicted, ratio = row.plan.predicted, found.ratio(row)
    assert predicted is not None and ratio is not None
    return [
        f"{row.seconds:.4g} s",
        f"{predicted.samples_per_second:.4g}",
        f"{ratio:.3f}",
        f"{row.seconds / found.ideal_seconds:.3f}",
        *([f"{row.cost:.4g}"] if row.cost is not None else []),
        pipeline_words(row.plan),
        f"{fullest_share(row.plan):.0%}",
        _difference_words(found, row) if found.objective == "time" else used_words(row.plan),
    ]


def _difference_words(found: Comparison, row: Row) -> str:
    from planner.why import TERM_WORDS

    difference, ratio = found.main_difference(row), found.ratio(row)
    if difference is None or ratio is None or ratio <= 1 + 1e-6:
        return ""
    name, seconds = difference
    return f"{TERM_WORDS[name]} +{seconds:.3g} s"


def _terms(found: Comparison) -> Table:
    """Rows are terms, columns strategies; seconds."""
    from rich.table import Table

    from planner.why import TERM_WORDS

    known = [row for row in found.rows if row.terms is not None]
    table = Table(title="Where the seconds go", title_justify="left", pad_edge=False)
    table.add_column("", no_wrap=True)
    for row in known:
        table.add_column(row.strategy, justify="right", no_wrap=True)
    for name, words in TERM_WORDS.items():
        values = [getattr(row.terms, name) for row in known]
        if any(abs(value) > 1e-9 for value in values):
            table.add_row(words, *(f"{value:.3f}".replace("-0.000", "0.000") for value in values))
    table.add_section()
    table.add_row("iteration", *(f"{row.seconds:.3f}" for row in known))
    return table


def _data(request: PlanRequest, found: Comparison) -> dict[str, Any]:
    rows = []
    for row in found.rows:
        difference = found.main_difference(row)
        rows.append(
            {
                "strategy": row.strategy,
                "iteration_seconds": row.seconds,
                "cost_per_million_tokens": row.cost,
                "ratio": found.ratio(row),
                "reason": row.reason or None,
                "terms": asdict(row.terms) if row.terms else None,
                "main_difference": dict([difference]) if difference else None,
                "plan": row.plan.model_dump(mode="json") if row.plan else None,
            }
        )
    return {
        "model": request.model.name,
        "global_batch_size": request.global_batch_size,
        "sequence_length": request.sequence_length,
        "precision": request.dtypes.param,
        "objective": found.objective,
        "ideal_seconds": found.ideal_seconds,
        "achieved_flops": found.achieved_flops,
        "rows": rows,
    }
