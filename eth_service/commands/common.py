"""What the planning commands share: from options to a request, progress, tables, files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from planner.plan import Plan
    from planner.profile.links import LinkSource
    from planner.profile.table import ProfileTable
    from planner.request import PlanRequest


def make_request(
    model: str,
    *,
    cluster: str,
    global_batch_size: int,
    sequence_length: int | None,
    precision: str,
    command: str,
    strategy: str = "eth",
    memory_scale: float = 1.0,
    equal_batches: bool = False,
    profiles: Path | None = None,
    objective: str = "time",
    throughput_floor: float | None = None,
    prices: Sequence[str] = (),
    recompute: bool = True,
    zero: str = "0,1,2",
    sequence_parallel: bool = True,
) -> tuple[PlanRequest, ProfileTable | None]:
    """The request that the options describe, and the table of `--profiles`; UserError names the option."""
    from actors.named_model import named_model
    from planner.cluster import resolve_cluster
    from planner.errors import parse
    from planner.prices import parse_prices, with_prices
    from planner.request import PlanRequest

    spec = named_model(model, base=Path())
    request = parse(
        PlanRequest,
        {
            "model": spec,
            "cluster": with_prices(resolve_cluster(cluster), parse_prices(prices)),
            "global_batch_size": global_batch_size,
            "sequence_length": sequence_length or spec.max_sequence_length,
            "dtypes": {"param": precision},
            "strategy": strategy,
            "emulation": {"memory_scale": memory_scale},
            "equal_batches": equal_batches,
            "objective": objective,
            "throughput_floor": throughput_floor,
            "recompute": recompute,
            "zero_stages": _zero_stages(zero),
            "sequence_parallel": sequence_parallel,
        },
        source=command,
    )
    if profiles is None:
        return request, None
    from planner.profile.use import with_profiles

    measured, table, links = with_profiles(request, profiles)
    tell_profiles(table, links)
    return measured, table


def _zero_stages(text: str) -> tuple[int, ...]:
    from planner.errors import UserError

    known = {"0": 0, "1": 1, "2": 2}
    names = [name.strip() for name in text.split(",")]
    if any(name not in known for name in names):
        raise UserError(f"--zero = {text!r}: the ZeRO stages are 0, 1 and 2; write some of them, as in 0,1")
    return tuple(sorted({known[name] for name in names}))


def tell_profiles(table: ProfileTable, links: tuple[LinkSource, ...]) -> None:
    """Which times and links are measured, and which are not, on stderr."""
    kinds = ", ".join(f"{source.type} ({source.provenance})" for source in table.sources())
    tell(f"times from profiles of {kinds}")
    scopes = {"intra_node": "inside nodes", "inter_node": "between nodes"}
    unmeasured = [f"{link.device_type} {scopes[link.scope]}" for link in links if link.source == "cluster"]
    words = f" and {', '.join(unmeasured)}" if unmeasured else ""
    tell(f"not measured, so as the cluster says: links of unlike types{words}")


def progress(message: str) -> None:
    """What is going on, for the person who waits; a program that reads stderr gets the error alone."""
    if sys.stderr.isatty():
        print(f"eth: {message}", file=sys.stderr, flush=True)


def tell(message: str) -> None:
    """What the reader of the figures must know, on stderr."""
    print(f"eth: {message}", file=sys.stderr, flush=True)


def check_writable(path: Path | None) -> None:
    """UserError if --json cannot be written, told before a search whose result would be lost."""
    from planner.errors import UserError

    if path is None:
        return
    why = ""
    if path.is_dir():
        why = "it is a folder"
    elif not path.parent.is_dir():
        why = f"{path.parent} is not a folder"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "permission denied"
    if why:
        raise UserError(f"--json = {path} cannot be written: {why}; choose another file")


def write_text(text: str, path: Path) -> None:
    from planner.errors import UserError

    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json = {path} cannot be written: {error.strerror}; choose another file") from None


def title(plan: Plan | PlanRequest) -> str:
    """Model, devices, batch, sequence, precision."""
    counts = ", ".join(f"{count} x {type_}" for type_, count in plan.cluster.counts.items())
    return (
        f"{plan.model.name} on {counts}: global batch {plan.global_batch_size},"
        f" sequence {plan.sequence_length}, {plan.dtypes.param}"
    )


def console() -> Console:
    from rich.console import Console

    # Piped output has no width of its own; 80 columns would break the table.
    return Console(width=None if sys.stdout.isatty() else 130, highlight=False)
