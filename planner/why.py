"""Why a plan is as quick as it is: what limits it, and what it gains over the runner-up and the peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.compare import Comparison, Row
from planner.describe import used_words
from planner.errors import UserError
from planner.explain import causes, fullest_share, slowest_stage, terms_of
from planner.plan import Plan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search import find_plan
from planner.units import format_seconds

# Terms of planner.explain as people say them.
TERM_WORDS = {
    "ideal": "compute-only ideal",
    "operators": "slower operators",
    "pipeline_imbalance": "imbalance between pipelines",
    "stage_imbalance": "imbalance between stages",
    "bubbles": "bubbles (fill and drain)",
    "recompute": "recomputation",
    "tensor_parallel": "TP collectives",
    "exchange": "exchange between stages",
    "gradient_sync": "gradient synchronisation",
    "gradient_scatter": "scattering gradients (ZeRO-2)",
    "optimizer": "optimizer",
    "idle_devices": "idle devices",
}
_CAUSE_WORDS = {
    "compute": "compute (operators and optimizer)",
    "memory": "memory (recomputation)",
    "link": "links (TP collectives, exchange, gradients)",
    "granularity": "granularity (uneven pipelines and stages, bubbles, idle devices)",
}
# A plan this much quicker with ample memory is limited by memory.
_MEMORY_MATTERS = 0.002
_SAME = 1e-6


def limit_lines(plan: Plan, *, ample: Plan | None, profile: ProfileTable | None = None) -> list[str]:
    """What the iteration is made of, what paces it, and what memory costs it.

    `ample` is the plan for the same devices with memory without end; None if it is not known.
    """
    assert plan.predicted is not None
    seconds, terms = plan.predicted.iteration_seconds, terms_of(plan, profile=profile)
    shares = ", ".join(
        f"{_CAUSE_WORDS[cause]} {spent / seconds:.1%}" for cause, spent in causes(terms).items()
    )
    lost = {name: value for name, value in vars(terms).items() if name != "ideal"}
    largest = sorted(lost.items(), key=lambda item: -item[1])[:3]
    losses = ", ".join(f"{TERM_WORDS[name]} {format_seconds(value)}" for name, value in largest if value > 0)
    lines = [
        f"The iteration is {shares}.",
        f"Over the compute-only ideal of {format_seconds(terms.ideal)} it loses most to:"
        f" {losses or 'nothing'}.",
        f"The pace is set by {slowest_stage(plan)}; the fullest device uses {fullest_share(plan):.0%} of its"
        " memory.",
    ]
    return lines + _memory_lines(seconds, ample)


def _memory_lines(seconds: float, ample: Plan | None) -> list[str]:
    if ample is None or ample.predicted is None:
        return []
    other = ample.predicted.iteration_seconds
    if other < seconds * (1 - _MEMORY_MATTERS):
        return [
            f"Memory limits it: with ample memory these devices would take {format_seconds(other)}"
            f" ({other / seconds - 1:+.1%})."
        ]
    return ["Memory does not limit it: ample memory would not make it quicker."]


def with_ample_memory(
    request: PlanRequest,
    *,
    profile: ProfileTable | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan | None:
    """The plan for the same devices, if nothing that they hold took room; None where that fails."""
    emulation = request.emulation.model_copy(update={"memory_scale": 1e-6})
    types = {
        name: device.model_copy(update={"memory_bytes": device.memory_bytes * 1000})
        for name, device in request.cluster.device_types.items()
    }
    cluster = request.cluster.model_copy(update={"device_types": types})
    changes = {"emulation": emulation, "cluster": cluster, "bound": False}
    ample = request.model_copy(update=changes)
    try:
        return find_plan(ample, profile=profile, progress=progress)
    except UserError:
        return None


def against_lines(
    plan: Plan, *, runners_up: Sequence[Plan], comparison: Comparison, profile: ProfileTable | None = None
) -> list[str]:
    """One line for the runner-up and for each peer."""
    rows = [Row("the runner-up", other, terms_of(other, profile=profile)) for other in runners_up[:1]] + [
        row for row in comparison.rows if row.strategy != plan.strategy
    ]
    own = Row(plan.strategy, plan, terms_of(plan, profile=profile))
    against = _against if plan.objective == "time" else _dearer
    return [f"Against {row.strategy}{_shape(row)}: {against(own, row)}" for row in rows]


def _shape(row: Row) -> str:
    if row.plan is None:
        return ""
    return f" ({pipeline_words(row.plan)})"


def pipeline_words(plan: Plan) -> str:
    """Pipelines x stages: `4 x 9`, or `1 x 12 + 2 x 13` where pipelines differ in stages."""
    stages = [len(pipeline.stages) for pipeline in plan.pipelines]
    words = " + ".join(f"{stages.count(count)} x {count}" for count in sorted(set(stages)))
    return words + (f", {len(plan.idle_devices)} idle" if plan.idle_devices else "")


def _dearer(own: Row, row: Row) -> str:
    if row.plan is None or row.cost is None or row.seconds is None:
        return row.reason
    assert own.plan is not None and own.cost is not None and own.seconds is not None
    ratio = row.cost / own.cost
    if abs(ratio - 1) < _SAME:
        return "equally dear."
    dear = "as dear" if ratio > 1 else "as dear, so it is CHEAPER"
    return (
        f"{ratio:.3f} times {dear}: {used_words(row.plan)} for {format_seconds(row.seconds)} an iteration,"
        f" here {used_words(own.plan)} for {format_seconds(own.seconds)}."
    )


def _against(own: Row, row: Row) -> str:
    if row.seconds is None or row.terms is None:
        return row.reason
    assert own.seconds is not None and own.terms is not None
    ratio = row.seconds / own.seconds
    if abs(ratio - 1) < _SAME:
        return "equally quick."
    slower = row.terms.minus(own.terms) if ratio > 1 else own.terms.minus(row.terms)
    main = [(name, value) for name, value in slower.items() if value > 0][:2]
    words = " and ".join(f"{TERM_WORDS[name]} ({format_seconds(value)})" for name, value in main)
    if ratio > 1:
        return f"{ratio:.3f} times as long; it loses {words} more."
    return f"{ratio:.3f} times as long, so it is QUICKER; this plan loses {words} more."
