"""An S3-compatible server for tests, and the environment by which processes find it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BUCKET = "bucket"


@dataclass
class ObjectStorage:
    """A running server with one bucket. `environment` is what a process needs in order to reach it."""

    endpoint: str
    bucket: str = BUCKET
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self.client().create_bucket(Bucket=self.bucket)

    def client(self) -> Any:
        """A client of another make than the one under test."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )

    def names(self, prefix: str) -> list[str]:
        """The objects below a prefix, without it."""
        listed = self.client().list_objects_v2(Bucket=self.bucket, Prefix=prefix).get("Contents", [])
        return [str(entry["Key"])[len(prefix) :] for entry in listed]

    def get(self, key: str) -> bytes:
        return bytes(self.client().get_object(Bucket=self.bucket, Key=key)["Body"].read())

    def put(self, key: str, content: bytes) -> None:
        self.client().put_object(Bucket=self.bucket, Key=key, Body=content)

    def delete(self, key: str) -> None:
        self.client().delete_object(Bucket=self.bucket, Key=key)


@contextlib.contextmanager
def object_storage() -> Iterator[ObjectStorage]:
    """A server on a free port of this host, in threads of this process. Its address and keys stand in the environment
    meanwhile, so that processes which start in the block find them."""
    server = _serve(0)
    try:
        _, port = server.get_host_and_port()
        storage = ObjectStorage(f"http://127.0.0.1:{port}")
        before = dict(os.environ)
        os.environ.update(storage.environment)
        try:
            yield storage
        finally:
            os.environ.clear()
            os.environ.update(before)
    finally:
        server.stop()


class Outage:
    """A server of its own on a fixed port, that a rank in another process may stop and start again; what it stores
    stays. Requests are files in a folder: `stop` is answered with `stopped`, `start` with `started`."""

    def __init__(self, folder: Path, *, bucket: str) -> None:
        self._folder = folder
        self._server = _serve(0)
        _, self._port = self._server.get_host_and_port()
        self.storage = ObjectStorage(f"http://127.0.0.1:{self._port}", bucket=bucket)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._obey)

    def __enter__(self) -> Outage:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._server.stop()

    def _obey(self) -> None:
        while not self._ended.wait(0.02):
            if (asked := self._folder / "stop").exists():
                asked.unlink()
                self._server.stop()
                (self._folder / "stopped").touch()
            if (asked := self._folder / "start").exists():
                asked.unlink()
                self._server = _serve(self._port)
                (self._folder / "started").touch()


def ask(folder: Path, request: str, answer: str, *, seconds: float = 60.0) -> None:
    """Ask an Outage for something from any process, and wait until it is so."""
    (folder / request).touch()
    deadline = time.monotonic() + seconds
    while not (folder / answer).exists():
        assert time.monotonic() < deadline, f"no answer to {request}"
        time.sleep(0.02)


def _serve(port: int) -> Any:
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    return server
