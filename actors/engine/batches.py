"""A replica's rows of every micro-batch of its pipeline (law 2 of docs/architecture.md)."""

from __future__ import annotations

import torch

from actors.engine.data import Samples
from actors.engine.model.dropout import Draws
from actors.engine.model.loss import NOT_COUNTED
from planner.plan import Plan, RankPlace


def with_surplus(
    inputs: torch.Tensor, labels: torch.Tensor, *, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels `[.., sequence]` with rows of token 0 behind them, whose labels are not counted, up to
    `rows`."""
    surplus, length = rows - inputs.shape[0], inputs.shape[1]
    if not surplus:
        return inputs, labels
    return (
        torch.cat([inputs, inputs.new_zeros(surplus, length)]),
        torch.cat([labels, labels.new_full((surplus, length), NOT_COUNTED)]),
    )


def documents_with_surplus(begins: torch.Tensor | None, *, rows: int) -> torch.Tensor | None:
    """Where documents begin, `[.., sequence]`, with surplus rows of one document behind them, up to `rows`."""
    if begins is None or len(begins) == rows:
        return begins
    return torch.cat([begins, begins.new_zeros(rows - len(begins), begins.shape[1])])


def micro_batch_bytes(*, rows: int, sequence_length: int) -> int:
    """Of inputs, labels and where documents begin."""
    return (8 + 8 + 4) * rows * sequence_length


class ReplicaBatches:
    """Cuts a pipeline's range of the global batch into micro-batches, and those by the stage's `rows`.

    The last micro-batch may reach past the pipeline's samples; the surplus rows hold token 0 and labels
    that are not counted. Tensors are in the host's memory.
    """

    def __init__(self, *, plan: Plan, place: RankPlace, samples: Samples) -> None:
        pipeline = plan.pipelines[place.pipeline]
        self._samples = samples
        self._sequence_length = plan.sequence_length
        self._micro_batch_size = pipeline.micro_batch_size
        self._first, self._last = plan.sample_ranges()[place.pipeline]
        self._rows = pipeline.stages[place.stage].row_range(place.replica)

    def micro_batch(self, iteration: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels, int64 `[rows, sequence]`, of one micro-batch of an iteration (from 1)."""
        inputs, labels = self._samples.batch(iteration, *self._range(index))
        return with_surplus(inputs, labels, rows=self._rows[1] - self._rows[0])

    def documents(self, iteration: int, index: int) -> torch.Tensor | None:
        """Where in the micro-batch's rows each token's document begins, int32 `[rows, sequence]`; None where attention
        knows no documents."""
        begins = self._samples.documents(iteration, *self._range(index))
        return documents_with_surplus(begins, rows=self._rows[1] - self._rows[0])

    def counted(self, iteration: int) -> int:
        """How many labels of the iteration's global batch count."""
        return self._samples.counted(iteration)

    def draws(self, iteration: int, index: int) -> Draws:
        """What decides dropout in one micro-batch: the same for a sample wherever it is trained."""
        first = self._first + index * self._micro_batch_size + self._rows[0]
        return Draws(seed=self._samples.seed, iteration=iteration, first_sample=first)

    @property
    def micro_batch_bytes(self) -> int:
        """As the function of this name."""
        return micro_batch_bytes(rows=self._rows[1] - self._rows[0], sequence_length=self._sequence_length)

    def _range(self, index: int) -> tuple[int, int]:
        """The micro-batch's rows as samples of the global batch, without those that reach past the pipeline's."""
        start = self._first + index * self._micro_batch_size
        first, last = (min(start + row, self._last) for row in self._rows)
        return first, last
