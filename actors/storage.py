"""Where checkpoints lie: a local folder, or a folder in other storage by its URL (fsspec). Knows no torch.

A `RemotePath` answers to the few methods of `pathlib.Path` that checkpoints need, so that code is written once for
both. fsspec, and the package of a storage, are imported when a URL is used.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from planner.errors import UserError, did_you_mean

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE | re.DOTALL)
# What a host keeps to itself, wraps another storage, or cannot be written: no place that the ranks of a run share.
# fmt: off
_NOT_SHARED = frozenset((
    "asynclocal", "async_wrapper", "blockcache", "cached", "dask", "data", "dir", "filecache",
    "generic", "git", "github", "gist", "hf", "http", "https", "jlab", "jupyter", "libarchive",
    "local", "memory", "reference", "simplecache", "tar", "zip",
))
# fmt: on
_EXTRAS = {"s3": "s3", "s3a": "s3"}
"""Storages whose package an extra of ours installs."""
_PROBE = ".eth-probe"


class StorageError(OSError):
    """What a storage's own package raised; the message is one line."""


@dataclass(frozen=True, order=True)
class RemotePath:
    """A file or folder in storage that a URL names. Methods raise OSError, as those of a Path do.

    Object stores know no folders: one exists while something lies below it.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rpartition("/")[0])

    def exists(self) -> bool:
        with self._system() as (system, path):
            return bool(system.exists(path))

    def is_dir(self) -> bool:
        with self._system() as (system, path):
            return bool(system.isdir(path))

    def iterdir(self) -> Iterator[RemotePath]:
        """What lies in the folder, in no order; nothing if there is none."""
        with self._system() as (system, path):
            try:
                listed = system.ls(path, detail=False)
            except FileNotFoundError:
                # A folder that is not there is empty; a bucket that is not there is a mistake.
                if (bucket := _bucket(path)) and not system.exists(bucket):
                    raise
                listed = []
            # Some storages list a folder's own marker among what it holds.
            names = {str(one).rstrip("/") for one in listed} - {str(path).rstrip("/")}
        return iter([self / name.rpartition("/")[2] for name in names])

    @contextmanager
    def open(self, mode: str = "rb") -> Iterator[IO[Any]]:
        """A stream of bytes; what is written is there once the block has ended."""
        with self._system() as (system, path), system.open(path, mode) as stream:
            yield stream

    def read_range(self, start: int, length: int) -> bytes:
        """So many bytes from `start`, in one request."""
        with self._system() as (system, path):
            return bytes(system.cat_file(path, start=start, end=start + length))

    def read_text(self, encoding: str = "utf-8") -> str:
        with self._system() as (system, path):
            return bytes(system.cat_file(path)).decode(encoding)

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Make the folder and those above it, where the storage knows folders; an object store needs none, and a
        bucket's settings are its owner's to choose."""
        assert parents and exist_ok, "a folder is only ever made where one may be"
        with self._system() as (system, path):
            if not _bucket(path):
                system.makedirs(path, exist_ok=True)

    def replace(self, target: RemotePath) -> None:
        """Rename a file; one that was there is gone."""
        with self._system() as (system, path):
            system.mv(path, system._strip_protocol(target.url))

    def unlink(self, *, missing_ok: bool = False) -> None:
        with self._system() as (system, path), suppress(*([FileNotFoundError] if missing_ok else [])):
            system.rm_file(path)

    def remove_tree(self) -> None:
        """Delete the folder and all below it."""
        with self._system() as (system, path):
            system.rm(path, recursive=True)

    @contextmanager
    def _system(self) -> Iterator[tuple[Any, str]]:
        """The file system behind the URL, and the path in it; every failure of it becomes an OSError."""
        system = _connect(_server(self.url), os.getpid())
        try:
            # Other processes write here too: what was listed a moment ago says nothing.
            system.invalidate_cache()
            yield system, str(system._strip_protocol(self.url))
        except OSError:
            raise
        except Exception as error:
            # A storage's package has error classes of its own (no credentials, no route to its server).
            raise StorageError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


StoragePath = Path | RemotePath


