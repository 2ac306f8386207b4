"""Who sends which rows to whom, and that no order of messages can block a pipeline."""

from __future__ import annotations

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
from actors.engine.exchange import Channel, Exchange, rank_routes
from actors.engine.model.dropout import Draws
from actors.engine.stage_runner import StageRunner
from planner.cost.exchange import plan_exchange
from planner.plan import Plan, RankPlace
from tests.engine.law_plans import plan_of, slow_between_stages, uneven_rows
from tests.plans import make_model


def test_what_one_rank_sends_another_expects() -> None:
    unlike = slow_between_stages(plan_of([(2, 2, 2), (3, 1, 2)], micro_batch_sizes=[2]))
    for plan, ways in ((uneven_rows(), {False}), (unlike, {True})):
        sent, expected, found = [], [], set()
        for place in plan.ranks:
            for route in rank_routes(plan, place).values():
                sent += [(route.kind, t.sender, t.receiver, t.stop - t.start) for t in route.sends]
                expected += [(route.kind, t.sender, t.receiver, t.stop - t.start) for t in route.receives]
                found |= {route.sliced} if route.receives else set()
        assert sorted(sent) == sorted(expected)
        assert {kind for kind, *_ in sent} == {"activations", "gradients"}
        # One message a pair and micro-batch: order alone tells a pair's messages apart.
        assert len({message[:3] for message in sent}) == len(sent)
        assert found == ways


class _Rendezvous:
    """Messages as strict as a network may be: a send is complete only when its receive has been posted.

    Stands in for the process groups of all ranks, each a thread here, so that a cyclic wait is found for
    certain and not by luck of buffers.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sent: dict[tuple[str, int, int], list[torch.Tensor]] = defaultdict(list)
        self._posted: dict[tuple[str, int, int], list[torch.Tensor]] = defaultdict(list)
        self.sent_bytes: dict[tuple[str, int, int], int] = defaultdict(int)

    def transport(self, kind: str, rank: int) -> _Endpoint:
        return _Endpoint(self, kind, rank)

    def put(self, key: tuple[str, int, int], tensor: torch.Tensor, *, sends: bool) -> Callable[[], None]:
        with self._changed:
            own, other = (self._sent, self._posted) if sends else (self._posted, self._sent)
            own[key].append(tensor)
            self.sent_bytes[key] += sends * tensor.numel() * tensor.element_size()
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


class _Gather:
    """Slices of a TP group's ranks, by messages between every two of them."""

    def __init__(self, rendezvous: _Rendezvous, place: RankPlace, tp: int) -> None:
        self._own, first = place.rank, place.rank - place.tp_rank
        self._members = range(first, first + tp)
        self._endpoint = rendezvous.transport("gather", place.rank)

    def __call__(self, whole: torch.Tensor) -> None:
        slices = whole.view(len(self._members), -1)
        others = [rank for rank in self._members if rank != self._own]
        own = slices[self._own - self._members[0]]
        handles = [self._endpoint.send(own, receiver=other) for other in others]
        handles += [
            self._endpoint.receive(slices[other - self._members[0]], sender=other) for other in others
        ]
        for handle in handles:
            handle.wait()


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
        self,
        inputs: torch.Tensor,
        labels: Any = None,
        loss_scale: float = 1.0,
        draws: Draws | None = None,
        documents: torch.Tensor | None = None,
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
        gather=_Gather(rendezvous, place, stage.tp) if stage.tp > 1 else None,
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
        result = runner.run(batch, lambda _: Draws(seed=0, iteration=1, first_sample=0), lambda _: None)
    losses[place.rank] = [float(loss) for loss in result.losses]


