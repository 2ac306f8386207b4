"""A plan as a terminal's table, in the manner of the paper's Table 3."""

from __future__ import annotations

from rich.table import Table

from planner.describe import Description, describe, recompute_legend, sequence_parallel_words, zero_words
from planner.plan import Plan
from planner.units import format_bytes, format_seconds


def plan_table(plan: Plan, *, shown: Description | None = None, title: str | None = None) -> Table:
    """A priced plan (or what `describe` found of it); stages and pipelines that are alike share a row."""
    table = Table(title=title, title_justify="left", pad_edge=False)
    for column in ("Pipeline", "Stage", "Devices", "TP/DP", "Rows"):
        table.add_column(column, no_wrap=column != "Pipeline")
    for column in ("#L", "Recompute", "Forward", "Backward", "Memory / limit"):
        table.add_column(column, justify="right", no_wrap=column != "Recompute")
    for pipeline in (shown or describe(plan)).pipelines:
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
    return table


def saver_lines(plan: Plan) -> list[str]:
    """How the plan saves memory: what SP and the letters of the column Recompute stand for, what ZeRO shares."""
    found = (sequence_parallel_words(plan), recompute_legend(plan), zero_words(plan))
    return [words for words in found if words]
