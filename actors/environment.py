"""What a run is started in: versions, hosts and the settings of libraries, for whoever asks why two runs differ."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

_SETTINGS = re.compile(
    r"(ASCEND|CUBLAS|CUDA|CUDNN|ETH|GLOO|GOMP|HCCL|KMP|MKL|NCCL|NVIDIA|OMP|OPENBLAS|PYTORCH|RAY|TOKENIZERS|TORCH)_.*"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONHASHSEED|XDG_CACHE_HOME"
)
_SECRET = re.compile(r"AUTH|CREDENTIAL|KEY|PASS|SECRET|TOKEN(?!IZERS)")


def describe_start(*, iteration: int, nodes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A row of environment.jsonl: the run goes on after `iteration`, on these nodes of Ray's (`ray.nodes()`).

    Versions and settings are those of the process that drives the run. Settings that may hold a secret are left out.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "iteration": iteration,
        "command": list(sys.argv),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions(),
        "settings": settings(os.environ),
        "hosts": [_host(node) for node in nodes if node.get("Alive")],
    }


def versions() -> dict[str, str]:
    """Python's version, and that of every package that is installed."""
    found = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    return {"python": platform.python_version()} | {
        name: found[name] for name in sorted(found, key=str.lower)
    }


def settings(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables by which the libraries of a run are set, without those that may hold a secret."""
    return {
        name: variables[name]
        for name in sorted(variables)
        if _SETTINGS.fullmatch(name) and not _SECRET.search(name)
    }


def _host(node: Mapping[str, Any]) -> dict[str, Any]:
    # A resource of every node's own, which only bears its address, and marks of Ray's own say nothing here.
    held = {
        name: n for name, n in node.get("Resources", {}).items() if not name.startswith(("node:", "bundle"))
    }
    return {
        "name": node.get("NodeManagerHostname"),
        "address": node.get("NodeManagerAddress"),
        "resources": held,
    }