def _run_pipeline(plan: Plan, rendezvous: _Rendezvous | None = None) -> dict[int, list[float]]:
    rendezvous = rendezvous or _Rendezvous()
    losses, errors = dict[int, list[float]](), list[BaseException]()

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
    slow_links=st.booleans(),
)
def test_no_pair_of_degrees_blocks_a_pipeline(
    degrees: list[tuple[int, int]], micro_batches: int, slow_links: bool
) -> None:
    layers = [6 - (len(degrees) - 1)] + [1] * (len(degrees) - 1)
    stages = [(tp, dp, count) for (tp, dp), count in zip(degrees, layers, strict=True)]
    plan = plan_of(stages, model=TINY, micro_batch_sizes=[6], samples=[6 * micro_batches])
    losses = _run_pipeline(slow_between_stages(plan) if slow_links else plan)
    last = len(degrees) - 1
    heads = [place for place in plan.ranks if place.stage == last and place.tp_rank == 0]
    values = plan.sequence_length * plan.model.hidden_size
    for index in range(micro_batches):
        total = sum(losses[place.rank][index] for place in heads)
        assert total == 2.0 ** len(degrees) * values * sum(100.0 * index + row for row in range(6))


@pytest.mark.parametrize("degrees", [[(1, 1), (4, 1)], [(2, 2), (3, 1)], [(3, 2), (2, 2)]])
def test_slow_links_carry_each_row_once_where_the_planner_says_so(degrees: list[tuple[int, int]]) -> None:
    """Bytes between stages and inside TP groups, against those that the planner's prices stand for."""
    micro_batches, width, rows = 3, 4, 6
    stages = [(*degrees[0], 3), (*degrees[1], 3)]
    plan = plan_of(stages, model=TINY, micro_batch_sizes=[rows], samples=[rows * micro_batches])
    row_bytes = plan.sequence_length * plan.model.hidden_size * width
    for laid_out, copies in ((plan, lambda tp: tp), (slow_between_stages(plan), lambda tp: 1)):
        rendezvous = _Rendezvous()
        _run_pipeline(laid_out, rendezvous)
        first = [0, degrees[0][0] * degrees[0][1]]
        # Two iterations.
        times = 2 * micro_batches
        for kind, sender, receiver in (("activations", 0, 1), ("gradients", 1, 0)):
            tp = degrees[receiver][0]
            sent = {key: n for key, n in rendezvous.sent_bytes.items() if key[0] == kind}
            assert sum(sent.values()) == times * rows * row_bytes * copies(tp)
            _, messages = plan_exchange(laid_out, pipeline=0, sender=sender, receiver=receiver)
            assert sent == {
                (
                    kind,
                    first[sender] + message.sender[0] * degrees[sender][0] + message.sender[1],
                    first[receiver] + message.receiver[0] * tp + message.receiver[1],
                ): times * (message.stop - message.start) * row_bytes // tp
                for message in messages
            }
        gathered = sum(n for key, n in rendezvous.sent_bytes.items() if key[0] == "gather")
        # Of a replica's rows, each rank sends its slice to all others: once for activations, once for gradients.
        once = sum(rows * row_bytes * (tp - 1) for tp, _ in degrees)
        assert gathered == (times * once if laid_out is not plan else 0)


def test_the_next_message_is_asked_for_before_one_is_worked_on_and_sends_wait_for_no_receiver() -> None:
    plan = plan_of([(1, 1, 3), (1, 1, 3)], model=TINY, samples=[3])
    rendezvous = _Rendezvous()

    def channel(rank: int) -> Channel:
        return Channel(
            route=rank_routes(plan, plan.ranks[rank])["activations"],
            transport=rendezvous.transport("activations", rank),
            new_tensor=lambda: torch.zeros(1, 2, 12),
            most_unsent=2,
        )

    sender, receiver = channel(0), channel(1)
    for one in (sender, receiver):
        one.start(3)
    # Nobody has asked for them.
    sent = [torch.full((1, 2, 12), float(value)) for value in range(2)]
    for tensor in sent:
        sender.send(tensor)
    for expected, asked_for in ((0.0, 2), (1.0, 3)):
        assert bool((receiver.receive() == expected).all())
        assert len(rendezvous._posted["activations", 0, 1]) == asked_for
