"""Devices behind one small protocol: cpu, cuda, npu and emulated. Nothing else in the engine knows which."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch

from actors.engine.emulate import EmulatedDevice
from actors.engine.errors import out_of_memory, wanted_by
from actors.engine.live_memory import LiveTensors
from actors.engine.support import device_kind
from planner.plan import Plan, RankPlace

StepKind = Literal["forward", "backward", "optimizer"]


class Device(Protocol):
    """What the trainer needs of a device.

    Every step of the rank runs inside `step`; building the model and the first iterations run inside
    `measuring`, where a device that cannot tell its peak memory afterwards watches its tensors.
    """

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def steps(self) -> int:
        """Forward, backward and optimizer steps so far."""
        ...

    @property
    def late_steps(self) -> int:
        """Steps that took longer than the device that is emulated would have; 0 on a real one."""
        ...

    def step(self, kind: StepKind) -> AbstractContextManager[None]: ...

    def passed(self, region: int) -> None:
        """Inside a backward step: all gradients down to a region of the model are there. An emulated device
        is not faster than that which it emulates even then."""
        ...

    def measuring(self) -> AbstractContextManager[None]: ...

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        ...

    def peak_tensor_bytes(self) -> int:
        """Most bytes of tensors alive at once, as far as measured."""
        ...


class HostDevice:
    """The host's processor. Its memory is watched, not limited: that is the system's business."""

    def __init__(self, *, place: RankPlace, device_type: str, live: LiveTensors | None = None) -> None:
        self._live = live or LiveTensors()
        self._place, self._device_type = place, device_type
        self.steps = 0
        self.late_steps = 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @contextlib.contextmanager
    def step(self, kind: StepKind) -> Iterator[None]:
        self.steps += 1
        with _told_out_of_memory(self._place, self._device_type, _host_memory_bytes()):
            yield

    def passed(self, region: int) -> None:
        return None

    def measuring(self) -> AbstractContextManager[None]:
        return self._live.watching()

    def synchronize(self) -> None:
        return None

    def peak_tensor_bytes(self) -> int:
        return self._live.peak_bytes


class AcceleratorDevice:
    """A cuda or npu device, through torch's device-neutral interface.

    Raises RuntimeError if this process cannot see such a device.
    """

    def __init__(self, *, kind: str, index: int, place: RankPlace, device_type: str) -> None:
        if kind == "npu":
            _import_npu(place, device_type)
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != kind:
            raise RuntimeError(
                f"device {place.device} ({device_type}) needs a {kind} accelerator, but this process sees"
                f" {'none' if found is None else found.type}; install a torch built for {kind}, or plan for"
                " other devices"
            )
        self._device = torch.device(kind, visible_index(index, torch.accelerator.device_count()))
        torch.accelerator.set_device_index(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._place, self._device_type = place, device_type
        _, self._limit_bytes = torch.accelerator.get_memory_info(self._device)
        self.steps = 0
        self.late_steps = 0

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @contextlib.contextmanager
    def step(self, kind: StepKind) -> Iterator[None]:
        self.steps += 1
        with self._told():
            yield

    def passed(self, region: int) -> None:
        return None

    def measuring(self) -> AbstractContextManager[None]:
        return self._told()

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self._device)

    def peak_tensor_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self._device))

    def _told(self) -> AbstractContextManager[None]:
        return _told_out_of_memory(self._place, self._device_type, self._limit_bytes)


def _import_npu(place: RankPlace, device_type: str) -> None:
    """Register Ascend devices with torch; only their hosts have the package."""
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        raise RuntimeError(
            f"device {place.device} ({device_type}) needs torch_npu, which cannot be imported ({error});"
            " install CANN and eth-service[npu] on its host"
        ) from error


def visible_index(index: int, visible: int) -> int:
    """The ordinal of a node's device `index` in a process that sees `visible` of its kind.

    A process that was given one device sees it as ordinal 0, whatever its place in the node.
    """
    return 0 if visible == 1 else index


def index_on_node(plan: Plan, device_id: str) -> int:
    """Place of a device among those of its kind in its node: the driver's ordinal."""
    device = plan.cluster.device_by_id[device_id]
    kind = device_kind(plan, device_id)
    alike: Sequence[str] = [
        other.id
        for other in plan.cluster.devices
        if other.node == device.node and device_kind(plan, other.id) == kind
    ]
    return alike.index(device_id)


def make_device(plan: Plan, place: RankPlace) -> Device:
    """The device of a rank, ready for use in this process."""
    described = plan.cluster.device_by_id[place.device]
    if plan.cluster.node_by_name[described.node].emulate:
        return EmulatedDevice(plan, place)
    kind = device_kind(plan, place.device)
    if kind == "cpu":
        return HostDevice(place=place, device_type=described.type)
    return AcceleratorDevice(
        kind=kind, index=index_on_node(plan, place.device), place=place, device_type=described.type
    )


@contextlib.contextmanager
def _told_out_of_memory(place: RankPlace, device_type: str, limit_bytes: float) -> Iterator[None]:
    """Turn an allocator's error into one that names the device, the stage and the remedy."""
    try:
        yield
    except RuntimeError as error:
        wanted = wanted_by(error)
        if wanted is None:
            raise
        raise out_of_memory(
            place=place, device_type=device_type, wanted=wanted, limit_bytes=limit_bytes
        ) from error


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
