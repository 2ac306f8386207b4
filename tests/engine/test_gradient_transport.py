"""What carries gradients: shards of calls, the thread that runs steps, ranks that fail on the way."""

from __future__ import annotations

import functools
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from actors.engine import gradient_transport
from actors.engine.courier import ThreadCourier, Work
from actors.engine.gradient_transport import CallTransport, Steps
from actors.engine.shard_transport import GroupShards
from planner.cluster import Cluster, from_short_form
from planner.gradient_calls import GradientCall, call_reduction, gradient_layout
from planner.plan import Plan
from tests.engine.held_parameters import Rig, gradient_groups, rig_transport
from tests.engine.rank_pool import RankError, RankPool
from tests.gradient_plans import variant
from tests.plans import make_model, make_plan

CPU = torch.device("cpu")
SMALL = make_model(hidden_size=24)
HOLDERS: tuple[tuple[int, ...], ...] = ((0,), (1, 2), (0, 1, 2), (0, 2, 3))


# Elements; none but the first is long beside the scratch of the second case below.
SIZES = (7, 102, 1002, 4098)


def _calls() -> list[GradientCall]:
    return [
        GradientCall(index, index, holders, 0, size, 0, index)
        for index, (holders, size) in enumerate(zip(HOLDERS, SIZES, strict=True))
        if len(holders) > 1
    ]


def _shard_plan() -> Plan:
    """Four ranks on a host; the calls above are not its own, but its links choose how they are reduced."""
    return make_plan(SMALL, [[(1, 1, 4)]] * 4, cluster=from_short_form("1x4:CPU"))


def _contribution(call: GradientCall, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * call.index + rank)
    return torch.randn(call.numel, generator=generator)


