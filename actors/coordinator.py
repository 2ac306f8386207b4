"""Coordinator: hosts the rendezvous store and knows which process is which rank. One per job."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from torch.distributed import Store

_STORE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Rendezvous:
    """Where one generation of ranks meets."""

    host: str
    port: int
    generation: int
    timeout_seconds: float

    def store(self) -> Store:
        """A client of the store, confined to this generation's keys.

        Raises the DistStoreError of torch when the coordinator cannot be reached in time.
        """
        from torch.distributed import PrefixStore, TCPStore

        client = TCPStore(
            self.host, self.port, is_master=False, timeout=timedelta(seconds=self.timeout_seconds)
        )
        return PrefixStore(f"generation-{self.generation}", client)


@dataclass(frozen=True)
class RankProcess:
    """The process that plays a rank."""

    rank: int
    pid: int
    host: str


class Coordinator:
    """A generation is one life of the process groups; its keys never meet those of another."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore

        self._host = ray.util.get_node_ip_address()
        # Port 0: the system picks a free one, so that any number of jobs share a machine.
        self._store = TCPStore(
            self._host, 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT, multi_tenant=False
        )
        self._generation = 0
        self._processes: dict[int, RankProcess] = {}
        self._forever = threading.Event()

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Never answers: the call fails when this process ends, which tells the caller so at once."""
        self._forever.wait()

    def next_generation(self, *, timeout_seconds: float) -> Rendezvous:
        """Forget the ranks of the last generation and open a new one."""
        self._generation += 1
        self._processes.clear()
        return Rendezvous(self._host, self._store.port, self._generation, timeout_seconds)

    def register(self, processes: list[RankProcess]) -> None:
        """Note which processes play which ranks of the current generation."""
        for process in processes:
            assert process.rank not in self._processes, f"rank {process.rank} is registered twice"
            self._processes[process.rank] = process

    def ranks(self) -> list[RankProcess]:
        """The rank table of the current generation, in rank order."""
        return [self._processes[rank] for rank in sorted(self._processes)]


# Outside of the placement groups: the store must outlive a pipeline that is lost. It asks for no CPU,
# since it only listens.
_remote: Any = ray.remote  # Ray's type stubs do not know concurrency groups
CoordinatorActor: Any = _remote(num_cpus=0, max_restarts=0, concurrency_groups={"watch": 1})(Coordinator)
