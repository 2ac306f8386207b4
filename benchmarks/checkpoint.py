"""What saving costs a run: the pause of training, the speed of writing, and memory.

Ranks of the host's processor train one model. Three comparisons:

* iterations of which all the time a save is under way, against some without one right before and right after. How much
  longer those after are than those before is `control`: what the host does by itself. What training stands still for
  is told apart: the copy, before its next update, of what is not written by then (`copy_pause_seconds`).
  `slowdown_with_pause` has it in;
* in the first turns, a save with no training beside it against a plain copy of the very files that it wrote
  (`shutil.copyfile` and fsync, since a checkpoint is on the disk when it is called whole, at the low priority of a
  save), by the clock and in processor seconds;
* in processes of its own, the peak of resident memory with saves over that before the first one, in parts of what the
  rank saves: at most one part is the copy. There the C library gives each larger block back to the system at once.
  What it otherwise keeps grows for the first hundred iterations, saves or none, by more than all that a save takes
  besides.

`slowdown` is of the seconds in which the training thread ran, or stood still for anything but a processor: for a lock,
for the interpreter, for memory. The kernel tells how long it was ready to run and had to wait for a core
(`/proc/self/task/*/schedstat`); that is left out, since on a host whose cores are all busy it says only what else ran
there. `wall_slowdown` includes it. With several ranks only the latter says something on a busy host: a rank stands
still for another that waits for a core. Medians over the turns. One JSON line last.
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

from actors.checkpoints import checkpoint_path, latest
from actors.engine.checkpoint import SavedCheckpoint
from actors.engine.checkpoint_files import give_way
from actors.engine.late_copy import LateCopies
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
NEIGHBOURS = 2
"""Iterations without a save, on either side of a save."""
COMPARISONS = 5
"""Turns that also compare a save alone with a plain copy."""
REMEMBERED_SAVES = 3
"""Saves whose memory is watched."""
MMAP_THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
"""Of larger blocks the C library keeps nothing (mallopt(3))."""


@dataclass(frozen=True)
class Stretch:
    """Seconds of some iterations, one by one, what they stood still for copies left out: by the clock, and without the
    wait for a core."""

    wall: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)

    def add(self, wall: float, own: float) -> None:
        self.wall.append(wall)
        self.own.append(own)

    def over(self, *others: Stretch) -> tuple[float, float]:
        """How much longer these iterations are, as a share: without the wait for a core, and by the clock."""
        return (
            statistics.mean(self.own) / statistics.mean(one for other in others for one in other.own) - 1,
            statistics.mean(self.wall) / statistics.mean(one for other in others for one in other.wall) - 1,
        )


class Timer:
    """Seconds since it was made: by the clock, and without this thread's wait for a core."""

    def __init__(self) -> None:
        self._start, self._waited = time.perf_counter(), _waited_for_core()

    def told(self) -> tuple[float, float]:
        wall = time.perf_counter() - self._start
        return wall, wall - (_waited_for_core() - self._waited)


@dataclass(frozen=True)
class Cost:
    """Of writing so many bytes: seconds by the clock, and processor seconds of the whole process."""

    bytes: int
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Turn:
    """What a rank measured; rank 0 alone hears of the save."""

    before: Stretch
    saving: Stretch
    after: Stretch
    pause: float
    """Seconds that training stood still for copies while saving, without the wait for a core."""
    beside: SavedCheckpoint | None

    def slowdown(self) -> tuple[float, float]:
        """Of iterations while saving, as `Stretch.over`."""
        return self.saving.over(self.before, self.after)

    def slowdown_with_pause(self) -> float:
        """The same with the pause, without the wait for a core."""
        usual = statistics.mean(self.before.own + self.after.own)
        return self.slowdown()[0] + self.pause / len(self.saving.own) / usual


@dataclass(frozen=True)
class RankTurns:
    """A rank's turns. Rank 0 alone knows what saves alone and plain copies cost."""

    turns: list[Turn]
    compared: list[tuple[Cost, Cost]]


