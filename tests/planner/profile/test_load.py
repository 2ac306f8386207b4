"""Choosing profiles for a model and a cluster, and planning with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.cluster import from_short_form
from planner.cost.price import price_plan
from planner.errors import UserError
from planner.model_spec import PRESETS, ModelSpec
from planner.plan import Dtypes
from planner.profile.file import DeviceProfile
from planner.profile.load import load_profiles
from planner.request import PlanRequest
from planner.search.strategies import find_plan
from tests.plans import make_plan

Write = Callable[..., Path]


@pytest.fixture
def write(imported: Callable[..., DeviceProfile], tmp_path: Path) -> Write:
    folder = tmp_path / "profiles"
    folder.mkdir()

    def write_profile(device_type: str = "A100", *, file: str | None = None, **source: object) -> Path:
        profile = imported(device_type, **source)
        (folder / (file or profile.file_name)).write_text(profile.to_json())
        return folder

    return write_profile


def test_takes_the_profile_of_every_type(write: Write, model: ModelSpec) -> None:
    write("A100")
    folder = write("RTX3090", degrees=(1,))
    cluster = from_short_form("1x2:A100,1x2:3090")
    table = load_profiles(folder, model=model, cluster=cluster)
    assert sorted(table.profiles) == ["A100", "RTX3090"]
    assert {source.provenance for source in table.sources()} == {"imported"}


def test_lacking_types_are_named_all_at_once(write: Write, model: ModelSpec) -> None:
    folder = write("A100")
    with pytest.raises(UserError) as error:
        load_profiles(folder, model=model, cluster=from_short_form("1x2:A100,1x2:3090,1x1:H100"))
    told = str(error.value)
    assert "RTX3090 has no profile" in told and "H100 has no profile" in told
    assert "There are: A100 of gpt3-1.3b" in told and "\n" not in told


def test_another_shape_is_told(write: Write) -> None:
    with pytest.raises(UserError, match=r"hidden_size = 2048 \(the model has 5120\)"):
        load_profiles(write(), model=PRESETS["gpt3-13b"], cluster=from_short_form("1x2:A100"))


def test_the_number_of_layers_does_not_matter(write: Write, model: ModelSpec) -> None:
    deeper = model.model_copy(update={"name": "deeper", "layers": 48})
    assert load_profiles(write(), model=deeper, cluster=from_short_form("1x2:A100")).profiles


def test_two_that_fit_are_refused(write: Write, model: ModelSpec) -> None:
    write(file="one.json")
    folder = write(file="two.json")
    with pytest.raises(UserError, match=r"has several that fit \(one.json, two.json\)"):
        load_profiles(folder, model=model, cluster=from_short_form("1x2:A100"))
    assert load_profiles(folder / "one.json", model=model, cluster=from_short_form("1x2:A100")).profiles


def test_a_plan_outside_the_profile_is_refused(write: Write, model: ModelSpec) -> None:
    cluster = from_short_form("1x4:A100")
    table = load_profiles(write(), model=model, cluster=cluster)
    fields: dict[str, Any] = {"cluster": cluster, "sequence_length": 2048, "dtypes": Dtypes(param="fp16")}
    assert price_plan(make_plan(model, [[(2, 2, 24)]], **fields), profile=table).iteration_seconds > 0
    with pytest.raises(UserError, match="at tp 1, 2, not 4"):
        price_plan(make_plan(model, [[(4, 1, 24)]], **fields), profile=table)
    with pytest.raises(UserError, match="not 16"):
        price_plan(make_plan(model, [[(2, 2, 24)]], micro_batch_sizes=[32], **fields), profile=table)


def test_the_search_keeps_to_what_was_measured(write: Write, model: ModelSpec) -> None:
    write("A100", degrees=(1,), sizes=(1, 2))
    folder = write("RTX3090", degrees=(1, 2), sizes=(1, 2, 4))
    cluster = from_short_form("1x2:A100,1x2:3090")
    table = load_profiles(folder, model=model, cluster=cluster)
    request = PlanRequest(
        model=model,
        cluster=cluster,
        global_batch_size=16,
        sequence_length=2048,
        dtypes=Dtypes(param="fp16"),
    )
    plan = find_plan(request, profile=table)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for replica, rows in enumerate(stage.rows):
                type_ = cluster.device_by_id[stage.tp_group(replica)[0]].type
                assert table.covers(
                    device_type=type_, tp=stage.tp, samples=rows, sequence_length=2048, precision="fp16"
                )


def test_a_search_for_what_was_never_measured_says_so(write: Write, model: ModelSpec) -> None:
    cluster = from_short_form("1x2:A100")
    table = load_profiles(write(), model=model, cluster=cluster)
    request = PlanRequest(model=model, cluster=cluster, global_batch_size=8, sequence_length=1024)
    with pytest.raises(UserError, match="in fp16, not in bf16"):
        find_plan(request, profile=table)
