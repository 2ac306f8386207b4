"""`eth plan`: find a plan and show it, without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.profile.table import ProfileTable
    from planner.request import PlanRequest


def plan(
    model: Annotated[str, typer.Argument(help="preset, or a file: ours or Hugging Face's config.json")],
    cluster: Annotated[
        str, typer.Option(help="nodes x devices : type, as in 4x8:910B2,4x8:910B4, or a cluster file")
    ],
    global_batch_size: Annotated[int, typer.Option(min=1, help="samples an iteration")],
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="tokens a sample [default: the model's longest]")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="of parameters and activations: bf16, fp16 or fp32")
    ] = "bf16",
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
    profiles: Annotated[
        Path | None, typer.Option(help="folder of measured or imported profiles [default: datasheets]")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="show so many distinct plans, the best first")] = 1,
    explain: Annotated[
        bool, typer.Option("--explain", help="say what limits the plan and why it beats the others")
    ] = False,
) -> None:
    """Find the plan of least predicted iteration time for MODEL on a cluster, and show it as a table."""
    from eth_service.commands.common import console, make_request, progress, write_text
    from planner.search import find_plans

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
        command="eth plan",
    )
    found = find_plans(request, most=max(top, 2 if explain else 1), profile=profile, progress=progress)
    if json_file is not None:
        write_text(found[0].model_dump_json(indent=2), json_file)
    for number, one in enumerate(found[:top], start=1):
        if top > 1:
            console().print(f"Plan {number} of {min(top, len(found))}")
        _show(one)
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
    comparison = compare(request, strategies=others, profile=profile, progress=progress)
    ample = with_ample_memory(request, profile=profile, progress=progress)
    out = console()
    for line in limit_lines(found[0], ample=ample, profile=profile):
        out.print(line, soft_wrap=True)
    for line in against_lines(found[0], runners_up=found[1:], comparison=comparison, profile=profile):
        out.print(line, soft_wrap=True)


def _show(plan: Plan) -> None:
    from rich.table import Table

    from eth_service.commands.common import console, title
    from planner.describe import coarse_words, describe, gap_words, search_words
    from planner.units import format_bytes, format_seconds

    shown = describe(plan)
    table = Table(title=title(plan), title_justify="left", pad_edge=False)
    for column in ("Pipeline", "Stage", "Devices", "TP/DP", "Rows"):
        table.add_column(column, no_wrap=column != "Pipeline")
    for column in ("#L", "Recompute", "Forward", "Backward", "Memory / limit"):
        table.add_column(column, justify="right", no_wrap=True)
    for pipeline in shown.pipelines:
        table.add_section()
        words = f"{pipeline.name}\nMbs={pipeline.micro_batch_size} Lbs={pipeline.local_batch_size}"
        for stage in pipeline.stages:
            table.add_row(
                words,
                stage.stages,
                stage.devices,
                stage.tp_dp,
                stage.rows,
                stage.layers,
                stage.recompute,
                format_seconds(stage.forward_seconds),
                format_seconds(stage.backward_seconds),
                f"{format_bytes(stage.memory_bytes)} / {format_bytes(stage.memory_limit_bytes)}",
            )
            words = ""
    out = console()
    out.print(table)
    for line in _lines(plan):
        out.print(line, soft_wrap=True)
    for words in (gap_words(plan), coarse_words(plan), search_words(plan)):
        if words:
            out.print(words, soft_wrap=True)


def _lines(plan: Plan) -> list[str]:
    """What the table does not say: times of pipelines and iteration, balance, idle devices."""
    from planner.describe import describe
    from planner.units import format_seconds

    predicted, shown = plan.predicted, describe(plan)
    assert predicted is not None
    lines = [
        f"{pipeline.name}: {pipeline.samples} samples{' each' if len(pipeline.ids) > 1 else ''},"
        f" {pipeline.samples_per_second:.3g} samples/s, work ends at {format_seconds(pipeline.end_seconds)}"
        for pipeline in shown.pipelines
    ]
    balance = shown.balance
    if len(plan.pipelines) > 1:
        lines.append(f"Pipelines end their work within {balance.pipeline_spread:.1%} of each other.")
    lines.append(f"Stages of a pipeline differ by up to {balance.stage_spread:.1%} in time per micro-batch.")
    simulated = predicted.simulated_seconds
    lines.append(
        f"Predicted iteration: {format_seconds(predicted.iteration_seconds)},"
        f" of which gradient blocks {format_seconds(balance.sync_seconds)}"
        f" and optimizer {format_seconds(predicted.optimizer_seconds)};"
        f" {predicted.samples_per_second:.4g} samples/s,"
        f" {predicted.samples_per_second * plan.sequence_length:.4g} tokens/s"
        + ("" if simulated is None else f" (replayed event by event: {format_seconds(simulated)})")
    )
    if plan.idle_devices:
        lines.append(f"Idle, since they would not make the iteration shorter: {', '.join(plan.idle_devices)}")
    return lines
