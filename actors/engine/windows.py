"""Which windows of a text are held out, and which are left to train on."""

from __future__ import annotations

import numpy as np

from actors.engine.tokens import Indices
from planner.errors import UserError


class WindowSplit:
    """Parts the windows 0..`windows` of a text: a share is held out, the others are trained on.

    Those held out stand at equal distances over the whole text: of n, the j-th (from 0) is the window in the middle
    of the j-th of n equal parts. So the split follows from the number of windows and the share alone: no seed and
    no plan has a part in it, and no table is kept. Raises UserError if nothing would be left; `told` is what it
    calls the text.
    """

    def __init__(self, windows: int, share: float, *, told: str = "the text") -> None:
        assert windows < 2**31, "products of two counts must fit 64 bits"
        self._windows = windows
        self.held_out = max(1, round(windows * share)) if share else 0
        self.training = windows - self.held_out
        if self.training < 1:
            raise UserError(
                f"data.held_out = {share:g} leaves nothing to train on: {told} holds {windows} sample"
                f"{'s' if windows > 1 else ''}; shorten training.sequence_length, give more text, or hold out less"
            )

    def held_out_windows(self, indices: Indices) -> Indices:
        """The windows with these indices among those held out, in the order of the text."""
        # Nothing held out: the division by none is never asked for.
        made: Indices = (2 * indices + 1) * self._windows // (2 * self.held_out)
        return made

    def training_windows(self, indices: Indices) -> Indices:
        """The windows with these indices among those left, in the order of the text."""
        # Bisection for how many held-out windows lie before: the j-th has `window - j` others before it.
        low = np.zeros_like(indices)
        high = np.full_like(indices, self.held_out)
        while (open_ := low < high).any():
            middle = np.minimum((low + high) // 2, self.held_out - 1)
            passed = self.held_out_windows(middle) - middle <= indices
            low = np.where(open_ & passed, middle + 1, low)
            high = np.where(open_ & ~passed, middle, high)
        return indices + low
