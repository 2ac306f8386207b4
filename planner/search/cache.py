"""The pipeline cache (paper 5.1): the best configuration by (composition, samples)."""

from __future__ import annotations

from collections.abc import Sequence

from planner.search.choice import PipelineChoice
from planner.search.device_groups import Composition
from planner.search.stage_search import StageSearch


class PipelineCache:
    """Asks the stage search once for every composition and number of samples."""

    def __init__(self, search: StageSearch) -> None:
        self._search = search
        self._known: dict[tuple[Composition, int], tuple[PipelineChoice, ...]] = {}

    def best(self, composition: Composition, samples: Sequence[int]) -> list[PipelineChoice]:
        """Distinct choices, each among the best for one of the numbers of samples; empty if nothing fits."""
        missing = [n for n in samples if (composition, n) not in self._known]
        if missing:
            found = self._search.best(composition, missing)
            self._known.update(zip([(composition, n) for n in missing], found, strict=True))
        else:
            self._search.counts.pipeline_cache_hits += 1
        return list(dict.fromkeys(choice for n in samples for choice in self._known[composition, n]))
