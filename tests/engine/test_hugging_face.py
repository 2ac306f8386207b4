"""Logits against Hugging Face transformers' GPT-2 and LLaMA with the same weights; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from actors.engine.hugging_face import from_theirs, their_shapes, to_theirs
from actors.engine.model.stage import ParameterHandle, StageModel, build_stage
from planner.hugging_face import hugging_face_config
from planner.model_spec import ModelSpec, from_hugging_face
from planner.parameters import model_parameters
from planner.plan import StagePlan
from tests.engine.reference import Tensors

LENGTH = 24

GPT2 = {"n_layer": 3, "n_embd": 48, "n_head": 4, "vocab_size": 101, "n_positions": LENGTH}
LLAMA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 101,
    "max_position_embeddings": LENGTH,
}


def _llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**(LLAMA | changes), attn_implementation="eager")


def _rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 500.0} | fields}


CONFIGS: dict[str, GPT2Config | LlamaConfig] = {
    "gpt-2": GPT2Config(**GPT2, attn_implementation="eager"),
    "gpt-2, narrow mlp, large epsilon": GPT2Config(
        **GPT2, n_inner=64, layer_norm_epsilon=1e-2, attn_implementation="eager"
    ),
    "llama, as many keys as heads": _llama(num_key_value_heads=8),
    "llama, tied, large epsilon": _llama(tie_word_embeddings=True, rms_norm_eps=1e-2),
    "llama, rotary base 500": _llama(**_rope(rope_type="default")),
    "llama, linear scaling": _llama(**_rope(rope_type="linear", factor=3.0)),
    # Of the four pairs of a head one is kept, one slowed and two are mixed.
    "llama 3 scaling": _llama(
        **_rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=26,
        )
    ),
}


def _theirs(config: GPT2Config | LlamaConfig) -> GPT2LMHeadModel | LlamaForCausalLM:
    kind: Any = GPT2LMHeadModel if isinstance(config, GPT2Config) else LlamaForCausalLM
    return kind(config).eval()


def _ours(model: ModelSpec) -> tuple[StageModel, list[ParameterHandle]]:
    stage = StagePlan(
        devices=("a",), tp=1, dp=1, rows=(1,), layers=(0, model.layers), embedding=True, head=True
    )
    return build_stage(
        model=model,
        stage=stage,
        sequence_length=LENGTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
        mesh=None,
        tp_rank=0,
    )


def _random_weights(model: ModelSpec) -> Tensors:
    """Large enough to tell what is wrong anywhere; norms and biases away from 1 and 0."""
    generator = torch.Generator().manual_seed(3)
    return {
        p.name: torch.randn(p.shape, generator=generator) * (0.3 if len(p.shape) > 1 else 0.5)
        + (1.0 if "norm" in p.name and p.name.endswith(".weight") else 0.0)
        for p in model_parameters(model)
    }


def _to_theirs(model: ModelSpec, ours: Tensors) -> Tensors:
    return dict(to_theirs(model, ours.__getitem__))


def _from_theirs(model: ModelSpec, theirs: Tensors) -> Tensors:
    return {p.name: from_theirs(model, p, theirs.__getitem__) for p in model_parameters(model)}


def _assert_equal_logits(model: ModelSpec, ours: Tensors, theirs: GPT2LMHeadModel | LlamaForCausalLM) -> None:
    stage, handles = _ours(model)
    for handle in handles:
        handle.local.copy_(ours[handle.spec.name])
    ids = torch.randint(model.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        # GPT-2's configuration asks for dropout in training.
        logits = stage.eval().logits(stage.hidden(ids))
        expected = theirs(ids).logits
    assert float(expected.std()) > 0.1, "logits that tell nothing"
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", CONFIGS)
def test_our_weights_give_their_logits(name: str) -> None:
    config = CONFIGS[name]
    model = from_hugging_face(config.to_dict(), name="small")
    theirs, ours = _theirs(config), _random_weights(model)
    loaded = theirs.load_state_dict(_to_theirs(model, ours), strict=False)
    assert not loaded.unexpected_keys
    assert set(loaded.missing_keys) <= {"lm_head.weight"}, "only a tied head is not ours to give"
    theirs.tie_weights()
    _assert_equal_logits(model, ours, theirs)


@pytest.mark.parametrize("name", CONFIGS)
def test_their_weights_give_their_logits(name: str) -> None:
    config = CONFIGS[name]
    model = from_hugging_face(config.to_dict(), name="small")
    torch.manual_seed(0)
    theirs = _theirs(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    _assert_equal_logits(model, _from_theirs(model, theirs.state_dict()), theirs)


@pytest.mark.parametrize("name", CONFIGS)
def test_names_map_back_to_what_they_were(name: str) -> None:
    model = from_hugging_face(CONFIGS[name].to_dict(), name="small")
    ours = _random_weights(model)
    theirs = _to_theirs(model, ours)
    assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == their_shapes(model)
    back = _from_theirs(model, theirs)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) for name in ours)


def test_the_rotary_base_and_scaling_of_a_configuration_are_read() -> None:
    scaled = from_hugging_face(CONFIGS["llama 3 scaling"].to_dict(), name="small")
    assert scaled.rope_base == 500.0
    assert scaled.rope_scaling is not None
    assert scaled.rope_scaling.model_dump() == {
        "type": "llama3",
        "factor": 8.0,
        "low_turns": 1.0,
        "high_turns": 4.0,
        "original_sequence_length": 26,
    }


@pytest.mark.parametrize("name", ["gpt-2", "llama, rotary base 500"])
@pytest.mark.parametrize("tp", [2, 3])
def test_a_shard_is_read_alone(name: str, tp: int) -> None:
    model = from_hugging_face(CONFIGS[name].to_dict(), name="small")
    ours = _random_weights(model)
    theirs = _to_theirs(model, ours)
    for parameter in model_parameters(model):
        if parameter.tp_dim is None or (not parameter.padded and parameter.shape[parameter.tp_dim] % tp):
            continue
        for tp_rank in range(tp):
            start, stop = parameter.shard_range(tp=tp, tp_rank=tp_rank)
            shard = from_theirs(model, parameter, theirs.__getitem__, tp_range=(start, stop))
            assert torch.equal(shard, ours[parameter.name].narrow(parameter.tp_dim, start, stop - start))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_comes_back_as_it_went(name: str) -> None:
    model = from_hugging_face(CONFIGS[name].to_dict(), name="small")
    assert from_hugging_face(hugging_face_config(model, dtype="float32"), name="small") == model
