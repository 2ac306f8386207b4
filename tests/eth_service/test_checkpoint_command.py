"""`eth checkpoint` on checkpoints as a run leaves them, on a disk and in an object store, and on what is none."""

from __future__ import annotations

import hashlib
import json
import sys
import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.checkpoints import (
    DataIdentity,
    Manifest,
    Place,
    Progress,
    best,
    check_whole,
    checkpoint_path,
    checkpoints,
    incomplete,
    latest,
    prune,
    write_manifest,
)
from actors.engine.weight_files import check_weights
from actors.file_sums import FileSum, file_sum
from actors.job import Checkpointing, Training
from actors.run_weights import run_weights
from actors.save_schedule import SaveSchedule
from actors.storage import RemotePath, StoragePath
from eth_service.cli import main
from planner.errors import UserError
from tests.object_storage import BUCKET, ObjectStorage
from tests.plans import make_model


def write(path: StoragePath, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)


def read(path: StoragePath) -> bytes:
    with path.open("rb") as stream:
        return bytes(stream.read())


def make_checkpoint(
    folder: Place,
    iteration: int,
    *,
    loss: float | None = 1.5,
    validation_loss: float | None = None,
    evaluated: bool = False,
) -> Place:
    """A whole checkpoint of two files."""
    path = checkpoint_path(folder, iteration)
    path.mkdir(parents=True, exist_ok=True)
    names = ("__0_0.distcp", ".metadata")
    for name in names:
        write(path / name, name.encode() * 1000 + bytes([iteration]))
    manifest = Manifest(
        progress=Progress(iteration=iteration, updates=iteration),
        model=make_model(),
        training=Training(global_batch_size=4, sequence_length=16, steps=9),
        data=DataIdentity(name="0123", tokens=100),
        plan="2 x A100: tp2 dp1, ZeRO-0",
        loss=loss,
        validation_loss=validation_loss,
        evaluated=evaluated,
        written="2026-01-01T00:00:00+00:00",
        torch="2",
        files={name: file_sum(path / name) for name in names},
    )
    write_manifest(path, manifest)
    return path


