"""StageTable: the seconds of every way to run one stage, the only thing the exact solver reads.

A stage is described without devices: its choice (kinds, TP, rows), its role in the pipeline, its position
counted from the end (the number of micro-batches it holds in flight under 1F1B) and its layers. Any profile
and any memory model slot in here (`make_table`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from planner.search.exact.choices import StageChoice
from planner.search.exact.covers import Cover
from planner.search.exact.pool import Vector
from planner.search.exact.role import Role
from planner.search.exact.surroundings import Holders, Surroundings

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Prices of devices at which a table's choices are asked for again and again.
_KNOWN_PRICES = 16


@dataclass(frozen=True)
class StageTable:
    """One micro-batch through one stage, by choice c, position p from the end and layers l.

    `forward[role, c, l]` and `backward` are operators and TP collectives, `receive[role, c]` is receiving
    from all neighbours. `replay[role, c, p, l]` is what backward takes longer because operators are
    recomputed until the stage fits with p micro-batches in flight: infinite where it does not fit at all,
    and for p = 0, which is unused. `gradient_bytes[role, c, l]` are the bytes of a device that all pipelines
    reduce, `holders[c]` of them in the stage itself, `update` the seconds of its optimizer step, and `after`
    those from the stage's last backward to the end of the iteration: both, for the number of pipelines that
    the table was last told. Of these, `gathered_bytes`, `last` and `tail` are what begins only when all stages have
    their gradients: gathering parameters and the optimizer's step.
    """

    micro_batch_size: int
    layers: int
    choices: tuple[StageChoice, ...]
    counts: tuple[Vector, ...]
    forward: FloatArray
    backward: FloatArray
    receive: FloatArray
    replay: FloatArray
    gradient_bytes: FloatArray
    update: FloatArray
    gathered_bytes: FloatArray
    last: FloatArray
    after: FloatArray
    tail: FloatArray
    holders: FloatArray
    covers: tuple[Cover, ...] = ()
    """Of a table for bounds, the last choices stand for every stage that mixes types: these."""
    in_flight: int = 10**9
    """Most micro-batches that a pipeline holds in flight, whatever its stages."""

    @cached_property
    def plain(self) -> FloatArray:
        """Forward, backward and receiving, with nothing recomputed: [role, c, l]."""
        total: FloatArray = self.forward + self.backward + self.receive[..., None]
        return total

    @cached_property
    def most(self) -> IntArray:
        """Most layers that fit, -1 for none: [role, c, p]."""
        fits = np.isfinite(self.replay[..., ::-1])
        found = np.where(fits.any(axis=3), self.layers - fits.argmax(axis=3), -1)
        positions = np.minimum(np.arange(self.max_stages + 1), self.in_flight)
        most: IntArray = found[:, :, positions]
        return most

    @cached_property
    def least(self) -> FloatArray:
        """Seconds with as few micro-batches in flight as can be, infinite where even so a stage does not fit:
        [role, c, l]."""
        total: FloatArray = self.plain + self.replay[:, :, 1]
        return total

    @cached_property
    def least_anywhere(self) -> FloatArray:
        """`least` in the role that takes least, for 1 layer and more: [c, l - 1]."""
        found: FloatArray = self.least[:, :, 1:].min(axis=0)
        return found

    @cached_property
    def least_by_layers(self) -> FloatArray:
        """`least` in any role of any choice: [l]."""
        found: FloatArray = self.least.min(axis=(0, 1), initial=np.inf)
        return found

    @cached_property
    def most_after(self) -> tuple[FloatArray, FloatArray]:
        """The largest `after` and `tail` by role."""
        return self.after.max(axis=(1, 2), initial=0.0), self.tail.max(axis=(1, 2), initial=0.0)

    @cached_property
    def ranked_in_order(
        self,
    ) -> dict[bytes, dict[tuple[Role, str, int], tuple[npt.NDArray[np.int32], FloatArray]]]:
        """What `ranking` worked out for the last order of the choices; it fills this."""
        return {}

    @cached_property
    def least_period(self) -> float:
        """Of any stage; infinite if none fits."""
        return float(self.least.min(initial=np.inf))

    @cached_property
    def most_seconds(self) -> float:
        """Of any stage that fits; 0 if none does."""
        replay = self.replay.max(axis=2, initial=-np.inf, where=np.isfinite(self.replay))
        return float((self.plain + replay).max(initial=0.0))

    def replay_at(self, role: Role, position: int) -> FloatArray:
        """[c, l]."""
        found: FloatArray = self.replay[role, :, min(position, self.in_flight)]
        return found

    def seconds_at(self, role: Role, position: int) -> FloatArray:
        """All seconds of a stage, infinite where it does not fit: [c, l]."""
        total: FloatArray = self.plain[role] + self.replay_at(role, position)
        return total

    @property
    def max_stages(self) -> int:
        return self.replay.shape[2] - 1

    @property
    def usable(self) -> bool:
        """Whether any stage fits at all."""
        return bool(np.isfinite(self.least).any())

    def for_pipelines(self, surroundings: Surroundings, pipelines: float) -> StageTable:
        """The table for so many pipelines that share every gradient."""
        stages = [
            *((choice.tp, tuple(sorted(set(choice.kinds)))) for choice in self.choices),
            *((cover.tp, (cover.kind, *cover.others)) for cover in self.covers),
        ]
        places = [
            Holders(pipelines - 1 + count, count, tp, kinds)
            for count, (tp, kinds) in zip(self.holders, stages, strict=True)
        ]
        # Both ends of the only pipeline may hold a tied table; its layers are held by the replicas of one stage.
        layers, ends = (
            np.array([surroundings.gradient_byte_seconds(place, alone=alone) for place in places])[:, None]
            for alone in (pipelines == 1, False)
        )

        def seconds(sent: FloatArray, rest: FloatArray) -> FloatArray:
            held = sent[..., :1]
            return (sent - held) * layers + held * ends + rest

        return replace(
            self,
            after=seconds(self.gradient_bytes, self.update),
            tail=seconds(self.gathered_bytes, self.last),
        )

    def cost(self, prices: FloatArray) -> FloatArray:
        """What the devices of each choice cost, of covers at least."""
        asked = prices.tobytes()
        if asked not in self._costs:
            plain = np.array(self.counts, dtype=float).reshape(-1, len(prices)) @ prices
            if len(self._costs) == _KNOWN_PRICES:
                self._costs.clear()
            self._costs[asked] = np.concatenate([plain, [cover.cost(prices) for cover in self.covers]])
        return self._costs[asked]

    @cached_property
    def _costs(self) -> dict[bytes, FloatArray]:
        """By the bytes of the prices; `cost` fills this."""
        return {}

    def without_covers(self) -> StageTable:
        """The table of its choices alone."""
        return replace(self.kept(range(len(self.choices))), covers=())

    def kept(self, choices: Sequence[int]) -> StageTable:
        """Some of the choices."""
        index = list(choices)
        arrays = {
            one.name: getattr(self, one.name).take(index, axis=0 if one.name == "holders" else 1)
            for one in fields(self)
            if isinstance(getattr(self, one.name), np.ndarray)
        }
        return replace(
            self,
            choices=tuple(self.choices[i] for i in choices),
            counts=tuple(self.counts[i] for i in choices),
            **arrays,
        )


def joined(tables: Sequence[StageTable]) -> StageTable:
    """One table of the choices of all: of one micro-batch size, without covers."""

    def stacked(name: str) -> FloatArray:
        found: FloatArray = np.concatenate([getattr(table, name) for table in tables], axis=1)
        return found

    return replace(
        tables[0],
        choices=tuple(choice for table in tables for choice in table.choices),
        counts=tuple(counts for table in tables for counts in table.counts),
        forward=stacked("forward"),
        backward=stacked("backward"),
        receive=stacked("receive"),
        replay=stacked("replay"),
        gradient_bytes=stacked("gradient_bytes"),
        update=stacked("update"),
        gathered_bytes=stacked("gathered_bytes"),
        last=stacked("last"),
        after=stacked("after"),
        tail=stacked("tail"),
        holders=np.concatenate([table.holders for table in tables]),
    )


def with_in_flight(table: StageTable, most: int) -> StageTable:
    """The table for pipelines that never hold more micro-batches in flight."""
    return replace(table, in_flight=most)


def without_dominated(table: StageTable) -> StageTable:
    """Leave out choices that another with the same devices beats in every respect; of equal ones keep the
    first."""
    kept: list[int] = []
    for index in range(len(table.choices)):
        if not np.isfinite(table.replay[:, index]).any():
            continue
        rivals = [i for i in kept if table.counts[i] == table.counts[index]]
        if any(_beats(table, i, index) for i in rivals):
            continue
        kept = [i for i in kept if i not in rivals or not _beats(table, index, i)] + [index]
    return table.kept(kept) if len(kept) < len(table.choices) else table


def _beats(table: StageTable, one: int, other: int) -> bool:
    return bool(
        table.holders[one] <= table.holders[other]
        and all(
            (array[:, one] <= array[:, other]).all()
            for array in (
                table.plain,
                table.backward,
                table.gradient_bytes,
                table.update,
                table.gathered_bytes,
                table.last,
                table.replay,
            )
        )
    )
