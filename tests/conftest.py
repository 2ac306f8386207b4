"""Settings of all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

_PLANNER = Path(__file__).parent / "planner"

# The same examples in every run, however busy the machine, so that a change and not chance decides;
# HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


# First, since xdist reads the marks in a hook of the same name.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that start processes of their own (ranks, Ray, servers) stay on one worker, one after another.

    They need both cores as it is, and wait for each other much of the time; the planner's tests, which compute on one
    core, fill those waits on the second worker.
    """
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if not item.path.is_relative_to(_PLANNER):
                item.add_marker(pytest.mark.xdist_group("processes"))
