"""Parameters as a rank's stage holds them, without a model around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from actors.engine.gradient_buffer import GradientBuffer
from actors.engine.gradient_sync import GradientSync
from actors.engine.gradient_transport import CallTransport, make_transport
from actors.engine.weights import initial_parameter, shard
from planner.gradient_blocks import GradientBlock, gradient_blocks, rank_blocks
from planner.gradient_calls import gradient_layout, reduction_groups
from planner.parameters import Parameter, stage_parameters
from planner.plan import Plan


@dataclass(frozen=True)
class HeldLeaf:
    spec: Parameter
    leaf: torch.nn.Parameter
    tp: int
    tp_rank: int

    @property
    def local(self) -> torch.Tensor:
        return self.leaf.detach()


def make_handles(
    plan: Plan, rank: int, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[HeldLeaf]:
    """The parameters of a rank's stage with their initial values."""
    place = plan.ranks[rank]
    stage = plan.pipelines[place.pipeline].stages[place.stage]
    handles = []
    for parameter in stage_parameters(plan.model, stage):
        whole = initial_parameter(parameter, model=plan.model, seed=seed)
        local = shard(parameter, whole, tp=stage.tp, tp_rank=place.tp_rank).to(dtype)
        handles.append(HeldLeaf(parameter, torch.nn.Parameter(local), stage.tp, place.tp_rank))
    return handles


def own_blocks(plan: Plan, rank: int) -> tuple[GradientBlock, ...]:
    return rank_blocks(gradient_blocks(plan), rank)


def gradient_groups(
    plan: Plan, rank: int, *, timeout_seconds: float = 60.0
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A process group for each set of ranks that the plan's gradients need and the rank belongs to.

    Every rank makes every group, which costs those outside it nothing: torch names a group made with
    `use_local_synchronization` by how many groups the rank has, and ranks of unlike stages differ in that.
    """
    timeout = timedelta(seconds=timeout_seconds)
    groups = {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in reduction_groups(plan)}
    return {ranks: group for ranks, group in groups.items() if rank in ranks}


@dataclass(frozen=True)
class Rig:
    """A rank's parameters, their gradient buffer, and what synchronises it as the plan says."""

    handles: list[HeldLeaf]
    buffer: GradientBuffer
    sync: GradientSync

    @classmethod
    def make(
        cls,
        plan: Plan,
        rank: int,
        *,
        groups: dict[tuple[int, ...], dist.ProcessGroup] | None = None,
        transport: CallTransport | None = None,
        before_launch: Callable[[int], None] | None = None,
    ) -> Rig:
        layout = gradient_layout(plan)
        handles = make_handles(plan, rank)
        sections = layout.sections_of(rank)
        buffer = GradientBuffer(handles=handles, blocks=own_blocks(plan, rank), sections=sections)
        if transport is None:
            transport = rig_transport(plan, rank, gradient_groups(plan, rank) if groups is None else groups)
        sync = GradientSync(
            buffer=buffer, layout=layout, rank=rank, transport=transport, before_launch=before_launch
        )
        return cls(handles, buffer, sync)

    def run_once(self) -> None:
        """Synchronise what is in the buffer."""
        self.sync.start()
        self.sync.finish()


def rig_transport(plan: Plan, rank: int, groups: dict[tuple[int, ...], dist.ProcessGroup]) -> CallTransport:
    calls = gradient_layout(plan).calls_of(rank)
    return make_transport(plan, groups, rank=rank, calls=calls, device=torch.device("cpu"))


def contribution(
    parameter: Parameter, *, pipeline: int, stage: int, replica: int, micro_batch: int
) -> torch.Tensor:
    """A made-up gradient of a whole parameter: what one replica of one stage adds for a micro-batch."""
    text = f"{parameter.name} {pipeline} {stage} {replica} {micro_batch}"
    return initial_gradient(text, parameter.shape)


def initial_gradient(text: str, shape: tuple[int, ...]) -> torch.Tensor:
    seed = int.from_bytes(text.encode(), "little") % (2**62)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
