"""Size and checksum of a file: whether its bytes are those that were written."""

from __future__ import annotations

import hashlib
from typing import Any, Literal, Self

import xxhash
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from actors.storage import StoragePath
from planner.errors import Contract

_CHUNK_BYTES = 1 << 20

Algorithm = Literal["xxh3_128", "sha256"]


class FileSum(Contract):
    """Size and checksum of a file, in hexadecimal: XXH3 of 128 bits. Manifests of before have a SHA-256 in its place.

    It tells truncated and altered bytes, not those that someone forged: whoever can write the files can write the
    manifest. SHA-256 took half of a save's processor time.
    """

    bytes: int = Field(ge=0)
    xxh3_128: str | None = None
    sha256: str | None = None

    @model_validator(mode="after")
    def _one_sum(self) -> Self:
        if (self.xxh3_128 is None) == (self.sha256 is None):
            raise ValueError("a file has one checksum, xxh3_128 or sha256")
        return self

    @model_serializer(mode="wrap")
    def _known_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}

    @property
    def algorithm(self) -> Algorithm:
        """Of which algorithm the checksum is."""
        return "sha256" if self.xxh3_128 is None else "xxh3_128"


class Summing:
    """Size and checksum of bytes as they pass."""

    def __init__(self, algorithm: Algorithm = "xxh3_128") -> None:
        self._algorithm = algorithm
        self._digest = hashlib.sha256() if algorithm == "sha256" else xxhash.xxh3_128()
        self._bytes = 0

    def update(self, data: bytes | memoryview) -> None:
        """Take further bytes. While it sums more than 100 KB at once other threads have the interpreter."""
        self._digest.update(data)
        self._bytes += len(data)

    def sum(self) -> FileSum:
        """Of what has passed so far."""
        return FileSum.model_validate({"bytes": self._bytes, self._algorithm: self._digest.hexdigest()})


def file_sum(path: StoragePath, algorithm: Algorithm = "xxh3_128") -> FileSum:
    """Size and checksum of a file, read a chunk at a time."""
    summing = Summing(algorithm)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            summing.update(chunk)
    return summing.sum()
