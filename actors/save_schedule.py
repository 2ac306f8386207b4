"""When a run saves its state, and which checkpoint a resumed one begins with."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from actors.checkpoints import (
    Checkpoint,
    DataIdentity,
    check_continues,
    check_whole,
    checkpoint_folders,
    checkpoint_path,
    checkpoints,
    delete,
    incomplete,
    latest,
)
from actors.job import Checkpointing, Job
from actors.storage import StoragePath, check_writable, lies_in, remove_tree
from planner.errors import UserError


class SaveSchedule:
    """The saves of one run in `folder`: every so many iterations or seconds, and after the last step."""

    def __init__(self, settings: Checkpointing, folder: StoragePath, *, steps: int) -> None:
        self._settings, self._folder, self._steps = settings, folder, steps
        self._since = time.monotonic()
        self._last: int | None = None

    @property
    def on(self) -> bool:
        """Whether the run saves at all."""
        return self._settings.every is not None

    def path_after(self, iteration: int) -> StoragePath | None:
        """Where to save after an iteration; None if it is not due. To be asked once an iteration, in order."""
        if self.on and (self._due(iteration) or iteration == self._steps):
            self._last = iteration
            return checkpoint_path(self._folder, iteration)
        return None

    @property
    def on_stop(self) -> bool:
        """Whether a run that is stopped saves before it ends."""
        return self.on and self._settings.on_stop

    def path_on_stop(self, iteration: int) -> StoragePath | None:
        """Where to save after an iteration that is to be the last; None if `path_after` had it saved."""
        return None if iteration == self._last else checkpoint_path(self._folder, iteration)

    def check_storage(self) -> None:
        """UserError if the run saves and its folder in other storage cannot be written to."""
        if self.on:
            check_writable(self._folder, field="checkpoint.directory")

    def check_new(self, run_folder: Path) -> None:
        """Before a run that starts anew: UserError if the job names a folder that holds another's checkpoints."""
        if self.on and not lies_in(self._folder, run_folder) and checkpoints(self._folder):
            raise UserError(
                f"checkpoint.directory = {self._folder} holds checkpoints of an earlier run; add --resume to go on"
                " from them, name another folder, or delete them (eth checkpoint delete)"
            )

    def clear(self, run_folder: Path) -> None:
        """Delete what an earlier run left in the run folder that the new one overwrites, and nothing elsewhere."""
        if not lies_in(self._folder, run_folder):
            return
        for path in checkpoint_folders(self._folder):
            delete(path)

    def resume(self, job: Job, data: DataIdentity, say: Callable[[str], None]) -> Checkpoint:
        """The newest checkpoint, all of its bytes looked at. UserError if there is none, it was altered, or the
        job is not a continuation of it."""
        if isinstance(self._folder, Path) and not self._folder.is_dir():
            raise UserError(
                f"--resume: {self._folder} is not there, so nothing can be gone on with; name the run folder that holds"
                " checkpoints by --output, or leave --resume out to begin anew (checkpoint.every makes checkpoints)"
            )
        newest = latest(self._folder)
        check_continues(
            newest.manifest,
            model=job.model,
            training=job.training,
            data=data,
            source=newest.path,
        )
        say(f"verifying {newest.path}")
        check_whole(newest)
        for path in incomplete(self._folder):
            remove_tree(path)
        say(f"going on after iteration {newest.iteration}")
        return newest

    def _due(self, iteration: int) -> bool:
        every = self._settings.every
        if isinstance(every, int):
            return iteration % every == 0
        seconds = self._settings.every_seconds
        if seconds is None or time.monotonic() - self._since < seconds:
            return False
        self._since = time.monotonic()
        return True
