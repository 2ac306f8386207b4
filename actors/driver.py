"""Driver: one training job from plan to result. Also the entrypoint of a Ray job:

ray job submit -- /path/to/.venv/bin/python -m actors.driver JOB.yaml [--output DIR]
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import ray
from ray.exceptions import RayError, RayTaskError

from actors.checkpoints import Checkpoint
from actors.crew import Crew, Pending
from actors.environment import describe_start
from actors.failure import TrainingFailed
from actors.inventory import NodeDevices, read_inventory
from actors.job import Job, read_job
from actors.metrics import Measurements, Row
from actors.placement import bind_nodes
from actors.planning import Prepared, make_plan, prepare
from actors.ray_session import StopSignals, ray_session, stop_seconds
from actors.run_folder import RunFolder, default_folder
from actors.run_log import Logged
from actors.save_schedule import SaveSchedule
from actors.summary import Observer, Silent, Summary, summarize
from actors.worker import MakeTrainer, engine_trainer
from planner.errors import UserError
from planner.plan import Plan

if TYPE_CHECKING:
    from actors.engine.checkpoint import SavedCheckpoint

# Iterations asked for ahead, so that workers never wait for the driver between two.
_AHEAD = 2
# A call is given up when it lasts this many times what it should: peers notice a lost rank long before.
_SLOW_FACTOR = 10.0
_SAVE_PATIENCE_SECONDS = 3600.0


class TrainingStopped(Exception):
    """The user or the system asked the run to stop; it has, and everything was put away."""


def run_job(
    job: Job,
    *,
    output: Path | None = None,
    address: str | None = None,
    equal_batches: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    observer: Observer | None = None,
    make_trainer: MakeTrainer = engine_trainer,
) -> Summary:
    """Train `job` to its last step and return the summary; RunFolder says what is left in `output`.

    With `resume` it goes on from the newest checkpoint of that run, under whatever plan the job has now. `address`
    is a Ray cluster's (None: an embedded Ray for this job alone). Raises UserError for what the user wrote,
    TrainingFailed when a rank fails, TrainingStopped on SIGINT, SIGTERM or SIGHUP. Whichever way it ends, no process of
    the run is left, and the observer is told the end of a run that had begun.
    """
    folder = RunFolder.check(output or default_folder(job), overwrite=overwrite, resume=resume)
    observer = Logged(observer or Silent())
    saves = SaveSchedule(job.checkpoint, job.checkpoint_folder(folder.path), steps=job.training.steps)
    saves.check_storage()
    prepared = prepare(job, equal_batches=equal_batches, say=observer.status)
    start = saves.resume(job, prepared.data_identity(), observer.status) if resume else None
    if start is None:
        saves.check_new(folder.path)
    run = _Run(job, folder, observer, make_trainer, saves=saves, start=start)
    with StopSignals() as signals:
        try:
            with ray_session(address):
                signals.claim()
                run.train(prepared, signals, equal_batches=equal_batches)
        except KeyboardInterrupt:
            run.finish("stopped")
            saved = "; its state is saved, --resume goes on from it" if run.saved else ""
            raise TrainingStopped(
                f"stopped after iteration {run.iterations} of {job.training.steps}{saved}"
            ) from None
        except TrainingFailed as error:
            run.finish("failed", failure=error)
            raise
        except UserError as error:
            run.finish("failed", failure=TrainingFailed(str(error)))
            raise
        except RayTaskError:
            raise  # a defect of a task of ours: its traceback says more than a line could
        except RayError as error:
            lost = TrainingFailed(f"Ray failed: {' '.join(str(error).split())}")
            run.finish("failed", failure=lost)
            raise lost from error
        else:
            return run.finish("succeeded")
        finally:
            folder.close()


class _Run:
    """The state of one run."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        observer: Observer,
        make_trainer: MakeTrainer,
        *,
        saves: SaveSchedule,
        start: Checkpoint | None,
    ) -> None:
        self._job = job
        self._saves = saves
        self._start = start
        self._done = start.iteration if start else 0
        self._folder = folder
        self._observer = observer
        self._make_trainer = make_trainer
        self._rows: list[Row] = []
        self._plan: Plan | None = None
        self._failed_saves = 0
        self._saved: int | None = None
        self._unwritten: str | None = None
        self._began = time.monotonic()

    @property
    def iterations(self) -> int:
        """Iterations that have ended, those before a checkpoint that the run began with included."""
        return self._done

    @property
    def saved(self) -> bool:
        """Whether the state after the last of them is."""
        return self._saved == self._done

    def train(self, prepared: Prepared, signals: StopSignals, *, equal_batches: bool) -> None:
        """Plan, place, iterate and save, on the Ray that this process is connected to."""
        self._observer.status("planning")
        plan = make_plan(self._job, prepared, equal_batches=equal_batches)
        bound = bound_nodes(plan)
        self._folder.create(keep_metrics=self._start is not None)
        if self._start is None:
            self._saves.clear(self._folder.path)
            self._folder.keep_model_files(self._job)
        self._folder.write_job(self._job, end_of_document=prepared.end_of_document())
        self._folder.write_plan(plan)
        self._plan = plan
        self._tell_unwritten(
            self._folder.append_start(describe_start(iteration=self._done, nodes=ray.nodes()))
        )
        self._observer.planned(plan, folder=self._folder.path, steps=self._job.training.steps)
        self._observer.status(f"starting {plan.world_size} workers")
        with Crew(plan, bound=bound, make_trainer=self._make_trainer) as crew:
            resume_from = self._start.path if self._start else None
            crew.start(prepared.trainer_config(self._job, plan, resume_from=resume_from))
            with self._holding(signals):
                self._iterate(crew, plan, signals)
            self._finish_checkpoints(crew)
            self._observer.status("saving weights")
            crew.save_weights(self._folder.weights, patience_seconds=self._patience(plan))
            crew.close(patience_seconds=self._patience(plan))

    def finish(self, state: str, *, failure: TrainingFailed | None = None) -> Summary:
        """Write the summary and tell the observer, if the run got as far as a plan."""
        if self._plan is not None and failure is not None:
            self._folder.write_failure(f"{failure}\n\n{failure.details}")
        summary = summarize(
            self._rows,
            state=state,
            folder=self._folder,
            iterations=self._done,
            steps=self._job.training.steps,
            emulated=self._plan is not None and self._plan.cluster.emulated,
            wall_seconds=time.monotonic() - self._began,
            failure=None if failure is None else str(failure),
            failed_saves=self._failed_saves,
        )
        if self._plan is not None:
            self._folder.write_summary(asdict(summary))
            self._observer.finished(summary)
        return summary

    @contextmanager
    def _holding(self, signals: StopSignals) -> Iterator[None]:
        """Within the block a stop waits, for a bounded time, until the state is saved."""
        seconds = stop_seconds()
        if not self._saves.on_stop or seconds <= 0:
            yield
            return
        try:
            with signals.held(seconds=seconds):
                yield
        except (TrainingFailed, RayError) as error:
            if not signals.asked:
                raise
            # Whatever failed did so because all of it is being ended, or cannot be gone on with any more.
            self._observer.status(f"the state could not be saved: {error}")
            signals.stop()

    def _iterate(self, crew: Crew, plan: Plan, signals: StopSignals) -> None:
        measurements = Measurements(plan)
        first, steps = self._done + 1, self._job.training.steps

        def submit(iteration: int) -> Pending:
            return crew.submit(iteration, first=first, checkpoint=self._saves.path_after(iteration))

        pending = deque(submit(i) for i in range(first, min(first + _AHEAD - 1, steps) + 1))
        for iteration in range(first, steps + 1):
            patience = self._patience(plan) * self._evaluation_rounds(plan, iteration)
            reports = crew.collect(pending.popleft(), patience_seconds=patience)
            if iteration + _AHEAD <= steps and not signals.asked:
                pending.append(submit(iteration + _AHEAD))
            row = measurements.row(reports)
            self._rows.append(row)
            self._done = iteration
            self._tell_unwritten(self._folder.append_metrics(row))
            self._observer.iteration(row)
            self._note_saves(reports[0].saved)
            if signals.asked and not pending:
                self._save_and_stop(crew, plan, signals)

    def _save_and_stop(self, crew: Crew, plan: Plan, signals: StopSignals) -> NoReturn:
        """Save the state after the last iteration that was asked for: all pipelines have ended just that one."""
        row = self._rows[-1]
        validation = row.get("validation") or {"iteration": None}
        path = self._saves.path_on_stop(self._done)
        self._observer.status(f"stopping: saving the state after iteration {self._done}")
        if path is not None:
            fresh = validation["iteration"] == self._done
            crew.save_checkpoint(
                path,
                iteration=self._done,
                loss=_number(row["loss"]),
                validation_loss=_number(validation["loss"]) if fresh else None,
                patience_seconds=self._patience(plan),
            )
        self._note_saves(crew.finish_checkpoints(patience_seconds=_SAVE_PATIENCE_SECONDS))
        signals.stop()

    def _finish_checkpoints(self, crew: Crew) -> None:
        """Wait for the last save, for which a disk may need long."""
        if self._saves.on:
            self._observer.status("saving the last checkpoint")
            self._note_saves(crew.finish_checkpoints(patience_seconds=_SAVE_PATIENCE_SECONDS))

    def _note_saves(self, saves: Iterable[SavedCheckpoint]) -> None:
        for saved in saves:
            self._tell_unwritten(self._folder.append_save(asdict(saved) | {"path": str(saved.path)}))
            if saved.error is None:
                self._saved = saved.iteration
            else:
                self._failed_saves += 1
            self._observer.checkpoint(saved)

    def _tell_unwritten(self, why: str | None) -> None:
        """Say once that the run folder takes no more rows; they are written when it does again."""
        if why is not None and why != self._unwritten:
            self._observer.status(f"{self._folder.path} cannot be written ({why}); what belongs there waits")
        self._unwritten = why

    def _evaluation_rounds(self, plan: Plan, iteration: int) -> int:
        """1, and what an evaluation adds: it is run in rounds of a global batch, none longer than an iteration."""
        evaluation = self._job.evaluation
        # With keep_best any iteration that is saved is evaluated too, and which are may be a matter of time.
        may_save = self._saves.on and self._job.checkpoint.keep_best > 0 and evaluation.every is not None
        if not may_save and not evaluation.due(iteration, steps=self._job.training.steps):
            return 1
        return 1 + -(-evaluation.samples // plan.global_batch_size)

    def _patience(self, plan: Plan) -> float:
        """How long the driver waits for a call: peers notice a lost rank sooner, by their own timeout."""
        assert plan.predicted is not None
        scale = plan.emulation.time_scale if plan.cluster.emulated else 1.0
        seen = max((row["wall_seconds"] for row in self._rows[-10:]), default=0.0)
        expected = max(seen, plan.predicted.iteration_seconds * scale)
        return 2 * self._job.runtime.timeout_seconds + _SLOW_FACTOR * expected


def _number(value: float | None) -> float:
    """A loss as it was before it became JSON."""
    return math.nan if value is None else value


def bound_nodes(plan: Plan) -> Mapping[str, NodeDevices]:
    """The Ray nodes behind the plan's real nodes."""
    if all(node.emulate for node in plan.cluster.nodes):
        return {}
    return bind_nodes(plan.cluster, read_inventory(ray.nodes()))


def main(arguments: list[str] | None = None) -> int:
    """`python -m actors.driver`; exit code 1: a rank failed, 2: a user's mistake, 130: stopped."""
    from actors.report import Console

    parser = argparse.ArgumentParser(prog="python -m actors.driver", description="Train one job on Ray.")
    parser.add_argument("job", type=Path, help="job file, YAML or JSON")
    parser.add_argument("--output", type=Path, help="run folder (default: runs/<name>-<time>)")
    parser.add_argument("--equal-batches", action="store_true", help="split samples equally over pipelines")
    parser.add_argument("--overwrite", action="store_true", help="allow a run folder that is not empty")
    parser.add_argument("--resume", action="store_true", help="go on from the run folder's newest checkpoint")
    chosen = parser.parse_args(arguments)
    try:
        run_job(
            read_job(chosen.job),
            output=chosen.output,
            # Ray sets this in a submitted job; without it the run brings its own Ray.
            address=os.environ.get("RAY_ADDRESS"),
            equal_batches=chosen.equal_batches,
            overwrite=chosen.overwrite,
            resume=chosen.resume,
            observer=Console(),
        )
    except UserError as error:
        print(f"eth: {error}", file=sys.stderr)
        return 2
    except TrainingFailed as error:
        print(f"eth: {error}", file=sys.stderr)
        return 1
    except (TrainingStopped, KeyboardInterrupt) as error:
        print(f"eth: {str(error) or 'stopped'}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
