"""Folders in other storage: an S3-compatible server, and fsspec's own memory, behave as a local folder does."""

from __future__ import annotations

import socket
import sys
import uuid
from pathlib import Path

import pytest

from actors.storage import RemotePath, StoragePath, check_writable, remove_tree, rename, storage_path
from planner.errors import UserError
from tests.object_storage import BUCKET, ObjectStorage

FIELD = "checkpoint.directory"


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request: pytest.FixtureRequest, storage: ObjectStorage, tmp_path: Path) -> StoragePath:
    """A folder that is not there yet, in each kind of storage."""
    name = uuid.uuid4().hex
    places: dict[str, StoragePath] = {
        "local": tmp_path / name,
        "memory": RemotePath(f"memory://test/{name}"),
        "s3": RemotePath(f"s3://{BUCKET}/deep/{name}"),
    }
    return places[request.param]


def write(path: StoragePath, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)


def read(path: StoragePath) -> bytes:
    with path.open("rb") as stream:
        return bytes(stream.read())


def listed(folder: StoragePath) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_come_back_and_go(folder: StoragePath) -> None:
    assert not folder.exists() and not folder.is_dir()
    inner = folder / "inner"
    inner.mkdir(parents=True, exist_ok=True)
    inner.mkdir(parents=True, exist_ok=True)
    write(inner / "one", b"first")
    write(folder / "two", b"second" * 100_000)
    assert listed(folder) == ["inner", "two"] and folder.is_dir() and not (folder / "two").is_dir()
    assert read(folder / "two") == b"second" * 100_000 and (inner / "one").read_text("utf-8") == "first"
    rename(inner / "one", folder / "two")
    assert read(folder / "two") == b"first" and not (inner / "one").exists()
    (folder / "two").unlink()
    (folder / "two").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        read(folder / "two")
    write(inner / "three", b"")
    remove_tree(folder)
    assert not folder.exists()


def test_a_part_of_a_file_is_read(folder: StoragePath) -> None:
    if isinstance(folder, Path):
        pytest.skip("a local file is read through its stream")
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "file", bytes(range(200)))
    assert (folder / "file").read_range(50, 20) == bytes(range(50, 70))


def test_what_others_write_is_seen(storage: ObjectStorage) -> None:
    folder = RemotePath(f"s3://{BUCKET}/shared")
    assert listed(folder) == []
    storage.put("shared/new", b"by another process")
    assert listed(folder) == ["new"] and (folder / "new").exists()
    storage.delete("shared/new")
    assert listed(folder) == [] and not (folder / "new").exists()


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("runs/mine", "/base/runs/mine"),
        ("/elsewhere/x", "/elsewhere/x"),
        ("file:///elsewhere/x/", "/elsewhere/x"),
        ("s3://bucket/folder/", "s3://bucket/folder"),
        ("S3://bucket", "s3://bucket"),
    ],
)
def test_a_path_or_a_url_is_understood(text: str, meant: str) -> None:
    assert str(storage_path(text, base=Path("/base"), field=FIELD)) == meant


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("memory://x", "no storage that every rank can write to"),
        ("https://host/x", "no storage that every rank can write to"),
        ("s3e://bucket/x", "did you mean 's3"),
        ("s3://", "names no bucket"),
        ("simplecache::s3://bucket/x", "no URL of one storage"),
    ],
)
def test_a_url_that_ranks_cannot_share_is_refused(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        storage_path(text, base=Path(), field=FIELD)
    assert str(caught.value).startswith(f"{FIELD} = {text!r}")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=r"pip install 'eth-service\[s3\]'"):
        # fsspec keeps the classes that it has imported, and no other test asks for this name of S3.
        storage_path("s3a://bucket/folder", base=Path(), field=FIELD)


def test_storage_that_takes_files_is_left_as_it_was(storage: ObjectStorage) -> None:
    check_writable(RemotePath(f"s3://{BUCKET}/probed"), field=FIELD)
    assert storage.names("probed") == []


def test_a_bucket_that_is_not_there_is_told_and_not_made(storage: ObjectStorage) -> None:
    with pytest.raises(
        UserError, match=rf"{FIELD} = s3://none/folder cannot be used: .*bucket does not exist"
    ):
        check_writable(RemotePath("s3://none/folder"), field=FIELD)
    assert [entry["Name"] for entry in storage.client().list_buckets()["Buckets"]] == [BUCKET]


def test_a_forbidden_bucket_is_told(storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    # From its first request on the server asks for keys that it knows, and it knows none.
    monkeypatch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0)
    with pytest.raises(UserError, match=r"cannot be used: .*[Aa]ccess [Kk]ey") as caught:
        check_writable(RemotePath(f"s3://{BUCKET}/folder"), field=FIELD)
    assert "AWS_ACCESS_KEY_ID" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow  # s3fs tries again for some seconds
def test_a_server_that_is_not_there_is_told(storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        # Bound and not listening: no other process can take the port and answer.
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(UserError, match=r"cannot be used: .*Could not connect"):
            check_writable(RemotePath("s3://elsewhere/x"), field=FIELD)
