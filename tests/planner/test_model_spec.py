import json
from pathlib import Path
from typing import Any

import pytest

from planner.errors import UserError
from planner.model_spec import PRESETS, ModelSpec, from_hugging_face, resolve_model
from planner.operators import layer_operators
from planner.parameters import model_parameters, stage_parameters
from planner.plan import StagePlan
from planner.profile.analytic import model_flops_per_sample


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-350m", 0.35),
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.55),
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
        ("x" * 300, "neither a preset nor a file"),
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


LLAMA_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 32,
}
GPT2_CONFIG = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 100,
    "n_positions": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    ],
    ids=["older files", "newer files"],
)
def test_rotary_scaling_is_read_from_both_forms(rope: dict[str, Any]) -> None:
    model = from_hugging_face(LLAMA_CONFIG | rope, name="m")
    assert model.rope_base == 5e5
    assert model.rope_scaling is not None and model.rope_scaling.type == "llama3"
    assert model.rope_scaling.original_sequence_length == 8192
    assert hash(model) == hash(from_hugging_face(LLAMA_CONFIG | rope, name="m"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LLAMA_CONFIG | {"rope_scaling": {"type": "yarn"}},
            "rope type 'yarn' is not supported; use default,",
        ),
        (LLAMA_CONFIG | {"head_dim": 32}, "head_dim = 32 must be hidden_size / num_attention_heads = 64 / 4"),
        (LLAMA_CONFIG | {"attention_bias": True}, "attention_bias = true is not supported; use false"),
        (LLAMA_CONFIG | {"hidden_act": "gelu"}, 'hidden_act = "gelu" is not supported; use "silu"'),
        (GPT2_CONFIG | {"activation_function": "relu"}, 'activation_function = "relu" is not supported'),
        (
            GPT2_CONFIG | {"resid_pdrop": 0.1, "attn_pdrop": 0.0},
            "resid_pdrop = 0.1, attn_pdrop = 0.0, but a model has one dropout; make them equal",
        ),
    ],
)
def test_configurations_that_no_model_can_say_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        from_hugging_face(config, name="m")
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "llama", "hidden_size": 12, "heads": 4}, "are 3 wide, but rotary positions turn pairs"),
        ({"family": "gpt3", "rope_scaling": {"type": "linear", "factor": 2}}, "is of family llama only"),
        (
            {"family": "llama", "rope_scaling": {"type": "llama3", "factor": 2, "high_turns": 1}},
            "high_turns = 1.0 must be more than low_turns = 1.0; raise it",
        ),
    ],
)
def test_rotary_fields_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    shape = {"name": "m", "layers": 2, "hidden_size": 16, "heads": 4, "vocab_size": 9}
    with pytest.raises(UserError) as refused:
        resolve_model(shape | {"max_sequence_length": 8} | fields)
    assert message in str(refused.value)
