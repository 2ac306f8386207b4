"""`eth export`: a run's weights as a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from planner.errors import UserError
from planner.units import parse_bytes

# What of a Hugging Face folder belongs to the tokenizer, and goes along.
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "generation_config.json",
)


def export(
    run: Annotated[Path, typer.Argument(help="run folder of a run that ended")],
    output: Annotated[Path, typer.Option(help="folder to write; it must be new or empty")],
    max_file_size: Annotated[str, typer.Option(help="size of one weight file at most")] = "5 GB",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Hugging Face folder whose tokenizer files are copied along")
    ] = None,
) -> None:
    """Write config.json and safetensors files that `transformers` loads as GPT-2 or LLaMA.

    One file's worth of weights is in memory at a time.
    """
    try:
        most = parse_bytes(max_file_size)
    except ValueError as error:
        raise UserError(f"--max-file-size: {error}") from None
    if not isinstance(most, int) or most < 1:
        raise UserError(f"--max-file-size = {max_file_size} must be at least one byte; write 5 GB, say")
    source = run / "weights.safetensors"
    if not source.exists():
        raise UserError(
            f"{run} holds no weights.safetensors: its run has not ended; name the folder of one that has"
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {output} is not an empty folder; name another")
    copied = _tokenizer_files(tokenizer)
    from actors.engine.weight_files import export_hugging_face
    from actors.job import read_job

    model = read_job(run / "job.yaml").model
    output.mkdir(parents=True, exist_ok=True)
    for file in copied:
        shutil.copy2(file, output / file.name)
    export_hugging_face(source, output, model, max_file_bytes=most, say=print)
    print(f"{model.name} is in {output}: transformers.AutoModelForCausalLM.from_pretrained({str(output)!r})")


def _tokenizer_files(folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    found = sorted(file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file())
    if not found:
        raise UserError(
            f"--tokenizer {folder} holds no tokenizer files; name the folder of the original model"
        )
    return found
