"""Gradients of unlike plans on real ranks against sums of whole tensors."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.gradient_buffer import GradientBuffer, layout_runs
from actors.engine.gradient_sync import BlockSync, GroupTransport
from planner.gradient_blocks import GradientBlock
from planner.parameters import model_parameters, stage_parameters
from planner.plan import Plan
from tests.engine.held_parameters import (
    HeldLeaf,
    block_groups,
    contribution,
    make_handles,
    own_blocks,
)
from tests.engine.rank_pool import RankPool
from tests.plans import Degrees, make_model, make_plan

MICRO_BATCHES = 2


def _backward(plan: Plan, rank: int, handles: list[HeldLeaf]) -> None:
    """Give every leaf the made-up gradients of this rank's replica, as backward would."""
    place = plan.ranks[rank]
    for micro_batch in range(MICRO_BATCHES):
        for handle in handles:
            whole = contribution(
                handle.spec,
                pipeline=place.pipeline,
                stage=place.stage,
                replica=place.replica,
                micro_batch=micro_batch,
            )
            gradient = _local_part(handle, whole)
            (handle.leaf * gradient).sum().backward()
            assert handle.leaf.grad is None


def _norm(sync: BlockSync) -> float:
    total = sync.square_sum()
    dist.all_reduce(total)
    return float(total.sqrt())


def _local_part(handle: HeldLeaf, whole: torch.Tensor) -> torch.Tensor:
    spec = handle.spec
    gradient = torch.zeros_like(handle.local)
    if spec.tp_dim is None:
        return gradient.copy_(whole)
    start, stop = spec.shard_range(tp=handle.tp, tp_rank=handle.tp_rank)
    gradient.narrow(spec.tp_dim, 0, stop - start).copy_(whole.narrow(spec.tp_dim, start, stop - start))
    return gradient


def _expected(plan: Plan) -> dict[str, torch.Tensor]:
    """Sum of all replicas' gradients of each whole parameter, in fp64."""
    total = {p.name: torch.zeros(p.shape, dtype=torch.float64) for p in model_parameters(plan.model)}
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            for parameter in stage_parameters(plan.model, stage):
                for replica in range(stage.dp):
                    for micro_batch in range(MICRO_BATCHES):
                        total[parameter.name] += contribution(
                            parameter, pipeline=index, stage=number, replica=replica, micro_batch=micro_batch
                        )
    return total


def _synchronise(rank: int, plan: Plan) -> tuple[float, dict[str, str]]:
    """Checks a rank's gradients; returns the norm, and a digest of each gradient that TP replicates."""
    handles, blocks = make_handles(plan, rank), own_blocks(plan, rank)
    buffer = GradientBuffer(handles=handles, blocks=blocks)
    transport = GroupTransport(block_groups(plan, rank))
    sync = BlockSync(buffer=buffer, blocks=blocks, rank=rank, transport=transport)
    expected = _expected(plan)
    # Twice: what the first iteration leaves behind must not reach the second.
    for _ in range(2):
        buffer.zero()
        _backward(plan, rank, handles)
        sync.start()
        sync.finish()
        norm = _norm(sync)
    digests = {}
    for piece in buffer.pieces():
        whole = expected[piece.name]
        if piece.tp_range is not None:
            assert piece.tp_dim is not None
            whole = whole.narrow(piece.tp_dim, piece.tp_range[0], piece.tp_range[1] - piece.tp_range[0])
        found = piece.logical(piece.gradient)
        torch.testing.assert_close(found.double(), whole, rtol=1e-5, atol=1e-5)
        if piece.tp_range is None:
            digests[piece.name] = hashlib.sha256(found.contiguous().numpy().tobytes()).hexdigest()
    return norm, digests


def _check(rank_pool: RankPool, plan: Plan) -> None:
    results = rank_pool.run(_synchronise, plan, world_size=plan.world_size)
    norms = {norm for norm, _ in results}
    assert len(norms) == 1
    total = sum(float(tensor.square().sum()) for tensor in _expected(plan).values())
    assert norms.pop() == pytest.approx(total**0.5, rel=1e-6)
    for parameter in model_parameters(plan.model):
        copies = {digests[parameter.name] for _, digests in results if parameter.name in digests}
        assert len(copies) == (1 if parameter.tp_dim is None else 0)


SMALL = make_model(hidden_size=12, vocab_size=29, max_sequence_length=6)

