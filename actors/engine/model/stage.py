"""One pipeline stage's part of the model on one rank, built from a Plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from actors.engine.model.dropout import Draws, Dropout
from actors.engine.model.layer import causal_mask, make_layer, norm
from actors.engine.model.loss import cross_entropy_sum, vocabulary_parallel_cross_entropy_sum
from actors.engine.model.rotary import rotation_table
from actors.engine.model.sequence_parallel import all_positions, own_positions
from actors.engine.model.tensor_parallel import TokenTable, first_row, parallelize
from planner.cost.layer_flow import replayed_operators
from planner.model_spec import ModelSpec
from planner.parameters import Parameter, stage_parameters
from planner.plan import Dtypes, Precision, StagePlan

_PRECISIONS: dict[torch.dtype, Precision] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


@dataclass(frozen=True)
class ParameterHandle:
    """A parameter as a rank holds it.

    `leaf` is what autograd knows (a DTensor if TP cuts it); `local` is the rank's shard, vocabulary
    padding included, which shares the leaf's storage and needs no gradient. After a backward pass the
    gradient of a replicated parameter is whole and equal on every TP rank (with sequence parallelism, a part of
    the sum over them), that of a cut one is the rank's shard, with zeros in padding.
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
        self, *, model: ModelSpec, stage: StagePlan, sequence_length: int, dtype: torch.dtype, tp_rank: int
    ) -> None:
        super().__init__()
        self._spec = model
        self._sequence_length = sequence_length
        self._dtype = dtype
        self._constants: dict[str, Any] = {}
        self.has_embedding, self.has_head = stage.embedding, stage.head
        self._by_position, self._tp_rank = stage.sequence_parallel and stage.tp > 1, tp_rank
        self._mesh: DeviceMesh | None = None
        rows = -(-model.vocab_size // stage.tp) * stage.tp
        tied_head = stage.head and model.tied_embedding
        if stage.embedding or tied_head:
            self.embedding = nn.ModuleDict({"tokens": TokenTable(rows, model.hidden_size)})
        if stage.embedding and model.family == "gpt3":
            self.embedding["positions"] = nn.Embedding(model.max_sequence_length, model.hidden_size)
        self.layers = nn.ModuleDict(
            {
                str(index): make_layer(
                    model,
                    index=index,
                    tp=stage.tp,
                    tp_rank=tp_rank,
                    by_position=self._by_position,
                    replayed=_replayed(model, stage, index, dtype),
                )
                for index in range(*stage.layers)
            }
        )
        if stage.head:
            self.final_norm = norm(model)
        if stage.head and not model.tied_embedding:
            self.head = TokenTable(rows, model.hidden_size)

    def forward(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor | None = None,
        loss_scale: float = 1.0,
        draws: Draws | None = None,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One micro-batch's rows of this replica.

        Args:
            inputs: token ids int64 `[rows, sequence]` on the first stage, else `[rows, sequence, hidden]`.
            labels: next tokens int64 `[rows, sequence]`, -100 where not counted; the last stage's only.
            loss_scale: what the sum over counted tokens is multiplied with.
            draws: what decides dropout; needed by a model that has some.
            documents: where each token's document begins in its row, int `[rows, sequence]`: no token sees
                another document's, and learned positions count from there. None if every row is one document.

        Returns:
            hidden states `[rows, sequence, hidden]`, or on the last stage the scaled loss, an fp32 scalar.
        """
        hidden = self.hidden(inputs, draws, documents)
        del inputs
        if not self.has_head:
            return hidden
        assert labels is not None, "the last stage needs labels"
        logits = self.logits(hidden)
        del hidden
        return self.loss(logits, labels) * loss_scale

    def hidden(
        self, inputs: torch.Tensor, draws: Draws | None = None, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the stage's last layer makes of a micro-batch's inputs: whole, or what the head takes."""
        hidden = self.embed(inputs, draws, documents) if self.has_embedding else inputs
        del inputs
        if self._by_position and not self.has_embedding:
            hidden = own_positions(hidden, self._tp_mesh())
        if len(self.layers):
            constants = self._layer_constants(hidden.device) | {"draws": draws, "documents": documents}
            for layer in self.layers.values():
                hidden = layer(hidden, constants)
        if self._by_position and not self.has_head:
            return all_positions(hidden, self._tp_mesh())
        return hidden

    def embed(
        self, ids: torch.Tensor, draws: Draws | None = None, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The tokens' embeddings and, where the model learns them, those of their positions, summed."""
        tokens = self.embedding["tokens"]
        assert isinstance(tokens, TokenTable)
        hidden = tokens.lookup(ids, by_position=self._by_position)
        first = self._tp_rank * hidden.shape[1] if self._by_position else 0
        if "positions" in self.embedding:
            positions = self.embedding["positions"]
            assert isinstance(positions, nn.Embedding)
            hidden = hidden + _positions(positions.weight, first, hidden.shape[1], documents)
        probability = self._spec.dropout if self.training else 0.0
        dropout = Dropout(probability, layer=-1, operator="embedding", first_line=first)
        return dropout(hidden, draws, rows=ids.shape[0])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the rank's vocabulary shard: `[rows, sequence, hidden]` -> `[.., rows of the table]`."""
        return self._head_table().project(self.final_norm(hidden), by_position=self._by_position)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum of the counted tokens' cross-entropies; logits are those of the rank's vocabulary shard."""
        weight = self._head_table().weight
        if not isinstance(weight, DTensor):
            return cross_entropy_sum(logits, labels)
        return vocabulary_parallel_cross_entropy_sum(
            logits,
            labels,
            first=first_row(weight),
            vocab_size=self._spec.vocab_size,
            group=weight.device_mesh.get_group(),
        )

    def cut(self, mesh: DeviceMesh) -> None:
        """Cut the weights, still on the meta device, over a TP mesh."""
        parallelize(self, mesh)
        self._mesh = mesh

    def _tp_mesh(self) -> DeviceMesh:
        assert self._mesh is not None, "activations are cut by position inside TP groups alone"
        return self._mesh

    def _head_table(self) -> TokenTable:
        table = self.head if hasattr(self, "head") else self.embedding["tokens"]
        assert isinstance(table, TokenTable)
        return table

    def _layer_constants(self, device: torch.device) -> dict[str, Any]:
        """What all layers and micro-batches share, made once."""
        if not self._constants:
            length = self._sequence_length
            self._constants["mask"] = causal_mask(length, dtype=self._dtype, device=device)
            if self._spec.family == "llama":
                self._constants["rotation"] = rotation_table(self._spec, length, device=device)
        return self._constants


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
        module = StageModel(
            model=model, stage=stage, sequence_length=sequence_length, dtype=dtype, tp_rank=tp_rank
        ).to(dtype)
    if mesh is not None:
        module.cut(mesh)
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


def _positions(weight: torch.Tensor, first: int, count: int, documents: torch.Tensor | None) -> torch.Tensor:
    """Embeddings of the positions [first, first + count), `[count, hidden]`; counted from where the documents begin,
    `[rows, count, hidden]`. (Rotary positions need no such thing: they tell distances alone.)"""
    if documents is None:
        return weight[first : first + count]
    places = torch.arange(first, first + count, dtype=documents.dtype, device=documents.device)
    return F.embedding(places - documents[:, first : first + count], weight)


def _replayed(model: ModelSpec, stage: StagePlan, layer: int, dtype: torch.dtype) -> frozenset[str]:
    """The operators that backward replays in a layer: those of the plan whose results some backward reads."""
    place = layer - stage.layers[0]
    chosen = frozenset(name for name, count in stage.recompute.items() if place < count)
    return frozenset(replayed_operators(model, Dtypes(param=_PRECISIONS[dtype]), chosen))


def _local(leaf: nn.Parameter) -> torch.Tensor:
    detached = leaf.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
