"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# The same examples in every run, however busy the machine, so that a change and not chance decides;
# HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
