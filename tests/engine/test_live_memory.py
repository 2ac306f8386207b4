"""The count of live tensor bytes."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from actors.engine.live_memory import LiveTensors
from tests.engine.rank_pool import RankPool

KIB = 1024


def _kib(count: int) -> torch.Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8)


def test_storages_count_once_while_they_live() -> None:
    live = LiveTensors()
    with live.watching():
        a = _kib(3)
        views = [a[:10], a.view(3, KIB), a.detach()]
        assert live.live_bytes == 3 * KIB
        b = _kib(5)
        assert live.live_bytes == 8 * KIB
        del b
        assert live.live_bytes == 3 * KIB
        del a
        assert live.live_bytes == 3 * KIB, "views keep the storage"
        views.clear()
        assert live.live_bytes == 0
    assert live.peak_bytes == 8 * KIB


def test_what_dies_after_the_watch_is_noticed() -> None:
    live = LiveTensors()
    with live.watching():
        kept = _kib(2)
    unseen = _kib(64)
    with live.watching():
        assert live.live_bytes == 2 * KIB
        del kept, unseen
        assert live.live_bytes == 0


def test_an_address_used_again_is_a_new_tensor() -> None:
    live = LiveTensors()
    with live.watching():
        for _ in range(100):
            assert _kib(1).numel() == KIB
            gc.collect(0)
            assert live.live_bytes == 0
    assert live.peak_bytes == KIB


def test_saved_activations_and_gradients_are_seen() -> None:
    live = LiveTensors()
    activation, weight = 64 * 256 * 4, 256 * 256 * 4
    with live.watching():
        layer = nn.Linear(256, 256, bias=False)
        inputs = torch.randn(64, 256)
        assert live.live_bytes == weight + activation
        output = torch.relu(layer(inputs))
        # The linear layer's output is freed; that of relu is saved for backward.
        assert live.live_bytes == weight + 2 * activation
        output.sum().backward()
        del output, inputs
        assert live.live_bytes == 2 * weight, "the gradient stays"
        layer.weight.grad = None
        assert live.live_bytes == weight


def test_growth_can_be_refused_where_it_happens_also_in_backward() -> None:
    def refuse(live_bytes: int) -> None:
        if live_bytes > 40 * KIB:
            raise MemoryError(f"{live_bytes} bytes")

    live = LiveTensors(refuse)
    weight = torch.randn(8 * KIB, requires_grad=True)
    with live.watching():
        loss = weight.sum()
        with pytest.raises(MemoryError):
            # Two gradients of 32 KiB each.
            (loss + (weight * 2).sum()).backward()
    with pytest.raises(MemoryError), live.watching():
        _kib(41)


def test_tensors_without_memory_do_not_count() -> None:
    """DTensor propagates shapes through fake tensors, which say that they are on the device."""
    live = LiveTensors()
    with live.watching():
        with FakeTensorMode():
            assert (torch.empty(64 * KIB) + 1).device.type == "cpu"
        assert torch.empty(64 * KIB, device="meta").numel()
    assert live.peak_bytes == 0


def _dtensor_bytes(rank: int) -> tuple[int, int]:
    mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
    live = LiveTensors()
    with live.watching():
        cut = DTensor.from_local(torch.zeros(4 * KIB), mesh, [Shard(0)])
        local = live.live_bytes
        whole = cut.redistribute(placements=[Replicate()])
        assert whole.shape == (8 * KIB,)
        return local, live.live_bytes


def test_of_a_dtensor_its_local_tensors_count(rank_pool: RankPool) -> None:
    for local, both in rank_pool.run(_dtensor_bytes, world_size=2):
        assert local == 16 * KIB
        assert 16 * KIB + 32 * KIB <= both <= 16 * KIB + 2 * 32 * KIB
