"""A plan on the terminal: its table (actors/plan_table.py), and the lines below it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.describe import Description
    from planner.plan import Plan, Predicted

# Idle devices that are named one by one.
_MOST_NAMED = 8


def show_plan(plan: Plan) -> None:
    """Print a priced plan."""
    from actors.plan_table import plan_table
    from eth_service.commands.common import console, title
    from planner.describe import coarse_words, describe, gap_words, search_words

    shown = describe(plan)
    out = console()
    out.print(plan_table(plan, shown=shown, title=title(plan)))
    for line in _lines(plan, shown):
        out.print(line, soft_wrap=True)
    for words in (gap_words(plan), coarse_words(plan), search_words(plan)):
        if words:
            out.print(words, soft_wrap=True)


def _lines(plan: Plan, shown: Description) -> list[str]:
    """What the table does not say: ZeRO, times of pipelines and iteration, balance, cost, idle devices."""
    from actors.plan_table import saver_lines
    from planner.units import format_seconds

    predicted = plan.predicted
    assert predicted is not None
    lines = saver_lines(plan)
    lines += [
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
    if predicted.cost_per_million_tokens is not None:
        lines.append(_cost_line(plan, predicted))
    if plan.idle_devices:
        lines.append(_idle_line(plan))
    return lines


def _cost_line(plan: Plan, predicted: Predicted) -> str:
    from planner.prices import price_per_hour

    words = (
        f"Cost: {predicted.cost_per_million_tokens:.4g} per million tokens; the devices used cost"
        f" {price_per_hour(plan):.4g} an hour"
    )
    return f"{words}, idle ones nothing." if plan.idle_devices else f"{words}."


def _idle_line(plan: Plan) -> str:
    from planner.describe import idle_words

    why = (
        "Released, since they would make tokens dearer"
        if plan.objective == "cost"
        else "Idle, since they would not make the iteration shorter"
    )
    return f"{why}: {idle_words(plan, most=_MOST_NAMED)}"
