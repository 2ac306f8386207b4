"""The benchmarks of memory, of the engine's own time and of data run, end with a JSON line, and hold what they say."""

from __future__ import annotations

import pytest

from tests.benchmark_runs import run


@pytest.mark.slow
def test_memory_of_every_stage_is_predicted() -> None:
    shown, result = run("memory.py", "--plans", "unlike pipelines", "ZeRO-1")
    assert (result["plans"], result["stages"]) == (2, 6)
    assert len([line for line in shown.splitlines() if line.endswith("%")]) == 6
    assert result["least_over"] >= 0 and result["most_over"] <= 0.05 and result["within"] is True


@pytest.mark.slow
def test_the_engines_own_seconds_are_told_by_part() -> None:
    shown, result = run("engine_overhead.py", "--shapes", "nano", "two stages", "--iterations", "3")
    assert [len(ranks) for ranks in result["shapes"].values()] == [1, 2] and len(shown.splitlines()) == 5
    (alone,), (first, last) = result["shapes"].values()
    for rank in (alone, first, last):
        assert rank["own_us"] > 0 and 0 < rank["share"] < 1
        assert all(rank["parts_us"][part] > 0 for part in ("schedule", "batches", "layers", "iteration"))
    # In fp32 backward writes into the buffer itself, and on one device nothing is launched while it runs.
    assert alone["parts_us"]["gradients"] == 0
    assert min(first["parts_us"]["messages"], last["parts_us"]["messages"]) > alone["parts_us"]["messages"]


@pytest.mark.slow
def test_data_is_prepared_loaded_and_not_waited_for() -> None:
    small = {"megabytes": 1, "turns": 1, "tokens": 10**8, "batches": 200, "hidden": 32, "iterations": 5}
    shown, result = run(
        "data.py", *(word for name, value in small.items() for word in (f"--{name}", str(value)))
    )
    assert [line.split(":")[0] for line in shown.splitlines()] == ["prepare", "load", "wait"]
    assert result["prepare_ratio"] > 0 and result["load_2048_tokens_per_cpu_second"] > 0
    # 8 bytes a sample: measured in the same way, so that growth would be seen.
    assert result["table_growth_bytes"] > 0.9 * 8 * 10**8 / 128 > result["peak_growth_bytes"]
    assert result["reading_share"] > 0 and 0 <= result["wait_share"] < 1
