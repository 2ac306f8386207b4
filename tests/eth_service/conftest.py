"""A service over a real SQLite file, its cluster moved by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from eth_service.monitor import Monitor
from eth_service.settings import Settings
from eth_service.store import Store
from tests.eth_service.double import ClusterDouble
from tests.eth_service.running import serving

CLUSTER = "http://double:8265"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    root = tmp_path / "root"
    root.mkdir()
    return Settings(
        data_root=root,
        runs=tmp_path / "runs",
        database=f"sqlite:///{tmp_path / 'eth.db'}",
        cluster=CLUSTER,
        poll_seconds=0.02,
    )


@pytest.fixture
def cluster() -> ClusterDouble:
    return ClusterDouble()


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    opened = Store(settings.database)
    yield opened
    opened.close()


@pytest.fixture
def monitor(settings: Settings, store: Store, cluster: ClusterDouble) -> Monitor:
    """A monitor whose thread does not run: the test calls `tick`."""
    return Monitor(settings=settings, store=store, backend=cluster)


@pytest.fixture
def service_url(settings: Settings, cluster: ClusterDouble) -> Iterator[str]:
    """A service that listens on a port of its own."""
    with serving(settings, cluster) as url:
        yield url


@pytest.fixture
def client(service_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service_url, timeout=30) as connected:
        yield connected
