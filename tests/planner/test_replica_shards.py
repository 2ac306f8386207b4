"""What replicas keep of the gradients: cut anyhow, every element has one owner, where a piece of it lies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.gradient_calls import gradient_layout
from planner.plan import Plan
from planner.replica_shards import Stand, common_ranges, owned_ranges, parts_of, replicas_of
from tests.engine.law_plans import drawn_plans


@given(
    numel=st.integers(1, 3000),
    stages=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=4),
)
def test_owners_share_a_part_evenly_and_inside_their_pieces(
    numel: int, stages: list[tuple[int, int]]
) -> None:
    stands = tuple(
        Stand(dp, replica) for dp, copies in stages for replica in range(dp) for _ in range(copies)
    )
    owned = owned_ranges(numel, stands)
    elements = sorted(at for ranges in owned for start, stop in ranges for at in range(start, stop))
    assert elements == list(range(numel))
    for stand, ranges in zip(stands, owned, strict=True):
        assert common_ranges([stand.piece(numel)], ranges) == list(ranges)
    # Each cut of a stage rounds by less than an element for each range next to it.
    slack = 2 * sum(dp for dp, _ in stages)
    for ranges in owned:
        assert abs(sum(stop - start for start, stop in ranges) - numel / len(stands)) <= slack


@given(plan=drawn_plans())
def test_parts_of_all_ranks_agree_and_cover_what_they_hold(plan: Plan) -> None:
    layout = gradient_layout(plan)
    seen: dict[tuple[int, int], object] = {}
    for rank in range(plan.world_size):
        parts = parts_of(plan, layout, rank)
        assert [(part.section, part.region) for part in parts] == sorted(
            (part.section, part.region) for part in parts
        )
        for part in parts:
            assert seen.setdefault((part.section, part.region), part) == part
            assert set(replicas_of(plan, rank)) <= set(part.holders)
            assert (part.call is None) == (len(part.holders) == 1)
        for section in layout.sections_of(rank):
            held = sum(part.numel for part in parts if part.section == section.index)
            assert held == sum(block.numel for block in section.blocks)


@given(plan=drawn_plans())
def test_a_call_that_overlaps_takes_no_region_below_its_own(plan: Plan) -> None:
    plan = Plan.model_validate(plan.model_dump() | {"overlap": True})
    layout = gradient_layout(plan)
    for rank in range(plan.world_size):
        for part in parts_of(plan, layout, rank):
            if part.call is not None:
                assert part.region >= part.call.region
                assert rank in part.call.holders and part.section == part.call.section
