"""Device and stage groups against plain enumerations of named devices."""

import itertools
from collections.abc import Iterator

import pytest

from planner.cluster import from_short_form
from planner.model_spec import PRESETS
from planner.search.device_groups import Composition, DeviceGrid, compositions, device_groups, place
from planner.search.layouts import layouts, whole_cluster
from planner.search.stage_groups import StageShare, stage_options, stage_shares, tp_degrees

GRIDS = [
    ((2, 2),),
    ((2, 0), (0, 2)),
    ((1, 1), (1, 1)),
    ((3, 0), (1, 0)),
    ((1, 0), (1, 0), (0, 1)),
]


def grid_of(nodes: Composition) -> DeviceGrid:
    return DeviceGrid(tuple("AB"), tuple(sorted(nodes, reverse=True)), (1, 1))


def named(nodes: Composition) -> list[tuple[int, int]]:
    """Every device as (node, type)."""
    return [(n, k) for n, share in enumerate(nodes) for k, count in enumerate(share) for _ in range(count)]


def composition_of(devices: list[tuple[int, int]]) -> Composition:
    shares: dict[int, list[int]] = {}
    for node, kind in devices:
        share = shares.setdefault(node, [0, 0])
        share[kind] += 1
    return tuple(sorted((tuple(share) for share in shares.values()), reverse=True))


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All set partitions."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for partition in partitions(rest):
        for i, block in enumerate(partition):
            yield [*partition[:i], [first, *block], *partition[i + 1 :]]
        yield [[first], *partition]


@pytest.mark.parametrize("nodes", GRIDS)
def test_every_multiset_of_pipelines_comes_once(nodes: Composition) -> None:
    devices = named(nodes)
    expected = set()
    for count in range(1, len(devices) + 1):
        for used in itertools.combinations(range(len(devices)), count):
            for blocks in partitions(list(used)):
                pipelines = [composition_of([devices[i] for i in block]) for block in blocks]
                expected.add(tuple(sorted(pipelines)))
    grid = grid_of(nodes)
    found = list(device_groups(grid, usable=lambda _: True, most_pipelines=len(devices)))
    assert len(found) == len(set(found))
    assert {tuple(sorted(group)) for group in found} == expected
    assert {c for group in expected for c in group} == set(compositions(grid))
    for group in found:
        left = [list(share) for share in grid.nodes]
        for composition, places in zip(group, place(group, grid.nodes), strict=True):
            assert len(set(places)) == len(places)
            for share, node in zip(composition, places, strict=True):
                left[node] = [a - b for a, b in zip(left[node], share, strict=True)]
        assert all(count >= 0 for share in left for count in share)


def test_the_paper_s_example() -> None:
    """Two V and two T: <V,V>,<T,T> comes once, and one pipeline of all and four of one are there."""
    grid = grid_of(((2, 0), (0, 2)))
    whole = [
        group
        for group in device_groups(grid, usable=lambda _: True, most_pipelines=4)
        if sum(sum(map(sum, composition)) for composition in group) == 4
    ]
    assert whole.count((((2, 0),), ((0, 2),))) == 1
    assert (((2, 0), (0, 2)),) in whole
    assert max(map(len, whole)) == 4
    assert len(whole) == 9


def test_most_pipelines_and_usable_are_kept() -> None:
    grid = grid_of(((2, 2),))
    groups = list(device_groups(grid, usable=lambda c: c != ((1, 0),), most_pipelines=2))
    assert groups and all(len(group) <= 2 and ((1, 0),) not in group for group in groups)


def every_sequence(left: StageShare, behind: StageShare) -> Iterator[list[StageShare]]:
    """All stage sequences that `stage_shares` leads to, last stage first."""
    for share in stage_shares(left, behind, (1, 1)):
        rest = tuple(
            tuple(a - b for a, b in zip(x, y, strict=True)) for x, y in zip(left, share, strict=True)
        )
        if any(map(any, rest)):
            for others in every_sequence(rest, share):
                yield [share, *others]
        else:
            yield [share]


