"""Text of every format becomes the same tokens; what cannot be used is named with its place."""

from __future__ import annotations

import gzip
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.data_settings import TextSource
from actors.engine.tokens import TokenFile, check_vocabulary
from actors.text import readers
from actors.text.files import files_of
from actors.text.prepare import make_tokens
from actors.text.text import prepare_text
from planner.errors import UserError
from tests.actors.test_tokenizers import trained_tokenizer

_NOBODY = 65534
DOCUMENTS = ["one\n", "zwei ü", "three\nlines\n"]
EXPECTED = [*DOCUMENTS[0].encode(), 256, *DOCUMENTS[1].encode(), 256, *DOCUMENTS[2].encode(), 256]


def write_jsonl(path: Path, documents: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in documents))
    return path


def write_parquet(path: Path, documents: list[str], column: str = "text") -> Path:
    pyarrow.parquet.write_table(pyarrow.table({column: documents}), path, row_group_size=2)
    return path


def write_megatron(base: Path, documents: list[list[int]], dtype: str = "<u2") -> Path:
    """A pair as Megatron's builder writes it; the path of its .idx."""
    sizes = np.array([len(document) for document in documents], dtype="<i4")
    item = np.dtype(dtype).itemsize
    np.concatenate([np.array(document, dtype=dtype) for document in documents]).tofile(f"{base}.bin")
    code = {"<u2": 8, "<i4": 4}[dtype]
    starts = (np.cumsum(sizes, dtype=np.int64) - sizes) * item
    with open(f"{base}.idx", "wb") as stream:
        stream.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(sizes), len(sizes) + 1))
        for array in (sizes, starts.astype("<i8"), np.arange(len(sizes) + 1, dtype="<i8")):
            stream.write(array.tobytes())
    return Path(f"{base}.idx")


def tokens_of(path: Path, cache: Path, **options: Any) -> TokenFile:
    return prepare_text(TextSource(path, **options), cache_dir=cache)


def test_every_text_format_gives_the_same_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    for index, text in enumerate(DOCUMENTS):
        (folder / f"{index}.txt").write_text(text)
    sources = [
        folder,
        write_jsonl(tmp_path / "a.jsonl", DOCUMENTS),
        write_parquet(tmp_path / "a.parquet", DOCUMENTS),
    ]
    for path in sources:
        made = tokens_of(path, tmp_path / "cache")
        assert made.tokens.tolist() == EXPECTED, path
        assert made.ends.tolist() == [5, 13, 26], path


def test_a_document_may_be_null_and_a_column_of_several_types(tmp_path: Path) -> None:
    texts = ["a", None, "b", "", "a"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sources = [tmp_path / "a.jsonl"]
    strings = pyarrow.array(texts, pyarrow.string())
    for name, column in (
        ("string", strings),
        ("large", strings.cast(pyarrow.large_string())),
        ("dictionary", strings.dictionary_encode()),
    ):
        sources.append(tmp_path / f"{name}.parquet")
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), sources[-1])
    for source in sources:
        assert tokens_of(source, tmp_path / "cache").tokens.tolist() == [97, 256, 98, 256, 97, 256], source


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("column", [pyarrow.array([], pyarrow.string()), pyarrow.array([None, None])])
def test_a_parquet_file_without_any_text_is_told_or_left_out(
    tmp_path: Path, column: Any, processes: int
) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match="holds no text; give a text that is not empty"):
        make_tokens(TextSource(tmp_path / "b.parquet"), cache_dir=tmp_path / "cache", processes=processes)
    write_parquet(tmp_path / "a.parquet", DOCUMENTS)
    source = TextSource(tmp_path, pattern="*.parquet")
    made = make_tokens(source, cache_dir=tmp_path / "cache", processes=processes)
    assert made.tokens.tolist() == EXPECTED


def test_the_field_or_column_can_be_chosen(tmp_path: Path) -> None:
    for path in (
        write_jsonl(tmp_path / "a.jsonl", DOCUMENTS, "body"),
        write_parquet(tmp_path / "a.parquet", DOCUMENTS, "body"),
    ):
        assert tokens_of(path, tmp_path / "cache", text_field="body").tokens.tolist() == EXPECTED
        with pytest.raises(UserError, match=r"has no (field|column) 'text'; set data.field to .*: body"):
            tokens_of(path, tmp_path / "cache")