def storage_path(text: str, *, base: Path, field: str) -> StoragePath:
    """The folder that a path (relative to `base`) or a URL means. UserError for a URL that ranks cannot share."""
    if (match := _URL.match(text)) is None:
        if "://" in text:
            raise UserError(f"{field} = {text!r} is no URL of one storage; write it as in s3://bucket/folder")
        return Path(base, os.path.expanduser(text)).resolve()
    scheme, rest = match[1].lower(), match[2].strip("/")
    if scheme == "file":
        return Path("/", rest).resolve()
    _check_scheme(scheme, text, field)
    if not rest:
        raise UserError(
            f"{field} = {text!r} names no bucket or folder; write it as in {scheme}://bucket/folder"
        )
    return RemotePath(f"{scheme}://{match[2].rstrip('/')}")


def check_writable(folder: StoragePath, *, field: str) -> None:
    """UserError if a folder in other storage cannot be reached, or takes no file or gives none back."""
    if isinstance(folder, Path):
        return
    probe = folder / _PROBE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as stream:
            stream.write(b"\n")
        probe.unlink()
    except OSError as error:
        raise unusable(folder, error, field=field) from None


def unusable(folder: StoragePath, error: OSError, *, field: str | None = None) -> UserError:
    """What a user is told of a folder that cannot be reached; `field` is where it was named."""
    named = str(folder) if field is None else f"{field} = {folder}"
    if isinstance(folder, Path):
        return UserError(
            f"{named} cannot be used: {reason(error)}; name a folder that can be read and written"
        )
    return UserError(
        f"{named} cannot be used: {reason(error)}; check the address, that the bucket or folder is there,"
        " and the credentials and endpoint in the environment (S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,"
        " AWS_ENDPOINT_URL)"
    )


def reason(error: OSError) -> str:
    """Why an operation failed, in a line without the path."""
    return error.strerror or " ".join(str(error).split()) or type(error).__name__


def rename(path: StoragePath, target: StoragePath) -> None:
    """Give a file another name in the same storage; one that had it is gone."""
    if isinstance(path, Path) and isinstance(target, Path):
        path.replace(target)
    else:
        assert isinstance(path, RemotePath) and isinstance(target, RemotePath)
        path.replace(target)


def remove_tree(path: StoragePath) -> None:
    """Delete a folder and all below it."""
    if isinstance(path, Path):
        shutil.rmtree(path)
    else:
        path.remove_tree()


def base_name(path: StoragePath) -> str:
    """The last part of a path's name, of a local one also where it was written as `.`."""
    return path.resolve().name if isinstance(path, Path) else path.name


def lies_in(path: StoragePath, folder: Path) -> bool:
    """Whether a path is below a local folder."""
    return isinstance(path, Path) and folder in path.parents


def _check_scheme(scheme: str, text: str, field: str) -> None:
    from fsspec.registry import available_protocols

    if scheme in _NOT_SHARED:
        raise UserError(
            f"{field} = {text!r}: {scheme}:// is no storage that every rank can write to and read from; name an object"
            " store such as s3://bucket/folder, or a folder that all hosts share"
        )
    if scheme not in (known := available_protocols()):
        raise UserError(
            f"{field} = {text!r}: {scheme}:// is not known; write s3://bucket/folder, or another URL of"
            f" fsspec{did_you_mean(scheme, known)}"
        )
    _file_system_class(scheme)


def _file_system_class(scheme: str) -> Any:
    """The class behind a scheme; UserError that says what to install where its package is missing."""
    from fsspec import get_filesystem_class

    try:
        return get_filesystem_class(scheme)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        remedy = f"pip install 'eth-service[{extra}]'" if extra else f"install it ({error})"
        raise UserError(f"{scheme}:// needs a package that is not installed: {remedy}") from None


@lru_cache
def _connect(server: str, process: int) -> Any:
    """The file system of a bucket or host, one a process: connections do not outlive a fork."""
    from fsspec.core import url_to_fs

    _file_system_class(server.partition("://")[0])
    return url_to_fs(server, skip_instance_cache=True)[0]


def _server(url: str) -> str:
    """A URL's scheme with the bucket or host."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def _bucket(path: str) -> str:
    """The bucket of an object store's path; empty where paths start at a root, as in a tree of folders."""
    return path.partition("/")[0]
