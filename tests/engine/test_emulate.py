"""Emulated devices: pace, links and memory. Times are checked by a clock of the test's own, or from below."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from actors.engine import emulate, exchange
from actors.engine.device import make_device
from actors.engine.gradient_transport import GroupTransport
from actors.engine.iteration import IterationReport
from actors.engine.process_groups import ProcessGroups
from actors.engine.trainer import TrainerConfig
from actors.engine.transports import slice_gather
from planner.cluster import Cluster
from planner.cost.exchange import gather_seconds
from planner.cost.gradient import block_seconds, optimizer_seconds
from planner.cost.price import price_plan, replica_seconds, transfer_seconds
from planner.cost.stage_shape import stage_shape
from planner.cost.stages import StageCost
from planner.gradient_calls import gradient_layout
from planner.plan import Plan, PlanEmulation
from tests.engine import reference
from tests.engine.law_plans import FP32, MODEL
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import leave_pool_groups, make_trainer, train_rank, training_of, write_tokens
from tests.plans import Degrees, make_plan


def emulated_plan(*pipelines: list[Degrees], time_scale: float = 1.0, memory_scale: float = 1.0) -> Plan:
    """A plan for emulated 910B2 (the first half) and 910B4."""
    count = sum(tp * dp for stages in pipelines for tp, dp, _ in stages)
    nodes = [
        {"name": "fast", "devices": [{"type": "910B2", "count": (count + 1) // 2}], "emulate": True},
        {"name": "slow", "devices": [{"type": "910B4", "count": max(1, count // 2)}], "emulate": True},
    ]
    return make_plan(
        MODEL,
        pipelines,
        cluster=Cluster.model_validate({"nodes": nodes}),
        dtypes=FP32,
        emulation=PlanEmulation(time_scale=time_scale, memory_scale=memory_scale),
    )


class Clock:
    """Time that passes only when someone sleeps or says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(emulate, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_step_lasts_its_planned_seconds_or_the_hosts(clock: Clock) -> None:
    plan = emulated_plan([(1, 1, 2), (1, 1, 2)], time_scale=1e6)
    place = plan.ranks[1]
    device = make_device(plan, place)
    planned = replica_seconds(plan, pipeline=0, stage=1, replica=0)
    for kind, seconds in (
        ("forward", planned.forward),
        ("backward", planned.backward),
        ("optimizer", optimizer_seconds(plan, place.device)),
    ):
        assert seconds > 0
        for host_share, late in ((0.5, 0), (3.0, 1)):
            start, late_before = clock.now, device.late_steps
            with device.step(kind):  # type: ignore[arg-type]
                clock.now += host_share * seconds * 1e6
            assert clock.now - start == pytest.approx(max(1.0, host_share) * seconds * 1e6)
            assert device.late_steps - late_before == late
    assert device.steps == 6


class Immediate:
    """A transport whose messages are there at once; the stamps of a sender go to the receiver."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def send(self, tensor: torch.Tensor, *, receiver: int) -> exchange.Message:
        self.sent.append(tensor.clone())
        return Done()

    def receive(self, tensor: torch.Tensor, *, sender: int) -> exchange.Message:
        return Delivery(self, tensor)


class Done:
    def wait(self) -> None:
        return None


class Delivery(Done):
    def __init__(self, transport: Immediate, tensor: torch.Tensor) -> None:
        self._transport, self._tensor = transport, tensor

    def wait(self) -> None:
        self._tensor.copy_(self._transport.sent.pop(0))


def test_a_message_is_there_after_its_links_time_and_not_before(clock: Clock) -> None:
    plan = emulated_plan([(1, 1, 2), (1, 1, 2)], time_scale=1e4)
    inner = Immediate()
    sender = emulate.PacedMessages(inner, plan=plan, place=plan.ranks[0])
    receiver = emulate.PacedMessages(inner, plan=plan, place=plan.ranks[1])
    payload = torch.randn(64, 64)
    link = 1e4 * transfer_seconds(plan, sender="fast/0", receiver="slow/0", message_bytes=64 * 64 * 4)
    target = torch.zeros(64, 64)

    start = clock.now
    sender.send(payload, receiver=1)
    message = receiver.receive(target, sender=0)
    clock.now += 0.25 * link
    message.wait()
    assert torch.equal(target, payload)
    assert clock.now - start == pytest.approx(link)

    # A message that waited long enough for its receiver costs nothing more.
    sender.send(payload, receiver=1)
    clock.now += 10 * link
    start = clock.now
    receiver.receive(target, sender=0).wait()
    assert clock.now == start

    # A device sends one message after the other.
    start = clock.now
    for _ in range(3):
        sender.send(payload, receiver=1)
    for number in range(3):
        receiver.receive(target, sender=0).wait()
        assert clock.now - start == pytest.approx((number + 1) * link)


def test_clocks_of_unlike_hosts_hold_no_message_longer_than_its_link(clock: Clock) -> None:
    plan = emulated_plan([(1, 1, 2), (1, 1, 2)], time_scale=1e4)
    inner = Immediate()
    sender = emulate.PacedMessages(inner, plan=plan, place=plan.ranks[0])
    receiver = emulate.PacedMessages(inner, plan=plan, place=plan.ranks[1])
    clock.now += 1e6
    sender.send(torch.zeros(64, 64), receiver=1)
    clock.now -= 1e6
    start = clock.now
    receiver.receive(torch.zeros(64, 64), sender=0).wait()
    link = 1e4 * transfer_seconds(plan, sender="fast/0", receiver="slow/0", message_bytes=64 * 64 * 4)
    assert clock.now - start == pytest.approx(link)


LATE_SECONDS = 0.2


def _paced_blocks(rank: int, plan: Plan) -> tuple[float, float]:
    """When the last rank was ready, by the clock that the ranks share, and when this rank was done."""
    groups = ProcessGroups.open(
        plan=plan,
        rank=rank,
        store=leave_pool_groups(rank),
        timeout_seconds=30,
        device=torch.device("cpu"),
    )
    calls = gradient_layout(plan).calls_of(rank)
    reductions = groups.reductions()
    transport = emulate.PacedCalls(GroupTransport(reductions), groups=reductions, plan=plan)
    dist.barrier()
    if rank == 1:
        time.sleep(LATE_SECONDS)
    ready = torch.tensor([time.monotonic()], dtype=torch.float64)
    data = [torch.full((call.numel,), float(rank + 1)) for call in calls]
    for work in [transport.reduce(call, part) for call, part in zip(calls, data, strict=True)]:
        work.wait()
    done = time.monotonic()
    transport.close()
    assert all(bool((part == 3.0).all()) for part in data)
    dist.all_reduce(ready, dist.ReduceOp.MAX)
    return float(ready), done


def test_blocks_take_their_planned_time_from_when_the_last_holder_is_ready(rank_pool: RankPool) -> None:
    plan = emulated_plan([(1, 1, 4)], [(1, 1, 4)], time_scale=500.0)
    seconds = 500.0 * sum(block_seconds(plan, call) for call in gradient_layout(plan).calls)
    assert seconds > 0.02
    for ready, done in rank_pool.run(_paced_blocks, plan, world_size=2):
        assert done - ready >= seconds


def _paced_gather(rank: int, plan: Plan) -> tuple[float, float]:
    """The same of gathering two slices."""
    groups = ProcessGroups.open(
        plan=plan,
        rank=rank,
        store=leave_pool_groups(rank),
        timeout_seconds=30,
        device=torch.device("cpu"),
    )
    gather = slice_gather(plan, plan.ranks[rank], groups)
    assert gather is not None
    whole = torch.zeros(2, 1000)
    whole[rank] = rank + 1
    dist.barrier()
    if rank == 1:
        time.sleep(LATE_SECONDS)
    ready = torch.tensor([time.monotonic()], dtype=torch.float64)
    gather(whole.view(-1))
    done = time.monotonic()
    assert whole.equal(torch.tensor([[1.0], [2.0]]).expand(2, 1000))
    dist.all_reduce(ready, dist.ReduceOp.MAX)
    return float(ready), done


def test_slices_are_gathered_in_their_planned_time_from_when_the_last_rank_has_its_own(
    rank_pool: RankPool,
) -> None:
    nodes = [{"name": "one", "devices": [{"type": "910B2", "count": 2}], "emulate": True}]
    cluster = Cluster.model_validate({"nodes": nodes})
    emulation = PlanEmulation(time_scale=1e5)
    plan = make_plan(MODEL, [[(2, 1, 4)]], cluster=cluster, dtypes=FP32, emulation=emulation)
    seconds = 1e5 * gather_seconds(plan.cluster.links, "910B2", tp=2, message_bytes=2 * 1000 * 4)
    assert seconds > 0.02
    for ready, done in rank_pool.run(_paced_gather, plan, world_size=2):
        assert done - ready >= seconds


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def test_an_emulated_run_trains_the_same_and_no_faster_than_planned(
    rank_pool: RankPool, tokens: Path
) -> None:
    plan = emulated_plan([(1, 1, 1), (1, 1, 3)], [(2, 1, 4)], time_scale=300.0)
    training = training_of(plan, steps=2)
    config = TrainerConfig(plan=plan, training=training, tokens=tokens, timeout_seconds=30)
    outcomes = rank_pool.run(train_rank, config, world_size=plan.world_size)
    expected = reference.train(plan.model, training, tokens)
    for place, outcome in zip(plan.ranks, outcomes, strict=True):
        report: IterationReport = outcome.reports[-1]
        assert report.loss == pytest.approx(expected.losses[-1], rel=1e-6)
        micro_batches = plan.pipelines[place.pipeline].micro_batches
        assert report.steps == 2 * micro_batches + 1
        step = replica_seconds(plan, pipeline=place.pipeline, stage=place.stage, replica=place.replica)
        busy = micro_batches * step.total * 300.0
        assert report.compute_end_time - report.start_time >= busy
        assert [event.kind for event in report.events].count("backward") == micro_batches
        assert math.isclose(report.events[-1].end_seconds, report.end_time - report.start_time, abs_tol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["all", "pipeline"])
def test_replicas_scatter_and_gather_no_faster_than_planned(
    rank_pool: RankPool, tokens: Path, scope: str
) -> None:
    """ZeRO-2: each backward lasts its scatter longer, and new parameters are there when their links have them."""
    scale = 300.0
    plan = emulated_plan([(1, 2, 4)], [(1, 1, 1), (1, 1, 3)], time_scale=scale)
    plan = Plan.model_validate(plan.model_dump() | {"zero_stage": 2, "zero_scope": scope})
    training = training_of(plan, steps=2)
    config = TrainerConfig(plan=plan, training=training, tokens=tokens, timeout_seconds=30)
    outcomes = rank_pool.run(train_rank, config, world_size=plan.world_size)
    expected, priced = reference.train(plan.model, training, tokens), price_plan(plan)
    cost = StageCost.of_plan(plan)
    assert priced.gather_seconds > 0
    for place, outcome in zip(plan.ranks, outcomes, strict=True):
        report: IterationReport = outcome.reports[-1]
        assert report.loss == pytest.approx(expected.losses[-1], rel=1e-6)
        step = replica_seconds(plan, pipeline=place.pipeline, stage=place.stage, replica=place.replica)
        stage = plan.pipelines[place.pipeline].stages[place.stage]
        scatter = cost.scatter_seconds(stage_shape(stage, plan.cluster, zero_stage=2))
        assert (scatter > 0) == (stage.dp > 1)
        for event in report.events:
            if event.kind == "backward":
                assert event.end_seconds - event.start_seconds >= (step.backward + scatter) * scale
        if stage.dp > 1:
            assert report.end_time - report.sync_end_time >= priced.gather_seconds * scale


def _out_of_memory_message(rank: int, config: TrainerConfig) -> str:
    try:
        trainer = make_trainer(config, rank)
        trainer.run_iteration(1)
        trainer.close()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "fits"


def test_what_does_not_fit_fails_with_device_stage_bytes_and_limit(rank_pool: RankPool, tokens: Path) -> None:
    plan = emulated_plan([(1, 1, 4)], memory_scale=1.0)
    config = TrainerConfig(plan=plan, training=training_of(plan, steps=1), tokens=tokens, timeout_seconds=30)
    (measured,) = rank_pool.run(_measured_bytes, config, world_size=1)
    limit = plan.cluster.type_of("fast/0").memory_bytes
    for share, fits in ((0.99, True), (1.01, False)):
        scaled = emulated_plan([(1, 1, 4)], memory_scale=share * limit / measured)
        told = rank_pool.run(
            _out_of_memory_message,
            TrainerConfig(plan=scaled, training=config.training, tokens=tokens, timeout_seconds=30),
            world_size=1,
        )[0]
        assert (told == "fits") == fits, told
    assert "out of memory on fast/0 (emulated 910B2): pipeline 0, stage 0 wants" in told
    assert "the limit is 64.0 GiB" in told


def _measured_bytes(rank: int, config: TrainerConfig) -> int:
    trainer = make_trainer(config, rank)
    peaks = [trainer.run_iteration(1).peak_tensor_bytes]
    trainer.close()
    return peaks[0]


def test_a_peer_of_a_stage_that_does_not_fit_fails_too(rank_pool: RankPool, tokens: Path) -> None:
    plan = emulated_plan([(1, 1, 4), (1, 1, 0)], memory_scale=1e5)
    config = TrainerConfig(plan=plan, training=training_of(plan, steps=1), tokens=tokens, timeout_seconds=30)
    first, second = rank_pool.run(_out_of_memory_message, config, world_size=2)
    assert "DeviceOutOfMemory: out of memory on fast/0 (emulated 910B2): pipeline 0, stage 0 wants" in first
    assert "onnection closed" in second, second
