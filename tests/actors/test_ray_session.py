"""Connecting to a Ray cluster."""

from __future__ import annotations

import socket

import pytest
import ray

from actors.ray_session import ray_session
from planner.errors import UserError


def test_an_address_where_nobody_listens_is_refused_before_ray_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise AssertionError("Ray was asked; it takes minutes to find that nobody listens")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with (
            pytest.raises(UserError, match=f"--address {address} cannot be reached: .*; start Ray there"),
            ray_session(address),
        ):
            raise AssertionError("connected")
