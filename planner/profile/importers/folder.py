"""A folder of measurements -> profiles: which kind it holds, whose model it is, and what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from planner.errors import UserError
from planner.model_spec import PRESETS, ModelSpec
from planner.plan import Precision
from planner.profile.file import DeviceProfile, LinkTimes, Shape
from planner.profile.importers import layer_json, link_csv, operator_csv
from planner.profile.importers.missing import missing_data
from planner.profile.importers.names import preset_of
from planner.profile.importers.operator_csv import OperatorFile

_MADE_BY = {"importer": "1"}


@dataclass(frozen=True)
class Import:
    """One profile read from a folder: `notes` tell oddities, `missing` what is absent.

    `model` is what was measured: where it differs from the preset that its files are named after, only a
    plan for this very model can use the profile.
    """

    profile: DeviceProfile
    model: ModelSpec
    notes: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def is_preset(self) -> bool:
        return PRESETS.get(self.model.name) == self.model


@dataclass
class _Files:
    """What lies in a folder and below it, by kind."""

    operators: list[Path] = field(default_factory=list)
    collectives: list[Path] = field(default_factory=list)
    transfers: list[Path] = field(default_factory=list)
    layers: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)


def import_folder(
    folder: Path,
    *,
    device_type: str,
    model: ModelSpec | None = None,
    precision: Precision | None = None,
    sequence_length: int | None = None,
) -> list[Import]:
    """Every profile that the folder and its subfolders hold, one a model.

    `model` names what was measured where the files do not. `precision` is needed for 16-bit values outside
    a folder called fp16 or bf16, and for layer JSON, which needs `sequence_length` too. UserError where a
    figure that must be known is not; nothing is guessed.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder that holds the measurements")
    files = _sorted_out(folder)
    if files.operators and files.layers:
        raise UserError(f"{folder} holds both operator CSV and layer JSON; import them from separate folders")
    if files.operators:
        return _import_operators(folder, files, device_type, model, precision)
    if files.layers:
        return [_import_layers(folder, files, device_type, model, precision, sequence_length)]
    raise UserError(
        f"{folder} holds no profile: expected <model>_mbs<m>_tp<t>_algo0.csv, or"
        " DeviceType.<type>_tp<t>_bs<b>.json"
    )


def _sorted_out(folder: Path) -> _Files:
    files = _Files()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        operator = operator_csv.FILE_NAME.match(path.name)
        if link_csv.COLLECTIVE_NAME.match(path.name):
            files.collectives.append(path)
        elif link_csv.TRANSFER_NAME.match(path.name):
            files.transfers.append(path)
        elif operator and int(operator["algorithm"]) == 0:
            files.operators.append(path)
        elif layer_json.FILE_NAME.match(path.name):
            files.layers.append(path)
        else:
            files.others.append(path)
    return files


def _import_operators(
    folder: Path, files: _Files, device_type: str, model: ModelSpec | None, precision: Precision | None
) -> list[Import]:
    tables: dict[str, list[OperatorFile]] = {}
    for path in files.operators:
        table = operator_csv.read_operator_file(path)
        tables.setdefault(table.model, []).append(table)
    return [
        _import_model(folder, files, device_type, tables[name], spec, precision)
        for name, spec in _models(folder, list(tables), model).items()
    ]


def _models(folder: Path, names: Sequence[str], model: ModelSpec | None) -> dict[str, ModelSpec]:
    """The model of each name in the files; with `model` given, of the one name that it stands for."""
    presets = {name: preset_of(name) for name in names}
    if model is None:
        if unknown := [name for name, preset in presets.items() if preset is None]:
            raise UserError(
                f"{folder}: the model {unknown[0]!r} in the file names is not known; name it with --model"
                f" (a file, or one of {', '.join(PRESETS)})"
            )
        return {name: preset for name, preset in presets.items() if preset is not None}
    named = [name for name, preset in presets.items() if preset is not None and _same_sizes(preset, model)]
    chosen = named or list(names)
    if len(chosen) > 1:
        raise UserError(
            f"{folder} holds several models ({', '.join(names)}), none of them named like {model.name};"
            " move its files to a folder of their own"
        )
    return {chosen[0]: model}


def _same_sizes(a: ModelSpec, b: ModelSpec) -> bool:
    return (a.hidden_size, a.ffn_hidden_size, a.layers) == (b.hidden_size, b.ffn_hidden_size, b.layers)


