"""Plans that the runtime refuses, each with the field and the remedy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from actors.engine.support import check_supported, device_backend, device_kind
from planner.cluster import Cluster
from planner.errors import UserError
from planner.plan import Plan
from tests.engine.law_plans import HAND_PICKED, plan_of
from tests.plans import make_model, make_plan


@pytest.mark.parametrize("name", HAND_PICKED)
def test_what_it_can_run_is_not_refused(name: str) -> None:
    check_supported(HAND_PICKED[name])


REFUSED = {
    "gradient_sync = 'tensor' cannot shard optimizer state": lambda: plan_of(
        [(1, 1, 4)], zero_stage=1, gradient_sync="tensor"
    ),
    "dtypes.wire = 'fp16' is not supported by the runtime; use 'bf16' or 'fp32'": lambda: plan_of(
        [(1, 1, 4)], dtypes={"param": "bf16", "wire": "fp16"}
    ),
    "dtypes.grad = 'bf16' is not supported by the runtime; use 'fp32'": lambda: plan_of(
        [(1, 1, 4)], dtypes={"param": "bf16", "grad": "bf16"}
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_it_cannot_run_is_refused_with_field_and_remedy(message: str) -> None:
    with pytest.raises(UserError) as refused:
        check_supported(REFUSED[message]())
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def _mixed(*, emulate: bool) -> Plan:
    nodes = [
        {"name": "ascend", "devices": [{"type": "910B2", "count": 1}], "emulate": True},
        {"name": "nvidia", "devices": [{"type": "A100", "count": 1}], "emulate": emulate},
    ]
    cluster = Cluster.model_validate({"nodes": nodes})
    return make_plan(make_model(), [[(1, 1, 4)], [(1, 1, 4)]], cluster=cluster)


def test_vendors_that_cannot_share_a_group_are_refused_unless_emulated() -> None:
    check_supported(_mixed(emulate=True))
    with pytest.raises(UserError, match="'ascend/0' communicates by gloo and 'nvidia/0' by nccl"):
        check_supported(_mixed(emulate=False))


def test_an_emulated_device_is_on_the_host() -> None:
    plan = _mixed(emulate=False)
    assert [device_kind(plan, device) for device in ("ascend/0", "nvidia/0")] == ["cpu", "cuda"]
    assert [device_backend(plan, device) for device in ("ascend/0", "nvidia/0")] == ["gloo", "nccl"]


def test_refusing_needs_no_torch() -> None:
    program = "import actors.engine.support, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
