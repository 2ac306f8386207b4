"""Combining pipelines: configurations and local batches of one device group (Eq. 2-5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.local_batches import allocate, equal_shares
from planner.search.choice import PipelineChoice
from planner.search.device_groups import Composition


@dataclass(frozen=True)
class Combination:
    """Pipelines that run together, and what each takes of the global batch."""

    compositions: tuple[Composition, ...]
    choices: tuple[PipelineChoice, ...]
    samples: tuple[int, ...]

    @property
    def end_seconds(self) -> float:
        """When the last backward of all ends (Eq. 2)."""
        return max(
            choice.end_seconds(count) for choice, count in zip(self.choices, self.samples, strict=True)
        )

    @property
    def estimated_seconds(self) -> float:
        """The price as far as it is known without the gradient blocks between the pipelines."""
        count = len(self.choices)
        return self.end_seconds + max(choice.after_seconds(count) for choice in self.choices)


def combine(
    compositions: Sequence[Composition],
    options: Sequence[Sequence[PipelineChoice]],
    *,
    global_batch_size: int,
    equal: bool,
    every: bool = False,
) -> list[Combination]:
    """The options and samples that end soonest, and those that do with what comes after counted.

    Empty if some pipeline would get no sample, one if both are the same. With `every` one that would get none
    takes a micro-batch all the same: the others may not fit without its share of the optimizer state.
    """
    if len(compositions) > global_batch_size:
        return []
    found: dict[Combination, None] = {}
    for after in (False, True):
        combination = _combination(
            compositions, options, global_batch_size, equal=equal, every=every, after=after
        )
        if combination is not None:
            found[combination] = None
    return list(found)


def least_end_seconds(options: Sequence[Sequence[PipelineChoice]], global_batch_size: int) -> float:
    """A bound on the end of any combination of these options: all work at their period from the start."""
    rate = sum(
        max(choice.pace.micro_batch_size / choice.pace.period_seconds for choice in choices)
        for choices in options
    )
    return global_batch_size / rate


def _combination(
    compositions: Sequence[Composition],
    options: Sequence[Sequence[PipelineChoice]],
    global_batch_size: int,
    *,
    equal: bool,
    every: bool,
    after: bool,
) -> Combination | None:
    count = len(compositions)

    def lag(choice: PipelineChoice) -> float:
        return choice.after_seconds(count) if after else 0.0

    if equal:
        samples = equal_shares(count, global_batch_size=global_batch_size)
        chosen = [
            min(choices, key=lambda choice: choice.end_seconds(share) + lag(choice))
            for choices, share in zip(options, samples, strict=True)
        ]
    else:
        chosen = _quickest_options(options, global_batch_size, lag)
        # Blocks start when all pipelines are ready, so it is the backwards' ends that are balanced.
        samples = allocate([choice.pace for choice in chosen], global_batch_size=global_batch_size)
        if every:
            samples = _with_every(chosen, samples)
    if min(samples) < 1:
        return None
    return Combination(tuple(compositions), tuple(chosen), tuple(samples))


def _with_every(chosen: Sequence[PipelineChoice], samples: Sequence[int]) -> list[int]:
    """A micro-batch for each pipeline without, from those that end last and keep a sample."""
    samples = list(samples)
    for index, choice in enumerate(chosen):
        if samples[index] < 1:
            donor = max(
                (other for other in range(len(chosen)) if samples[other] > 1),
                key=lambda other: chosen[other].end_seconds(samples[other]),
            )
            taken = min(choice.pace.micro_batch_size, samples[donor] - 1)
            samples[donor] -= taken
            samples[index] += taken
    return samples


def _quickest_options(
    options: Sequence[Sequence[PipelineChoice]],
    global_batch_size: int,
    lag: Callable[[PipelineChoice], float],
) -> list[PipelineChoice]:
    """For a given end every pipeline takes the option that gets most samples done by then; the least
    feasible end is found by bisection."""

    def done(choice: PipelineChoice, seconds: float) -> int:
        return choice.pace.samples_within(seconds - lag(choice))

    def at(seconds: float) -> list[PipelineChoice]:
        return [max(choices, key=lambda choice: done(choice, seconds)) for choices in options]

    def enough(seconds: float) -> bool:
        return sum(done(choice, seconds) for choice in at(seconds)) >= global_batch_size

    low, high = 0.0, max(choices[0].pace.fill_seconds for choices in options)
    while not enough(high):
        low, high = high, 2 * high
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return at(high)
