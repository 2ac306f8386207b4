"""`eth plan`: find a plan and show it, without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eth_service.commands import options

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.profile.table import ProfileTable
    from planner.request import PlanRequest


def plan(
    model: options.Model,
    cluster: options.ClusterOption,
    global_batch_size: options.GlobalBatchSize,
    sequence_length: options.SequenceLength = None,
    precision: options.PrecisionOption = "bf16",
    strategy: Annotated[str, typer.Option(help="how to search")] = "eth",
    memory_scale: Annotated[
        float, typer.Option(help="device bytes that one byte counts for, as in an emulated run")
    ] = 1.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write the plan here, for a job's `plan:`")
    ] = None,
    equal_batches: Annotated[
        bool, typer.Option("--equal-batches", help="the same number of samples for every pipeline")
    ] = False,
    profiles: options.Profiles = None,
    objective: options.Objective = "time",
    throughput_floor: options.ThroughputFloor = None,
    price: options.Price = None,
    no_recompute: options.NoRecompute = False,
    zero: options.Zero = "0,1,2",
    without: options.Without = None,
    alpha: Annotated[
        float | None, typer.Option(help="tolerance of the approximate bound of early skipping [default: 1.5]")
    ] = None,
    evaluations: Annotated[
        int | None, typer.Option(help="configurations that the paper's search may evaluate")
    ] = None,
    time_budget: Annotated[
        float | None, typer.Option(help="seconds after which the best plan so far will do")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="show so many distinct plans, the best first")] = 1,
    explain: Annotated[
        bool, typer.Option("--explain", help="say what limits the plan and why it beats the others")
    ] = False,
) -> None:
    """Find the best plan for MODEL on a cluster, and show it as a table.

    The best is of least predicted iteration time, or of least cost of a token.
    """
    from eth_service.commands.common import (
        check_writable,
        console,
        make_request,
        progress,
        tell,
        write_text,
    )
    from eth_service.commands.plan_table import show_plan
    from planner.search import find_plans
    from planner.search.control import SearchControl, SearchOptions, SearchStopped
    from planner.search.stopping import stopped_words

    check_writable(json_file)
    chosen = SearchOptions.named(without or (), alpha=alpha, evaluations=evaluations, time_budget=time_budget)
    request, profile = make_request(
        model,
        cluster=cluster,
        global_batch_size=global_batch_size,
        sequence_length=sequence_length,
        precision=precision,
        strategy=strategy,
        memory_scale=memory_scale,
        equal_batches=equal_batches,
        profiles=profiles,
        objective=objective,
        throughput_floor=throughput_floor,
        prices=price or (),
        recompute=not no_recompute,
        zero=zero,
        sequence_parallel=chosen.on("sequence_parallel"),
        command="eth plan",
    )
    control = SearchControl(chosen, progress=progress, interruptible=True)
    try:
        found = find_plans(request, most=max(top, 2 if explain else 1), profile=profile, control=control)
    except SearchStopped as stopped:
        tell(str(stopped))
        raise typer.Exit(130) from None
    if json_file is not None:
        write_text(found[0].model_dump_json(indent=2), json_file)
    for number, one in enumerate(found[:top], start=1):
        if top > 1:
            console().print(f"Plan {number} of {min(top, len(found))}")
        show_plan(one)
    if words := stopped_words(found[0].search):
        console().print(words, soft_wrap=True)
    if len(found) < top:
        console().print(f"The search priced no more distinct plans than {len(found)}.")
    if explain:
        _explain(request, found, profile)


def _explain(request: PlanRequest, found: list[Plan], profile: ProfileTable | None) -> None:
    """What limits the best plan, and why it beats the runner-up and the other strategies."""
    from eth_service.commands.common import console, progress
    from planner.compare import compare
    from planner.search import strategy_names
    from planner.why import against_lines, limit_lines, with_ample_memory

    others = [name for name in strategy_names() if name != request.strategy]
    unbounded = request.model_copy(update={"bound": False})
    comparison = compare(unbounded, strategies=others, profile=profile, progress=progress)
    ample = None
    if request.objective == "time":
        ample = with_ample_memory(request, profile=profile, progress=progress)
    out = console()
    for line in limit_lines(found[0], ample=ample, profile=profile):
        out.print(line, soft_wrap=True)
    for line in against_lines(found[0], runners_up=found[1:], comparison=comparison, profile=profile):
        out.print(line, soft_wrap=True)
