"""`eth profile`: read profiles that others measured, and show what profile files hold."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from planner.plan import Precision
    from planner.profile.file import Calibration, DeviceProfile
    from planner.profile.importers import Import

app = typer.Typer(
    name="profile", help="Measured times of device types: import them, show them.", no_args_is_help=True
)


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(help="folder of operator CSV or layer JSON, with subfolders")],
    as_: Annotated[str, typer.Option("--as", metavar="TYPE", help="device type that was measured")],
    model: Annotated[
        str | None,
        typer.Option(help="measured model: preset, file, folder or URL [default: by the file names]"),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16, where the files do not tell")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="tokens a sample, where the files do not tell")
    ] = None,
    output: Annotated[Path, typer.Option(help="folder for the profile files")] = Path("profiles"),
    factor: Annotated[
        float, typer.Option(help="operators' time in a training run over their time measured alone")
    ] = 1.0,
    launch: Annotated[
        str, typer.Option(help="launch time to take off each operator: seconds as '35 us', or auto")
    ] = "0",
    replace: Annotated[
        bool, typer.Option("--replace", help="overwrite profiles of other precisions as well")
    ] = False,
) -> None:
    """Turn measurements of others into profile files for `--profiles`.

    Prints what was read and what is missing: a plan that needs something missing is refused.
    """
    from actors.named_model import named_model
    from planner.catalogue import canonical_name
    from planner.profile.importers import import_folder

    imports = import_folder(
        folder,
        device_type=canonical_name(as_) or as_,
        model=None if model is None else named_model(model, base=Path()),
        precision=_precision(precision),
        sequence_length=sequence_length,
    )
    for found in imports:
        profile = found.profile.model_copy(
            update={"calibration": _calibration(found.profile, factor=factor, launch=launch)}
        )
        _check_replaced(output / profile.file_name, profile, replace=replace)
        _write(output / profile.file_name, profile.to_json())
        _show(profile)
        for note in found.notes:
            typer.echo(f"  note      {note}")
        typer.echo(f"  missing   {'; '.join(found.missing) or 'nothing'}")
        typer.echo(f"  written   {output / profile.file_name}")
        _write_model(found, output)


@app.command("show")
def show(
    place: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="profile file, or a folder of them")],
) -> None:
    """What profile files hold: operators, cases, links and what is missing for the model."""
    from planner.model_spec import PRESETS
    from planner.profile.file import read_profiles
    from planner.profile.importers.missing import missing_data

    for path, profile in read_profiles(place).items():
        _show(profile)
        model = PRESETS.get(profile.model)
        if model is not None:
            typer.echo(f"  missing   {'; '.join(missing_data(profile, model)) or 'nothing'}")
        typer.echo(f"  file      {path}")


def _precision(text: str | None) -> Precision | None:
    from planner.errors import UserError

    if text not in (None, "fp32", "bf16", "fp16"):
        raise UserError(f"--precision {text} is not known; use fp32, bf16 or fp16")
    return cast("Precision | None", text)


def _calibration(profile: DeviceProfile, *, factor: float, launch: str) -> Calibration:
    from planner.errors import parse
    from planner.profile.calibration import launch_seconds
    from planner.profile.file import Calibration

    taken: object = launch
    if launch == "auto":
        taken = launch_seconds(profile)
    return parse(Calibration, {"factor": factor, "launch_seconds": taken}, source="calibration")


def _check_replaced(path: Path, profile: DeviceProfile, *, replace: bool) -> None:
    """Refuse to lose the precisions that only the file on disk holds."""
    from planner.errors import UserError
    from planner.profile.file import read_profile

    if replace or not path.exists():
        return
    lost = sorted(set(read_profile(path).precisions) - set(profile.precisions))
    if lost:
        raise UserError(
            f"{path} exists and holds {', '.join(lost)}, which this folder does not; import the folder above"
            " both, choose another --output, or overwrite it with --replace"
        )


def _write(path: Path, text: str) -> None:
    from planner.errors import UserError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; choose another --output") from None


def _write_model(found: Import, output: Path) -> None:
    """The measured model as a file, where no preset is like it: only a plan for it can use the profile."""
    import yaml

    if found.is_preset:
        return
    path = output / f"{found.model.name}.yaml"
    content = found.model.model_dump(mode="json", exclude_defaults=True)
    _write(path, yaml.safe_dump(content, sort_keys=False))
    typer.echo(f"  model     {path}: no preset has this shape; plan with this file")


def _show(profile: DeviceProfile) -> None:
    from planner.units import format_seconds

    tp_times = "in the operators' times" if profile.includes_tp_collectives else "not in the operators' times"
    typer.echo(
        f"{profile.device_type}, {profile.model}: {profile.provenance} from {profile.source} ({profile.date})"
    )
    groups = [
        group.name if len(group.operators) == 1 else f"{group.name} ({len(group.operators)} operators)"
        for group in profile.groups
    ]
    typer.echo(f"  operators {', '.join(groups)}")
    for precision in profile.precisions:
        times = [t for group in profile.groups for t in group.times if t.precision == precision]
        typer.echo(
            f"  {precision:<9} tp {_numbers(time.tp for time in times)};"
            f" micro-batches of {_numbers(time.samples for time in times)};"
            f" sequences of {_numbers(time.sequence_length for time in times)}"
        )
    typer.echo(f"  TP        collectives are {tp_times}")
    calibration = profile.calibration
    if calibration.factor != 1 or calibration.launch_seconds:
        typer.echo(
            f"  adjusted  times less {format_seconds(calibration.launch_seconds)}, x {calibration.factor:g}"
        )
    _show_links(profile)


def _show_links(profile: DeviceProfile) -> None:
    from planner.profile.links import fit_link
    from planner.units import format_seconds

    for times in profile.links:
        if times.operation == "p2p":
            link, error = fit_link(times)
            typer.echo(
                f"  link      {times.scope}: {link.bandwidth / 1e9:.1f} GB/s, {format_seconds(link.latency)}"
                f" (fits {times.source} within {error:.0%})"
            )
    collectives = {(times.operation, times.members) for times in profile.links if times.operation != "p2p"}
    if collectives:
        named = [
            f"{name} of {_numbers(n for other, n in collectives if other == name)}"
            for name in sorted({name for name, _ in collectives})
        ]
        typer.echo(f"  collectives inside a node: {', '.join(named)}")


def _numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(values))))
