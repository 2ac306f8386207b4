"""Connecting to a Ray cluster."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator

import pytest
import ray

from actors import ray_session as ray_session_module
from actors.ray_session import StopSignals, ray_session, stop_seconds
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


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Whoever runs the tests may ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)


def wait_for_interrupt() -> None:
    """Return after a generous while if nothing interrupts."""
    threading.Event().wait(30)


@pytest.mark.usefixtures("interruptible")
def test_while_held_a_stop_is_noted_and_comes_in_bounded_time(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as signals, signals.held(seconds=0.05):
        signal.raise_signal(signal.SIGTERM)
        assert signals.asked and "stopping after this iteration" in capfd.readouterr().err
        # Another that does not come from a terminal changes nothing.
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            wait_for_interrupt()
        signal.raise_signal(signal.SIGINT)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.usefixtures("interruptible")
def test_while_held_another_ctrl_c_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopSignals() as signals, signals.held(seconds=300):
        signal.raise_signal(signal.SIGINT)
        # The same Ctrl-C, handed on by a program between.
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(ray_session_module, "_DOUBLE_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signals.stop()


def test_a_ray_job_saves_within_what_ray_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "20")
    assert stop_seconds() > 60
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert 0 < stop_seconds() < 20
    monkeypatch.delenv("RAY_JOB_STOP_WAIT_TIME_S")
    assert stop_seconds() < 0