def test_a_format_can_be_chosen_against_the_suffix(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.txt", ["a"])
    assert tokens_of(path, tmp_path / "cache", format="jsonl").count == 2
    assert tokens_of(path, tmp_path / "cache").count > 10


def test_packed_files_are_not_learned_byte_by_byte(tmp_path: Path) -> None:
    """Unless somebody says so."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n'))
    with pytest.raises(
        UserError, match=r"holds a packed file \(a.jsonl.gz\), .*; unpack it, leave it out by"
    ):
        tokens_of(path, tmp_path / "cache")
    with pytest.raises(UserError, match="holds a packed file"):
        tokens_of(tmp_path, tmp_path / "cache")
    assert tokens_of(path, tmp_path / "cache", format="text").count == path.stat().st_size + 1


@settings(max_examples=25, deadline=None)
@given(
    documents=st.lists(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=40), min_size=1, max_size=30
    )
)
def test_units_of_any_size_hold_the_same_tokens(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("text")
    path = write_jsonl(folder / "a.jsonl", documents)
    whole = tokens_of(path, folder / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "UNIT_BYTES", 100)
        cut = tokens_of(path, folder / "cut")
    assert cut.tokens.tolist() == whole.tokens.tolist()
    assert cut.ends.tolist() == whole.ends.tolist()
    starts = np.arange(0, max(1, whole.count - 3))
    assert (cut.read(starts, min(4, whole.count)) == whole.read(starts, min(4, whole.count))).all()


@settings(max_examples=25, deadline=None)
@given(
    documents=st.lists(
        st.text(st.characters(codec="utf-8") | st.just("\n"), min_size=1, max_size=400),
        min_size=1,
        max_size=4,
    )
)
def test_a_long_text_is_one_document_in_units_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str]
) -> None:
    """Cut between lines, or where there is none between characters; what ends with a unit ends in no unit before."""
    folder = tmp_path_factory.mktemp("text")
    for index, document in enumerate(documents):
        (folder / f"{index}.txt").write_bytes(document.encode())
    source = TextSource(folder)
    whole = make_tokens(source, cache_dir=folder.with_name(folder.name + "-whole"))
    tokenizer = trained_tokenizer(folder.with_name(folder.name + ".json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "UNIT_BYTES", 100)
        patch.setattr(readers, "PIECE_BYTES", 10)
        cut = make_tokens(source, cache_dir=folder.with_name(folder.name + "-cut"))
        # Fails where a character is cut.
        encoded = make_tokens(
            TextSource(folder, tokenizer=tokenizer), cache_dir=folder.with_name(folder.name + "-encoded")
        )
    assert cut.tokens.tolist() == whole.tokens.tolist() and cut.ends.tolist() == whole.ends.tolist()
    assert cut.header.documents == encoded.header.documents == len(documents)
    assert len(cut.header.parts) >= sum(len(document.encode()) for document in documents) // 150
    assert encoded.ends[-1] == encoded.count


def test_a_part_in_which_no_document_ends_is_not_taken_for_one_in_which_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of the same lines share parts only where both go on."""
    monkeypatch.setattr(readers, "UNIT_BYTES", 8)
    for name, lines in (("long", 3), ("short", 1)):
        (tmp_path / f"{name}.txt").write_text("line 10\n\n" * lines)
    made = [tokens_of(tmp_path / f"{name}.txt", tmp_path / "cache") for name in ("long", "short", "long")]
    assert [text.ends.tolist() for text in made] == [[28], [10], [28]]
    assert len(made[0].header.parts) == 3 and made[0].path == made[2].path
    assert len({part.path for part in made[0].header.parts}) == 2


@pytest.mark.parametrize("piece_bytes", [1, 7, 64])
def test_a_text_is_the_same_in_pieces_of_any_size(
    tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "zeile ü\n" * 20 + "ü" * 300
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(readers, "PIECE_BYTES", piece_bytes)
    span = readers.Span(tmp_path / "a.txt", 0, len(text.encode()))
    pieces = list(readers.pieces(span, "text", "text"))
    assert "".join(piece.text.decode() for piece in pieces) == text
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True] and len(pieces) > 2


def test_megatron_and_numpy_are_read_where_they_lie(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [40000], [5, 6]]
    flat = [id_ for document in documents for id_ in document]
    write_megatron(tmp_path / "corpus", documents)
    np.save(tmp_path / "flat.npy", np.array(flat, dtype=np.int64))
    np.save(tmp_path / "rows.npy", np.array(flat, dtype=np.uint32).reshape(2, 3))
    cache = tmp_path / "cache"
    for name, ends in (
        ("corpus", [3, 4, 6]),
        ("corpus.idx", [3, 4, 6]),
        ("flat.npy", [6]),
        ("rows.npy", [3, 6]),
    ):
        made = tokens_of(tmp_path / name, cache)
        assert made.tokens.tolist() == flat and made.ends.tolist() == ends
        assert isinstance(made.tokens, np.memmap)
        check_vocabulary(made, 40001)
        with pytest.raises(
            UserError, match=r"(corpus.bin|.npy): token 3 is 40000, but model.vocab_size = 40000;"
        ):
            check_vocabulary(made, 40000)
    assert not list(cache.glob("*.tokens"))
    # The name is that of the content: written again elsewhere it is the same, changed it is another.
    (tmp_path / "copy").mkdir()
    write_megatron(tmp_path / "copy" / "corpus", documents)
    first = tokens_of(tmp_path / "corpus.idx", cache).path
    assert tokens_of(tmp_path / "copy", cache).path == first
    write_megatron(tmp_path / "corpus", [[1, 2, 4], [40000], [5, 6]])
    assert tokens_of(tmp_path / "corpus", cache).path != first


def test_several_token_files_are_one_text(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for index in range(3):
        write_megatron(folder / f"part{index}", [[index, 1], [index, 2, 3]], "<i4")
    made = tokens_of(folder, tmp_path / "cache")
    assert made.tokens.tolist() == [0, 1, 0, 2, 3, 1, 1, 1, 2, 3, 2, 1, 2, 2, 3]
    assert made.ends.tolist() == [2, 5, 7, 10, 12, 15]
    assert made.read(np.array([0, 3, 9]), 6).tolist() == [
        [0, 1, 0, 2, 3, 1],
        [2, 3, 1, 1, 1, 2],
        [3, 2, 1, 2, 2, 3],
    ]


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _bad(tmp_path: Path, name: str) -> Path:
    if name == "line":
        return _write(tmp_path / "a.jsonl", b'{"text": "a"}\n\n{"text": \n')
    if name == "not an object":
        return _write(tmp_path / "a.jsonl", b'{"text": "a"}\n["b"]\n')
    if name == "not text":
        return _write(tmp_path / "a.jsonl", b'{"text": 3}\n')
    if name == "parquet":
        return _write(tmp_path / "a.parquet", b"PAR1 but no more")
    if name == "numbers":
        pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "a.parquet")
        return tmp_path / "a.parquet"
    if name == "floats":
        np.save(tmp_path / "a.npy", np.zeros(3))
        return tmp_path / "a.npy"
    if name == "negative":
        np.save(tmp_path / "a.npy", np.array([1, 2, -5, 3]))
        return tmp_path / "a.npy"
    if name == "no array":
        return _write(tmp_path / "a.npy", b"something else")
    index = write_megatron(tmp_path / "a", [[1, 2, 3], [4, 5]])
    if name == "short bin":
        _write(tmp_path / "a.bin", (tmp_path / "a.bin").read_bytes()[:-2])
    elif name == "short idx":
        _write(index, index.read_bytes()[:-8])
    elif name == "no idx":
        _write(index, b"something else, and long enough to be one of them")
    elif name == "alone":
        (tmp_path / "a.bin").unlink()
    elif name == "no index":
        # Named by itself: its ids are no text.
        (tmp_path / "a.idx").unlink()
        return tmp_path / "a.bin"
    return index


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("line", r"a\.jsonl:3 is not a line of JSON \(.*\): {\"text\":; correct or remove it"),
        ("not an object", r"a\.jsonl:2 is no JSON object but list"),
        ("not text", r"a\.jsonl:1: field 'text' is no text but int; choose another by data.field"),
        ("parquet", r"a\.parquet cannot be read: .*; make it readable or leave it out"),
        ("numbers", r"column 'text' holds no text but int64; choose another"),
        ("floats", r"a\.npy holds float64 of shape \(3,\); save token ids as integers"),
        ("negative", r"a\.npy: token 2 is -5; ids start at 0"),
        ("no array", r"a\.npy cannot be read"),
        (
            "short bin",
            r"a\.idx tells of 10 bytes in a\.bin \(2 sequences of uint16\), but .*a\.bin has 8 bytes",
        ),
        ("short idx", r"a\.idx has 74 bytes, but its 2 sequences and 3 documents need 82; it was cut short"),
        ("no idx", r"a\.idx is no index of Megatron's"),
        ("alone", r"data file .*a\.idx has no a\.bin beside it; give both"),
        ("no index", r"data file .*a\.bin has no a\.idx beside it; give both"),
    ],
)
def test_what_cannot_be_used_is_told_in_a_line(tmp_path: Path, name: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        tokens_of(_bad(tmp_path, name), tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_lines_are_numbered_in_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "UNIT_BYTES", 50)
    write_jsonl(tmp_path / "a.jsonl", ["text"] * 40)
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write("oops\n")
    with pytest.raises(UserError, match=r"a\.jsonl:41 is not a line of JSON"):
        tokens_of(tmp_path / "a.jsonl", tmp_path / "cache")


def test_empty_files_are_left_out_and_told(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / "b.txt").touch()
    told: list[str] = []
    made = prepare_text(TextSource(folder), cache_dir=tmp_path / "cache", say=told.append)
    assert made.tokens.tolist() == [97, 256]
    assert told == [f"data file {folder / 'b.txt'} is empty and is left out"]


def test_of_many_empty_files_a_few_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "z.txt").write_text("a")
    for index in range(12):
        (folder / f"{index:02}.txt").touch()
    told: list[str] = []
    prepare_text(TextSource(folder), cache_dir=tmp_path / "cache", say=told.append)
    assert told[:3] == [
        f"data file {folder / f'0{index}.txt'} is empty and is left out" for index in range(3)
    ]
    assert told[3:] == ["and 9 more data files are empty and are left out"]


