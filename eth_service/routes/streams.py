"""Server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from sse_starlette import EventSourceResponse, ServerSentEvent

from eth_service.errors import problem_responses
from eth_service.jobs import Jobs
from eth_service.routes.jobs import Service

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"])

_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events `metrics` (one row; its id is the iteration) and at last `end`",
        "content": {"text/event-stream": {}},
    }
}


@router.get(
    "/{job_id}/metrics/stream",
    responses=_RESPONSES | problem_responses(404, 422),
    response_class=EventSourceResponse,
)
async def stream_metrics(
    request: Request,
    jobs: Service,
    job_id: str,
    since: Annotated[int, Query(ge=0, description="only iterations after this one")] = 0,
    last_event_id: Annotated[int | None, Header(ge=0, description="where a lost stream goes on")] = None,
) -> EventSourceResponse:
    """The rows of /metrics as they come, until the job ends."""
    await run_in_threadpool(jobs.get, job_id)
    start = since if last_event_id is None else last_event_id
    poll_seconds = request.app.state.settings.poll_seconds
    return EventSourceResponse(_rows(jobs, job_id, since=start, poll_seconds=poll_seconds))


async def _rows(
    jobs: Jobs, job_id: str, *, since: int, poll_seconds: float
) -> AsyncIterator[ServerSentEvent]:
    while True:
        part = await run_in_threadpool(jobs.metrics, job_id, since=since, limit=500)
        for row in part.rows:
            yield ServerSentEvent(row.model_dump_json(), event="metrics", id=str(row.iteration))
        since = part.next_since
        if part.complete:
            yield ServerSentEvent("{}", event="end", id=str(since))
            return
        if not part.rows:
            await asyncio.sleep(poll_seconds / 2)
