from pathlib import Path

import pytest

from planner.catalogue import CATALOGUE, canonical_name, lookup
from planner.cluster import Cluster, Link, from_short_form, resolve_cluster
from planner.errors import UserError, parse


def test_short_form_counts_nodes_and_devices() -> None:
    cluster = from_short_form("4x8:910B2,2x4:910B4")
    assert cluster.counts == {"910B2": 32, "910B4": 8}
    assert len(cluster.nodes) == 6
    assert cluster.devices[0].id == "node0/0" and cluster.devices[-1].id == "node5/3"


def test_a_node_may_mix_types() -> None:
    cluster = from_short_form("1x2:RTX3080+2:RTX4090,1x1:A100")
    assert [device.type for device in cluster.devices] == ["RTX3080"] * 2 + ["RTX4090"] * 2 + ["A100"]
    assert {device.node for device in cluster.devices[:4]} == {"node0"}


def test_nodes_of_a_file_may_differ_and_repeat(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "device_types:\n"
        "  Toy: {backend: cpu, peak_tflops: {fp32: 1}, memory_bytes: 2 GiB, memory_bandwidth: 10 GB/s}\n"
        "nodes:\n"
        "- {name: big, count: 2, devices: [{type: rtx 3090, count: 3}], emulate: true}\n"
        "- {name: small, devices: [{type: Toy, count: 1}]}\n"
        "links:\n"
        "  intra_node: {bandwidth: 200 Gbps}\n"
        "  overrides: {Toy/RTX3090: {bandwidth: 1 GB/s, latency: 1ms}}\n"
    )
    cluster = resolve_cluster("cluster.yaml", base=tmp_path)
    assert [node.name for node in cluster.nodes] == ["big0", "big1", "small"]
    assert cluster.counts == {"RTX3090": 6, "Toy": 1}
    assert cluster.emulated
    assert cluster.link("big0/0", "big0/1").bandwidth == 25e9
    assert cluster.link("small/0", "big1/0").latency == 1e-3
    assert cluster.link("big0/0", "big1/0") == cluster.links.inter_node


def test_an_override_may_be_for_one_type_and_inside_a_node() -> None:
    data = {
        "nodes": [{"count": 2, "devices": [{"type": "A100", "count": 2}]}],
        "links": {"overrides": {"A100": {"bandwidth": 1}, "A100@intra": {"bandwidth": 2}}},
    }
    cluster = parse(Cluster, data, source="c")
    assert cluster.link("node0/0", "node1/0").bandwidth == 1
    assert cluster.link("node0/0", "node0/1").bandwidth == 2


def test_a_cluster_survives_its_own_yaml(tmp_path: Path) -> None:
    cluster = from_short_form("1x2:RTX3080+2:RTX4090,3x1:A100")
    (tmp_path / "c.yaml").write_text(cluster.to_yaml())
    assert resolve_cluster(str(tmp_path / "c.yaml")) == cluster


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("nvidia a100-pcie-40gb", "A100-40"),
        ("A100-40G", "A100-40"),
        ("Ascend 910B2", "910B2"),
        ("ascend910b4", "910B4"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("Tesla V100-SXM2-16GB", "V100-16"),
        ("V100 32GB", "V100-32"),
        (" h100 ", "H100"),
        ("accelerator_type:A100", "A100"),
        ("NVIDIA RTX A6000", "A6000"),
    ],
)
def test_reported_names_are_aliases(reported: str, name: str) -> None:
    assert canonical_name(reported) == name


def test_the_paper_s_table_1_is_in_the_catalogue() -> None:
    half = {name: CATALOGUE[name].peak_tflops["fp16"] for name in CATALOGUE}
    assert {k: half[k] for k in ("910B2", "910B3", "910B4", "A100", "RTX3090")} == {
        "910B2": 376,
        "910B3": 313,
        "910B4": 280,
        "A100": 312,
        "RTX3090": 80,
    }
    assert CATALOGUE["910B4"].memory_bytes == 32 * 2**30


