"""First values from files under any plan, and export to Hugging Face and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from actors.engine.trainer import TrainerConfig
from actors.engine.weight_files import WeightFiles, check_weights, export_hugging_face
from planner.errors import UserError
from planner.model_spec import ModelSpec, resolve_model
from planner.parameters import model_parameters
from planner.plan import Plan
from tests.engine.law_plans import plan_of
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import start_and_save, training_of, write_tokens

GPT2 = GPT2Config(n_layer=2, n_embd=48, n_head=12, vocab_size=257, n_positions=16)
LLAMA = LlamaConfig(
    num_hidden_layers=2,
    hidden_size=48,
    num_attention_heads=12,
    num_key_value_heads=6,
    intermediate_size=96,
    vocab_size=257,
    max_position_embeddings=16,
)
MODELS: dict[str, tuple[Any, Any]] = {"gpt2": (GPT2LMHeadModel, GPT2), "llama": (LlamaForCausalLM, LLAMA)}


def saved(folder: Path, name: str, *, shard: str = "5GB", dtype: torch.dtype = torch.float32) -> Path:
    """A folder that transformers wrote, with random weights."""
    kind, config = MODELS[name]
    torch.manual_seed(1)
    kind(config).to(dtype).save_pretrained(folder / name, max_shard_size=shard)
    return folder / name


@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_under_an_unlike_plan_keeps_every_bit(
    rank_pool: RankPool, tmp_path: Path, name: str
) -> None:
    folder = saved(tmp_path, name, shard="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = resolve_model(str(folder))
    plan: Plan = plan_of([(3, 1, 1), (1, 2, 1)], [(1, 1, 2)], model=model, samples=[2, 2])
    config = TrainerConfig(
        plan=plan,
        training=training_of(plan, steps=1),
        tokens=write_tokens(tmp_path),
        timeout_seconds=30,
        weights=folder,
    )
    ours = tmp_path / "run" / "weights.safetensors"
    rank_pool.run(start_and_save, config, ours, world_size=plan.world_size)
    back = tmp_path / "back"
    back.mkdir()
    told: list[str] = []
    export_hugging_face(ours, back, model, max_file_bytes=50_000, say=told.append)
    assert len(told) == len(list(back.glob("model-*.safetensors"))) > 1
    before, after = (
        {key: value for file in where.glob("*.safetensors") for key, value in load_file(file).items()}
        for where in (folder, back)
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)

    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(where).eval()(ids).logits for where in (folder, back)]
    assert torch.equal(*logits)


def test_bf16_weights_are_read_as_they_are(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama", dtype=torch.bfloat16)
    model = resolve_model(str(folder))
    files, theirs = WeightFiles(folder, model), load_file(folder / "model.safetensors")
    whole = files.parameter(next(p for p in model_parameters(model) if p.name == "embedding.tokens.weight"))
    assert whole.dtype == torch.bfloat16 and torch.equal(whole, theirs["model.embed_tokens.weight"])


def test_a_small_model_is_one_file_without_an_index(tmp_path: Path) -> None:
    model = resolve_model(str(saved(tmp_path, "llama")))
    ours = {p.name: torch.randn(p.shape) for p in model_parameters(model)}
    save_file(ours, tmp_path / "weights.safetensors")
    out = tmp_path / "out"
    out.mkdir()
    export_hugging_face(
        tmp_path / "weights.safetensors", out, model, max_file_bytes=10**9, say=lambda text: None
    )
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert resolve_model(str(out)).model_copy(update={"name": model.name}) == model


def spoilt(folder: Path, how: str) -> tuple[Path, ModelSpec]:
    """A folder with one thing wrong, and the model that is asked for."""
    path = saved(folder, "llama")
    model, file = resolve_model(str(path)), path / "model.safetensors"
    tensors = load_file(file)
    if how == "missing":
        del tensors["model.norm.weight"]
        save_file(tensors, file)
    elif how == "shape":
        model = model.model_copy(update={"ffn_hidden_size": 95})
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "no files":
        file.unlink()
    elif how == "index":
        file.rename(path / "model-1.safetensors")
        (path / "model.safetensors.index.json").write_text("{}")
    return path if how != "nothing" else folder / "none", model


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("missing", "tensor model.norm.weight is missing"),
        ("shape", "mlp.gate_proj.weight has shape [96, 48], but the model needs [95, 48]"),
        ("truncated", "cannot be read as safetensors"),
        ("no files", "holds no .safetensors file"),
        ("index", "is no index of weights"),
        ("nothing", "does not exist"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, how: str, told: str) -> None:
    path, model = spoilt(tmp_path, how)
    with pytest.raises(UserError) as caught:
        check_weights(path, model)
    assert told in str(caught.value) and "\n" not in str(caught.value)
