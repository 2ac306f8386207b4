"""Which way a group reduces, against seconds worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cluster import Device, Links
from planner.collectives import choose_reduction, flat_seconds

FAST, SLOW = {"bandwidth": 100e9, "latency": 1e-6}, {"bandwidth": 1e9, "latency": 1e-5}


def _links(**fields: Any) -> Links:
    return Links.model_validate({"intra_node": FAST, "inter_node": SLOW} | fields)


def _members(*nodes: str) -> list[Device]:
    return [Device(f"{node}/{index}", node, index, "A") for index, node in enumerate(nodes)]


def test_one_node_or_one_device_a_node_reduces_at_once() -> None:
    for nodes in ("aaaa", "abcd"):
        reduction = choose_reduction(_links(), _members(*nodes), numel=10**6, element_bytes=4)
        assert (reduction.algorithm, reduction.groups, reduction.across) == ("flat", (), ())


def test_even_nodes_reduce_in_slices() -> None:
    reduction = choose_reduction(_links(), _members(*"aabb"), numel=10**6, element_bytes=4)
    assert reduction.algorithm == "slices"
    assert reduction.nodes == ((0, 1), (2, 3))
    assert reduction.across == ((0, 2), (1, 3))
    assert reduction.groups == ((0, 1), (2, 3), (0, 2), (1, 3))
    inside = 2 * (1e-6 + 2e6 / 100e9)
    between = 2 * (1e-5 + 1e6 / 1e9)
    assert reduction.seconds == pytest.approx(inside + between)
    at_once = 2 * 3 * (1e-5 + 1e6 / 1e9)
    assert flat_seconds(_links(), _members(*"aabb"), message_bytes=4e6) == pytest.approx(at_once)


def test_members_may_alternate_between_nodes() -> None:
    reduction = choose_reduction(_links(), _members(*"abab"), numel=10**6, element_bytes=4)
    assert (reduction.algorithm, reduction.nodes) == ("slices", ((0, 2), (1, 3)))
    assert reduction.across == ((0, 1), (2, 3))


def test_uneven_nodes_reduce_by_their_leaders() -> None:
    reduction = choose_reduction(_links(), _members(*"aaab"), numel=10**6, element_bytes=4)
    assert reduction.algorithm == "leader"
    assert reduction.across == ((0, 3),)
    assert reduction.groups == ((0, 1, 2), (0, 3))
    inside = 2 * (2 * 1e-6 + 4e6 / 100e9)
    between = 2 * (1e-5 + 2e6 / 1e9)
    assert reduction.seconds == pytest.approx(inside + between)


def test_a_message_that_a_node_does_not_divide_is_not_sliced() -> None:
    assert (
        choose_reduction(_links(), _members(*"aabb"), numel=10**6 + 1, element_bytes=4).algorithm == "leader"
    )


def test_where_nodes_are_no_faster_all_reduce_at_once() -> None:
    alike = _links(intra_node=SLOW)
    reduction = choose_reduction(alike, _members(*"aab"), numel=10**6, element_bytes=4)
    assert reduction.algorithm == "flat"
    assert reduction.seconds == flat_seconds(alike, _members(*"aab"), message_bytes=4e6)
