"""The depth-first search over the stages of one pipeline, from the last stage to the first.

Stage groups, TP, DP, rows and layers are enumerated together. A branch is cut only where a bound proves
that it cannot win: what is left cannot work faster than at its devices' best seconds a sample and layer,
and cannot hold more layers than its memory has room for their parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.local_batches import Pace
from planner.search.choice import PipelineChoice, Record
from planner.search.device_groups import Composition
from planner.search.layer_split import Split, SplitStage, best_splits
from planner.search.stage_groups import StageOption, StageShare

if TYPE_CHECKING:
    from planner.search.stage_search import StageSearch, StageTable


@dataclass(frozen=True)
class _Chosen:
    """A stage on the current branch, and what is known of the stages from it to the last."""

    option: StageOption
    table: StageTable
    cap: int
    fewest: int
    receive_backward: float
    """Seconds to receive gradients from the stage behind."""
    give_forward: float
    """Seconds it takes the stage behind to receive from this one."""
    behind: _Chosen | None
    depth: int
    rate: float
    """Layers a second of the stages so far, were they never idle."""
    covered: float
    """Layers that their fixed seconds displace at that rate."""
    fixed: float
    """Those seconds, which do not depend on layers."""
    quickest: float
    """Least seconds a layer costs in any of them."""
    room: int
    """Layers that fit into them together."""


class SizeSearch:
    """The depth-first search of one pipeline at one micro-batch size."""

    def __init__(self, search: StageSearch, composition: Composition, size: int, record: Record) -> None:
        self._search = search
        self._composition = composition
        self._size = size
        self._record = record
        self._most_micro_batches = max(record.micro_batches)
        self._splits: dict[tuple[tuple[float, ...], ...], list[Split]] = {}
        self._seen = 0

    def run(self) -> None:
        nothing = tuple((0,) * len(share) for share in self._composition)
        self._extend(self._composition, nothing, None)

    def _extend(self, left: StageShare, behind_share: StageShare, behind: _Chosen | None) -> None:
        """Choose, in every way, the stage before `behind`."""
        search = self._search
        if search.most_stages is not None and self._seen > search.most_stages:
            return
        search.tick()
        branches = []
        for share, rest in search.shares(left, behind_share):
            rest_rate, rest_room = search.rate(rest, self._size), search.room(rest)
            for option in search.options(share, self._size):
                self._seen += 1
                chosen = self._chosen(option, behind, first=share == left)
                if chosen is not None and chosen.room + rest_room >= search.layers:
                    branches.append((self._bound(chosen, rest_rate), chosen, rest))
        search.counts.stages_seen += len(branches)
        # The most promising first, so that the others are cut by what it finds.
        branches.sort(key=lambda branch: branch[0][1])
        for bound, chosen, rest in branches:
            if self._record.hopeless(*bound):
                search.counts.branches_cut += 1
            elif chosen.option.share == left:
                self._finish(chosen)
            else:
                self._extend(rest, chosen.option.share, chosen)

    def _chosen(self, option: StageOption, behind: _Chosen | None, *, first: bool) -> _Chosen | None:
        """The option as the stage before `behind`; None if it does not fit its devices."""
        search, head = self._search, behind is None
        depth = 1 if behind is None else behind.depth + 1
        fewest = 0 if first or head else 1
        in_flight = min(depth, self._most_micro_batches)
        cap = search.cap(option, embedding=first, head=head, in_flight=in_flight)
        if cap < fewest:
            return None
        table = search.table(option, embedding=first, head=head)
        per_layer = table.per_layer
        if behind is None:
            own = table.seconds[0]
            return _Chosen(
                option,
                table,
                cap,
                fewest,
                receive_backward=0.0,
                give_forward=0.0,
                behind=None,
                depth=1,
                rate=1 / per_layer,
                covered=own / per_layer,
                fixed=own,
                quickest=per_layer,
                room=cap,
            )
        forward, backward = search.receives(option, behind.option)
        own = table.seconds[0] + backward
        return _Chosen(
            option,
            table,
            cap,
            fewest,
            receive_backward=backward,
            give_forward=forward,
            behind=behind,
            depth=depth,
            rate=behind.rate + 1 / per_layer,
            covered=behind.covered + own / per_layer + forward / behind.table.per_layer,
            fixed=behind.fixed + own + forward,
            quickest=min(behind.quickest, per_layer),
            room=behind.room + cap,
        )

    def _bound(self, chosen: _Chosen, rest_rate: float) -> tuple[float, float]:
        """Least (fill, period) of any pipeline that ends in these stages.

        All stages are busy for at most a period and together do all layers, so the period is at least
        (layers + covered) / rate; the fill holds all fixed seconds and every layer at the quickest.
        """
        layers = self._search.layers
        period = (layers + chosen.covered) / (chosen.rate + rest_rate)
        quickest = min(chosen.quickest, 1 / rest_rate) if rest_rate else chosen.quickest
        return max(chosen.fixed + layers * quickest, period), period

    def _finish(self, chosen: _Chosen) -> None:
        """Split the layers over a whole pipeline and keep the result where it wins."""
        search, record = self._search, self._record
        stages: list[_Chosen] = []
        extras: list[float] = []
        stage: _Chosen | None = chosen
        given = 0.0
        while stage is not None:
            stages.append(stage)
            extras.append(stage.receive_backward + given)
            given, stage = stage.give_forward, stage.behind
        # Stages in any order split alike, so the cache's key is sorted.
        keys = [
            (stage.table.index, extra, stage.cap, stage.fewest)
            for stage, extra in zip(stages, extras, strict=True)
        ]
        order = sorted(range(len(stages)), key=keys.__getitem__)
        key = tuple(keys[i] for i in order)
        if key in self._splits:
            search.counts.layer_split_cache_hits += 1
        else:
            search.counts.layer_splits += 1
            self._splits[key] = best_splits(
                [
                    SplitStage(stages[i].table.seconds, extras[i], stages[i].fewest, stages[i].cap)
                    for i in order
                ],
                layers=search.layers,
                micro_batches=record.micro_batches,
            )
        # Counts of micro-batches often share a split; its choice is made once.
        made: dict[Split, PipelineChoice] = {}
        for index, split in enumerate(self._splits[key]):
            if split not in made:
                made[split] = self._choice(stages, split, order)
            record.offer(index, made[split])

    def _choice(self, stages: Sequence[_Chosen], split: Split, order: Sequence[int]) -> PipelineChoice:
        layers = [0] * len(order)
        for position, count in zip(order, split.layers, strict=True):
            layers[position] = count
        options = tuple(stage.option for stage in stages)
        return PipelineChoice(
            self._size,
            options,
            tuple(layers),
            Pace(self._size, split.fill_seconds, split.period_seconds),
            self._search.after.of(options, layers),
        )
