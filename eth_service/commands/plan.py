"""`eth plan`: find a plan and show it, without training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from planner.plan import Plan


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
) -> None:
    """Find the plan of least predicted iteration time for MODEL on a cluster, and show it as a table."""
    from planner.cluster import resolve_cluster
    from planner.errors import parse
    from planner.model_spec import resolve_model
    from planner.request import PlanRequest
    from planner.search import find_plan

    spec = resolve_model(model)
    request = parse(
        PlanRequest,
        {
            "model": spec,
            "cluster": resolve_cluster(cluster),
            "global_batch_size": global_batch_size,
            "sequence_length": sequence_length or spec.max_sequence_length,
            "dtypes": {"param": precision},
            "strategy": strategy,
            "emulation": {"memory_scale": memory_scale},
            "equal_batches": equal_batches,
        },
        source="eth plan",
    )
    found = find_plan(request, progress=_progress)
    if json_file is not None:
        _write(found, json_file)
    _show(found)


def _progress(message: str) -> None:
    print(f"eth: {message}", file=sys.stderr, flush=True)


def _write(plan: Plan, path: Path) -> None:
    from planner.errors import UserError

    try:
        path.write_text(plan.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json = {path} cannot be written: {error.strerror}; choose another file") from None


def _show(plan: Plan) -> None:
    from rich.table import Table

    from planner.describe import coarse_words, describe, search_words
    from planner.units import format_bytes, format_seconds

    shown = describe(plan)
    table = Table(title=_title(plan), title_justify="left", pad_edge=False)
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
    console = _console()
    console.print(table)
    for line in _lines(plan):
        console.print(line, soft_wrap=True)
    for words in (coarse_words(plan), search_words(plan)):
        if words:
            console.print(words, soft_wrap=True)


def _title(plan: Plan) -> str:
    counts = ", ".join(f"{count} x {type_}" for type_, count in plan.cluster.counts.items())
    return (
        f"{plan.model.name} on {counts}: global batch {plan.global_batch_size},"
        f" sequence {plan.sequence_length}, {plan.dtypes.param}"
    )


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


def _console() -> Console:
    from rich.console import Console

    # Piped output has no width of its own; 80 columns would break the table.
    return Console(width=None if sys.stdout.isatty() else 130, highlight=False)
