"""Which files hold the weights of a run: its final ones, or those of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from actors.checkpoints import Checkpoint, check_whole, readable
from actors.job import read_job
from actors.storage import StoragePath
from planner.errors import UserError


def run_weights(run: Path, *, checkpoint: int | None = None) -> StoragePath:
    """The final weights of a run folder, or its checkpoint after an iteration. UserError, with what there is, if there
    are none, or the checkpoint was altered."""
    if not (run / "job.yaml").is_file():
        raise UserError(f"{run} is not a run folder: it holds no job.yaml; name one that eth train wrote")
    found, broken = readable(read_job(run / "job.yaml").checkpoint_folder(run))
    kept = {one.iteration: one for one in found}
    if checkpoint is not None:
        # The one that is asked for may be the one that cannot be read.
        for told in broken:
            if f"step-{checkpoint:08d}" in told:
                raise UserError(told)
        if checkpoint not in kept:
            raise UserError(f"--checkpoint {checkpoint}: {run} holds {_told(kept)}; name one that is there")
        # Weights with altered bytes would be exported or evaluated without a word.
        check_whole(kept[checkpoint])
        return kept[checkpoint].path
    final = run / "weights.safetensors"
    if not final.exists():
        remedy = f"name one with --checkpoint ({_told(kept)})" if kept else "name a run that has ended"
        raise UserError(f"{run} holds no weights.safetensors: its run has not ended well; {remedy}")
    return final


def _told(kept: Mapping[int, Checkpoint]) -> str:
    if not kept:
        return "no whole checkpoint"
    return f"the checkpoints after iteration {', '.join(map(str, sorted(kept)))}"
