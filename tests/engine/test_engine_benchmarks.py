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


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_saves_are_measured_beside_training_and_a_plain_copy(tmp_path: Path, ranks: int) -> None:
    options = ["--shape", "tiny", "--turns", "2", "--ranks", str(ranks), "--folder", str(tmp_path)]
    shown, result = run("checkpoint.py", *options)
    assert shown.count("iterations while saving") == 2
    # Parameters and two moments of 4 bytes for each of some tens of thousands, and what the format adds.
    assert 300_000 < result["checkpoint_bytes"] < 3_000_000
    assert result["iterations_while_saving"] >= 2
    assert result["slowdown_interval"][0] <= result["slowdown"] <= result["slowdown_interval"][1]
    assert 0 <= result["copy_pause_seconds"] <= result["longest_copy_pause_seconds"] < result["save_seconds"]
    assert result["peak_memory_shards"] >= 0
    assert result["of_plain_copy"] > 0 and result["plain_copy_bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == []
