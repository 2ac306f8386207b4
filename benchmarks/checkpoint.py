"""What saving costs a run: the pause of training, the speed of writing, and memory.

Ranks of the host's processor train one model. A turn is three comparisons:

* iterations of which all the time a save is under way, against as many without one right after; and those against as
  many again, so that what the host does by itself is seen as `control`. The copy to host memory, for which training
  stands still, is told apart;
* a save with no training beside it, against a plain copy of the very files that it wrote (`shutil.copyfile` and fsync,
  since a checkpoint is on the disk when it is called whole, at the low priority of a save), by the clock and in
  processor seconds;
* the peak of the process's resident memory with saves, over that before the first one, in parts of what the rank saves:
  one part is the copy.

`slowdown` is of the seconds in which the training thread ran, or stood still for anything but a processor: for a lock,
for the interpreter, for memory. The kernel tells how long it was ready to run and had to wait for a core
(`/proc/self/task/*/schedstat`); that is left out, since on a host whose cores are all busy it says only what else ran
there. `wall_slowdown` includes it. Medians over the turns. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from paired_runs import Shape, host_plan, interval, made_up_tokens, training_of
from rank_processes import meet, run_ranks

from actors.checkpoints import checkpoint_path
from actors.engine.checkpoint import SavedCheckpoint, give_way
from actors.engine.trainer import Trainer, TrainerConfig
from planner.plan import Plan

TARGET = 0.02
"""The most that iterations may be longer while a save is under way."""
SHAPES = {
    "tiny": Shape(layers=2, hidden=32, sequence=16, size=1, count=1),
    "50M": Shape(layers=4, hidden=1024, sequence=256, size=1, count=1),
    "100M": Shape(layers=8, hidden=1024, sequence=256, size=1, count=1),
}
WARM_UP = 4


@dataclass(frozen=True)
class Stretch:
    """Seconds of some iterations, one by one: by the clock, and without the wait for a core."""

    wall: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)

    def over(self, other: Stretch) -> tuple[float, float]:
        """How much longer these iterations are, as a share: without the wait for a core, and by the clock."""
        return (
            statistics.mean(self.own) / statistics.mean(other.own) - 1,
            statistics.mean(self.wall) / statistics.mean(other.wall) - 1,
        )


@dataclass(frozen=True)
class Cost:
    """Of writing so many bytes: seconds by the clock, and processor seconds of the whole process."""

    bytes: int
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Turn:
    """What a rank measured; rank 0 alone knows the three costs: of the save beside training, of one alone, and of a
    plain copy. `peak_bytes` are the process's so far."""

    saving: Stretch
    quiet: Stretch
    again: Stretch
    beside: SavedCheckpoint | None
    alone: Cost
    copy: Cost
    peak_bytes: int


@dataclass(frozen=True)
class RankTurns:
    """A rank's turns, the process's peak of memory before the first save, and the pause that this one took (rank 0)."""

    own_peak_bytes: int
    first_pause_seconds: float
    turns: list[Turn]


class Rank:
    """Makes the turns of one rank, after a first save that does not count: RankTurns."""

    def __init__(self, trainer: Trainer, store: dist.Store, folder: Path, *, world_size: int) -> None:
        self._trainer, self._store, self._folder = trainer, store, folder
        self._world_size = world_size
        self._iteration = 0
        for _ in range(WARM_UP):
            self._iterate()
        self.own_peak_bytes = _peak_memory()
        # The first save takes the memory for its copy, which the others then have.
        first = self._saved_alone()
        self.first_pause_seconds = 0.0 if first is None else first.pause_seconds

    def turn(self) -> Turn:
        # The copy falls into this iteration, which does not count.
        told = self._iterate(checkpoint_path(self._folder, self._iteration + 1))
        saving = Stretch()
        while not (ended := self._heard(told)):
            told = self._timed(saving)
        if len(saving.wall) > 1:
            # For a part of the last one no save was under way.
            saving.wall.pop()
            saving.own.pop()
        quiet, again = Stretch(), Stretch()
        for stretch in (quiet, again):
            for _ in saving.wall:
                self._timed(stretch)
        alone, copy = self._without_training()
        return Turn(saving, quiet, again, ended[0], alone, copy, _peak_memory())

    def _iterate(self, checkpoint: Path | None = None) -> tuple[SavedCheckpoint, ...]:
        self._iteration += 1
        return self._trainer.run_iteration(self._iteration, checkpoint).saved

    def _timed(self, stretch: Stretch) -> tuple[SavedCheckpoint, ...]:
        wall, waited = time.perf_counter(), _waited_for_core()
        told = self._iterate()
        wall = time.perf_counter() - wall
        stretch.wall.append(wall)
        stretch.own.append(wall - (_waited_for_core() - waited))
        return told

    def _heard(self, told: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint | None]:
        """The save that ended, None on ranks other than 0; empty while it is under way."""
        key = f"saved {self._iteration}"
        if self._trainer.place.rank == 0:
            assert all(saved.error is None for saved in told), told
            self._store.set(key, "yes" if told else "no")
        return [next(iter(told), None)] if self._store.get(key) == b"yes" else []

    def _saved_alone(self) -> SavedCheckpoint | None:
        """A save with no training beside it; None on ranks other than 0."""
        path = checkpoint_path(self._folder, self._iteration)
        self._trainer.save_checkpoint(path, iteration=self._iteration, loss=0.0)
        saved = next(iter(self._trainer.finish_checkpoints()), None)
        assert saved is None or saved.error is None, saved
        return saved

    def _without_training(self) -> tuple[Cost, Cost]:
        """A save alone, and a plain copy of its files."""
        cpu = time.process_time()
        saved = self._saved_alone()
        cpu = time.process_time() - cpu
        alone = copy = Cost(0, 0.0, cpu)
        if saved is not None:
            alone = Cost(saved.bytes, saved.seconds, cpu)
            # Of a priority as low as that of a save: on a busy host much depends on it.
            with ThreadPoolExecutor(1, initializer=give_way) as thread:
                copy = thread.submit(_copied, Path(str(saved.path)), self._folder / "copy").result()
        meet(
            self._store,
            f"copied {self._iteration}",
            rank=self._trainer.place.rank,
            world_size=self._world_size,
        )
        return alone, copy


