"""How far emulation stretches time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.time_scale import SHORTEST_STEP_SECONDS, HostSeconds, least_time_scale, measure_host
from planner.cost.price import replica_seconds
from planner.model_spec import ModelSpec
from planner.plan import Plan
from tests.engine.law_plans import with_recompute
from tests.plans import make_llama, make_model, make_plan

FAST = HostSeconds(1e-9, 1e-9, 1e-9, 1e-9)


def unlike_plan() -> Plan:
    return make_plan(make_model(), [[(1, 1, 1), (1, 1, 3)], [(2, 1, 4)]])


def test_on_a_fast_host_the_shortest_forward_step_decides() -> None:
    plan = unlike_plan()
    shortest = min(
        replica_seconds(plan, pipeline=p, stage=s, replica=0).forward for p, s in ((0, 0), (0, 1), (1, 0))
    )
    scale = least_time_scale(plan, FAST, cores=2)
    assert scale * shortest == pytest.approx(SHORTEST_STEP_SECONDS, rel=0.06)
    assert scale * shortest >= SHORTEST_STEP_SECONDS * 0.999


def test_a_slow_or_crowded_host_stretches_time_further() -> None:
    plan = unlike_plan()
    slow = replace(FAST, layer_backward=1.0)
    roomy = least_time_scale(plan, slow, cores=64)
    assert roomy > 2 * least_time_scale(plan, FAST, cores=64)
    assert least_time_scale(plan, slow, cores=2) == pytest.approx(2 * roomy, rel=0.06)


def test_what_backward_replays_counts() -> None:
    plain = make_plan(make_model(), [[(1, 1, 4)]])
    replaying = with_recompute(plain, {"softmax": 3, "mlp_up": 1})
    slow = replace(FAST, layer_forward=0.4, layer_backward=1.0)
    scales = [
        least_time_scale(plan, slow, cores=64)
        * replica_seconds(plan, pipeline=0, stage=0, replica=0).backward
        for plan in (plain, replaying)
    ]
    assert scales[1] == pytest.approx(scales[0] * (4 + 3 * 0.4) / 4, rel=0.08)


@pytest.mark.parametrize("model", [make_llama(), make_llama(dropout=0.1)], ids=["llama", "dropout"])
def test_every_kind_of_layer_is_measured(model: ModelSpec) -> None:
    assert measure_host(model, 8).layer_backward > 0


def test_the_host_is_measured() -> None:
    small = measure_host(make_model(), 8)
    large = measure_host(make_model(hidden_size=480, max_sequence_length=512), 512)
    assert 0 < small.layer_forward < large.layer_forward
    assert 0 < small.head_backward < large.head_backward
