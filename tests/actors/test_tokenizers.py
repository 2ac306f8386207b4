"""Any tokenizer.json, against the library itself; and what of one cannot be used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from actors.checkpoints import DataIdentity, Manifest, Progress, check_continues, data_identity
from actors.data_settings import TextSource
from actors.engine.documents import PLAIN
from actors.engine.tokens import NOTHING_HELD_OUT, TokenFile, check_vocabulary
from actors.job import Training
from actors.text.text import check_text, prepare_text
from planner.errors import UserError
from tests.plans import make_model

TEXT = "".join(f"line {i} of a text, with words and {i * i} more ü\n" for i in range(300))


def trained_tokenizer(path: Path, *, end: str | None = "<|endoftext|>", vocabulary: int = 400) -> Path:
    """A byte-level BPE of TEXT, as GPT-2's is built."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[end] if end else [],
            show_progress=False,
        ),
    )
    made.enable_truncation(5)
    made.save(str(path))
    return path


def _prepared(tmp_path: Path, tokenizer: Path, end: str | int | None = None) -> TokenFile:
    (tmp_path / "a.txt").write_text(TEXT)
    source = TextSource(tmp_path / "a.txt", tokenizer=tokenizer, end_of_document=end)
    return prepare_text(source, cache_dir=tmp_path / "cache")


def test_tokens_are_those_of_the_library(tmp_path: Path) -> None:
    path = trained_tokenizer(tmp_path / "tokenizer.json")
    loaded = Tokenizer.from_file(str(path))
    loaded.no_truncation()
    made = _prepared(tmp_path, path)
    assert made.tokens.tolist() == [*loaded.encode(TEXT).ids, loaded.token_to_id("<|endoftext|>")]
    assert made.tokens.dtype == np.uint16 and made.header.vocabulary == 400
    assert loaded.decode(made.tokens.tolist()) == TEXT
    assert _prepared(tmp_path, tmp_path).path == made.path, "the folder stands for its tokenizer.json"
    check_vocabulary(made, 400)
    with pytest.raises(UserError, match=r"vocab_size = 399 is less than the tokenizer's 400; set it to 400"):
        check_vocabulary(made, 399)
    with pytest.raises(UserError, match=r"vocab_size = 399 is less than the tokenizer's 400; set it to 400"):
        check_text(TextSource(tmp_path / "a.txt", tokenizer=path), sequence_length=4, vocab_size=399)


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    words = {f"w{i}": i for i in range(70_000)} | {"</s>": 70_000}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "b.txt").write_text("w69999 w3")
    source = TextSource(tmp_path / "b.txt", tokenizer=tmp_path / "tokenizer.json")
    tokens = prepare_text(source, cache_dir=tmp_path / "cache").tokens
    assert tokens.dtype == np.uint32 and tokens.tolist() == [69_999, 3, 70_000]


def test_the_end_of_a_document_is_found_or_chosen(tmp_path: Path) -> None:
    path = trained_tokenizer(tmp_path / "tokenizer.json", end="<over>")
    with pytest.raises(UserError, match=r"none of the usual tokens .*; name its own in data.end_of_document"):
        _prepared(tmp_path, path)
    chosen = Tokenizer.from_file(str(path)).token_to_id("<over>")
    by_name, by_id = _prepared(tmp_path, path, "<over>"), _prepared(tmp_path, path, chosen)
    assert by_name.tokens[-1] == chosen and by_name.path == by_id.path
    assert _prepared(tmp_path, path, 7).path != by_name.path
    with pytest.raises(UserError, match=r"data.end_of_document = 'none' is no token of"):
        _prepared(tmp_path, path, "none")
    with pytest.raises(UserError, match=r"data.end_of_document = 400 is no id of .* 0 to 399"):
        _prepared(tmp_path, path, 400)


def test_a_file_that_is_no_tokenizer_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"is no tokenizer.json of Hugging Face"):
        _prepared(tmp_path, tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"data.tokenizer = .*none.json' cannot be read: No such file"):
        _prepared(tmp_path, tmp_path / "none.json")


def test_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    path = trained_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "a.bytes").write_bytes(b"good\n\xff\xfe bad")
    with pytest.raises(UserError, match=r"a\.bytes is not UTF-8 text: .*; convert it, leave it out, or use"):
        prepare_text(TextSource(tmp_path / "a.bytes", tokenizer=path), cache_dir=tmp_path / "cache")


def test_the_byte_tokenizer_has_its_own_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(
        UserError, match=r"data.end_of_document = 3, but the byte tokenizer ends documents with 256"
    ):
        prepare_text(TextSource(tmp_path / "a.txt", end_of_document=3), cache_dir=tmp_path / "cache")


def test_a_checkpoint_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    model, training = make_model(), Training(global_batch_size=4, sequence_length=16, steps=9)
    theirs = data_identity(
        _prepared(tmp_path, trained_tokenizer(tmp_path / "tokenizer.json")), NOTHING_HELD_OUT, PLAIN
    )
    manifest = Manifest(
        progress=Progress(iteration=3, updates=3),
        model=model,
        training=training,
        data=theirs,
        plan="1 x A100: tp1 dp1, ZeRO-0",
        written="2026-01-01T00:00:00+00:00",
        torch="2",
    )
    check_continues(manifest, model=model, training=training, data=theirs, source=Path("runs/a"))
    other = DataIdentity(name="0123", tokens=100)
    with pytest.raises(
        UserError, match=r"data.tokenizer \(byte\) is not the one that checkpoint runs/a was trained"
    ):
        check_continues(manifest, model=model, training=training, data=other, source=Path("runs/a"))
