"""The engine on two alike ranks against torch's own way to use two, in turns in the same processes.

Data parallel: two pipelines of one device against DistributedDataParallel. Tensor parallel: one stage of TP 2
against a loop over a model cut by `parallelize_module`. Pipeline parallel: two stages against the 1F1B of
`torch.distributed.pipelining`. The peers (two_ranks_peers.py) train a GPT of torch's own modules that shares the
attention kernel with the engine; first values, samples, clipping and AdamW are the same, so losses agree.

An iteration lasts from when both ranks are ready until the later one is done. The ratio is the peer's seconds over
the engine's, tokens a second the other way round: the median of pairs of neighbouring iterations, the order of the
two changing from pair to pair, with a bootstrap interval. CPU seconds of both processes stand beside it: what else
the host does disturbs them less. Target: 0.97. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from gradient_sync_plans import Degrees
from paired_runs import TARGET, Shape, host_plan, interval, made_up_tokens, training_of
from rank_processes import meet, run_ranks
from two_ranks_peers import PEERS, Iterate

from actors.engine.trainer import Trainer, TrainerConfig

SHAPES = {
    "tiny": Shape(layers=2, hidden=32, sequence=32, size=1, count=4),
    "small": Shape(layers=8, hidden=128, sequence=128, size=2, count=8),
    "medium": Shape(layers=6, hidden=256, sequence=256, size=2, count=4),
}
DEGREES: dict[str, Degrees] = {
    "dp": (((1, 1),), ((1, 1),)),
    "tp": (((2, 1),),),
    "pp": (((1, 1), (1, 1)),),
}
WARM_UP = 3


@dataclass(frozen=True)
class Turn:
    """One iteration of both on one rank."""

    engine_seconds: float
    engine_cpu_seconds: float
    engine_loss: float
    peer_seconds: float
    peer_cpu_seconds: float
    peer_loss: float


@dataclass(frozen=True)
class Case:
    kind: str
    config: TrainerConfig


def take_turns(
    rank: int, world_size: int, store: dist.Store, cases: Sequence[Case], turns: int
) -> list[list[Turn]]:
    """This rank's turns of each case."""
    found = []
    for index, case in enumerate(cases):
        trainer = Trainer(config=case.config, rank=rank, store=dist.PrefixStore(f"case {index}", store))
        peer = PEERS[case.kind](case.config, rank)
        rows = [_turn(trainer, peer, iteration) for iteration in range(1, turns + WARM_UP + 1)]
        meet(store, f"done {index}", rank=rank, world_size=world_size)
        del peer
        trainer.close()
        found.append(rows[WARM_UP:])
    return found


def _turn(trainer: Trainer, peer: Iterate, iteration: int) -> Turn:
    def engine() -> float:
        return trainer.run_iteration(iteration).loss

    def theirs() -> float:
        return peer(iteration)

    if iteration % 2:
        first = _timed(engine)
        return Turn(*first, *_timed(theirs))
    first = _timed(theirs)
    return Turn(*_timed(engine), *first)


def _timed(iterate: Callable[[], float]) -> tuple[float, float, float]:
    """Seconds from when all ranks are ready, CPU seconds of all threads of this process, and the loss."""
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    loss = iterate()
    return time.perf_counter() - start, time.process_time() - cpu, loss


def summary(by_rank: Sequence[Sequence[Turn]]) -> dict[str, object]:
    """Ratios of pairs with their intervals, and the largest relative difference of losses."""
    wall, cpu, difference = [], [], 0.0
    for turns in zip(*by_rank, strict=True):
        wall.append(max(t.peer_seconds for t in turns) / max(t.engine_seconds for t in turns))
        cpu.append(sum(t.peer_cpu_seconds for t in turns) / sum(t.engine_cpu_seconds for t in turns))
        loss = sum(t.peer_loss for t in turns)
        difference = max(difference, abs(turns[0].engine_loss - loss) / loss)
    engine = statistics.median(max(t.engine_seconds for t in turns) for turns in zip(*by_rank, strict=True))
    return {
        "ratio": round(statistics.median(wall), 3),
        "interval": [round(end, 3) for end in interval(wall)],
        "cpu_ratio": round(statistics.median(cpu), 3),
        "cpu_interval": [round(end, 3) for end in interval(cpu)],
        "iteration_seconds": round(engine, 4),
        "losses_differ_by": difference,
    }


def case_of(kind: str, shape: Shape, tokens: Path) -> Case:
    plan = host_plan(shape, DEGREES[kind], overlap=True, vocab_size=512, tied_embedding=False)
    return Case(kind, TrainerConfig(plan=plan, training=training_of(plan), tokens=tokens, timeout_seconds=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["small", "medium"])
    parser.add_argument("--kinds", nargs="+", choices=DEGREES, default=list(DEGREES))
    options = parser.parse_args()
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokens = made_up_tokens(Path(folder))
        names = [(shape, kind) for shape in options.shapes for kind in options.kinds]
        cases = [case_of(kind, SHAPES[shape], tokens) for shape, kind in names]
        by_rank = run_ranks(take_turns, 2, cases, options.turns)
    print("shape    kind | peer / engine  95 % interval | CPU seconds  95 % interval | losses differ by")
    for (shape, kind), *turns in zip(names, *by_rank, strict=True):
        row = summary(turns)
        found.setdefault(shape, {})[kind] = row
        print(
            f"{shape:8s} {kind:4s} | {row['ratio']:13.3f}  {_shown(row['interval']):15s} |"
            f" {row['cpu_ratio']:11.3f}  {_shown(row['cpu_interval']):15s} | {row['losses_differ_by']:.1e}"
        )
    print(json.dumps({"benchmark": "two_ranks", "target": TARGET, "shapes": found}))


def _shown(ends: object) -> str:
    assert isinstance(ends, list)
    return " to ".join(f"{end:.3f}" for end in ends)


if __name__ == "__main__":
    main()
