"""Process groups of a plan: the same list on every rank, made in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from actors.engine.support import device_backend
from planner.gradient_calls import reduction_groups
from planner.plan import Plan, RankPlace
from planner.replica_shards import replicas_of, shards_by_replica


@dataclass(frozen=True)
class GroupSpec:
    """One process group. `name` says what it is for; `ranks` are ascending."""

    name: str
    ranks: tuple[int, ...]


def tp_group_name(place: RankPlace) -> str:
    """Name of the TP group of a rank's replica."""
    return f"tp {place.pipeline}.{place.stage}.{place.replica}"


def exchange_group_name(kind: str, pipeline: int) -> str:
    """Name of a pipeline's group for messages of one kind, `activations` or `gradients`.

    A group a direction: where messages of one pair share a queue (NCCL, HCCL), a send must never wait
    behind a receive of the other direction.
    """
    return f"{kind} {pipeline}"


def reduction_group_name(ranks: Sequence[int]) -> str:
    """Name of a group that gradients are summed over."""
    return "reduction " + ",".join(map(str, ranks))


def replica_group_name(ranks: Sequence[int]) -> str:
    """Name of the group of a stage's replicas that share gradients or optimizer state.

    Not the group that calls of the same ranks use: those may be under way, on a thread of their own, while
    backward scatters.
    """
    return "replicas " + ",".join(map(str, ranks))


def group_specs(plan: Plan) -> tuple[GroupSpec, ...]:
    """Every group of more than one rank, in the order in which they are made. Pure: depends on the plan."""
    specs: dict[str, tuple[int, ...]] = {}
    members: dict[str, list[int]] = {}
    for place in plan.ranks:
        members.setdefault(tp_group_name(place), []).append(place.rank)
    for index, pipeline in enumerate(plan.pipelines):
        if len(pipeline.stages) > 1:
            ranks = [place.rank for place in plan.ranks if place.pipeline == index]
            for kind in ("activations", "gradients"):
                members[exchange_group_name(kind, index)] = ranks
    for name, ranks in members.items():
        specs[name] = tuple(ranks)
    for group in reduction_groups(plan):
        specs[reduction_group_name(group)] = group
    if shards_by_replica(plan):
        for place in plan.ranks:
            replicas = replicas_of(plan, place.rank)
            specs[replica_group_name(replicas)] = replicas
    return tuple(GroupSpec(name, ranks) for name, ranks in specs.items() if len(ranks) > 1)


# A process may see several generations of groups. DTensor keeps what it worked out for a mesh by the mesh's
# ranks and dim names, and with it the groups of a generation that is gone: so no two share a dim name.
_GENERATIONS = itertools.count()


_CHECKPOINT_TIMEOUT = timedelta(hours=1)


class ProcessGroups:
    """The groups of one rank, from `open` to `close`; one at a time in a process, as torch has one world.

    A wait for a peer longer than the timeout raises; so does a wait for one that died.
    """

    def __init__(self, groups: dict[GroupSpec, dist.ProcessGroup], *, checkpoints: dist.ProcessGroup) -> None:
        self._groups = groups
        self._checkpoints: dist.ProcessGroup | None = checkpoints
        self._by_name = {spec.name: group for spec, group in groups.items()}
        self._generation = next(_GENERATIONS)

    @classmethod
    def open(
        cls,
        *,
        plan: Plan,
        rank: int,
        store: dist.Store,
        timeout_seconds: float,
        device: torch.device,
    ) -> ProcessGroups:
        """Meet all ranks at the store and make this rank's groups."""
        timeout = timedelta(seconds=timeout_seconds)
        dist.init_process_group(
            device_backend(plan, plan.ranks[rank].device),
            store=store,
            rank=rank,
            world_size=plan.world_size,
            timeout=timeout,
            device_id=device if device.type != "cpu" else None,
        )
        made = {}
        for spec in group_specs(plan):
            # On every rank, since torch numbers groups as it makes them and members meet by that number.
            # Those outside a group pass by: no rank waits for more than the group's other members.
            group = dist.new_group(list(spec.ranks), timeout=timeout, group_desc=spec.name)
            if rank in spec.ranks:
                made[spec] = group
        # Saving goes on in the background, beside training and on the host's processor. A slow disk is no hang.
        checkpoints = dist.new_group(backend="gloo", timeout=_CHECKPOINT_TIMEOUT, group_desc="checkpoints")
        assert checkpoints is not None
        return cls(made, checkpoints=checkpoints)

    def checkpoints(self) -> dist.ProcessGroup:
        """A CPU group of the whole world, for saving alone."""
        assert self._checkpoints is not None, "the groups are closed"
        return self._checkpoints

    def tp_group(self, place: RankPlace) -> dist.ProcessGroup | None:
        """The TP group of a rank's replica; None without TP."""
        return self._by_name.get(tp_group_name(place))

    def tp_mesh(self, place: RankPlace, device: torch.device) -> DeviceMesh | None:
        """The mesh of the replica's TP group; None without TP."""
        group = self.tp_group(place)
        if group is None:
            return None
        return DeviceMesh.from_group(group, device.type, mesh_dim_names=(f"tp{self._generation}",))

    def exchange(self, kind: str, pipeline: int) -> dist.ProcessGroup | None:
        """The group for messages of one kind in a pipeline; None if it has a single stage."""
        return self._by_name.get(exchange_group_name(kind, pipeline))

    def reductions(self) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """The groups that this rank sums gradients over, by their ranks."""
        return {
            spec.ranks: group
            for spec, group in self._groups.items()
            if spec.name == reduction_group_name(spec.ranks)
        }

    def replicas(self) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """The group of those that hold what this rank holds in its stage, by its ranks, if ZeRO needs it."""
        return {
            spec.ranks: group
            for spec, group in self._groups.items()
            if spec.name == replica_group_name(spec.ranks)
        }

    def abort(self) -> None:
        """After a failure: cut the connections, so that peers fail at once and not at their timeout.

        Only gloo can do so with collectives under way; elsewhere the end of the process does it.
        """
        if dist.is_initialized() and dist.get_backend() == "gloo":
            self.close()

    def close(self) -> None:
        """Leave all groups; peers that still wait for this rank get an error."""
        self._groups.clear()
        self._by_name.clear()
        self._checkpoints = None
        if dist.is_initialized():
            dist.destroy_process_group()
