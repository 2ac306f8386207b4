"""Jobs under /api/v1."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from eth_service.errors import ProblemError, problem_responses
from eth_service.jobs import Jobs
from eth_service.schemas import JobDetail, JobList, JobSummary, LogPart, Metrics
from eth_service.submission import JSON_TYPE, YAML_TYPES, decode_body

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"])

_JOB_FILE = {"schema": {"$ref": "#/components/schemas/Job"}}
_JOB_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "The job file. Relative paths in it start at the service's data root.",
        "content": {JSON_TYPE: _JOB_FILE, YAML_TYPES[0]: _JOB_FILE},
    }
}


def service(request: Request) -> Jobs:
    jobs: Jobs = request.app.state.jobs
    return jobs


async def job_file(request: Request) -> object:
    """The values of the job file in the request's body."""
    limit = request.app.state.settings.max_job_bytes
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise ProblemError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the job file is larger than {limit} bytes; name files instead of writing out their content",
            )
    return decode_body(bytes(body), content_type=request.headers.get("content-type", ""))


Service = Annotated[Jobs, Depends(service)]


@router.post("", status_code=201, responses=problem_responses(413, 415, 422), openapi_extra=_JOB_BODY)
def submit_job(jobs: Service, data: Annotated[object, Depends(job_file)], response: Response) -> JobDetail:
    """Submit a training job: the same file that `eth train` takes."""
    job = jobs.submit(data)
    response.headers["Location"] = f"/api/v1/jobs/{job.id}"
    return job


@router.get("", responses=problem_responses(422))
def list_jobs(
    jobs: Service,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    before: Annotated[str | None, Query(description="id: only jobs that were submitted before it")] = None,
) -> JobList:
    """Jobs, newest first."""
    return jobs.page(limit=limit, before=before)


@router.get("/{job_id}", responses=problem_responses(404))
def get_job(jobs: Service, job_id: str) -> JobDetail:
    """One job with its history, its plan, and predicted figures beside the latest measured ones."""
    return jobs.get(job_id)


@router.post("/{job_id}/stop", status_code=202, responses=problem_responses(404, 409))
def stop_job(jobs: Service, job_id: str) -> JobSummary:
    """Stop a job in whatever state it is; the answer comes before the end of it."""
    return jobs.stop(job_id)


@router.get("/{job_id}/metrics", responses=problem_responses(404, 422))
def get_metrics(
    jobs: Service,
    job_id: str,
    since: Annotated[int, Query(ge=0, description="only iterations after this one")] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Metrics:
    """A row an iteration: loss, throughput, and the same for each pipeline."""
    return jobs.metrics(job_id, since=since, limit=limit)


@router.get("/{job_id}/logs", responses=problem_responses(404, 422))
def get_logs(
    jobs: Service,
    job_id: str,
    offset: Annotated[int, Query(description="first byte; a negative one counts from the end")] = 0,
    limit: Annotated[int, Query(ge=4, le=1 << 20, description="bytes")] = 1 << 16,
) -> LogPart:
    """What the job's driver printed. Go on from `next_offset`."""
    return jobs.logs(job_id, offset=offset, limit=limit)
