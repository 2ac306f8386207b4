"""`eth export`: a run's weights as a Hugging Face folder."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.errors import UserError
from planner.units import parse_bytes

if TYPE_CHECKING:
    from actors.job import Job
    from actors.storage import StoragePath


def export(
    run: Annotated[Path, typer.Argument(help="run folder, or a folder that eth import wrote")],
    output: Annotated[Path, typer.Option(help="folder to write; it must be new or empty")],
    checkpoint: Annotated[
        int | None, typer.Option(help="iteration of the checkpoint to export [default: the final weights]")
    ] = None,
    shard_size: Annotated[str, typer.Option(help="size of one weight file at most")] = "5 GB",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="folder whose tokenizer files are copied along [default: those the run was trained with]"
        ),
    ] = None,
) -> None:
    """Write config.json, safetensors files and the run's tokenizer, as `transformers` loads them.

    One file's worth of weights is in memory at a time.
    """
    most = _shard_bytes(shard_size)
    check_new_folder(output)
    from actors.engine.conversion import export_hugging_face
    from actors.engine.weight_files import open_weights
    from actors.job import read_job
    from actors.model_files import (
        CONFIG,
        GENERATION,
        copy_files,
        is_tokenizer_file,
        model_files,
        original_config,
        original_generation,
        tokenizer_files,
    )
    from actors.run_weights import run_weights

    source = run_weights(run, checkpoint=checkpoint)
    copied = [file for file in model_files(run) if file.name != CONFIG]
    if tokenizer is not None:
        given = tokenizer_files(tokenizer)
        if not given:
            raise UserError(
                f"--tokenizer {tokenizer} holds no tokenizer files; name the folder of the original model"
            )
        own = {file.name for file in copied if is_tokenizer_file(file)}
        copied = [file for file in copied if file.name not in own] + given
    job = read_job(run / "job.yaml")
    model, origin, generation = job.model, original_config(run), original_generation(run)
    weights = open_weights(source, model)
    end = _end_of_text(job, origin, generation)
    with failures_told(source, output, field="RUN"):
        output.mkdir(parents=True, exist_ok=True)
        copy_files(copied, output)
        export_hugging_face(weights, output, model, shard_bytes=most, say=print, origin=origin)
        if end is not None:
            for name in (CONFIG, GENERATION):
                _add(output / name, {"eos_token_id": end})
    if end is not None:
        print(f"text that it generates ends with token {end}, which ends the documents that it has learned")
    print(f"{model.name} is in {output}: transformers.AutoModelForCausalLM.from_pretrained({str(output)!r})")


def check_new_folder(output: Path) -> None:
    """UserError unless a folder can be written anew."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {output} is not an empty folder; name another")


@contextmanager
def failures_told(source: StoragePath, output: Path, *, field: str) -> Iterator[None]:
    """UserError for an error of reading `source`, which `field` names, or of writing to `output`."""
    from actors.storage import reason, unusable

    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if full or (error.filename is not None and _concerns(Path(error.filename), output)):
            raise UserError(
                f"--output {output} cannot be written: {reason(error)}; name a folder that can be, with enough room"
            ) from None
        raise unusable(source, error, field=field) from None


def _concerns(file: Path, output: Path) -> bool:
    """Whether a file that could not be used is in a folder, or is one that it would lie in."""
    return file in (output, *output.parents) or output in file.parents


def _end_of_text(job: Job, *came_with: Mapping[str, Any] | None) -> int | None:
    """The token that ended a document in training, for a model that came with no word of which ends a text."""
    if any(config is not None and config.get("eos_token_id") is not None for config in came_with):
        return None
    end = job.data.end_of_document
    return end if isinstance(end, int) and 0 <= end < job.model.vocab_size else None


def _add(file: Path, values: dict[str, Any]) -> None:
    """Add values to a file of JSON, which need not be there."""
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps(content | values, indent=1) + "\n", encoding="utf-8")


def _shard_bytes(text: str) -> int:
    try:
        most = parse_bytes(text)
    except ValueError as error:
        raise UserError(f"--shard-size: {error}") from None
    if not isinstance(most, int) or most < 1:
        raise UserError(f"--shard-size = {text} must be at least one byte; write 5 GB, say")
    return most
