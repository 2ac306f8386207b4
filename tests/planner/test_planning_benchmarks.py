"""The planning benchmarks run, end with a JSON line, and say what they skip."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest

from tests.benchmark_runs import run
from tests.planner.profile.sources import write_operators


@pytest.mark.slow
def test_table_2_shows_plan_bound_and_peers() -> None:
    shown, result = run("table2.py", "--models", "gpt3-350m", "--clusters", "B2/B3", "--peers", "uniform")
    (row,) = result["rows"]
    assert row["pair"] == "B2/B3" and row["devices"] == 4
    assert row["lower_bound_seconds"] <= row["iteration_seconds"] >= row["ideal_seconds"] * 0.99
    (peer,) = row["peers"]
    assert peer["ratio"] >= 1 - 1e-9 and result["least_ratio"] == {"uniform": peer["ratio"]}
    assert f"{row['iteration_seconds']:.3f}s" in shown


@pytest.mark.slow
def test_each_relaxation_of_the_bound_is_tightened_in_turn() -> None:
    shown, result = run("bound_gap.py", "--models", "gpt3-350m", "--clusters", "B2/B4")
    (row,) = result["rows"]
    bounds = {one["tightened"]: one["bound_seconds"] for one in row["bounds"]}
    assert {"nothing", "receiving", "stages of one type", "whole layers", "all"} <= bounds.keys()
    # Cells are rounded down apart, so less relaxed is not below by more than that.
    assert all(bounds["nothing"] * 0.997 <= bound <= row["iteration_seconds"] for bound in bounds.values())
    assert bounds["all"] > bounds["nothing"]
    assert 0 < row["fractions_seconds"] <= row["whole_seconds"] * 1.003
    assert f"{row['iteration_seconds']:.3f} s" in shown and "all" in shown


@pytest.mark.slow
def test_growth_is_plotted_in_characters() -> None:
    shown, result = run("planner_growth.py", "--model", "gpt3-350m", "--devices", "24")
    assert [row["devices"] for row in result["rows"]] == [24]
    assert result["seconds_at_8192"] is None
    lines = shown.splitlines()
    axis = next(number for number, line in enumerate(lines) if line.lstrip().startswith("+--"))
    # Above the axis as far as the margin of nine characters and the bar go.
    plot = list(takewhile(lambda line: line[9:11] == " |", reversed(lines[:axis])))
    drawn = "".join(line[11:] for line in plot).split()
    assert sorted(drawn) in (["b", "p"], ["*"]), "one size is planned and bounded, each drawn once"
    assert "24 devices" in shown


@pytest.mark.slow
def test_imported_times_are_planned_with(tmp_path: Path) -> None:
    for folder in ("v100", "ascend64"):
        write_operators(tmp_path / folder)
    shown, result = run(
        "imported_profiles.py", "--profiles-root", str(tmp_path), "--models", "gpt3-1.3b", "--peers", "metis"
    )
    (row,) = result["rows"]
    assert row["cluster"] == "8 x V100-32, 8 x 910B2" and row["iteration_seconds"] > 0
    assert "gpt3-1.3b" in shown


def test_without_profiles_there_is_nothing_to_plan_with(tmp_path: Path) -> None:
    shown, result = run("imported_profiles.py", "--profiles-root", str(tmp_path / "none"))
    assert result == {"benchmark": "imported_profiles", "skipped": True} and "absent" in shown
