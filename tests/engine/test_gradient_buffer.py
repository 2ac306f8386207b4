"""Where the pieces of a rank's gradients lie in its buffer."""

from __future__ import annotations

import pytest
import torch

from actors.engine.gradient_buffer import GradientBuffer, layout_runs
from planner.gradient_blocks import GradientBlock
from planner.plan import Plan
from tests.engine.held_parameters import HeldLeaf, make_handles, own_blocks
from tests.plans import make_model, make_plan

SMALL = make_model(hidden_size=12, vocab_size=29, max_sequence_length=6)


def test_blocks_are_contiguous_and_in_launch_order() -> None:
    plan = make_plan(SMALL, [[(1, 1, 4)], [(2, 1, 2), (1, 1, 2)]])
    blocks = own_blocks(plan, 0)
    buffer = GradientBuffer(handles=make_handles(plan, 0), blocks=blocks)
    starts = [buffer.block_view(block).storage_offset() for block in blocks]
    assert starts == [sum(block.numel for block in blocks[:i]) for i in range(len(blocks))]
    buffer.flat.copy_(torch.arange(buffer.flat.numel()))
    # Every element of the buffer belongs to one parameter element.
    seen = torch.cat([piece.gradient.flatten() for piece in buffer.pieces()])
    assert torch.equal(seen.sort().values, buffer.flat)


def _runs(plan: Plan, rank: int, name: str) -> list[tuple[int, int, int]]:
    blocks = own_blocks(plan, rank)
    (handle,) = [handle for handle in make_handles(plan, rank) if handle.spec.name == name]
    return [(run.start, run.stop, run.count) for run in layout_runs(handle, _places(blocks))]


def _places(blocks: tuple[GradientBlock, ...]) -> dict[str, list[tuple[tuple[int, int] | None, int]]]:
    """Where each atom lies when blocks follow each other."""
    places: dict[str, list[tuple[tuple[int, int] | None, int]]] = {}
    offset = 0
    for block in blocks:
        for atom in block.atoms:
            places.setdefault(atom.parameter, []).append((atom.tp_range, offset))
            offset += atom.numel
    return places


@pytest.mark.parametrize("name", ["layers.2.attention.query.weight", "layers.2.mlp.down.weight"])
def test_one_strided_view_covers_pieces_in_several_blocks(name: str) -> None:
    """A rank below the finest TP degree adds a gradient in one operation where pieces are alike."""
    plan = make_plan(SMALL, [[(1, 1, 4)], [(4, 1, 4)]])
    size = 12 if "query" in name else 48
    assert _runs(plan, 0, name) == [(0, size, 4)]
    assert _runs(plan, 1, name) == [(0, size // 4, 1)]


def test_pieces_of_unlike_lengths_take_several_views() -> None:
    plan = make_plan(SMALL, [[(1, 1, 4)], [(2, 1, 4)], [(3, 1, 4)]])
    # Cuts at 4, 6, 8 of 12.
    assert _runs(plan, 0, "layers.0.attention.query.weight") == [(0, 4, 1), (4, 8, 2), (8, 12, 1)]


def test_a_parameter_of_another_shape_is_refused() -> None:
    """Adding would broadcast without a word."""
    plan = make_plan(SMALL, [[(1, 1, 4)]])
    handles = make_handles(plan, 0)
    (right,) = [handle for handle in handles if handle.spec.name == "final_norm.weight"]
    wrong = HeldLeaf(right.spec, torch.nn.Parameter(torch.ones(1)), tp=1, tp_rank=0)
    others = [handle for handle in handles if handle is not right]
    with pytest.raises(AssertionError, match="final_norm"):
        GradientBuffer(handles=[*others, wrong], blocks=own_blocks(plan, 0))
