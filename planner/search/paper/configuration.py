"""A pipeline's configuration on fixed stage device groups, and its price under Eq. 1 and 5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from planner.local_batches import Pace
from planner.search.exact.pool import Vector
from planner.search.paper.budget import EvaluationBudget
from planner.search.paper.stage_figures import StageFigures, StageKey, StageShop

StageGroups = tuple[Vector, ...]
"""Stage device groups: the devices of every stage by kind, first stage first."""


class Configuration(NamedTuple):
    """What the stage search chooses: one micro-batch size; of every stage the TP degree and the layers."""

    micro_batch_size: int
    degrees: tuple[int, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Tuned:
    """A configuration with its price for `batch` samples. `stages` are first to last."""

    groups: StageGroups
    configuration: Configuration
    batch: int
    stages: tuple[StageFigures, ...]

    @cached_property
    def pace(self) -> Pace:
        """Eq. 1 and 5: when so many micro-batches are ended, each stage's gradients and optimizer included."""
        left = fill = end = period = 0.0
        for stage in reversed(self.stages):
            left += stage.backward
            fill += stage.forward
            end = max(end, left + stage.after)
            period = max(period, stage.seconds)
        return Pace(self.configuration.micro_batch_size, fill + end, period)

    @cached_property
    def seconds(self) -> float:
        return self.pace.end_seconds(self.pace.micro_batches(self.batch))

    def compute_seconds(self, samples: int) -> float:
        """Eq. 1 for so many samples: the last backward's end."""
        stages, micro_batches = self.stages, self.pace.micro_batches(samples)
        return sum(stage.seconds for stage in stages) + self.pace.period_seconds * (micro_batches - 1)

    @cached_property
    def overflow(self) -> float:
        """By how much stages are fuller than full, in all; 0 if everything fits."""
        return sum(max(0.0, stage.fullness - 1) for stage in self.stages)

    @property
    def composition(self) -> Vector:
        """The pipeline's devices by kind."""
        return tuple(map(sum, zip(*self.groups, strict=True)))

    @property
    def fits(self) -> bool:
        return self.overflow == 0

    @property
    def rank(self) -> tuple[float, float]:
        """The lower, the better: what fits is better than what does not, then the sooner end."""
        return self.overflow, self.seconds

    @property
    def throughput(self) -> float:
        """Samples a second."""
        return self.batch / self.seconds


class Evaluator:
    """Prices configurations of one pipeline, for one number of samples, while the budget lasts."""

    def __init__(self, shop: StageShop, groups: StageGroups, *, batch: int, budget: EvaluationBudget) -> None:
        self.shop, self.groups, self.batch = shop, groups, batch
        self._budget = budget
        self._figures: dict[tuple[int, int, int, int], StageFigures | None] = {}
        self._starts: dict[tuple[int, tuple[int, ...]], Configuration | None] = {}

    def evaluate(self, configuration: Configuration) -> Tuned | None:
        """None if a stage cannot run so, or nothing is left of the budget."""
        if not self._budget.take():
            return None
        size, degrees, layers = configuration
        stages = []
        for index, (tp, count) in enumerate(zip(degrees, layers, strict=True)):
            figures = self._stage(index, tp, size, count)
            if figures is None:
                return None
            stages.append(figures)
        return Tuned(self.groups, configuration, self.batch, tuple(stages))

    def in_proportion(self, size: int, degrees: Sequence[int]) -> Configuration | None:
        """Layers in proportion to the stages' speed. None if a stage cannot run so, or layers are too few."""
        key = (size, tuple(degrees))
        if key not in self._starts:
            self._starts[key] = self._in_proportion(*key)
        return self._starts[key]

    def _in_proportion(self, size: int, degrees: tuple[int, ...]) -> Configuration | None:
        layers, count = self.shop.layers, len(self.groups)
        speeds = []
        for index, tp in enumerate(degrees):
            figures = self._stage(index, tp, size, 1)
            if figures is None:
                return None
            speeds.append(1 / figures.seconds)
        fewest = [int(0 < index < count - 1) for index in range(count)]
        if sum(fewest) > layers:
            return None
        return Configuration(size, degrees, _proportional(layers, speeds, fewest))

    def _stage(self, index: int, tp: int, size: int, layers: int) -> StageFigures | None:
        known = (index, tp, size, layers)
        if known not in self._figures:
            last = len(self.groups) - 1
            in_flight = min(last + 1 - index, -(-self.batch // size))
            key = StageKey(self.groups[index], tp, size, layers, index == 0, index == last, in_flight)
            self._figures[known] = self.shop.figures(key)
        return self._figures[known]


def _proportional(total: int, weights: Sequence[float], fewest: Sequence[int]) -> tuple[int, ...]:
    """Whole numbers in proportion to the weights, the largest remainders rounded up, none below `fewest`."""
    scale = total / sum(weights)
    shares = [weight * scale for weight in weights]
    found = [max(least, int(share)) for share, least in zip(shares, fewest, strict=True)]
    missing = total - sum(found)
    if missing > 0:
        order = sorted(range(len(found)), key=lambda index: (found[index] - shares[index], index))
        for index in order[:missing]:
            found[index] += 1
    while sum(found) > total:
        able = [index for index, count in enumerate(found) if count > fewest[index]]
        found[max(able, key=lambda index: (found[index] - shares[index], -index))] -= 1
    return tuple(found)
