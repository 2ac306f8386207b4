"""A model by its name: a preset, a file, a folder, or a folder in other storage by its URL."""

from __future__ import annotations

from pathlib import Path

from actors.storage import StoragePath, storage_path, unusable
from planner.errors import UserError
from planner.model_spec import ModelSpec, read_model, resolve_model

_CONFIG = "config.json"


def named_model(value: object, *, base: Path) -> ModelSpec:
    """As `planner.model_spec.resolve_model`, and the model of a Hugging Face folder or of its config.json, or of a file
    of ours, that a URL names (`s3://bucket/folder`)."""
    if not isinstance(value, str) or "://" not in value:
        return resolve_model(value, base=base)
    place = storage_path(value, base=base, field="model")
    if isinstance(place, Path):
        return resolve_model(str(place))
    return model_at(place, field="model")


def model_at(place: StoragePath, *, field: str) -> ModelSpec:
    """The model of a folder or of a file. UserError if there is none, or it cannot be reached."""
    try:
        file = place if place.name.endswith((".json", ".yaml", ".yml")) else place / _CONFIG
        if not file.exists():
            raise UserError(
                f"{field} = {str(place)!r} holds no {file.name}; name the folder that save_pretrained wrote"
            )
    except OSError as error:
        raise unusable(place, error, field=field) from None
    return read_model(file, name=file.parent.name)
