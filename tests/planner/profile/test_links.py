"""Links from measured transfers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster import Link, Links
from planner.errors import UserError
from planner.profile.file import DeviceProfile, LinkPoint, LinkTimes
from planner.profile.importers import import_folder
from planner.profile.links import collective_seconds, fit_link, links_from_profiles
from tests.planner.profile.sources import MIB, write_collective, write_operators, write_transfers


def transfers(points: dict[int, float]) -> LinkTimes:
    return LinkTimes(
        scope="intra_node",
        operation="p2p",
        members=2,
        source="test",
        points=tuple(LinkPoint(message_bytes=size, seconds=seconds) for size, seconds in points.items()),
    )


@given(
    bandwidth=st.floats(1e8, 1e12),
    latency=st.floats(1e-6, 1e-3),
    sizes=st.sets(st.integers(1, 2**30), min_size=3, max_size=10),
)
def test_a_true_link_is_found_again(bandwidth: float, latency: float, sizes: set[int]) -> None:
    truth = Link(bandwidth=bandwidth, latency=latency)
    link, error = fit_link(transfers({size: truth.seconds(size) for size in sorted(sizes)}))
    assert error < 1e-3
    for size in sizes:
        assert link.seconds(size) == pytest.approx(truth.seconds(size), rel=1e-3)


def test_latency_is_never_negative_nor_bandwidth() -> None:
    link, error = fit_link(transfers({MIB: 1e-5, 2 * MIB: 1e-3}))
    assert link.latency == 0 and error > 0.5
    falling, _ = fit_link(transfers({MIB: 2e-3, 2 * MIB: 1e-3}))
    assert falling.bandwidth > 0


def test_one_point_is_a_bandwidth() -> None:
    assert fit_link(transfers({1000: 1e-6})) == (Link(bandwidth=1e9, latency=0.0), 0.0)


@pytest.fixture
def profile(tmp_path: Path) -> DeviceProfile:
    folder = write_operators(tmp_path / "fp16", degrees=(1,), sizes=(1,))
    write_transfers(folder, "intra", {1: 10.0, 4: 20.0, 16: 24.0})
    write_collective(folder, "all_reduce", 2, [(8, 4.0), (2, 1.0), (32, 1e9), (4, 2.0)])
    return import_folder(folder, device_type="A100")[0].profile


def test_measured_links_replace_the_clusters(profile: DeviceProfile) -> None:
    links, sources = links_from_profiles(Links(), {"A100": profile})
    inside = links.between(type_a="A100", type_b="A100", same_node=True)
    assert inside.seconds(4 * MIB) == pytest.approx(4 * MIB / 20e9, rel=0.2)
    outside = links.between(type_a="A100", type_b="A100", same_node=False)
    assert outside == Links().inter_node
    assert [(s.scope, s.source) for s in sources] == [
        ("intra_node", "p2p_intra_node.csv"),
        ("inter_node", "cluster"),
    ]


def test_links_to_other_types_stay_the_clusters(profile: DeviceProfile) -> None:
    links, _ = links_from_profiles(Links(), {"A100": profile})
    for same_node in (True, False):
        link = links.between(type_a="A100", type_b="H100", same_node=same_node)
        assert link == Links().between(type_a="A100", type_b="H100", same_node=same_node)


def test_a_pair_that_the_cluster_file_names_is_kept(profile: DeviceProfile) -> None:
    own = Link(bandwidth=1e9, latency=0.0)
    links, sources = links_from_profiles(Links(overrides={"A100@intra": own}), {"A100": profile})
    assert links.overrides == {"A100@intra": own}
    assert {source.source for source in sources} == {"cluster"}


def test_collectives_between_measured_sizes(profile: DeviceProfile) -> None:
    def seconds(mebibytes: float, members: int = 2) -> float:
        return collective_seconds(
            profile,
            scope="intra_node",
            operation="all_reduce",
            members=members,
            message_bytes=mebibytes * MIB,
        )

    assert seconds(4) == pytest.approx(2e-3)
    assert seconds(6) == pytest.approx(3e-3)
    with pytest.raises(UserError, match="messages of 2097152 to 8388608 bytes, not 33554432"):
        seconds(32)
    with pytest.raises(UserError, match=r"no all_reduce of 4 devices \(intra_node\); it has all_reduce of 2"):
        seconds(4, members=4)
