"""Block-, tensor- and device-wise synchronisation of gradients (paper 4.3), on real gloo ranks of this host.

1. Schemes: 4, 8 and 12 ranks, four depths, two pairs of unlike pipelines each, three seeds that draw the
   stage splits. Per cell the three schemes take turns, so that each ratio is of two runs next to each other;
   medians. Bytes are what the kernel's TCP counters saw, beside the least that any scheme can do with: to sum
   the copies of an element over its h holders, g of which hold unlike addends, takes g - 1 + h - 1 transfers.
2. Overlap: emulated ranks, whose backward leaves the host free, train with and without overlap; the share
   of synchronisation that is hidden behind backward, from the trace of the second iteration.
3. Overlap on real processors: iteration time with overlap over that without, in turns.

Ranks share the host's cores: what a scheme costs is bytes moved, elements added and turns taken. One JSON
line last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradient_sync_ranks import Run, SchemeResult, run_ranks, synchronise, train

from actors.engine.tokens import prepare_tokens
from actors.engine.trainer import TrainerConfig
from actors.job import Training
from planner.catalogue import DeviceType
from planner.cluster import Cluster
from planner.cost.gradient import block_seconds
from planner.cost.price import replica_seconds
from planner.gradient_blocks import gradient_blocks
from planner.gradient_calls import gradient_layout
from planner.model_spec import ModelSpec
from planner.plan import PipelinePlan, Plan, PlanEmulation, StagePlan

SCHEMES = ("block", "tensor", "device")
TARGETS = {"tensor": 2.0, "device": 3.0}
DEPTHS = (4, 8, 12, 16)
OVERLAP_DEPTHS = (4, 8, 12, 16)
SEEDS = (0, 1, 2)

# (tp, dp) of each stage of two pipelines.
Degrees = tuple[tuple[tuple[int, int], ...], ...]
FAMILIES: dict[int, dict[str, Degrees]] = {
    4: {
        "tp2 | tp1, tp1": (((2, 1),), ((1, 1), (1, 1))),
        "tp3 | tp1": (((3, 1),), ((1, 1),)),
    },
    8: {
        "tp4 | tp2, dp2": (((4, 1),), ((2, 1), (1, 2))),
        "tp4 | tp1 x 4": (((4, 1),), ((1, 1),) * 4),
    },
    12: {
        "tp4, tp4 | tp2, dp2": (((4, 1), (4, 1)), ((2, 1), (1, 2))),
        "tp8 | tp2, dp2": (((8, 1),), ((2, 1), (1, 2))),
    },
}


def model_of(depth: int, hidden: int, *, sequence: int) -> ModelSpec:
    return ModelSpec(
        name="bench", layers=depth, hidden_size=hidden, heads=24, vocab_size=257, max_sequence_length=sequence
    )


def host_cluster(count: int) -> Cluster:
    """One node of so many devices that are the host's processor."""
    kind = DeviceType.model_validate(
        {
            "backend": "cpu",
            "peak_tflops": {"fp32": 1},
            "memory_bytes": "8 GiB",
            "memory_bandwidth": "10 GB/s",
        }
    )
    nodes = [{"name": "host", "devices": [{"type": "cpu", "count": count}]}]
    return Cluster.model_validate({"device_types": {"cpu": kind.model_dump()}, "nodes": nodes})


