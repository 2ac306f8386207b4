"""What a user gets wrong is told in one line, by a real process, with exit code 2 and nothing heavy loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.cluster import from_short_form
from tests.planner.profile.sources import write_operators
from tests.plans import make_model, make_plan

PROGRAM = """
import sys
from eth_service.cli import main
sys.argv = ["eth", *sys.argv[1:]]
try:
    main()
finally:
    print("LOADED", sorted({name.split(".")[0] for name in sys.modules} & {"torch", "ray", "scipy"}))
"""
MODEL = ["plan", "gpt3-350m", "--global-batch-size", "8"]
CLUSTER = ["--cluster", "1x1:A100,1x1:RTX3090"]
TYPE = {"backend": "npu", "peak_tflops": {"bf16": 100}, "memory_bytes": "64GiB", "memory_bandwidth": "1 TB/s"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def refused(*arguments: str) -> str:
    """The one line of a refusal that has loaded nothing heavy."""
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "LOADED []\n"
    assert done.stderr.startswith("eth: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def cluster_file(folder: Path, **changes: object) -> str:
    path = folder / "cluster.json"
    data = {"device_types": {"X": TYPE}, "nodes": [{"devices": [{"type": "X", "count": 2}]}]}
    path.write_text(json.dumps(data | changes))
    return str(path)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("0x8:910B2", "count = 0: write a whole number from 1"),
        ("4x0:910B2", "'0:910B2' is no device; give a node at least one"),
        ("4x8", "'8' is not devices : type"),
        ("4*8:910B2", "neither a file nor a short form such as 4x8:910B2"),
        ("4x8:910B2,", "'' is not nodes x devices : type"),
        ("4x8:910B22", "or describe it under device_types in the cluster file; did you mean '910B2'?"),
        ("125000x8:910B2", "write a whole number from 1 to 16384"),
        ("2049x8:910B2", "16392 devices; the planner takes at most 16384"),
        ("1x1000000:910B2", "1000000 devices; the planner takes at most 16384"),
    ],
)
def test_a_cluster_that_is_none(cluster: str, message: str) -> None:
    assert message in refused(*MODEL, "--cluster", cluster)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": []}, "nodes is empty; give at least one entry"),
        ({"nodes": [{"devices": []}]}, "nodes.0.devices is empty"),
        (
            {"links": {"inter_node": {"bandwidth": -5}}},
            "links.inter_node.bandwidth = -5: input should be greater",
        ),
        ({"links": {"inter_node": {"bandwidth": "-5 GB/s"}}}, "'-5 GB/s' is not a quantity"),
        (
            {"device_types": {"X": TYPE | {"peak_tflops": {"bf16": 0}}}},
            "peak_tflops.bf16 = 0: input should be greater",
        ),
        ({"device_types": {"X": TYPE | {"memory_bytes": 0}}}, "memory_bytes = 0: input should be greater"),
        ({"device_types": {"X": TYPE | {"price_per_hour": -1}}}, "price_per_hour = -1"),
    ],
)
def test_a_cluster_file_with_a_wrong_value(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    assert message in refused(*MODEL, "--cluster", cluster_file(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 100_000}, "layers = 100000: input should be less than or equal to 1000"),
        ({"hidden_size": 10**8}, "hidden_size = 100000000: input should be less than"),
        ({"max_sequence_length": 10**12}, "max_sequence_length = 1000000000000: input should be less"),
        ({"heads": 7}, "hidden_size = 64 must be a multiple of heads = 7"),
    ],
)
def test_a_model_of_absurd_size(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "model.json"
    model = {
        "name": "m",
        "layers": 4,
        "hidden_size": 64,
        "heads": 4,
        "vocab_size": 257,
        "max_sequence_length": 64,
    }
    path.write_text(json.dumps(model | changes))
    assert message in refused("plan", str(path), *CLUSTER, "--global-batch-size", "8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["plan", "gpt3-1.3", *CLUSTER, "--global-batch-size", "8"],
            "neither a preset nor a file; presets: gpt3-1.3b",
        ),
        ([*MODEL, *CLUSTER, "--strategy", "meti"], "type-split, uniform; did you mean 'metis'?"),
        (["compare", *MODEL[1:], *CLUSTER, "--strategies", "eth,unifrm"], "did you mean 'uniform'?"),
        (["plan", "gpt3-350m", *CLUSTER, "--global-batch-size", "0"], "greater than or equal to 1"),
        (["plan", "gpt3-350m", *CLUSTER, "--global-batch-size", "1000001"], "global_batch_size = 1000001"),
        ([*MODEL, *CLUSTER, "--objective", "money"], "objective = 'money': input should be 'time' or 'cost'"),
        (
            [*MODEL, *CLUSTER, "--objective", "cost", "--price", "A100=3"],
            "RTX3090 has no price; give --price",
        ),
        ([*MODEL, *CLUSTER, "--price", "A100"], "--price = 'A100' is not a device type's price"),
        ([*MODEL, *CLUSTER, "--price", "H100=3"], "the cluster has no H100; it has A100, RTX3090"),
        ([*MODEL, *CLUSTER, "--throughput-floor", "9"], "belongs to the objective cost"),
        (
            [*MODEL, *CLUSTER, "--json", "/no/such/plan.json"],
            "--json = /no/such/plan.json cannot be written: /no",
        ),
        (["compare", *MODEL[1:], *CLUSTER, "--json", "/"], "--json = / cannot be written: it is a folder"),
        (["predict", "plan.json", "--json", "/no/plan.json"], "/no is not a folder; choose another file"),
        (
            [
                *MODEL,
                *CLUSTER,
                "--objective",
                "cost",
                "--price",
                "A100=1,RTX3090=1",
                "--throughput-floor",
                "-1",
            ],
            "throughput_floor = -1",
        ),
    ],
)
def test_a_wrong_option(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_a_plan_with_more_pipelines_than_samples(tmp_path: Path) -> None:
    plan = make_plan(make_model(), [[(1, 1, 4)]] * 3, cluster=from_short_form("3x1:A100"), samples=[1, 1, 1])
    data = plan.model_dump(mode="json") | {"global_batch_size": 2}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert "samples sum to 3, not to global_batch_size = 2" in refused("predict", str(path))
    data["pipelines"][2] |= {"samples": 0, "local_batch_size": 0}
    path.write_text(json.dumps(data))
    assert "pipelines.2.samples = 0: input should be greater than or equal to 1" in refused(
        "predict", str(path)
    )


def test_a_profile_without_a_needed_operator(tmp_path: Path) -> None:
    folder = write_operators(tmp_path / "A100" / "fp16")
    done = run("profile", "import", str(folder), "--as", "A100", "--output", str(tmp_path / "profiles"))
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "profiles").glob("*.json")
    profile = json.loads(path.read_text())
    profile["groups"] = [group for group in profile["groups"] if "qkv" not in group["operators"]]
    path.write_text(json.dumps(profile))
    options = ["--cluster", "1x2:A100", "--precision", "fp16", "--profiles", str(tmp_path / "profiles")]
    told = refused("plan", "gpt3-1.3b", "--global-batch-size", "8", *options)
    assert "qkv" in told and "A100" in told
