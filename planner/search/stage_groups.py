"""Stage device groups (paper 4.2.2): what a stage can be made of, and the ways to run on it.

A pipeline's devices lie in slots, one a node. A stage takes a share of every slot; stages are chosen from
the last to the first, so that the number of stages behind one, and with it its micro-batches in flight, is
known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from planner.cost.exchange import Replica
from planner.model_spec import ModelSpec
from planner.search.device_groups import DeviceGrid, NodeShare, sub_shares

# A stage's devices: its share of every slot of its pipeline.
StageShare = tuple[NodeShare, ...]


@dataclass(frozen=True, eq=False)
class StageOption:
    """One way to run a stage on its devices; `replicas` are in slot order, `node` being the slot.

    `loads` are the distinct (device type, rows) of its replicas: all that its times and memory depend on
    beside `recomputed`, the operators that all layers recompute.
    Made once per stage share and micro-batch size, and compared by identity.
    """

    share: StageShare
    tp: int
    replicas: tuple[Replica, ...]
    loads: tuple[tuple[str, int], ...]
    recomputed: tuple[str, ...] = ()


def stage_shares(left: StageShare, behind: StageShare, steps: tuple[int, ...]) -> Iterator[StageShare]:
    """Every stage that can be cut from what is left of the slots; all that is left comes first.

    Slots with the same left and the same share in the stage `behind` are interchangeable from here on, so
    only one of the arrangements that differ by exchanging them is made.
    """
    options = [sub_shares(share, steps) for share in left]
    alike: list[int | None] = []
    for slot, key in enumerate(zip(left, behind, strict=True)):
        earlier = [s for s in range(slot) if (left[s], behind[s]) == key]
        alike.append(earlier[-1] if earlier else None)
    for share in product(*options):
        if any(map(any, share)) and all(
            before is None or share[slot] <= share[before] for slot, before in enumerate(alike)
        ):
            yield share


@cache
def tp_degrees(model: ModelSpec, share: StageShare, in_node: tuple[int, ...] | None) -> tuple[int, ...]:
    """TP degrees for a stage: a TP group stays inside a node and a type, and divides heads and MLP."""
    counts = [
        count if in_node is None else in_node[k] for node in share for k, count in enumerate(node) if count
    ]
    return tuple(
        tp
        for tp in range(1, min(counts) + 1)
        if all(count % tp == 0 for count in counts)
        and model.heads % tp == 0
        and model.kv_heads % tp == 0
        and model.ffn_hidden_size % tp == 0
    )


def stage_options(
    model: ModelSpec, share: StageShare, grid: DeviceGrid, *, micro_batch_size: int
) -> list[StageOption]:
    """Every (tp, dp, rows) of a stage. Replicas of one type take equal rows; unlike types may differ."""
    types = grid.types
    options = []
    for tp in tp_degrees(model, share, grid.in_node):
        groups = [
            (slot, k, node[k] // tp) for slot, node in enumerate(share) for k in range(len(types)) if node[k]
        ]
        held = sorted({k for _, k, _ in groups})
        replicas = [sum(count for _, kind, count in groups if kind == k) for k in held]
        for rows in _rows(replicas, micro_batch_size):
            of_type = dict(zip(held, rows, strict=True))
            members = tuple(
                Replica(slot, types[k], of_type[k]) for slot, k, count in groups for _ in range(count)
            )
            loads = tuple((types[k], of_type[k]) for k in held)
            options.append(StageOption(share, tp, members, loads))
    return options


def _rows(replicas: list[int], micro_batch_size: int) -> Iterator[tuple[int, ...]]:
    """All ways to give each type's replicas r >= 1 rows each so that the micro-batch is used up."""
    first, others = replicas[0], replicas[1:]
    if not others:
        if micro_batch_size % first == 0 and micro_batch_size >= first:
            yield (micro_batch_size // first,)
        return
    for rows in range(1, (micro_batch_size - sum(others)) // first + 1):
        for rest in _rows(others, micro_batch_size - first * rows):
            yield (rows, *rest)
