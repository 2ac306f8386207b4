"""A job that does not fit: what is lacking, and that what is said to help does, and nothing smaller does."""

from __future__ import annotations

import re
from typing import Any

import pytest

from planner.cluster import resolve_cluster
from planner.errors import UserError
from planner.model_spec import resolve_model
from planner.plan import Dtypes, PlanEmulation
from planner.profile.analytic import AnalyticProfile
from planner.request import PlanRequest
from planner.search import find_plan
from planner.search.diagnose import cannot_fit, fits


def request_for(name: str, cluster: str, **changes: Any) -> PlanRequest:
    fields: dict[str, Any] = {
        "model": resolve_model(name),
        "cluster": resolve_cluster(cluster),
        "global_batch_size": 16,
        "sequence_length": 2048,
        "strategy": "metis",
    }
    return PlanRequest(**(fields | changes))


def told_of(request: PlanRequest) -> str:
    told = str(cannot_fit(request, profile=AnalyticProfile(request.model, request.cluster.device_types)))
    assert "\n" not in told and f"model {request.model.name} does not fit: " in told
    return told


def test_more_devices_are_counted() -> None:
    request = request_for("gpt3-13b", "1x1:RTX3090")
    told = told_of(request)
    match = re.search(r"it fits with (\d+) more RTX3090", told)
    assert match is not None, told
    count = int(match[1])
    find_plan(request_for("gpt3-13b", f"{1 + count}x1:RTX3090"))
    with pytest.raises(UserError):
        find_plan(request_for("gpt3-13b", f"{count}x1:RTX3090"))


def test_more_nodes_are_those_of_the_cluster() -> None:
    told = told_of(request_for("gpt3-175b", "1x8:910B2,1x8:910B4"))
    match = re.search(r"(\d+) more nodes of 8 x 910B2, or with (\d+) more nodes of 8 x 910B4", told)
    assert match is not None and int(match[1]) <= int(match[2]), told
    assert fits(request_for("gpt3-175b", f"{1 + int(match[1])}x8:910B2,1x8:910B4"))
    assert not fits(request_for("gpt3-175b", f"{int(match[1])}x8:910B2,1x8:910B4"))


def test_a_shorter_sequence_is_the_longest_that_fits() -> None:
    model = resolve_model("gpt3-350m").model_copy(update={"max_sequence_length": 65_536})
    request = request_for("gpt3-350m", "1x1:A100", model=model, sequence_length=65_536)
    match = re.search(r"it fits with sequence_length (\d+)$", told_of(request))
    assert match is not None
    length = int(match[1])
    assert fits(request.model_copy(update={"sequence_length": length}))
    assert not fits(request.model_copy(update={"sequence_length": length + 16}))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"recompute": False, "zero_stages": (0,)}, "it fits with recomputation (leave out --no-recompute)"),
        ({"recompute": False}, "it fits with recomputation (leave out --no-recompute)"),
    ],
)
def test_what_only_an_option_forbids_comes_first(changes: dict[str, Any], remedy: str) -> None:
    assert remedy in told_of(request_for("gpt3-1.3b", "1x1:910B4", **changes))
    find_plan(request_for("gpt3-1.3b", "1x1:910B4"))


def test_a_narrower_precision_is_tried_where_activations_fill_the_memory() -> None:
    model = resolve_model("gpt3-350m").model_copy(update={"max_sequence_length": 65_536})
    request = request_for("gpt3-350m", "1x1:A100", model=model, sequence_length=65_536)
    match = re.search(r"sequence_length (\d+)$", told_of(request))
    assert match is not None
    longest = request.model_copy(update={"sequence_length": int(match[1])})
    wide = longest.model_copy(update={"dtypes": Dtypes(param="fp32")})
    assert fits(longest) and not fits(wide)
    assert "it fits with precision bf16" in told_of(wide)


def test_an_emulated_memory_scale_is_lowered_as_little_as_possible() -> None:
    request = request_for("gpt3-350m", "1x1:A100", emulation=PlanEmulation(memory_scale=40.0))
    match = re.search(r"it fits with memory_scale ([0-9.]+) in place of 40", told_of(request))
    assert match is not None
    scale = float(match[1])
    assert fits(request.model_copy(update={"emulation": PlanEmulation(memory_scale=scale)}))
    assert not fits(request.model_copy(update={"emulation": PlanEmulation(memory_scale=scale + 0.1)}))


def test_the_stage_and_the_bytes_too_many_are_named() -> None:
    told = told_of(request_for("gpt3-175b", "4x8:910B2"))
    match = re.search(
        r"stage \d of (\d) .* needs [0-9.]+ GiB a device, .* \((\d+) bytes\) more than 910B2", told
    )
    assert match is not None and int(match[2]) > 0


@pytest.mark.parametrize("strategy", ["eth", "metis"])
def test_a_large_cluster_that_is_too_small_is_told_of(strategy: str) -> None:
    with pytest.raises(UserError, match=r"model gpt3-175b does not fit"):
        find_plan(request_for("gpt3-175b", "1x8:910B2", strategy=strategy))
