"""`eth predict`: price any plan, item by item, without searching."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eth_service.commands import options

if TYPE_CHECKING:
    from rich.table import Table

    from planner.items import PipelineItems, PlanItems, StageItems
    from planner.plan import PipelinePlan, Plan, StagePlan

# Collectives shown; the longest ones.
_MOST_COLLECTIVES = 8


def predict(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="plan file, JSON or YAML")],
    profiles: options.Profiles = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write the plan with its prediction here")
    ] = None,
) -> None:
    """Price PLAN stage by stage and term by term, and replay it event by event. Nothing is searched."""
    from eth_service.commands.common import check_writable, tell_profiles, write_text
    from planner.cost.price import price_plan
    from planner.items import items_of
    from planner.plan import read_plan
    from planner.prices import with_cost
    from planner.profile.table import ProfileTable
    from planner.simulate import simulate

    check_writable(json_file)
    read, table = read_plan(plan), None
    if profiles is not None:
        from planner.profile.use import with_profiles

        read, table, links = with_profiles(read, profiles)
        read = read.model_copy(update={"profiles": table.sources()})
        tell_profiles(table, links)
    profile: ProfileTable | None = table
    simulated = simulate(read, profile=profile, events=False).iteration_seconds
    predicted = price_plan(read, profile=profile).model_copy(update={"simulated_seconds": simulated})
    priced = with_cost(read.model_copy(update={"predicted": predicted}))
    if json_file is not None:
        write_text(priced.model_dump_json(indent=2), json_file)
    _show(priced, items_of(read, profile=profile), profile)


def _show(plan: Plan, items: PlanItems, profile: object) -> None:
    from eth_service.commands.common import console, title
    from planner.units import format_seconds

    out = console()
    out.print(title(plan), soft_wrap=True)
    for pipeline, found in _distinct(plan, items):
        out.print(_pipeline_table(plan, pipeline, found))
        for line in _pipeline_lines(pipeline[0], found[0]):
            out.print(line, soft_wrap=True)
    if items.gradients:
        out.print(_gradient_table(plan, items))
    assert plan.predicted is not None and plan.predicted.simulated_seconds is not None
    out.print(
        f"Iteration: last backward {format_seconds(items.backward_end)}"
        f" + gradients {format_seconds(items.gradient_end - items.backward_end)}"
        f" + optimizer {format_seconds(items.optimizer)}"
        + (f" + gathering {format_seconds(items.gather)}" if items.gather else "")
        + f" = {format_seconds(items.iteration)};"
        f" {plan.global_batch_size / items.iteration:.4g} samples/s."
        f" Replayed event by event: {format_seconds(plan.predicted.simulated_seconds)}.",
        soft_wrap=True,
    )
    lines = [*_memory_lines(plan, items)]
    if plan.zero_stage:
        lines.append(_zero_line(plan))
    if source := _source_line(plan):
        lines.append(source)
    if plan.predicted.cost_per_million_tokens is not None:
        lines.append(f"Cost: {plan.predicted.cost_per_million_tokens:.4g} per million tokens.")
    for line in lines:
        out.print(line, soft_wrap=True)


def _distinct(plan: Plan, items: PlanItems) -> list[tuple[list[PipelinePlan], list[PipelineItems]]]:
    """Pipelines with equal items together."""
    groups: dict[object, tuple[list[PipelinePlan], list[PipelineItems]]] = {}
    for pipeline, found in zip(plan.pipelines, items.pipelines, strict=True):
        looks = tuple(
            (stage.tp, stage.dp, stage.rows, stage.layers, tuple(stage.recompute.items()))
            for stage in pipeline.stages
        )
        own = groups.setdefault((found, looks, pipeline.samples), ([], []))
        own[0].append(pipeline)
        own[1].append(found)
    return list(groups.values())


def _pipeline_table(plan: Plan, pipelines: list[PipelinePlan], items: list[PipelineItems]) -> Table:
    from rich.table import Table

    first = pipelines[0]
    ids = ", ".join(str(pipeline.id) for pipeline in pipelines)
    table = Table(
        title=f"Pipeline {ids}: {first.samples} samples{' each' if len(pipelines) > 1 else ''},"
        f" micro-batches of {first.micro_batch_size}",
        title_justify="left",
        pad_edge=False,
    )
    for column in ("Stage", "Devices", "TP/DP", "Rows"):
        table.add_column(column, no_wrap=True)
    for column in ("#L", "Forward", "Backward", "Exchange", "Period", "Last backward", "Memory / limit"):
        table.add_column(column, justify="right", no_wrap=True)
    for number, (stage, found) in enumerate(zip(first.stages, items[0].stages, strict=True)):
        table.add_row(str(number), *_stage_cells(plan, stage, found))
    return table


def _stage_cells(plan: Plan, stage: StagePlan, items: StageItems) -> list[str]:
    from planner.describe import device_names
    from planner.units import format_bytes, format_seconds

    rows = str(stage.rows[0]) if len(set(stage.rows)) == 1 else ",".join(map(str, stage.rows))
    sign = "/" if items.fits else ">"
    return [
        device_names(plan, stage),
        f"{stage.tp}/{stage.dp}",
        rows,
        str(stage.layer_count),
        format_seconds(items.forward),
        format_seconds(items.backward),
        format_seconds(items.receive_forward + items.receive_backward),
        format_seconds(items.period),
        format_seconds(items.end),
        f"{format_bytes(items.memory_bytes)} {sign} {format_bytes(items.limit_bytes)}",
    ]


def _pipeline_lines(pipeline: PipelinePlan, items: PipelineItems) -> list[str]:
    from planner.units import format_seconds

    inside = []
    for number, (stage, found) in enumerate(zip(pipeline.stages, items.stages, strict=True)):
        if found.recompute:
            counts = ", ".join(f"{count} {name}" for name, count in stage.recompute.items() if count)
            inside.append(
                f"Stage {number} recomputes {counts}: {format_seconds(found.recompute)} of its backward."
            )
        if found.scatter:
            inside.append(
                f"Stage {number} reduces and scatters its gradients over its replicas (ZeRO-2):"
                f" {format_seconds(found.scatter)} of its backward."
            )
    return [
        *inside,
        f"Fill {format_seconds(items.fill)} + {items.micro_batches - 1} x period"
        f" {format_seconds(items.period)} + drain {format_seconds(items.drain)}"
        f" = {format_seconds(items.end)}",
    ]


def _zero_line(plan: Plan) -> str:
    scope = "all holders of a block" if plan.zero_scope == "all" else "the replicas of a stage"
    what = "optimizer state" if plan.zero_stage == 1 else "optimizer state and gradients"
    return f"ZeRO-{plan.zero_stage} shares {what}; optimizer state over {scope}."


def _source_line(plan: Plan) -> str | None:
    """What priced the collectives, where it was not the links alone."""
    assert plan.predicted is not None
    told = []
    for name, sources in (
        ("of gradients", plan.predicted.gradient_collectives),
        ("of stages with TP", plan.predicted.tp_collectives),
    ):
        if sources is not None and (sources.measured or sources.operators):
            counts = (
                (sources.measured, "by measured times"),
                (sources.operators, "within the operators' measured times"),
                (sources.links, "by the links"),
            )
            told.append(f"{name} " + ", ".join(f"{count} {how}" for count, how in counts if count))
    return f"Collectives: {'; '.join(told)}." if told else None


def _gradient_table(plan: Plan, items: PlanItems) -> Table:
    from rich.table import Table

    from planner.units import format_bytes, format_seconds

    longest = sorted(items.gradients, key=lambda item: item.start - item.end)[:_MOST_COLLECTIVES]
    more = len(items.gradients) - len(longest)
    table = Table(
        title=f"Gradient collectives ({plan.gradient_sync})"
        + (f", the longest {len(longest)} of {len(items.gradients)}" if more else ""),
        title_justify="left",
        pad_edge=False,
    )
    table.add_column("Ranks")
    for column in ("Bytes", "Seconds", "Start", "End"):
        table.add_column(column, justify="right", no_wrap=True)
    for item in sorted(longest, key=lambda item: (item.start, item.ranks)):
        table.add_row(
            _rank_words(item.ranks),
            format_bytes(item.message_bytes),
            format_seconds(item.end - item.start),
            format_seconds(item.start),
            format_seconds(item.end),
        )
    return table


def _rank_words(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:4]))} ... {ranks[-1]} ({len(ranks)})"


def _memory_lines(plan: Plan, items: PlanItems) -> list[str]:
    """A line for every stage that does not fit."""
    from planner.units import format_bytes

    return [
        f"DOES NOT FIT: stage {number} of pipeline {index} needs"
        f" {format_bytes(stage.memory_bytes - stage.limit_bytes)} more than its devices have"
        for index, pipeline in enumerate(items.pipelines)
        for number, stage in enumerate(pipeline.stages)
        if not stage.fits
    ]
