"""Gradient blocks against results worked out by hand and properties of any plan."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cluster import from_short_form
from planner.gradient_blocks import (
    GradientBlock,
    combine,
    gradient_blocks,
    partition,
    rank_blocks,
    stage_layouts,
)
from planner.model_spec import PRESETS, Family, ModelSpec
from planner.parameters import Parameter, Region, model_parameters, stage_parameters
from planner.plan import Plan
from tests.plans import Degrees, make_model, make_plan

LAYER = Region(1, "layer", 0)


def _sharded(blocks: tuple[GradientBlock, ...]) -> list[GradientBlock]:
    return [block for block in blocks if block.kind == "sharded"]


def _layer_atoms(layer: int, fraction: tuple[int, int], parts: int) -> list[tuple[str, tuple[int, int]]]:
    """What a layer of hidden size 24 puts in its sharded block for TP shards [first, last) of `parts`."""
    prefix, widths = f"layers.{layer}", {"attention.query": 24, "attention.key": 24, "attention.value": 24}
    atoms = []
    for name, width in (widths | {"attention.output": 24, "mlp.up": 96, "mlp.down": 96}).items():
        cut = (width * fraction[0] // parts, width * fraction[1] // parts)
        atoms.append((f"{prefix}.{name}.weight", cut))
        if name not in ("attention.output", "mlp.down"):
            atoms.append((f"{prefix}.{name}.bias", cut))
    return atoms


def test_figures_5_and_7_two_replicas_against_a_tp_pair() -> None:
    """Devices 0 and 1 run DP 2, devices 2 and 3 TP 2: each half of the weights is one block of three."""
    plan = make_plan(make_model(vocab_size=256), [[(1, 2, 4)], [(2, 1, 4)]])
    blocks = gradient_blocks(plan)
    halves = _sharded(blocks)
    assert [block.holders for block in halves] == [(0, 1, 2), (0, 1, 3)]
    for half, block in enumerate(halves):
        found = [(atom.parameter, atom.tp_range) for atom in block.atoms]
        assert found == [atom for layer in range(4) for atom in _layer_atoms(layer, (half, half + 1), 2)]
        assert block.weights == (1.0, 1.0, 1.0)
    others = [(block.kind, block.holders, block.weights) for block in blocks if block not in halves]
    assert others == [
        ("replicated", (0, 1, 2, 3), (1.0, 1.0, 0.5, 0.5)),
        ("tied", (0, 1, 2), (1.0, 1.0, 1.0)),
        ("tied", (0, 1, 3), (1.0, 1.0, 1.0)),
    ]
    assert [atom.tp_range for block in blocks[-2:] for atom in block.atoms] == [(0, 128), (128, 256)]
    # A TP rank needs no more calls than it has blocks; no rank has more than both halves of each kind.
    assert [len(rank_blocks(blocks, rank)) for rank in range(4)] == [5, 5, 3, 3]


def test_the_paper_table_3_plan_has_52_sharded_blocks() -> None:
    cluster = from_short_form("4x8:910B4,4x8:910B2")
    plan = make_plan(
        PRESETS["gpt3-13b"],
        [
            [(4, 1, 4), (4, 1, 4), (4, 1, 5), *[(2, 2, 5)] * 3, *[(1, 4, 6)] * 2],
            [(8, 1, 8), (8, 1, 9), (4, 2, 11), (4, 2, 12)],
        ],
        cluster=cluster,
        micro_batch_sizes=(4, 8),
        samples=(344, 680),
    )
    blocks = gradient_blocks(plan)
    # Layer ranges shared by a stage of each pipeline: 4 meet a TP-8 stage, 5 need 4 cuts.
    assert len(_sharded(blocks)) == 4 * 8 + 5 * 4
    # One a layer range; the vocabulary of 50257 divides neither by 4 nor by 8, hence three slivers more.
    assert Counter(block.kind for block in blocks) == {"sharded": 52, "replicated": 9, "tied": 8 + 3}
    per_rank = [len(_sharded(rank_blocks(blocks, rank))) for rank in range(plan.world_size)]
    assert (min(per_rank), max(per_rank)) == (2, 6)
    assert Counter(per_rank) == {2: 44, 3: 8, 4: 8, 6: 4}


def test_degrees_that_do_not_divide_each_other() -> None:
    weight = Parameter("w", (24, 5), LAYER, tp_dim=0)
    cuts = [(cut.start, cut.stop, cut.tp_ranks) for cut in partition(weight, (3, 4))]
    assert cuts == [
        (0, 6, (0, 0)),
        (6, 8, (0, 1)),
        (8, 12, (1, 1)),
        (12, 16, (1, 2)),
        (16, 18, (2, 2)),
        (18, 24, (2, 3)),
    ]


def test_a_vocabulary_smaller_than_its_shards_leaves_ranks_empty() -> None:
    tokens = Parameter("w", (5, 2), LAYER, tp_dim=0, padded=True)
    # Shards of ceil(5 / 4) = 2: two, two, one, none.
    assert [cut.tp_ranks for cut in partition(tokens, (4,))] == [(0,), (1,), (2,)]


def test_without_tp_a_stage_needs_one_block_and_the_tied_one() -> None:
    blocks = gradient_blocks(make_plan(make_model(), [[(1, 1, 4)], [(1, 1, 4)]]))
    assert [(block.kind, block.holders) for block in blocks] == [("sharded", (0, 1)), ("tied", (0, 1))]
    assert {atom.parameter for block in blocks for atom in block.atoms} == {
        parameter.name for parameter in model_parameters(make_model())
    }


def test_the_tied_embedding_joins_first_and_last_stages_and_comes_last() -> None:
    plan = make_plan(make_model(), [[(1, 1, 2), (1, 1, 2)], [(1, 1, 4)]])
    last = gradient_blocks(plan)[-1]
    assert (last.kind, last.holders, last.weights) == ("tied", (0, 1, 2), (1.0, 1.0, 1.0))


def _lowest_layers(blocks: tuple[GradientBlock, ...]) -> list[int]:
    """The lowest layer of each block that holds any."""
    names = [[atom.parameter for atom in block.atoms] for block in blocks]
    return [
        min(int(name.split(".")[1]) for name in part if name.startswith("layers."))
        for part in names
        if any(name.startswith("layers.") for name in part)
    ]


def test_of_blocks_that_can_start_together_the_busiest_holders_goes_first() -> None:
    for lower, upper, expected in ((1, 3, [1, 0]), (3, 1, [0, 3])):
        stages = [(1, 1, lower), (1, 1, upper)]
        blocks = gradient_blocks(make_plan(make_model(), [stages, stages]))
        assert _lowest_layers(blocks) == expected
        assert [atom.parameter for atom in blocks[-1].atoms] == ["embedding.tokens.weight"]


def test_a_block_between_misaligned_stages_does_not_make_the_others_queue() -> None:
    """Layers 1 and 2 share a holder with each end: launched first, the ends run side by side after it."""
    blocks = gradient_blocks(make_plan(make_model(), [[(1, 1, 1), (1, 1, 3)], [(1, 1, 3), (1, 1, 1)]]))
    assert _lowest_layers(blocks) == [1, 0, 3]
    assert blocks[-1].kind == "tied"


def test_pieces_of_one_region_stay_together_before_fusion() -> None:
    plan = make_plan(make_model(), [[(1, 1, 4)], [(2, 1, 4)]])
    ranges = list(combine(plan.model, stage_layouts(plan)))
    keys = [(part.region, part.kind, part.holders) for part in ranges]
    assert len(set(keys)) == len(keys)
    assert [part.region.layer for part in ranges if part.kind == "sharded"] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_sequence_parallel_norms_are_partial_sums() -> None:
    plan = make_plan(make_model(), [[(2, 1, 4)], [(1, 1, 4)]])
    stage = plan.pipelines[0].stages[0].model_copy(update={"sequence_parallel": True})
    pipeline = plan.pipelines[0].model_copy(update={"stages": (stage,)})
    changed = plan.model_copy(update={"pipelines": (pipeline, plan.pipelines[1])})
    (replicated,) = [block for block in gradient_blocks(changed) if block.kind == "replicated"]
    assert replicated.weights == (1.0, 1.0, 1.0)


def test_a_thousand_devices_and_a_hundred_layers() -> None:
    """The work is per distinct stage layout: this many atoms take a fraction of a second."""
    cluster = from_short_form("64x8:910B2,64x8:910B4")
    wide, deep = [[(8, 1, 6)] * 16] * 4, [[(4, 1, 3)] * 32] * 4
    plan = make_plan(PRESETS["gpt3-175b"], [*wide, *deep], cluster=cluster)
    blocks = gradient_blocks(plan)
    assert sum(block.numel for block in blocks) == sum(p.numel for p in model_parameters(plan.model))
    # Each of the 32 layer ranges of a TP-4 stage meets one TP-8 stage.
    assert len(_sharded(blocks)) == 32 * 8


DEGREES = (1, 2, 3, 4, 5, 6, 7, 8)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any TP degrees from 1 to 8 (heads divide them all), any splits, odd vocabularies."""
    families: list[Family] = ["gpt3", "llama"]
    family = draw(st.sampled_from(families))
    layers = draw(st.integers(1, 4))
    heads = 840
    model = ModelSpec(
        name="any",
        family=family,
        layers=layers,
        # Rotary positions turn pairs.
        hidden_size=2 * heads if family == "llama" else heads,
        heads=heads,
        vocab_size=draw(st.integers(2, 60)),
        max_sequence_length=8,
        tied_embedding=draw(st.booleans()),
    )
    pipelines = draw(st.lists(_stages(layers), min_size=1, max_size=3))
    count = sum(tp * dp for stages in pipelines for tp, dp, _ in stages)
    return make_plan(model, pipelines, cluster=from_short_form(f"1x{count}:910B2"))


