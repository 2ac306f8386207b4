"""The pool that the other engine tests stand on must not hide a failure."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.engine.rank_pool import RankError, RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """One of its own: these tests end its processes, which the session's pool should keep."""
    pool = RankPool()
    yield pool
    pool.close()


def _sum_of_ranks(rank: int, offset: float) -> float:
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    return float(value)


def _fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one is broken")
    dist.barrier()


def _die_on_one(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _hang_on_one(rank: int) -> None:
    if rank == 1:
        time.sleep(600)


def test_a_pool_is_used_again_with_other_sizes(pool: RankPool) -> None:
    assert pool.run(_sum_of_ranks, 0.0, world_size=2) == [1.0, 1.0]
    assert pool.run(_sum_of_ranks, 1.0, world_size=3) == [6.0, 6.0, 6.0]
    assert pool.run(_sum_of_ranks, 0.0, world_size=2) == [1.0, 1.0]


def test_a_failure_tells_its_traceback_and_the_pool_recovers(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank one is broken"):
        pool.run(_fail_on_one, world_size=2)
    assert pool.run(_sum_of_ranks, 0.0, world_size=2) == [1.0, 1.0]


def test_a_death_tells_its_exit_code(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1:\ndied with exit code 7"):
        pool.run(_die_on_one, world_size=2)


def test_a_hang_ends_at_the_deadline_and_tells_where(pool: RankPool) -> None:
    pool.run(_sum_of_ranks, 0.0, world_size=2)
    with pytest.raises(RankError, match="_hang_on_one"):
        pool.run(_hang_on_one, world_size=2, timeout_seconds=2.0)
    assert pool.run(_sum_of_ranks, 0.0, world_size=2) == [1.0, 1.0]
