"""`eth import` and `eth export`: a model of transformers comes in and goes out again, with all that belongs to it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from actors.checkpoints import MANIFEST
from actors.engine.weights import write_model_file
from actors.job import Job, parse_job, read_job
from actors.planning import prepare
from actors.run_folder import RunFolder
from eth_service.cli import main
from planner.errors import UserError
from planner.parameters import model_parameters
from tests.actors.test_run_folder import largest_file
from tests.actors.test_tokenizers import TEXT, trained_tokenizer
from tests.object_storage import BUCKET, ObjectStorage

TOKENIZER = {
    "tokenizer.json": b"{ a tokenizer }",
    "special_tokens_map.json": b"{}",
    "chat_template.jinja": b"hi",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as people have them: weights, a tokenizer, and a config with more than the architecture."""
    folder = tmp_path_factory.mktemp("theirs") / "small-llama"
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=48,
        num_attention_heads=12,
        num_key_value_heads=6,
        intermediate_size=96,
        vocab_size=300,
        max_position_embeddings=16,
        bos_token_id=7,
        eos_token_id=[8, 9],
        initializer_range=0.03,
    )
    torch.manual_seed(3)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name, content in TOKENIZER.items():
        (folder / name).write_bytes(content)
    # An older file's spelling of what is written as `dtype` today.
    config_file = folder / "config.json"
    written = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**written, "torch_dtype": "bfloat16", "house_key": [1, 2]}))
    return folder


def eth(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code and output of a command."""
    sys.argv = ["eth", *map(str, arguments)]
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code, *capsys.readouterr()


def test_what_is_imported_and_exported_is_the_same_model(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, back = tmp_path / "ours", tmp_path / "back"
    code, out, err = eth(capsys, "import", llama, "--output", ours)
    assert code == 0 and "every tensor checked" in out, err
    job = read_job(ours / "job.yaml")
    assert job.weights_path() == ours / "weights.safetensors" and job.training.precision == "bf16"
    assert job.model.vocab_size == 300 and job.training.sequence_length == 16
    assert job.texts()[0].tokenizer == ours / "tokenizer.json"

    code, out, err = eth(capsys, "export", ours, "--output", back, "--shard-size", "50 kB")
    assert code == 0, err
    assert len(list(back.glob("model-0000?-of-*.safetensors"))) > 1
    assert {name: (back / name).read_bytes() for name in TOKENIZER} == TOKENIZER
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (llama, back))
    for key in ("bos_token_id", "eos_token_id", "initializer_range", "house_key", "dtype"):
        assert after[key] == before[key]
    assert "torch_dtype" not in after
    ids = torch.arange(12)[None]
    with torch.no_grad():
        one, other = (
            AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits for folder in (llama, back)
        )
    assert one.dtype == torch.bfloat16 and torch.equal(one, other)


def test_a_run_keeps_what_its_weights_came_with(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eth(capsys, "import", llama, "--output", tmp_path / "ours")[0] == 0
    run = RunFolder.check(tmp_path / "run", overwrite=False)
    run.create()
    job = read_job(tmp_path / "ours" / "job.yaml")
    run.write_job(job)
    run.keep_model_files(job)
    run.close()
    run.weights.write_bytes((tmp_path / "ours" / "weights.safetensors").read_bytes())
    (tmp_path / "ours").rename(tmp_path / "gone")
    code, _, err = eth(capsys, "export", run.path, "--output", tmp_path / "back")
    assert code == 0, err
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == TOKENIZER["tokenizer.json"]
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == [8, 9]
    assert "hugging-face" in run.written()

    other = tmp_path / "other"
    other.mkdir()
    (other / "vocab.txt").write_text("a")
    code, _, err = eth(capsys, "export", run.path, "--output", tmp_path / "again", "--tokenizer", other)
    assert code == 0, err
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert names == {"vocab.txt", "config.json", "generation_config.json", "model.safetensors"}


@pytest.mark.parametrize("prepared", [False, True], ids=["named by the job", "kept by prepared data"])
def test_the_tokenizer_that_made_the_tokens_is_exported(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], prepared: bool
) -> None:
    """In place of that of the weights that the run started from, and whatever has become of its file."""
    tokenizer, text = trained_tokenizer(tmp_path / "other.json", vocabulary=300), tmp_path / "text.txt"
    content = tokenizer.read_bytes()
    text.write_text(TEXT)
    data = {"path": str(text), "tokenizer": str(tokenizer)}
    if prepared:
        options = ("--output", tmp_path / "tokens", "--tokenizer", tokenizer, "--processes", 1)
        assert eth(capsys, "data", "prepare", text, *options)[0] == 0
        data = {"path": str(tmp_path / "tokens")}
    assert eth(capsys, "import", llama, "--output", tmp_path / "ours")[0] == 0
    job_file = tmp_path / "ours" / "job.yaml"
    job_file.write_text(yaml.safe_dump(yaml.safe_load(job_file.read_text()) | {"data": data}))
    if prepared:
        tokenizer.unlink()
    job = read_job(job_file)
    run = RunFolder.check(tmp_path / "run", overwrite=False)
    run.create()
    run.write_job(job)
    run.keep_model_files(job)
    run.close()
    run.weights.write_bytes((tmp_path / "ours" / "weights.safetensors").read_bytes())
    code, _, err = eth(capsys, "export", run.path, "--output", tmp_path / "back")
    assert code == 0, err
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == content
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert names == {"tokenizer.json", "config.json", "generation_config.json", "model.safetensors"}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == [8, 9]


def test_a_model_is_imported_from_an_object_store(
    llama: Path, tmp_path: Path, storage: ObjectStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a job may name it there without an import."""
    for file in llama.iterdir():
        storage.put(f"theirs/small-llama/{file.name}", file.read_bytes())
    far = f"s3://{BUCKET}/theirs/small-llama"
    for source, output in ((llama, "near"), (far, "far")):
        code, _, err = eth(capsys, "import", source, "--output", tmp_path / output)
        assert code == 0, err
    near, told = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("near", "far")
    )
    assert near == told and len(near) > 4
    values = yaml.safe_load((tmp_path / "near" / "job.yaml").read_text())
    job = parse_job(values | {"model": far, "weights": far}, base=tmp_path / "near")
    near_model = read_job(tmp_path / "near" / "job.yaml").model
    assert job.model == near_model.model_copy(update={"name": "small-llama"})
    assert str(job.weights_path()) == far

    storage.delete("theirs/small-llama/model.safetensors")
    code, _, err = eth(capsys, "import", far, "--output", tmp_path / "out")
    assert code == 2 and "holds no .safetensors file" in err and err.count("\n") == 1
    for wrong, said in (
        (f"s3://{BUCKET}/none", "FOLDER = 's3://bucket/none' holds no config.json; name the folder that"),
        ("ftp://127.0.0.1:1/none", "FOLDER = ftp://127.0.0.1:1/none cannot be used: Connection refused"),
        ("https://host/folder", "FOLDER = 'https://host/folder'"),
    ):
        code, _, err = eth(capsys, "import", wrong, "--output", tmp_path / "out")
        assert code == 2 and said in err and err.count("\n") == 1, err
    with pytest.raises(UserError, match=r"^model = 's3://bucket/none' holds no config.json; name"):
        parse_job(values | {"model": f"s3://{BUCKET}/none"}, base=tmp_path)


