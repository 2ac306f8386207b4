"""Token files and the order of samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.data import Samples, permuted, sample_positions
from actors.engine.tokens import TOKEN_TYPE, TokenFile, check_vocabulary
from actors.text.files import STDLIB_BYTES
from actors.text.text import prepare_tokens
from actors.text.tokenizer import BYTE_END
from planner.errors import UserError


def _tokens(path: Path, content: bytes) -> TokenFile:
    (path / "text.txt").write_bytes(content)
    return prepare_tokens(path / "text.txt", cache_dir=path / "cache")


def test_a_file_becomes_its_bytes_and_an_end_mark(tmp_path: Path) -> None:
    made = _tokens(tmp_path, b"a\xff\n")
    assert made.tokens.tolist() == [97, 255, 10, BYTE_END]
    assert made.count == 4


def test_a_folder_is_read_in_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    for name, content in {"b/x.txt": "2", "a.txt": "1", "c.md": "no", ".hidden/y.txt": "no"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    made = prepare_tokens(folder, pattern="*.txt", cache_dir=tmp_path / "cache")
    assert made.tokens.tolist() == [ord("1"), BYTE_END, ord("2"), BYTE_END]


def test_the_same_content_is_written_once_and_other_content_apart(tmp_path: Path) -> None:
    first = _tokens(tmp_path, b"hello")
    written = first.path.stat().st_mtime_ns
    (tmp_path / "copy.txt").write_bytes(b"hello")
    again = prepare_tokens(tmp_path / "copy.txt", cache_dir=tmp_path / "cache")
    assert (again.path, again.path.stat().st_mtime_ns) == (first.path, written)
    assert _tokens(tmp_path, b"hellp").path != first.path
    # Where a document ends is content too.
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "1").write_bytes(b"hel")
    (folder / "2").write_bytes(b"lo")
    assert prepare_tokens(folder, cache_dir=tmp_path / "cache").count == 7
    assert len(list((tmp_path / "cache").glob("*.tokens"))) == 3


def test_a_cache_that_cannot_be_written_is_told_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(
        UserError, match=r"cannot be written to .*: Not a directory; name a folder .*XDG_CACHE_HOME"
    ):
        prepare_tokens(tmp_path / "text.txt", cache_dir=tmp_path / "text.txt" / "cache")


def test_large_files_are_read_in_pieces(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 256, 2_500_000, dtype=np.uint8).tobytes()
    made = _tokens(tmp_path, content)
    assert made.tokens[:-1].astype(np.uint8).tobytes() == content


def test_the_standard_library_is_text_enough(tmp_path: Path) -> None:
    made = prepare_tokens("python-stdlib", cache_dir=tmp_path)
    assert 1_000_000 < made.count < STDLIB_BYTES + 10_000
    assert prepare_tokens("python-stdlib", cache_dir=tmp_path).path == made.path


def _broken_inputs(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    return {
        "does not exist": (tmp_path / "nowhere.txt", "*"),
        "holds no text": (tmp_path / "empty.txt", "*"),
        "matches no file": (tmp_path / "folder", "*.txt"),
        "is no pattern": (tmp_path / "folder", "/etc/*"),
    }


@pytest.mark.parametrize("told", ["does not exist", "holds no text", "matches no file", "is no pattern"])
def test_what_cannot_be_read_is_told_in_one_line(tmp_path: Path, told: str) -> None:
    source, pattern = _broken_inputs(tmp_path)[told]
    with pytest.raises(UserError, match=told) as caught:
        prepare_tokens(source, pattern=pattern, cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


UNREADABLE = Path("/proc/self/mem")


@pytest.mark.skipif(not UNREADABLE.exists(), reason="needs a file that even root cannot read")
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{UNREADABLE} cannot be read"):
        prepare_tokens(UNREADABLE, cache_dir=tmp_path / "cache")


def test_a_text_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    made = _tokens(tmp_path, b"1234567")
    assert made.windows(7) == 1
    with pytest.raises(UserError, match=r"sequence_length = 8 needs 9 tokens .* hold 8"):
        Samples(made, sequence_length=8, global_batch_size=1, seed=0)


def test_a_vocabulary_without_room_for_the_bytes_is_refused(tmp_path: Path) -> None:
    made = _tokens(tmp_path, b"text")
    check_vocabulary(made, 257)
    with pytest.raises(UserError, match="vocab_size = 256"):
        check_vocabulary(made, 256)


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 700), seed=st.integers(0, 2**63), epoch=st.integers(0, 5))
def test_the_order_of_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(np.arange(size), size=size, seed=seed, epoch=epoch)) == list(range(size))


def test_the_order_looks_random() -> None:
    """Neighbours are far apart and orders of other seeds and epochs are unlike, as for a random order."""
    size = 10_000
    orders = [permuted(np.arange(size), size=size, seed=s, epoch=e) for s, e in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        # A random order's mean step is size / 3; its correlation with its own index is about 1 / sqrt(size).
        assert np.abs(np.diff(order)).mean() == pytest.approx(size / 3, rel=0.05)
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.05
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert (orders[left] == orders[right]).sum() < 10
        assert abs(np.corrcoef(orders[left], orders[right])[0, 1]) < 0.05


@settings(max_examples=50, deadline=None)
@given(windows=st.integers(1, 50), batch=st.integers(1, 20), seed=st.integers(0, 9))
def test_each_window_comes_once_an_epoch(windows: int, batch: int, seed: int) -> None:
    drawn = np.concatenate(
        [
            sample_positions(seed=seed, iteration=i, global_batch_size=batch, windows=windows)
            for i in range(1, 3 * windows // batch + 3)
        ]
    )
    for epoch in range(3):
        assert sorted(drawn[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


def test_the_order_stays_the_same_between_versions() -> None:
    """A run that resumes must see the samples it would have seen."""
    assert permuted(np.arange(8), size=8, seed=3, epoch=1).tolist() == [5, 1, 0, 7, 4, 2, 3, 6]


def test_labels_are_the_next_tokens_and_parts_make_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "counting.tokens"
    np.arange(1000, dtype=TOKEN_TYPE).tofile(path)
    samples = Samples(TokenFile(path), sequence_length=7, global_batch_size=6, seed=5)
    inputs, labels = samples.batch(4, 0, 6)
    assert inputs.shape == labels.shape == (6, 7)
    assert inputs.dtype == labels.dtype == torch.int64
    assert torch.equal(labels, inputs + 1)
    assert (inputs[:, 0] % 7 == 0).all()
    parts = [samples.batch(4, first, last) for first, last in ((0, 1), (1, 1), (1, 4), (4, 6))]
    assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
    assert not torch.equal(samples.batch(5, 0, 6)[0], inputs)


def test_the_last_window_ends_with_the_text(tmp_path: Path) -> None:
    path = tmp_path / "counting.tokens"
    np.arange(15, dtype=TOKEN_TYPE).tofile(path)
    samples = Samples(TokenFile(path), sequence_length=7, global_batch_size=2, seed=0)
    assert sorted(samples.batch(1, 0, 2)[1][:, -1].tolist()) == [7, 14]
