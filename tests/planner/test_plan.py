"""The Plan contract: every rule has a test that breaks it and reads the message."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.cluster import from_short_form
from planner.errors import UserError, parse
from planner.plan import Plan, read_plan
from tests.plans import make_model, make_plan

Data = dict[str, Any]


@pytest.fixture
def data() -> Data:
    """Two pipelines: tp 2 x dp 1 then dp 2, and a single device of another type; six devices, one idle."""
    cluster = from_short_form("1x4:910B2,1x2:910B4")
    plan = make_plan(make_model(), [[(2, 1, 1), (1, 2, 3)], [(1, 1, 4)]], cluster=cluster)
    return plan.model_dump(mode="json")


def test_a_plan_survives_its_own_json(data: Data, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    plan = read_plan(file)
    assert plan.model_dump(mode="json") == data
    assert plan.idle_devices == ("node1/1",)


def test_ranks_follow_pipelines_stages_devices(data: Data) -> None:
    plan = parse(Plan, data, source="p")
    assert [(r.device, r.pipeline, r.stage, r.replica, r.tp_rank) for r in plan.ranks] == [
        ("node0/0", 0, 0, 0, 0),
        ("node0/1", 0, 0, 0, 1),
        ("node0/2", 0, 1, 0, 0),
        ("node0/3", 0, 1, 1, 0),
        ("node1/0", 1, 0, 0, 0),
    ]
    assert plan.sample_ranges() == [(0, 4), (4, 6)]
    stage = plan.pipelines[0].stages[1]
    assert [stage.row_range(replica) for replica in range(2)] == [(0, 1), (1, 2)]


def test_the_fingerprint_ignores_predictions(data: Data) -> None:
    plan = parse(Plan, data, source="p")
    searched = plan.model_copy(update={"search": {"seconds": 3}})
    assert searched.fingerprint() == plan.fingerprint()
    other = parse(Plan, data | {"sequence_length": 16}, source="p")
    assert other.fingerprint() != plan.fingerprint()


def _set(*path: Any) -> Callable[[Data], None]:
    *place, value = path

    def change(data: Data) -> None:
        target: Any = data
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = value

    return change


STAGE_0 = ("pipelines", 0, "stages", 0)
STAGE_1 = ("pipelines", 0, "stages", 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _set("sequence_length", 64),
            "sequence_length = 64 is more than the model's max_sequence",
        ),
        (_set("global_batch_size", 9), "samples sum to 6, not to global_batch_size = 9"),
        (_set("pipelines", 1, "id", 7), "pipelines[1].id = 7: number pipelines from 0"),
        (
            _set(*STAGE_0, "devices", ["node0/0", "node9/1"]),
            "names 'node9/1', which the cluster does not",
        ),
        (_set(*STAGE_0, "devices", ["node0/0", "node0/2"]), "names 'node0/2', which"),
        (_set("idle_devices", ["node0/0", "node1/1"]), "idle_devices names 'node0/0', which"),
        (_set("idle_devices", ["node7/0", "node1/1"]), "idle_devices names 'node7/0', which the cluster"),
        (_set("idle_devices", []), "devices node1/1 are in no stage"),
        (_set("pipelines", 0, "local_batch_size", 3), "local_batch_size = 3 must be samples = 4 rounded up"),
        (_set(*STAGE_1, "layers", [0, 4]), "overlaps the stage before it, which ends at 1"),
        (_set(*STAGE_1, "layers", [2, 4]), "leaves out layer 1"),
        (_set(*STAGE_1, "layers", [3, 1]), "ends before it starts"),
        (_set(*STAGE_1, "layers", [1, 3]), "hold layers up to 3, but the model has 4"),
        (_set(*STAGE_1, "embedding", True), "embedding = True: the first stage"),
        (_set(*STAGE_0, "head", True), "head = True: the last stage"),
        (_set(*STAGE_0, "tp", 1), "tp = 1 x dp = 1 needs 1 devices, but it names 2"),
        (_set(*STAGE_1, "rows", [2, 2]), "must be dp = 2 positive numbers that sum to micro_batch_size = 2"),
        (_set(*STAGE_1, "rows", [2, 0]), "must be dp = 2 positive numbers"),
        (_set(*STAGE_0, "recompute", {"frogs": 1}), "recompute names 'frogs'"),
        (
            _set(*STAGE_0, "recompute", {"softmax": 2}),
            "recompute.softmax = 2 must be from 0 to",
        ),
        (_set("model", "heads", 3), "tp = 2 does not divide the model's heads = 3"),
        (_set("version", 2), "version"),
        (_set("colour", "red"), "colour is not a known key"),
        (_set("pipelines", []), "pipelines"),
    ],
)
def test_a_broken_rule_is_named(data: Data, change: Callable[[Data], None], message: str) -> None:
    if message.endswith("heads = 3"):
        data["model"]["kv_heads"] = 3
    change(data)
    with pytest.raises(UserError) as error:
        parse(Plan, data, source="p")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_tp_group_stays_in_its_node_and_type(data: Data) -> None:
    mixed = from_short_form("1x1:910B2+5:910B4").model_dump(mode="json")
    same = dict(data, cluster=mixed)
    for pipeline in same["pipelines"]:
        for stage in pipeline["stages"]:
            stage["devices"] = [d.replace("node1/0", "node0/4") for d in stage["devices"]]
    same["idle_devices"] = ["node0/5"]
    with pytest.raises(UserError, match="mixes device types"):
        parse(Plan, same, source="p")
    apart = from_short_form("6x1:910B2").model_dump(mode="json")
    for pipeline in same["pipelines"]:
        for stage in pipeline["stages"]:
            stage["devices"] = [f"node{d[-1]}/0" for d in stage["devices"]]
    with pytest.raises(UserError, match="leaves a node"):
        parse(Plan, dict(same, cluster=apart, idle_devices=["node5/0"]), source="p")


def test_rows_of_one_type_are_equal_and_of_two_may_differ() -> None:
    model = make_model()
    one = make_plan(model, [[(1, 2, 4)]], micro_batch_sizes=[4]).model_dump(mode="json")
    one["pipelines"][0]["stages"][0]["rows"] = [3, 1]
    with pytest.raises(UserError, match="replicas of one device type take equal rows"):
        parse(Plan, one, source="p")
    one["cluster"] = from_short_form("1x1:910B2+1:910B4").model_dump(mode="json")
    assert parse(Plan, one, source="p").pipelines[0].stages[0].rows == (3, 1)


def test_an_empty_stage_in_the_middle_is_refused() -> None:
    data = make_plan(make_model(), [[(1, 1, 2), (1, 1, 1), (1, 1, 1)]]).model_dump(mode="json")
    data["pipelines"][0]["stages"][1]["layers"] = [2, 2]
    data["pipelines"][0]["stages"][2]["layers"] = [2, 4]
    with pytest.raises(UserError, match="is empty; remove the stage"):
        parse(Plan, data, source="p")


def test_a_plan_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_plan(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(UserError, match="holds no mapping"):
        read_plan(tmp_path / "list.json")


def test_a_copy_forgets_what_was_derived_from_the_old_fields(data: Data) -> None:
    plan = parse(Plan, data, source="p")
    assert plan.world_size == 5
    first = plan.pipelines[0].model_copy(update={"samples": plan.global_batch_size})
    copied = plan.model_copy(update={"pipelines": (first,)})
    assert copied.world_size == len(first.devices) == 4
    cluster = plan.cluster.model_copy(update={"nodes": plan.cluster.nodes[:1]})
    assert len(plan.cluster.devices) == 6 and len(cluster.devices) == 4
