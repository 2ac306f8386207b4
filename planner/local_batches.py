"""Local batches: how many samples of the global batch each pipeline takes (Eq. 2-5)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.price import price_plan
from planner.errors import UserError
from planner.plan import PipelinePlan, Plan
from planner.profile.table import ProfileTable


@dataclass(frozen=True)
class Pace:
    """A pipeline as Eq. 1 sees it: `fill_seconds` for the first micro-batch, then one a `period_seconds`."""

    micro_batch_size: int
    fill_seconds: float
    period_seconds: float

    def end_seconds(self, micro_batches: int) -> float:
        """When the pipeline ends so many micro-batches; 0 for none."""
        return self.fill_seconds + self.period_seconds * (micro_batches - 1) if micro_batches else 0.0

    def micro_batches(self, samples: int) -> int:
        return -(-samples // self.micro_batch_size)

    def samples_within(self, seconds: float) -> int:
        """Samples that the pipeline can end by then, whole micro-batches."""
        if seconds < self.fill_seconds:
            return 0
        return (int((seconds - self.fill_seconds) / self.period_seconds) + 1) * self.micro_batch_size


def allocate(paces: Sequence[Pace], *, global_batch_size: int) -> list[int]:
    """Samples of every pipeline, greedily: each next micro-batch goes where it ends soonest.

    That is the paper's rule, the smallest increase of the latest end; ties go to the earlier pipeline.
    The last micro-batch given may not be full: that pipeline takes the fewer samples. A pipeline may get
    none. O(log P) a micro-batch.
    """
    counts = [0] * len(paces)
    heap = [(pace.end_seconds(1), index) for index, pace in enumerate(paces)]
    heapq.heapify(heap)
    left = global_batch_size
    while True:
        _, index = heap[0]
        pace = paces[index]
        counts[index] += 1
        left -= pace.micro_batch_size
        if left <= 0:
            break
        heapq.heapreplace(heap, (pace.end_seconds(counts[index] + 1), index))
    samples = [count * pace.micro_batch_size for count, pace in zip(counts, paces, strict=True)]
    samples[index] += left
    return samples


def equal_shares(pipelines: int, *, global_batch_size: int) -> list[int]:
    """Samples split as equally as whole samples allow; the first pipelines take the odd ones."""
    share, odd = divmod(global_batch_size, pipelines)
    return [share + (index < odd) for index in range(pipelines)]


def with_samples(pipeline: PipelinePlan, samples: int) -> PipelinePlan:
    """The pipeline with another number of samples."""
    size = pipeline.micro_batch_size
    return pipeline.model_copy(update={"samples": samples, "local_batch_size": -(-samples // size) * size})


def with_equal_batches(plan: Plan, *, profile: ProfileTable | None = None) -> Plan:
    """The same pipelines with the samples split equally, priced again: what data balance is compared with.

    Raises UserError if there are fewer samples than pipelines.
    """
    count = len(plan.pipelines)
    if plan.global_batch_size < count:
        raise UserError(
            f"global_batch_size = {plan.global_batch_size} cannot be split equally over {count} pipelines;"
            f" raise it to {count} or more, or let the batches differ"
        )
    shares = equal_shares(count, global_batch_size=plan.global_batch_size)
    pipelines = [
        with_samples(pipeline, share) for pipeline, share in zip(plan.pipelines, shares, strict=True)
    ]
    changes = {
        "pipelines": [pipeline.model_dump() for pipeline in pipelines],
        "predicted": None,
        "search": None,
    }
    # Not model_copy: it would keep what the old plan has worked out, and validates nothing.
    equal = Plan.model_validate(plan.model_dump() | changes)
    return equal.model_copy(update={"predicted": price_plan(equal, profile=profile)})
