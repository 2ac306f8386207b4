"""Plans whose ranks hold their parameters in unlike shapes, drawn by hypothesis."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from planner.plan import Plan
from tests.plans import Degrees, make_model, make_plan

LAYERS = 3


@st.composite
def unlike_plans(draw: st.DrawFn, *, most_ranks: int = 10) -> Plan:
    """One to three pipelines of up to three stages, TP degrees from 1 to 8, sequence parallel or not."""
    pipelines: list[list[Degrees]] = []
    degrees, left = set[int](), draw(st.integers(2, most_ranks))
    while left and len(pipelines) < 3:
        stages, layer = list[Degrees](), 0
        while left and layer < LAYERS:
            shapes = [
                (tp, dp)
                for tp in range(1, 9)
                for dp in (1, 2, 3)
                # Heads divide by all degrees: few unlike ones keep the model small.
                if tp * dp <= left and math.lcm(tp, *degrees) <= 56
            ]
            tp, dp = draw(st.sampled_from(shapes))
            degrees.add(tp)
            left -= tp * dp
            last = not left or len(stages) == 2
            layers = LAYERS - layer if last else draw(st.integers(1, LAYERS - layer))
            stages.append((tp, dp, layers))
            layer += layers
        pipelines.append(stages)
    heads, family = math.lcm(*degrees), draw(st.sampled_from(["gpt3", "llama"]))
    model = make_model(
        layers=LAYERS,
        # Rotary positions turn pairs.
        hidden_size=2 * heads if family == "llama" else heads,
        heads=heads,
        vocab_size=draw(st.integers(2, 40)),
        # Sequence parallel cuts it by any of the degrees.
        max_sequence_length=heads,
        family=family,
        tied_embedding=draw(st.booleans()),
    )
    data = make_plan(model, pipelines).model_dump()
    for stage in (stage for pipeline in data["pipelines"] for stage in pipeline["stages"]):
        stage["sequence_parallel"] = stage["tp"] > 1 and draw(st.booleans())
    return Plan.model_validate(data)


def variant(plan: Plan, scheme: str, overlap: bool) -> Plan:
    """The same plan, synchronised by another scheme."""
    return Plan.model_validate(plan.model_dump() | {"gradient_sync": scheme, "overlap": overlap})
