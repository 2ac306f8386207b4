"""Whether the process lives, and whether it can do its work."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Request
from sqlalchemy.exc import SQLAlchemyError

from eth_service.backend import Backend, ClusterUnreachable
from eth_service.errors import ProblemError, problem_responses
from eth_service.schemas import Health
from eth_service.store import Store

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> Health:
    """The process answers."""
    return Health(status="ok")


@router.get("/readyz", responses=problem_responses(503))
def readyz(request: Request) -> Health:
    """The database and the Ray cluster answer."""
    store: Store = request.app.state.store
    backend: Backend = request.app.state.backend
    try:
        store.check()
        backend.check()
    except SQLAlchemyError as error:
        told = " ".join(str(error).split())
        raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, f"the database does not answer: {told}") from None
    except ClusterUnreachable as error:
        raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from None
    return Health(status="ready")