def test_a_full_disk_is_told_of_the_folder_that_is_written(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Large enough for the small files, or for none."""
    assert eth(capsys, "import", llama, "--output", tmp_path / "ours")[0] == 0
    out = tmp_path / "out"
    for command, source in (("import", llama), ("export", tmp_path / "ours")):
        for room in (5, 20_000):
            with largest_file(room):
                code, _, err = eth(capsys, command, source, "--output", out)
            assert code == 2 and err.count("\n") == 1, err
            assert err.startswith(f"eth: --output {out} cannot be written: ") and "File too large" in err
            shutil.rmtree(out)
        code, _, err = eth(capsys, command, source, "--output", "/proc/none/out")
        assert code == 2 and err.startswith("eth: --output /proc/none/out cannot be written: No such file")
        assert eth(capsys, command, source, "--output", out)[0] == 0
        shutil.rmtree(out)


@pytest.mark.parametrize(
    ("folder", "job"),
    [("my model (v2)", "my-model-v2-"), ("...", "imported"), ("ß" * 40, "imported"), ("a" * 80, "a" * 63)],
)
def test_a_folder_of_any_name_gives_a_job_that_can_be_read(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, job: str
) -> None:
    shutil.copytree(llama, tmp_path / "theirs" / folder)
    code, _, err = eth(capsys, "import", tmp_path / "theirs" / folder, "--output", tmp_path / "ours")
    assert code == 0, err
    assert read_job(tmp_path / "ours" / "job.yaml").name == job


def recorded_run(job: Job, folder: Path) -> RunFolder:
    """A run folder with what a run writes of its job."""
    run = RunFolder.check(folder, overwrite=False)
    run.create()
    run.keep_model_files(job)
    run.write_job(job, end_of_document=prepare(job).end_of_document())
    run.close()
    return run


def test_an_exported_model_stops_where_a_document_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that started from nothing, on bytes. Its weights make 256, the end of a document, the next token."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("text\n" * 100)
    job = parse_job(
        {
            "name": "small",
            "model": {
                "name": "small",
                "layers": 1,
                "hidden_size": 32,
                "heads": 2,
                "vocab_size": 257,
                "max_sequence_length": 16,
            },
            "data": {"path": "text.txt"},
            "training": {"global_batch_size": 4, "sequence_length": 16, "steps": 2},
        },
        base=tmp_path,
    )
    # The last norm gives ones, whatever comes, and the end's row of the tied embedding fits them best.
    tensors = {one.name: torch.zeros(one.shape) for one in model_parameters(job.model)}
    tensors["embedding.tokens.weight"][256] = 1.0
    tensors["final_norm.bias"].fill_(1.0)
    run = recorded_run(job, tmp_path / "run")
    write_model_file(run.weights, job.model, tensors.values(), dtypes=dict.fromkeys(tensors, torch.float32))
    code, out, err = eth(capsys, "export", run.path, "--output", tmp_path / "out")
    assert code == 0, err
    assert "text that it generates ends with token 256" in out
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.eos_token_id == 256 and loaded.generation_config.eos_token_id == 256
    prompt = torch.tensor([[65, 66]])
    written = loaded.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False, pad_token_id=0
    )
    assert written.tolist() == [[65, 66, 256]]


@pytest.mark.parametrize("kept", ["config.json", "generation_config.json", None])
def test_what_a_model_came_with_says_where_its_text_ends(
    llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kept: str | None,
) -> None:
    """Even in one of its two files, which stay as they are; where neither says so, the run's text does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert eth(capsys, "import", llama, "--output", tmp_path / "ours")[0] == 0
    for name in ("config.json", "generation_config.json"):
        file = tmp_path / "ours" / name
        content = json.loads(file.read_text())
        assert content.pop("eos_token_id") == [8, 9]
        file.write_text(json.dumps(content | ({"eos_token_id": [8, 9]} if name == kept else {})))
    (tmp_path / "text.txt").write_text("text\n" * 100)
    values = yaml.safe_load((tmp_path / "ours" / "job.yaml").read_text())
    values |= {"data": {"path": str(tmp_path / "text.txt")}}
    job = parse_job(values, base=tmp_path / "ours")
    run = recorded_run(job, tmp_path / "run")
    run.weights.write_bytes((tmp_path / "ours" / "weights.safetensors").read_bytes())
    code, _, err = eth(capsys, "export", run.path, "--output", tmp_path / "back")
    assert code == 0, err
    for name in ("config.json", "generation_config.json"):
        before, after = (json.loads((tmp_path / of / name).read_text()) for of in ("ours", "back"))
        assert after.get("eos_token_id") == (256 if kept is None else before.get("eos_token_id"))
        assert after.get("bos_token_id") == before.get("bos_token_id") == 7


def test_what_cannot_be_imported_is_said(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "holds no config.json" in eth(capsys, "import", tmp_path, "--output", tmp_path / "out")[2]
    config = json.loads((llama / "config.json").read_text())
    for change, told in (
        ({"model_type": "mamba"}, 'model_type = "mamba" is not known; use gpt2 or llama'),
        ({"attention_bias": True}, "attention_bias = true is not supported"),
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config is given, but only plain weights are read",
        ),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "tensor model.layers.1."),
    ):
        folder = tmp_path / "spoilt"
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
        (folder / "config.json").write_text(json.dumps(config | change))
        code, _, err = eth(capsys, "import", folder, "--output", tmp_path / "out")
        assert code == 2 and told in err and err.count("\n") == 1, err
    assert "is not an empty folder" in eth(capsys, "import", llama, "--output", llama)[2]


def test_a_run_without_weights_is_told_what_there_is(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    code, _, err = eth(capsys, "export", tmp_path, "--output", run)
    assert code == 2 and "is not a run folder" in err
    assert eth(capsys, "import", llama, "--output", run)[0] == 0
    (run / "weights.safetensors").unlink()
    code, _, err = eth(capsys, "export", run, "--output", tmp_path / "out")
    assert code == 2 and "its run has not ended well; name a run that has ended" in err
    code, _, err = eth(capsys, "export", run, "--output", tmp_path / "out", "--checkpoint", 5)
    assert code == 2 and "--checkpoint 5" in err and "holds no whole checkpoint" in err
    (run / "checkpoints" / "step-00000005").mkdir(parents=True)
    assert not (run / "checkpoints" / "step-00000005" / MANIFEST).exists()
    assert (
        "holds no whole checkpoint"
        in eth(capsys, "export", run, "--output", tmp_path / "out", "--checkpoint", 5)[2]
    )
    assert (
        "--shard-size = 0 B"
        in eth(capsys, "export", run, "--output", tmp_path / "out", "--shard-size", "0 B")[2]
    )
