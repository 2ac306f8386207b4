"""The best configuration of a pipeline's devices: every stage device group searched; and the cache (paper 5.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.search.exact.pool import Vector
from planner.search.paper.bottleneck import BottleneckSearch, starts
from planner.search.paper.budget import EvaluationBudget
from planner.search.paper.configuration import Configuration, Evaluator, StageGroups, Tuned
from planner.search.paper.shares import evaluation_shares
from planner.search.paper.stage_device_groups import stage_device_groups
from planner.search.paper.stage_figures import StageShop


@dataclass(frozen=True)
class Effort:
    """How thoroughly one pipeline is searched.

    Args:
        groups: stage device groups up to which all are searched; the regular ones if there are more.
        each: evaluations a stage device group gets, before they are shared out by variance.
        refining: evaluations to refine a configuration for the samples that it was assigned.
    """

    groups: int
    each: int
    refining: int


@dataclass
class PipelineCounts:
    """What was done, for the plan's record."""

    pipelines_searched: int = 0
    cache_hits: int = 0
    stage_groups: int = 0


class PipelineSearch:
    """Searches pipelines of one request. With `cache` each is searched once for a composition and batch."""

    def __init__(
        self,
        shop_of: Callable[[Vector], StageShop],
        *,
        effort: Effort,
        budget: EvaluationBudget,
        cache: bool,
        counts: PipelineCounts | None = None,
    ) -> None:
        """`shop_of` says where the stages of a pipeline of these devices get their figures."""
        self._shop_of, self._effort, self._budget = shop_of, effort, budget
        self._known: dict[tuple[Vector, int], Tuned | None] | None = {} if cache else None
        self._refined: dict[tuple[StageGroups, Configuration, int], Tuned] | None = {} if cache else None
        self.counts = PipelineCounts() if counts is None else counts

    def best(self, composition: Vector, batch: int) -> Tuned | None:
        """The best configuration that was found for so many samples; None if none fits."""
        key = (composition, batch)
        if self._known is not None and key in self._known:
            self.counts.cache_hits += 1
            return self._known[key]
        found = self._search(composition, batch)
        # A search that was cut short is not the pipeline's best.
        if self._known is not None and not self._budget.exhausted():
            self._known[key] = found
        return found

    def refined(self, tuned: Tuned, batch: int) -> Tuned:
        """The configuration refined for the samples it was assigned; the same one, priced for them, if nothing
        better is found."""
        key = (tuned.groups, tuned.configuration, batch)
        if self._refined is not None and key in self._refined:
            self.counts.cache_hits += 1
            return self._refined[key]
        evaluator = Evaluator(
            self._shop_of(tuned.composition), tuned.groups, batch=batch, budget=self._budget
        )
        search = BottleneckSearch(evaluator, evaluations=self._effort.refining)
        found = search.run([tuned.configuration]) or tuned
        if self._refined is not None and not self._budget.exhausted():
            self._refined[key] = found
        return found

    def _search(self, composition: Vector, batch: int) -> Tuned | None:
        self.counts.pipelines_searched += 1
        shop, effort = self._shop_of(composition), self._effort
        precision = shop.request.dtypes.param
        groups = stage_device_groups(
            composition,
            powers=[kind.device.tflops(precision) for kind in shop.pool.kinds],
            most=effort.groups,
            most_stages=shop.layers + 2,
        )
        best: Tuned | None = None
        shares = evaluation_shares(groups, shop.pool, precision=precision, each=effort.each)
        for stages, share in zip(groups, shares, strict=True):
            if self._budget.exhausted():
                break
            self.counts.stage_groups += 1
            evaluator = Evaluator(shop, stages, batch=batch, budget=self._budget)
            found = BottleneckSearch(evaluator, evaluations=share).run(starts(evaluator))
            if found is not None and found.fits and (best is None or found.seconds < best.seconds):
                best = found
        return best
