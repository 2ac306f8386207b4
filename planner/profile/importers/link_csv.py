"""Link CSVs: collectives `prim_<model>_<collective>_<n>gpus.csv` and transfers `p2p_<scope>_node.csv`."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from planner.errors import UserError
from planner.plan import Precision
from planner.profile.file import LinkPoint, LinkTimes

MIB = 1024**2
COLLECTIVE_NAME = re.compile(
    r"^prim_(?P<model>.+)_(?P<operation>all_reduce|all_gather|reduce_scatter|all_to_all)_(?P<members>\d+)gpus\.csv$"
)
TRANSFER_NAME = re.compile(r"^p2p_(?P<scope>intra|inter)_node\.csv$")

# The source's mark for "not measured", in milliseconds.
NOT_MEASURED = 1e9


@dataclass
class LeftOut:
    """Lines of collective files that tell no time."""

    not_measured: int = 0
    below_resolution: int = 0

    def notes(self) -> list[str]:
        notes = []
        if self.not_measured:
            notes.append(f"{self.not_measured} collectives are marked as not measured; left out")
        if self.below_resolution:
            notes.append(f"{self.below_resolution} collectives have a size or time written as 0; left out")
        return notes


def read_collective(path: Path, precision: Precision | None, left_out: LeftOut) -> LinkTimes | None:
    """Times of a collective: lines of MiB, milliseconds, in any order. None if nothing was measured.

    Collectives are measured inside a node. A size given twice counts with its mean.
    """
    match = COLLECTIVE_NAME.match(path.name)
    assert match is not None, path
    measured: dict[int, list[float]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for number, line in enumerate(csv.reader(file), start=1):
            if not line or (number == 1 and not _is_number(line[0])):
                continue
            size, milliseconds = _pair(path, number, line)
            if milliseconds >= NOT_MEASURED:
                left_out.not_measured += 1
            elif size == 0 or milliseconds == 0:
                left_out.below_resolution += 1
            else:
                measured.setdefault(round(size * MIB), []).append(milliseconds * 1e-3)
    if not measured:
        return None
    points = tuple(
        LinkPoint(message_bytes=size, seconds=round(fmean(times), 12))
        for size, times in sorted(measured.items())
    )
    return LinkTimes(
        scope="intra_node",
        operation=match["operation"],  # type: ignore[arg-type]
        members=int(match["members"]),
        precision=precision,
        source=path.name,
        points=points,
    )


def read_transfer(path: Path, precision: Precision | None) -> LinkTimes:
    """Point-to-point times: the first line holds MiB, the second GB/s."""
    match = TRANSFER_NAME.match(path.name)
    assert match is not None, path
    with path.open(newline="", encoding="utf-8") as file:
        lines = [line for line in csv.reader(file) if line]
    if len(lines) != 2 or len(lines[0]) != len(lines[1]):
        raise UserError(f"{path}: write two lines of equal length, message sizes in MiB and their GB/s")
    points = []
    for column, (size, speed) in enumerate(zip(*lines, strict=True), start=1):
        if not (_is_number(size) and _is_number(speed) and float(size) > 0 and float(speed) > 0):
            raise UserError(f"{path}: column {column} = {size!r}, {speed!r} are not two numbers above 0")
        message = round(float(size) * MIB)
        points.append(LinkPoint(message_bytes=message, seconds=message / (float(speed) * 1e9)))
    return LinkTimes(
        scope="intra_node" if match["scope"] == "intra" else "inter_node",
        operation="p2p",
        members=2,
        precision=precision,
        source=path.name,
        points=tuple(sorted(points, key=lambda point: point.message_bytes)),
    )


def _pair(path: Path, number: int, line: list[str]) -> tuple[float, float]:
    if len(line) != 2 or not all(map(_is_number, line)) or min(map(float, line)) < 0:
        raise UserError(f"{path}:{number}: {','.join(line)!r} is not a message size in MiB and milliseconds")
    return float(line[0]), float(line[1])


def _is_number(text: str) -> bool:
    try:
        return float(text) < float("inf")
    except ValueError:
        return False
