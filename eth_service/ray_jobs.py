"""Attempts as Ray jobs."""

from __future__ import annotations

import os
import re
import shlex
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import requests
from ray.exceptions import AuthenticationError, RayError
from ray.job_submission import JobStatus, JobSubmissionClient

from eth_service.backend import AttemptReport, AttemptStatus, ClusterUnreachable, SubmissionRefused

# Ray lets these override any address that is passed to it; the service's own setting must win.
ADDRESS_VARIABLES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
_TIMEOUT_SECONDS = 20.0
_TOKEN = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN unless ~/.ray/auth_token is the one"
# How Ray's client words an answer that says the request itself was wrong.
_REFUSED = re.compile(r"status code 4\d\d")
_STATUSES = {
    JobStatus.PENDING: AttemptStatus.PENDING,
    JobStatus.RUNNING: AttemptStatus.RUNNING,
    JobStatus.SUCCEEDED: AttemptStatus.SUCCEEDED,
    JobStatus.FAILED: AttemptStatus.FAILED,
    JobStatus.STOPPED: AttemptStatus.STOPPED,
}


class _Client(JobSubmissionClient):
    """Ray's client with a limit on every wait: without one, a stuck head would hang the service."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        return super()._do_request(method, endpoint, timeout=_TIMEOUT_SECONDS, **options)


class RayJobs:
    """The Backend over the Ray cluster at `address`: `HEAD:6379`, `auto`, or its job server `http://HEAD:8265`.

    Where a machine holds several Ray clusters only the first form is safe: Ray tells a job's driver which
    cluster it belongs to by guessing, and the first form lets this class tell it.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._connected: _Client | None = None
        self._connecting = threading.Lock()

    def check(self) -> None:
        with self._reaching() as client:
            client.get_version()

    def submit(self, submission_id: str, command: Sequence[str]) -> None:
        with self._reaching() as client:
            try:
                client.submit_job(entrypoint=self._entrypoint(command), submission_id=submission_id)
            except RuntimeError as error:
                # Ray answers a repeated id with an error too, and there the job is as it should be.
                if self.report(submission_id).status is not AttemptStatus.UNKNOWN:
                    return
                if _REFUSED.search(str(error)):
                    raise SubmissionRefused(_last_line(str(error))) from None
                # Anything else passes: right after its start, for example, Ray has no agent that takes jobs.
                raise

    def report(self, submission_id: str) -> AttemptReport:
        with self._reaching() as client:
            try:
                info = client.get_job_info(submission_id)
            except RuntimeError as error:
                if "status code 404" in str(error):
                    return AttemptReport(AttemptStatus.UNKNOWN)
                raise
            return AttemptReport(_STATUSES[info.status], info.message or "")

    def stop(self, submission_id: str) -> None:
        with self._reaching() as client:
            client.stop_job(submission_id)

    def output(self, submission_id: str) -> str:
        with self._reaching() as client:
            try:
                return str(client.get_job_logs(submission_id))
            except RuntimeError as error:
                if "status code 404" in str(error):
                    return ""
                raise

    def _entrypoint(self, command: Sequence[str]) -> str:
        told = ["env", f"RAY_ADDRESS={self._address}"] if self._is_head else []
        return shlex.join([*told, *command])

    @contextmanager
    def _reaching(self) -> Iterator[_Client]:
        """The client; every way in which Ray does not answer becomes ClusterUnreachable."""
        try:
            yield self._client()
        except AuthenticationError as error:
            raise ClusterUnreachable(f"Ray at {self._address} wants a token: {_TOKEN}") from error
        except (requests.RequestException, RayError, OSError, RuntimeError, ValueError) as error:
            # A cluster that comes back may have its job server elsewhere.
            self._connected = None
            told = f"Ray at {self._address} does not answer: {_last_line(str(error))}"
            # The part of Ray behind HEAD:6379 lets a client without a token wait in vain, with no word of it.
            hint = f" (if it wants a token: {_TOKEN})" if self._is_head and _without_token() else ""
            raise ClusterUnreachable(told + hint) from error

    @property
    def _is_head(self) -> bool:
        """Whether the address is HEAD:PORT."""
        return "://" not in self._address and self._address != "auto"

    def _client(self) -> _Client:
        with self._connecting:
            if self._connected is None:
                for name in ADDRESS_VARIABLES:
                    os.environ.pop(name, None)
                if self._is_head:
                    # Ray's own try takes most of a minute to find that nobody listens.
                    host, port = self._address.rsplit(":", 1)
                    socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
                self._connected = _Client(self._address)
            return self._connected


def _without_token() -> bool:
    return os.environ.get("RAY_AUTH_MODE", "").lower() != "token"


def _last_line(message: str) -> str:
    lines = message.strip().splitlines()
    return lines[-1].strip() if lines else "no reason given"