def _stages(layers: int) -> st.SearchStrategy[list[Degrees]]:
    bounds = st.lists(st.integers(1, max(1, layers - 1)), max_size=2, unique=True).map(sorted)

    def with_degrees(bounds: list[int]) -> Any:
        edges = [0, *(bound for bound in bounds if bound < layers), layers]
        sizes = [stop - start for start, stop in pairwise(edges)]
        stages = [st.tuples(st.sampled_from(DEGREES), st.integers(1, 3), st.just(size)) for size in sizes]
        return st.tuples(*stages).map(list)

    return bounds.flatmap(with_degrees)


def _expected_ranges(plan: Plan, rank: int) -> dict[str, tuple[int, int] | None]:
    """Logical range of each parameter that a rank holds, from the contract's shard ranges."""
    place = plan.ranks[rank]
    stage = plan.pipelines[place.pipeline].stages[place.stage]
    return {
        parameter.name: None
        if parameter.tp_dim is None
        else parameter.shard_range(tp=stage.tp, tp_rank=place.tp_rank)
        for parameter in stage_parameters(plan.model, stage)
    }


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_every_element_of_every_rank_is_in_exactly_one_block(plan: Plan) -> None:
    blocks = gradient_blocks(plan)
    parameters = {parameter.name: parameter for parameter in model_parameters(plan.model)}
    assert sum(block.numel for block in blocks) == sum(p.numel for p in parameters.values())
    assert [block.index for block in blocks] == list(range(len(blocks)))
    for rank in range(plan.world_size):
        held: dict[str, list[tuple[int, int] | None]] = {}
        for block in rank_blocks(blocks, rank):
            for atom in block.atoms:
                held.setdefault(atom.parameter, []).append(atom.tp_range)
        expected = _expected_ranges(plan, rank)
        assert set(held) == {name for name, span in expected.items() if span is None or span[0] < span[1]}
        for name, pieces in held.items():
            assert _joined(pieces) == expected[name]
    for block in blocks:
        assert list(block.holders) == sorted(set(block.holders))
        for atom in block.atoms:
            assert atom.numel == _atom_numel(parameters[atom.parameter], atom.tp_range)


