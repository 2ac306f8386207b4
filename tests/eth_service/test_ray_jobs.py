"""Ray that does not answer; test_serve.py has the one that does."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from eth_service.backend import ClusterUnreachable
from eth_service.ray_jobs import RayJobs

CALLS: list[Callable[[RayJobs], object]] = [
    RayJobs.check,
    lambda ray: ray.submit("id", ["true"]),
    lambda ray: ray.report("id"),
    lambda ray: ray.stop("id"),
    lambda ray: ray.output("id"),
]


@pytest.mark.parametrize("address", ["127.0.0.1:9", "http://127.0.0.1:9"])
@pytest.mark.parametrize("call", CALLS)
def test_nobody_listening_is_unreachable_at_once(address: str, call: Callable[[RayJobs], object]) -> None:
    with pytest.raises(ClusterUnreachable) as caught:
        call(RayJobs(address))
    assert address in str(caught.value)
    assert "\n" not in str(caught.value)
    # These words, and not that Ray has waited most of a minute for its head, while no other job was served.
    assert "Connection refused" in str(caught.value) or "Failed to connect" in str(caught.value)


def test_the_environment_does_not_replace_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:10")
    with pytest.raises(ClusterUnreachable, match=r"at address: http://127\.0\.0\.1:9\."):
        RayJobs("http://127.0.0.1:9").check()
    assert "RAY_ADDRESS" not in os.environ
