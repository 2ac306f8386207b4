"""Real gloo ranks for benchmarks: spawned processes of one thread each, that one store lets meet."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def run_ranks(function: Any, world_size: int, *arguments: Any) -> list[Any]:
    """`function(rank, world_size, store, *arguments)` on spawned ranks; their results in rank order."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    queue = multiprocessing.get_context("spawn").Queue()
    context = multiprocessing.spawn(
        _serve, args=(function, world_size, store.port, queue, arguments), nprocs=world_size, join=False
    )
    results: dict[int, Any] = {}
    while len(results) < world_size:
        while queue.empty():
            context.join(timeout=0.2)
        rank, result = queue.get()
        results[rank] = result
    context.join()
    return [results[rank] for rank in range(world_size)]


def _serve(rank: int, function: Any, world_size: int, port: int, queue: Any, arguments: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    queue.put((rank, function(rank, world_size, store, *arguments)))


def meet(store: dist.Store, name: str, *, rank: int, world_size: int) -> None:
    """Wait until all ranks are here. Who leaves its groups early breaks the connections of the others."""
    store.set(f"{name} {rank}", "")
    store.wait([f"{name} {other}" for other in range(world_size)])
