"""From request bytes to a confined job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.job import parse_job, read_job
from eth_service.errors import ProblemError
from eth_service.submission import accept_job, decode_body, job_document
from planner.errors import UserError
from planner.hugging_face import hugging_face_config
from planner.model_spec import resolve_model
from tests.eth_service.double import example_plan, job_values
from tests.object_storage import BUCKET, ObjectStorage
from tests.plans import make_model, make_plan


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "texts").mkdir(parents=True)
    (folder / "texts" / "book.txt").write_text("words " * 20)
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    return folder


def test_json_and_yaml_mean_the_same() -> None:
    values = job_values()
    from_json = decode_body(json.dumps(values).encode(), content_type="application/json; charset=utf-8")
    from_yaml = decode_body(yaml.safe_dump(values).encode(), content_type="application/yaml")
    assert from_json == from_yaml == values


def test_another_content_type_is_told_which_to_send() -> None:
    with pytest.raises(ProblemError, match="application/yaml or application/json") as caught:
        decode_body(b"{}", content_type="application/x-www-form-urlencoded")
    assert caught.value.status == 415


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{", "application/json"),
        (b"a: [", "application/yaml"),
        (b"\xff\xfe\x00", "application/yaml"),
        (b"a: !!python/object/apply:os.system [id]", "application/yaml"),
        (b"[" * 100_000, "application/json"),
        (b"[" * 5_000, "application/yaml"),
        (b"a: &a [*a]", "application/yaml"),
        (b"{a: 1, a: 2}", "application/yaml"),
        (b'{"a": 1, "a": 2}', "application/json"),
        (b'{"model": "a\\u0000b"}', "application/json"),
        (b'{"a": [{"\\ud800": 1}]}', "application/json"),
    ],
)
def test_a_broken_body_is_one_line(body: bytes, kind: str) -> None:
    with pytest.raises(UserError) as caught:
        decode_body(body, content_type=kind)
    assert "\n" not in str(caught.value)


def test_aliases_cannot_stand_for_more_than_memory_holds() -> None:
    levels = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    levels += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(UserError, match="values"):
        decode_body("\n".join(levels).encode(), content_type="application/yaml")


def test_paths_start_at_the_data_root_and_become_absolute(root: Path) -> None:
    job = accept_job(job_values(data={"path": "texts/book.txt"}), root=root)
    assert job.data.path == str((root / "texts" / "book.txt").resolve())


def test_the_stored_document_is_the_same_job_from_any_folder(root: Path, tmp_path: Path) -> None:
    (root / "cluster.yaml").write_text(yaml.safe_dump(job_values()["cluster"]))
    values = job_values(cluster="cluster.yaml", data={"path": "texts"})
    job = accept_job(values, root=root)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_document(job)))
    again = read_job(tmp_path / "job.yaml")
    assert job_document(again) == job_document(job)
    assert again.cluster == parse_job(job_values(), base=root).cluster
    assert again.texts()[0].path == root / "texts"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"data": {"path": "../secret.txt"}}, "data.path"),
        ({"data": {"path": "/etc/hostname"}}, "data.path"),
        ({"data": {"path": "link.txt"}}, "data.path"),
        ({"data": {"path": "texts", "pattern": "../../*"}}, "data.pattern"),
        ({"data": {"path": "texts", "held_out": {"path": "../secret.txt"}}}, "data.held_out.path"),
        (
            {"data": {"path": "texts", "held_out": {"path": "texts", "pattern": "/*"}}},
            "data.held_out.pattern",
        ),
        (
            {"data": {"mixture": [{"path": "texts", "weight": 1}, {"path": "../secret.txt", "weight": 1}]}},
            "data.mixture.1.path",
        ),
        ({"data": {"path": "texts", "tokenizer": "../secret.txt"}}, "data.tokenizer"),
        ({"model": "../secret.txt"}, "model"),
        ({"model": "file:///etc/hostname"}, "model"),
        ({"weights": "file:///etc/hostname"}, "weights"),
        ({"cluster": "/etc/hostname"}, "cluster"),
        ({"plan": "texts/../../secret.txt"}, "plan"),
    ],
)
def test_no_path_leads_out_of_the_data_root(root: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError, match=rf"^{field} = ") as caught:
        accept_job(job_values(**changes), root=root)
    assert "secret'" not in str(caught.value).replace("secret.txt", "")


def test_model_and_weights_may_lie_in_other_storage(root: Path, storage: ObjectStorage) -> None:
    model = hugging_face_config(resolve_model("llama3-tiny"), dtype="float32")
    storage.put("submitted/config.json", json.dumps(model).encode())
    folder = f"s3://{BUCKET}/submitted"
    job = accept_job(job_values(model=folder, weights=folder), root=root)
    assert job.weights == folder and job.model.layers == model["num_hidden_layers"]
    with pytest.raises(UserError, match=r"^model = 's3://bucket/none' holds no config.json; name the folder"):
        accept_job(job_values(model=f"s3://{BUCKET}/none"), root=root)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (job_values(model="https://host/x"), "model = 'https://host/x'"),
        (job_values(weights="https://host/x"), "weights = 'https://host/x'"),
        (job_values(checkpoint={"directory": "file:///elsewhere"}), "outside the data root"),
        (job_values(checkpoint={"directory": "memory://x"}), "no storage that every rank"),
        (job_values(data={"path": "x" * 300}), "does not exist under the data root"),
        (job_values(data={"path": "absent.txt"}), "data.path = 'absent.txt' does not exist"),
        (job_values(model="gpt5"), "model = 'gpt5' is neither a preset nor a file"),
        (job_values(priority=3), "priority is not a known key"),
        (["a list"], "a job is a mapping"),
        (job_values(data="python-stdlib"), "data"),
    ],
)
def test_a_users_mistake_names_the_field(root: Path, values: object, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        accept_job(values, root=root)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plan_that_the_runtime_cannot_execute_is_refused_at_once(root: Path) -> None:
    plan = make_plan(make_model(), [[(1, 1, 4)]], samples=[8]).model_dump(mode="json")
    plan["dtypes"]["grad"] = "bf16"
    training = {"global_batch_size": 8, "sequence_length": 32, "steps": 1, "precision": "bf16"}
    values = job_values(data={"path": "texts/book.txt"}, plan=plan, model=plan["model"], training=training)
    with pytest.raises(UserError, match=r"dtypes\.grad = 'bf16' is not supported by the runtime; use 'fp32'"):
        accept_job(values | {"cluster": "auto"}, root=root)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"path": "texts/empty.txt"}}, "it holds no text; give a text that is not empty"),
        (
            {"data": {"path": "texts/note.txt"}},
            "needs 33 tokens of text, but the data hold 6; shorten the sequence",
        ),
        ({"data": {"path": "texts", "pattern": "*.md"}}, "data.pattern = '*.md' matches no file"),
        ({"data": {"path": "texts/book.txt", "held_out": 0.9999}}, "data.held_out = 0.9999 leaves nothing"),
        (
            {"data": {"path": "texts/book.txt", "held_out": {"path": "texts/empty.txt"}}},
            "data.held_out.path = ",
        ),
        (
            {"data": {"mixture": [{"path": f"texts/{name}.txt", "weight": 1} for name in ("book", "note")]}},
            "data.mixture.1.path = '",
        ),
        ({"model": "gpt3-175b"}, "model gpt3-175b does not fit: stage 0"),
    ],
)
def test_a_job_that_cannot_run_is_refused_when_it_is_submitted(
    root: Path, changes: dict[str, Any], message: str
) -> None:
    (root / "texts" / "empty.txt").write_text("")
    (root / "texts" / "note.txt").write_text("words")
    with pytest.raises(UserError) as caught:
        accept_job(job_values(**changes), root=root)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_what_packing_leaves_to_train_on_is_not_told_by_sizes(root: Path) -> None:
    (root / "texts" / "short.txt").write_text("a" * 33)
    data = {"path": "texts/short.txt", "held_out": 0.1}
    with pytest.raises(UserError, match="leaves nothing to train on: the text holds 1 sample"):
        accept_job(job_values(data=data), root=root)
    assert accept_job(job_values(data=data | {"packing": True}), root=root).data.packing


def test_a_plan_of_ones_own_that_does_not_fit_is_refused(root: Path) -> None:
    plan = example_plan().model_dump(mode="json")
    training = {
        "global_batch_size": plan["global_batch_size"],
        "sequence_length": plan["sequence_length"],
        "steps": 1,
        "precision": "bf16",
    }
    values = job_values(plan=plan, model=plan["model"], training=training)
    values.pop("cluster")
    assert accept_job(values, root=root).plan is not None
    scaled = values | {"emulation": {"memory_scale": 1e6}}
    with pytest.raises(UserError, match=r"pipelines\[0\].stages\[0\] needs .* more than its"):
        accept_job(scaled, root=root)
