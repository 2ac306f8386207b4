"""Built-in device types: the paper's Table 1 and common accelerators, by every name they are reported as."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from planner.errors import Contract, UserError, did_you_mean
from planner.units import Bytes, BytesPerSecond

Backend = Literal["cpu", "cuda", "npu"]
_GIB, _GB = 1024**3, 1e9


class DeviceType(Contract):
    """Datasheet figures of one kind of accelerator.

    `peak_tflops` maps a precision (`fp32`, `fp16`, `bf16`) to dense 10^12 FLOP/s of its matrix units.
    """

    backend: Backend
    peak_tflops: dict[Literal["fp32", "fp16", "bf16"], Annotated[float, Field(gt=0)]] = Field(min_length=1)
    memory_bytes: Bytes = Field(gt=0)
    memory_bandwidth: BytesPerSecond
    price_per_hour: float | None = Field(default=None, ge=0, description="for one device, any currency")

    def tflops(self, precision: str) -> float:
        """Peak for a precision; 16-bit types stand in for each other, else the slowest known is used."""
        table = {str(name): value for name, value in self.peak_tflops.items()}
        if precision in table:
            return table[precision]
        twin = {"bf16": "fp16", "fp16": "bf16"}.get(precision, "")
        return table.get(twin) or min(table.values())


def _device(
    backend: Backend, half: float, single: float, memory_gib: float, bandwidth_gb: float
) -> DeviceType:
    return DeviceType(
        backend=backend,
        peak_tflops={"fp32": single, "fp16": half, "bf16": half},
        memory_bytes=int(memory_gib * _GIB),
        memory_bandwidth=bandwidth_gb * _GB,
    )


# Half-precision TFLOPS and memory of the first five: the paper's Table 1. Its "Bandwidth" column is
# ambiguous, so memory bandwidth is the vendors' figure. Single precision is TF32 where the device has it
# and torch would use it for matrix products, since that is what an fp32 job sees on the matrix units.
CATALOGUE: dict[str, DeviceType] = {
    "910B2": _device("npu", 376, 94, 64, 1600),
    "910B3": _device("npu", 313, 78, 64, 1600),
    "910B4": _device("npu", 280, 70, 32, 800),
    "A100": _device("cuda", 312, 156, 80, 2039),
    "A100-40": _device("cuda", 312, 156, 40, 1555),
    "RTX3090": _device("cuda", 80, 40, 24, 936),
    "H100": _device("cuda", 989, 494, 80, 3350),
    "H200": _device("cuda", 989, 494, 141, 4800),
    "GH200": _device("cuda", 989, 494, 96, 4000),
    "V100-16": _device("cuda", 125, 15.7, 16, 900),
    "V100-32": _device("cuda", 125, 15.7, 32, 900),
    "RTX2080Ti": _device("cuda", 54, 13.4, 11, 616),
    "RTX3080": _device("cuda", 59, 29.8, 10, 760),
    "RTX4090": _device("cuda", 165, 82.6, 24, 1008),
    "A6000": _device("cuda", 155, 77.4, 48, 768),
    "L40S": _device("cuda", 362, 183, 48, 864),
    "CPU": _device("cpu", 0.05, 0.1, 8, 20),
}

# Spellings that Ray, nvidia-smi, npu-smi and torch report, after `_fold`.
_ALIASES = {
    "ascend910b2": "910B2",
    "ascend910b3": "910B3",
    "ascend910b4": "910B4",
    "ascend910b": "910B2",
    "a10080gb": "A100",
    "a10080g": "A100",
    "a100sxm480gb": "A100",
    "a100pcie80gb": "A100",
    "a10080gbpcie": "A100",
    "a100sxm80gb": "A100",
    "a10040gb": "A100-40",
    "a10040g": "A100-40",
    "a100sxm440gb": "A100-40",
    "a100pcie40gb": "A100-40",
    "geforcertx3090": "RTX3090",
    "3090": "RTX3090",
    "h10080gbhbm3": "H100",
    "h100pcie": "H100",
    "h100sxm": "H100",
    "h10080g": "H100",
    "h200141gbhbm3e": "H200",
    "h200sxm": "H200",
    "gh200480gb": "GH200",
    "gh20096gb": "GH200",
    "v100": "V100-32",
    "v10016gb": "V100-16",
    "v10032gb": "V100-32",
    "teslav100": "V100-32",
    "v100sxm216gb": "V100-16",
    "teslav100sxm216gb": "V100-16",
    "teslav100pcie16gb": "V100-16",
    "teslav100sxm232gb": "V100-32",
    "teslav100sxm332gb": "V100-32",
    "teslav100pcie32gb": "V100-32",
    "geforcertx2080ti": "RTX2080Ti",
    "2080ti": "RTX2080Ti",
    "geforcertx3080": "RTX3080",
    "3080": "RTX3080",
    "geforcertx4090": "RTX4090",
    "4090": "RTX4090",
    "rtxa6000": "A6000",
    "l40sxm": "L40S",
}


def _fold(name: str) -> str:
    folded = re.sub(r"[^a-z0-9]", "", name.lower())
    for vendor in ("nvidia", "huawei", "acceleratortype"):
        folded = folded.removeprefix(vendor)
    return folded


_FOLDED = {_fold(name): name for name in CATALOGUE}


def canonical_name(name: str) -> str | None:
    """The catalogue's name for a device as a user, Ray or a driver spells it; None if unknown."""
    folded = _fold(name)
    return _FOLDED.get(folded) or _ALIASES.get(folded)


def lookup(name: str) -> tuple[str, DeviceType]:
    """Canonical name and datasheet; UserError that lists the known types."""
    known = canonical_name(name)
    if known is None:
        raise UserError(
            f"device type {name!r} is not known; use one of {', '.join(CATALOGUE)}"
            f" or describe it under device_types in the cluster file{did_you_mean(name, CATALOGUE)}"
        )
    return known, CATALOGUE[known]
