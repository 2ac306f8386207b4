"""`eth import`: a Hugging Face folder as a folder that a job starts from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from planner.model_spec import ModelSpec

# What a job must say and a model does not: for the user to change.
_GLOBAL_BATCH_SIZE, _STEPS, _LONGEST_SAMPLE = 32, 1000, 1024
TOKENIZER_FILE = "tokenizer.json"
_LEARNING_RATE = {"peak": 1e-4, "schedule": "cosine", "warmup_steps": 50}


def import_(
    folder: Annotated[
        str,
        typer.Argument(
            help="Hugging Face folder: config.json and .safetensors files; also s3://bucket/folder"
        ),
    ],
    output: Annotated[Path, typer.Option(help="folder to write; it must be new or empty")],
    data: Annotated[str, typer.Option(help="the text that the job written here learns")] = "python-stdlib",
) -> None:
    """Check every tensor of a GPT-2 or LLaMA; write its weights, its tokenizer and a job that starts from them.

    One parameter is in memory at a time. The folder that was read is not needed any more.
    """
    from actors.named_model import model_at
    from actors.storage import storage_path
    from eth_service.commands.export import check_new_folder, failures_told
    from planner.units import format_bytes

    check_new_folder(output)
    source = storage_path(folder, base=Path(), field="FOLDER")
    model = model_at(source, field="FOLDER")
    from actors.engine.conversion import import_hugging_face
    from actors.model_files import copy_files, model_files

    with failures_told(source, output, field="FOLDER"):
        output.mkdir(parents=True, exist_ok=True)
        written = import_hugging_face(source, output, model)
        copy_files(model_files(source), output)
        _write_job(output / "job.yaml", model, precision=written.precision, data=data)
    print(f"{model.name}: {format_bytes(written.bytes)} of weights, every tensor checked")
    print(f"{output / 'job.yaml'} starts from them: look at its data and training, then eth train it")


def _write_job(path: Path, model: ModelSpec, *, precision: str, data: str) -> None:
    """A job that runs as it is. Paths that start at its folder move with it."""
    import yaml

    from actors.data_settings import PYTHON_STDLIB

    text: dict[str, Any] = {"path": data if data == PYTHON_STDLIB else str(Path(data).resolve())}
    if (path.parent / TOKENIZER_FILE).is_file():
        text["tokenizer"] = TOKENIZER_FILE
    job: dict[str, Any] = {
        "version": 1,
        "name": _job_name(model.name),
        "model": "config.json",
        "weights": "weights.safetensors",
        "data": text,
        "training": {
            "global_batch_size": _GLOBAL_BATCH_SIZE,
            "sequence_length": min(_LONGEST_SAMPLE, model.max_sequence_length),
            "steps": _STEPS,
            "precision": precision,
            "learning_rate": _LEARNING_RATE,
        },
    }
    path.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")


def _job_name(model: str) -> str:
    """A job's name for a model's, which may hold anything that a folder's may."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model).lstrip("._-")[:63] or "imported"
