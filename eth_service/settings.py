"""What the service is told when it starts."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from planner.errors import UserError

EMBEDDED = "embedded"
DRIVER_STOP_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
"""Where Ray reads how long after it has asked a driver to stop it kills it."""
DRIVER_STOP_SECONDS = 60.0
"""What an embedded Ray gives it: a driver saves its state and puts its actors away; Ray's own three are too few."""
# From Ray's kill until Ray tells of it.
_TOLD_SECONDS = 5.0


def stop_seconds() -> float:
    """How long a service that ends waits for its drivers: as long as its embedded Ray does, and a little for the
    news."""
    return float(os.environ.get(DRIVER_STOP_VARIABLE, DRIVER_STOP_SECONDS)) + _TOLD_SECONDS


class Settings(BaseModel):
    """Settings of one service process; `eth serve --help` explains each to a user."""

    model_config = ConfigDict(frozen=True)

    data_root: Path
    """Absolute folder that a job's relative paths start at and that none may leave."""
    runs: Path
    """Absolute folder of everything the service writes: a folder a job, and by default the database."""
    database: str
    """SQLAlchemy URL."""
    cluster: str = EMBEDDED
    """Address of the Ray cluster, or `embedded`: an attempt belongs to the cluster that it was started on."""
    concurrent_jobs: int = Field(default=1, ge=1)
    """Jobs that may hold the cluster at a time; the others wait in order."""
    poll_seconds: float = Field(default=1.0, gt=0)
    """How often Ray and the run folders are asked."""
    max_job_bytes: int = Field(default=4 << 20, gt=0)
    """Largest job file that is read from a request; a plan for 1024 devices takes about 0.2 MiB."""

    @property
    def embedded(self) -> bool:
        """Whether this process owns the Ray cluster, which therefore ends with it."""
        return self.cluster == EMBEDDED


def check_address(address: str) -> None:
    """Refuse what cannot be the address of a Ray cluster."""
    if address != "auto" and not re.match(
        r"https?://[^/\s]+$|(\[[0-9a-fA-F:]+\]|[^\s/:]+):\d{1,5}$", address
    ):
        raise UserError(
            f"--address = {address!r} is no Ray cluster's address; write HEAD:6379, http://HEAD:8265 or auto"
        )


def check_host(host: str) -> None:
    """Refuse an address that other machines reach: nothing here asks who is calling."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise UserError(
            f"--host = {host!r} is not a loopback address, and the service does not ask who is calling;"
            " use 127.0.0.1, and reach it from elsewhere through an SSH tunnel"
        )
