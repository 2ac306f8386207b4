"""Who sends which rows to whom, and that no order of messages can block a pipeline."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from actors.engine.device import HostDevice
from actors.engine.exchange import Exchange, StageRanks, boundary_transfers, rank_routes
from actors.engine.model.dropout import Draws
from actors.engine.stage_runner import StageRunner
from planner.plan import Plan, RankPlace
from tests.engine.law_plans import plan_of, uneven_rows
from tests.plans import make_model


@st.composite
def _neighbours(draw: st.DrawFn) -> tuple[StageRanks, StageRanks]:
    total = draw(st.integers(1, 12))

    def stage(first_rank: int) -> StageRanks:
        cuts = draw(st.sets(st.integers(1, total - 1), max_size=5)) if total > 1 else set()
        bounds = [0, *sorted(cuts), total]
        rows = tuple(b - a for a, b in itertools.pairwise(bounds))
        return StageRanks(first_rank, draw(st.integers(1, 5)), rows)

    sender = stage(0)
    return sender, stage(len(sender.rows) * sender.tp)


@given(_neighbours())
def test_every_receiver_gets_its_rows_once_from_ranks_that_hold_them(
    stages: tuple[StageRanks, StageRanks],
) -> None:
    sender, receiver = stages
    held = _rows_by_rank(sender)
    wanted = {rank: sorted(rows) for rank, rows in _rows_by_rank(receiver).items()}
    got: dict[int, list[int]] = defaultdict(list)
    for transfer in boundary_transfers(sender, receiver):
        rows = range(transfer.start, transfer.stop)
        assert len(rows) and set(rows) <= held[transfer.sender]
        got[transfer.receiver].extend(rows)
    assert {rank: sorted(rows) for rank, rows in got.items()} == wanted


@given(_neighbours())
def test_the_tp_ranks_of_a_sending_replica_share_its_messages(stages: tuple[StageRanks, StageRanks]) -> None:
    sender, receiver = stages
    counts = {rank: 0 for rank in _rows_by_rank(sender)}
    pairs = [(t.sender, t.receiver) for t in boundary_transfers(sender, receiver)]
    for rank, _ in pairs:
        counts[rank] += 1
    for replica in range(len(sender.rows)):
        shares = [counts[sender.rank(replica, tp_rank)] for tp_rank in range(sender.tp)]
        assert max(shares) - min(shares) <= 1
    # One message a pair and micro-batch: order alone tells a pair's messages apart.
    assert len(pairs) == len(set(pairs))


def _rows_by_rank(stage: StageRanks) -> dict[int, set[int]]:
    held, first = {}, 0
    for replica, count in enumerate(stage.rows):
        for tp_rank in range(stage.tp):
            held[stage.rank(replica, tp_rank)] = set(range(first, first + count))
        first += count
    return held


def test_what_one_rank_sends_another_expects() -> None:
    plan = uneven_rows()
    sent, expected = [], []
    for place in plan.ranks:
        for route in rank_routes(plan, place).values():
            sent += [(route.kind, t.sender, t.receiver, t.stop - t.start) for t in route.sends]
            expected += [(route.kind, t.sender, t.receiver, t.stop - t.start) for t in route.receives]
    assert sorted(sent) == sorted(expected)
    assert {kind for kind, *_ in sent} == {"activations", "gradients"}


class _Rendezvous:
    """Messages as strict as a network may be: a send is complete only when its receive has been posted.

    Stands in for the process groups of all ranks, each a thread here, so that a cyclic wait is found for
    certain and not by luck of buffers.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sent: dict[tuple[str, int, int], list[torch.Tensor]] = defaultdict(list)
        self._posted: dict[tuple[str, int, int], list[torch.Tensor]] = defaultdict(list)

    def transport(self, kind: str, rank: int) -> _Endpoint:
        return _Endpoint(self, kind, rank)

    def put(self, key: tuple[str, int, int], tensor: torch.Tensor, *, sends: bool) -> Callable[[], None]:
        with self._changed:
            own, other = (self._sent, self._posted) if sends else (self._posted, self._sent)
            own[key].append(tensor)
            index = len(own[key]) - 1
            self._changed.notify_all()

        def wait() -> None:
            with self._changed:
                if not self._changed.wait_for(lambda: len(other[key]) > index, timeout=20):
                    raise TimeoutError(f"{key} message {index} is never met")
                if not sends:
                    tensor.copy_(other[key][index])

        return wait


