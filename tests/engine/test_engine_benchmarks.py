"""The engine's benchmarks run on tiny models, and both sides of each comparison train alike."""

from __future__ import annotations

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
