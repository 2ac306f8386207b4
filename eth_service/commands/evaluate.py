"""`eth evaluate`: loss and perplexity of a run's weights on held-out text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(help="run folder")],
    checkpoint: Annotated[
        int | None, typer.Option(help="iteration of the checkpoint to evaluate [default: the final weights]")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="text to evaluate on [default: what the run held out]")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="plan file, of any devices [default: the run's plan]")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="held-out samples at most [default: all]")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to run on [default: start one for this]")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="a line of JSON")] = False,
) -> None:
    """Measure the loss of a run's weights on text that it was not trained on, the same under every plan.

    Exit code 1: a rank failed; 2: an option or the run is wrong; 130: stopped.
    """
    from actors.evaluate import evaluate_run
    from actors.failure import TrainingFailed
    from actors.metrics import finite
    from actors.report import validation_figures
    from eth_service.commands.common import tell
    from eth_service.commands.train import FAILED, STOPPED

    try:
        found = evaluate_run(
            run, checkpoint=checkpoint, data=data, plan=plan, samples=samples, address=address, say=tell
        )
    except TrainingFailed as error:
        print(f"eth: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(STOPPED) from None
    loss, perplexity = finite(found.loss), finite(found.perplexity)
    if json_:
        figures = {"loss": loss, "perplexity": perplexity, "samples": found.samples, "tokens": found.tokens}
        print(json.dumps({"iteration": found.iteration} | figures))
    elif loss is None:
        print("validation loss not finite")
    else:
        print(f"{validation_figures(loss, perplexity)} of {found.samples} samples, {found.tokens} tokens")
