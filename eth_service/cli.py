"""The `eth` command. Each subcommand lives in `eth_service/commands/` and imports what it needs when run."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from eth_service.commands import (
    checkpoint,
    compare,
    data,
    evaluate,
    export,
    import_,
    plan,
    predict,
    profile,
    runs,
    serve,
    train,
)
from planner.errors import UserError

app = typer.Typer(
    name="eth",
    help="Plan and train one transformer on accelerators of several kinds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("plan")(plan.plan)
app.command("compare")(compare.compare)
app.command("predict")(predict.predict)
app.command("train")(train.train)
app.add_typer(profile.app)
app.add_typer(checkpoint.app)
app.add_typer(runs.app)
app.add_typer(data.app)
app.command("evaluate")(evaluate.evaluate)
app.command("import")(import_.import_)
app.command("export")(export.export)
app.command("serve")(serve.serve)


def main() -> None:
    """Run one command: a user's mistake is one line on stderr and exit code 2."""
    try:
        # Without standalone mode a wrong option is raised too, instead of being drawn as a box.
        code = app(standalone_mode=False)
    except UserError as error:
        _leave(str(error), code=2)
    except typer.TyperException as error:
        _leave(" ".join(error.format_message().split()), code=error.exit_code)
    except typer.Abort:
        _leave("stopped", code=130)
    sys.exit(code if isinstance(code, int) else 0)


def _leave(message: str, *, code: int) -> NoReturn:
    # Without a command the help has been printed, and nothing is left to say.
    if message:
        print(f"eth: {message}", file=sys.stderr)
    sys.exit(code)
