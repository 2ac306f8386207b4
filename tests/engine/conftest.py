"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Real gloo ranks for the whole session."""
    pool = RankPool()
    yield pool
    pool.close()
