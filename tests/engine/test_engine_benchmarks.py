"""The engine's benchmarks run on tiny models, and both sides of each comparison train alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmark_runs import run


def test_one_device_trains_as_a_plain_loop_does() -> None:
    shown, result = run("one_device.py", "--shapes", "tiny", "--turns", "3")
    low, high = result["shapes"]["tiny"]["interval"]
    assert 0 < low <= result["shapes"]["tiny"]["ratio"] <= high
    assert result["shapes"]["tiny"]["losses_differ_by"] < 1e-6
    assert "tiny" in shown


@pytest.mark.slow
def test_two_ranks_train_as_torchs_own_ways_do() -> None:
    shown, result = run("two_ranks.py", "--shapes", "tiny", "--turns", "3")
    rows = result["shapes"]["tiny"]
    assert rows.keys() == {"dp", "tp", "pp"}
    for kind, row in rows.items():
        assert row["losses_differ_by"] < 1e-6, kind
        for ratio, interval in (("ratio", "interval"), ("cpu_ratio", "cpu_interval")):
            assert 0 < row[interval][0] <= row[ratio] <= row[interval][1]
        assert kind in shown


@pytest.mark.slow
def test_convergence_compares_unlike_plans_and_keeps_their_curves(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(1000)))
    arguments = ["--iterations", "3", "--plans", "single", "eth", "metis"]
    arguments += ["--data", str(text), "--results", str(tmp_path)]
    shown, result = run("convergence.py", *arguments)
    rows = result["runs"]
    assert rows.keys() == {"single", "eth", "metis"}
    for name in ("eth", "metis"):
        # So few iterations amplify no round-off.
        assert max(rows[name][key] for key in ("last", "last_100", "largest_smoothed", "largest")) < 1e-6
        assert rows[name]["plan"] in shown
    assert rows["eth"]["plan"] != rows["metis"]["plan"]

    written = {name: (tmp_path / f"{name}.json").stat().st_mtime_ns for name in rows}
    picture = tmp_path / "curves.png"
    _, again = run("convergence.py", *arguments, "--plot", str(picture))
    assert again == result
    assert {name: (tmp_path / f"{name}.json").stat().st_mtime_ns for name in rows} == written
    assert picture.read_bytes().startswith(b"\x89PNG")
