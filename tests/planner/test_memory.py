"""Memory of a stage: what must not fall when something grows, and figures worked out by hand."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalogue import CATALOGUE
from planner.cost.activations import ActivationSizes, layer_saved_bytes, layer_values
from planner.cost.memory import MemoryModel, StageLoad
from planner.cost.price import check_memory, price_plan
from planner.errors import UserError
from planner.model_spec import PRESETS
from planner.parameters import model_parameters
from planner.plan import Dtypes, Plan
from tests.plans import make_model, make_plan

MODEL = PRESETS["gpt3-350m"]

loads = st.builds(
    StageLoad,
    tp=st.sampled_from([1, 2, 4]),
    rows=st.integers(1, 8),
    layers=st.integers(1, 24),
    embedding=st.booleans(),
    head=st.booleans(),
    in_flight=st.integers(1, 8),
)


def memory_of(precision: str = "bf16", length: int = 1024, scale: float = 1.0) -> MemoryModel:
    dtypes = Dtypes(param=precision)  # type: ignore[arg-type]
    return MemoryModel(model=MODEL, sequence_length=length, dtypes=dtypes, memory_scale=scale)


@given(loads, st.sampled_from(["rows", "layers", "in_flight"]))
def test_more_of_anything_needs_no_less(load: StageLoad, field: str) -> None:
    more = dataclasses.replace(load, **{field: getattr(load, field) + 1})
    assert memory_of().tensor_bytes(more) >= memory_of().tensor_bytes(load)
    assert memory_of(length=1025).tensor_bytes(load) >= memory_of().tensor_bytes(load)


@given(loads)
def test_more_tensor_parallelism_needs_no_more(load: StageLoad) -> None:
    half = dataclasses.replace(load, tp=2 * load.tp)
    # Beside the result of an all-reduce that one device alone has not.
    slack = load.rows * 1024 * MODEL.hidden_size * 2 + load.rows * 1024 * 64 if load.tp == 1 else 0
    assert memory_of().tensor_bytes(half) <= memory_of().tensor_bytes(load) + slack


@given(loads, st.sampled_from(["910B4", "RTX3090", "CPU"]))
def test_the_most_layers_fit_and_one_more_does_not(load: StageLoad, name: str) -> None:
    memory, device = memory_of(), CATALOGUE[name]
    most = memory.most_layers(dataclasses.replace(load, layers=24), device)
    if most >= 0:
        assert memory.fits(dataclasses.replace(load, layers=most), device)
    if most < 24:
        assert not memory.fits(dataclasses.replace(load, layers=most + 1), device)


def test_state_is_sixteen_bytes_a_value_in_fp32_and_eighteen_in_bf16() -> None:
    """Short sequences leave the state and the optimizer's one temporary a value."""
    values = sum(parameter.numel for parameter in model_parameters(MODEL))
    load = StageLoad(tp=1, rows=1, layers=24, embedding=True, head=True, in_flight=1)
    for precision, width in (("fp32", 16), ("bf16", 18)):
        assert memory_of(precision, length=1).tensor_bytes(load) == pytest.approx(
            values * (width + 4), rel=1e-3
        )


def test_a_layer_keeps_the_storages_that_autograd_keeps() -> None:
    """Per token in fp32: 4 hidden, q, k, v and context over tp, 2 inner over tp, the softmax's square."""
    sizes = ActivationSizes(MODEL, Dtypes(param="fp32"), tp=2, rows=3, sequence_length=128)
    hidden, tokens = MODEL.hidden_size, 3 * 128
    values = tokens * (4 * hidden + 4 * hidden / 2 + 2 * 4 * hidden / 2 + 128 * MODEL.heads / 2)
    statistics = 4 * tokens
    assert layer_saved_bytes(sizes) == 4 * (values + statistics)
    assert len({value.name for value in layer_values(sizes)}) == len(layer_values(sizes))


def test_the_first_stage_of_1f1b_holds_most_micro_batches() -> None:
    model = make_model()
    plan = make_plan(model, [[(1, 1, 1)] * 4], samples=[8])
    stages = price_plan(plan).pipelines[0].stages
    assert stages[0].tensor_bytes > stages[1].tensor_bytes > stages[2].tensor_bytes
    one = make_plan(model, [[(1, 1, 1)] * 4], samples=[1])
    assert price_plan(one).pipelines[0].stages[0].tensor_bytes < stages[0].tensor_bytes


def test_memory_scale_multiplies_tensors() -> None:
    load = StageLoad(tp=1, rows=1, layers=2, embedding=True, head=False, in_flight=2)
    assert memory_of(scale=1000.0).tensor_bytes(load) == pytest.approx(
        1000 * memory_of().tensor_bytes(load), rel=1e-6
    )


def test_a_plan_that_does_not_fit_is_refused_by_stage_and_bytes() -> None:
    plan = make_plan(make_model(), [[(1, 1, 2), (1, 1, 2)]])
    check_memory(plan)
    stage = price_plan(plan).pipelines[0].stages[0]
    scale = 1.01 * stage.memory_limit_bytes / stage.tensor_bytes
    large = Plan.model_validate(plan.model_dump() | {"emulation": {"memory_scale": scale}})
    with pytest.raises(
        UserError, match=r"pipelines\[0\]\.stages\[0\] needs .* more than its 64.0 GiB; give it fewer"
    ):
        check_memory(large)
