"""A profile whose operators take round, unlike times, so that a sum tells what is in it."""

from __future__ import annotations

import math
from typing import Any

from planner.model_spec import ModelSpec
from planner.operators import layer_operators
from planner.plan import ProfileSource
from planner.profile.table import OperatorGroup, OperatorGroups, StepSeconds, single_operators

MILLISECOND = 1e-3


class NumberedProfile:
    """The i-th operator of a layer takes 2^i ms forward and three times that backward; the ends take nothing.

    `groups` times some operators together, as the sum of theirs. `all_reduces` are measured collectives by
    (members, scope), in seconds a byte, for messages of up to `largest` bytes.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        groups: tuple[tuple[str, ...], ...] | None = None,
        includes_tp: bool = False,
        all_reduces: dict[tuple[int, str], float] | None = None,
        largest: float = 1e12,
        bandwidth: float = 1e12,
    ) -> None:
        self._names = layer_operators(model)
        self._groups = single_operators(model)
        self._includes_tp, self._all_reduces = includes_tp, all_reduces or {}
        self._largest, self._bandwidth = largest, bandwidth
        if groups is not None:
            layer = tuple(OperatorGroup("+".join(names), names) for names in groups)
            self._groups = OperatorGroups(self._groups.embedding, layer, self._groups.head)

    def groups(self, device_type: str) -> OperatorGroups:
        return self._groups

    def includes_tp_collectives(self, device_type: str) -> bool:
        return self._includes_tp

    def covers(self, **case: Any) -> bool:
        return True

    def forward(self, *names: str) -> float:
        """Seconds of some operators together."""
        return sum(2 ** self._names.index(name) for name in names) * MILLISECOND

    def operator_seconds(self, *, operator: str, **case: Any) -> StepSeconds:
        known = [name for name in operator.split("+") if name in self._names]
        return StepSeconds(self.forward(*known), 3 * self.forward(*known))

    def all_reduce_seconds(
        self,
        *,
        device_type: str,
        scope: str,
        members: int,
        message_bytes: float,
        precision: str,
    ) -> float | None:
        rate = self._all_reduces.get((members, scope))
        return None if rate is None or message_bytes > self._largest else rate * message_bytes

    def least_all_reduce_rate(self) -> float:
        return min(self._all_reduces.values(), default=math.inf)

    def streaming_seconds(self, *, device_type: str, moved_bytes: float) -> float:
        return moved_bytes / self._bandwidth

    def sources(self) -> tuple[ProfileSource, ...]:
        return ()
