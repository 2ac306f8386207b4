"""Sketch: a configuration without layers, samples or devices; and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.baselines.forms import Form
from planner.baselines.memory_savers import ZeroStage
from planner.cost.layer_flow import Recompute
from planner.local_batches import Pace
from planner.plan import PipelinePlan, StagePlan

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
class LayerPlan:
    """Layers and recomputation of every stage, and whether it cuts activations by position; the sum of stage seconds
    (fill) and the largest (period)."""

    layers: tuple[int, ...]
    cuts: tuple[bool, ...]
    recompute: tuple[Recompute, ...]
    fill_seconds: float
    period_seconds: float


@dataclass(frozen=True)
class Settled:
    """A sketch with layers, samples and devices.

    `end_seconds` is Eq. 1 of the last pipeline to end; `estimate` adds about what gradients and optimizer
    take.
    """

    sketch: Sketch
    zero_stage: ZeroStage
    seats: tuple[tuple[tuple[str, ...], ...], ...]
    """Devices of every stage of every pipeline."""
    splits: tuple[LayerPlan, ...]
    samples: tuple[int, ...]
    paces: tuple[Pace, ...]
    end_seconds: float
    estimate: float

    @property
    def recomputes(self) -> bool:
        """Whether any stage recomputes anything."""
        return any(any(split.recompute) for split in self.splits)

    @cached_property
    def pipelines(self) -> tuple[PipelinePlan, ...]:
        """As a Plan has them: made when they are asked for, since few of what is settled is priced."""
        size = self.sketch.micro_batch_size
        parts = zip(self.sketch.pipelines, self.seats, self.splits, self.samples, strict=True)
        return tuple(
            PipelinePlan(
                id=index,
                micro_batch_size=size,
                samples=samples,
                local_batch_size=-(-samples // size) * size,
                stages=tuple(_stages(chain, seats, split)),
            )
            for index, (chain, seats, split, samples) in enumerate(parts)
        )


def _stages(chain: Chain, seats: Sequence[tuple[str, ...]], split: LayerPlan) -> Iterator[StagePlan]:
    first = 0
    for number, (form, ids, count, cut, recompute) in enumerate(
        zip(chain, seats, split.layers, split.cuts, split.recompute, strict=True)
    ):
        yield StagePlan(
            devices=ids,
            tp=form.tp,
            dp=len(form.replicas),
            rows=tuple(rows for _, rows in form.replicas),
            layers=(first, first + count),
            embedding=number == 0,
            head=number == len(chain) - 1,
            sequence_parallel=cut,
            recompute=dict(recompute),
        )
        first += count


def replaced(chain: Chain, place: int, forms: Sequence[Form], *, count: int = 1) -> Chain:
    """The chain with `count` stages from `place` on replaced by `forms`."""
    return (*chain[:place], *forms, *chain[place + count :])