HAND_PICKED: dict[str, list[list[Degrees]]] = {
    "one rank": [[(1, 1, 4)]],
    "two replicas against a tp pair": [[(1, 2, 4)], [(2, 1, 4)]],
    "tp 4 against two stages": [[(4, 1, 4)], [(1, 1, 1), (1, 1, 3)]],
    "tp 2 against tp 3": [[(2, 1, 4)], [(3, 1, 4)]],
    "tp 4 against tp 2 in stages": [[(4, 1, 4)], [(2, 1, 4)]],
    "unlike splits and degrees": [[(2, 1, 2), (1, 1, 2)], [(1, 2, 3), (1, 1, 1)]],
    "three pipelines": [[(1, 1, 4)], [(1, 1, 2), (1, 1, 2)], [(3, 1, 4)]],
    "one pipeline with tp and dp": [[(2, 2, 4)]],
    "tp 6, most of a small vocabulary empty": [[(6, 1, 4)]],
}


@pytest.mark.parametrize("name", HAND_PICKED)
def test_unlike_plans_give_the_sum_of_all_replicas(rank_pool: RankPool, name: str) -> None:
    model = (
        SMALL if "vocabulary" not in name else make_model(hidden_size=12, vocab_size=7, max_sequence_length=6)
    )
    _check(rank_pool, make_plan(model, HAND_PICKED[name]))


def test_untied_heads_are_synchronised_apart(rank_pool: RankPool) -> None:
    model = make_model(
        hidden_size=12, vocab_size=29, max_sequence_length=6, family="llama", tied_embedding=False
    )
    _check(rank_pool, make_plan(model, [[(2, 1, 2), (1, 1, 2)], [(3, 1, 4)]]))


@st.composite
def small_plans(draw: st.DrawFn) -> Plan:
    """Two to six ranks in one to three pipelines of one to three stages."""
    pipelines: list[list[Degrees]] = []
    left = draw(st.integers(2, 6))
    while left and len(pipelines) < 3:
        stages, layer = list[Degrees](), 0
        while left and layer < 4:
            shapes = [(tp, dp) for tp in (1, 2, 3, 4, 6) for dp in (1, 2, 3) if tp * dp <= left]
            tp, dp = draw(st.sampled_from(shapes))
            left -= tp * dp
            layers = 4 - layer if not left or len(stages) == 2 else draw(st.integers(1, 4 - layer))
            stages.append((tp, dp, layers))
            layer += layers
        pipelines.append(stages)
    return make_plan(
        make_model(hidden_size=12, vocab_size=draw(st.integers(5, 40)), max_sequence_length=6), pipelines
    )


@settings(max_examples=20, deadline=None)
@given(plan=small_plans())
def test_any_plan_gives_the_sum_of_all_replicas(rank_pool: RankPool, plan: Plan) -> None:
    _check(rank_pool, plan)


def _spoil(rank: int, plan: Plan, spoiled: str, value: float) -> float:
    handles, blocks = make_handles(plan, rank), own_blocks(plan, rank)
    buffer = GradientBuffer(handles=handles, blocks=blocks)
    transport = GroupTransport(block_groups(plan, rank))
    sync = BlockSync(buffer=buffer, blocks=blocks, rank=rank, transport=transport)
    if rank == plan.world_size - 1:
        (piece,) = [piece for piece in buffer.pieces() if piece.name == spoiled]
        piece.gradient.view(-1)[0] = value
    sync.start()
    sync.finish()
    return _norm(sync)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_bad_element_reaches_every_rank(rank_pool: RankPool, value: float) -> None:
    """Also in a layer that only some ranks hold."""
    plan = make_plan(SMALL, [[(2, 1, 2), (1, 1, 2)]])
    norms = rank_pool.run(_spoil, plan, "layers.3.mlp.down.bias", value, world_size=3)
    assert not any(torch.isfinite(torch.tensor(norm)) for norm in norms)


def test_a_norm_of_many_elements_is_exact_enough() -> None:
    """A sum of squares over a large buffer in one go would be wrong by thousandths."""
    wide = make_model(layers=1, hidden_size=600, vocab_size=3000)
    plan = make_plan(wide, [[(1, 1, 1)]])
    handles, blocks = make_handles(plan, 0), own_blocks(plan, 0)
    buffer = GradientBuffer(handles=handles, blocks=blocks)
    buffer.flat.normal_(generator=torch.Generator().manual_seed(0))
    sync = BlockSync(buffer=buffer, blocks=blocks, rank=0, transport=GroupTransport({}))
    exact = float(buffer.flat.double().square().sum())
    assert float(sync.square_sum()) == pytest.approx(exact, rel=1e-6)


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
