"""The commands of docs/tutorial-hugging-face.md, in their order, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from actors.job import read_job
from planner.plan import read_plan
from tests.e2e.runs import rows

PAGE = Path(__file__).parents[2] / "docs" / "tutorial-hugging-face.md"


def blocks() -> list[tuple[str, str]]:
    """Kind and content of every block of code."""
    return re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_the_tutorial_says_works(tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(PAGE.parents[1]),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }

    def run(command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    said: dict[str, str] = {}
    for kind, content in blocks():
        if kind == "yaml":
            name = content.splitlines()[0].removeprefix("# ")
            assert (tmp_path / name).is_file(), "the job that eth import wrote"
            (tmp_path / name).write_text(content)
        elif kind == "python":
            said["python"] = run([sys.executable, "-c", content])
        else:
            assert kind == "sh"
            for line in content.splitlines():
                said[" ".join(line.split()[:2])] = run(["sh", "-c", line])

    assert list(said) == ["python", "eth import", "eth train", "eth checkpoint", "eth evaluate", "eth export"]
    assert read_job(tmp_path / "mine" / "job.yaml").model.layers == 4
    plan = read_plan(tmp_path / "run" / "plan.json")
    assert plan.cluster.counts == {"A100": 2, "RTX3090": 2}
    held = [
        [
            (plan.cluster.device_by_id[stage.devices[0]].type, stage.layers, bool(stage.recompute))
            for stage in pipeline.stages
        ]
        for pipeline in plan.pipelines
    ]
    whole, halves = ("A100", (0, 4), False), [("RTX3090", (0, 2), True), ("RTX3090", (2, 4), True)]
    assert sorted(held) == [[whole], [whole], halves], "as the page says"
    assert all(stage.tp == stage.dp == 1 for pipeline in plan.pipelines for stage in pipeline.stages)
    found = rows(tmp_path / "run")
    assert len(found) == 200 and found[-1]["loss"] < 0.7 * found[0]["loss"]
    told = found[-1]["validation"]
    assert told["iteration"] == 200 and told["loss"] < 0.7 * found[0]["loss"]
    assert f"validation loss {told['loss']:.4f}" in said["eth evaluate"]
    assert json.loads((tmp_path / "trained" / "config.json").read_text())["model_type"] == "llama"
    kept = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("small-llama", "trained")]
    assert kept[0] == kept[1]
    assert said["python"].startswith("def ") and len(said["python"]) > 40
