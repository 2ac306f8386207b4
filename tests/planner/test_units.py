from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from planner.units import Bytes, BytesPerSecond, Seconds, format_bytes, format_seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64 GiB", 64 * 2**30), ("1.5KB", 1500), ("12", 12), ("3 tib", 3 * 2**40), (7, 7)],
)
def test_bytes(text: object, expected: int) -> None:
    assert TypeAdapter(Bytes).validate_python(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("200 Gbps", 25e9),
        ("200 Gb/s", 25e9),
        ("200 Gbit/s", 25e9),
        ("25 GB/s", 25e9),
        ("25 GBps", 25e9),
        ("1 GiB/s", 2.0**30),
        ("8 b/s", 1.0),
        (5.0, 5.0),
    ],
)
def test_bandwidth(text: object, expected: float) -> None:
    assert TypeAdapter(BytesPerSecond).validate_python(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("10 us", 1e-5), ("10 µs", 1e-5), ("2ms", 2e-3), (3, 3.0)])
def test_seconds(text: object, expected: float) -> None:
    assert TypeAdapter(Seconds).validate_python(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "text", "hint"),
    [
        (Bytes, "64 GX", "use B, KB"),
        (Bytes, "lots", "64 GiB"),
        (Bytes, "1.2.3 GiB", "not a quantity"),
        (Bytes, "1e999 GiB", "more bytes than can be counted"),
        (BytesPerSecond, "3 Gx/s", "GB/s"),
        (BytesPerSecond, "3 GB", "Gbps or GB/s"),
        (Seconds, "3 days", "use h, min, s"),
    ],
)
def test_a_wrong_quantity_names_what_to_write(kind: Any, text: str, hint: str) -> None:
    with pytest.raises(ValidationError, match=hint):
        TypeAdapter(kind).validate_python(text)


def test_formats() -> None:
    assert format_bytes(1536) == "1.5 KiB"
    assert format_bytes(12) == "12 B"
    assert format_bytes(-(2**31)) == "-2.0 GiB"
    assert format_seconds(0.00123) == "1.23 ms"
    assert format_seconds(2.5e-7) == "0.25 us"
