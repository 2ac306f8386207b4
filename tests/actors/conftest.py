"""A small unlike Ray cluster for the tests of the actors; its accelerators are only numbers to Ray."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster


@pytest.fixture(scope="package")
def unlike_ray() -> Iterator[None]:
    """Connected to: a head without CPUs, a node of 2 910B4 by custom resource, one of 2 A100 by label."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2, resources={"910B4": 2})
        cluster.add_node(num_cpus=2, num_gpus=2, labels={"ray.io/accelerator-type": "A100"})
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()
