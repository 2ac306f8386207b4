"""A pipeline's configuration as the search keeps it, and the record of the best ones found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.cost.memory import StageLoad
from planner.local_batches import Pace
from planner.search.stage_groups import StageOption

# Relative difference below which two times are the same, so that round-off never decides.
TIE = 1e-9


class After(NamedTuple):
    """Estimated seconds after the last backward: gradient blocks and the optimizer's step.

    `alone`: with no other pipeline, so that only replicas inside the pipeline synchronise; `together`: with
    others.
    """

    alone: float
    together: float


@dataclass(frozen=True)
class PipelineChoice:
    """A pipeline's configuration: stages first to last, with layers, how it paces, and what comes after."""

    micro_batch_size: int
    stages: tuple[StageOption, ...]
    layers: tuple[int, ...]
    pace: Pace
    after: After

    def end_seconds(self, samples: int) -> float:
        """When the last backward ends (Eq. 1)."""
        return self.pace.end_seconds(self.pace.micro_batches(samples))

    def after_seconds(self, pipelines: int) -> float:
        """What comes after, were it one of so many pipelines."""
        return self.after.together if pipelines > 1 else self.after.alone

    def loads(self, stage: int, samples: int) -> list[tuple[str, StageLoad]]:
        """Memory loads of a stage's distinct replicas, with their device types, for so many samples."""
        option, count = self.stages[stage], len(self.stages)
        in_flight = min(count - stage, self.pace.micro_batches(samples))
        return [
            (
                type_,
                StageLoad(
                    tp=option.tp,
                    rows=rows,
                    layers=self.layers[stage],
                    embedding=stage == 0,
                    head=stage == count - 1,
                    in_flight=in_flight,
                ),
            )
            for type_, rows in option.loads
        ]


@dataclass
class SearchCounts:
    """What the search did, for the plan's record."""

    stages_seen: int = 0
    branches_cut: int = 0
    layer_splits: int = 0
    layer_split_cache_hits: int = 0
    pipelines_searched: int = 0
    pipeline_cache_hits: int = 0
    device_groups: int = 0
    device_groups_priced: int = 0


class Record:
    """The best choices so far: for each number of samples, by Eq. 1 alone and with either kind of After.

    Args:
        samples: the numbers of samples asked for.
        least_after: what every choice needs at least after its last backward.
        first_will_do: end the search with the first choice that fits.
    """

    def __init__(self, samples: Sequence[int], *, least_after: After, first_will_do: bool = False) -> None:
        self._samples = tuple(samples)
        self._least = (0.0, *least_after)
        self._first_will_do = first_will_do
        self._seconds = [[math.inf] * len(self._least) for _ in self._samples]
        self._choices: list[list[PipelineChoice | None]] = [[None] * len(self._least) for _ in self._samples]
        self.micro_batches: tuple[int, ...] = ()

    def begin(self, micro_batch_size: int) -> None:
        """Choices offered from now on have this micro-batch size."""
        self.micro_batches = tuple(-(-count // micro_batch_size) for count in self._samples)

    def hopeless(self, fill: float, period: float) -> bool:
        """Whether no choice with at least this fill and period can win anywhere."""
        if self._first_will_do and self._choices[0][0] is not None:
            return True
        for count, seconds in zip(self.micro_batches, self._seconds, strict=True):
            latency = fill + period * (count - 1)
            if any(
                latency + least < best * (1 - TIE) for least, best in zip(self._least, seconds, strict=True)
            ):
                return False
        return True

    def offer(self, index: int, choice: PipelineChoice) -> None:
        """Keep a choice where it is better for the number of samples `index`."""
        latency = choice.pace.end_seconds(self.micro_batches[index])
        best = self._seconds[index]
        for place, after in enumerate((0.0, *choice.after)):
            if latency + after < best[place] * (1 - TIE):
                best[place] = latency + after
                self._choices[index][place] = choice

    def choices(self, index: int) -> tuple[PipelineChoice, ...]:
        """The distinct best choices for the number of samples `index`; none if nothing fits."""
        return tuple(dict.fromkeys(choice for choice in self._choices[index] if choice is not None))
