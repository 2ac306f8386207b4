"""First values from files under any plan, and export to Hugging Face and back."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from actors.checkpoints import checkpoint_path
from actors.engine.conversion import export_hugging_face, import_hugging_face
from actors.engine.live_memory import LiveTensors
from actors.engine.trainer import TrainerConfig
from actors.engine.weight_files import WeightFiles, Weights, check_weights, open_weights
from actors.model_files import copy_files, model_files
from actors.storage import RemotePath
from planner.errors import UserError
from planner.model_spec import ModelSpec, resolve_model
from planner.parameters import model_parameters
from planner.plan import Plan
from tests.engine.law_plans import plan_of
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import start_and_save, training_of, write_tokens
from tests.object_storage import BUCKET, ObjectStorage

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


def export(source: Path, target: Path, model: ModelSpec, **options: Any) -> None:
    """As `eth export` does, of any source."""
    target.mkdir()
    given: dict[str, Any] = {"shard_bytes": 10**9, "say": lambda text: None} | options
    export_hugging_face(open_weights(source, model), target, model, **given)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's files."""
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def assert_same_shards(one: Weights, other: Weights, model: ModelSpec) -> None:
    """Both give every rank the same part, the padded ones of the vocabulary too."""
    for parameter in model_parameters(model):
        assert one.dtype(parameter) == other.dtype(parameter)
        for tp_rank in range(6):
            mine, theirs = (w.shard(parameter, tp=6, tp_rank=tp_rank) for w in (one, other))
            assert torch.equal(mine, theirs), parameter.name


@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_under_an_unlike_plan_keeps_every_bit(
    rank_pool: RankPool, storage: ObjectStorage, tmp_path: Path, name: str
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
    checkpoint = checkpoint_path(tmp_path / "run" / "checkpoints", 1)
    rank_pool.run(start_and_save, config, ours, checkpoint, world_size=plan.world_size)
    back, told = tmp_path / "back", list[str]()
    export(ours, back, model, shard_bytes=50_000, say=told.append)
    assert len(told) == len(list(back.glob("model-*.safetensors"))) > 1
    export(checkpoint, tmp_path / "saved", model)
    before, after, saved_then = (tensors_of(where) for where in (folder, back, tmp_path / "saved"))
    assert before.keys() == after.keys() == saved_then.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(torch.equal(before[key], saved_then[key]) for key in before)
    assert_same_shards(open_weights(ours, model), open_weights(checkpoint, model), model)
    far = uploaded(storage, checkpoint.parent) / checkpoint.name
    assert_same_shards(open_weights(far, model), open_weights(checkpoint, model), model)
    with pytest.raises(UserError, match="is of another model than narrow: its heads is 12, not 6"):
        open_weights(checkpoint, model.model_copy(update={"name": "narrow", "heads": 6}))

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
    export(tmp_path / "weights.safetensors", out, model)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert resolve_model(str(out)).model_copy(update={"name": model.name}) == model


def uploaded(storage: ObjectStorage, folder: Path) -> RemotePath:
    """A folder and all below it, as it lies in an object store."""
    prefix = uuid.uuid4().hex
    for file in folder.rglob("*"):
        if file.is_file():
            storage.put(f"{prefix}/{file.relative_to(folder)}", file.read_bytes())
    return RemotePath(f"s3://{BUCKET}/{prefix}")


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_weights_in_an_object_store_are_read_as_those_on_a_disk(
    storage: ObjectStorage, tmp_path: Path, name: str
) -> None:
    folder = saved(tmp_path, name, shard="40KB", dtype=torch.bfloat16)
    (folder / "tokenizer.json").write_text("{}")
    model = resolve_model(str(folder))
    import_hugging_face(folder, folder / "ours", model)
    far = uploaded(storage, folder)
    assert_same_shards(open_weights(far, model), open_weights(folder, model), model)
    for ours in (far / "ours", far / "ours" / "weights.safetensors"):
        assert_same_shards(open_weights(ours, model), open_weights(folder / "ours", model), model)
    export_hugging_face(open_weights(far, model), tmp_path, model, shard_bytes=10**9, say=lambda text: None)
    assert all(torch.equal(tensor, tensors_of(folder)[key]) for key, tensor in tensors_of(tmp_path).items())
    copy_files(model_files(far), tmp_path / "kept")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()}
    assert kept == {file.name: (folder / file.name).read_bytes() for file in model_files(folder)}
    assert {"config.json", "tokenizer.json"} <= kept.keys()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("truncated", "model.safetensors cannot be read as safetensors"),
        ("integers", "model.norm.weight is stored as I8, but only F32, BF16, F16 are read"),
        ("no shard", ".safetensors is missing: model.safetensors.index.json says that it holds"),
        ("wrong shard", ", but model.safetensors.index.json says so; download both again"),
        ("index", "is no index of weights"),
        ("no files", "holds no .safetensors file"),
    ],
)
def test_what_is_wrong_in_an_object_store_is_named(
    storage: ObjectStorage, tmp_path: Path, how: str, told: str
) -> None:
    path, model = spoilt(tmp_path, how)
    with pytest.raises(UserError) as caught:
        check_weights(uploaded(storage, path), model)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_an_object_store_that_holds_no_weights_is_said(storage: ObjectStorage) -> None:
    with pytest.raises(UserError, match=r"weights = .* does not exist"):
        check_weights(RemotePath(f"s3://{BUCKET}/{uuid.uuid4().hex}"), resolve_model("gpt3-nano"))