def test_links_that_lead_nowhere_or_to_a_folder_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / "gone.txt").symlink_to("nowhere.txt")
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / ".#hidden").symlink_to("nowhere")
    other = tmp_path / "other"
    other.mkdir()
    (other / "b.txt").write_text("b")
    (folder / "more").symlink_to(other)
    told: list[str] = []
    made = prepare_text(TextSource(folder), cache_dir=tmp_path / "cache", say=told.append)
    assert made.tokens.tolist() == [97, 256]
    assert told == [
        f"data file {folder / 'gone.txt'} is a link to nothing (nowhere.txt) and is left out",
        f"data file {folder / 'loop.txt'} is a link to nothing (loop.txt) and is left out",
        f"data folder {folder / 'more'} is a link, which is not followed: it is left out",
    ]
    # A pattern that goes through the link reads its files, and so nothing is left out.
    told.clear()
    source = TextSource(folder, pattern="more/*.txt")
    made = prepare_text(source, cache_dir=tmp_path / "cache", say=told.append)
    assert made.tokens.tolist() == [98, 256] and told == []
    (folder / "a.txt").unlink()
    with pytest.raises(UserError, match=r"pattern = '\*' matches no file in .*gone.txt is a link to nothing"):
        tokens_of(folder, tmp_path / "cache")


