"""Gradients of unlike plans on real ranks, by every scheme, against sums of whole tensors."""

from __future__ import annotations

import hashlib
import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

from planner.cluster import Cluster, from_short_form
from planner.gradient_calls import call_reduction, gradient_layout
from planner.parameters import Parameter, model_parameters, stage_parameters
from planner.plan import Plan
from tests.engine.held_parameters import HeldLeaf, Rig, contribution, gradient_groups, initial_gradient
from tests.engine.rank_pool import RankPool
from tests.gradient_plans import unlike_plans, variant
from tests.plans import Degrees, make_model, make_plan

MICRO_BATCHES = 2

# How a plan may be synchronised: scheme, overlapped with the last backward or not.
VARIANTS = [
    ("block", False),
    ("block", True),
    ("tensor", False),
    ("tensor", True),
    ("device", False),
    ("device", True),
]


def _inside(tensor: torch.Tensor, flat: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def _backward(plan: Plan, rank: int, rig: Rig, micro_batch: int) -> None:
    """Give every leaf the made-up gradients of this rank's replica, as backward would.

    Roughly from the last layer to the first, but no two ranks in quite the same order.
    """
    order = random.Random(rank + micro_batch)
    for handle in sorted(rig.handles, key=lambda h: (-h.spec.region.order + order.random(), h.spec.name)):
        gradient = _local_part(plan, rank, handle, micro_batch)
        (handle.leaf * gradient).sum().backward()
        assert handle.leaf.grad is None or _inside(handle.leaf.grad, rig.buffer.flat), (
            "gradients are kept twice"
        )


def _local_part(plan: Plan, rank: int, handle: HeldLeaf, micro_batch: int) -> torch.Tensor:
    place, spec = plan.ranks[rank], handle.spec
    whole = _contribution(plan, spec, place.pipeline, place.stage, place.replica, micro_batch)
    stage = plan.pipelines[place.pipeline].stages[place.stage]
    if spec.tp_dim is None:
        if not stage.sequence_parallel:
            return whole
        # Partial sums: all but the last rank hold something else, the last what is missing.
        parts = [initial_gradient(f"{spec.name} part {i}", spec.shape) for i in range(stage.tp - 1)]
        return parts[place.tp_rank] if place.tp_rank < stage.tp - 1 else whole - sum(parts)
    gradient = torch.zeros_like(handle.local)
    start, stop = spec.shard_range(tp=handle.tp, tp_rank=handle.tp_rank)
    gradient.narrow(spec.tp_dim, 0, stop - start).copy_(whole.narrow(spec.tp_dim, start, stop - start))
    return gradient


def _contribution(
    plan: Plan, spec: Parameter, pipeline: int, stage: int, replica: int, micro_batch: int
) -> torch.Tensor:
    return contribution(spec, pipeline=pipeline, stage=stage, replica=replica, micro_batch=micro_batch)


def _expected(plan: Plan) -> dict[str, torch.Tensor]:
    """Sum of all replicas' gradients of each whole parameter, in fp64."""
    total = {p.name: torch.zeros(p.shape, dtype=torch.float64) for p in model_parameters(plan.model)}
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            for parameter in stage_parameters(plan.model, stage):
                for replica in range(stage.dp):
                    for micro_batch in range(MICRO_BATCHES):
                        total[parameter.name] += _contribution(
                            plan, parameter, index, number, replica, micro_batch
                        )
    return total


def _norm(rig: Rig) -> float:
    total = rig.sync.square_sum()
    dist.all_reduce(total)
    return float(total.sqrt())


def _iterate(plan: Plan, rank: int, rig: Rig) -> None:
    """An iteration as the trainer runs it."""
    rig.buffer.zero()
    for micro_batch in range(MICRO_BATCHES):
        if plan.overlap and micro_batch == MICRO_BATCHES - 1:
            rig.sync.arm()
        _backward(plan, rank, rig, micro_batch)
    rig.sync.start()
    rig.sync.finish()


def _synchronise(rank: int, plans: list[Plan], tolerance: float) -> list[tuple[float, dict[str, str]]]:
    """Checks a rank's gradients; for each plan the norm, and a digest of what it holds of each parameter."""
    results = []
    groups = _all_groups(plans, rank)
    expected = _expected(plans[0])
    for plan in plans:
        rig = Rig.make(plan, rank, groups=groups)
        # Twice: what the first iteration leaves behind must not reach the second.
        for _ in range(2):
            _iterate(plan, rank, rig)
        digests = {}
        for piece in rig.buffer.pieces():
            whole = expected[piece.name]
            if piece.tp_range is not None:
                assert piece.tp_dim is not None
                whole = whole.narrow(piece.tp_dim, piece.tp_range[0], piece.tp_range[1] - piece.tp_range[0])
            found = piece.logical(piece.gradient)
            torch.testing.assert_close(found.double(), whole, rtol=tolerance, atol=tolerance)
            digests[f"{piece.name} {piece.tp_range}"] = _digest(found)
        results.append((_norm(rig), digests))
        rig.sync.close()
    return results


def _all_groups(plans: list[Plan], rank: int) -> dict[tuple[int, ...], dist.ProcessGroup]:
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for plan in plans:
        groups |= gradient_groups(plan, rank)
    return groups


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def _check(rank_pool: RankPool, plans: list[Plan], *, tolerance: float = 1e-5, norm: float = 1e-6) -> None:
    """Every variant of a plan gives every rank the sum of all replicas; all holders hold the same bits."""
    by_rank = rank_pool.run(_synchronise, plans, tolerance, world_size=plans[0].world_size)
    total = sum(float(tensor.square().sum()) for tensor in _expected(plans[0]).values())
    for results in zip(*by_rank, strict=True):
        norms = {found for found, _ in results}
        assert len(norms) == 1
        assert norms.pop() == pytest.approx(total**0.5, rel=norm)
        copies: dict[str, set[str]] = {}
        for _, digests in results:
            for part, digest in digests.items():
                copies.setdefault(part, set()).add(digest)
        assert {part: len(found) for part, found in copies.items()} == dict.fromkeys(copies, 1)


SMALL = make_model(hidden_size=12, vocab_size=29, max_sequence_length=6)

HAND_PICKED: dict[str, list[list[Degrees]]] = {
    "one rank": [[(1, 1, 4)]],
    "two replicas against a tp pair": [[(1, 2, 4)], [(2, 1, 4)]],
    "tp 4 against two stages": [[(4, 1, 4)], [(1, 1, 1), (1, 1, 3)]],
    "tp 3 against tp 4": [[(3, 1, 4)], [(4, 1, 4)]],
    "tp 4 against tp 6": [[(4, 1, 4)], [(6, 1, 4)]],
    "unlike splits and degrees": [[(2, 1, 2), (1, 1, 2)], [(1, 2, 3), (1, 1, 1)]],
    "three pipelines": [[(1, 1, 4)], [(1, 1, 2), (1, 1, 2)], [(3, 1, 4)]],
    "one pipeline with tp and dp": [[(2, 2, 4)]],
    "tp 6, most of a small vocabulary empty": [[(6, 1, 4)]],
}


@pytest.mark.parametrize("name", HAND_PICKED)
def test_every_scheme_gives_unlike_plans_the_sum_of_all_replicas(rank_pool: RankPool, name: str) -> None:
    small = make_model(hidden_size=12, vocab_size=7, max_sequence_length=6)
    plan = make_plan(small if "vocabulary" in name else SMALL, HAND_PICKED[name])
    _check(rank_pool, [variant(plan, *how) for how in VARIANTS])


def test_untied_heads_are_synchronised_apart(rank_pool: RankPool) -> None:
    model = make_model(
        hidden_size=24, vocab_size=29, max_sequence_length=6, family="llama", tied_embedding=False
    )
    plan = make_plan(model, [[(2, 1, 2), (1, 1, 2)], [(3, 1, 4)]])
    _check(rank_pool, [variant(plan, *how) for how in VARIANTS])


@settings(max_examples=6, deadline=None)
@given(plan=unlike_plans())
def test_every_scheme_gives_any_plan_the_sum_of_all_replicas(rank_pool: RankPool, plan: Plan) -> None:
    _check(rank_pool, [variant(plan, *how) for how in VARIANTS])


@pytest.mark.slow
@pytest.mark.timeout(1500)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(plan=unlike_plans())
def test_every_scheme_gives_many_plans_the_sum_of_all_replicas(rank_pool: RankPool, plan: Plan) -> None:
    _check(rank_pool, [variant(plan, *how) for how in VARIANTS])


def nodes(text: str, **links: Any) -> Cluster:
    """A cluster in short form whose nodes' own links are so much better that groups reduce inside first."""
    cluster = from_short_form(text).model_dump()
    cluster["links"] = {
        "intra_node": {"bandwidth": 100e9, "latency": 0.0},
        "inter_node": {"bandwidth": 1e9, "latency": 1e-5},
    } | links
    return Cluster.model_validate(cluster)


ACROSS_NODES: dict[str, tuple[str, list[list[Degrees]], set[str]]] = {
    # Replicas of a stage fill both nodes evenly.
    "slices": ("2x3:910B2", [[(1, 6, 4)]], {"slices"}),
    # Two devices on one node, three on the other.
    "leader": ("1x2:910B2,1x3:910B2", [[(1, 2, 4)], [(1, 3, 4)]], {"leader"}),
    "slices, of unlike degrees": (
        "1x4:910B2,1x2:910B2",
        [[(2, 2, 4)], [(1, 2, 4)]],
        {"slices", "leader"},
    ),
    "some blocks inside a node": ("2x3:910B2", [[(1, 3, 2), (1, 3, 2)]], {"flat", "slices"}),
}


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ACROSS_NODES)
def test_groups_that_span_nodes_reduce_inside_them_first(rank_pool: RankPool, name: str, wire: str) -> None:
    text, pipelines, algorithms = ACROSS_NODES[name]
    model = make_model(hidden_size=48, vocab_size=29, max_sequence_length=6)
    plan = make_plan(model, pipelines, cluster=nodes(text), dtypes={"wire": wire})
    plans = [variant(plan, "block", overlap) for overlap in (False, True)]
    assert {call_reduction(plan, call).algorithm for call in gradient_layout(plans[0]).calls} == algorithms
    if wire == "fp32":
        _check(rank_pool, plans)
    else:
        _check(rank_pool, plans, tolerance=0.05, norm=2e-3)


