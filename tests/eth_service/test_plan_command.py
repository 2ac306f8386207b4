"""`eth plan`: the table people read, the file programs read, and one line for what is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eth_service.cli import app, main
from planner.hugging_face import hugging_face_config
from planner.model_spec import resolve_model
from planner.plan import read_plan
from tests.object_storage import BUCKET, ObjectStorage

BASE = ["plan", "gpt3-1.3b", "--global-batch-size", "64"]
CLUSTER = ["--cluster", "1x2:A100,1x2:RTX3090"]


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_table_shows_the_plan_its_times_memory_and_balance(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    shown = output_of(*BASE, *CLUSTER, "--json", str(file))
    plan = read_plan(file)
    assert plan.predicted is not None and plan.predicted.simulated_seconds is not None
    for words in (
        "Pipe-0",
        "Mbs=",
        "Lbs=",
        "TP/DP",
        "#L",
        "Recompute",
        "A100 x",
        "RTX3090 x",
        "GiB / 24.0 GiB",
    ):
        assert words in shown
    assert "sequence 2048, bf16" in shown
    assert f"{plan.predicted.samples_per_second:.4g} samples/s" in shown
    assert "Stages of a pipeline differ by up to" in shown
    assert "plans priced" in shown and "bound in" in shown
    assert "COARSE" not in shown
    # The two types hold unlike parts of the model.
    layers = {stage.layer_count for pipeline in plan.pipelines for stage in pipeline.stages}
    assert len(layers) > 1


def test_a_plan_says_how_good_it_is(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    command = ["plan", "gpt3-1.3b", "--cluster", "2x8:A100", "--global-batch-size", "32"]
    shown = output_of(*command, "--json", str(file))
    predicted = read_plan(file).predicted
    assert predicted is not None and predicted.lower_bound_seconds is not None
    gap = predicted.iteration_seconds / predicted.lower_bound_seconds - 1
    assert f"at most {gap:.1%} slower than the best" in shown


def test_equal_batches_and_memory_scale_reach_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    output_of(
        "plan", "gpt3-nano", "--cluster", "1x1:A100,1x1:RTX3090", "--global-batch-size", "9",
        "--precision", "fp32", "--memory-scale", "3", "--equal-batches", "--sequence-length", "64",
        "--json", str(file),
    )  # fmt: skip
    plan = read_plan(file)
    assert plan.emulation.memory_scale == 3 and plan.dtypes.param == "fp32" and plan.sequence_length == 64
    samples = [pipeline.samples for pipeline in plan.pipelines]
    assert max(samples) - min(samples) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*BASE, "--cluster", "1x2:A99"], "device type 'A99' is not known; use one of"),
        ([*BASE, "--cluster", "none.yaml"], "neither a file nor a short form"),
        (
            ["plan", "gpt9", *CLUSTER, "--global-batch-size", "8"],
            "model = 'gpt9' is neither a preset nor",
        ),
        ([*BASE, *CLUSTER, "--strategy", "magic"], "strategy = 'magic' is not known; use one of"),
        ([*BASE, *CLUSTER, "--precision", "fp8"], "dtypes.param = 'fp8'"),
        ([*BASE, *CLUSTER, "--sequence-length", "4096"], "sequence_length = 4096 is more than the model's"),
        ([*BASE, *CLUSTER, "--memory-scale", "0"], "emulation.memory_scale = 0"),
        ([*BASE, *CLUSTER, "--json", "/nowhere/plan.json"], "--json = /nowhere/plan.json cannot be"),
        (
            ["plan", "gpt3-13b", "--cluster", "1x1:RTX3090", "--global-batch-size", "8"],
            "does not fit: stage 0",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["eth", *arguments])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    told = capsys.readouterr().err.strip()
    assert message in told and told.count("\n") == 0 and told.startswith("eth: ")


def test_a_model_that_does_not_fit_names_stage_bytes_and_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["eth", "plan", "gpt3-13b", *CLUSTER, "--global-batch-size", "8", "--precision", "fp32"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr().err
    assert "stage" in told and "bytes) more than" in told and "it fits with" in told


PROGRAM = """
import sys
from eth_service.cli import main
sys.argv = ["eth", *sys.argv[1:]]
try:
    main()
finally:
    loaded = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "ray", "scipy", "fastapi"})
    print("LOADED", loaded, file=sys.stderr)
"""


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_real_process_plans_without_torch_or_ray(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = run_program(*BASE, *CLUSTER, "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "LOADED []\n"
    assert json.loads(file.read_text())["version"] == 1
    assert "Predicted iteration" in done.stdout


def test_a_model_in_other_storage_is_planned_from_its_config_alone(
    tmp_path: Path, storage: ObjectStorage
) -> None:
    """As a job names it, and without torch or ray all the same."""
    content = json.dumps(hugging_face_config(resolve_model("gpt3-350m"), dtype="float32"))
    (tmp_path / "config.json").write_text(content)
    storage.put("planned/config.json", content.encode())
    command = ["plan", "--global-batch-size", "64", "--cluster", "1x2:A100"]
    output_of(*command, tmp_path.as_uri(), "--json", str(tmp_path / "near"))
    done = run_program(*command, f"s3://{BUCKET}/planned", "--json", str(tmp_path / "far"))
    assert done.returncode == 0 and done.stderr == "LOADED []\n", done.stderr
    near, far = read_plan(tmp_path / "near"), read_plan(tmp_path / "far")
    assert far.model.name == "planned" and far.pipelines == near.pipelines
    assert far.model.model_copy(update={"name": near.model.name}) == near.model
    result = CliRunner().invoke(app, [*command, f"s3://{BUCKET}/none"])
    assert str(result.exception).startswith(
        "model = 's3://bucket/none' holds no config.json; name the folder"
    )


def test_help_loads_nothing_heavy() -> None:
    done = run_program("--help")
    assert done.returncode == 0
    assert "LOADED []" in done.stderr


def test_a_real_process_ends_with_code_2() -> None:
    done = run_program(*BASE, "--cluster", "1x2:A99")
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 2 and lines[1] == "LOADED []"
    assert lines[0].startswith("eth: cluster '1x2:A99': device type 'A99' is not known")
    assert done.stdout == ""


def test_the_help_names_the_options() -> None:
    shown = output_of("plan", "--help")
    for option in (
        "--cluster",
        "--global-batch-size",
        "--strategy",
        "--memory-scale",
        "--equal-batches",
        "--json",
    ):
        assert option in shown
