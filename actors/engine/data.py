"""Which samples form an iteration, and the tensors of them.

The text is cut into windows of `sequence_length` tokens, each read with the token after it. Some may be held
out; an epoch takes every other window once, in an order that the seed and the epoch decide; iterations take the
next `global_batch_size` windows. So what an iteration trains on depends on the seed and the iteration, never
on the plan, and any rank can name its samples without having seen the ones before.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch

from actors.engine.tokens import HeldOut, Indices, TokenFile
from actors.engine.windows import WindowSplit

_ROUNDS = 6


class Samples:
    """The samples of a training run, read from a token file, but for the share that is held out.

    Raises UserError if the text is shorter than one sample, or nothing is left to train on.
    """

    def __init__(
        self,
        tokens: TokenFile,
        *,
        sequence_length: int,
        global_batch_size: int,
        seed: int,
        held_out_share: float = 0.0,
    ) -> None:
        self._tokens = tokens
        self._sequence_length = sequence_length
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._split = WindowSplit(tokens.windows(sequence_length), held_out_share)
        self._known: tuple[int, Indices] | None = None

    @property
    def seed(self) -> int:
        return self._seed

    def batch(self, iteration: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples [first, last) of an iteration's global batch; iterations count from 1.

        Returns inputs and labels, int64 `[last - first, sequence_length]`; a label is the next token.
        """
        assert 0 <= first <= last <= self._global_batch_size, (first, last)
        chosen = self._positions(iteration)[first:last]
        return read_windows(self._tokens, chosen, sequence_length=self._sequence_length)

    def _positions(self, iteration: int) -> Indices:
        # An iteration's micro-batches ask one after the other.
        if self._known is None or self._known[0] != iteration:
            positions = sample_positions(
                seed=self._seed,
                iteration=iteration,
                global_batch_size=self._global_batch_size,
                windows=self._split.training,
            )
            self._known = (iteration, self._split.training_windows(positions))
        return self._known[1]


class HeldOutSamples:
    """The samples that training never sees: the windows held out of its text, or all of another text.

    They come in one order for all runs that hold out the same, mixed, so that the first few stand for the whole
    text. Without anything held out there are none.
    """

    def __init__(self, tokens: TokenFile, held_out: HeldOut, *, sequence_length: int) -> None:
        self._tokens = tokens if held_out.tokens is None else TokenFile(held_out.tokens)
        self._sequence_length = sequence_length
        windows = self._tokens.windows(sequence_length)
        self._split = None if held_out.tokens is not None else WindowSplit(windows, held_out.share)
        self._count = windows if self._split is None else self._split.held_out

    @property
    def count(self) -> int:
        """How many there are."""
        return self._count

    def batch(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples [first, last) of `count`: inputs and labels as those of `Samples.batch`."""
        assert 0 <= first <= last <= self._count, (first, last)
        chosen = np.arange(first, last)
        if len(chosen):
            chosen = permuted(chosen, size=self._count, seed=0, epoch=0)
        if self._split is not None:
            chosen = self._split.held_out_windows(chosen)
        return read_windows(self._tokens, chosen, sequence_length=self._sequence_length)


def read_windows(
    tokens: TokenFile, chosen: Indices, *, sequence_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, int64 `[chosen, sequence_length]`, of windows of a text; a label is the next token."""
    both = torch.from_numpy(tokens.read(chosen * sequence_length, sequence_length + 1))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def sample_positions(*, seed: int, iteration: int, global_batch_size: int, windows: int) -> Indices:
    """Indices of the windows in an iteration's global batch, in order; iterations count from 1."""
    assert iteration >= 1
    start = (iteration - 1) * global_batch_size
    drawn = np.arange(start, start + global_batch_size)
    epochs, within = np.divmod(drawn, windows)
    positions = np.empty_like(within)
    for epoch in np.unique(epochs):
        mask = epochs == epoch
        positions[mask] = permuted(within[mask], size=windows, seed=seed, epoch=int(epoch))
    return positions


def permuted(indices: Indices, *, size: int, seed: int, epoch: int) -> Indices:
    """Where a permutation of range(size), keyed by seed and epoch, takes each index.

    A Feistel network permutes the numbers of an even count of bits, whatever its round function;
    stepping on from numbers outside the range (cycle walking) makes it a permutation of the range. It
    needs no table, so a text of any length costs no memory.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    keys = _round_keys(seed, epoch)
    values = _feistel(indices.astype(np.uint64), half, keys)
    # The domain is less than four times the range (or four), so few steps remain after each.
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
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