def make_plan(
    model: ModelSpec, degrees: Degrees, cluster: Cluster, rng: random.Random, *, samples: int, **fields: Any
) -> Plan:
    """Pipelines of these degrees; the seed draws where the layers are cut."""
    devices = iter([device.id for device in cluster.devices])
    pipelines = []
    for index, stages in enumerate(degrees):
        cuts = sorted(rng.sample(range(1, model.layers), len(stages) - 1))
        bounds = [0, *cuts, model.layers]
        made = [
            StagePlan(
                devices=tuple(next(devices) for _ in range(tp * dp)),
                tp=tp,
                dp=dp,
                rows=(2 // dp,) * dp,
                layers=(bounds[number], bounds[number + 1]),
                embedding=number == 0,
                head=number == len(stages) - 1,
            )
            for number, (tp, dp) in enumerate(stages)
        ]
        pipelines.append(
            PipelinePlan(
                id=index, micro_batch_size=2, samples=samples, local_batch_size=samples, stages=tuple(made)
            )
        )
    return Plan(
        model=model,
        cluster=cluster,
        global_batch_size=samples * len(pipelines),
        sequence_length=model.max_sequence_length,
        dtypes={"param": "fp32"},  # type: ignore[arg-type]
        pipelines=tuple(pipelines),
        **fields,
    )


def changed(plan: Plan, **fields: Any) -> Plan:
    return Plan.model_validate(plan.model_dump() | fields)


# ---- 1. Schemes


def minimum_bytes(plan: Plan) -> int:
    """Least bytes that all ranks together must send."""
    transfers = 0.0
    for block in gradient_blocks(plan):
        if (holders := len(block.holders)) > 1:
            transfers += block.numel * (sum(block.weights) - 1 + holders - 1)
    return round(4 * transfers)


def minimum_calls(plan: Plan, rank: int) -> int:
    """Sets of ranks that a rank shares elements with: a collective sums over one set."""
    return len({block.holders for block in gradient_blocks(plan) if rank in block.holders} - {(rank,)})


@dataclass(frozen=True)
class Cell:
    """Ranks, family and depth, over all seeds. Ratios are medians of paired runs of the slowest ranks."""

    ranks: int
    family: str
    depth: int
    seconds: dict[str, float]
    ratios: dict[str, float]
    bytes_over_minimum: dict[str, float]
    megabytes_sent: dict[str, float]
    calls: dict[str, int]
    minimum_calls: int
    median_call_kilobytes: dict[str, float]
    extra_megabytes: dict[str, float]
    difference: float


def measure_schemes(ranks: int, depths: Sequence[int], hidden: int, repetitions: int) -> list[Cell]:
    keys = [(family, depth, seed) for family in FAMILIES[ranks] for depth in depths for seed in SEEDS]
    plans = [
        make_plan(
            model_of(depth, hidden, sequence=64),
            FAMILIES[ranks][family],
            host_cluster(ranks),
            random.Random(1000 * depth + seed),
            samples=4,
        )
        for family, depth, seed in keys
    ]
    cells = [[changed(plan, gradient_sync=scheme) for scheme in SCHEMES] for plan in plans]
    by_rank = run_ranks(synchronise, ranks, cells, repetitions)
    found = []
    for family in FAMILIES[ranks]:
        for depth in depths:
            places = [i for i, key in enumerate(keys) if key[:2] == (family, depth)]
            results = [[rank[i] for rank in by_rank] for i in places]
            found.append(summarise(ranks, family, depth, [plans[i] for i in places], results))
    return found


def summarise(
    ranks: int, family: str, depth: int, plans: list[Plan], results: list[list[list[SchemeResult]]]
) -> Cell:
    """`results[seed][rank][scheme]`."""
    seconds: dict[str, list[float]] = {scheme: [] for scheme in SCHEMES}
    for by_rank in results:
        for index, scheme in enumerate(SCHEMES):
            runs = zip(*(rank[index].seconds for rank in by_rank), strict=True)
            seconds[scheme] += [max(run) for run in runs]

    def total(index: int, field: str) -> float:
        return statistics.median(sum(getattr(rank[index], field) for rank in by_rank) for by_rank in results)

    def most(index: int, field: str) -> int:
        return max(getattr(rank[index], field) for by_rank in results for rank in by_rank)

    named = dict(enumerate(SCHEMES))
    return Cell(
        ranks=ranks,
        family=family,
        depth=depth,
        seconds={scheme: statistics.median(seconds[scheme]) for scheme in SCHEMES},
        ratios={
            scheme: statistics.median(
                other / block for other, block in zip(seconds[scheme], seconds["block"], strict=True)
            )
            for scheme in TARGETS
        },
        bytes_over_minimum={
            scheme: statistics.median(
                sum(rank[index].sent_bytes for rank in by_rank) / minimum_bytes(plan)
                for plan, by_rank in zip(plans, results, strict=True)
            )
            for index, scheme in named.items()
        },
        megabytes_sent={scheme: total(index, "sent_bytes") / 1e6 for index, scheme in named.items()},
        calls={scheme: most(index, "calls") for index, scheme in named.items()},
        minimum_calls=max(minimum_calls(plan, rank) for plan in plans for rank in range(ranks)),
        median_call_kilobytes={
            scheme: statistics.median(
                size for by_rank in results for rank in by_rank for size in rank[index].call_bytes
            )
            / 1e3
            for index, scheme in named.items()
        },
        extra_megabytes={
            scheme: (most(index, "padding_bytes") + most(index, "scratch_bytes")) / 1e6
            for index, scheme in named.items()
        },
        difference=max(result.difference for by_rank in results for rank in by_rank for result in rank),
    )


def show_schemes(cells: list[Cell]) -> None:
    """b/t/d are block-, tensor- and device-wise; a star marks a ratio that misses its target."""
    print(
        "ranks family               depth |       seconds b/t/d |  t/b    d/b   | bytes over minimum |"
        " MB sent b/t/d | calls b/t/d (min) | median call KB | extra MB b/t/d"
    )
    for cell in cells:
        times, over, sent, calls, sizes, extra = (
            "/".join(format(values[scheme], form) for scheme in SCHEMES)
            for values, form in (
                (cell.seconds, ".3f"),
                (cell.bytes_over_minimum, ".2f"),
                (cell.megabytes_sent, ".0f"),
                (cell.calls, "d"),
                (cell.median_call_kilobytes, ".0f"),
                (cell.extra_megabytes, ".1f"),
            )
        )
        ratios = " ".join(
            f"{cell.ratios[scheme]:5.2f}{' ' if cell.ratios[scheme] >= target else '*'}"
            for scheme, target in TARGETS.items()
        )
        print(
            f"{cell.ranks:5d} {cell.family:20s} {cell.depth:5d} | {times:>19s} | {ratios} | {over:>18s} |"
            f" {sent:>13s} | {calls:>12s} ({cell.minimum_calls:2d}) | {sizes:>14s} | {extra}"
        )


# ---- 2. Overlap on emulated ranks


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


# ---- 3. Overlap on real processors


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 12])
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--backward-seconds", type=float, default=0.6, help="longest emulated backward")
    parser.add_argument("--only", choices=["schemes", "overlap", "real"], help="one part alone")
    options = parser.parse_args()

    def wanted(part: str) -> bool:
        return options.only in (None, part)

    cells: list[Cell] = []
    if wanted("schemes"):
        for ranks in options.ranks:
            cells += measure_schemes(ranks, options.depths, options.hidden, options.repetitions)
        show_schemes(cells)
    overlaps: list[Overlap] = []
    real: dict[int, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokens = _tokens(Path(folder))
        if wanted("overlap"):
            for ranks in (4, 8):
                overlaps += measure_overlap(ranks, OVERLAP_DEPTHS, tokens, options.backward_seconds)
            show_overlap(overlaps)
        if wanted("real"):
            real = {ranks: measure_real_overlap(ranks, (4, 8), tokens, 5) for ranks in (4, 8)}
            print("iteration time with overlap over without, host processors:", real)
    print(json.dumps(report(cells, overlaps, real)))


def _tokens(folder: Path) -> Path:
    text = folder / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(5000)))
    return prepare_tokens(text, cache_dir=folder).path


