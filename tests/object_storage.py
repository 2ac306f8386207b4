"""An S3-compatible server for tests, and the environment by which processes find it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

BUCKET = "bucket"


@dataclass
class ObjectStorage:
    """A running server with one bucket. `environment` is what a process needs in order to reach it."""

    endpoint: str
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self.client().create_bucket(Bucket=BUCKET)

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
        listed = self.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return [str(entry["Key"])[len(prefix) :] for entry in listed]

    def get(self, key: str) -> bytes:
        return bytes(self.client().get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def put(self, key: str, content: bytes) -> None:
        self.client().put_object(Bucket=BUCKET, Key=key, Body=content)

    def delete(self, key: str) -> None:
        self.client().delete_object(Bucket=BUCKET, Key=key)


@contextlib.contextmanager
def object_storage() -> Iterator[ObjectStorage]:
    """A server on a free port of this host, in threads of this process. Its address and keys stand in the environment
    meanwhile, so that processes which start in the block find them."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
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
