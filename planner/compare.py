"""Strategies side by side on one request: what each would take, and which term makes the difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from planner.cost.ideal import DeviceSpeeds
from planner.cost.stages import StageCost
from planner.errors import UserError, did_you_mean
from planner.explain import Terms, terms_of
from planner.plan import Plan
from planner.profile.analytic import AnalyticProfile
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search import find_plan, strategy_names
from planner.search.control import OF_ALL, SearchControl, SearchOptions

# What all others are compared with.
REFERENCE = "eth"


@dataclass(frozen=True)
class Row:
    """One strategy: its plan and where its seconds go, or why it has none."""

    strategy: str
    plan: Plan | None = None
    terms: Terms | None = None
    reason: str = ""

    @property
    def seconds(self) -> float | None:
        """Predicted seconds an iteration."""
        return self.plan.predicted.iteration_seconds if self.plan and self.plan.predicted else None

    @property
    def cost(self) -> float | None:
        """Of a million tokens, where the devices have prices."""
        return self.plan.predicted.cost_per_million_tokens if self.plan and self.plan.predicted else None


@dataclass(frozen=True)
class Comparison:
    """All strategies on one request, in the order asked for."""

    rows: tuple[Row, ...]
    ideal_seconds: float
    achieved_flops: dict[str, float]
    """FLOP/s that a device of each type achieves at its best."""
    objective: Literal["time", "cost"] = "time"
    """What the plans were made for, and what ratios are of."""

    @property
    def reference(self) -> Row | None:
        """The row that the others are compared with: `eth`, or the best where it was not asked for."""
        known = [(figure, row) for row in self.rows if (figure := self._figure(row)) is not None]
        named = [row for _, row in known if row.strategy == REFERENCE]
        return named[0] if named else min(known, key=lambda one: one[0], default=(0.0, None))[1]

    def ratio(self, row: Row) -> float | None:
        """How many times as long as the reference's iteration, or as dear as its tokens, the row's are."""
        reference = self.reference
        own = self._figure(row)
        best = None if reference is None else self._figure(reference)
        return own / best if own is not None and best else None

    def _figure(self, row: Row) -> float | None:
        return row.seconds if self.objective == "time" else row.cost

    def main_difference(self, row: Row) -> tuple[str, float] | None:
        """The term that adds most to what the row takes longer than the reference, and its seconds."""
        reference = self.reference
        if reference is None or reference.terms is None or row.terms is None or row is reference:
            return None
        differences = row.terms.minus(reference.terms)
        return next(iter(differences.items()))


def compare(
    request: PlanRequest,
    *,
    strategies: Sequence[str],
    profile: ProfileTable | None = None,
    progress: Callable[[str], None] | None = None,
    options: SearchOptions | None = None,
) -> Comparison:
    """Plans of all strategies for the request; one that cannot fit has its reason instead.

    `options` are those of the search of `eth`; what they leave out of `OF_ALL`, they leave out of all. UserError for
    a strategy that is not known.
    """
    unknown = [name for name in strategies if name not in strategy_names()]
    if unknown:
        raise UserError(
            f"strategies = {','.join(strategies)!r}: {unknown[0]!r} is not known;"
            f" use some of {', '.join(strategy_names())}{did_you_mean(unknown[0], strategy_names())}"
        )
    table = profile or AnalyticProfile(request.model, request.cluster.device_types)
    speeds = device_speeds(request, table)
    options = options or SearchOptions()
    rows = [_row(request, name, table, progress, options) for name in dict.fromkeys(strategies)]
    return Comparison(
        tuple(rows),
        ideal_seconds=request.global_batch_size / speeds.samples_per_second,
        achieved_flops={type_: speeds.achieved_flops(type_) for type_ in request.cluster.counts},
        objective=request.objective,
    )


def device_speeds(request: PlanRequest, profile: ProfileTable) -> DeviceSpeeds:
    """Of the request's model on its device types."""
    cost = StageCost.of_request(request, profile=profile)
    return DeviceSpeeds(cost, request.cluster)


def _row(
    request: PlanRequest,
    strategy: str,
    profile: ProfileTable,
    progress: Callable[[str], None] | None,
    options: SearchOptions,
) -> Row:
    if strategy != REFERENCE:
        options = SearchOptions(options.without & OF_ALL)
    control = SearchControl(options) if progress is None else SearchControl(options, progress=progress)
    try:
        plan = find_plan(
            request.model_copy(update={"strategy": strategy}),
            profile=profile,
            progress=progress,
            control=control,
        )
    except UserError as error:
        # The row says which strategy it is.
        return Row(strategy, reason=str(error).removeprefix(f"strategy = {strategy!r}: "))
    return Row(strategy, plan, terms_of(plan, profile=profile))
