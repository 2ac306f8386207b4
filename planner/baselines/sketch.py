"""Sketch: a configuration without layers, samples or devices; and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.baselines.forms import Form
from planner.baselines.memory_savers import ZeroStage
from planner.local_batches import Pace
from planner.plan import PipelinePlan

Chain = tuple[Form, ...]


@dataclass(frozen=True)
class Sketch:
    """The stages of every pipeline, first to last, and their common micro-batch size.

    Stages get devices pipeline by pipeline, or, if `aligned`, the same stage of all pipelines side by side.
    """

    micro_batch_size: int
    pipelines: tuple[Chain, ...]
    aligned: bool = False


@dataclass(frozen=True)
class Settled:
    """A sketch with layers, samples and devices.

    `end_seconds` is Eq. 1 of the last pipeline to end; `estimate` adds about what gradients and optimizer
    take.
    """

    sketch: Sketch
    zero_stage: ZeroStage
    pipelines: tuple[PipelinePlan, ...]
    paces: tuple[Pace, ...]
    end_seconds: float
    estimate: float

    @property
    def recomputes(self) -> bool:
        """Whether any stage recomputes anything."""
        return any(stage.recompute for pipeline in self.pipelines for stage in pipeline.stages)


def replaced(chain: Chain, place: int, forms: Sequence[Form], *, count: int = 1) -> Chain:
    """The chain with `count` stages from `place` on replaced by `forms`."""
    return (*chain[:place], *forms, *chain[place + count :])
