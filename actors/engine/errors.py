"""What a rank can fail of by itself. A peer's failure arrives as torch.distributed's own errors."""

from __future__ import annotations

import re

from planner.plan import RankPlace
from planner.units import format_bytes


class EngineError(RuntimeError):
    """A rank's own failure. The message is one line; `place` says whose it is."""

    def __init__(self, message: str, *, place: RankPlace | None = None) -> None:
        super().__init__(message)
        self.place = place


class DeviceOutOfMemory(EngineError):
    """A stage needs more memory than its device has, real or emulated: both say it in the same words."""


class NonFiniteLoss(EngineError):
    """The loss is infinite or no number. Every rank raises it in the same iteration, before any update."""


def out_of_memory(
    *, place: RankPlace, device_type: str, wanted: str, limit_bytes: float, emulated: bool = False
) -> DeviceOutOfMemory:
    """The error of a stage that does not fit; `wanted` is what it asked for, with its unit."""
    kind = f"emulated {device_type}" if emulated else device_type
    return DeviceOutOfMemory(
        f"out of memory on {place.device} ({kind}): pipeline {place.pipeline}, stage {place.stage} wants"
        f" {wanted}, the limit is {format_bytes(limit_bytes)}; give the stage fewer layers or a higher tp,"
        " or the pipeline a smaller micro_batch_size",
        place=place,
    )


_ALLOCATION = re.compile(r"[Tt]ried to allocate ([0-9.]+ \w+)")


def wanted_by(error: BaseException) -> str | None:
    """What an allocator's error says it was asked for; None if the error is not one of exhausted memory."""
    text = str(error)
    exhausted = "out of memory" in text.lower() or "can't allocate memory" in text
    if not exhausted or isinstance(error, EngineError):
        return None
    found = _ALLOCATION.search(text)
    return f"{found[1]} more" if found else "more"
