"""`eth train`: run one job from this terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from planner.errors import UserError

FAILED, STOPPED = 1, 130


def train(
    job: Annotated[Path, typer.Argument(help="job file, YAML or JSON")],
    output: Annotated[Path | None, typer.Option(help="run folder [default: runs/<name>-<time>]")] = None,
    equal_batches: Annotated[
        bool, typer.Option("--equal-batches", help="split samples equally over the pipelines, for comparison")
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to run on [default: start one for this job]")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="allow a run folder that is not empty")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the run folder's newest checkpoint")
    ] = False,
) -> None:
    """Plan a job, train it and write metrics, plan and weights to the run folder.

    Ctrl-C stops it cleanly, with its state saved if the job saves any; a second one at once. Exit code 1: a rank
    failed; 2: the job or an option is wrong; 130: stopped.
    """
    if resume and output is None:
        raise UserError("--resume needs --output with the run folder to go on with; add it")
    from actors.driver import TrainingStopped, run_job
    from actors.failure import TrainingFailed
    from actors.job import read_job
    from actors.report import Console

    try:
        run_job(
            read_job(job),
            output=output,
            address=address,
            equal_batches=equal_batches,
            overwrite=overwrite,
            resume=resume,
            observer=Console(),
        )
    except TrainingFailed as error:
        print(f"eth: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    except (TrainingStopped, KeyboardInterrupt) as error:
        print(f"eth: {str(error) or 'stopped'}", file=sys.stderr)
        raise typer.Exit(STOPPED) from None