def test_a_missing_precision_has_a_stand_in() -> None:
    known, device = lookup("v100")
    assert known == "V100-32"
    assert device.tflops("bf16") == device.tflops("fp16")
    only_single = device.model_copy(update={"peak_tflops": {"fp32": 3.0}})
    assert only_single.tflops("bf16") == 3.0


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("4x8:910B9", "'910B9' is not known; use one of 910B2"),
        ("x8:A100", "neither a file nor a short form"),
        ("1x2:A100,frogs", "'frogs' is not nodes x devices : type"),
        ("1x2:A100+A100", "'A100' is not devices : type"),
        ("0x2:A100", "count = 0"),
        ("1x0:A100", "give a node at least one"),
        ("1000000x8:A100", "whole number from 1 to"),
        ("9999x8:A100", "at most 16384"),
        ("missing.yaml", "neither a file nor a short form"),
    ],
)
def test_a_wrong_cluster_is_one_line(text: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        resolve_cluster(text)
    assert hint in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        ({}, "nodes"),
        ({"nodes": []}, "nodes"),
        ({"nodes": 5}, "nodes = 5: write a list"),
        ({"nodes": {"name": "a"}}, "write a list with one entry a node"),
        ({"nodes": [{"devices": [{"type": "A100", "count": 1}], "colour": 1}]}, "colour is not a known key"),
        (
            {"nodes": [{"name": "a", "devices": [{"type": "A100", "count": 1}]}] * 2},
            "name 'a' is used twice",
        ),
        (
            {
                "nodes": [{"devices": [{"type": "A100", "count": 1}]}],
                "links": {"overrides": {"H100/A100": {"bandwidth": 1}}},
            },
            "names 'H100', which the cluster does not hold",
        ),
        (
            {
                "nodes": [{"devices": [{"type": "A100", "count": 1}]}],
                "links": {"intra_node": {"bandwidth": -3}},
            },
            "links.intra_node.bandwidth = -3",
        ),
        (
            {"nodes": [{"count": 2, "address": "10.0.0.1", "devices": [{"type": "A100", "count": 1}]}]},
            "list such nodes singly",
        ),
    ],
)
def test_a_wrong_cluster_mapping_names_the_field(data: object, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        resolve_cluster(data)


def test_a_short_form_longer_than_any_file_name() -> None:
    assert resolve_cluster(",".join(["1x1:RTX3090"] * 40)).counts == {"RTX3090": 40}


def test_numbers_are_read_as_in_json_and_no_key_may_be_written_twice(tmp_path: Path) -> None:
    """YAML 1.1 takes 3e-6 for a word, and keeps the last of several values without a word."""
    text = (
        "nodes: [{devices: [{type: A100, count: 2}]}]\nlinks: {intra_node: {bandwidth: 2e9, latency: 3e-6}}\n"
    )
    (tmp_path / "c.yaml").write_text(text)
    assert resolve_cluster("c.yaml", base=tmp_path).links.intra_node == Link(bandwidth=2e9, latency=3e-6)
    (tmp_path / "c.yaml").write_text(text + "links: {}\n")
    with pytest.raises(UserError, match=r"'links' is written twice; remove one of them, in .* line 3"):
        resolve_cluster("c.yaml", base=tmp_path)


def test_a_merged_key_may_be_overridden(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "nodes:\n- &first {name: a, emulate: true, devices: [{type: A100, count: 2}]}\n- {<<: *first, name: b}\n"
    )
    assert [node.name for node in resolve_cluster("c.yaml", base=tmp_path).nodes] == ["a", "b"]


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("nodes: [")
    with pytest.raises(UserError, match="not valid YAML"):
        resolve_cluster("c.yaml", base=tmp_path)
    (tmp_path / "c.yaml").write_text("[" * 1000)
    with pytest.raises(UserError, match=r"c\.yaml is nested too deeply"):
        resolve_cluster("c.yaml", base=tmp_path)
    (tmp_path / "c.yaml").write_text("")
    with pytest.raises(UserError, match=r"c\.yaml: it holds None, which is no mapping of keys to values"):
        resolve_cluster("c.yaml", base=tmp_path)
