"""Which samples form an iteration, and the tensors of them.

The text is cut into windows of `sequence_length` tokens, each read with the token after it, or of whole
documents (`actors.engine.documents`). Some may be held out; an epoch takes every other window once, in an order
that the seed and the epoch decide; iterations take the next `global_batch_size` windows. So what an iteration
trains on depends on the seed and the iteration, never on the plan, and any rank can name its samples without
having seen the ones before. In a mixture the weights decide whose turn a sample is, and each text goes on
through its own epochs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from actors.engine.documents import PLAIN, Documents, TextWindows
from actors.engine.mixture import Mixture, Tokens, Turns, open_tokens, sources_of
from actors.engine.model.loss import NOT_COUNTED
from actors.engine.tokens import HeldOut, Indices
from actors.engine.windows import WindowSplit

_ROUNDS = 6


class Samples:
    """The samples of a training run, read from a text or a mixture, but for the share of each that is held out.

    Raises UserError if a text is shorter than one sample, or nothing is left to train on.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        sequence_length: int,
        global_batch_size: int,
        seed: int,
        held_out_share: float = 0.0,
        documents: Documents = PLAIN,
    ) -> None:
        self._texts = _Texts(tokens, sequence_length=sequence_length, documents=documents)
        self._turns = Turns(tokens.weights) if isinstance(tokens, Mixture) else None
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._splits = [WindowSplit(count, held_out_share) for count in self._texts.counts]
        self._known: tuple[int, Indices, Indices] | None = None

    @property
    def seed(self) -> int:
        return self._seed

    def batch(self, iteration: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples [first, last) of an iteration's global batch; iterations count from 1.

        Returns inputs and labels, int64 `[last - first, sequence_length]`; a label is the next token, or NOT_COUNTED.
        """
        return self._texts.read(*self._chosen(iteration, first, last))

    def documents(self, iteration: int, first: int, last: int) -> torch.Tensor | None:
        """Of the same samples: where in them each token's document begins, int32 `[last - first, sequence_length]`;
        None where attention knows no documents. Reads no tokens."""
        return self._texts.documents(*self._chosen(iteration, first, last))

    def counted(self, iteration: int) -> int:
        """How many labels of an iteration's global batch count. Reads no tokens."""
        return self._texts.counted(*self.positions(iteration))

    def _chosen(self, iteration: int, first: int, last: int) -> tuple[Indices, Indices]:
        assert 0 <= first <= last <= self._global_batch_size, (first, last)
        owners, windows = self.positions(iteration)
        return owners[first:last], windows[first:last]

    def positions(self, iteration: int) -> tuple[Indices, Indices]:
        """Of an iteration's global batch: which text each sample is of, and which window of it."""
        # An iteration's micro-batches ask one after the other.
        if self._known is None or self._known[0] != iteration:
            self._known = (iteration, *self._found(iteration))
        return self._known[1:]

    def _found(self, iteration: int) -> tuple[Indices, Indices]:
        drawn = drawn_samples(iteration=iteration, global_batch_size=self._global_batch_size)
        if self._turns is None:
            return np.zeros_like(drawn), self._windows(0, drawn, source=None)
        owners, before = self._turns.turns(drawn)
        windows = np.empty_like(before)
        for index in np.unique(owners).tolist():
            mine = owners == index
            windows[mine] = self._windows(index, before[mine], source=index)
        return owners, windows

    def _windows(self, index: int, drawn: Indices, *, source: int | None) -> Indices:
        split = self._splits[index]
        return split.training_windows(shuffled(drawn, windows=split.training, seed=self._seed, source=source))


class HeldOutSamples:
    """The samples that training never sees: the windows held out of its text, or all of another text.

    They come in one order for all runs that hold out the same, mixed, so that the first few stand for the whole
    text, or for all texts of a mixture, each with as many as are held out of it. Without anything held out
    there are none.
    """

    def __init__(
        self, tokens: Tokens, held_out: HeldOut, *, sequence_length: int, documents: Documents = PLAIN
    ) -> None:
        text = tokens if held_out.tokens is None else open_tokens(held_out.tokens)
        self._texts = _Texts(text, sequence_length=sequence_length, documents=documents)
        windows = self._texts.counts
        whole = held_out.tokens is not None
        self._splits = None if whole else [WindowSplit(count, held_out.share) for count in windows]
        counts = windows if self._splits is None else [split.held_out for split in self._splits]
        self._bounds = np.cumsum([0, *counts])
        self._count = int(self._bounds[-1])

    @property
    def count(self) -> int:
        """How many there are."""
        return self._count

    def batch(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples [first, last) of `count`: inputs and labels as those of `Samples.batch`."""
        return self._texts.read(*self._chosen(first, last))

    def documents(self, first: int, last: int) -> torch.Tensor | None:
        """Of the same samples, as `Samples.documents`."""
        return self._texts.documents(*self._chosen(first, last))

    def _chosen(self, first: int, last: int) -> tuple[Indices, Indices]:
        assert 0 <= first <= last <= self._count, (first, last)
        chosen = np.arange(first, last)
        if len(chosen):
            chosen = permuted(chosen, size=self._count, seed=0, epoch=0)
        owners = np.searchsorted(self._bounds, chosen, side="right") - 1
        windows = chosen - self._bounds[owners]
        if self._splits is not None:
            for index, split in enumerate(self._splits):
                mine = owners == index
                windows[mine] = split.held_out_windows(windows[mine])
        return owners, windows


class _Texts:
    """The windows of one text or of several. Chosen ones are told by their texts, `owners`, and places in them."""

    def __init__(self, tokens: Tokens, *, sequence_length: int, documents: Documents) -> None:
        self._texts = [
            TextWindows(text, sequence_length=sequence_length, documents=documents)
            for text in sources_of(tokens)
        ]
        self._length, self._attention = sequence_length, documents.attention

    @property
    def counts(self) -> list[int]:
        """How many windows each text has."""
        return [text.count for text in self._texts]

    def read(self, owners: Indices, windows: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = (torch.empty(len(windows), self._length, dtype=torch.int64) for _ in range(2))
        for text, mine, chosen in self._each(owners, windows):
            read, following, counts = text.read(chosen)
            if counts is not None:
                following = np.where(counts, following, NOT_COUNTED)
            inputs[mine], labels[mine] = torch.from_numpy(read), torch.from_numpy(following)
        return inputs, labels

    def documents(self, owners: Indices, windows: Indices) -> torch.Tensor | None:
        if not self._attention:
            return None
        found = torch.empty(len(windows), self._length, dtype=torch.int32)
        for text, mine, chosen in self._each(owners, windows):
            found[mine] = torch.from_numpy(text.begins(chosen))
        return found

    def counted(self, owners: Indices, windows: Indices) -> int:
        return sum(text.counted(chosen) for text, _, chosen in self._each(owners, windows))

    def _each(self, owners: Indices, windows: Indices) -> Iterator[tuple[TextWindows, torch.Tensor, Indices]]:
        """Every text that some of the windows are of, which of them, and their places in it."""
        for index in np.unique(owners).tolist():
            mine = owners == index
            yield self._texts[index], torch.from_numpy(mine), windows[mine]


def sample_positions(*, seed: int, iteration: int, global_batch_size: int, windows: int) -> Indices:
    """Indices of the windows in an iteration's global batch, in order; iterations count from 1."""
    drawn = drawn_samples(iteration=iteration, global_batch_size=global_batch_size)
    return shuffled(drawn, windows=windows, seed=seed)


def drawn_samples(*, iteration: int, global_batch_size: int) -> Indices:
    """The numbers, from 0 over the whole run, of the samples in an iteration's global batch."""
    assert iteration >= 1
    start = (iteration - 1) * global_batch_size
    return np.arange(start, start + global_batch_size)


def shuffled(drawn: Indices, *, windows: int, seed: int, source: int | None = None) -> Indices:
    """Which of a text's windows the samples with these numbers are: epoch after epoch, each in an order of its own.

    In a mixture the order is the source's own.
    """
    epochs, within = np.divmod(drawn, windows)
    positions = np.empty_like(within)
    for epoch in np.unique(epochs):
        mask = epochs == epoch
        positions[mask] = permuted(within[mask], size=windows, seed=seed, epoch=int(epoch), source=source)
    return positions


def permuted(indices: Indices, *, size: int, seed: int, epoch: int, source: int | None = None) -> Indices:
    """Where a permutation of range(size), keyed by seed, epoch and a mixture's source, takes each index.

    A Feistel network permutes the numbers of an even count of bits, whatever its round function;
    stepping on from numbers outside the range (cycle walking) makes it a permutation of the range. It
    needs no table, so a text of any length costs no memory.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    keys = _round_keys(seed, epoch, source)
    values = _feistel(indices.astype(np.uint64), half, keys)
    # The domain is less than four times the range (or four), so few steps remain after each.
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64)


def _round_keys(seed: int, epoch: int, source: int | None) -> npt.NDArray[np.uint64]:
    told = f"{seed} {epoch}" if source is None else f"{seed} {epoch} {source}"
    digest = hashlib.blake2b(told.encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(
    values: npt.NDArray[np.uint64], half: int, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << shift) | right


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every bit of the input changes about half the bits of the output (splitmix64's finalizer)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
