"""The loss of a run's weights on held-out text, under its plan or another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from actors.crew import Crew
from actors.driver import bound_nodes
from actors.job import Evaluation, Job, parse_job, read_job
from actors.planning import Prepared, make_plan, prepare
from actors.ray_session import StopSignals, ray_session
from actors.run_weights import run_weights
from actors.text.prepared import tokenizer_of
from actors.worker import MakeTrainer, engine_trainer
from planner.errors import UserError
from planner.plan import read_plan

if TYPE_CHECKING:
    from actors.engine.evaluation import Validation

_PATIENCE_SECONDS = 3600.0


def evaluate_run(
    run: Path,
    *,
    checkpoint: int | None = None,
    data: Path | None = None,
    plan: Path | None = None,
    samples: int | None = None,
    address: str | None = None,
    say: Callable[[str], None],
    make_trainer: MakeTrainer = engine_trainer,
) -> Validation:
    """Evaluate a run's final weights, or those of its checkpoint after an iteration.

    `data` is a text in place of what the run held out; `plan` a file in place of the run's plan; `samples` at most are
    evaluated, all that there are unless given. Raises UserError, or TrainingFailed when a rank fails.
    """
    weights = run_weights(run, checkpoint=checkpoint)
    job = evaluation_job(run, data=data, plan=plan)
    prepared = prepare(job)
    held_out = _held_out_samples(job, prepared)
    wanted = held_out if samples is None else min(samples, held_out)
    with StopSignals() as signals, ray_session(address):
        signals.claim()
        made = make_plan(job, prepared, equal_batches=False)
        say(f"starting {made.world_size} workers for {wanted} of {held_out} held-out samples")
        with Crew(made, bound=bound_nodes(made), make_trainer=make_trainer) as crew:
            config = prepared.trainer_config(job, made)
            crew.start(replace(config, weights=weights, evaluation=Evaluation(samples=wanted)))
            validation = crew.evaluate(
                job.training.steps if checkpoint is None else checkpoint, patience_seconds=_PATIENCE_SECONDS
            )
            crew.close(patience_seconds=_PATIENCE_SECONDS)
    return validation


def evaluation_job(run: Path, *, data: Path | None, plan: Path | None) -> Job:
    """The run's job, to be run under a plan, with other text to evaluate on if some is given."""
    job = read_job(run / "job.yaml")
    if plan is not None and (planned := read_plan(plan).model) != job.model:
        raise UserError(
            f"--plan {plan} is for the model {planned.name}, which differs from the run's {job.model.name}; give a plan"
            " for the run's model, or leave it out"
        )
    # Of a Megatron pair what both files have in common may be named.
    if data is not None and not (data.exists() or Path(f"{data}.idx").exists()):
        raise UserError(f"--data {data} does not exist; give a text file or a folder")
    fields = job.model_dump(mode="json", exclude_defaults=True)
    fields["plan"] = str((plan or run / "plan.json").resolve())
    # The plan holds both: what the job says of them was for the search.
    for searched in ("cluster", "emulation", "zero_stages"):
        fields.pop(searched, None)
    fields.pop("weights", None)
    if data is not None:
        fields["data"]["held_out"] = {"path": str(data.resolve())}
        # Prepared tokens are learned without a word of what made them; the other text must become tokens by the same.
        if (tokenizer := tokenizer_of(job.texts())) is not None:
            fields["data"]["tokenizer"] = str(tokenizer)
    source = str(run / "job.yaml") if plan is None else f"--plan {plan}"
    return parse_job(fields, base=job.base, source=source)


def _held_out_samples(job: Job, prepared: Prepared) -> int:
    """How many there are. UserError if there are none."""
    from actors.engine.data import HeldOutSamples
    from actors.engine.mixture import open_tokens

    samples = HeldOutSamples(
        open_tokens(prepared.tokens),
        prepared.held_out,
        sequence_length=job.training.sequence_length,
        documents=prepared.documents,
    )
    if not samples.count:
        raise UserError(
            f"data.held_out = {job.data.held_out}: the run held nothing out to evaluate on; give a text with --data"
        )
    return samples.count
