"""Stage configuration search (paper 4.2.3, Eq. 1): what stages take and hold, and the searches on that."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.catalogue import DeviceType
from planner.cost.memory import StageLoad
from planner.cost.models import CostModels
from planner.cost.stage_shape import StageShape
from planner.search.after import AfterEstimate
from planner.search.branch_and_bound import SizeSearch
from planner.search.choice import PipelineChoice, Record, SearchCounts
from planner.search.device_groups import Composition, DeviceGrid, minus, type_counts
from planner.search.savers import PLAIN, Savers
from planner.search.stage_groups import StageOption, StageShare, stage_options, stage_shares


@dataclass(frozen=True, eq=False)
class StageTable:
    """Seconds of a stage by its number of layers, receiving left out; `index` tells tables apart."""

    index: int
    seconds: tuple[float, ...]

    @property
    def per_layer(self) -> float:
        """Least seconds that a further layer adds: the first's, as seconds are convex in layers."""
        return self.seconds[1] - self.seconds[0]


class StageSearch:
    """Searches pipelines of one job; tables and caps are kept between pipelines."""

    def __init__(
        self,
        *,
        models: CostModels,
        grid: DeviceGrid,
        micro_batch_sizes: Sequence[int],
        counts: SearchCounts,
        tick: Callable[[], None],
        most_stages: int | None = None,
        savers: Savers = PLAIN,
    ) -> None:
        """`most_stages` ends the search of a pipeline at one micro-batch size early; None is complete."""
        cost, memory = models.cost, models.memory
        self.cost = cost
        self.memory = memory
        self.grid = grid
        self.types = grid.types
        self.after = AfterEstimate(cost, grid, savers)
        self._savers = savers
        self._recompute = models.recompute
        self._sizes = tuple(sorted(micro_batch_sizes))
        self.layers = cost.model.layers
        self.counts = counts
        self.tick = tick
        self.most_stages = most_stages
        self._layer_bytes = memory.layer_state_bytes(zero_stage=savers.zero_stage)
        self._tables: dict[tuple[object, ...], StageTable] = {}
        self._scatters: dict[StageShape, list[float]] = {}
        self._caps: dict[tuple[object, ...], int] = {}
        self._options: dict[tuple[StageShare, int], list[StageOption]] = {}
        self._shares: dict[tuple[StageShare, StageShare], list[tuple[StageShare, StageShare]]] = {}
        self._receives: dict[tuple[StageOption, StageOption], tuple[float, float]] = {}
        self._rates: dict[tuple[StageShare, int], float] = {}
        self._sample_seconds: dict[tuple[str, int], float] = {}

    def best(self, composition: Composition, samples: Sequence[int]) -> list[tuple[PipelineChoice, ...]]:
        """For each number of samples the choices of a Record; empty where nothing fits."""
        self.counts.pipelines_searched += 1
        record = Record(samples, least_after=self.after.least(composition))
        for size in self._sizes:
            if size <= max(samples):
                record.begin(size)
                SizeSearch(self, composition, size, record).run()
        return [record.choices(index) for index in range(len(samples))]

    def any_fitting(self, composition: Composition, samples: int) -> PipelineChoice | None:
        """Some choice that fits, of the smallest micro-batch that allows one; None if nothing fits."""
        for size in self._sizes:
            record = Record([samples], least_after=self.after.least(composition), first_will_do=True)
            record.begin(size)
            SizeSearch(self, composition, size, record).run()
            for choice in record.choices(0):
                return choice
        return None

    def room(self, left: StageShare) -> float:
        """Layers whose parameters, gradients and optimizer state the devices can hold at most."""
        counts = type_counts(left, len(self.types))
        memory = sum(
            self.cost.device_types[type_].memory_bytes * count
            for type_, count in zip(self.types, counts, strict=True)
        )
        return memory / self._layer_bytes

    def rate(self, left: StageShare, micro_batch_size: int) -> float:
        """Layers a second of a micro-batch that devices cannot exceed together, whatever their stages."""
        key = (left, micro_batch_size)
        if key not in self._rates:
            self._rates[key] = sum(
                count / (self.sample_layer_seconds(type_, micro_batch_size) * micro_batch_size)
                for type_, count in zip(self.types, type_counts(left, len(self.types)), strict=True)
            )
        return self._rates[key]

    def least_known_size(self) -> int:
        """The smallest micro-batch of which the profile knows a case on any device type."""
        for size in self._sizes:
            if self.rate(self.grid.nodes, size):
                return size
        # Asking for a case makes the profile say what it lacks.
        self.cost.replica_step(device_type=self.types[0], tp=1, rows=self._sizes[0], layers=1)
        raise AssertionError("a profile does not know a case that it does not cover")

    def sample_layer_seconds(self, type_: str, most_rows: int) -> float:
        """Least device seconds of one layer for one sample, over TP degrees and rows up to `most_rows`.

        Infinite where the profile knows none of these cases.
        """
        key = (type_, most_rows)
        if key not in self._sample_seconds:
            model = self.cost.model
            degrees = [
                t for t in range(1, model.heads + 1) if model.heads % t == 0 and model.kv_heads % t == 0
            ]
            known = [
                (tp, rows)
                for tp in degrees
                if model.ffn_hidden_size % tp == 0
                for rows in (*(r for r in self._sizes if r < most_rows), most_rows)
                if self.cost.covers(device_type=type_, tp=tp, rows=rows)
            ]
            self._sample_seconds[key] = min(
                (
                    self.cost.replica_step(device_type=type_, tp=tp, rows=rows, layers=1).total * tp / rows
                    for tp, rows in known
                ),
                default=math.inf,
            )
        return self._sample_seconds[key]

    def shares(self, left: StageShare, behind: StageShare) -> list[tuple[StageShare, StageShare]]:
        """Every stage that can be cut from what is left, and what is left then."""
        key = (left, behind)
        if key not in self._shares:
            self._shares[key] = [
                (share, tuple(map(minus, left, share)))
                for share in stage_shares(left, behind, self.grid.steps)
            ]
        return self._shares[key]

    def options(self, share: StageShare, micro_batch_size: int) -> list[StageOption]:
        """Ways to run a stage; of unlike rows the quickest, and those that hold more layers."""
        key = (share, micro_batch_size)
        if key not in self._options:
            every = stage_options(self.cost.model, share, self.grid, micro_batch_size=micro_batch_size)
            plain = self._worth_trying([option for option in every if self._covered(option)])
            self._options[key] = [
                variant for option in plain for variant in self._savers.variants(option, self._recompute)
            ]
        return self._options[key]

    def _covered(self, option: StageOption) -> bool:
        """Whether the profile knows the times of every replica."""
        return all(
            self.cost.covers(device_type=type_, tp=option.tp, rows=rows) for type_, rows in option.loads
        )

    def _worth_trying(self, options: list[StageOption]) -> list[StageOption]:
        kept: list[StageOption] = []
        for tp in sorted({option.tp for option in options}):
            rooms: list[tuple[int, ...]] = []
            ordered = sorted(
                (option for option in options if option.tp == tp),
                key=lambda option: self.table(option, embedding=False, head=False).seconds[1],
            )
            if len(ordered) == 1:
                kept += ordered
                continue
            for option in ordered:
                room = (
                    self.cap(option, embedding=False, head=False, in_flight=1),
                    self.cap(option, embedding=True, head=False, in_flight=4),
                    self.cap(option, embedding=True, head=True, in_flight=1),
                )
                if all(any(map(operator.gt, room, other)) for other in rooms):
                    rooms.append(room)
                    kept.append(option)
        return kept

    def table(self, option: StageOption, *, embedding: bool, head: bool) -> StageTable:
        """Seconds of the stage by its number of layers, receiving left out."""
        scattered = option.replicas if self._savers.zero_stage == 2 else ()
        key = (option.tp, option.loads, option.recomputed, scattered, embedding, head)
        if key not in self._tables:
            seconds = self.cost.layer_table(
                option.loads,
                tp=option.tp,
                most_layers=self.layers,
                embedding=embedding,
                head=head,
                recomputed=option.recomputed,
            )
            if scattered:
                shape = StageShape(option.tp, scattered, 0, embedding, head, zero_stage=2)
                seconds = tuple(a + b for a, b in zip(seconds, self._scattering(shape), strict=True))
            self._tables[key] = StageTable(len(self._tables), seconds)
        return self._tables[key]

    def _scattering(self, shape: StageShape) -> list[float]:
        """Seconds that ZeRO-2 scatters a micro-batch's gradients, by layers."""
        if shape not in self._scatters:
            self._scatters[shape] = [
                self.cost.scatter_seconds(replace(shape, layers=layers)) for layers in range(self.layers + 1)
            ]
        return self._scatters[shape]

    def cap(self, option: StageOption, *, embedding: bool, head: bool, in_flight: int) -> int:
        """Most layers that fit on every device of the stage; -1 if its ends alone do not."""
        replicas = len(option.replicas)
        key = (option.tp, option.loads, option.recomputed, replicas, embedding, head, in_flight)
        if key not in self._caps:
            self._caps[key] = min(
                self._most_layers(
                    self._savers.loaded(
                        StageLoad(option.tp, rows, self.layers, embedding, head, in_flight), option
                    ),
                    self.cost.device_types[type_],
                )
                for type_, rows in option.loads
            )
        return self._caps[key]

    def _most_layers(self, load: StageLoad, device: DeviceType) -> int:
        """Often all of the load's: seen before any other number is tried."""
        return load.layers if self.memory.fits(load, device) else self.memory.most_layers(load, device)

    def receives(self, before: StageOption, behind: StageOption) -> tuple[float, float]:
        """Seconds of a boundary: of the stage behind in forward, of the one before in backward."""
        key = (before, behind)
        if key not in self._receives:
            a = StageShape(before.tp, before.replicas, 0)
            b = StageShape(behind.tp, behind.replicas, 0)
            self._receives[key] = max(self.cost.receive(a, b)), max(self.cost.receive(b, a))
        return self._receives[key]
