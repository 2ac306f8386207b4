"""Attention inside documents and packing on real ranks: any plan trains and evaluates as one process does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from actors.engine.data import HeldOutSamples
from actors.engine.documents import PLAIN, Documents
from actors.engine.evaluation import Validation
from actors.engine.mixture import open_tokens
from actors.engine.model.dropout import Draws
from actors.engine.model.loss import NOT_COUNTED
from actors.engine.tokens import HeldOut
from actors.engine.trainer import TrainerConfig
from actors.engine.weights import initial_parameter
from actors.job import Evaluation
from planner.cluster import Cluster
from planner.cost.plan_memory import PlanMemory
from planner.parameters import model_parameters
from planner.plan import Dtypes, Plan
from tests.engine import reference
from tests.engine.law_checks import assert_trains_as_one_process
from tests.engine.law_plans import LLAMA, MODEL, by_position, plan_of, whole_layers, with_recompute
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import make_trainer, training_of, write_documents
from tests.engine.test_memory_prediction import peak_of_rank
from tests.plans import make_model, make_plan

BOTH = Documents(attention=True, packing=True)
DROPPED = MODEL.model_copy(update={"dropout": 0.1})
MIDDLE = with_recompute(
    plan_of([(1, 1, 1), (1, 1, 2), (1, 1, 1)], model=LLAMA, samples=[5]),
    {"scores": 1, "softmax": 1},
    whole_layers(LLAMA, 2),
    {},
)
CASES: list[Any] = [
    pytest.param(
        with_recompute(
            plan_of([(2, 1, 2), (1, 1, 2)], model=DROPPED, micro_batch_sizes=[2], samples=[3]),
            {"scores": 2, "softmax": 2, "attention_dropout": 1},
            whole_layers(DROPPED, 1),
        ),
        BOTH,
        id="gpt3: heads cut, recomputed, with surplus samples",
    ),
    pytest.param(MIDDLE, Documents(attention=True), id="llama: a middle stage, which reads no tokens"),
    pytest.param(
        by_position(plan_of([(2, 1, 4)], samples=[3])),
        Documents(attention=True),
        id="gpt3: positions cut",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        plan_of([(2, 1, 4)], [(1, 1, 4)], samples=[2, 3]),
        BOTH,
        id="gpt3: pipelines of which unlike many labels count",
    ),
    pytest.param(
        plan_of([(1, 1, 3)], [(1, 1, 1), (1, 1, 2)], model=make_model(layers=3, max_sequence_length=16)),
        Documents(packing=True),
        id="packing alone",
    ),
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("tokens"), longest=29)


@pytest.mark.parametrize(("plan", "documents"), CASES)
def test_a_plan_trains_as_one_process(
    rank_pool: RankPool, tokens: Path, plan: Plan, documents: Documents
) -> None:
    assert_trains_as_one_process(rank_pool, plan, tokens, steps=8, documents=documents)


def first_evaluation(rank: int, config: TrainerConfig) -> Validation:
    """The loss of the first values."""
    trainer = make_trainer(config, rank)
    validation = trainer.evaluate(0)
    trainer.close()
    return validation


def test_held_out_documents_are_evaluated_as_in_one_process(rank_pool: RankPool, tokens: Path) -> None:
    held_out = HeldOut(share=0.1)
    config = TrainerConfig(
        plan=MIDDLE,
        training=training_of(MIDDLE, steps=1),
        tokens=tokens,
        timeout_seconds=30,
        held_out=held_out,
        documents=BOTH,
        evaluation=Evaluation(every=1, samples=7),
    )
    found = rank_pool.run(first_evaluation, config, world_size=MIDDLE.world_size)
    values = {p.name: initial_parameter(p, model=LLAMA, seed=0) for p in model_parameters(LLAMA)}
    samples = HeldOutSamples(open_tokens(tokens), held_out, sequence_length=16, documents=BOTH)
    inputs, labels = samples.batch(0, 7)
    nothing = reference.Dropped(0.0, Draws(0, 1, first_sample=0))
    output = reference.logits(LLAMA, values, inputs, nothing, samples.documents(0, 7))
    loss = float(F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=NOT_COUNTED))
    assert 0 < found[0].tokens == int((labels != NOT_COUNTED).sum()) < labels.numel()
    assert [validation.loss for validation in found] == pytest.approx([loss] * 3, rel=1e-6)
    assert torch.equal(samples.batch(3, 5)[0], inputs[3:5])


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param({}, id="kept", marks=pytest.mark.slow),
        pytest.param({"scores": 2, "softmax": 2}, id="recomputed"),
    ],
)
def test_memory_stays_as_predicted_but_for_where_documents_begin(
    rank_pool: RankPool, tmp_path: Path, recompute: dict[str, int]
) -> None:
    """No mask of a micro-batch is held: where documents begin is all that is added."""
    node = {"name": "n", "devices": [{"type": "910B2", "count": 2}], "emulate": True}
    plan = make_plan(
        make_model(hidden_size=64, heads=2, max_sequence_length=256),
        [[(1, 1, 2), (1, 1, 2)]],
        cluster=Cluster.model_validate({"nodes": [node]}),
        dtypes=Dtypes.for_precision("fp32"),
        micro_batch_sizes=[2],
        samples=[8],
    )
    plan = with_recompute(plan, recompute, recompute)
    config = TrainerConfig(
        plan=plan,
        training=training_of(plan, steps=2),
        tokens=write_documents(tmp_path, longest=300),
        timeout_seconds=30,
    )
    plain, peaks = (
        rank_pool.run(peak_of_rank, replace(config, documents=documents), world_size=2)
        for documents in (PLAIN, BOTH)
    )
    for stage, (without, peak) in enumerate(zip(plain, peaks, strict=True)):
        load = PlanMemory(plan).load(pipeline=0, stage=stage, replica=0)
        predicted = PlanMemory(plan).model.tensor_bytes(load)
        # What scores replay, and where learned positions count from.
        begins = 8 * load.in_flight * load.rows * plan.sequence_length
        assert peak <= without + begins, (stage, peak - without)
        assert peak <= predicted + begins and predicted <= 1.05 * peak, (stage, predicted / peak)