@pytest.mark.parametrize("name", MODELS)
def test_an_import_never_holds_the_model_and_keeps_every_bit(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, name, dtype=torch.bfloat16)
    model, ours = resolve_model(str(folder)), tmp_path / "ours"
    live = LiveTensors()
    with live.watching():
        written = import_hugging_face(folder, ours, model)
    assert written.precision == "bf16"
    assert written.bytes == 2 * sum(parameter.numel for parameter in model_parameters(model))
    largest = max(parameter.numel for parameter in model_parameters(model))
    # One parameter, and what it takes to tell that it is finite.
    assert live.peak_bytes <= 4 * 2 * largest < written.bytes
    export(ours, tmp_path / "back", model)
    before, after = tensors_of(folder), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_an_altered_tensor_is_found_by_the_import_and_nothing_is_left(tmp_path: Path) -> None:
    folder = saved(tmp_path, "gpt2")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        UserError, match=r"transformer\.h\.1\.mlp\.c_fc\.weight holds values that are not finite"
    ):
        import_hugging_face(folder, tmp_path / "ours", resolve_model(str(folder)))
    assert not any((tmp_path / "ours").iterdir())


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
    elif how == "unknown":
        save_file(tensors | {"model.layers.0.self_attn.q_norm.weight": torch.ones(4)}, file)
    elif how == "integers":
        save_file(tensors | {"model.norm.weight": torch.ones(48, dtype=torch.int8)}, file)
    elif how == "no shard":
        path = saved(folder / "sharded", "llama", shard="40KB")
        sorted(path.glob("model-*.safetensors"))[1].unlink()
    elif how == "wrong shard":
        path = saved(folder / "sharded", "llama", shard="40KB")
        first, second, *_ = sorted(path.glob("model-*.safetensors"))
        first.write_bytes(second.read_bytes())
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
        ("truncated", "model.safetensors cannot be read as safetensors"),
        (
            "unknown",
            "tensor model.layers.0.self_attn.q_norm.weight has no place in a llama model of 2 layers",
        ),
        ("integers", "model.norm.weight is stored as I8, but only F32, BF16, F16 are read"),
        ("no shard", ".safetensors is missing: model.safetensors.index.json says that it holds"),
        ("wrong shard", ", but model.safetensors.index.json says so; download both again"),
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
