"""The windows of a text and its documents: which tokens a window holds, which labels count, where documents begin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.engine.tokens import Indices, TokenFile

Counts = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Documents:
    """What the boundaries of documents do.

    With `attention` no token sees another document's, and no label leads from one into the next. With `packing` a
    window ends where a document does, unless the next is longer than a window: only such are cut.
    """

    attention: bool = False
    packing: bool = False


PLAIN = Documents()


class TextWindows:
    """The windows of one text, each read with the token after it. UserError if the text is shorter than a sample;
    `told` is what that calls it.

    Without packing they lie end to end. With it they do so too, but hold fewer tokens where the next document would
    not fit; token 0 fills the rest, as a document of its own whose labels do not count.
    """

    def __init__(
        self, text: TokenFile, *, sequence_length: int, documents: Documents, told: str = "the data"
    ) -> None:
        self._text, self._length, self._documents = text, sequence_length, documents
        plain = text.windows(sequence_length, told=told)
        self._bounds = text.packed(sequence_length) if documents.packing else None
        self.count = plain if self._bounds is None else len(self._bounds) - 1

    def read(self, windows: Indices) -> tuple[Indices, Indices, Counts | None]:
        """Inputs and labels, int64 `[windows, sequence_length]`, and which labels count, None if all do. The label of a
        token is the next one."""
        starts, lengths = self._ranges(windows)
        if self._documents == PLAIN:
            tokens = self._text.read(starts, self._length + 1)
            return tokens[:, :-1], tokens[:, 1:], None
        # What reaches past the text's end is read from before it, and moved.
        reachable = np.minimum(starts, self._text.count - self._length - 1)
        tokens = self._text.read(reachable, self._length + 1)
        places = np.arange(self._length)
        held = places < lengths[:, None]
        counts = held & (starts[:, None] + places + 1 < self._text.count)
        for row, (start, length, moved) in enumerate(zip(starts, lengths, starts - reachable, strict=True)):
            tokens[row] = np.roll(tokens[row], -moved)
            if self._documents.attention:
                counts[row, self._ends(start, length) - 1] = False
        return np.where(held, tokens[:, :-1], 0), tokens[:, 1:], counts

    def begins(self, windows: Indices) -> npt.NDArray[np.int32]:
        """Where, in its window, the document of each token begins: `[windows, sequence_length]`."""
        found = np.zeros((len(windows), self._length), dtype=np.int32)
        for row, start, length in zip(found, *self._ranges(windows), strict=True):
            ends = self._ends(start, length)
            ends = ends[ends < self._length]
            row[ends] = ends
        made: npt.NDArray[np.int32] = np.maximum.accumulate(found, axis=1)
        return made

    def counted(self, windows: Indices) -> int:
        """How many labels of these windows count; worked out from where documents end, without the tokens."""
        starts, lengths = self._ranges(windows)
        stops = starts + lengths
        if self._documents.attention:
            ends = self._text.ends
            left_out = ends.searchsorted(stops, side="right") - ends.searchsorted(starts, side="right")
        else:
            left_out = stops == self._text.count
        return int((lengths - left_out).sum())

    def _ranges(self, windows: Indices) -> tuple[Indices, Indices]:
        """The first token of each, and how many it holds."""
        if self._bounds is None:
            return windows * self._length, np.full_like(windows, self._length)
        starts = self._bounds[windows]
        return starts, self._bounds[windows + 1] - starts

    def _ends(self, start: int, length: int) -> Indices:
        """How many of the tokens from `start` each document's last is the last of, up to `length`."""
        ends = self._text.ends
        first, last = ends.searchsorted([start, start + length], side="right")
        within: Indices = ends[first:last] - start
        return within
