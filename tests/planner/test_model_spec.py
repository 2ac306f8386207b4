import json
from pathlib import Path

import pytest

from planner.errors import UserError
from planner.model_spec import PRESETS, ModelSpec, resolve_model
from planner.operators import layer_operators
from planner.parameters import model_parameters, stage_parameters
from planner.plan import StagePlan
from planner.profile.analytic import model_flops_per_sample


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-350m", 0.35),
        ("gpt3-1.3b", 1.3),
        ("gpt3-2.6b", 2.6),
        ("gpt3-6.7b", 6.7),
        ("gpt3-13b", 13),
        ("gpt3-175b", 175),
        ("llama2-7b", 6.74),
        ("llama2-13b", 13),
        ("llama2-70b", 69),
    ],
)
def test_presets_have_the_parameters_of_their_name(name: str, billions: float) -> None:
    total = sum(parameter.numel for parameter in model_parameters(PRESETS[name]))
    assert total / 1e9 == pytest.approx(billions, rel=0.05)


def test_flops_are_six_a_parameter_and_token_for_long_models() -> None:
    model = PRESETS["gpt3-175b"]
    parameters = sum(parameter.numel for parameter in model_parameters(model))
    expected = 6 * parameters * 2048
    # Attention adds a few percent.
    assert 1.0 < model_flops_per_sample(model, 2048) / expected < 1.05


def test_a_gpt3_layer_has_thirteen_operators() -> None:
    assert len(layer_operators(PRESETS["gpt3-13b"])) == 13


def test_hugging_face_configs_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 100,
        "max_position_embeddings": 32,
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = resolve_model("tiny", base=tmp_path)
    assert (model.family, model.kv_heads, model.ffn_hidden_size, model.tied_embedding) == (
        "llama",
        2,
        96,
        False,
    )
    del config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="'vocab_size' is missing"):
        resolve_model("tiny", base=tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UserError, match='model_type = "bert" is not known'):
        resolve_model("tiny", base=tmp_path)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("gpt5", "presets: gpt3-1.3b"),
        (7, "give a preset's name"),
        ({"name": "x", "layers": 2, "hidden_size": 10, "heads": 4, "vocab_size": 9}, "max_sequence_length"),
        (
            {
                "name": "x",
                "layers": 2,
                "hidden_size": 10,
                "heads": 4,
                "vocab_size": 9,
                "max_sequence_length": 8,
            },
            "hidden_size = 10 must be a multiple of heads = 4",
        ),
    ],
)
def test_a_wrong_model_is_one_line(value: object, hint: str) -> None:
    with pytest.raises(UserError) as error:
        resolve_model(value)
    assert hint in str(error.value) and "\n" not in str(error.value)


def test_a_stage_holds_the_parameters_of_its_regions() -> None:
    model = ModelSpec(name="t", layers=2, hidden_size=8, heads=2, vocab_size=11, max_sequence_length=4)
    first = StagePlan(devices=("a/0",), tp=1, dp=1, rows=(1,), layers=(0, 1), embedding=True)
    last = StagePlan(devices=("a/1",), tp=1, dp=1, rows=(1,), layers=(1, 2), head=True)
    names = [[p.name for p in stage_parameters(model, stage)] for stage in (first, last)]
    assert "embedding.tokens.weight" in names[0] and "embedding.tokens.weight" in names[1]
    assert "final_norm.weight" not in names[0] and "final_norm.weight" in names[1]
    assert not any(name.startswith("layers.1.") for name in names[0])
    every = {p.name for p in model_parameters(model)}
    assert set(names[0]) | set(names[1]) == every
