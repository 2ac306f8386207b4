"""Errors as RFC 9457 problem documents (`application/problem+json`)."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from planner.errors import UserError

MEDIA_TYPE = "application/problem+json"


class Problem(BaseModel):
    """RFC 9457. `detail` is one line for a person: what is wrong, with which value, and what helps."""

    type: str = Field(default="about:blank", description="`about:blank`: the status says what kind it is")
    title: str = Field(description="the status in words")
    status: int
    detail: str
    instance: str | None = Field(default=None, description="path of the request")


class ProblemError(Exception):
    """Raised by a route or what it calls; becomes a problem document with that status."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


def unknown_job(job_id: str) -> ProblemError:
    return ProblemError(
        HTTPStatus.NOT_FOUND, f"job {job_id!r} does not exist; GET /api/v1/jobs lists the jobs"
    )


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` argument of a route that may answer with these problems."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of the application a problem document."""

    @app.exception_handler(ProblemError)
    def known(request: Request, error: ProblemError) -> JSONResponse:
        return respond(request, error.status, error.detail)

    @app.exception_handler(UserError)
    def user_error(request: Request, error: UserError) -> JSONResponse:
        return respond(request, HTTPStatus.UNPROCESSABLE_ENTITY, str(error))

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        told = "; ".join(_describe(problem) for problem in error.errors())
        return respond(request, HTTPStatus.UNPROCESSABLE_ENTITY, told)

    @app.exception_handler(HTTPException)
    def http_error(request: Request, error: HTTPException) -> JSONResponse:
        detail = str(error.detail)
        if error.status_code == HTTPStatus.NOT_FOUND and detail == HTTPStatus.NOT_FOUND.phrase:
            detail = f"nothing is served at {request.url.path}; /openapi.json lists what is"
        response = respond(request, HTTPStatus(error.status_code), detail)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    def unexpected(request: Request, error: Exception) -> JSONResponse:
        return respond(
            request,
            HTTPStatus.INTERNAL_SERVER_ERROR,
            f"the service failed on this request ({type(error).__name__}); its own log says where",
        )


def _describe(problem: dict[str, Any]) -> str:
    field = ".".join(str(part) for part in problem["loc"][1:]) or str(problem["loc"][0])
    return f"{field} = {problem.get('input')!r}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def respond(request: Request, status: HTTPStatus, detail: str) -> JSONResponse:
    """A problem document."""
    problem = Problem(title=status.phrase, status=status, detail=detail, instance=request.url.path)
    return JSONResponse(problem.model_dump(), status_code=status, media_type=MEDIA_TYPE)
