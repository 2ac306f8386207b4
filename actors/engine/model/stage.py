"""One pipeline stage's part of the model on one rank, built from a Plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from actors.engine.model.layer import Layer, causal_mask
from actors.engine.model.loss import cross_entropy_sum, vocabulary_parallel_cross_entropy_sum
from actors.engine.model.tensor_parallel import TokenTable, first_row, parallelize
from planner.model_spec import ModelSpec
from planner.parameters import Parameter, stage_parameters
from planner.plan import StagePlan


@dataclass(frozen=True)
class ParameterHandle:
    """A parameter as a rank holds it.

    `leaf` is what autograd knows (a DTensor if TP cuts it); `local` is the rank's shard, vocabulary
    padding included, which shares the leaf's storage and needs no gradient. After a backward pass the
    gradient of a replicated parameter is whole and equal on every TP rank, that of a cut one is the
    rank's shard, with zeros in padding.
    """

    spec: Parameter
    leaf: nn.Parameter
    local: torch.Tensor
    tp: int
    tp_rank: int


class StageModel(nn.Module):
    """Embedding, layers and head of one stage; parameter names are those of planner/parameters.py.

    A last stage with a tied head holds its own copy of the token table unless it is the first stage too.
    """

    def __init__(
        self, *, model: ModelSpec, stage: StagePlan, sequence_length: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._vocab_size = model.vocab_size
        self._sequence_length = sequence_length
        self._dtype = dtype
        self._mask: torch.Tensor | None = None
        self.has_embedding, self.has_head = stage.embedding, stage.head
        rows = -(-model.vocab_size // stage.tp) * stage.tp
        tied_head = stage.head and model.tied_embedding
        if stage.embedding or tied_head:
            self.embedding = nn.ModuleDict({"tokens": TokenTable(rows, model.hidden_size)})
        if stage.embedding:
            self.embedding["positions"] = nn.Embedding(model.max_sequence_length, model.hidden_size)
        self.layers = nn.ModuleDict({str(index): Layer(model, tp=stage.tp) for index in range(*stage.layers)})
        if stage.head:
            self.final_norm = nn.LayerNorm(model.hidden_size, eps=model.norm_epsilon)
        if stage.head and not model.tied_embedding:
            self.head = TokenTable(rows, model.hidden_size)

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor | None = None, loss_scale: float = 1.0
    ) -> torch.Tensor:
        """One micro-batch's rows of this replica.

        Args:
            inputs: token ids int64 `[rows, sequence]` on the first stage, else `[rows, sequence, hidden]`.
            labels: next tokens int64 `[rows, sequence]`, -100 where not counted; the last stage's only.
            loss_scale: what the sum over counted tokens is multiplied with.

        Returns:
            hidden states `[rows, sequence, hidden]`, or on the last stage the scaled loss, an fp32 scalar.
        """
        hidden = self.embed(inputs) if self.has_embedding else inputs
        del inputs
        for layer in self.layers.values():
            hidden = layer(hidden, self._causal_mask(hidden.device))
        if not self.has_head:
            return hidden
        assert labels is not None, "the last stage needs labels"
        logits = self._head_table().project(self.final_norm(hidden))
        del hidden
        return self.loss(logits, labels) * loss_scale

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token and position embeddings, summed."""
        tokens, positions = self.embedding["tokens"], self.embedding["positions"]
        assert isinstance(tokens, TokenTable) and isinstance(positions, nn.Embedding)
        return tokens.lookup(ids) + positions.weight[: ids.shape[-1]]

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum of the counted tokens' cross-entropies; logits are those of the rank's vocabulary shard."""
        weight = self._head_table().weight
        if not isinstance(weight, DTensor):
            return cross_entropy_sum(logits, labels)
        return vocabulary_parallel_cross_entropy_sum(
            logits,
            labels,
            first=first_row(weight),
            vocab_size=self._vocab_size,
            group=weight.device_mesh.get_group(),
        )

    def _head_table(self) -> TokenTable:
        table = self.head if hasattr(self, "head") else self.embedding["tokens"]
        assert isinstance(table, TokenTable)
        return table

    def _causal_mask(self, device: torch.device) -> torch.Tensor:
        if self._mask is None:
            self._mask = causal_mask(self._sequence_length, dtype=self._dtype, device=device)
        return self._mask


def build_stage(
    *,
    model: ModelSpec,
    stage: StagePlan,
    sequence_length: int,
    dtype: torch.dtype,
    device: torch.device,
    mesh: DeviceMesh | None,
    tp_rank: int,
) -> tuple[StageModel, list[ParameterHandle]]:
    """A rank's part of the model, its values still unset, and handles in `stage_parameters` order."""
    with torch.device("meta"):
        module = StageModel(model=model, stage=stage, sequence_length=sequence_length, dtype=dtype).to(dtype)
    if mesh is not None:
        parallelize(module, mesh)
    module.to_empty(device=device)
    leaves = dict(module.named_parameters())
    handles = [
        ParameterHandle(spec, leaf, _local(leaf), stage.tp, tp_rank)
        for spec in stage_parameters(model, stage)
        for leaf in [leaves.pop(spec.name)]
    ]
    assert not leaves, f"parameters that the planner does not know: {sorted(leaves)}"
    for handle in handles:
        expected = handle.spec.padded_shard_shape(tp=stage.tp)
        assert handle.local.shape == expected, f"{handle.spec.name}: {handle.local.shape} != {expected}"
    return module, handles


def _local(leaf: nn.Parameter) -> torch.Tensor:
    detached = leaf.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
