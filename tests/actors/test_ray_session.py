"""Connecting to a Ray cluster."""

from __future__ import annotations

import signal
import socket

import pytest
import ray

from actors.ray_session import StopSignals, ray_session
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_stops_and_later_ones_do_not_cut_the_end_short(number: signal.Signals) -> None:
    # Whoever runs the tests may ignore them (nohup, a shell's background).
    before = signal.signal(number, signal.SIG_DFL)
    try:
        _first_stops(number)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def _first_stops(number: signal.Signals) -> None:
    with StopSignals():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(number)


def test_under_nohup_the_end_of_the_terminal_changes_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
