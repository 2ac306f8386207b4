"""`eth compare`, and what `eth plan` tells with `--explain`, `--top` and `--profiles`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eth_service.cli import app, main
from planner.plan import Plan
from tests.planner.profile.sources import write_operators

JOB = ["gpt3-350m", "--cluster", "1x1:A100,1x1:RTX3090", "--global-batch-size", "16"]


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def error_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["eth", *arguments])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eth: ")][-1:]
    return line


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    """Made-up fp16 profiles of gpt3-1.3b on two types."""
    for name in ("A100", "RTX3090"):
        folder = write_operators(tmp_path / name / "fp16")
        output_of("profile", "import", str(folder), "--as", name, "--output", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def test_all_strategies_stand_side_by_side(tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    shown = output_of("compare", *JOB, "--json", str(file))
    for words in ("eth", "metis", "hexiscale", "type-split", "uniform", "Pipelines x stages", "/ ideal"):
        assert words in shown
    for words in ("compute-only ideal", "imbalance between stages", "gradient synchronisation", "TFLOP/s"):
        assert words in shown
    data = json.loads(file.read_text())
    rows = {row["strategy"]: row for row in data["rows"]}
    assert rows["eth"]["ratio"] == 1
    for row in rows.values():
        plan = Plan.model_validate(row["plan"])
        assert plan.predicted is not None
        assert row["iteration_seconds"] == plan.predicted.iteration_seconds
        assert sum(row["terms"].values()) == pytest.approx(row["iteration_seconds"])
        assert row["ratio"] == pytest.approx(row["iteration_seconds"] / rows["eth"]["iteration_seconds"])
        assert f"{row['iteration_seconds']:.4g} s" in shown
    assert min(row["iteration_seconds"] for row in rows.values()) > data["ideal_seconds"]


def test_some_strategies_are_compared_with_the_quickest_of_them() -> None:
    shown = output_of("compare", *JOB, "--strategies", "metis, uniform")
    assert "hexiscale" not in shown and ("/ metis" in shown or "/ uniform" in shown)


def test_what_is_left_out_of_the_search_is_left_out_of_all(tmp_path: Path) -> None:
    """GPT-3 13B in one node of quick links, where TP cut by position pays."""
    cluster, file = tmp_path / "cluster.yaml", tmp_path / "all.json"
    cluster.write_text(
        "nodes: [{devices: [{type: A100, count: 8}]}]\n"
        "links: {intra_node: {bandwidth: 3e11, latency: 2e-6}}\n"
    )
    job = ["gpt3-13b", "--cluster", str(cluster), "--global-batch-size", "8", "--strategies", "eth,metis"]
    cut = []
    for options in ([], ["--without", "sequence_parallel,exact", "--without", "cache"]):
        output_of("compare", *job, *options, "--json", str(file))
        plans = [Plan.model_validate(row["plan"]) for row in json.loads(file.read_text())["rows"]]
        stages = [[stage for pipeline in plan.pipelines for stage in pipeline.stages] for plan in plans]
        cut.append([any(stage.sequence_parallel for stage in own) for own in stages])
    assert cut == [[True, True], [False, False]]
    assert plans[0].search is not None and plans[0].search["parts"] == ["skipping", "order", "dp"]


def test_one_that_does_not_fit_says_why_in_its_row() -> None:
    """Equal layers need a stage on each type at least; the smaller one cannot hold half of this model."""
    shown = output_of(
        "compare", "gpt3-2.6b", "--cluster", "1x1:A100-40,1x1:RTX3090", "--global-batch-size", "8",
        "--strategies", "metis,uniform",
    )  # fmt: skip
    words = " ".join(shown.replace("│", " ").split())
    assert "metis" in words and "no rectangle TP x PP x DP with equal layers" in words


def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = error_of(capsys, monkeypatch, "compare", *JOB, "--strategies", "metis,alpa")
    assert "'alpa' is not known; use some of eth, hexiscale, metis, type-split, uniform" in told
    told = error_of(
        capsys, monkeypatch, "compare", *JOB, "--strategies", "metis", "--json", str(tmp_path / "no" / "x")
    )
    assert "--json = " in told and "choose another file" in told


def test_profiles_price_all_and_the_links_they_lack_are_told(profiles: Path) -> None:
    job = ["gpt3-1.3b", "--cluster", "1x2:A100,1x2:RTX3090", "--global-batch-size", "16"]
    result = CliRunner().invoke(
        app,
        [
            "compare",
            *job,
            "--precision",
            "fp16",
            "--profiles",
            str(profiles),
            "--strategies",
            "metis,uniform",
        ],
    )
    assert result.exit_code == 0, result.output
    assert "times from profiles of A100 (imported), RTX3090 (imported)" in result.stderr
    assert "links of unlike types" in result.stderr
    assert "metis" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precision", "bf16"], "precision = bf16: the A100 profile of gpt3-1.3b was measured in fp16"),
        (["--precision", "fp16", "--sequence-length", "512"], "was measured at 2048 tokens; plan with"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "compare"])
def test_a_profile_of_another_case_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    profiles: Path,
    command: str,
    options: list[str],
    message: str,
) -> None:
    job = ["gpt3-1.3b", "--cluster", "1x2:A100", "--global-batch-size", "8", "--profiles", str(profiles)]
    assert message in error_of(capsys, monkeypatch, command, *job, *options)


def test_plan_explains_itself() -> None:
    shown = output_of("plan", *JOB, "--strategy", "metis", "--explain")
    for words in (
        "The iteration is compute (operators and optimizer)",
        "Over the compute-only ideal of",
        "The pace is set by stage",
        "emory",
        "Against the runner-up",
        "Against eth (",
        "Against hexiscale (",
        "Against uniform (",
    ):
        assert words in shown
    assert "Against metis" not in shown


def test_plan_shows_the_best_few() -> None:
    shown = output_of("plan", *JOB, "--strategy", "metis", "--top", "2")
    assert "Plan 1 of 2" in shown and "Plan 2 of 2" in shown
    assert shown.count("Predicted iteration") == 2


PROGRAM = """
import sys
from eth_service.cli import main
sys.argv = ["eth", *sys.argv[1:]]
main()
print("LOADED", sorted({name.split(".")[0] for name in sys.modules} & {"torch", "ray"}), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments", [["compare", *JOB, "--strategies", "metis,hexiscale,type-split,uniform"], ["--help"]]
)
def test_neither_torch_nor_ray_is_loaded(arguments: list[str]) -> None:
    program = PROGRAM.replace("main()\nprint", "try:\n    main()\nexcept SystemExit:\n    pass\nprint")
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    assert "LOADED []" in done.stderr
