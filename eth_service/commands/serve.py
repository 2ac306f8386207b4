"""`eth serve`: the REST service and its page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8080,
    host: Annotated[str, typer.Option(help="Loopback address to listen on.")] = "127.0.0.1",
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster to run jobs on: HEAD:6379, auto, or http://HEAD:8265. Its jobs go on when the"
            " service stops, and are found again. Without it the service starts a Ray of its own on this"
            " machine; stopping the service then stops its jobs. Where the cluster wants a token, set"
            " RAY_AUTH_MODE=token."
        ),
    ] = None,
    data_root: Annotated[
        Path, typer.Option(help="Folder that the paths in jobs start at, and that none may leave.")
    ] = Path(),
    runs: Annotated[
        Path | None, typer.Option(help="Folder for jobs' results; DATA_ROOT/runs if not given.")
    ] = None,
    database: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL of the database; RUNS/eth.db (SQLite) if not given.")
    ] = None,
) -> None:
    """Start the REST service: jobs under /api/v1 (described at /openapi.json), a page for people at /."""
    from eth_service.server import run_server
    from eth_service.settings import EMBEDDED, Settings, check_address, check_host

    check_host(host)
    if address is not None:
        check_address(address)
    root = data_root.resolve()
    results = (runs or root / "runs").resolve()
    settings = Settings(
        data_root=root,
        runs=results,
        database=database or f"sqlite:///{results / 'eth.db'}",
        cluster=address or EMBEDDED,
    )
    run_server(settings, host=host, port=port)
