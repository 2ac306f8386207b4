"""Whose fault a failure is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from actors.engine.errors import DeviceOutOfMemory
from actors.failure import FailureKind, RankFailure, classify, rank_failure, root_cause
from tests.plans import make_model, make_plan

PLACES = make_plan(make_model(), [[(1, 1, 2), (1, 1, 2)], [(1, 1, 4)]]).ranks


def failure(rank: int, kind: FailureKind) -> RankFailure:
    return rank_failure(PLACES[rank], kind=kind, cause="failed")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (
            RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:3"),
            "DISCONNECTED",
        ),
        (
            RuntimeError("[../gloo/transport/tcp/pair.cc:547] Read error: Connection reset by peer"),
            "DISCONNECTED",
        ),
        (
            RuntimeError("gloo/unbound_buffer.cc:84 Timed out waiting 3000ms for recv operation to complete"),
            "TIMED_OUT",
        ),
        # gloo, where another operation on the same connection had timed out before.
        (RuntimeError("Application timeout caused pair closure"), "TIMED_OUT"),
        (dist.DistStoreError("wait timeout after 5000ms, keys: /a"), "TIMED_OUT"),
        (
            dist.DistNetworkError("The client socket has failed to connect: Connection refused"),
            "DISCONNECTED",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "ERROR"),
        (DeviceOutOfMemory("out of memory on a/0: peer stage's timeout words do not matter"), "ERROR"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "ERROR"),
        (ValueError("store: connection closed"), "ERROR"),
    ],
)
def test_a_peer_s_failure_is_told_from_the_rank_s_own(error: Exception, kind: str) -> None:
    assert classify(error).name == kind


def test_the_dead_are_blamed_before_those_who_lost_them() -> None:
    seen = [
        failure(0, FailureKind.DISCONNECTED),
        failure(1, FailureKind.TIMED_OUT),
        failure(2, FailureKind.DIED),
    ]
    assert root_cause(seen).rank == 2
    assert root_cause(seen[:2]).rank == 1
    assert root_cause([failure(1, FailureKind.ERROR), failure(0, FailureKind.HUNG)]).rank == 1


def test_a_failure_names_rank_pipeline_stage_and_device() -> None:
    assert str(failure(1, FailureKind.DIED)) == "rank 1 (pipeline 0, stage 1, device node0/1) failed"
