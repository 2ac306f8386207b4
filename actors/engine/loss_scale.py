"""Dynamic loss scaling: fp16 gradients would vanish below 6e-8, so the loss is multiplied by a large number."""

from __future__ import annotations

from dataclasses import dataclass

from planner.plan import Precision

_FIRST = 2.0**16
_INTERVAL = 1_000


@dataclass
class LossScale:
    """A power of two that halves when a gradient overflows and doubles after `interval` that did not.

    What it does depends only on which iterations were finite, which all ranks agree on; `finite` counts those since
    the last change. Without `dynamic` it stays as it is.
    """

    value: float = 1.0
    dynamic: bool = False
    interval: int = _INTERVAL
    finite: int = 0

    @classmethod
    def of(cls, precision: Precision) -> LossScale:
        """fp16 needs one; bf16 and fp32 have the range."""
        return cls(_FIRST, dynamic=True) if precision == "fp16" else cls()

    @property
    def exhausted(self) -> bool:
        """Whether a smaller scale could not be the remedy any more."""
        return self.value <= 1.0

    def saw(self, *, finite: bool) -> None:
        """Take note of an iteration's gradient."""
        if not self.dynamic:
            return
        if not finite:
            self.value, self.finite = max(1.0, self.value / 2), 0
            return
        self.finite += 1
        if self.finite == self.interval:
            self.value, self.finite = self.value * 2, 0

    def restore(self, value: float, *, finite: int) -> None:
        """Go on where a checkpoint of the same precision left off."""
        if self.dynamic:
            self.value, self.finite = value, finite