def _copied(source: Path, target: Path) -> Cost:
    """What it takes to copy a folder's files and have them on the disk; the copy is deleted."""
    target.mkdir()
    start, cpu, size = time.perf_counter(), time.process_time(), 0
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
        with (target / file.name).open("rb") as stream:
            os.fsync(stream.fileno())
            size += file.stat().st_size
    cost = Cost(size, time.perf_counter() - start, time.process_time() - cpu)
    shutil.rmtree(target)
    return cost


def _waited_for_core() -> float:
    """Seconds for which this thread has been ready to run while no core was free."""
    told = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
    return int(told.split()[1]) / 1e9


def _peak_memory() -> int:
    """The most resident bytes that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(
    rank: int, world_size: int, store: dist.Store, config: TrainerConfig, folder: Path, turns: int
) -> RankTurns:
    """All that one rank measures."""
    trainer = Trainer(config=config, rank=rank, store=store)
    measuring = Rank(trainer, store, folder, world_size=world_size)
    found = []
    for _ in range(turns):
        found.append(measuring.turn())
        if rank == 0:
            print(told(found[-1]), flush=True)
    trainer.close()
    return RankTurns(measuring.own_peak_bytes, measuring.first_pause_seconds, found)


def told(turn: Turn) -> str:
    """A turn's iterations in a line."""
    means = {
        name: [statistics.mean(getattr(stretch, name)) for stretch in (turn.saving, turn.quiet, turn.again)]
        for name in ("own", "wall")
    }
    own, wall = (", ".join(f"{mean:.3f}" for mean in means[name]) for name in ("own", "wall"))
    return (
        f"{len(turn.saving.wall)} iterations while saving, without and again: {own} s (by the clock {wall} s)"
    )


def plan_of(shape: Shape, ranks: int) -> Plan:
    """A pipeline of one device a rank, each with its shard of the optimizer state."""
    sharded = {"zero_stage": 1, "gradient_sync": "block"} if ranks > 1 else {}
    return Plan.model_validate(host_plan(shape, (((1, 1),),) * ranks).model_dump() | sharded)


def figures(by_rank: Sequence[RankTurns]) -> dict[str, Any]:
    """Medians over the turns; times are those of rank 0, memory that of the rank that needs the most."""
    turns = by_rank[0].turns
    beside = [turn.beside for turn in turns if turn.beside is not None]
    assert len(beside) == len(turns), "rank 0 hears of every save"
    slower, wall_slower = zip(*(turn.saving.over(turn.quiet) for turn in turns), strict=True)
    size = turns[-1].alone.bytes
    rates = [turn.alone.bytes / turn.alone.seconds for turn in turns]
    copies = [turn.copy.bytes / turn.copy.seconds for turn in turns]
    return {
        "checkpoint_bytes": size,
        "iterations_while_saving": sum(len(turn.saving.wall) for turn in turns),
        "iteration_seconds": _median([statistics.mean(turn.quiet.own) for turn in turns]),
        "slowdown": _median(slower),
        "slowdown_interval": interval(slower),
        "control": _median([turn.again.over(turn.quiet)[0] for turn in turns]),
        "wall_slowdown": _median(wall_slower),
        "copy_pause_seconds": _median([saved.pause_seconds for saved in beside]),
        "first_copy_pause_seconds": by_rank[0].first_pause_seconds,
        "save_seconds": _median([saved.seconds for saved in beside]),
        "bytes_per_second": _median(rates),
        "plain_copy_bytes_per_second": _median(copies),
        "of_plain_copy": _median([rate / copy for rate, copy in zip(rates, copies, strict=True)]),
        "save_cpu_seconds": _median([turn.alone.cpu_seconds for turn in turns]),
        "plain_copy_cpu_seconds": _median([turn.copy.cpu_seconds for turn in turns]),
        "peak_memory_shards": max(
            (rank.turns[-1].peak_bytes - rank.own_peak_bytes) / (size / len(by_rank)) for rank in by_rank
        ),
    }


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="50M", help="about so many parameters")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to write [default: the system's temporary folder]")
    options = parser.parse_args()
    plan = plan_of(SHAPES[options.shape], options.ranks)
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        config = TrainerConfig(
            plan=plan,
            training=training_of(plan),
            tokens=made_up_tokens(Path(made)),
            timeout_seconds=120,
            keep_checkpoints=1,
        )
        by_rank = run_ranks(measure, options.ranks, config, Path(made, "checkpoints"), options.turns)
    found = figures(by_rank)
    rounded = {
        name: [round(one, 4) for one in value] if isinstance(value, tuple) else round(value, 4)
        for name, value in found.items()
    }
    result = {
        "benchmark": "checkpoint",
        "shape": options.shape,
        "ranks": options.ranks,
        "turns": options.turns,
    }
    print(json.dumps(result | rounded | {"target": TARGET, "within": found["slowdown"] <= TARGET}))


if __name__ == "__main__":
    main()
