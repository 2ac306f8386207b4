"""What the ranks of the gradient synchronisation benchmark do: real gloo ranks, spawned processes."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import meet

from actors.engine.gradient_buffer import GradientBuffer, Piece
from actors.engine.gradient_sync import GradientSync
from actors.engine.gradient_transport import Groups, make_transport
from actors.engine.trainer import Trainer, TrainerConfig
from planner.gradient_blocks import gradient_blocks, rank_blocks
from planner.gradient_calls import gradient_layout, reduction_groups
from planner.parameters import Parameter, stage_parameters
from planner.plan import Plan
from planner.timeline import Event

CPU = torch.device("cpu")


@dataclass(frozen=True)
class SchemeResult:
    """One scheme on one rank. `seconds` has one entry a repetition, paired over schemes.

    `sent_bytes` is what the kernel's TCP counters saw of one synchronisation. `padding_bytes` is memory of
    the gradient buffer that holds no gradient, `scratch_bytes` how much more memory one synchronisation took.
    `difference` is the largest from the first scheme's result, relative to the largest gradient.
    """

    seconds: list[float]
    sent_bytes: int
    calls: int
    call_bytes: list[int]
    padding_bytes: int
    scratch_bytes: int
    difference: float


@dataclass(frozen=True)
class Run:
    """One iteration of one rank's training; times from the same clock on all ranks."""

    start: float
    compute_end: float
    sync_end: float
    end: float
    late_steps: int
    events: tuple[Event, ...]


@dataclass(frozen=True)
class _Held:
    spec: Parameter
    leaf: torch.nn.Parameter
    tp: int
    tp_rank: int

    @property
    def local(self) -> torch.Tensor:
        return self.leaf.detach()


