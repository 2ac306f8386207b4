"""Settings of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.object_storage import ObjectStorage, object_storage

# The same examples in every run, however busy the machine, so that a change and not chance decides;
# HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(scope="session")
def storage() -> Iterator[ObjectStorage]:
    """An S3-compatible server for the whole session: a process keeps its connection to a bucket."""
    with object_storage() as running:
        yield running