@pytest.fixture(params=["local", "s3"])
def run(request: pytest.FixtureRequest, storage: ObjectStorage, tmp_path: Path) -> StoragePath:
    """A run's folder, or what stands for it where checkpoints lie elsewhere."""
    local: StoragePath = tmp_path / "run"
    found = local if request.param == "local" else RemotePath(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    for iteration in (10, 20):
        make_checkpoint(found / "checkpoints", iteration)
    unended = checkpoint_path(found / "checkpoints", 30)
    unended.mkdir(parents=True, exist_ok=True)
    write(unended / "__0_0.distcp", b"half")
    return found


def eth(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code and output of `eth checkpoint`."""
    sys.argv = ["eth", "checkpoint", *map(str, arguments)]
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code, *capsys.readouterr()


def test_all_are_listed_and_a_crash_s_remains_are_named(
    run: StoragePath, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = eth(capsys, "list", run)
    first, second, third = out.splitlines()
    assert code == 0 and "iteration 10  loss 1.5000" in first and "iteration 20" in second
    assert "step-00000030" in third and "not whole" in third
    code, out, _ = eth(capsys, "list", run / "checkpoints", "--json")
    assert [json.loads(line)["iteration"] for line in out.splitlines()[:2]] == [10, 20]


def test_the_newest_is_shown(run: StoragePath, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = eth(capsys, "show", run)
    assert json.loads(out)["progress"]["iteration"] == 20
    _, out, _ = eth(capsys, "show", checkpoint_path(run / "checkpoints", 10))
    assert json.loads(out)["progress"]["iteration"] == 10


def test_every_byte_is_looked_at(run: StoragePath, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = eth(capsys, "verify", run)
    assert code == 0 and out.count("is whole: 2 files") == 2
    altered = checkpoint_path(run / "checkpoints", 20) / "__0_0.distcp"
    whole = read(altered)
    write(altered, whole[:-1] + b"x")
    code, out, _ = eth(capsys, "verify", run)
    assert code == 1 and f"{altered} was changed" in out and out.count("is whole") == 1
    assert f"eth checkpoint delete {checkpoint_path(run / 'checkpoints', 20)}" in out
    write(altered, whole[:-1])
    assert f"{altered} has {len(whole) - 1} bytes and not {len(whole)}" in eth(capsys, "verify", run)[1]
    altered.unlink()
    code, out, _ = eth(capsys, "verify", run)
    assert code == 1 and f"{altered} cannot be read" in out and "eth checkpoint delete" in out


def test_what_may_not_be_read_need_not_be_deleted(
    run: StoragePath, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: StoragePath, algorithm: str) -> FileSum:
        raise PermissionError(13, "Permission denied", str(path))

    # Permissions do not hold for the superuser, who may be running this.
    monkeypatch.setattr("actors.checkpoints.file_sum", refused)
    code, out, _ = eth(capsys, "verify", run)
    assert code == 1 and "Permission denied" in out and "make its files readable" in out
    assert "delete" not in out
    with pytest.raises(UserError, match=r"Permission denied; make it readable, or use another"):
        check_whole(latest(run / "checkpoints"))


def test_a_manifest_with_the_sums_of_before_is_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_checkpoint(tmp_path, 10)
    victim = path / "__0_0.distcp"
    whole = victim.read_bytes()
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(manifest["files"]["__0_0.distcp"]) == {"bytes", "xxh3_128"}
    manifest["files"] = {
        name: {
            "bytes": (path / name).stat().st_size,
            "sha256": hashlib.sha256((path / name).read_bytes()).hexdigest(),
        }
        for name in manifest["files"]
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    code, out, _ = eth(capsys, "verify", tmp_path)
    assert code == 0 and "is whole: 2 files" in out
    assert json.loads(eth(capsys, "show", path)[1])["files"] == manifest["files"]
    victim.write_bytes(whole[:-1] + b"x")
    code, out, _ = eth(capsys, "verify", tmp_path)
    assert code == 1 and f"{victim} was changed after it was written: its checksum is another" in out

    manifest["files"]["__0_0.distcp"] |= {"xxh3_128": "0" * 32}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert "a file has one checksum" in eth(capsys, "verify", tmp_path)[2]


def test_only_a_checkpoint_is_deleted(run: StoragePath, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = eth(capsys, "delete", run)
    assert code == 2 and "is not a checkpoint" in err and run.exists()
    victim = checkpoint_path(run / "checkpoints", 10)
    assert eth(capsys, "delete", victim)[0] == 0 and not victim.exists()


def test_what_is_no_checkpoint_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = eth(capsys, "list", tmp_path)
    assert code == 2 and "holds no whole checkpoint" in err
    assert "is not a folder" in eth(capsys, "list", tmp_path / "none")[2]
    broken = make_checkpoint(tmp_path, 1)
    (broken / "manifest.json").write_text('{"version": 1}')
    code, _, err = eth(capsys, "list", tmp_path)
    assert code == 2 and str(broken / "manifest.json") in err and err.count("\n") == 1


def test_the_newest_stay(run: StoragePath) -> None:
    folder = run / "checkpoints"
    assert prune(folder, keep=1) == [checkpoint_path(folder, 10)]
    assert not checkpoint_path(folder, 10).exists() and len(incomplete(folder)) == 1


def test_the_best_are_those_of_the_lowest_validation_loss(tmp_path: Path) -> None:
    # Saved before evaluation was switched on: its loss is that of a batch.
    make_checkpoint(tmp_path, 1, loss=0.5)
    for iteration, loss in ((2, 3.0), (3, 2.0), (4, 2.0), (5, 2.5), (6, None)):
        make_checkpoint(tmp_path, iteration, loss=None if loss is None else 1.0, validation_loss=loss)
    found = checkpoints(tmp_path)
    assert [one.iteration for one in best(found, 9)] == [4, 3, 5, 2, 1]
    assert best(found, 0) == []


def test_a_validation_loss_that_is_no_number_is_none_of_the_best(tmp_path: Path) -> None:
    for iteration, loss, validation_loss in ((1, 0.25, None), (2, 2.0, 2.5), (3, 1.0, 3.0)):
        make_checkpoint(tmp_path, iteration, loss=loss, validation_loss=validation_loss, evaluated=True)
    assert [one.iteration for one in best(checkpoints(tmp_path), 9)] == [2, 3]
    prune(tmp_path, keep=1, keep_best=2)
    assert [one.iteration for one in checkpoints(tmp_path)] == [2, 3]


def test_one_that_cannot_be_read_is_told_and_does_not_stand_in_the_way(
    run: StoragePath, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "checkpoints"
    broken = make_checkpoint(folder, 15)
    write(broken / "manifest.json", b'{"version": 1}')
    code, out, err = eth(capsys, "show", checkpoint_path(folder, 20))
    assert (code, err) == (0, "") and json.loads(out)["best"]
    for command in ("show", "list"):
        code, out, err = eth(capsys, command, run)
        assert code == 0 and "step-00000015/manifest.json" in err and "step-00000015)" in err
    assert "iteration 10" in out and "iteration 20" in out
    code, out, err = eth(capsys, "verify", run)
    assert code == 1 and out.count("is whole") == 2 and "step-00000015" in err
    code, _, err = eth(capsys, "show", broken)
    assert code == 2 and "manifest.json" in err


def test_one_that_cannot_be_read_stops_no_resume_from_a_newer_and_no_new_start(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        make_checkpoint(tmp_path, iteration)
    old, newest = (checkpoint_path(tmp_path, iteration) for iteration in (1, 3))
    write(old / "manifest.json", b"{")
    assert latest(tmp_path).iteration == 3
    assert prune(tmp_path, keep=1) == [checkpoint_path(tmp_path, 2)] and old.is_dir()
    write(newest / "manifest.json", b"{")
    with pytest.raises(UserError, match=rf"delete this checkpoint \(eth checkpoint delete {newest}\)"):
        latest(tmp_path)
    SaveSchedule(Checkpointing(every=1), tmp_path, steps=9).clear(tmp_path.parent)
    assert not list(tmp_path.iterdir())


def test_a_manifest_without_validation_loss_is_read(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path, 1, loss=2.0) / "manifest.json"
    older = json.loads(manifest.read_text())
    del older["validation_loss"]
    manifest.write_text(json.dumps(older))
    (found,) = checkpoints(tmp_path)
    assert found.manifest.validation_loss is None and found.metric == ("loss", 2.0)


@settings(deadline=None, max_examples=30)
@given(
    losses=st.lists(st.one_of(st.none(), st.sampled_from([1.0, 2.0, 3.0, 4.0])), min_size=1, max_size=6),
    keep=st.integers(1, 3),
    keep_best=st.integers(0, 3),
)
def test_the_newest_and_the_best_stay(
    tmp_path_factory: pytest.TempPathFactory, losses: list[float | None], keep: int, keep_best: int
) -> None:
    folder = tmp_path_factory.mktemp("pruned")
    for iteration, loss in enumerate(losses, start=1):
        make_checkpoint(folder, iteration, validation_loss=loss, loss=None)
    prune(folder, keep=keep, keep_best=keep_best)
    left = {checkpoint.iteration for checkpoint in checkpoints(folder)}
    newest = set(range(max(1, len(losses) - keep + 1), len(losses) + 1))
    ranked = sorted((loss, -iteration) for iteration, loss in enumerate(losses, start=1) if loss is not None)
    assert left == newest | {-iteration for _, iteration in ranked[:keep_best]}


def test_the_best_is_marked(run: StoragePath, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints"
    make_checkpoint(folder, 10, validation_loss=2.25)
    make_checkpoint(folder, 20, validation_loss=2.5)
    first, second, *_ = eth(capsys, "list", run)[1].splitlines()
    assert "loss 1.5000  validation loss 2.2500  best  " in first and "  best  " not in second
    rows = [json.loads(line) for line in eth(capsys, "list", run, "--json")[1].splitlines()[:2]]
    assert [(row["validation_loss"], row["best"]) for row in rows] == [(2.25, True), (2.5, False)]
    newest = json.loads(eth(capsys, "show", run)[1])
    assert newest["metric"] == {"name": "validation_loss", "value": 2.5} and not newest["best"]
    # One that is named alone is compared with those beside it.
    for iteration, is_best in ((10, True), (20, False)):
        assert json.loads(eth(capsys, "show", checkpoint_path(folder, iteration))[1])["best"] is is_best


def test_storage_that_cannot_be_reached_is_said(
    storage: ObjectStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = eth(capsys, "list", "s3://none/run")
    assert code == 2 and "s3://none/run" in err and "cannot be used: The specified bucket" in err
    assert err.count("\n") == 1
    assert "is not known" in eth(capsys, "list", "nowhere://none/run")[2]
    assert "holds no whole checkpoint" in eth(capsys, "list", f"s3://{BUCKET}/empty")[2]


def test_a_run_s_own_place_is_found(
    storage: ObjectStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = RemotePath(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    make_checkpoint(place, 10)
    data = {
        "name": "elsewhere",
        "model": "gpt3-350m",
        "data": {"path": "python-stdlib"},
        "training": {"global_batch_size": 4, "sequence_length": 16, "steps": 9},
        "checkpoint": {"every": 3, "directory": str(place)},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(data))
    assert eth(capsys, "list", tmp_path)[1].startswith(str(checkpoint_path(place, 10)))
    assert run_weights(tmp_path, checkpoint=10) == checkpoint_path(place, 10)
    make_checkpoint(place, 20)
    altered = checkpoint_path(place, 20) / "__0_0.distcp"
    write(altered, read(altered)[:-1] + b"x")
    with pytest.raises(
        UserError, match=r"__0_0.distcp was changed after it was written.*delete this checkpoint"
    ):
        run_weights(tmp_path, checkpoint=20)
    with pytest.raises(UserError, match="was changed after it was written"):
        check_weights(checkpoint_path(place, 20), make_model())
    with pytest.raises(UserError, match=r"--checkpoint 11: .* holds the checkpoints after iteration 10"):
        run_weights(tmp_path, checkpoint=11)
