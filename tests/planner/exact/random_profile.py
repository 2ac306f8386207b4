"""A profile of random times: monotonic in nothing, neither TP degree nor samples."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from planner.model_spec import ModelSpec
from planner.plan import ProfileSource
from planner.profile.table import OperatorGroups, Scope, StepSeconds, single_operators


class RandomProfile:
    """Seconds of every operator drawn from its case; the same seed gives the same profile.

    `all_reduce_rates` are measured all-reduces by (members, scope), in seconds a byte. A `share` of all cases
    (device type, TP degree, samples) is known; asking for the others is a mistake.
    """

    def __init__(
        self,
        seed: int,
        model: ModelSpec,
        *,
        spread: float = 4.0,
        all_reduce_rates: Mapping[tuple[int, Scope], float] | None = None,
        share: float = 1.0,
    ) -> None:
        self._seed, self._model, self._spread = seed, model, spread
        self._rates, self.share = all_reduce_rates or {}, share

    def groups(self, device_type: str) -> OperatorGroups:
        return single_operators(self._model)

    def includes_tp_collectives(self, device_type: str) -> bool:
        return False

    def covers(
        self, *, device_type: str, tp: int, samples: int, sequence_length: int, precision: str
    ) -> bool:
        return random.Random(f"{self._seed} {device_type} {tp} {samples}").random() < self.share

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
        assert self.covers(
            device_type=device_type,
            tp=tp,
            samples=samples,
            sequence_length=sequence_length,
            precision=precision,
        )
        draw = random.Random(f"{self._seed} {device_type} {operator} {tp} {samples}")
        scale = 1e-4 * samples / tp
        forward = scale * self._spread ** draw.uniform(-1, 1)
        return StepSeconds(forward, forward * draw.uniform(0.5, 3))

    def all_reduce_seconds(
        self,
        *,
        device_type: str,
        scope: Scope,
        members: int,
        message_bytes: float,
        precision: str,
    ) -> float | None:
        rate = self._rates.get((members, scope))
        return None if rate is None else rate * message_bytes

    def least_all_reduce_rate(self) -> float:
        return min(self._rates.values(), default=math.inf)

    def streaming_seconds(self, *, device_type: str, moved_bytes: float) -> float:
        return moved_bytes / 1e12

    def sources(self) -> tuple[ProfileSource, ...]:
        return ()
