"""Profiles of real hardware, where the shared folder is present: every set is read, and hardware is met."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.catalogue import CATALOGUE
from planner.plan import Precision
from planner.profile.importers import Import, import_folder
from planner.profile.measured import MeasuredProfile

ROOT = Path(__file__).resolve().parents[3]
PROFILES = ROOT.parent / "shared" / "profiles"
BENCHMARK = ROOT / "benchmarks" / "predict_gh200.py"

present = pytest.mark.skipif(not PROFILES.is_dir(), reason="the shared profiles are absent")

# folder -> (device type, 16-bit precision that its files do not tell, models)
SETS: dict[str, tuple[str, Precision | None, set[str]]] = {
    "v100": ("V100-32", "fp16", {"gpt3-1.3b-heads32", "gpt3-6.7b", "gpt3-13b"}),
    "ascend64": ("910B2", "fp16", {"gpt3-1.3b", "gpt3-2.6b", "gpt3-13b"}),
    "a100-40": ("A100-40", None, {"gpt3-350m", "gpt3-2.6b-vocab128256"}),
    "rtx-3090": ("RTX3090", None, {"gpt3-350m", "gpt3-2.6b-vocab128256"}),
    "v100-16": ("V100-16", None, {"gpt3-350m", "gpt3-2.6b-vocab128256"}),
    "gh-96": ("GH200", None, {"gpt3-350m"}),
}


def read(folder: str) -> list[Import]:
    type_, precision, _ = SETS[folder]
    return import_folder(PROFILES / folder, device_type=type_, precision=precision)


@present
@pytest.mark.parametrize("folder", SETS)
def test_every_set_makes_a_full_table(folder: str) -> None:
    type_, _, models = SETS[folder]
    found = read(folder)
    assert {each.model.name for each in found} == models
    for each in found:
        table = MeasuredProfile(each.model, {type_: each.profile}, {type_: CATALOGUE[type_]})
        for precision in each.profile.precisions:
            for samples in range(1, 9):
                assert table.covers(
                    device_type=type_, tp=4, samples=samples, sequence_length=2048, precision=precision
                )
        assert not any("with micro-batches" in line for line in each.missing)


@present
def test_the_3090_slows_down_beyond_two_of_a_node() -> None:
    (found,) = (each for each in read("rtx-3090") if each.model.name == "gpt3-350m")
    table = MeasuredProfile(found.model, {"RTX3090": found.profile}, {"RTX3090": CATALOGUE["RTX3090"]})

    def layer(tp: int) -> float:
        return sum(
            table.operator_seconds(
                device_type="RTX3090",
                operator=group.name,
                tp=tp,
                samples=8,
                sequence_length=2048,
                precision="fp16",
            ).total
            for group in table.groups("RTX3090").layer
        )

    assert layer(8) > 3 * layer(2)


def run_benchmark(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])


@present
def test_training_runs_on_gh200_are_predicted() -> None:
    result = run_benchmark()
    assert result["runs"] == 15
    for error in ("mean_error", "leave_one_out_mean_error", "uncalibrated_mean_error"):
        assert 0 < result[error] <= 0.08
    cheaper = run_benchmark("--exchange", "cheaper")
    assert result["mean_error"] < cheaper["mean_error"] <= 0.08


def test_without_the_runs_the_benchmark_is_skipped(tmp_path: Path) -> None:
    assert run_benchmark("--profiles", str(tmp_path))["skipped"] is True