def _joined(pieces: list[tuple[int, int] | None]) -> tuple[int, int] | None:
    """The range that disjoint adjacent pieces cover; fails on an overlap or a gap."""
    if pieces == [None]:
        return None
    spans = sorted(piece for piece in pieces if piece is not None)
    assert len(spans) == len(pieces)
    assert all(left[1] == right[0] for left, right in pairwise(spans))
    return spans[0][0], spans[-1][1]


def _atom_numel(parameter: Parameter, tp_range: tuple[int, int] | None) -> int:
    if tp_range is None:
        return parameter.numel
    assert parameter.tp_dim is not None
    return math.prod(parameter.shape) // parameter.shape[parameter.tp_dim] * (tp_range[1] - tp_range[0])


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_a_block_sums_each_contribution_once(plan: Plan) -> None:
    """Per DP replica of each stage, the weights of a block's holders sum to one for the gradient it holds.

    A tied embedding is the exception that is meant: both ends of a pipeline contribute.
    """
    for block in gradient_blocks(plan):
        totals: Counter[tuple[int, int, int]] = Counter()
        for rank, weight in zip(block.holders, block.weights, strict=True):
            place = plan.ranks[rank]
            totals[place.pipeline, place.stage, place.replica] += weight  # type: ignore[assignment]
        assert all(total == pytest.approx(1.0) for total in totals.values())
        pipelines = {pipeline for pipeline, _, _ in totals}
        assert pipelines == set(range(len(plan.pipelines)))


@settings(max_examples=30, deadline=None)
@given(plan=plans())
def test_no_two_blocks_could_be_one(plan: Plan) -> None:
    blocks = gradient_blocks(plan)
    assert len({(block.kind, block.holders) for block in blocks}) == len(blocks)


@settings(max_examples=40, deadline=None)
@given(plan=plans())
def test_launch_order_starts_each_block_as_early_as_any(plan: Plan) -> None:
    """With all ranks ready at once, no block could have started before one launched ahead of it."""
    blocks = [block for block in gradient_blocks(plan) if block.kind != "tied"]
    free: dict[int, float] = dict.fromkeys(range(plan.world_size), 0.0)
    for index, block in enumerate(blocks):
        start = max(free[rank] for rank in block.holders)
        assert all(max(free[rank] for rank in later.holders) >= start for later in blocks[index:])
        for rank in block.holders:
            free[rank] = start + block.numel * (1 - 1 / len(block.holders))
