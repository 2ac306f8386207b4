"""Attention inside documents: a row of several gives each of them what it gets alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from actors.engine.model.dropout import Draws
from actors.engine.model.loss import NOT_COUNTED
from actors.engine.model.stage import StageModel, build_stage
from actors.engine.weights import initial_parameter
from planner.model_spec import ModelSpec
from planner.parameters import model_parameters
from tests.engine import reference
from tests.engine.law_plans import LLAMA, MODEL, plan_of, whole_layers, with_recompute
from tests.engine.rank_training import relative_difference

LENGTH = 16
# Where the documents of each row end: several, one, and as many as there are tokens.
ENDS = [[3, 4, 11, LENGTH], [LENGTH], list(range(1, LENGTH + 1))]
MODELS: dict[str, ModelSpec] = {
    "gpt3": MODEL,
    "llama, keys shared": LLAMA,
    "gpt3, untied": MODEL.model_copy(update={"tied_embedding": False}),
}


def _stage(model: ModelSpec, recompute: dict[str, int]) -> StageModel:
    plan = with_recompute(plan_of([(1, 1, 4)], model=model), recompute)
    module, handles = build_stage(
        model=model,
        stage=plan.pipelines[0].stages[0],
        sequence_length=LENGTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
        mesh=None,
        tp_rank=0,
    )
    for handle in handles:
        handle.local.copy_(initial_parameter(handle.spec, model=model, seed=0))
    return module


def _starts() -> torch.Tensor:
    rows = [[first for first, last in pairwise([0, *ends]) for _ in range(last - first)] for ends in ENDS]
    return torch.tensor(rows, dtype=torch.int32)


def _text() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and labels that do not count at a document's end."""
    ids = torch.randint(257, (len(ENDS), LENGTH + 1), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].clone()
    for row, ends in zip(labels, ENDS, strict=True):
        row[[end - 1 for end in ends]] = NOT_COUNTED
    return ids[:, :-1], labels


def _alone(model: ModelSpec) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of every document in a row of its own, by the plain model."""
    leaves = {
        p.name: initial_parameter(p, model=model, seed=0).requires_grad_() for p in model_parameters(model)
    }
    ids, labels = _text()
    nothing = reference.Dropped(0.0, Draws(0, 1, first_sample=0))
    total = torch.zeros(())
    for row, ends in enumerate(ENDS):
        for first, last in pairwise([0, *ends]):
            output = reference.logits(model, leaves, ids[row : row + 1, first:last], nothing)
            total = total + F.cross_entropy(
                output[0], labels[row, first:last], ignore_index=NOT_COUNTED, reduction="sum"
            )
    total.backward()
    return float(total.detach()), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize("recomputed", ["nothing", "scores", "everything"])
@pytest.mark.parametrize("name", MODELS)
def test_each_document_is_trained_as_if_alone(name: str, recomputed: str) -> None:
    model = MODELS[name]
    counts: dict[str, Any] = {
        "nothing": {},
        "scores": {"scores": 3, "softmax": 4},
        "everything": whole_layers(model, 4),
    }
    stage = _stage(model, counts[recomputed])
    loss = stage(*_text(), documents=_starts())
    loss.backward()
    expected, gradients = _alone(model)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    for parameter, leaf in stage.named_parameters():
        assert leaf.grad is not None
        if parameter.endswith("attention.key.bias"):
            # Softmax ignores what all keys share, so the true gradient is zero.
            assert leaf.grad.abs().max() < 1e-4
        else:
            assert relative_difference(leaf.grad, gradients[parameter]) < 1e-5, parameter
    across = stage(*_text())
    assert abs(float(across.detach()) - expected) > 1e-4, "the documents are meant to matter"


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_one_document_are_as_without_documents(name: str) -> None:
    stage = _stage(MODELS[name], {})
    ids, labels = _text()
    with torch.no_grad():
        whole = stage(ids, labels, documents=torch.zeros_like(ids, dtype=torch.int32))
        assert float(whole) == pytest.approx(float(stage(ids, labels)), rel=1e-6)
