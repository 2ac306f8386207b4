"""How much of the synchronisation of gradients is hidden behind the last backward."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradient_sync_plans import FAMILIES, SEEDS, changed, host_cluster, make_plan, model_of
from gradient_sync_ranks import Run, train
from rank_processes import run_ranks

from actors.engine.trainer import TrainerConfig
from actors.job import Training
from planner.cluster import Cluster
from planner.cost.gradient import block_seconds
from planner.cost.price import replica_seconds
from planner.gradient_calls import gradient_layout
from planner.plan import Plan, PlanEmulation


@dataclass(frozen=True)
class Overlap:
    """Shares of the time that collectives take on all ranks; seconds that remain after the last backward."""

    ranks: int
    depth: int
    sync_over_backward: float
    hidden: float
    hidden_without: float
    exposed_seconds: float
    exposed_without_seconds: float
    late_steps: int


def emulated_plan(depth: int, ranks: int, seed: int, wall_backward: float) -> Plan:
    """Half the devices are 910B2, half 910B4. Time runs so slow that the longest backward takes
    `wall_backward`, links so slow that a rank's gradients take on average as long as its backward of one
    micro-batch."""
    half = ranks // 2
    nodes = [
        {"name": "a", "devices": [{"type": "910B2", "count": half}], "emulate": True},
        {"name": "b", "devices": [{"type": "910B4", "count": ranks - half}], "emulate": True},
    ]
    families = {4: (((2, 1),), ((1, 1), (1, 1))), 8: (((4, 1),), ((2, 1), (1, 2)))}
    plan = make_plan(
        model_of(depth, 48, sequence=32),
        families[ranks],
        Cluster.model_validate({"nodes": nodes}),
        random.Random(1000 * depth + seed),
        samples=4,
    )
    plan = _with_link(plan, 1e9)
    backward = _rank_backward_seconds(plan)
    slower = statistics.mean(backward) / statistics.mean(_rank_sync_seconds(plan))
    plan = _with_link(plan, 1e9 / slower)
    return changed(plan, emulation=PlanEmulation(time_scale=wall_backward / max(backward)).model_dump())


def _with_link(plan: Plan, bandwidth: float) -> Plan:
    """Between nodes. Inside, where tensor parallelism stays, messages take no time."""
    links = {
        "intra_node": {"bandwidth": 1e15, "latency": 0.0},
        "inter_node": {"bandwidth": bandwidth, "latency": 0.0},
    }
    return changed(plan, cluster=plan.cluster.model_dump() | {"links": links})


def _rank_backward_seconds(plan: Plan) -> list[float]:
    return [
        replica_seconds(plan, pipeline=p.pipeline, stage=p.stage, replica=p.replica).backward
        for p in plan.ranks
    ]


def _rank_sync_seconds(plan: Plan) -> list[float]:
    layout = gradient_layout(plan)
    return [
        sum(block_seconds(plan, call) for call in layout.calls_of(rank)) for rank in range(plan.world_size)
    ]


def measure_overlap(ranks: int, depths: Sequence[int], tokens: Path, wall_backward: float) -> list[Overlap]:
    cases = [(depth, emulated_plan(depth, ranks, seed, wall_backward)) for depth in depths for seed in SEEDS]
    configs = [_config(changed(plan, overlap=on), tokens) for _, plan in cases for on in (False, True)]
    by_rank = run_ranks(train, ranks, configs, 2)
    found = []
    for index, (depth, plan) in enumerate(cases):
        without, overlapped = ([rank[2 * index + on][0] for rank in by_rank] for on in (0, 1))
        ratio = statistics.mean(_rank_sync_seconds(plan)) / statistics.mean(_rank_backward_seconds(plan))
        found.append(
            Overlap(
                ranks=ranks,
                depth=depth,
                sync_over_backward=ratio,
                hidden=hidden_share(overlapped),
                hidden_without=hidden_share(without),
                exposed_seconds=_exposed(overlapped),
                exposed_without_seconds=_exposed(without),
                late_steps=sum(run.late_steps for run in overlapped),
            )
        )
    return found


def hidden_share(runs: Sequence[Run]) -> float:
    """Of the time that ranks' collectives take, the part before the last backward of any rank ends."""
    end = max(run.compute_end for run in runs)
    total = hidden = 0.0
    for run in runs:
        for event in run.events:
            if event.kind == "gradient_sync":
                start, stop = (run.start + at for at in (event.start_seconds, event.end_seconds))
                total += stop - start
                hidden += max(0.0, min(stop, end) - start)
    return hidden / total


def _exposed(runs: Sequence[Run]) -> float:
    return max(run.sync_end for run in runs) - max(run.compute_end for run in runs)


def _config(plan: Plan, tokens: Path) -> TrainerConfig:
    training = Training(
        global_batch_size=plan.global_batch_size,
        sequence_length=plan.sequence_length,
        steps=100,
        precision="fp32",
    )
    return TrainerConfig(plan=plan, training=training, tokens=tokens, timeout_seconds=300)


def measure_real_overlap(ranks: int, depths: Sequence[int], tokens: Path, turns: int) -> dict[int, float]:
    """By depth, the median ratio of iteration times, with overlap over without, of runs in turns."""
    degrees = FAMILIES[ranks]["tp2 | tp1, tp1" if ranks == 4 else "tp4 | tp2, dp2"]
    plans = [
        make_plan(
            model_of(depth, 192, sequence=64), degrees, host_cluster(ranks), random.Random(depth), samples=4
        )
        for depth in depths
    ]
    configs = [
        _config(changed(plan, overlap=on), tokens)
        for plan in plans
        for _ in range(turns)
        for on in (False, True)
    ]
    by_rank = run_ranks(train, ranks, configs, 4)
    seconds = [
        [max(run.end - run.start for run in runs) for runs in zip(*config, strict=True)]
        for config in zip(*by_rank, strict=True)
    ]
    medians = [statistics.median(runs) for runs in seconds]
    ratios = [on / off for off, on in zip(medians[::2], medians[1::2], strict=True)]
    return {
        depth: statistics.median(ratios[index * turns : (index + 1) * turns])
        for index, depth in enumerate(depths)
    }
