"""`eth plan` and `eth compare` with `--objective cost`, and what may save memory, on the terminal."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from eth_service.cli import app
from planner.plan import read_plan

JOB = ["gpt3-350m", "--cluster", "1x1:A100,1x2:RTX3090", "--global-batch-size", "16"]
COST = ["--objective", "cost", "--price", "A100=20", "--price", "RTX3090=1"]


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_cheapest_plan_names_its_cost_its_bound_and_what_is_released(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    shown = output_of("plan", *JOB, *COST, "--strategy", "metis", "--json", str(file))
    plan = read_plan(file)
    predicted = plan.predicted
    assert plan.objective == "cost" and predicted is not None and predicted.cost_per_million_tokens
    assert f"Cost: {predicted.cost_per_million_tokens:.4g} per million tokens" in shown
    assert "idle ones nothing" in shown and "Released, since they would make tokens dearer: 1 x A100" in shown
    assert "costs less than" in shown and "parts of the cluster planned" in shown


def test_without_an_objective_a_price_is_told_too() -> None:
    shown = output_of("plan", *JOB, "--strategy", "metis", "--price", "A100=20,RTX3090=1")
    assert "the devices used cost 22 an hour." in shown
    assert "Cost:" not in output_of("plan", *JOB, "--strategy", "metis")


def test_strategies_are_compared_by_cost(tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    shown = output_of("compare", *JOB, *COST, "--strategies", "metis,uniform", "--json", str(file))
    assert "Cost/Mtoken" in shown and "Devices used" in shown and "x RTX3090" in shown
    data = json.loads(file.read_text())
    costs = {row["strategy"]: row["cost_per_million_tokens"] for row in data["rows"]}
    assert data["objective"] == "cost" and data["rows"][0]["ratio"] in (
        1.0,
        costs["metis"] / costs["uniform"],
    )


def test_an_explanation_of_a_cost_compares_costs() -> None:
    shown = output_of("plan", *JOB, *COST, "--strategy", "metis", "--explain")
    assert "Against uniform" in shown and ("times as dear" in shown or "equally dear" in shown)
    assert "ample memory" not in shown


def test_what_may_save_memory_reaches_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    job = ["plan", "gpt3-1.3b", "--cluster", "1x1:910B4", "--global-batch-size", "8", "--strategy", "metis"]
    shown = output_of(*job, "--json", str(file))
    assert any(stage.recompute for stage in read_plan(file).pipelines[0].stages)
    assert "Recomputed in backward:" in shown or "all" in shown
    refused = CliRunner().invoke(app, [*job, "--no-recompute"])
    assert "does not fit" in str(refused.exception)
    output_of("plan", *JOB, "--strategy", "hexiscale", "--zero", "0", "--json", str(file))
    assert read_plan(file).zero_stage == 0
    wrong = CliRunner().invoke(app, ["plan", *JOB, "--zero", "3"])
    assert "--zero = '3': the ZeRO stages are 0, 1 and 2" in str(wrong.exception)
