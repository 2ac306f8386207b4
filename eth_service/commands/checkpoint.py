"""`eth checkpoint`: look at a run's checkpoints, prove that they are whole, delete them. Knows no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.errors import UserError
from planner.units import format_bytes

if TYPE_CHECKING:
    from actors.checkpoints import Checkpoint
    from actors.storage import StoragePath

app = typer.Typer(
    name="checkpoint", help="Look at, verify and delete the checkpoints of a run.", no_args_is_help=True
)

Folder = Annotated[
    str, typer.Argument(help="run folder, folder of checkpoints (s3://bucket/folder too), or one checkpoint")
]


@app.command("list")
def list_(
    folder: Folder, json_: Annotated[bool, typer.Option("--json", help="a line of JSON each")] = False
) -> None:
    """Show a run's checkpoints, the newest last."""
    from actors.checkpoints import incomplete

    found, broken = _found(folder)
    _tell(broken)
    first = _best_of(found)
    for checkpoint in found:
        manifest = checkpoint.manifest
        if json_:
            row = {
                "path": str(checkpoint.path),
                "iteration": checkpoint.iteration,
                "loss": manifest.loss,
                "validation_loss": manifest.validation_loss,
                "best": checkpoint.iteration == first,
                "bytes": checkpoint.bytes,
                "written": manifest.written,
                "plan": manifest.plan,
            }
            print(json.dumps(row))
            continue
        loss = "loss not finite" if manifest.loss is None else f"loss {manifest.loss:.4f}"
        if manifest.validation_loss is not None:
            loss += f"  validation loss {manifest.validation_loss:.4f}"
        if checkpoint.iteration == first:
            loss += "  best"
        print(
            f"{checkpoint.path}  iteration {checkpoint.iteration}  {loss}  {format_bytes(checkpoint.bytes)}"
            f"  {manifest.written}  {manifest.plan}"
        )
    for path in incomplete(found[0].path.parent):
        print(f"{path}  not whole: its save did not end; a resumed run ignores and removes it")


@app.command()
def show(folder: Folder) -> None:
    """Print all that a checkpoint says of itself, as JSON; of several the newest. Its metric is what the best is chosen
    by."""
    found, broken = _found(folder)
    _tell(broken)
    newest = found[-1]
    name, value = newest.metric or (None, None)
    told = newest.manifest.model_dump(mode="json")
    told |= {"metric": {"name": name, "value": value}, "best": newest.iteration == _best_of(found)}
    print(json.dumps(told, indent=1))


@app.command()
def verify(folder: Folder) -> None:
    """Compare every byte with the sums that were written. Exit code 1 if one is not as it was."""
    from actors.checkpoints import problems

    found, broken = _found(folder)
    _tell(broken)
    bad = len(broken)
    for checkpoint in found:
        told = list(problems(checkpoint))
        bad += bool(told)
        for problem in told:
            print(problem.told)
        if told and not any(problem.lost for problem in told):
            print(f"{checkpoint.path} may be whole: make its files readable and verify it again")
        elif told:
            print(
                f"{checkpoint.path} is not whole: delete it (eth checkpoint delete {checkpoint.path}); eth train"
                " --resume then goes on from the one before it"
            )
        if not told:
            print(
                f"{checkpoint.path} is whole: {len(checkpoint.manifest.files)} files, {format_bytes(checkpoint.bytes)}"
            )
    if bad:
        raise typer.Exit(1)


@app.command()
def delete(checkpoint: Annotated[str, typer.Argument(help="one checkpoint, a folder step-...")]) -> None:
    """Delete one checkpoint."""
    from actors.checkpoints import delete as delete_checkpoint
    from actors.checkpoints import is_checkpoint_folder
    from actors.storage import unusable

    path = _place(checkpoint)
    if not is_checkpoint_folder(path):
        raise UserError(
            f"{checkpoint} is not a checkpoint; name a folder step-... (eth checkpoint list shows them)"
        )
    try:
        delete_checkpoint(path)
    except OSError as error:
        raise unusable(path, error) from None
    print(f"deleted {checkpoint}")


def _found(named: str) -> tuple[list[Checkpoint], list[str]]:
    """The checkpoints that a folder or a run means, and what is wrong with those that cannot be read. UserError if none
    can."""
    from actors.checkpoints import MANIFEST, Checkpoint, read_manifest, readable
    from actors.storage import unusable

    folder = _place(named)
    if isinstance(folder, Path) and not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name a run folder or a checkpoint")
    try:
        if (folder / MANIFEST).exists():
            return [Checkpoint(folder, read_manifest(folder))], []
    except OSError as error:
        raise unusable(folder, error) from None
    found, broken = readable(_of_run(folder))
    if not found and not broken:
        found, broken = readable(folder)
    if not found:
        raise UserError(
            broken[0]
            if broken
            else f"{folder} holds no whole checkpoint; runs save them where the job says checkpoint.every"
        )
    return found, broken


def _tell(broken: Sequence[str]) -> None:
    for line in broken:
        print(f"eth: {line}", file=sys.stderr)


def _best_of(found: Sequence[Checkpoint]) -> int | None:
    """The iteration of the best checkpoint; where one alone was named, of all that lie beside it."""
    from actors.checkpoints import best, readable

    if len(found) == 1:
        path = found[0].path
        beside = (path.resolve() if isinstance(path, Path) else path).parent
        # One that was copied elsewhere under another name stands alone.
        found = readable(beside)[0] or found
    return next((checkpoint.iteration for checkpoint in best(found)), None)


def _place(named: str) -> StoragePath:
    from actors.storage import storage_path

    # A local path stays as it was written, so that what is printed can be found again.
    return storage_path(named, base=Path(), field="folder") if "://" in named else Path(named)


def _of_run(folder: StoragePath) -> StoragePath:
    """Where the checkpoints of a run folder lie, also where its job names another place."""
    if isinstance(folder, Path) and (job := folder / "job.yaml").is_file():
        from actors.job import read_job

        return read_job(job).checkpoint_folder(folder)
    return folder / "checkpoints"
