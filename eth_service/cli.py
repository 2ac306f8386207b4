"""The `eth` command. Each subcommand lives in `eth_service/commands/` and imports what it needs when run."""

from __future__ import annotations

import sys

import typer

from eth_service.commands import plan, profile, serve, train
from planner.errors import UserError

app = typer.Typer(
    name="eth",
    help="Plan and train one transformer on accelerators of several kinds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("plan")(plan.plan)
app.command("train")(train.train)
app.add_typer(profile.app)
app.command("serve")(serve.serve)


def main() -> None:
    """Entry point of the console script: a user's mistake is one line on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"eth: {error}", file=sys.stderr)
        sys.exit(2)
