"""What all ranks must know before any of them branches (law 7): the loss, the gradient's norm, what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from actors.engine.errors import NonFiniteLoss
from actors.engine.optimizer import NonFiniteGradientError
from planner.plan import Plan, RankPlace

OnNan = Literal["stop", "skip", "continue"]
"""What an iteration whose loss or gradient is not finite does: fail, update nothing, or update all the same."""


@dataclass(frozen=True)
class Agreed:
    """The world's loss and gradient norm, of the unscaled loss; `bad_pipelines` have a loss that is not finite."""

    loss: float
    norm: float
    bad_pipelines: tuple[int, ...]

    @property
    def finite(self) -> bool:
        return not self.bad_pipelines and math.isfinite(self.norm)


def agree(
    plan: Plan,
    place: RankPlace,
    *,
    losses: Sequence[torch.Tensor],
    square_sum: torch.Tensor,
    loss_scale: float,
) -> Agreed:
    """One collective for loss and norm. Each pipeline's loss has an entry of its own, so that a bad one is
    named; `losses` and `square_sum` are this rank's, of a loss multiplied by `loss_scale`."""
    entries = [0.0] * len(plan.pipelines)
    # TP ranks hold the same loss: the first speaks for all.
    if losses and place.tp_rank == 0:
        entries[place.pipeline] = math.fsum(torch.stack(list(losses)).tolist()) / loss_scale
    told = torch.tensor(entries, dtype=torch.float32, device=square_sum.device)
    shared = torch.cat([told, square_sum.reshape(1) / loss_scale**2])
    dist.all_reduce(shared)
    *by_pipeline, square = shared.tolist()
    bad = tuple(index for index, loss in enumerate(by_pipeline) if not math.isfinite(loss))
    norm = math.sqrt(square) if square >= 0 else math.nan
    return Agreed(sum(by_pipeline), norm, bad)


def updates(agreed: Agreed, *, iteration: int, on_nan: OnNan, place: RankPlace) -> bool:
    """Whether the iteration updates the parameters; the same on every rank.

    Raises NonFiniteLoss or NonFiniteGradientError where the job stops.
    """
    if agreed.finite or on_nan == "continue":
        return True
    if on_nan == "skip":
        return False
    if agreed.bad_pipelines:
        raise NonFiniteLoss(
            f"iteration {iteration}: the loss of pipeline {', '.join(map(str, agreed.bad_pipelines))} is not"
            " finite; lower learning_rate, train in fp32, or set runtime.on_nan to skip",
            place=place,
        )
    raise NonFiniteGradientError(iteration=iteration, norm=agreed.norm)
