"""`eth data`: make a text's tokens ahead of any job, and look at what was made. Knows neither torch nor ray."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.errors import UserError
from planner.units import format_bytes

if TYPE_CHECKING:
    from actors.engine.tokens import TokenFile

app = typer.Typer(
    name="data", help="Make a text's tokens ahead of training, and look at them.", no_args_is_help=True
)


@app.command()
def prepare(
    path: Annotated[str, typer.Argument(help="file, folder, or python-stdlib, as data.path of a job")],
    output: Annotated[Path, typer.Option(help="folder for the tokens; a job names it as data.path")],
    pattern: Annotated[str, typer.Option(help="which files of a folder")] = "*",
    format_: Annotated[
        str, typer.Option("--format", help="auto, text, jsonl, parquet, megatron or numpy")
    ] = "auto",
    field: Annotated[str, typer.Option(help="JSONL field or Parquet column of the text")] = "text",
    tokenizer: Annotated[str, typer.Option(help="byte, or the path of a tokenizer.json")] = "byte",
    end_of_document: Annotated[
        str | None, typer.Option(help="token that ends a document [default: the tokenizer's]")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="that work side by side [default: one a core]")
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="then delete the parts in the folder that this text does not use")
    ] = False,
) -> None:
    """Make the tokens of a text. A run that was stopped is gone on with by the same command."""
    from rich.console import Console
    from rich.progress import Progress

    from actors.data_settings import Data
    from actors.text.prepared import write_prepared
    from eth_service.commands.common import tell
    from planner.errors import parse

    values = {
        "path": path,
        "pattern": pattern,
        "format": format_,
        "field": field,
        "tokenizer": tokenizer,
        "end_of_document": end_of_document,
    }
    (source,) = parse(Data, values, source="eth data prepare").sources(Path())
    console = Console(stderr=True)
    with _locked(output):
        try:
            with Progress(console=console, disable=not sys.stderr.isatty()) as bar:
                task = bar.add_task("parts", total=None)
                made = write_prepared(
                    source,
                    output,
                    processes=processes or os.cpu_count() or 1,
                    say=lambda told: console.print(told, soft_wrap=True),
                    progress=lambda done, total: bar.update(task, completed=done, total=total),
                )
        except KeyboardInterrupt:
            tell(f"stopped; what is finished stays in {output}, and the same command goes on from there")
            raise typer.Exit(130) from None
        _tell_unused(made, output, prune=prune)
    print(f"{output}: {made.count} tokens of {made.header.documents} documents; a job names it as data.path")


def _tell_unused(made: TokenFile, output: Path, *, prune: bool) -> None:
    from actors.text.prepared import unused
    from eth_service.commands.common import tell

    left = unused(made)
    counted = f"{left.parts} part{'s' * (left.parts != 1)} ({format_bytes(left.bytes)})"
    if prune:
        left.delete()
        tell(f"deleted {counted} that this text does not use")
    elif left.parts:
        tell(
            f"{output} also holds {counted} of another text or tokenizer, or of this text before it changed; --prune"
            " deletes what this text does not use"
        )


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="folder that `eth data prepare` wrote")],
    json_: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Show what a prepared folder holds."""
    from actors.text.prepared import PREPARED, open_prepared

    made = open_prepared(folder)
    if made is None:
        raise UserError(f"{folder} holds no {PREPARED}; name a folder that eth data prepare has finished")
    header = made.header
    held = sum((made.path.parent / part.path).stat().st_size for part in header.parts)
    told = {
        "tokens": made.count,
        "documents": header.documents,
        "tokenizer": header.tokenizer,
        "vocabulary": header.vocabulary,
        "end_of_document": header.end_of_document,
        "parts": len(header.parts),
        "bytes": held,
        "name": made.path.stem,
    }
    if json_:
        print(json.dumps(told))
        return
    for name, value in (told | {"bytes": format_bytes(held)}).items():
        print(f"{name:16} {'unknown' if value is None else value}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two that write into one folder would clear away each other's unfinished parts."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"--output {folder} cannot be written: {error.strerror}; name another folder"
        ) from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(
            f"--output {folder} is being written by another eth data prepare; wait for it or name another folder"
        ) from None
    finally:
        os.close(held)