class Rank:
    """One rank that trains and saves: its turns, or just its peak of memory."""

    def __init__(self, trainer: Trainer, store: dist.Store, folder: Path, *, world_size: int) -> None:
        self._trainer, self._store, self._folder = trainer, store, folder
        self._world_size = world_size
        self._iteration = 0
        self._pauses = Stretch()
        take = LateCopies.take

        def timed(copies: LateCopies) -> None:
            timer = Timer()
            take(copies)
            self._pauses.add(*timer.told())

        LateCopies.take = timed
        for _ in range(WARM_UP):
            self._iterate()

    def turns(self, count: int) -> RankTurns:
        """So many, after a first save that does not count."""
        self._saved_alone()
        found, compared = [], []
        for number in range(count):
            found.append(self._turn())
            if self._trainer.place.rank == 0:
                print(told(found[-1]), flush=True)
            if number < COMPARISONS:
                compared.append(self._without_training())
        return RankTurns(found, compared)

    def memory(self) -> float:
        """How much higher the peak of resident memory is after some saves than before the first, in parts of what this
        rank saves."""
        own = _peak_memory()
        for _ in range(REMEMBERED_SAVES):
            self._saving(Stretch())
        grown = _peak_memory() - own
        file = latest(self._folder).path / f"__{self._trainer.place.rank}_0.distcp"
        return grown / Path(str(file)).stat().st_size

    def _turn(self) -> Turn:
        before, saving, after = Stretch(), Stretch(), Stretch()
        self._pauses = Stretch()
        for _ in range(NEIGHBOURS):
            self._timed(before)
        saved = self._saving(saving)
        pause = sum(self._pauses.own)
        for _ in range(NEIGHBOURS):
            self._timed(after)
        return Turn(before, saving, after, pause, saved)

    def _saving(self, stretch: Stretch) -> SavedCheckpoint | None:
        """The iterations of which all the time a save is under way; the save, None on ranks other than 0."""
        # The save begins at the end of this iteration, which does not count.
        told = self._iterate(checkpoint_path(self._folder, self._iteration + 1))
        while not (ended := self._heard(told)):
            told = self._timed(stretch)
        if len(stretch.wall) > 1:
            # For a part of the last one no save was under way.
            stretch.wall.pop()
            stretch.own.pop()
        return ended[0]

    def _iterate(self, checkpoint: Path | None = None) -> tuple[SavedCheckpoint, ...]:
        self._iteration += 1
        return self._trainer.run_iteration(self._iteration, checkpoint).saved

    def _timed(self, stretch: Stretch) -> tuple[SavedCheckpoint, ...]:
        timer, pauses = Timer(), len(self._pauses.wall)
        told = self._iterate()
        wall, own = timer.told()
        stretch.add(wall - sum(self._pauses.wall[pauses:]), own - sum(self._pauses.own[pauses:]))
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
    """The turns of one rank."""
    trainer = Trainer(config=config, rank=rank, store=store)
    found = Rank(trainer, store, folder, world_size=world_size).turns(turns)
    trainer.close()
    return found


def measure_memory(
    rank: int, world_size: int, store: dist.Store, config: TrainerConfig, folder: Path
) -> float:
    """Of one rank, as `Rank.memory`."""
    trainer = Trainer(config=config, rank=rank, store=store)
    found = Rank(trainer, store, folder, world_size=world_size).memory()
    trainer.close()
    return found


def told(turn: Turn) -> str:
    """A turn's iterations in a line."""
    means = {
        name: [statistics.mean(getattr(stretch, name)) for stretch in (turn.before, turn.saving, turn.after)]
        for name in ("own", "wall")
    }
    own, wall = (", ".join(f"{mean:.3f}" for mean in means[name]) for name in ("own", "wall"))
    return (
        f"before, {len(turn.saving.wall)} iterations while saving, and after: {own} s (by the clock {wall} s),"
        f" and {turn.pause:.3f} s for copies"
    )


def plan_of(shape: Shape, ranks: int) -> Plan:
    """Pipelines of one device a rank, each with its shard of the optimizer state."""
    sharded = {"zero_stage": 1, "gradient_sync": "block"} if ranks > 1 else {}
    return Plan.model_validate(host_plan(shape, (((1, 1),),) * ranks).model_dump() | sharded)


def figures(by_rank: Sequence[RankTurns]) -> dict[str, Any]:
    """Medians over the turns of rank 0."""
    turns = by_rank[0].turns
    beside = [turn.beside for turn in turns if turn.beside is not None]
    assert len(beside) == len(turns), "rank 0 hears of every save"
    slower, wall_slower = zip(*(turn.slowdown() for turn in turns), strict=True)
    return {
        "iterations_while_saving": sum(len(turn.saving.wall) for turn in turns),
        "iteration_seconds": _median([one for turn in turns for one in turn.before.own + turn.after.own]),
        "slowdown": _median(slower),
        "slowdown_interval": interval(slower),
        "control": _median([turn.after.over(turn.before)[0] for turn in turns]),
        "wall_slowdown": _median(wall_slower),
        "wall_slowdown_interval": interval(wall_slower),
        "slowdown_with_pause": _median([turn.slowdown_with_pause() for turn in turns]),
        "copy_pause_seconds": _median([saved.pause_seconds for saved in beside]),
        "longest_copy_pause_seconds": max(saved.pause_seconds for saved in beside),
        "save_seconds": _median([saved.seconds for saved in beside]),
    } | compared_figures(by_rank[0].compared)


def compared_figures(compared: Sequence[tuple[Cost, Cost]]) -> dict[str, Any]:
    """Of saves with no training beside them, and of plain copies."""
    rates = [alone.bytes / alone.seconds for alone, _ in compared]
    copies = [copy.bytes / copy.seconds for _, copy in compared]
    return {
        "checkpoint_bytes": compared[-1][0].bytes,
        "bytes_per_second": _median(rates),
        "plain_copy_bytes_per_second": _median(copies),
        "of_plain_copy": _median([rate / copy for rate, copy in zip(rates, copies, strict=True)]),
        "save_cpu_seconds": _median([alone.cpu_seconds for alone, _ in compared]),
        "plain_copy_cpu_seconds": _median([copy.cpu_seconds for _, copy in compared]),
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
        os.environ.update(MMAP_THRESHOLD)
        memory = run_ranks(measure_memory, options.ranks, config, Path(made, "again"))
    found = figures(by_rank)
    found["peak_memory_shards"] = max(memory)
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
