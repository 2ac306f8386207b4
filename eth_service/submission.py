"""From the bytes of a request to a Job that is complete, checked and confined to the data root."""

from __future__ import annotations

import json
import os
from http import HTTPStatus
from pathlib import Path, PurePath
from typing import Any

import yaml

from actors.data_settings import named_in, with_paths
from actors.job import Job, parse_job
from actors.storage import storage_path
from eth_service.errors import ProblemError
from eth_service.feasibility import check_feasible
from planner.errors import UserError, load_yaml

JSON_TYPE = "application/json"
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")
_MAX_VALUES = 500_000


def decode_body(body: bytes, *, content_type: str) -> object:
    """The values in a JSON or YAML body. ProblemError 415 for another type, UserError for a broken body."""
    kind = content_type.split(";")[0].strip().lower()
    if kind != JSON_TYPE and kind not in YAML_TYPES:
        raise ProblemError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Type = {kind or None!r}: send the job file as application/yaml or application/json",
        )
    try:
        data = json.loads(body, object_pairs_hook=_mapping) if kind == JSON_TYPE else load_yaml(body)
        _refuse_unusable(data)
    except (ValueError, yaml.YAMLError) as error:
        told = " ".join(str(error).split())
        raise UserError(f"job is not valid {'JSON' if kind == JSON_TYPE else 'YAML'}: {told}") from None
    except RecursionError:
        raise UserError("job is nested too deeply; write it as the examples are") from None
    return data


def accept_job(data: object, *, root: Path) -> Job:
    """The Job in decoded values, its files read and its data path made absolute.

    UserError names the field, the value and the remedy, as it does for a job file.
    """
    if isinstance(data, dict):
        _confine(data, root)
    job = parse_job(data, base=root)
    placed = parse_job(_absolute(job_document(job), root), base=root)
    check_feasible(placed)
    return placed


def job_document(job: Job) -> dict[str, Any]:
    """A Job as the JSON values of a job file that needs no other file."""
    return job.model_dump(mode="json")


def _absolute(document: dict[str, Any], root: Path) -> dict[str, Any]:
    """The document with absolute paths, as whoever runs the job has another working folder."""
    checkpoint = document["checkpoint"]
    document["data"] = with_paths(
        document["data"], lambda field, value: _existing(f"data.{field}", value, root)
    )
    if (weights := document["weights"]) is not None:
        document["weights"] = (
            str(storage_path(weights, base=root, field="weights"))
            if "://" in weights
            else _existing("weights", weights, root)
        )
    if checkpoint["directory"] is not None:
        place = storage_path(checkpoint["directory"], base=root, field="checkpoint.directory")
        checkpoint["directory"] = str(place)
    return document


def _existing(field: str, value: str, root: Path) -> str:
    path = (root / value).resolve()
    if not os.path.exists(path):
        raise UserError(f"{field} = {value!r} does not exist under the data root {root}; check the path")
    return str(path)


def _confine(data: dict[str, Any], root: Path) -> None:
    """Refuse every path of a job that leads out of the data root, whether by `..`, `/` or a link."""
    text, checkpoint = (
        section if isinstance(section, dict) else {} for section in (data.get("data"), data.get("checkpoint"))
    )
    named = {field: data.get(field) for field in ("cluster", "plan")} | {
        **{field: _local_path(data.get(field), root, field) for field in ("model", "weights")},
        "checkpoint.directory": _local_path(checkpoint.get("directory"), root, "checkpoint.directory"),
        **{f"data.{field}": value for field, value in named_in(text, "path")},
        **{f"data.{field}": value for field, value in named_in(text, "tokenizer")},
    }
    for field, value in named.items():
        if isinstance(value, str) and not (root / value).resolve().is_relative_to(root.resolve()):
            raise UserError(f"{field} = {value!r} is outside the data root {root}; put the file below it")
    for field, pattern in named_in(text, "pattern"):
        if isinstance(pattern, str) and (PurePath(pattern).is_absolute() or ".." in PurePath(pattern).parts):
            raise UserError(
                f"data.{field} = {pattern!r} leads out of the folder; write a pattern such as *.txt"
            )


def _local_path(value: object, root: Path, field: str) -> object:
    """The path that has to be below the root: None of a place in other storage, which has none there."""
    if not isinstance(value, str) or "://" not in value:
        return value
    place = storage_path(value, base=root, field=field)
    return str(place) if isinstance(place, Path) else None


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, in which no key may be written twice, as in a job file."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is written twice; remove one of them")
    return made


def _refuse_unusable(data: object) -> None:
    # YAML aliases let a few lines stand for more values than memory holds: count what a reader would meet.
    waiting, seen = [data], 0
    while waiting:
        value = waiting.pop()
        seen += 1
        if seen > _MAX_VALUES:
            raise ValueError(f"more than {_MAX_VALUES} values (YAML aliases count each time)")
        if isinstance(value, dict):
            for key in value:
                _refuse_unusable_text(key)
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
        else:
            _refuse_unusable_text(value)


def _refuse_unusable_text(value: object) -> None:
    """JSON can spell characters that no file name, database or job file can hold."""
    if isinstance(value, str):
        value.encode()  # half of a pair of surrogates: a UnicodeEncodeError, which is a ValueError
        if "\0" in value:
            raise ValueError(f"{value!r} holds a null character; remove it")
