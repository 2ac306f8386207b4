"""Which transports a rank uses: those of its process groups, paced where the device is emulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from actors.engine.device import Device
from actors.engine.emulate import PacedCalls, PacedGather, PacedMessages, PacedParts, PacedShards
from actors.engine.exchange import GroupGather, MessageKind, MessageTransport, SliceGather
from actors.engine.exchange import GroupTransport as GroupMessages
from actors.engine.gradient_transport import WIRES, CallTransport, Groups, Steps, make_transport
from actors.engine.process_groups import ProcessGroups
from actors.engine.replica_buffer import HeldPart
from actors.engine.replica_shards import PartTransport, ReplicaShards
from actors.engine.shard_transport import ShardTransport, make_shard_transport
from planner.collectives import SCATTER_SEGMENT
from planner.gradient_calls import GradientCall
from planner.plan import Plan, RankPlace


def message_transports(
    plan: Plan, place: RankPlace, groups: ProcessGroups
) -> dict[MessageKind, MessageTransport]:
    """Activations and gradients between the stages of the rank's pipeline."""
    kinds: tuple[MessageKind, ...] = ("activations", "gradients")
    found: dict[MessageKind, MessageTransport] = {}
    for kind in kinds:
        group = groups.exchange(kind, place.pipeline)
        if group is not None:
            found[kind] = GroupMessages(group)
    if plan.cluster.emulated:
        return {kind: PacedMessages(inner, plan=plan, place=place) for kind, inner in found.items()}
    return found


def slice_gather(plan: Plan, place: RankPlace, groups: ProcessGroups) -> SliceGather | None:
    """What the rank's TP group gathers slices of messages with; None without TP."""
    group = groups.tp_group(place)
    if group is None:
        return None
    inner = GroupGather(group)
    return PacedGather(inner, group=group, plan=plan, place=place) if plan.cluster.emulated else inner


def gradient_transport(
    plan: Plan, rank: int, calls: Sequence[GradientCall], groups: Groups, device: Device
) -> CallTransport:
    """Gradients summed whole on every holder."""
    transport = make_transport(plan, groups, rank=rank, calls=calls, device=device.torch_device)
    return PacedCalls(transport, groups=groups, plan=plan) if plan.cluster.emulated else transport


def shard_transport(
    plan: Plan, rank: int, groups: Groups, *, parameter_dtype: torch.dtype, device: Device
) -> ShardTransport:
    """Gradients summed to shards, and parameters gathered from them."""
    transport = make_shard_transport(
        plan,
        groups,
        rank=rank,
        parameter_dtype=parameter_dtype,
        device=device.torch_device,
    )
    return PacedShards(transport, groups=groups, plan=plan) if plan.cluster.emulated else transport


def scatter_steps(plan: Plan, rank: int, inside: Groups, device: Device) -> Steps:
    """What gradients are scattered with over the replicas of the rank's stage."""
    return Steps(
        inside,
        rank=rank,
        wire=WIRES[plan.dtypes.wire],
        device=device.torch_device,
        segment=SCATTER_SEGMENT,
    )


def part_transport(
    plan: Plan,
    rank: int,
    groups: Groups,
    *,
    replicas: tuple[int, ...],
    inside: Groups,
    parts: Mapping[int, Sequence[HeldPart]],
    parameter_dtype: torch.dtype,
    device: Device,
) -> PartTransport:
    """Gradients summed to shards of the replicas' pieces (`parts`, by call), and parameters gathered from them."""
    transport = ReplicaShards(
        plan,
        groups,
        rank=rank,
        replicas=replicas,
        parts=parts,
        inside=scatter_steps(plan, rank, inside, device) if plan.zero_stage == 1 else None,
        gather_inside=Steps(inside, rank=rank, wire=parameter_dtype, device=device.torch_device),
        sums=WIRES[plan.dtypes.wire],
        values=parameter_dtype,
    )
    return PacedParts(transport, groups=groups, plan=plan) if plan.cluster.emulated else transport
