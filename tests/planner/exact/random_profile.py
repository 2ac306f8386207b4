"""A profile of random times: monotonic in nothing, neither TP degree nor samples."""

from __future__ import annotations

import math
import random

from planner.model_spec import ModelSpec
from planner.plan import ProfileSource
from planner.profile.table import OperatorGroups, Scope, StepSeconds, single_operators


class RandomProfile:
    """Seconds of every operator drawn from its case; the same seed gives the same profile."""

    def __init__(self, seed: int, model: ModelSpec, *, spread: float = 4.0) -> None:
        self._seed, self._model, self._spread = seed, model, spread

    def groups(self, device_type: str) -> OperatorGroups:
        return single_operators(self._model)

    def includes_tp_collectives(self, device_type: str) -> bool:
        return False

    def covers(
        self, *, device_type: str, tp: int, samples: int, sequence_length: int, precision: str
    ) -> bool:
        return True

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
    ) -> None:
        return None

    def least_all_reduce_rate(self) -> float:
        return math.inf

    def streaming_seconds(self, *, device_type: str, moved_bytes: float) -> float:
        return moved_bytes / 1e12

    def sources(self) -> tuple[ProfileSource, ...]:
        return ()
