"""The table over measured times: what it answers, what it refuses, and the cost model on top of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.catalogue import CATALOGUE
from planner.cluster import Links
from planner.cost.stages import StageCost
from planner.errors import UserError
from planner.model_spec import PRESETS, ModelSpec
from planner.operators import layer_operators
from planner.plan import Dtypes
from planner.profile.calibration import launch_seconds
from planner.profile.file import Calibration, DeviceProfile
from planner.profile.measured import MeasuredProfile
from planner.profile.table import StepSeconds
from tests.planner.profile.sources import GROUPED, SINGLE, microseconds

CASE = {
    "device_type": "A100",
    "operator": "qkv",
    "tp": 1,
    "samples": 2,
    "sequence_length": 2048,
    "precision": "fp16",
}


def ask(table: MeasuredProfile, **changes: object) -> StepSeconds:
    return table.operator_seconds(**(CASE | changes))  # type: ignore[arg-type]


def measured(name: str, *, samples: int) -> object:
    forward, backward = microseconds(SINGLE.index(name), tp=1, samples=samples)
    return pytest.approx((forward * 1e-6, backward * 1e-6))


def test_measured_sizes_are_exact(table: MeasuredProfile) -> None:
    for samples in (1, 2, 4):
        assert ask(table, samples=samples) == measured("enc-attention-qkv", samples=samples)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(samples=st.integers(-2, 12), tp=st.integers(1, 4))
def test_answers_inside_the_grid_and_refuses_outside(table: MeasuredProfile, samples: int, tp: int) -> None:
    case = {"device_type": "A100", "tp": tp, "samples": samples, "sequence_length": 2048, "precision": "fp16"}
    if 1 <= samples <= 4 and tp in (1, 2):
        assert table.covers(**case)  # type: ignore[arg-type]
        low, high = (ask(table, tp=tp, samples=edge) for edge in (1, 4))
        assert low.forward <= ask(table, tp=tp, samples=samples).forward <= high.forward
    else:
        assert not table.covers(**case)  # type: ignore[arg-type]
        with pytest.raises(UserError):
            ask(table, tp=tp, samples=samples)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"samples": 8}, "qkv at tp 1 for micro-batches of 1 to 4 samples, not 8"),
        ({"tp": 4}, "qkv at tp 1, 2, not 4"),
        ({"precision": "bf16"}, "qkv in fp16, not in bf16"),
        ({"sequence_length": 4096}, "qkv for sequences of 2048 tokens, not 4096"),
        ({"operator": "rotary"}, "no operator 'rotary'; it has embedding"),
        ({"device_type": "H100"}, "device type H100 has no profile; there are profiles of A100"),
    ],
)
def test_what_is_missing_is_named_with_the_remedy(
    table: MeasuredProfile, changes: dict[str, object], told: str
) -> None:
    with pytest.raises(UserError) as error:
        ask(table, **changes)
    assert told in str(error.value) and "\n" not in str(error.value)
    assert "import" in str(error.value)


def test_a_lacking_operator_is_refused_at_once(
    imported: Callable[..., DeviceProfile], model: ModelSpec
) -> None:
    profile = imported(names=SINGLE[:-1])
    with pytest.raises(UserError, match="lacks operator vocabulary_projection, loss"):
        MeasuredProfile(model, {"A100": profile}, {"A100": CATALOGUE["A100"]})


def test_another_family_is_refused(imported: Callable[..., DeviceProfile]) -> None:
    with pytest.raises(UserError, match="lacks operator rotary, mlp_gate_up"):
        MeasuredProfile(PRESETS["llama2-7b"], {"A100": imported()}, {"A100": CATALOGUE["A100"]})


def test_a_model_without_dropout_spends_nothing_on_it(table: MeasuredProfile, model: ModelSpec) -> None:
    assert ask(table, operator="attention_dropout") == StepSeconds(0.0, 0.0)
    with_dropout = MeasuredProfile(
        model.model_copy(update={"dropout": 0.1}), table.profiles, {"A100": CATALOGUE["A100"]}
    )
    assert ask(with_dropout, operator="attention_dropout") == measured("enc-attention-dropout", samples=2)


def cost_of(profile: DeviceProfile, model: ModelSpec) -> StageCost:
    types = {"A100": CATALOGUE["A100"]}
    return StageCost(
        model=model,
        device_types=types,
        links=Links(),
        sequence_length=2048,
        dtypes=Dtypes(param="fp16"),
        profile=MeasuredProfile(model, {"A100": profile}, types),
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_a_stage_is_the_sum_of_its_rows_and_no_collectives(
    imported: Callable[..., DeviceProfile], model: ModelSpec, tp: int
) -> None:
    step = cost_of(imported(), model.model_copy(update={"dropout": 0.1})).replica_step(
        device_type="A100", tp=tp, rows=2, layers=3, embedding=True, head=True
    )
    times = [microseconds(row, tp=tp, samples=2) for row in range(len(SINGLE))]
    wanted = sum(time[0] for time in times[:1] + 3 * times[1:-2] + times[-2:]) * 1e-6
    assert step.forward == pytest.approx(wanted)


def test_groups_of_operators_make_up_the_parts(
    imported: Callable[..., DeviceProfile], model: ModelSpec
) -> None:
    profile = imported(names=GROUPED)
    cost = cost_of(profile, model)
    groups = cost.profile.groups("A100")
    assert tuple(name for group in groups.layer for name in group.operators) == layer_operators(model)
    assert [group.name for group in groups.layer] == ["attention", "mlp"]
    layer = cost.replica_step(device_type="A100", tp=1, rows=1, layers=1)
    wanted = [sum(microseconds(row, tp=1, samples=1)) for row in (1, 2)]
    assert layer.total == pytest.approx(sum(wanted) * 1e-6)


def test_the_heads_operators_come_in_forward_order(table: MeasuredProfile) -> None:
    assert [group.name for group in table.groups("A100").head] == ["final_norm", "projection_and_loss"]


def test_calibration_takes_the_launch_off_and_multiplies(table: MeasuredProfile) -> None:
    plain = ask(table)
    adjusted = ask(table.calibrated("A100", Calibration(factor=1.5, launch_seconds=20e-6)))
    assert adjusted.forward == pytest.approx((plain.forward - 20e-6) * 1.5)
    assert ask(table.calibrated("A100", Calibration(launch_seconds=1.0))) == StepSeconds(0.0, 0.0)


def test_a_calibration_is_part_of_the_source(table: MeasuredProfile) -> None:
    changed = table.calibrated("A100", Calibration(factor=1.5))
    assert changed.sources() != table.sources()
    assert [(source.type, source.provenance) for source in table.sources()] == [("A100", "imported")]


def test_launch_time_shows_where_the_samples_cost_nothing(imported: Callable[..., DeviceProfile]) -> None:
    flat = {"enc-MLP-gelu": {"forward-compute": 35.0}}
    assert launch_seconds(imported(changes=flat)) == pytest.approx(35e-6)
    # The shortest operator of these grows with the samples, so it is work and not launching.
    assert launch_seconds(imported(changes={"enc-MLP-GEMM-1": {"forward-compute": 900.0}})) == 0


def test_bytes_of_a_measured_case(table: MeasuredProfile) -> None:
    case = {key: value for key, value in CASE.items() if key != "operator"}
    scores, softmax = (
        table.operator_memory(operator=name, **case)  # type: ignore[arg-type]
        for name in ("scores", "softmax")
    )
    assert scores is not None and softmax is not None
    # One storage: the union over operators counts it once.
    assert scores.saved_bytes == softmax.saved_bytes == {"scores": 2 * 2048**2 * 16 * 2}
    assert table.operator_memory(operator="qkv", **(case | {"samples": 3})) is None  # type: ignore[arg-type]
