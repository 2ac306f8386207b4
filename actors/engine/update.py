"""From gradients to parameters on one rank: buffer, sums over ranks and optimizer, as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from actors.engine.device import Device
from actors.engine.gradient_buffer import GradientBuffer, ParameterGradients, Piece, SyncedGradients
from actors.engine.gradient_sync import GradientSync
from actors.engine.gradient_transport import CallTransport
from actors.engine.model.stage import ParameterHandle
from actors.engine.optimizer import Optimizer
from actors.engine.process_groups import ProcessGroups
from actors.engine.replica_buffer import ReplicaBuffer
from actors.engine.shard_store import CallShards, ReplicaShares, ShardStore
from actors.engine.shard_transport import shards_of
from actors.engine.sharded_optimizer import ShardedOptimizer
from actors.engine.transports import (
    gradient_transport,
    part_transport,
    scatter_steps,
    shard_transport,
)
from actors.job import Training
from planner.gradient_blocks import gradient_blocks, rank_blocks
from planner.gradient_calls import GradientLayout, gradient_layout
from planner.plan import Plan
from planner.replica_shards import parts_of, replicas_of, shards_by_replica


@dataclass(frozen=True)
class Update:
    """What a rank's gradients go through; `store` is where its shards are, None if it updates all it holds."""

    buffer: ParameterGradients
    sync: GradientSync
    optimizer: Optimizer | ShardedOptimizer
    store: ShardStore | None = None

    def close(self) -> None:
        """Let go of threads, groups and leaves, also after a failure: gloo's connections last as long as anyone
        refers to their group, and peers wait on them."""
        self.sync.close()
        self.buffer.close()

    def show_gradients(self, take: Callable[[Sequence[Piece]], None]) -> None:
        """Hand over every piece of the rank once, its gradient whole: summed over the world, in the parameters'
        precision under ZeRO. A collective after synchronisation, in place of the optimizer's step."""
        if self.store is None:
            take(self.buffer.pieces())
        else:
            self.store.gather(take)


class UpdateMaker:
    """Makes the Update of one rank.

    Args:
        dtype: the parameters' precision.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        rank: int,
        training: Training,
        handles: Sequence[ParameterHandle],
        groups: ProcessGroups,
        device: Device,
        dtype: torch.dtype,
    ) -> None:
        self._plan, self._rank, self._training = plan, rank, training
        self._handles, self._groups, self._device, self._dtype = handles, groups, device, dtype
        self._layout: GradientLayout = gradient_layout(plan)
        self._decays = {handle.spec.name: handle.spec.decays for handle in handles}

    def make(self) -> Update:
        """As the plan's ZeRO stage and scope say."""
        if shards_by_replica(self._plan):
            return self._by_replica()
        buffer = GradientBuffer(
            handles=self._handles,
            blocks=rank_blocks(gradient_blocks(self._plan), self._rank),
            sections=self._layout.sections_of(self._rank),
        )
        return self._by_call(buffer) if self._plan.zero_stage else self._whole(buffer)

    def _whole(self, buffer: GradientBuffer) -> Update:
        calls, groups = self._layout.calls_of(self._rank), self._groups.reductions()
        transport = gradient_transport(self._plan, self._rank, calls, groups, self._device)
        sync = self._sync(buffer, transport)
        optimizer = Optimizer(
            buffer=buffer, settings=self._training.optimizer, gradient_clip=self._training.gradient_clip
        )
        return Update(buffer, sync, optimizer)

    def _by_call(self, buffer: GradientBuffer) -> Update:
        transport = shard_transport(
            self._plan,
            self._rank,
            self._groups.reductions(),
            parameter_dtype=self._dtype,
            device=self._device,
        )
        store = CallShards(
            buffer=buffer,
            sections=self._layout.sections_of(self._rank),
            shards=shards_of(self._plan, self._layout, self._rank),
            calls=self._layout.calls_of(self._rank),
            transport=transport,
            decays=self._decays,
        )
        sync = self._sync(buffer, transport, own=store.counted())
        return Update(buffer, sync, self._sharded_optimizer(store), store)

    def _by_replica(self) -> Update:
        plan, rank = self._plan, self._rank
        replicas = replicas_of(plan, rank)
        inside = self._groups.replicas()
        buffer = ReplicaBuffer(
            handles=self._handles,
            parts=parts_of(plan, self._layout, rank),
            rank=rank,
            replicas=replicas,
            scatter=scatter_steps(plan, rank, inside, self._device) if plan.zero_stage == 2 else None,
        )
        transport = part_transport(
            plan,
            rank,
            self._groups.reductions(),
            replicas=replicas,
            inside=inside,
            parts={call.index: buffer.parts_of(call) for call in self._layout.calls_of(rank)},
            parameter_dtype=self._dtype,
            device=self._device,
        )
        store = ReplicaShares(
            buffer=buffer,
            rank=rank,
            transport=transport,
            whole_pieces=plan.zero_scope == "pipeline",
            decays=self._decays,
        )
        sync = self._sync(buffer, transport, own=store.counted())
        return Update(buffer, sync, self._sharded_optimizer(store), store)

    def _sync(
        self, buffer: SyncedGradients, transport: CallTransport, *, own: Sequence[torch.Tensor] | None = None
    ) -> GradientSync:
        return GradientSync(
            buffer=buffer,
            layout=self._layout,
            rank=self._rank,
            transport=transport,
            before_launch=self._device.passed,
            own=own,
        )

    def _sharded_optimizer(self, store: ShardStore) -> ShardedOptimizer:
        return ShardedOptimizer(
            store=store,
            parameter_dtype=self._dtype,
            settings=self._training.optimizer,
            gradient_clip=self._training.gradient_clip,
        )
