"""Devices as far as a host without accelerators can tell."""

from __future__ import annotations

import pytest
import torch

from actors.engine.device import AcceleratorDevice, HostDevice, index_on_node, make_device, visible_index
from actors.engine.emulate import EmulatedDevice
from actors.engine.errors import DeviceOutOfMemory, wanted_by
from planner.cluster import Cluster, from_short_form
from planner.plan import Plan
from tests.engine.law_plans import plan_of
from tests.plans import make_model, make_plan


def _plan(types: str, *, emulate: bool = False) -> Plan:
    cluster = from_short_form(types)
    if emulate:
        data = cluster.model_dump()
        for node in data["nodes"]:
            node["emulate"] = True
        cluster = Cluster.model_validate(data)
    return make_plan(make_model(), [[(1, 1, 4)]] * len(cluster.devices), cluster=cluster)


def test_a_plans_devices_decide_the_kind() -> None:
    host, emulated = plan_of([(1, 1, 4)]), _plan("1x1:910B4", emulate=True)
    assert isinstance(make_device(host, host.ranks[0]), HostDevice)
    assert isinstance(make_device(emulated, emulated.ranks[0]), EmulatedDevice)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this host has an accelerator")
@pytest.mark.parametrize(("types", "kind"), [("1x1:A100", "cuda"), ("1x1:910B2", "npu")])
def test_a_missing_accelerator_is_named(types: str, kind: str) -> None:
    plan = _plan(types)
    with pytest.raises(RuntimeError, match=rf"device node0/0 .* needs .*{kind}"):
        make_device(plan, plan.ranks[0])


def test_a_process_with_one_device_calls_it_the_first() -> None:
    assert visible_index(3, visible=1) == 0
    assert visible_index(3, visible=8) == 3


def test_a_nodes_devices_are_numbered_by_kind() -> None:
    plan = _plan("2x2:RTX3080+2:RTX4090")
    assert [index_on_node(plan, place.device) for place in plan.ranks] == [0, 1, 2, 3, 0, 1, 2, 3]


# Words of torch for cuda, of torch_npu and of the host's allocator.
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", "20.00 MiB more"),
        ("NPU out of memory. Tried to allocate 2.50 GiB (NPU 0; 29.50 GiB", "2.50 GiB more"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 800 bytes.", "800 bytes more"),
        ("HIP out of memory", "more"),
        ("mat1 and mat2 shapes cannot be multiplied", None),
    ],
)
def test_exhausted_memory_is_told_from_other_errors(text: str, wanted: str | None) -> None:
    assert wanted_by(RuntimeError(text)) == wanted


def test_exhausted_memory_in_a_step_names_device_stage_and_remedy() -> None:
    plan = plan_of([(1, 1, 2), (1, 1, 2)])
    device = make_device(plan, plan.ranks[1])
    with pytest.raises(DeviceOutOfMemory) as told, device.step("forward"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has")
    message = str(told.value)
    assert (
        "out of memory on host/1 (kind0): pipeline 0, stage 1 wants 20.00 MiB more, the limit is" in message
    )
    assert "fewer layers" in message and "\n" not in message


def test_other_errors_of_a_step_are_left_alone() -> None:
    plan = plan_of([(1, 1, 4)])
    device = make_device(plan, plan.ranks[0])
    with pytest.raises(RuntimeError, match=r"^shapes$"), device.step("backward"):
        raise RuntimeError("shapes")


class FakeAccelerator:
    """Answers for torch.accelerator as a host with four devices would, and notes what is asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        self.asked: list[tuple[str, object]] = []
        answers = {
            "current_accelerator": torch.device(kind),
            "device_count": 4,
            "get_memory_info": (3 << 30, 8 << 30),
            "max_memory_allocated": 5 << 20,
            "set_device_index": None,
            "reset_peak_memory_stats": None,
            "synchronize": None,
        }
        for name in answers:
            monkeypatch.setattr(torch.accelerator, name, self._method(name, answers))

    def _method(self, name: str, answers: dict[str, object]) -> object:
        def method(*arguments: object, **_: object) -> object:
            self.asked.append((name, *arguments))  # type: ignore[arg-type]
            return answers[name]

        return method


def test_an_accelerator_is_chosen_measured_and_waited_for_by_its_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = _plan("1x4:A100")
    fake = FakeAccelerator(monkeypatch, "cuda")
    device = make_device(plan, plan.ranks[2])
    own = torch.device("cuda", 2)
    assert isinstance(device, AcceleratorDevice) and device.torch_device == own
    assert ("set_device_index", own) in fake.asked and ("reset_peak_memory_stats", own) in fake.asked
    with device.step("forward"), device.measuring():
        device.synchronize()
    assert ("synchronize", own) in fake.asked
    assert device.peak_tensor_bytes() == 5 << 20
    assert (device.steps, device.late_steps) == (1, 0)
    with (
        pytest.raises(DeviceOutOfMemory, match=r"wants 2.00 GiB more, the limit is 8.0 GiB"),
        device.measuring(),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has")


def test_an_accelerator_of_another_kind_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeAccelerator(monkeypatch, "xpu")
    plan = _plan("1x1:A100")
    with pytest.raises(RuntimeError, match="needs a cuda accelerator, but this process sees xpu"):
        make_device(plan, plan.ranks[0])


@pytest.mark.skipif(
    not torch.accelerator.is_available() or torch.accelerator.current_accelerator() != torch.device("cuda"),
    reason="needs a cuda device",
)
def test_a_cuda_device_computes_and_tells_its_memory() -> None:
    plan = _plan("1x1:H200")
    device = make_device(plan, plan.ranks[0])
    assert isinstance(device, AcceleratorDevice)
    with device.step("forward"):
        tensor = torch.ones(1 << 20, device=device.torch_device)
    device.synchronize()
    assert float(tensor.sum()) == 1 << 20
    assert device.peak_tensor_bytes() >= 4 << 20
    with pytest.raises(DeviceOutOfMemory, match=r"wants .* more"), device.step("forward"):
        torch.empty(1 << 50, device=device.torch_device)
