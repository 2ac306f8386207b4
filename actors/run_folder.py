"""Run folder: everything that a run leaves behind."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from actors.data_settings import with_paths
from actors.job import Job
from actors.lines import JsonLines
from actors.model_files import KEPT_FOLDER, copy_files, copy_tokenizer, model_files
from actors.text.prepared import tokenizer_of
from planner.errors import UserError
from planner.plan import Plan

# What a run writes; --overwrite removes these and nothing else of the user's.
SUMMARY, FAILURE = "summary.json", "failure.txt"
CHECKPOINTS = "checkpoints"
METRICS, SAVES = "metrics.jsonl", "saves.jsonl"
ENVIRONMENT, LOG = "environment.jsonl", "log.txt"
_GROWING = (METRICS, SAVES, ENVIRONMENT, LOG)
_FILES = ("job.yaml", "plan.json", *_GROWING, "weights.safetensors", FAILURE, SUMMARY)


def default_folder(job: Job, *, now: datetime | None = None) -> Path:
    """`runs/<name>-<time>` under the working directory."""
    moment = now or datetime.now()
    return Path("runs") / f"{job.name}-{moment:%Y%m%d-%H%M%S}"


class RunFolder:
    """One run's folder: `job.yaml`, `plan.json`, `environment.jsonl`, `metrics.jsonl`, `log.txt`,
    `weights.safetensors`, `summary.json`, `failure.txt` if the run failed, `checkpoints` and `saves.jsonl` if the job
    saves any, and `hugging-face` if there is a tokenizer of its text, or the weights that it started from came with one
    or with a config.json."""

    def __init__(self, path: Path, *, taken: bool = False) -> None:
        """`taken`: what is in the folder belongs to the run, or may go."""
        self.path = path.resolve()
        self._taken = taken
        self._held: int | None = None
        self.metrics = self.path / METRICS
        self._rows, self._saves = JsonLines(self.metrics), JsonLines(self.path / SAVES)
        self._starts = JsonLines(self.path / ENVIRONMENT)
        self.weights = self.path / "weights.safetensors"

    @classmethod
    def check(cls, path: Path, *, overwrite: bool, resume: bool = False) -> RunFolder:
        """The folder to be; UserError if it cannot take a run. Writes nothing."""
        if os.path.exists(path) and not path.is_dir():
            raise UserError(f"--output {path} is not a folder; name another")
        if overwrite and resume:
            raise UserError("--overwrite and --resume exclude each other; leave one out")
        folder = cls(path, taken=overwrite or resume)
        folder.refuse_foreign()
        return folder

    def refuse_foreign(self) -> None:
        """UserError if the folder holds something that this run may not take over, or cannot be looked into."""
        try:
            holds = self.path.is_dir() and any(self.path.iterdir())
        except OSError as error:
            raise UserError(
                f"--output {self.path} cannot be used: {error.strerror}; name another folder"
            ) from None
        if holds and not self._taken:
            raise UserError(
                f"--output {self.path} is not empty; name another folder, add --resume to go on with its run, or"
                " --overwrite to lose it"
            )

    def create(self, *, keep_metrics: bool = False) -> None:
        """Make the folder and clear what an earlier run wrote into it, the rows that a resumed run goes on
        with apart."""
        # Again: another run of the same job may have begun within the same second.
        self.refuse_foreign()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            for name in _FILES:
                if not (keep_metrics and name in _GROWING):
                    (self.path / name).unlink(missing_ok=True)
            if not keep_metrics:
                shutil.rmtree(self.path / KEPT_FOLDER, ignore_errors=True)
            self.metrics.touch()
        except OSError as error:
            raise UserError(
                f"--output {self.path} cannot be written: {error.strerror}; name another folder"
            ) from None

    def _lock(self) -> None:
        """Hold the folder until `close`: two runs that write into one would spoil both."""
        held = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(held)
            raise UserError(
                f"--output {self.path} is being written by a run that goes on; stop that one or name another folder"
            ) from None
        except OSError:
            # Some network file systems know no locks.
            os.close(held)
        else:
            self._held = held

    def close(self) -> None:
        """Let others write here."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def write_job(self, job: Job, *, end_of_document: int | None = None) -> None:
        """The job as it was understood; it can be submitted again from anywhere. `end_of_document` is the token that
        was found to end a document, of which `eth export` tells those who generate text."""
        data = job.model_dump(mode="json", exclude_defaults=True)
        if end_of_document is not None:
            data["data"]["end_of_document"] = end_of_document
        data["data"] = with_paths(data["data"], lambda _, value: str(job.placed(value).resolve()))
        if (weights := job.weights_path()) is not None:
            data["weights"] = str(weights.resolve() if isinstance(weights, Path) else weights)
        if job.checkpoint.directory is not None:
            data["checkpoint"]["directory"] = str(job.checkpoint_folder(self.path))
        self._write("job.yaml", yaml.safe_dump(data, sort_keys=False))

    def keep_model_files(self, job: Job) -> None:
        """Copy what the weights that the run starts from came with, but for the weights themselves; and the tokenizer
        that made the run's tokens, in place of theirs."""
        if (weights := job.weights_path()) is not None:
            copy_files(model_files(weights), self.path / KEPT_FOLDER)
        if (made_by := tokenizer_of(job.texts())) is not None:
            copy_tokenizer(made_by, self.path / KEPT_FOLDER)

    def write_plan(self, plan: Plan) -> None:
        self._write("plan.json", plan.model_dump_json(indent=1) + "\n")

    def append_metrics(self, row: Mapping[str, Any]) -> str | None:
        """One line of JSON. None, or why it has to wait for the next: a disk that is full must not end training."""
        return self._rows.append(row)

    def append_start(self, row: Mapping[str, Any]) -> str | None:
        """What the run was started in, in the same way."""
        return self._starts.append(row)

    def append_save(self, row: Mapping[str, Any]) -> str | None:
        """How a save of the state went, in the same way."""
        return self._saves.append(row)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """The end of the run in figures."""
        self._write(SUMMARY, json.dumps(summary, indent=1) + "\n")

    def write_failure(self, text: str) -> None:
        """What ended the run, with the stack of the rank to blame or else what its peers saw."""
        self._write(FAILURE, text.rstrip() + "\n")

    def written(self) -> list[str]:
        """Names of what the run wrote and what is there, the summary left out."""
        names = (*_FILES, KEPT_FOLDER, CHECKPOINTS)
        return [name for name in names if name != SUMMARY and (self.path / name).exists()]

    def _write(self, name: str, text: str) -> None:
        partial = self.path / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        shutil.move(partial, self.path / name)
