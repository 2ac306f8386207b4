"""The loss of held-out samples, the same under every plan: each counts once, and nothing of training changes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from actors.engine.batches import documents_with_surplus, micro_batch_bytes, with_surplus
from actors.engine.data import HeldOutSamples
from actors.engine.device import Device
from actors.engine.hand_over import HandOver
from actors.engine.model.loss import NOT_COUNTED
from actors.engine.read_ahead import Reader, most_ready
from actors.engine.stage_runner import StageRunner
from planner.plan import Plan, RankPlace

# Losses travel as multiples of this many nats: sums of integers are the same in any order.
_UNIT = 2.0**-20


@dataclass(frozen=True)
class Validation:
    """What the model makes of text that it was not trained on, the same on every rank but for `seconds`.

    `loss` is the mean cross-entropy of the counted tokens in nats; not finite if one of them is not. `seconds`
    are wall seconds of this rank.
    """

    iteration: int
    loss: float
    samples: int
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is too large a number."""
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """How many tokens a model of this loss is as unsure between as if it guessed evenly."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class HeldOutBatches:
    """A replica's rows of held-out samples, in rounds of one global batch each, cut as training's are.

    Only the first `samples` come, and never more than there are. Of the last round a pipeline has the part of its
    range that is left; surplus rows hold token 0 and labels that are not counted. Tensors are in the host's memory.
    """

    def __init__(self, *, plan: Plan, place: RankPlace, held_out: HeldOutSamples, samples: int) -> None:
        pipeline = plan.pipelines[place.pipeline]
        self.samples = min(samples, held_out.count)
        self.rounds = -(-self.samples // plan.global_batch_size)
        self._held_out, self._sequence_length = held_out, plan.sequence_length
        self._round_samples = plan.global_batch_size
        self._micro_batch_size = pipeline.micro_batch_size
        self._range = plan.sample_ranges()[place.pipeline]
        self._rows = pipeline.stages[place.stage].row_range(place.replica)

    def micro_batches(self, number: int) -> int:
        """How many micro-batches of a round hold samples of this pipeline; the same on all of its ranks."""
        first, last = self._bounds(number)
        return -(-(last - first) // self._micro_batch_size)

    def micro_batch(self, number: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels, int64 `[rows, sequence]`, of a round's micro-batch."""
        rows = self._rows[1] - self._rows[0]
        return with_surplus(*self._held_out.batch(*self._chosen(number, index)), rows=rows)

    def documents(self, number: int, index: int) -> torch.Tensor | None:
        """Where in a micro-batch's rows documents begin, as `ReplicaBatches.documents`."""
        begins = self._held_out.documents(*self._chosen(number, index))
        return documents_with_surplus(begins, rows=self._rows[1] - self._rows[0])

    @property
    def most_ready(self) -> int:
        """How many micro-batches may lie ready ahead of the forward steps."""
        return most_ready(
            micro_batches=self.micro_batches(0),
            micro_batch_bytes=micro_batch_bytes(
                rows=self._rows[1] - self._rows[0], sequence_length=self._sequence_length
            ),
        )

    def _chosen(self, number: int, index: int) -> tuple[int, int]:
        start, last = self._bounds(number)
        start += index * self._micro_batch_size
        first, last = (min(start + row, last) for row in self._rows)
        return first, last

    def _bounds(self, number: int) -> tuple[int, int]:
        """The pipeline's samples of a round, by their places among all that are held out."""
        base = number * self._round_samples
        first, last = (min(base + place, self.samples) for place in self._range)
        return first, last


@dataclass(frozen=True)
class _Ready:
    """A micro-batch in the host's memory."""

    tokens: tuple[torch.Tensor, torch.Tensor] | None
    documents: torch.Tensor | None


class _Round:
    """The micro-batches of a round, taken from the thread that reads them when the first part of one is asked for."""

    def __init__(self, reader: Reader[_Ready], hand_over: HandOver) -> None:
        self._reader, self._hand_over = reader, hand_over
        self._index = -1
        self._ready: _Ready | None = None

    def micro_batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self._at(index).tokens
        assert tokens is not None, "the stage was said to read no tokens"
        return self._hand_over.taken(tokens[0]), self._hand_over.taken(tokens[1])

    def documents(self, index: int) -> torch.Tensor | None:
        documents = self._at(index).documents
        return None if documents is None else self._hand_over.taken(documents)

    def _at(self, index: int) -> _Ready:
        if index != self._index:
            assert index == self._index + 1, "micro-batches are asked for in their order"
            self._ready, _ = self._reader.take()
            self._index = index
        assert self._ready is not None
        return self._ready


class Evaluator:
    """Runs one rank's part of evaluations. Every rank of the world calls `run` at the same moment.

    `reads_tokens` tells whether the rank's stage needs them. A thread of `run`'s reads ahead of its forward
    steps.
    """

    def __init__(
        self,
        *,
        place: RankPlace,
        runner: StageRunner,
        batches: HeldOutBatches,
        device: Device,
        reads_tokens: bool,
    ) -> None:
        self._place, self._runner, self._batches, self._device = place, runner, batches, device
        self._reads_tokens, self._hand_over = reads_tokens, HandOver(device.torch_device)

    def run(self, iteration: int) -> Validation:
        """The loss of the parameters as they are now; `iteration` is the last that changed them."""
        start = time.monotonic()
        losses: list[torch.Tensor] = []
        counted: list[torch.Tensor] = []
        with closing(Reader(self._made(), most=self._batches.most_ready)) as reader:
            for number in range(self._batches.rounds):
                ahead = _Round(reader, self._hand_over)
                losses += self._runner.forward_only(
                    partial(_counting, ahead, counted),
                    ahead.documents,
                    micro_batches=self._batches.micro_batches(number),
                )
        self._device.synchronize()
        # TP ranks hold the same loss: the first speaks for all. Stages without a head have none.
        speaks = self._place.tp_rank == 0 and len(losses) > 0
        total, tokens = _summed(
            losses if speaks else (), counted if speaks else (), self._device.torch_device
        )
        return Validation(
            iteration=iteration,
            loss=total / tokens if tokens else math.nan,
            samples=self._batches.samples,
            tokens=tokens,
            seconds=time.monotonic() - start,
        )

    def _made(self) -> Iterator[_Ready]:
        """Every micro-batch of every round, in order."""
        self._hand_over.begin()
        for number in range(self._batches.rounds):
            for index in range(self._batches.micro_batches(number)):
                tokens = self._batches.micro_batch(number, index) if self._reads_tokens else None
                documents = self._batches.documents(number, index)
                yield _Ready(*self._hand_over.prepared_batch(tokens, documents))


def _counting(ahead: _Round, counted: list[torch.Tensor], index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch's inputs and labels; how many labels count goes into `counted`."""
    inputs, labels = ahead.micro_batch(index)
    counted.append((labels != NOT_COUNTED).sum())
    return inputs, labels


def _summed(
    losses: Sequence[torch.Tensor], counted: Sequence[torch.Tensor], device: torch.device
) -> tuple[float, int]:
    """The world's sum of losses, and its counted tokens; a loss that is not finite makes the sum NaN."""
    values = torch.stack(list(losses)).tolist() if losses else []
    tokens = int(torch.stack(list(counted)).sum()) if counted else 0
    loss = math.fsum(values)
    bad = not math.isfinite(loss)
    told = torch.tensor(
        [0 if bad else round(loss / _UNIT), tokens, int(bad)], dtype=torch.int64, device=device
    )
    dist.all_reduce(told)
    total, all_tokens, any_bad = told.tolist()
    return math.nan if any_bad else total * _UNIT, int(all_tokens)
