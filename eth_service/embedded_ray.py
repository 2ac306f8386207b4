"""A Ray cluster of this machine that lives inside the service and ends with it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import parameter

from actors.ray_session import EMBEDDED_SETTINGS
from eth_service.ray_jobs import ADDRESS_VARIABLES
from eth_service.settings import DRIVER_STOP_SECONDS, DRIVER_STOP_VARIABLE
from planner.errors import UserError

ENVIRONMENT = EMBEDDED_SETTINGS | {
    DRIVER_STOP_VARIABLE: f"{DRIVER_STOP_SECONDS:g}",
    # If the service is killed its Ray never comes back: a driver need not wait a minute for it.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}
# Weights and activations never pass through Ray; its object store only carries reports.
_OBJECT_STORE_BYTES = 100 * 1024**2


@contextmanager
def embedded_ray() -> Iterator[str]:
    """A Ray cluster for as long as the context lasts; yields its address.

    Ray makes a token for a cluster that it starts like this, and its job client in this process sends it.
    """
    for name in ADDRESS_VARIABLES:
        os.environ.pop(name, None)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with _agent_on_any_port():
        context = ray.init(
            address="local",
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    try:
        if not context.dashboard_url:
            raise UserError(
                "the embedded Ray has no job server: install ray[default], or give the --address of a cluster"
            )
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


@contextmanager
def _agent_on_any_port() -> Iterator[None]:
    """Let the agent that takes jobs listen on a free port instead of Ray's fixed one.

    With another Ray on the machine (an `eth train`, say) the fixed port is taken, and then no job can ever
    be submitted. `ray start` has an option for it; `ray.init` has none.
    """

    class AnyAgentPort(parameter.RayParams):
        def __init__(self, **options: Any) -> None:
            super().__init__(dashboard_agent_listen_port=0, **options)

    original = parameter.RayParams
    setattr(parameter, "RayParams", AnyAgentPort)  # noqa: B010
    try:
        yield
    finally:
        setattr(parameter, "RayParams", original)  # noqa: B010
