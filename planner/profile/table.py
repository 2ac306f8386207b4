"""ProfileTable: the seconds of every operator on every device type, as the cost model asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from planner.model_spec import ModelSpec
from planner.operators import layer_operators
from planner.plan import ProfileSource

# Operators outside the layers, in forward order: the first stage's, then the last stage's.
EMBEDDING_OPERATORS = ("embedding",)
HEAD_OPERATORS = ("final_norm", "vocabulary_projection", "loss")

Scope = Literal["intra_node", "inter_node"]


class StepSeconds(NamedTuple):
    """Forward and backward seconds of one micro-batch."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def plus(self, other: StepSeconds) -> StepSeconds:
        return StepSeconds(self.forward + other.forward, self.backward + other.backward)

    def times(self, count: float) -> StepSeconds:
        return StepSeconds(self.forward * count, self.backward * count)


@dataclass(frozen=True)
class OperatorGroup:
    """Operators that a profile times together, under one name; a group of one is the operator itself."""

    name: str
    operators: tuple[str, ...]


@dataclass(frozen=True)
class OperatorGroups:
    """What the embedding, one layer and the head are made of, each in forward order.

    Every operator of the model is in exactly one group, so that the sum over a part's groups is the part's
    time. Recompute works on whole groups.
    """

    embedding: tuple[OperatorGroup, ...]
    layer: tuple[OperatorGroup, ...]
    head: tuple[OperatorGroup, ...]


def single_operators(model: ModelSpec) -> OperatorGroups:
    """Every operator in a group of its own."""

    def alone(operators: tuple[str, ...]) -> tuple[OperatorGroup, ...]:
        return tuple(OperatorGroup(operator, (operator,)) for operator in operators)

    return OperatorGroups(
        embedding=alone(EMBEDDING_OPERATORS), layer=alone(layer_operators(model)), head=alone(HEAD_OPERATORS)
    )


class ProfileTable(Protocol):
    """Times of one model's operators. Transfers are not in here, since they depend on links; nor are TP
    collectives, unless `includes_tp_collectives` says that they were measured with the operators."""

    def groups(self, device_type: str) -> OperatorGroups:
        """The names under which `operator_seconds` knows the operators on a device type."""
        ...

    def includes_tp_collectives(self, device_type: str) -> bool:
        """Whether the operators' seconds contain the all-reduces inside the TP group already."""
        ...

    def covers(
        self, *, device_type: str, tp: int, samples: int, sequence_length: int, precision: str
    ) -> bool:
        """Whether every operator's seconds are known for that case: the search keeps to what is."""
        ...

    def operator_seconds(
        self,
        *,
        device_type: str,
        operator: str,
        tp: int,
        samples: int,
        sequence_length: int,
        precision: str,
    ) -> StepSeconds:
        """Seconds of one TP rank's share of an operator for `samples` samples.

        `operator` names one of `groups(device_type)`. Raises UserError for a case that is not covered.
        """
        ...

    def all_reduce_seconds(
        self,
        *,
        device_type: str,
        scope: Scope,
        members: int,
        message_bytes: float,
        precision: str,
    ) -> float | None:
        """Measured seconds of an all-reduce over so many devices of one type; None where it was not measured.

        A larger message than any measured goes in equal pieces, a smaller one takes as long as the smallest.
        """
        ...

    def least_all_reduce_rate(self) -> float:
        """Least seconds a byte that `all_reduce_seconds` ever gives; inf where none was measured."""
        ...

    def streaming_seconds(self, *, device_type: str, moved_bytes: float) -> float:
        """Seconds of a step that only reads and writes so many bytes of device memory."""
        ...

    def sources(self) -> tuple[ProfileSource, ...]:
        """What the figures come from, for the plan's record."""
        ...


def model_operators(model: ModelSpec) -> tuple[str, ...]:
    """Every operator that a profile of the model must hold."""
    return (*EMBEDDING_OPERATORS, *layer_operators(model), *HEAD_OPERATORS)
