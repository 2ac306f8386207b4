"""Operator CSVs `<model>_mbs<m>_tp<t>_algo0.csv`: microseconds and MiB, one row an operator.

TP collectives are inside the times. Sequence length, precision and most of the shape are not written
anywhere, but follow exactly from the sizes of weights and activations.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from planner.errors import UserError
from planner.model_spec import ModelSpec
from planner.plan import Precision
from planner.profile.file import OperatorTime, ProfiledGroup, Shape
from planner.profile.importers.names import OPERATORS

MIB = 1024**2
FILE_NAME = re.compile(r"^(?P<model>.+)_mbs(?P<samples>\d+)_tp(?P<tp>\d+)_algo(?P<algorithm>\d+)\.csv$")

# Sizes are rounded to a thousandth of a MiB and small values lose most of their digits.
_TOLERANCE = 0.01
_FORWARD, _BACKWARD, _OUTPUT = "forward-compute", "backward-compute", "output_size"
# Differences of a memory counter: a negative one only says that the counter moved otherwise.
_DIFFERENCES = ("activations", "fwd_reserved", "bwd_reserved")
_COLUMNS = (_FORWARD, _BACKWARD, _OUTPUT, "weights", *_DIFFERENCES)


@dataclass(frozen=True)
class Row:
    """Microseconds and MiB of one operator; None where the source's figure makes no sense."""

    forward: float
    backward: float
    output: float
    weights: float
    activations: float | None
    workspace: float | None


@dataclass(frozen=True)
class OperatorFile:
    """One CSV: rows by the source's operator name."""

    path: Path
    model: str
    samples: int
    tp: int
    rows: dict[str, Row]

    def row(self, operator: str) -> Row | None:
        """The row of a product operator that is timed alone or with others."""
        for name, row in self.rows.items():
            if operator in OPERATORS[name].operators:
                return row
        return None


def read_operator_file(path: Path) -> OperatorFile:
    """One file; UserError that names the column, the row or the operator that is wrong."""
    match = FILE_NAME.match(path.name)
    assert match is not None, path
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or ()
        if missing := [name for name in ("op_name", *_COLUMNS) if name not in columns]:
            raise UserError(f"{path}: column {missing[0]!r} is missing; it has {', '.join(columns)}")
        rows: dict[str, Row] = {}
        for number, row in enumerate(reader, start=2):
            name = (row["op_name"] or "").strip()
            if name not in OPERATORS:
                raise UserError(
                    f"{path}:{number}: operator {name!r} is not known; known are {', '.join(OPERATORS)}"
                )
            if name in rows:
                raise UserError(f"{path}:{number}: operator {name!r} has two rows; keep one")
            rows[name] = _row(path, number, row)
    return OperatorFile(path, match["model"], int(match["samples"]), int(match["tp"]), rows)


def _row(path: Path, line: int, cells: dict[str, str]) -> Row:
    def number(column: str) -> float:
        try:
            value = float(cells[column] or "")
        except ValueError:
            value = float("nan")
        if not isfinite(value) or (value < 0 and column not in _DIFFERENCES):
            raise UserError(
                f"{path}:{line}: {column} = {cells[column]!r} is not a number from 0 up; correct it"
            )
        return value

    reserved = [number("fwd_reserved"), number("bwd_reserved")]
    activations = number("activations")
    return Row(
        forward=number(_FORWARD),
        backward=number(_BACKWARD),
        output=number(_OUTPUT),
        weights=number("weights"),
        activations=activations if activations >= 0 else None,
        workspace=max(reserved) if min(reserved) >= 0 else None,
    )


