"""Chain: a pipeline without devices; and its figures under Eq. 5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.local_batches import Pace
from planner.search.exact.choices import StageChoice
from planner.search.exact.pool import Vector
from planner.search.exact.role import role_of
from planner.search.exact.stage_table import StageTable


@dataclass(frozen=True)
class ChainStage:
    """A stage of a chain: how it is built, its layers, its seconds and those after its last backward, of which `tail`
    begin only when all stages have their gradients."""

    choice: StageChoice
    layers: int
    forward: float
    backward: float
    after: float
    tail: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Chain:
    """Stages first to last. `counts` are the devices by kind; `specs` the (choice, layers) in the stage
    table."""

    micro_batch_size: int
    counts: Vector
    specs: tuple[tuple[int, int], ...]
    stages: tuple[ChainStage, ...]

    @cached_property
    def pace(self) -> Pace:
        """When so many micro-batches are ended, gradients and optimizer included.

        The period is the slowest stage. The stage that is done last need not be the first, which ends its
        last backward last: another may have more gradients.
        """
        fill = sum(stage.seconds for stage in self.stages)
        ends, drained = [], 0.0
        for stage in self.stages:
            ends.append(fill - drained + stage.after - stage.tail)
            drained += stage.backward
        last = max(stage.tail for stage in self.stages)
        return Pace(self.micro_batch_size, max(ends) + last, max(stage.seconds for stage in self.stages))


def make_chain(table: StageTable, stages: Sequence[tuple[int, int]]) -> Chain:
    """The chain of (choice, layers) of a table, first stage first."""
    found, counts = [], [0] * len(table.counts[0])
    for index, (choice, layers) in enumerate(stages):
        position = len(stages) - index
        role = role_of(position=position, stages=len(stages))
        replay = table.replay_at(role, position)[choice, layers]
        found.append(
            ChainStage(
                table.choices[choice],
                layers,
                float(table.forward[role, choice, layers]),
                float(table.backward[role, choice, layers] + table.receive[role, choice] + replay),
                float(table.after[role, choice, layers]),
                float(table.tail[role, choice, layers]),
            )
        )
        counts = [held + more for held, more in zip(counts, table.counts[choice], strict=True)]
    return Chain(table.micro_batch_size, tuple(counts), tuple(stages), tuple(found))
