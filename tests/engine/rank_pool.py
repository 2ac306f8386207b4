"""A pool of spawned processes that tests use as ranks: starting torch costs more than most tests.

`pool.run(function, *arguments, world_size=4)` calls `function(rank, *arguments)` on ranks 0 to 3 inside
a gloo process group of their own and returns the results in rank order. The function and its arguments
travel by pickle: a module-level function, plain data.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# How long the other ranks get to fail by themselves after the first has: enough for gloo to notice a
# closed connection, so that their errors are seen too.
_GRACE_SECONDS = 3.0

_START_SECONDS = 180.0


class RankError(AssertionError):
    """One or more ranks failed, died or hung; the message holds every rank's traceback."""


@dataclass(frozen=True)
class _Task:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    number: int
    world_size: int
    store_port: int
    timeout_seconds: float


class RankPool:
    """Spawned ranks, kept between tasks; a task that fails takes its processes with it."""

    def __init__(self) -> None:
        self._members: list[_Member] = []
        self._tasks = 0
        # One server for all tasks, each under a prefix of its own.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(
        self, function: Callable[..., Any], *arguments: Any, world_size: int, timeout_seconds: float = 60.0
    ) -> list[Any]:
        """Results of `function(rank, *arguments)` by rank, `torch.distributed` being initialised.

        Raises RankError with the tracebacks if a rank fails, dies or is not done within the timeout.
        """
        self._grow(world_size)
        self._tasks += 1
        task = _Task(function, arguments, self._tasks, world_size, self._store.port, timeout_seconds)
        members = self._members[:world_size]
        try:
            for rank, member in enumerate(members):
                member.connection.send_bytes(pickle.dumps((rank, task)))
            answers = _collect(members, timeout_seconds)
        except BaseException:
            # Also an interrupt: a rank left in the middle of a task must not get the next one.
            self.close()
            raise
        if any(not answer.ok for answer in answers):
            self.close()
            raise RankError(_failure(answers, function))
        return [answer.value for answer in answers]

    def _grow(self, world_size: int) -> None:
        """Start what is missing, all at once. On a busy machine that takes long: no task's time counts."""
        started = [_Member() for _ in range(world_size - len(self._members))]
        self._members += started
        answers = _collect(started, _START_SECONDS)
        if not all(answer.ok for answer in answers):
            self.close()
            raise RankError(f"ranks did not start: {answers}")

    def close(self) -> None:
        """End every process; the next `run` starts new ones."""
        for member in self._members:
            member.end()
        self._members = []


@dataclass(frozen=True)
class _Answer:
    ok: bool
    value: Any


def _collect(members: list[_Member], timeout_seconds: float) -> list[_Answer]:
    answers: dict[int, _Answer] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(answers) < len(members):
        waiting = {m.connection: i for i, m in enumerate(members) if i not in answers}
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for channel in ready:
            index = waiting[channel]  # type: ignore[index]
            answers[index] = members[index].receive()
            if not answers[index].ok:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return [answers.get(i) or _Answer(False, member.stack()) for i, member in enumerate(members)]


def _failure(answers: list[_Answer], function: Callable[..., Any]) -> str:
    told = [f"rank {rank}:\n{answer.value}" for rank, answer in enumerate(answers) if not answer.ok]
    return f"{function.__name__} failed on {len(told)} of {len(answers)} ranks\n" + "\n".join(told)


class _Member:
    """One spawned process, its channel, and a file that its stacks are dumped to on request."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, channel = context.Pipe()
        descriptor, name = tempfile.mkstemp(prefix="rank-stack-")
        os.close(descriptor)
        self._stack_file = Path(name)
        self._process = context.Process(target=_serve, args=(channel, name), daemon=True)
        self._process.start()
        channel.close()

    def receive(self) -> _Answer:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(timeout=5)
            return _Answer(False, f"died with exit code {self._process.exitcode}")
        assert isinstance(answer, _Answer)
        return answer

    def stack(self) -> str:
        """Where a rank that does not answer stands."""
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and not self._stack_file.stat().st_size:
            time.sleep(0.05)
        time.sleep(0.1)  # the rest of it
        return "not done in time; it was here:\n" + self._stack_file.read_text()

    def end(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.join()
        self._stack_file.unlink(missing_ok=True)


def _serve(channel: connection.Connection, stack_file: str) -> None:
    """A rank's life: answer tasks until the channel closes."""
    _end_with_parent()
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        if sys.platform == "linux":
            # Not the address of the host's name, which may not resolve.
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        channel.send_bytes(pickle.dumps(_Answer(True, "ready")))
        while True:
            try:
                message = channel.recv_bytes()
            except EOFError:
                return
            channel.send_bytes(_answer(message))


def _answer(message: bytes) -> bytes:
    """Pickled answer to a pickled task; what cannot be unpickled or pickled is a failure of the task."""
    try:
        return pickle.dumps(_perform(*pickle.loads(message)))
    except Exception:
        return pickle.dumps(_Answer(False, traceback.format_exc()))


def _perform(rank: int, task: _Task) -> _Answer:
    try:
        timeout = timedelta(seconds=task.timeout_seconds)
        client = dist.TCPStore("127.0.0.1", task.store_port, is_master=False, timeout=timeout)
        store = dist.PrefixStore(f"task{task.number}", client)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=task.world_size, timeout=timeout)
        try:
            value = task.function(rank, *task.arguments)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return _Answer(True, value)
    except BaseException:
        return _Answer(False, traceback.format_exc())


def _end_with_parent() -> None:
    """A rank that hangs in a collective cannot see its channel close; this thread sees the parent end."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
