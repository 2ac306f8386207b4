"""Slices of the training state: rectangles of flat ranges, and one owner for every element."""

from __future__ import annotations

import math
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.state_slices import owned_parameters, rectangles
from planner.parameters import model_parameters, stage_parameters
from planner.plan import Plan
from tests.engine.law_plans import drawn_plans


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_rectangles_are_the_range_in_its_order(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    whole = torch.arange(numel).view(shape)
    found = []
    for offsets, sizes in rectangles(shape, start, stop):
        part = whole
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        found += part.flatten().tolist()
    assert found == list(range(start, stop))
    assert len(rectangles(shape, start, stop)) <= 2 * len(shape) - 1


@given(drawn_plans())
def test_every_element_of_a_parameter_has_one_owner(plan: Plan) -> None:
    owned: Counter[str] = Counter()
    for place in plan.ranks:
        mine = owned_parameters(plan, place.rank)
        stage = plan.pipelines[place.pipeline].stages[place.stage]
        for parameter in stage_parameters(plan.model, stage):
            if parameter.name in mine:
                owned[parameter.name] += parameter.shard_numel(tp=stage.tp, tp_rank=place.tp_rank)
    assert owned == {parameter.name: parameter.numel for parameter in model_parameters(plan.model)}
