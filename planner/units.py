"""Quantities as people write them: '64 GiB', '200 Gbps', '25 GB/s', '10 us', and back."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BeforeValidator, Field

_BYTES = {"": 1.0, "b": 1.0} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000.0), ("ib", 1024.0))
}
_SECONDS = {"": 1.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_RATE = re.compile(r"^([kmgtKMGT]i?)?(B|b|bit)(/s|ps)$")
_QUANTITY = re.compile(r"^\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zµ/]*)\s*$", re.IGNORECASE)


def _split(value: object, example: str) -> tuple[float, str] | None:
    if not isinstance(value, str):
        return None
    match = _QUANTITY.match(value)
    if match is not None and match[1].count(".") > 1:
        match = None
    if match is None:
        raise ValueError(f"{value!r} is not a quantity; write a number or, for example, '{example}'")
    return float(match[1]), match[2]


def parse_bytes(value: object) -> object:
    """'64 GiB' -> 68719476736; numbers pass through."""
    parts = _split(value, "64 GiB")
    if parts is None:
        return value
    number, unit = parts
    if unit.lower() not in _BYTES:
        raise ValueError(
            f"unit {unit!r} of {value!r} is not known; use B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
        )
    count = number * _BYTES[unit.lower()]
    if math.isinf(count):
        raise ValueError(f"{value!r} is more bytes than can be counted")
    return int(count)


def parse_bandwidth(value: object) -> object:
    """'200 Gbps', '200 Gb/s', '200 Gbit/s' and '25 GB/s' -> 25e9 (bytes a second); numbers pass through.

    A capital B is a byte, a small b a bit.
    """
    parts = _split(value, "200 Gbps")
    if parts is None:
        return value
    number, unit = parts
    rate = _RATE.match(unit)
    if rate is None:
        raise ValueError(f"unit {unit!r} of {value!r} is not known; use Gbps or GB/s, for example")
    scale = _BYTES[f"{rate[1] or ''}b".lower()]
    return number * scale / (1 if rate[2] == "B" else 8)


def parse_seconds(value: object) -> object:
    """'10 us' -> 1e-5; numbers pass through."""
    parts = _split(value, "10 us")
    if parts is None:
        return value
    number, unit = parts
    if unit.lower() not in _SECONDS:
        raise ValueError(f"unit {unit!r} of {value!r} is not known; use h, min, s, ms, us or ns")
    return number * _SECONDS[unit.lower()]


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
BytesPerSecond = Annotated[float, BeforeValidator(parse_bandwidth), Field(gt=0)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0)]


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'; three significant figures are enough for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """0.00123 -> '1.23 ms'."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale or unit == "us":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError("unreachable")