def show_overlap(overlaps: list[Overlap]) -> None:
    print("ranks depth | sync/backward | hidden without, with | exposed ms without, with | late steps")
    for one in overlaps:
        print(
            f"{one.ranks:5d} {one.depth:5d} | {one.sync_over_backward:13.2f} |"
            f" {one.hidden_without:14.2f} {one.hidden:5.2f} |"
            f" {1e3 * one.exposed_without_seconds:17.0f} {1e3 * one.exposed_seconds:6.0f} | {one.late_steps}"
        )


def report(
    cells: list[Cell], overlaps: list[Overlap], real: dict[int, dict[int, float]]
) -> dict[str, object]:
    """The last line: each claim's figure, its target and what misses it."""
    result: dict[str, object] = {
        "benchmark": "gradient_sync",
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    if cells:
        for scheme, target in TARGETS.items():
            ratios = [cell.ratios[scheme] for cell in cells]
            result[f"{scheme}_over_block"] = {
                "median": round(statistics.median(ratios), 2),
                "least": round(min(ratios), 2),
                "target": target,
                "missed": [
                    f"{cell.ranks} ranks, {cell.family}, depth {cell.depth}"
                    for cell in cells
                    if cell.ratios[scheme] < target
                ],
            }
        result["bytes_over_minimum"] = round(max(cell.bytes_over_minimum["block"] for cell in cells), 4)
        result["extra_megabytes"] = round(max(cell.extra_megabytes["block"] for cell in cells), 2)
        result["difference_of_schemes"] = max(cell.difference for cell in cells)
    if overlaps:
        shares = [one.hidden for one in overlaps]
        result["hidden_share"] = {
            "median": round(statistics.median(shares), 2),
            "least": round(min(shares), 2),
            "target": 0.5,
        }
    if real:
        result["overlapped_iteration_over_plain"] = {
            ranks: {depth: round(ratio, 3) for depth, ratio in depths.items()}
            for ranks, depths in real.items()
        }
    return result


if __name__ == "__main__":
    main()