def synchronise(
    rank: int, world_size: int, store: dist.Store, cells: Sequence[Sequence[Plan]], repetitions: int
) -> list[list[SchemeResult]]:
    """For each cell (the same plan under each scheme) this rank's results."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    results = [_cell(rank, plans, repetitions) for plans in cells]
    dist.destroy_process_group()
    return results


class _Scheme:
    """One plan's buffer and synchronisation on one rank."""

    def __init__(self, plan: Plan, rank: int, groups: Groups) -> None:
        self.layout = gradient_layout(plan)
        own = rank_blocks(gradient_blocks(plan), rank)
        handles = _handles(plan, rank)
        self.buffer = GradientBuffer(handles=handles, blocks=own, sections=self.layout.sections_of(rank))
        self._first = {
            handle.spec.name: handle.spec.shard_range(tp=handle.tp, tp_rank=handle.tp_rank)[0]
            for handle in handles
            if handle.spec.tp_dim is not None
        }
        self.calls = self.layout.calls_of(rank)
        transport = make_transport(plan, groups, rank=rank, calls=self.calls, device=CPU)
        self.sync = GradientSync(buffer=self.buffer, layout=self.layout, rank=rank, transport=transport)
        self.padding_bytes = 4 * (self.buffer.flat.numel() - sum(block.numel for block in own))
        self.seconds: list[float] = []

    def fill(self, gradients: dict[str, torch.Tensor]) -> None:
        self.buffer.zero()
        for piece in self.buffer.pieces():
            part = self._part(piece, gradients[piece.name])
            if piece.split:
                assert piece.tp_dim is not None
                part = part.unflatten(piece.tp_dim, piece.gradient.shape[piece.tp_dim : piece.tp_dim + 2])
            piece.gradient.copy_(part)

    def found(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the buffer holds now, as tensors like `gradients`."""
        found = {name: torch.zeros_like(whole) for name, whole in gradients.items()}
        for piece in self.buffer.pieces():
            part = self._part(piece, found[piece.name])
            part.copy_(piece.logical(piece.gradient))
        return found

    def _part(self, piece: Piece, whole: torch.Tensor) -> torch.Tensor:
        if piece.tp_range is None or piece.tp_dim is None:
            return whole
        start, stop = piece.tp_range
        return whole.narrow(piece.tp_dim, start - self._first[piece.name], stop - start)

    def close(self) -> None:
        self.sync.close()
        self.buffer.close()

    def run(self) -> float:
        """Seconds of one synchronisation, from when all ranks are ready until this one is done."""
        dist.barrier()
        start = time.perf_counter()
        self.sync.start()
        self.sync.finish()
        return time.perf_counter() - start


def _cell(rank: int, plans: Sequence[Plan], repetitions: int) -> list[SchemeResult]:
    needed = dict.fromkeys(ranks for plan in plans for ranks in reduction_groups(plan))
    made = {ranks: dist.new_group(list(ranks)) for ranks in needed}
    groups = {ranks: group for ranks, group in made.items() if rank in ranks}
    schemes = [_Scheme(plan, rank, groups) for plan in plans]
    gradients = _gradients(plans[0], rank)
    reference: dict[str, torch.Tensor] | None = None
    measured = []
    for scheme in schemes:  # Warm: connections are made, pages touched.
        scheme.fill(gradients)
        scheme.run()
        found = scheme.found(gradients)
        difference = _difference(found, reference) if reference else 0.0
        reference = reference or found
        scheme.fill(gradients)
        measured.append((difference, *_measured_once(scheme)))
    del reference, found
    for repetition in range(repetitions):
        for turn in range(len(schemes)):
            scheme = schemes[(repetition + turn) % len(schemes)]
            scheme.fill(gradients)
            scheme.seconds.append(scheme.run())
    results = [
        SchemeResult(
            seconds=scheme.seconds,
            sent_bytes=sent,
            calls=len(scheme.calls),
            call_bytes=[4 * call.numel for call in scheme.calls],
            padding_bytes=scheme.padding_bytes,
            scratch_bytes=scratch,
            difference=difference,
        )
        for scheme, (difference, sent, scratch) in zip(schemes, measured, strict=True)
    ]
    dist.barrier()
    for scheme in schemes:
        scheme.close()
    for group in groups.values():
        dist.destroy_process_group(group)
    return results


def _gradients(plan: Plan, rank: int) -> dict[str, torch.Tensor]:
    """Made-up gradients of a rank's shards; what of them is vocabulary padding is never used."""
    generator = torch.Generator().manual_seed(rank)
    return {
        handle.spec.name: torch.randn(handle.leaf.shape, generator=generator)
        for handle in _handles(plan, rank)
    }


def _difference(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    largest = max(float(tensor.abs().max()) for tensor in reference.values())
    return max(float((found[name] - tensor).abs().max()) for name, tensor in reference.items()) / largest


def _measured_once(scheme: _Scheme) -> tuple[int, int]:
    """Bytes sent, and the growth of this process's memory, in one synchronisation."""
    dist.barrier()
    time.sleep(0.1)  # acknowledgements of what came before
    sent, before = _tcp_sent_bytes(), _reset_peak_memory()
    scheme.sync.start()
    scheme.sync.finish()
    grown = _peak_memory() - before
    time.sleep(0.1)
    return _tcp_sent_bytes() - sent, grown


def _tcp_sent_bytes() -> int:
    """Payload bytes that peers have acknowledged, over all TCP connections of this process (Linux)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                connection.getpeername()
                # struct tcp_info: tcpi_bytes_acked lies 120 bytes in.
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
                total += struct.unpack_from("Q", info, 120)[0]
        except OSError:
            continue
    return total


def _reset_peak_memory() -> int:
    """Start a new peak; the memory in use now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _peak_memory() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def _handles(plan: Plan, rank: int) -> list[_Held]:
    place = plan.ranks[rank]
    stage = plan.pipelines[place.pipeline].stages[place.stage]
    return [
        _Held(
            parameter,
            torch.nn.Parameter(torch.empty(parameter.padded_shard_shape(tp=stage.tp))),
            stage.tp,
            place.tp_rank,
        )
        for parameter in stage_parameters(plan.model, stage)
    ]


def train(
    rank: int, world_size: int, store: dist.Store, configs: Sequence[TrainerConfig], iterations: int
) -> list[list[Run]]:
    """Train each configuration one after the other; every iteration but the first."""
    results = []
    for index, config in enumerate(configs):
        trainer = Trainer(config=config, rank=rank, store=dist.PrefixStore(f"run {index}", store))
        runs = []
        for iteration in range(1, iterations + 1):
            report = trainer.run_iteration(iteration)
            runs.append(
                Run(
                    start=report.start_time,
                    compute_end=report.compute_end_time,
                    sync_end=report.sync_end_time,
                    end=report.end_time,
                    late_steps=report.late_steps,
                    events=report.events,
                )
            )
        meet(store, f"done {index}", rank=rank, world_size=world_size)
        trainer.close()
        results.append(runs[1:])
    return results
