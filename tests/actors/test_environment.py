"""What a run is started in, and what of that is nobody's business."""

from __future__ import annotations

import json
import platform
from importlib import metadata

import pytest

from actors.environment import describe_start, settings, versions


def test_settings_of_libraries_are_kept_and_secrets_are_not() -> None:
    kept = {
        "NCCL_IB_HCA": "mlx5",
        "OMP_NUM_THREADS": "4",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
    }
    secret = {"RAY_AUTH_TOKEN": "x", "ETH_API_KEY": "x", "CUDA_PASSWORD": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    assert settings(kept | secret | {"HOME": "/home/me", "OMP": "x"}) == dict(sorted(kept.items()))


def test_versions_are_those_that_are_installed() -> None:
    found = versions()
    assert found["python"] == platform.python_version()
    for name in ("eth-service", "torch", "ray", "numpy"):
        assert found[name] == metadata.version(name)


def test_hosts_that_are_gone_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    resources = {"CPU": 2.0, "node:10.0.0.1": 1.0, "accelerator_type:A100": 1.0}
    node = {"NodeManagerHostname": "a", "NodeManagerAddress": "10.0.0.1", "Resources": resources}
    row = describe_start(iteration=7, nodes=[{"Alive": True, **node}, {"Alive": False, **node}])
    assert row["hosts"] == [
        {"name": "a", "address": "10.0.0.1", "resources": {"CPU": 2.0, "accelerator_type:A100": 1.0}}
    ]
    assert row["settings"]["GLOO_SOCKET_IFNAME"] == "eth0" and row["iteration"] == 7
    assert json.loads(json.dumps(row)) == row
