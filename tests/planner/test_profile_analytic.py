"""Analytic profile against numbers worked out by hand."""

import pytest

from planner.catalogue import CATALOGUE
from planner.model_spec import PRESETS, ModelSpec
from planner.operators import layer_operators
from planner.profile.analytic import AnalyticProfile, operator_work
from planner.profile.table import StepSeconds, model_operators

MODEL = ModelSpec(name="m", layers=3, hidden_size=64, heads=4, vocab_size=101, max_sequence_length=32)


def seconds(profile: AnalyticProfile, operator: str, **changes: object) -> StepSeconds:
    case: dict[str, object] = {"tp": 1, "samples": 2, "sequence_length": 32, "precision": "bf16"}
    return profile.operator_seconds(device_type="A100", operator=operator, **(case | changes))  # type: ignore[arg-type]


@pytest.fixture
def profile() -> AnalyticProfile:
    return AnalyticProfile(MODEL, {"A100": CATALOGUE["A100"]})


def test_a_projection_takes_its_flops_at_half_the_peak(profile: AnalyticProfile) -> None:
    flops = 2 * (2 * 32) * 64 * 256
    step = seconds(profile, "mlp_up")
    assert step.forward == pytest.approx(flops / (312e12 * 0.5))
    assert step.backward == pytest.approx(2 * step.forward)
    assert seconds(profile, "mlp_up", precision="fp32").forward == pytest.approx(flops / (156e12 * 0.5))
    assert seconds(profile, "mlp_up", tp=4).forward == pytest.approx(step.forward / 4)


def test_attention_makes_the_whole_square(profile: AnalyticProfile) -> None:
    flops = 2 * 2 * 4 * 32 * 32 * 16
    assert seconds(profile, "scores").forward == pytest.approx(flops / (312e12 * 0.5))
    assert seconds(profile, "context") == pytest.approx(seconds(profile, "scores"))


def test_a_norm_moves_its_values_through_memory(profile: AnalyticProfile) -> None:
    values = 2 * 32 * 64
    step = seconds(profile, "attention_norm")
    assert step.forward == pytest.approx(2 * values * 2 / (2039e9 * 0.7))
    assert step.backward == pytest.approx(1.5 * step.forward)
    # Every TP rank normalises the whole activation.
    assert seconds(profile, "attention_norm", tp=4) == step


def test_the_head_projects_onto_the_padded_shard() -> None:
    work = operator_work(MODEL, operator="vocabulary_projection", tp=2, samples=1, sequence_length=32)
    assert work.forward_flops == 2 * 32 * 64 * 51


def test_no_dropout_costs_nothing() -> None:
    for dropout, costs in ((0.0, False), (0.1, True)):
        model = MODEL.model_copy(update={"dropout": dropout})
        work = operator_work(model, operator="attention_dropout", tp=1, samples=1, sequence_length=32)
        assert (work.forward_moved > 0) is costs


@pytest.mark.parametrize("name", ["gpt3-tiny", "llama2-tiny"])
def test_every_operator_has_its_time(name: str) -> None:
    model = PRESETS[name]
    profile = AnalyticProfile(model, CATALOGUE)
    assert set(layer_operators(model)) < set(model_operators(model))
    for operator in model_operators(model):
        step = seconds(profile, operator)
        if operator == "attention_dropout":
            assert step == (0.0, 0.0)
        else:
            assert step.forward > 0 and step.backward > 0
        # No launch overhead: linear in the samples.
        assert seconds(profile, operator, samples=6).total == pytest.approx(3 * step.total)


def test_the_record_says_analytic_and_changes_with_the_figures() -> None:
    types = {"A100": CATALOGUE["A100"], "RTX3090": CATALOGUE["RTX3090"]}
    sources = AnalyticProfile(MODEL, types).sources()
    assert [(s.type, s.provenance) for s in sources] == [("A100", "analytic"), ("RTX3090", "analytic")]
    assert sources == AnalyticProfile(MODEL, types).sources()
    slower = AnalyticProfile(MODEL, types, matmul_efficiency=0.4).sources()
    assert all(a.sha256 != b.sha256 for a, b in zip(sources, slower, strict=True))
    priced = {"A100": types["A100"].model_copy(update={"price_per_hour": 3.0})}
    assert AnalyticProfile(MODEL, priced).sources()[0].sha256 == sources[0].sha256
