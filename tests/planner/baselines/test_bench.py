"""What the bench leaves out: only what its answers do not depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from planner.baselines.bench import Bench, Budget
from planner.baselines.metis import best_pipeline
from planner.baselines.sketch import Settled
from planner.plan import Plan
from planner.profile.analytic import AnalyticProfile
from planner.search.shortlist import Offer, ignore
from tests.planner.baselines.jobs import CLUSTERS, draw_request


class Watched(Bench):
    """Keeps what it was asked to price."""

    asked: list[list[Settled]]

    def priced(self, found: Sequence[Settled]) -> list[tuple[float, Settled, Plan]]:
        self.asked.append(list(found))
        return super().priced(found)


def bench_of(seed: int, nodes: tuple[dict[str, int], ...], *, starts: int, offer: Offer) -> Watched:
    request = draw_request(seed, nodes, strategy="metis", global_batch_size=12)
    profile = AnalyticProfile(request.model, request.cluster.device_types)
    budget = replace(Budget.for_devices(len(request.cluster.devices)), starts=starts)
    bench = Watched(request, profile=profile, budget=budget, offer=offer)
    bench.asked = []
    return bench


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("starts", [1, 3])
def test_where_nobody_is_told_of_plans_the_best_are_priced_all_the_same(seed: int, starts: int) -> None:
    told: list[Plan] = []
    heard, alone = (
        bench_of(seed, CLUSTERS[3], starts=starts, offer=offer) for offer in (told.append, ignore)
    )
    found = [best_pipeline(bench, progress=lambda message: None) for bench in (heard, alone)]
    assert found[0] == found[1]
    if found[0] is None:
        return
    assert len(told) == heard.priced_count and heard.asked == alone.asked
    left_out = heard.priced_count - alone.priced_count
    assert left_out > 0
    for asked in heard.asked:
        every, few = Bench.priced(heard, asked), Bench.priced(alone, asked)
        assert few[:starts] == every[:starts]
        # No price is below its Eq. 1.
        assert all(seconds >= settled.end_seconds * (1 - 1e-9) for seconds, settled, _ in every)
