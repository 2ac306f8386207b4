"""`eth profile import` and `eth profile show`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eth_service.commands.profile import app
from planner.errors import UserError
from planner.profile.file import read_profile
from tests.planner.profile.sources import write_collective, write_layers, write_operators, write_transfers


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_import_tells_what_it_read_and_what_is_missing(tmp_path: Path) -> None:
    folder = write_operators(tmp_path / "fp16")
    write_transfers(folder, "intra", {1: 10.0, 2: 11.0})
    write_collective(folder, "all_reduce", 2, [(1, 1.0)])
    told = run("import", folder, "--as", "3090", "--output", tmp_path / "out")
    assert "RTX3090, gpt3-1.3b: imported from operator CSV" in told
    assert "tp 1, 2; micro-batches of 1, 2, 4; sequences of 2048" in told
    assert "attention_norm, qkv, scores" in told
    assert "intra_node: " in told and "all_reduce of 2" in told
    assert "fp16: tp 4, 8" in told and "transfers between nodes" in told
    assert read_profile(tmp_path / "out" / "RTX3090-gpt3-1.3b.json").device_type == "RTX3090"


def test_show_reads_it_again(tmp_path: Path) -> None:
    run("import", write_operators(tmp_path / "fp16"), "--as", "A100", "--output", tmp_path / "out")
    for place in (tmp_path / "out", tmp_path / "out" / "A100-gpt3-1.3b.json"):
        told = run("show", place)
        assert "A100, gpt3-1.3b" in told and "fp16: tp 4, 8" in told


def test_a_model_like_no_preset_is_written_beside(tmp_path: Path) -> None:
    from planner.model_spec import resolve_model

    told = run("import", write_operators(tmp_path / "fp16", heads=32), "--as", "A100", "--output", tmp_path)
    assert "no preset has this shape; plan with this file" in told
    assert resolve_model(str(tmp_path / "gpt3-1.3b-heads32.yaml")).heads == 32


def test_a_precision_is_not_lost_silently(tmp_path: Path) -> None:
    write_operators(tmp_path / "fp16")
    write_operators(tmp_path / "fp32", width=4)
    out = ("--as", "A100", "--output", tmp_path / "out")
    run("import", tmp_path / "fp16", *out)
    with pytest.raises(UserError, match="exists and holds fp16, which this folder does not"):
        run("import", tmp_path / "fp32", *out)
    run("import", tmp_path / "fp32", *out, "--replace")
    run("import", tmp_path, *out)
    assert read_profile(tmp_path / "out" / "A100-gpt3-1.3b.json").precisions == ("fp16", "fp32")


def test_calibration_is_kept_in_the_file(tmp_path: Path) -> None:
    folder = write_operators(tmp_path / "fp16", changes={"enc-MLP-gelu": {"forward-compute": 35.0}})
    told = run("import", folder, "--as", "A100", "--output", tmp_path, "--factor", 1.1, "--launch", "auto")
    assert "times less 35 us, x 1.1" in told
    calibration = read_profile(tmp_path / "A100-gpt3-1.3b.json").calibration
    assert (calibration.factor, calibration.launch_seconds) == pytest.approx((1.1, 35e-6))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--factor", "0"), "factor = 0"),
        (("--launch", "soon"), "'soon' is not a quantity"),
        (("--precision", "fp8"), "--precision fp8 is not known"),
        (("--model", "gpt9"), "model = 'gpt9' is neither a preset nor a file"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    folder = write_operators(tmp_path / "fp16", degrees=(1,), sizes=(1,))
    with pytest.raises(UserError, match=told):
        run("import", folder, "--as", "A100", "--output", tmp_path, *options)


def test_layer_json_is_told_apart(tmp_path: Path) -> None:
    folder = write_layers(tmp_path / "layers")
    options = ("--model", "gpt3-1.3b", "--precision", "fp16", "--sequence-length", 1024)
    told = run("import", folder, "--as", "A100", "--output", tmp_path, *options)
    assert "layer (13 operators)" in told and "forward is taken as one third" in told


def test_needs_neither_torch_nor_ray() -> None:
    program = (
        "import sys; import eth_service.commands.profile, planner.profile.importers, planner.profile.load;"
        " print([name for name in ('torch', 'ray', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
