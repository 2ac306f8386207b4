"""Ray nodes to devices, and the job's nodes to Ray nodes."""

from __future__ import annotations

from typing import Any

import pytest

from actors.inventory import PROCESS_CPUS, read_inventory
from actors.placement import Bundle, bind_nodes, bundles
from planner.cluster import from_short_form, resolve_cluster
from planner.errors import UserError
from tests.plans import make_model, make_plan


def ray_node(
    number: int, resources: dict[str, float], *, host: str = "host", alive: bool = True, label: str = ""
) -> Any:
    """An entry of ray.nodes()."""
    return {
        "NodeID": f"id{number}",
        "Alive": alive,
        "NodeManagerAddress": f"10.0.0.{number}",
        "NodeManagerHostname": host,
        "Resources": resources,
        "Labels": {"ray.io/accelerator-type": label} if label else {},
    }


def test_custom_resources_labels_and_ray_s_own_types_are_devices() -> None:
    inventory = read_inventory(
        [
            ray_node(3, {"CPU": 8, "GPU": 2, "accelerator_type:A100": 1.0}, host="c"),
            ray_node(1, {"CPU": 8, "910B4": 8}, host="a"),
            ray_node(2, {"CPU": 8, "NPU": 4}, host="b", label="Ascend910B2"),
            ray_node(4, {"RTX3080": 2, "RTX4090": 2, "GPU": 4}, host="d"),
            ray_node(5, {"CPU": 4}, host="head"),
            ray_node(6, {"GPU": 8}, host="gone", alive=False, label="H100"),
        ]
    )
    cluster = inventory.cluster()
    assert [(node.name, node.address, node.ray_node_id) for node in cluster.nodes] == [
        ("a", "10.0.0.1", "id1"),
        ("b", "10.0.0.2", "id2"),
        ("c", "10.0.0.3", "id3"),
        ("d", "10.0.0.4", "id4"),
    ]
    assert cluster.counts == {"910B4": 8, "910B2": 4, "A100": 2, "RTX3080": 2, "RTX4090": 2}
    assert [node.claims for node in inventory.nodes] == [
        {"910B4": {"910B4": 1.0}},
        {"910B2": {"NPU": 1.0}},
        {"A100": {"GPU": 1.0}},
        {"RTX3080": {"RTX3080": 1.0, "GPU": 1.0}, "RTX4090": {"RTX4090": 1.0, "GPU": 1.0}},
    ]


def test_nodes_without_accelerators_are_cpu_devices_with_a_share_of_the_memory() -> None:
    inventory = read_inventory(
        [ray_node(1, {"CPU": 2, "memory": 8e9}), ray_node(2, {"CPU": 64, "memory": 64e9})]
    )
    cluster = inventory.cluster()
    assert cluster.counts == {"CPU": 10}
    assert [node.name for node in cluster.nodes] == ["host-0", "host-1"]
    assert cluster.device_types["CPU"].memory_bytes == int(8e9 / 2 / 2)


def test_an_accelerator_of_unknown_type_says_how_to_label_its_node() -> None:
    with pytest.raises(UserError, match=r"has GPUs of a type that nothing says; start it with --labels"):
        read_inventory([ray_node(1, {"GPU": 2})])
    with pytest.raises(UserError, match=r"unknown type 'TPU-V4'"):
        read_inventory([ray_node(1, {"GPU": 2}, label="TPU-V4")])


def test_a_cluster_without_devices_is_refused() -> None:
    with pytest.raises(UserError, match="reports no devices"):
        read_inventory([ray_node(1, {"CPU": 0})]).cluster()


def test_named_nodes_get_theirs_and_the_others_the_closest_fit() -> None:
    inventory = read_inventory([ray_node(n, {"910B4": k}, host=f"h{n}") for n, k in ((1, 8), (2, 4), (3, 4))])
    cluster = resolve_cluster(
        {
            "nodes": [
                {"name": "small", "devices": [{"type": "910B4", "count": 2}]},
                {"name": "large", "devices": [{"type": "910B4", "count": 8}]},
                {"name": "third", "address": "10.0.0.3", "devices": [{"type": "910B4", "count": 4}]},
                {"name": "played", "emulate": True, "devices": [{"type": "H100", "count": 8}]},
            ]
        }
    )
    bound = bind_nodes(cluster, inventory)
    assert {name: node.ray_node_id for name, node in bound.items()} == {
        "small": "id2",
        "large": "id1",
        "third": "id3",
    }


def test_what_the_ray_cluster_lacks_is_said() -> None:
    inventory = read_inventory([ray_node(1, {"910B4": 2}), ray_node(2, {"GPU": 1}, label="A100")])
    with pytest.raises(UserError, match=r"the job needs 4x910B4, the Ray cluster has 2x910B4, 1xA100"):
        bind_nodes(from_short_form("1x4:910B4"), inventory)


def test_bundles_claim_real_devices_on_their_node_and_cpu_fractions_for_others() -> None:
    inventory = read_inventory([ray_node(1, {"GPU": 2}, label="A100")])
    cluster = resolve_cluster(
        {
            "nodes": [
                {"name": "real", "devices": [{"type": "A100", "count": 2}]},
                {"name": "played", "emulate": True, "devices": [{"type": "910B4", "count": 1}]},
            ]
        }
    )
    plan = make_plan(make_model(), [[(2, 1, 4)], [(1, 1, 4)]], cluster=cluster)
    real = Bundle("A100", {"GPU": 1.0}, {"ray.io/node-id": "id1"})
    assert bundles(plan, bind_nodes(cluster, inventory)) == [
        [real, real],
        [Bundle("910B4", {"CPU": PROCESS_CPUS})],
    ]