def value_width(file: OperatorFile, model: ModelSpec) -> int:
    """Bytes a parameter: 4 or 2. UserError where the weights do not fit the model's sizes."""
    widths = set()
    for name, row in file.rows.items():
        values = OPERATORS[name].weights(model) / file.tp
        if not values:
            continue
        width = row.weights * MIB / values
        near = next((w for w in (2, 4) if abs(width / w - 1) < _TOLERANCE), None)
        if near is None:
            raise UserError(
                f"{file.path}: {name} has {row.weights} MiB of weights, which {model.name} (hidden_size"
                f" {model.hidden_size}, ffn_hidden_size {model.ffn_hidden_size}) cannot have at tp {file.tp};"
                " name the model that was measured with --model"
            )
        widths.add(near)
    if len(widths) != 1:
        raise UserError(f"{file.path}: its weights do not tell one precision; say which model with --model")
    return widths.pop()


def sequence_length(file: OperatorFile, model: ModelSpec, width: int) -> int:
    """Tokens a sample, from the size of the embedding's output."""
    row = file.row("embedding")
    if row is None:
        raise UserError(f"{file.path}: no row for the embedding, whose output tells the sequence length")
    exact = row.output * MIB / (file.samples * model.hidden_size * width)
    length = round(exact)
    if length < 1 or abs(exact / length - 1) > _TOLERANCE:
        raise UserError(
            f"{file.path}: the embedding's output of {row.output} MiB is no whole number of tokens for"
            f" hidden_size {model.hidden_size}; name the model that was measured with --model"
        )
    return length


def measured_shape(files: Sequence[OperatorFile], model: ModelSpec) -> Shape:
    """The shape that the sizes tell, from the file of the lowest TP degree and largest micro-batch.

    Where heads or vocabulary leave no trace in the sizes they stay unknown.
    """
    file = min(files, key=lambda file: (file.tp, -file.samples))
    width = value_width(file, model)
    length = sequence_length(file, model, width)
    scores = file.rows.get("enc-attention-score")
    heads = None
    if scores is not None and scores.activations:
        square = length * length * file.samples * width / file.tp
        heads = round(scores.activations * MIB / square) or None
    ungrouped = model.heads == model.kv_heads
    head = file.row("vocabulary_projection")
    vocabulary = round(head.weights * MIB * file.tp / (width * model.hidden_size)) if head else 0
    return Shape(
        family=model.family,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        heads=heads,
        kv_heads=heads if ungrouped else None,
        vocab_size=vocabulary if vocabulary >= 2 else None,
    )


def groups_of(
    files: Sequence[OperatorFile], model: ModelSpec, precisions: dict[Path, Precision]
) -> tuple[ProfiledGroup, ...]:
    """Every operator's times over all files, in the order of the first file's rows."""
    names = list(dict.fromkeys(name for file in files for name in file.rows))
    groups = []
    for name in names:
        source = OPERATORS[name]
        times = [_time(file, name, model, precisions[file.path]) for file in files if name in file.rows]
        times.sort(key=lambda time: (time.precision, time.tp, time.samples))
        groups.append(
            ProfiledGroup(name=source.name, part=source.part, operators=source.operators, times=tuple(times))
        )
    return tuple(groups)


def _time(file: OperatorFile, name: str, model: ModelSpec, precision: Precision) -> OperatorTime:
    row, source = file.rows[name], OPERATORS[name]
    saved = row.activations
    return OperatorTime(
        tp=file.tp,
        samples=file.samples,
        sequence_length=sequence_length(file, model, 4 if precision == "fp32" else 2),
        precision=precision,
        forward_seconds=_seconds(row.forward),
        backward_seconds=_seconds(row.backward),
        # Vectors (norms, biases) are left out of the files: 0 means unknown for an operator that has some.
        parameter_bytes=_bytes(row.weights) or (None if "norm" in source.name else 0),
        saved_bytes=None if saved is None else {source.storage or source.name: _bytes(saved)},
        workspace_bytes=None if row.workspace is None else _bytes(row.workspace),
    )


def _seconds(microseconds: float) -> float:
    return round(microseconds * 1e-6, 12)


def _bytes(mebibytes: float) -> int:
    return round(mebibytes * MIB)