def test_folders_that_cannot_be_listed_are_told(unprivileged_folder: Path) -> None:
    folder = unprivileged_folder
    (folder / "a.txt").write_text("a")
    closed = [folder / name for name in ("b", "c/d", "e", "f", "g")]
    for path in closed:
        path.mkdir(parents=True)
        path.chmod(0)
    told: list[str] = []
    try:
        assert files_of(TextSource(folder), told.append) == [folder / "a.txt"]
        assert told == [
            *(
                f"data folder {path} cannot be listed (Permission denied) and is left out"
                for path in closed[:3]
            ),
            "and 2 more data folders cannot be listed and are left out",
        ]
        (folder / "a.txt").unlink()
        with pytest.raises(UserError, match=r"matches no file in .*b cannot be listed \(Permission denied\)"):
            files_of(TextSource(folder))
        with pytest.raises(UserError, match=r"data.path = .*b' cannot be listed: Permission denied; make it"):
            files_of(TextSource(closed[0]))
        # A folder that can be listed and not entered: its files cannot be looked at.
        (folder / "h").mkdir()
        (folder / "h" / "a.txt").write_text("a")
        (folder / "h").chmod(0o444)
        with pytest.raises(
            UserError, match=r"h/a.txt cannot be looked at: Permission denied; make it readable"
        ):
            files_of(TextSource(folder))
    finally:
        for path in (*closed, folder / "h"):
            path.chmod(0o700)


@pytest.fixture
def unprivileged_folder() -> Iterator[Path]:
    """A folder in which the rights of files count: root, whom they do not bind, becomes another user meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if os.geteuid() != 0:
            yield folder
            return
        os.chown(folder, _NOBODY, -1)
        os.seteuid(_NOBODY)
        try:
            yield folder
        finally:
            os.seteuid(0)


def test_files_of_several_formats_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", DOCUMENTS)
    (folder / "README.md").write_text("about")
    with pytest.raises(
        UserError, match=r"several formats: text \(README.md\), jsonl \(a.jsonl\); choose some by"
    ):
        tokens_of(folder, tmp_path / "cache")
    assert tokens_of(folder, tmp_path / "cache", pattern="*.jsonl").tokens.tolist() == EXPECTED
