"""Every chain of a small stage table, for comparison: no program, only enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from planner.search.exact.choices import StageChoice
from planner.search.exact.role import Role, role_of
from planner.search.exact.stage_table import StageTable

Specs = tuple[tuple[int, int], ...]

CHOICES = (
    StageChoice(1, (0,), (2,)),
    StageChoice(2, (0,), (2,)),
    StageChoice(1, (1, 1), (1, 1)),
    StageChoice(1, (0, 1), (1, 1)),
)


def random_table(seed: int, *, layers: int = 3, max_stages: int = 3) -> StageTable:
    """Times that grow with layers, replays that grow with layers and micro-batches in flight, some infinite."""
    draw = np.random.default_rng(seed)
    shape = (len(Role), len(CHOICES))
    lines = [np.cumsum(draw.uniform(0.1, 1, (*shape, layers + 1)), axis=2) for _ in range(4)]
    replay = np.maximum(0.0, draw.uniform(-3, 1, (*shape, max_stages + 1, layers + 1)))
    replay = np.maximum.accumulate(np.maximum.accumulate(replay, axis=2), axis=3)
    replay[replay > 0.7] = np.inf
    replay[:, :, 0] = np.inf
    replay[Role.MIDDLE, :, :, 0] = np.inf
    return StageTable(
        micro_batch_size=2,
        layers=layers,
        choices=CHOICES,
        counts=tuple(choice.counts(2) for choice in CHOICES),
        forward=lines[0],
        backward=lines[1],
        receive=draw.uniform(0, 0.3, shape),
        replay=replay,
        gradient_bytes=lines[2],
        update=0.1 * lines[3],
        gathered_bytes=0.3 * lines[2],
        last=0.1 * lines[3],
        after=lines[2] + 0.1 * lines[3],
        tail=0.3 * lines[2] + 0.1 * lines[3],
        holders=np.array([float(len(choice.rows)) for choice in CHOICES]),
    )


def every_chain(table: StageTable, stages: int) -> Iterator[Specs]:
    """(choice, layers) of the stages, first to last, of every chain that fits."""
    for layers in itertools.product(range(table.layers + 1), repeat=stages):
        if sum(layers) != table.layers:
            continue
        for choices in itertools.product(range(len(table.choices)), repeat=stages):
            specs = tuple(zip(choices, layers, strict=True))
            if np.isfinite(stage_seconds(table, specs)).all():
                yield specs


def stage_seconds(table: StageTable, specs: Specs) -> list[float]:
    """All seconds of every stage; infinite where it does not fit."""
    found = []
    for index, (choice, layers) in enumerate(specs):
        position = len(specs) - index
        role = role_of(position=position, stages=len(specs))
        seconds = table.forward[role, choice, layers] + table.backward[role, choice, layers]
        seconds += table.receive[role, choice] + table.replay[role, choice, position, layers]
        found.append(float(seconds))
    return found


def counts_of(table: StageTable, specs: Specs) -> tuple[int, ...]:
    """Devices by kind."""
    return tuple(map(sum, zip(*(table.counts[choice] for choice, _ in specs), strict=True)))


def after_first(table: StageTable, specs: Specs) -> float:
    """Seconds that the first stage has to do after its last backward."""
    role = role_of(position=len(specs), stages=len(specs))
    return float(table.after[role, specs[0][0], specs[0][1]])
