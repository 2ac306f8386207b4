"""Which transports a rank uses: those of its process groups, paced where the device is emulated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.engine.device import Device
from actors.engine.emulate import PacedCalls, PacedMessages, PacedShards
from actors.engine.exchange import GroupTransport as GroupMessages
from actors.engine.exchange import MessageKind, MessageTransport
from actors.engine.gradient_transport import CallTransport, Groups, make_transport
from actors.engine.process_groups import ProcessGroups
from actors.engine.shard_transport import ShardTransport, make_shard_transport
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