def _scatter_and_gather(
    rank: int, dtype: torch.dtype, segment: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """What a rank contributed to each call, its shard of the sum, and what it gathered."""
    groups = {ranks: dist.new_group(list(ranks)) for ranks in HOLDERS}
    calls = [call for call in _calls() if rank in call.holders]

    def steps() -> Steps:
        return Steps(groups, rank=rank, wire=dtype, device=CPU)

    whole_segment, gradient_transport.SEGMENT = gradient_transport.SEGMENT, segment
    transport = GroupShards(_shard_plan(), rank=rank, sums=steps(), values=steps())
    data = [_contribution(call, rank) for call in calls]
    works = [transport.reduce(*pair) for pair in zip(calls, data, strict=True)]
    shards = []
    for work, call, whole in zip(works, calls, data, strict=True):
        work.wait()
        shards.append(whole[_own_slice(call, rank)].clone())
    for work in [transport.gather(*pair) for pair in zip(calls, data, strict=True)]:
        work.wait()
    transport.close()
    gradient_transport.SEGMENT = whole_segment
    return [
        (_contribution(call, rank), shard, whole)
        for call, shard, whole in zip(calls, shards, data, strict=True)
    ]


def _own_slice(call: GradientCall, rank: int) -> slice:
    size = call.numel // len(call.holders)
    place = call.holders.index(rank)
    return slice(place * size, (place + 1) * size)


@pytest.mark.parametrize("segment", [gradient_transport.SEGMENT, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_are_reduced_to_shards_and_gathered(
    rank_pool: RankPool, dtype: torch.dtype, segment: int
) -> None:
    results = [iter(answer) for answer in rank_pool.run(_scatter_and_gather, dtype, segment, world_size=4)]
    for call in _calls():
        held = [next(results[rank]) for rank in call.holders]
        total = sum(mine.double() for mine, _, _ in held)
        assert isinstance(total, torch.Tensor)
        relative, absolute = (1e-6, 1e-6) if dtype == torch.float32 else (0.01, 0.05)
        for rank, (_, shard, whole) in zip(call.holders, held, strict=True):
            own = total[_own_slice(call, rank)]
            torch.testing.assert_close(shard.double(), own, rtol=relative, atol=absolute)
            torch.testing.assert_close(whole.double(), total, rtol=relative, atol=absolute)
            assert torch.equal(whole, held[0][2]), "holders gathered unlike bits"


def test_the_courier_works_in_order_and_fails_for_good() -> None:
    courier, done = ThreadCourier(), list[int]()

    def broken() -> None:
        raise ConnectionError("peer gone")

    works = [courier.start(functools.partial(done.append, number)) for number in range(20)]
    for work in works:
        work.wait()
    assert done == list(range(20))
    first, second = courier.start(broken), courier.start(lambda: done.append(20))
    for work in (first, second):
        with pytest.raises(ConnectionError, match="peer gone"):
            work.wait()
    assert done[-1] == 19
    (thread,) = [t for t in threading.enumerate() if t.name == "gradient courier"]
    courier.close()
    thread.join(timeout=10)
    assert not thread.is_alive()


TIMEOUT_SECONDS = 5.0
VICTIM = 1


class _FailingTransport:
    """Takes part in one call; at the second it dies, or never comes."""

    def __init__(self, inner: CallTransport, *, dies: bool) -> None:
        self._inner = inner
        self._dies = dies
        self._calls = 0

    def reduce(self, call: GradientCall, data: torch.Tensor) -> Work:
        self._calls += 1
        if self._calls == 2:
            if self._dies:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return self._inner.reduce(call, data)

    def close(self) -> None:
        self._inner.close()


def _failing_sync(rank: int, wire: str, dies: bool, folder: Path) -> None:
    """The others are inside the iteration's collectives with the victim, one of them complete."""
    plan = make_plan(SMALL, [[(1, 1, 4)], [(1, 1, 2), (1, 1, 2)]], dtypes={"wire": wire})
    groups = gradient_groups(plan, rank, timeout_seconds=TIMEOUT_SECONDS)
    transport = rig_transport(plan, rank, groups)
    # All connections exist: what fails is a collective, not a first meeting.
    Rig.make(plan, rank, transport=transport).run_once()
    if rank == VICTIM:
        transport = _FailingTransport(transport, dies=dies)
    rig = Rig.make(plan, rank, transport=transport)
    dist.barrier()
    started = time.monotonic()
    try:
        rig.run_once()
    except Exception as error:
        seconds = time.monotonic() - started
        notes = " ".join(getattr(error, "__notes__", []))
        (folder / f"{rank}.txt").write_text(f"{seconds}\n{type(error).__name__}: {error} {notes}")
        raise


@pytest.mark.parametrize(
    ("dies", "wire"),
    [
        (True, "bf16"),
        (False, "fp32"),
        pytest.param(True, "fp32", marks=pytest.mark.slow),
        pytest.param(False, "bf16", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_or_hangs_in_a_collective_is_an_error_of_all_within_the_timeout(
    tmp_path: Path, wire: str, dies: bool
) -> None:
    pool = RankPool()
    try:
        with pytest.raises(RankError, match=r"exit code -9" if dies else r"_failing_sync"):
            pool.run(_failing_sync, wire, dies, tmp_path, world_size=3)
    finally:
        pool.close()
    told = {path.stem: path.read_text() for path in tmp_path.iterdir()}
    assert set(told) == {"0", "2"}
    for text in told.values():
        seconds, _, error = text.partition("\n")
        # A death is noticed as the connection breaks, a hang by the timeout, and never twice in a row.
        assert float(seconds) < 3 * TIMEOUT_SECONDS
        assert re.search("onnection (closed|reset)" if dies else "[Tt]imed out|[Tt]imeout", error), error
        assert "while gradients were summed over ranks" in error


def _sum_twice(rank: int, wire: str) -> tuple[bytes, bytes]:
    plan = make_plan(make_model(hidden_size=48), [[(2, 1, 4)], [(1, 1, 1), (1, 1, 3)]], dtypes={"wire": wire})
    plan = variant(plan, "block", overlap=True)
    rig = Rig.make(plan, rank)
    results = []
    for delayed in (0, 3):
        rig.buffer.flat.normal_(generator=torch.Generator().manual_seed(rank))
        if rank == delayed:
            time.sleep(0.2)
        rig.run_once()
        results.append(rig.buffer.flat.numpy().tobytes())
    assert len(gradient_layout(plan).calls_of(rank)) == len(rig.sync.times)
    return results[0], results[1]


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_who_comes_late_changes_no_bit(rank_pool: RankPool, wire: str) -> None:
    for first, second in rank_pool.run(_sum_twice, wire, world_size=4):
        assert first == second


def _sum_in_segments(rank: int, wire: str) -> tuple[bytes, bytes]:
    """The same gradients at once and a few elements at a time; bf16 rounds each element alike."""
    plan = make_plan(SMALL, [[(1, 2, 4)], [(1, 1, 4)]], cluster=uneven_nodes(), dtypes={"wire": wire})
    layout = gradient_layout(plan)
    algorithms = {call_reduction(plan, call).algorithm for call in layout.calls}
    assert algorithms == {"leader"}
    results = []
    whole = gradient_transport.SEGMENT
    for segment in (whole, 1000):
        gradient_transport.SEGMENT = segment
        rig = Rig.make(plan, rank)
        rig.buffer.flat.normal_(generator=torch.Generator().manual_seed(rank))
        rig.run_once()
        rig.sync.close()
        results.append(rig.buffer.flat.numpy().tobytes())
    gradient_transport.SEGMENT = whole
    return results[0], results[1]


def uneven_nodes() -> Cluster:
    """Two devices on one node and one on another, the nodes' own links much faster than that between them."""
    links = {
        "intra_node": {"bandwidth": 1e11, "latency": 0.0},
        "inter_node": {"bandwidth": 1e9, "latency": 1e-5},
    }
    cluster = from_short_form("1x2:910B2,1x1:910B2").model_dump()
    return Cluster.model_validate(cluster | {"links": links})


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_long_messages_travel_in_segments(rank_pool: RankPool, wire: str) -> None:
    for whole, cut in rank_pool.run(_sum_in_segments, wire, world_size=3):
        first, second = (torch.frombuffer(bytearray(data), dtype=torch.float32) for data in (whole, cut))
        # Two addends reach the leader in another order: nothing else may differ.
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)
