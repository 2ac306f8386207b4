"""From database rows, plans and metrics to what the REST service answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from eth_service.schemas import JobDetail, JobSummary, MetricsRow, PipelineView, StageView, Transition
from eth_service.store import JobRow
from planner.describe import compute_end_seconds
from planner.plan import PipelinePlan, Plan, PredictedPipeline, StagePlan


def summary(row: JobRow, *, note: str | None, emulated: bool | None, latest: MetricsRow | None) -> JobSummary:
    """`emulated` is what the plan says, None while there is none."""
    return JobSummary(**_summary_fields(row, note=note, emulated=emulated, latest=latest))


def detail(row: JobRow, *, note: str | None, plan: Plan | None, latest: MetricsRow | None) -> JobDetail:
    emulated = plan.cluster.emulated if plan else None
    return JobDetail(
        **_summary_fields(row, note=note, emulated=emulated, latest=latest),
        job=row.document,
        transitions=[
            Transition(state=step.state, time=step.time, attempt=step.attempt, reason=step.reason)
            for step in row.transitions
        ],
        run_folder=row.attempt.folder if row.attempt else None,
        plan=plan,
        pipelines=[] if plan is None else pipeline_views(plan, latest),
        predicted=plan.predicted if plan else None,
        latest=latest,
    )


def pipeline_views(plan: Plan, latest: MetricsRow | None) -> list[PipelineView]:
    """Each pipeline of the plan with what the latest iteration measured of it."""
    predicted = plan.predicted
    iteration_seconds = predicted.iteration_seconds if predicted else None
    views = []
    for index, pipeline in enumerate(plan.pipelines):
        priced = predicted.pipelines[index] if predicted else None
        measured = latest.pipelines[index] if latest and index < len(latest.pipelines) else None
        views.append(
            PipelineView(
                id=pipeline.id,
                samples=pipeline.samples,
                local_batch_size=pipeline.local_batch_size,
                micro_batch_size=pipeline.micro_batch_size,
                stages=_stage_views(plan, pipeline, priced),
                predicted_seconds=compute_end_seconds(priced) if priced else None,
                measured_seconds=measured.end_seconds if measured else None,
                predicted_samples_per_second=pipeline.samples / iteration_seconds
                if iteration_seconds
                else None,
                measured_samples_per_second=measured.samples_per_second if measured else None,
            )
        )
    return views


def _stage_views(plan: Plan, pipeline: PipelinePlan, priced: PredictedPipeline | None) -> list[StageView]:
    return [
        StageView(
            devices=_devices(plan, stage),
            tp=stage.tp,
            dp=stage.dp,
            layers=stage.layers,
            embedding=stage.embedding,
            head=stage.head,
            predicted_bytes=priced.stages[number].device_bytes if priced else None,
            memory_limit_bytes=priced.stages[number].memory_limit_bytes if priced else None,
        )
        for number, stage in enumerate(pipeline.stages)
    ]


def _devices(plan: Plan, stage: StagePlan) -> dict[str, int]:
    return dict(Counter(plan.cluster.device_by_id[device].type for device in stage.devices))


def _summary_fields(
    row: JobRow, *, note: str | None, emulated: bool | None, latest: MetricsRow | None
) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "state": row.state,
        "reason": row.reason,
        "note": note,
        "created_at": row.created_at,
        "state_since": row.state_since,
        "attempt": row.attempt.number if row.attempt else 0,
        "emulated": _says_emulated(row.document) if emulated is None else emulated,
        "stop_requested": row.stop_reason is not None,
        "unreachable_since": row.unreachable_since,
        "iteration": latest.iteration if latest else 0,
        "steps": row.document["training"]["steps"],
        "loss": latest.loss if latest else None,
        "validation": latest.validation if latest else None,
        "samples_per_second": latest.samples_per_second if latest else None,
    }


def _says_emulated(document: dict[str, Any]) -> bool:
    plan = document["plan"]
    cluster = plan["cluster"] if isinstance(plan, dict) else document["cluster"]
    return isinstance(cluster, dict) and any(node["emulate"] for node in cluster["nodes"])