@pytest.mark.parametrize("nodes", [((2, 2),), ((2, 0), (0, 2)), ((1, 1), (1, 1)), ((2, 0), (2, 0))])
def test_stage_groups_are_all_ordered_ones_up_to_alike_nodes(nodes: Composition) -> None:
    devices = named(nodes)

    def ordered(items: list[int]) -> Iterator[list[list[int]]]:
        if not items:
            yield []
        for size in range(1, len(items) + 1):
            for first in itertools.combinations(items, size):
                for rest in ordered([i for i in items if i not in first]):
                    yield [list(first), *rest]

    def share_of(block: list[int]) -> StageShare:
        counts = [[0, 0] for _ in nodes]
        for i in block:
            node, kind = devices[i]
            counts[node][kind] += 1
        return tuple(map(tuple, counts))

    def look(sequence: list[StageShare]) -> tuple[StageShare, ...]:
        """What neighbouring stages share, whichever of alike nodes they are on."""
        alike = [
            order
            for order in itertools.permutations(range(len(nodes)))
            if all(nodes[i] == nodes[j] for i, j in enumerate(order))
        ]
        return min(tuple(tuple(share[i] for i in order) for share in sequence) for order in alike)

    expected = {look([share_of(block) for block in blocks]) for blocks in ordered(list(range(len(devices))))}
    nothing = tuple((0, 0) for _ in nodes)
    found = list(every_sequence(nodes, nothing))
    assert {look(sequence) for sequence in found} <= expected
    # Arrangements that differ only beyond neighbours are made once, so pairs of neighbours are all there.
    pairs = {(a, b) for sequence in expected for a, b in itertools.pairwise(sequence)}
    found_pairs = {
        (tuple(a[i] for i in order), tuple(b[i] for i in order))
        for sequence in found
        for a, b in itertools.pairwise(sequence)
        for order in itertools.permutations(range(len(nodes)))
    }
    assert pairs <= found_pairs
    assert {tuple(map(_counts, s)) for s in expected} == {tuple(map(_counts, s)) for s in found}


def _counts(share: StageShare) -> tuple[int, ...]:
    return tuple(map(sum, zip(*share, strict=True)))


def test_the_paper_s_stage_groups() -> None:
    """<V,V,T,T> has 26 ordered stage groups, {V,V},{T,T} and its reverse among them."""
    sequences = list(every_sequence(((2, 0), (0, 2)), ((0, 0), (0, 0))))
    assert len(sequences) == 26
    v, t = ((2, 0), (0, 0)), ((0, 0), (0, 2))
    assert [v, t] in sequences and [t, v] in sequences


def test_tp_stays_inside_node_type_and_heads() -> None:
    model = PRESETS["gpt3-tiny"]
    assert tp_degrees(model, ((4, 0),), None) == (1, 2, 4)
    assert tp_degrees(model, ((4, 2),), None) == (1, 2)
    assert tp_degrees(model, ((3, 0), (3, 0)), None) == (1,)
    assert tp_degrees(model, ((16, 0),), (8, 1)) == (1, 2, 4)


def test_rows_of_unlike_replicas_use_up_the_micro_batch() -> None:
    grid = DeviceGrid(("A", "B"), ((2, 1),), (1, 1))
    options = stage_options(PRESETS["gpt3-tiny"], ((2, 1),), grid, micro_batch_size=7)
    rows = sorted([replica.rows for replica in option.replicas] for option in options)
    assert rows == [[1, 1, 5], [2, 2, 3], [3, 3, 1]]
    # Three rows cannot be cut equally over two replicas of one type: only tp 2 is left.
    odd = stage_options(PRESETS["gpt3-tiny"], ((2, 0),), grid, micro_batch_size=3)
    assert [(option.tp, len(option.replicas)) for option in odd] == [(2, 1)]


@pytest.mark.parametrize("text", ["1x4:A100,1x4:RTX3090", "8x1:A100", "1x2:A100+2:RTX3090,2x2:A100"])
def test_small_clusters_are_not_coarse(text: str) -> None:
    (layout,) = layouts(from_short_form(text))
    assert not layout.coarse and set(layout.slices[0].grid.steps) == {1}


@pytest.mark.parametrize(
    "text", ["4x8:910B2,4x8:910B4", "64x8:910B2,64x8:910B4", "3x8:A100,2x4:RTX3090", "9x1:A100", "1x16:A100"]
)
def test_large_clusters_are_cut_into_few_units(text: str) -> None:
    cluster = from_short_form(text)
    found = layouts(cluster)
    assert found
    for layout in found:
        assert layout.coarse
        names = [node.name for part in layout.slices for bundle in part.bundles for node in bundle]
        assert len(names) == len(set(names))
        assert all(part.grid.units <= 8 for part in layout.slices)
    assert whole_cluster(cluster).grid.devices == len(cluster.devices) or len(found[-1].slices) > 1