class _Endpoint:
    def __init__(self, rendezvous: _Rendezvous, kind: str, rank: int) -> None:
        self._rendezvous, self._kind, self._rank = rendezvous, kind, rank

    def send(self, tensor: torch.Tensor, *, receiver: int) -> _Handle:
        return _Handle(self._rendezvous.put((self._kind, self._rank, receiver), tensor.clone(), sends=True))

    def receive(self, tensor: torch.Tensor, *, sender: int) -> _Handle:
        return _Handle(self._rendezvous.put((self._kind, sender, self._rank), tensor, sends=False))


class _Handle:
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


class _Scale(nn.Module):
    """A stage that multiplies: what arrives at the end says whose rows it passed."""

    def __init__(self, factor: float, *, first: bool, last: bool) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.has_embedding, self.has_head = first, last

    def forward(
        self, inputs: torch.Tensor, labels: Any = None, loss_scale: float = 1.0, draws: Draws | None = None
    ) -> torch.Tensor:
        scaled = inputs * self.factor
        return scaled.sum() * loss_scale if self.has_head else scaled


def _run_rank(plan: Plan, place: RankPlace, rendezvous: _Rendezvous, losses: dict[int, list[float]]) -> None:
    pipeline = plan.pipelines[place.pipeline]
    stage = pipeline.stages[place.stage]
    model = _Scale(2.0, first=stage.embedding, last=stage.head)
    exchange = Exchange(
        plan=plan,
        place=place,
        transports={kind: rendezvous.transport(kind, place.rank) for kind in ("activations", "gradients")},
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    runner = StageRunner(
        model=model,  # type: ignore[arg-type]
        exchange=exchange,
        device=HostDevice(place=place, device_type="CPU"),
        stages=len(pipeline.stages),
        stage=place.stage,
        micro_batches=pipeline.micro_batches,
    )
    first, last = stage.row_range(place.replica)
    shape = (last - first, plan.sequence_length, plan.model.hidden_size)

    def batch(micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(first, last) + 100.0 * micro_batch
        return rows.view(-1, 1, 1).expand(shape).contiguous(), rows

    for _ in range(2):
        result = runner.run(batch, lambda _: Draws(seed=0, iteration=1, first_sample=0))
    losses[place.rank] = [float(loss) for loss in result.losses]


def _run_pipeline(plan: Plan) -> dict[int, list[float]]:
    rendezvous, losses, errors = _Rendezvous(), dict[int, list[float]](), list[BaseException]()

    def work(place: RankPlace) -> None:
        try:
            _run_rank(plan, place, rendezvous, losses)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in plan.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors, errors
    assert len(losses) == plan.world_size
    return losses


TINY = make_model(layers=6, hidden_size=12, max_sequence_length=2)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_no_count_of_micro_batches_blocks_a_pipeline(stages: int, micro_batches: int) -> None:
    layers = [6 - (stages - 1)] + [1] * (stages - 1)
    plan = plan_of([(1, 1, count) for count in layers], model=TINY, samples=[micro_batches])
    losses = _run_pipeline(plan)
    values = plan.sequence_length * plan.model.hidden_size
    assert losses[stages - 1] == [2.0**stages * 100.0 * index * values for index in range(micro_batches)]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    degrees=st.lists(st.tuples(st.integers(1, 2), st.sampled_from([1, 2, 3])), min_size=2, max_size=4),
    micro_batches=st.integers(1, 6),
)
def test_no_pair_of_degrees_blocks_a_pipeline(degrees: list[tuple[int, int]], micro_batches: int) -> None:
    layers = [6 - (len(degrees) - 1)] + [1] * (len(degrees) - 1)
    stages = [(tp, dp, count) for (tp, dp), count in zip(degrees, layers, strict=True)]
    plan = plan_of(stages, model=TINY, micro_batch_sizes=[6], samples=[6 * micro_batches])
    losses = _run_pipeline(plan)
    last = len(degrees) - 1
    heads = [place for place in plan.ranks if place.stage == last and place.tp_rank == 0]
    values = plan.sequence_length * plan.model.hidden_size
    for index in range(micro_batches):
        total = sum(losses[place.rank][index] for place in heads)
        assert total == 2.0 ** len(degrees) * values * sum(100.0 * index + row for row in range(6))
