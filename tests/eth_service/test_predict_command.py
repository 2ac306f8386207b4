"""`eth predict`: a plan's price item by item, without searching."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eth_service.cli import app
from planner.cluster import from_short_form
from planner.cost.price import price_plan
from planner.errors import UserError
from planner.model_spec import resolve_model
from planner.plan import Plan, read_plan
from planner.simulate import simulate
from planner.units import format_seconds
from tests.planner.profile.sources import write_operators
from tests.plans import Degrees, make_plan


def write_plan(
    folder: Path, pipelines: list[list[Degrees]], *, model: str = "gpt3-1.3b", cluster: str = "1x4:A100"
) -> Path:
    plan = make_plan(
        resolve_model(model),
        pipelines,
        cluster=from_short_form(cluster),
        dtypes={"param": "fp16"},
        sequence_length=2048,
    )
    path = folder / "plan.json"
    path.write_text(plan.model_dump_json())
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["predict", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def priced(path: Path) -> Plan:
    plan = read_plan(path)
    return plan.model_copy(update={"predicted": price_plan(plan)})


def test_every_stage_and_term_is_shown(tmp_path: Path) -> None:
    path = write_plan(tmp_path, [[(1, 1, 14), (1, 1, 10)], [(2, 1, 24)]])
    shown, predicted = run(path), priced(path).predicted
    assert predicted is not None
    for words in ("Pipeline 0", "Pipeline 1", "Exchange", "Last backward", "Gradient collectives (block)"):
        assert words in shown
    assert "Fill " in shown and " x period " in shown and " + drain " in shown
    assert f"= {format_seconds(predicted.iteration_seconds)}" in shown
    assert format_seconds(simulate(read_plan(path), events=False).iteration_seconds) in shown
    for pipeline in predicted.pipelines:
        for stage in pipeline.stages:
            assert format_seconds(stage.forward_seconds + stage.backward_seconds) in shown
    assert "DOES NOT FIT" not in shown


def test_recomputation_and_zero_are_terms_of_their_own(tmp_path: Path) -> None:
    path = write_plan(tmp_path, [[(1, 2, 14), (1, 1, 10)], [(2, 1, 24)]], cluster="1x5:A100")
    data = json.loads(path.read_text())
    data["zero_stage"] = 2
    data["pipelines"][0]["stages"][0]["recompute"] = {"scores": 4, "softmax": 4, "qkv": 0}
    path.write_text(json.dumps(data))
    shown, predicted = run(path), priced(path).predicted
    assert predicted is not None and predicted.gather_seconds > 0
    stage = predicted.pipelines[0].stages[0]
    assert f"Stage 0 recomputes 4 scores, 4 softmax: {format_seconds(stage.recompute_seconds)} of" in shown
    assert "Stage 0 reduces and scatters its gradients over its replicas (ZeRO-2): " in shown
    assert f" + gathering {format_seconds(predicted.gather_seconds)} = " in shown
    assert (
        "ZeRO-2 shares optimizer state and gradients; optimizer state over all holders of a block." in shown
    )
    # Pricing by the links alone is no news.
    assert "Collectives: " not in shown


def test_pipelines_that_are_alike_are_shown_once(tmp_path: Path) -> None:
    shown = run(write_plan(tmp_path, [[(1, 1, 24)]] * 4))
    assert "Pipeline 0, 1, 2, 3: 2 samples each" in shown


def test_a_plan_that_does_not_fit_is_priced_and_said_not_to_fit(tmp_path: Path) -> None:
    path = write_plan(tmp_path, [[(1, 1, 32)]], model="gpt3-6.7b", cluster="1x1:RTX3090")
    shown = run(path)
    assert " > 24.0 GiB" in shown and "DOES NOT FIT: stage 0 of pipeline 0 needs" in shown
    assert "Iteration: " in shown


def test_the_prediction_can_be_kept(tmp_path: Path) -> None:
    path, kept = write_plan(tmp_path, [[(1, 2, 24)]]), tmp_path / "kept.json"
    run(path, "--json", kept)
    found = read_plan(kept).predicted
    assert found is not None and found.simulated_seconds is not None
    assert found.iteration_seconds == price_plan(read_plan(path)).iteration_seconds


def test_profiles_change_the_price(tmp_path: Path) -> None:
    path = write_plan(tmp_path, [[(1, 1, 14), (2, 1, 10)]], cluster="1x3:A100")
    folder = write_operators(tmp_path / "source" / "fp16")
    result = CliRunner().invoke(
        app, ["profile", "import", str(folder), "--as", "A100", "--output", str(tmp_path / "profiles")]
    )
    assert result.exit_code == 0, result.output
    kept = tmp_path / "kept.json"
    measured = run(path, "--profiles", tmp_path / "profiles", "--json", kept)
    assert measured != run(path)
    assert "Collectives: of stages with TP 1 within the operators' measured times." in measured
    assert [source.provenance for source in read_plan(kept).profiles] == ["imported"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds no mapping; write one as `eth plan --json` does"),
        ('{"version": 1}', "model is missing; add it"),
    ],
)
def test_a_file_that_is_no_plan_is_told(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        run(path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; check the path"):
        run(tmp_path / "none.json")
