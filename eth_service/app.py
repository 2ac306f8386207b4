"""The FastAPI application of the service."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib.metadata import version
from urllib.parse import urlsplit

import structlog
from fastapi import Depends, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.staticfiles import StaticFiles

from eth_service.backend import Backend
from eth_service.errors import ProblemError, install_error_handlers
from eth_service.jobs import Jobs
from eth_service.known_hosts import KnownHosts
from eth_service.monitor import Monitor
from eth_service.openapi import install_openapi
from eth_service.routes import health, jobs, pages, streams
from eth_service.settings import Settings, stop_seconds
from eth_service.store import Store

log = structlog.get_logger(__name__)


def create_app(settings: Settings, backend: Backend, *, hurry: threading.Event | None = None) -> FastAPI:
    """The service over one database and one cluster. Its lifespan runs the monitor.

    With an embedded cluster the end of the lifespan stops the jobs that run on it, and waits for their ends until
    `hurry` is set.
    """
    store = Store(settings.database)
    monitor = Monitor(settings=settings, store=store, backend=backend)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        monitor.start()
        yield
        await run_in_threadpool(_end, settings, store, monitor, hurry or threading.Event())

    app = FastAPI(
        title="ETH service",
        version=version("eth-service"),
        description="Plans and trains one transformer on accelerators of different generations.",
        lifespan=lifespan,
        # FastAPI's own pages about the API would fetch scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(refuse_foreign_origin)],
    )
    app.state.settings, app.state.store, app.state.backend = settings, store, backend
    app.state.jobs = Jobs(settings=settings, store=store, monitor=monitor)
    app.add_middleware(KnownHosts)
    for router in (health.router, jobs.router, streams.router, pages.router):
        app.include_router(router)
    app.mount("/static", StaticFiles(directory=pages.FILES), name="static")
    install_error_handlers(app)
    install_openapi(app)
    return app


def refuse_foreign_origin(request: Request) -> None:
    """Let no other site's page post to this service through the user's browser."""
    origin = request.headers.get("origin")
    if origin is None or request.method in ("GET", "HEAD", "OPTIONS"):
        return
    if urlsplit(origin).netloc != request.headers.get("host"):
        raise ProblemError(
            HTTPStatus.FORBIDDEN, f"Origin = {origin!r}: only the service's own page may do this"
        )


def _end(settings: Settings, store: Store, monitor: Monitor, hurry: threading.Event) -> None:
    monitor.close()
    active = monitor.active()
    if settings.embedded:
        most = stop_seconds()
        for job in active:
            log.info(
                "stopping a job with the embedded Ray: it may save its state first (Ctrl-C again: at once)",
                job=job.id,
                name=job.name,
                most_seconds=most,
            )
        monitor.stop_active(
            reason="the service was stopped, and its embedded Ray with it",
            timeout_seconds=most,
            hurry=hurry,
        )
    else:
        for job in active:
            log.info("job goes on without the service", job=job.id, cluster=settings.cluster)
    store.close()
