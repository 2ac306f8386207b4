"""The stage's modules against the planner's list of parameters, and the loss against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from actors.engine.model.flow import CONSTANTS, GPT3_FLOW, LLAMA_FLOW, Operator
from actors.engine.model.layer import Gpt3Layer, Layer, LlamaLayer
from actors.engine.model.loss import NOT_COUNTED, vocabulary_parallel_cross_entropy_sum
from actors.engine.model.stage import build_stage
from actors.engine.process_groups import ProcessGroups
from planner.operators import GPT3_OPERATORS, LLAMA_OPERATORS
from planner.parameters import stage_parameters
from planner.plan import Plan
from tests.engine.law_plans import LLAMA, MODEL, plan_of
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import leave_pool_groups
from tests.plans import make_llama, make_model

UNTIED = make_model(tied_embedding=False)
TIED_LLAMA = make_llama(tied_embedding=True)


FLOWS = [(Gpt3Layer, GPT3_FLOW, GPT3_OPERATORS), (LlamaLayer, LLAMA_FLOW, LLAMA_OPERATORS)]


@pytest.mark.parametrize(("layer", "flow", "operators"), FLOWS)
def test_a_layer_is_the_planners_operators_in_order(
    layer: type[Layer], flow: tuple[Operator, ...], operators: tuple[str, ...]
) -> None:
    assert tuple(operator.name for operator in flow) == operators
    assert layer.operators == flow
    assert all(callable(getattr(layer, name, None)) or name.endswith("_norm") for name in operators)


@pytest.mark.parametrize("flow", [GPT3_FLOW, LLAMA_FLOW])
def test_a_layer_lets_go_of_every_value_but_its_result(flow: tuple[Operator, ...]) -> None:
    held: set[str] = {"hidden", *CONSTANTS}
    for operator in flow:
        assert set(operator.inputs) <= held, f"{operator.name} reads what is gone"
        held = (held - operator.last_reads) | set(operator.outputs)
    assert held - set(CONSTANTS) == {"hidden"}


def _names_and_shapes(rank: int, plan: Plan) -> None:
    store = leave_pool_groups(rank)
    cpu = torch.device("cpu")
    groups = ProcessGroups.open(plan=plan, rank=rank, store=store, timeout_seconds=30, device=cpu)
    place = plan.ranks[rank]
    stage = plan.pipelines[place.pipeline].stages[place.stage]
    module, handles = build_stage(
        model=plan.model,
        stage=stage,
        sequence_length=plan.sequence_length,
        dtype=torch.bfloat16,
        device=cpu,
        mesh=groups.tp_mesh(place, cpu),
        tp_rank=place.tp_rank,
    )
    expected = stage_parameters(plan.model, stage)
    assert [handle.spec for handle in handles] == expected
    assert {name for name, _ in module.named_parameters()} == {parameter.name for parameter in expected}
    for handle in handles:
        assert handle.local.shape == handle.spec.padded_shard_shape(tp=stage.tp), handle.spec.name
        assert handle.local.dtype == torch.bfloat16 and not handle.local.requires_grad
        assert handle.leaf.is_leaf and handle.leaf.requires_grad
        handle.local.fill_(3.0)
        own = handle.leaf.to_local() if hasattr(handle.leaf, "to_local") else handle.leaf
        assert bool((own == 3.0).all()), f"{handle.spec.name}: leaf and local share no storage"
    groups.close()


MODELS = {"tied": MODEL, "untied": UNTIED, "llama": LLAMA, "tied llama": TIED_LLAMA}


@pytest.mark.parametrize(
    ("tp", "name"),
    [(tp, name) for tp in (1, 2, 3, 4) for name, model in MODELS.items() if model.kv_heads % tp == 0],
)
def test_names_and_shapes_are_the_planners(rank_pool: RankPool, tp: int, name: str) -> None:
    chosen = MODELS[name]
    splits = [[4], [1, 3]] if tp > 2 else [[4], [1, 3], [1, 2, 1], [0, 4, 0]]
    for layers in splits:
        if tp * len(layers) <= 6:
            plan = plan_of([(tp, 1, count) for count in layers], model=chosen)
            rank_pool.run(_names_and_shapes, plan, world_size=plan.world_size)


VOCABULARY, TOKENS = 7, 12


def _loss_and_gradient(rank: int, ranks: int) -> tuple[float, torch.Tensor]:
    """Of a rank's shard of the logits; padding is filled with what would win if it counted."""
    logits, labels = _example()
    length = -(-VOCABULARY // ranks)
    padded = F.pad(logits, (0, length * ranks - VOCABULARY), value=50.0)
    shard = padded[:, rank * length : (rank + 1) * length].clone().requires_grad_()
    group = dist.new_group(list(range(ranks)))
    loss = vocabulary_parallel_cross_entropy_sum(
        shard, labels, first=rank * length, vocab_size=VOCABULARY, group=group
    )
    (2.0 * loss).backward()
    assert shard.grad is not None
    return float(loss.detach()), shard.grad


def _example() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(TOKENS, VOCABULARY, generator=generator)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    labels[3] = labels[10] = NOT_COUNTED
    return logits, labels


# Seven entries on four ranks: shards of two, the last half padding. On five: the last is all padding.
@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_the_cut_loss_is_torchs_with_padding_and_uncounted_labels(rank_pool: RankPool, ranks: int) -> None:
    logits, labels = _example()
    logits.requires_grad_()
    expected = F.cross_entropy(logits, labels, ignore_index=NOT_COUNTED, reduction="sum")
    (2.0 * expected).backward()
    outcomes = rank_pool.run(_loss_and_gradient, ranks, world_size=ranks)
    gradient = torch.cat([gradient for _, gradient in outcomes], dim=1)
    for loss, _ in outcomes:
        assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(gradient[:, :VOCABULARY], logits.grad)
    assert not gradient[:, VOCABULARY:].any()
