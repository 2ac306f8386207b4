"""1F1B for any number of stages and micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.schedule import Step, one_f_one_b


@given(stages=st.integers(1, 9), micro_batches=st.integers(1, 20), data=st.data())
def test_every_micro_batch_goes_forward_then_backward_in_order_with_bounded_memory(
    stages: int, micro_batches: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    steps = one_f_one_b(stages=stages, stage=stage, micro_batches=micro_batches)
    for kind in ("forward", "backward"):
        assert [step.micro_batch for step in steps if step.kind == kind] == list(range(micro_batches))
    in_flight, most = 0, 0
    for step in steps:
        in_flight += 1 if step.kind == "forward" else -1
        assert in_flight >= 0
        most = max(most, in_flight)
    assert most == min(stages - stage, micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_it_takes_no_longer_than_a_pipeline_must(micro_batches: int) -> None:
    """With steps of one tick, the last backward of the first stage ends after 2 (n + S - 1) ticks."""
    stages = 4
    done: dict[tuple[int, Step], int] = {}
    orders = [one_f_one_b(stages=stages, stage=s, micro_batches=micro_batches) for s in range(stages)]
    free = [0] * stages
    position = [0] * stages
    while any(position[s] < len(orders[s]) for s in range(stages)):
        moved = False
        for s in range(stages):
            if position[s] == len(orders[s]):
                continue
            step = orders[s][position[s]]
            neighbour = s - 1 if step.kind == "forward" else s + 1
            needed = (neighbour, step) if 0 <= neighbour < stages else None
            if needed is not None and needed not in done:
                continue
            free[s] = max(free[s], done[needed] if needed is not None else 0) + 1
            done[s, step] = free[s]
            position[s] += 1
            moved = True
        assert moved, "the stages wait for each other"
    assert max(done.values()) == 2 * (micro_batches + stages - 1)