@pytest.mark.parametrize("scheme", ["block", "tensor", "device"])
def test_a_narrow_wire_rounds_twice_and_no_more(rank_pool: RankPool, scheme: str) -> None:
    """bf16 keeps 8 bits: each contribution is off by at most 2^-9 of itself, and so is the sum.

    Contributions are of order one, so their sums of eight replicas stay within these bounds.
    """
    plan = make_plan(SMALL, [[(1, 3, 4)], [(2, 2, 4)]], dtypes={"wire": "bf16"})
    plans = [variant(plan, scheme, overlap) for overlap in (False, True)]
    _check(rank_pool, plans, tolerance=0.05, norm=2e-3)


def _spoil(rank: int, plan: Plan, spoiled: str, value: float) -> float:
    rig = Rig.make(plan, rank)
    if rank == plan.world_size - 1:
        (piece,) = [piece for piece in rig.buffer.pieces() if piece.name == spoiled]
        piece.gradient.view(-1)[0] = value
    rig.sync.start()
    rig.sync.finish()
    return _norm(rig)


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_bad_element_reaches_every_rank(rank_pool: RankPool, value: float, wire: str) -> None:
    """Also in a layer that only some ranks hold."""
    plan = make_plan(SMALL, [[(2, 1, 2), (1, 1, 2)]], dtypes={"wire": wire})
    norms = rank_pool.run(_spoil, plan, "layers.3.mlp.down.bias", value, world_size=3)
    assert not any(math.isfinite(norm) for norm in norms)


def test_a_norm_of_many_elements_is_exact_enough() -> None:
    """A sum of squares over a large buffer in one go would be wrong by thousandths."""
    wide = make_model(layers=1, hidden_size=600, vocab_size=3000)
    rig = Rig.make(make_plan(wide, [[(1, 1, 1)]]), 0, groups={})
    rig.buffer.flat.normal_(generator=torch.Generator().manual_seed(0))
    exact = float(rig.buffer.flat.double().square().sum())
    assert float(rig.sync.square_sum()) == pytest.approx(exact, rel=1e-6)