def _import_model(
    folder: Path,
    files: _Files,
    device_type: str,
    tables: Sequence[OperatorFile],
    model: ModelSpec,
    precision: Precision | None,
) -> Import:
    name = tables[0].model
    precisions = {table.path: _precision(table, model, precision) for table in tables}
    shape = operator_csv.measured_shape(tables, model)
    measured = _as_measured(model, shape)
    of_folder = {path.parent: value for path, value in precisions.items()}
    links, notes = _links(files, name, of_folder)
    profile = DeviceProfile(
        device_type=device_type,
        model=measured.name,
        shape=shape,
        provenance="imported",
        source=f"operator CSV, {folder.name}: {name}",
        date=date.today(),
        versions=_MADE_BY,
        includes_tp_collectives=True,
        groups=operator_csv.groups_of(tables, measured, precisions),
        links=links,
    )
    if measured != model:
        notes.insert(0, f"measured with {', '.join(shape.unlike(model))}: {name} is not quite {model.name}")
    notes += _odd_figures(profile)
    notes += [f"{path.relative_to(folder)}: not a profile, left out" for path in files.others]
    return Import(profile, measured, tuple(notes), missing_data(profile, measured))


def _precision(table: OperatorFile, model: ModelSpec, given: Precision | None) -> Precision:
    width = operator_csv.value_width(table, model)
    if width == 4:
        if given not in (None, "fp32"):
            raise UserError(f"{table.path} holds fp32 values; leave --precision {given} out")
        return "fp32"
    folder = table.path.parent.name
    told: Precision | None = "fp16" if folder == "fp16" else "bf16" if folder == "bf16" else None
    precision = given or told
    if precision is None or precision == "fp32":
        raise UserError(f"{table.path} holds 16-bit values; say --precision fp16 or --precision bf16")
    return precision


def _as_measured(model: ModelSpec, shape: Shape) -> ModelSpec:
    """The model with the heads and vocabulary that were measured, named after what differs."""
    changes: dict[str, int] = {}
    suffix = ""
    if shape.heads not in (None, model.heads):
        changes |= {"heads": shape.heads or 0, "kv_heads": shape.kv_heads or 0}
        suffix += f"-heads{shape.heads}"
    elsewhere = shape.model_copy(update={"heads": None, "kv_heads": None})
    if elsewhere.unlike(model):
        changes["vocab_size"] = shape.vocab_size or 0
        suffix += f"-vocab{shape.vocab_size}"
    if not changes:
        return model
    return ModelSpec.model_validate(model.model_dump() | changes | {"name": model.name + suffix})


def _links(
    files: _Files, name: str, precisions: dict[Path, Precision]
) -> tuple[tuple[LinkTimes, ...], list[str]]:
    """Transfers of every folder, and the collectives that belong to the model of that name."""
    links: list[LinkTimes] = []
    left_out = link_csv.LeftOut()
    for path in files.transfers:
        links.append(link_csv.read_transfer(path, precisions.get(path.parent)))
    for path in files.collectives:
        match = link_csv.COLLECTIVE_NAME.match(path.name)
        assert match is not None
        if match["model"] != name:
            continue
        times = link_csv.read_collective(path, precisions.get(path.parent), left_out)
        if times is not None:
            links.append(times)
    return tuple(links), left_out.notes()


def _odd_figures(profile: DeviceProfile) -> list[str]:
    times = [(group.name, time) for group in profile.groups for time in group.times]
    zeros = [name for name, time in times if not (time.forward_seconds and time.backward_seconds)]
    no_memory = [
        name for name, t in times if t.total_bytes is None and None in (t.saved_bytes, t.workspace_bytes)
    ]
    notes = []
    if zeros:
        names = ", ".join(dict.fromkeys(zeros))
        notes.append(f"{len(zeros)} times are 0, below the timer's resolution ({names}); kept as 0")
    if no_memory:
        names = ", ".join(dict.fromkeys(no_memory))
        notes.append(f"{len(no_memory)} cases have negative memory figures ({names}); left unknown")
    return notes


def _import_layers(
    folder: Path,
    files: _Files,
    device_type: str,
    model: ModelSpec | None,
    precision: Precision | None,
    sequence_length: int | None,
) -> Import:
    for option, value in (
        ("--model", model),
        ("--precision", precision),
        ("--sequence-length", sequence_length),
    ):
        if value is None:
            raise UserError(f"{folder}: layer JSON does not tell its {option[2:]}; add {option}")
    assert model is not None and precision is not None and sequence_length is not None
    read = [layer_json.read_layer_file(path) for path in files.layers]
    tables = layer_json.of_type(folder, read, device_type)
    layer_json.check_parameters(tables, model)
    profile = DeviceProfile(
        device_type=device_type,
        model=model.name,
        shape=layer_json.stated_shape(model),
        provenance="imported",
        source=f"layer JSON, {folder.name}: {tables[0].device_type}",
        date=date.today(),
        versions=_MADE_BY,
        includes_tp_collectives=True,
        assumptions=layer_json.ASSUMPTIONS,
        groups=layer_json.groups_of(tables, model, precision=precision, sequence_length=sequence_length),
    )
    notes = list(layer_json.ASSUMPTIONS)
    layers = len(tables[0].milliseconds) - 2
    if layers != model.layers:
        notes.append(f"measured on {layers} layers; the mean one stands for all {model.layers}")
    notes += [f"{path.relative_to(folder)}: not a profile, left out" for path in files.others]
    return Import(profile, model, tuple(notes + _odd_figures(profile)), missing_data(profile, model))
