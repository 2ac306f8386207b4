"""`eth data`: tokens made ahead of a job, in processes, going on after a kill; and what a job makes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.data_settings import TextSource
from actors.text.prepared import tokenizer_of
from actors.text.text import prepare_text
from eth_service.cli import main
from planner.errors import UserError
from tests.actors.test_run_folder import largest_file
from tests.actors.test_tokenizers import TEXT, trained_tokenizer


def eth(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code and output of `eth data`."""
    sys.argv = ["eth", "data", *map(str, arguments)]
    with pytest.raises(SystemExit) as caught:
        main()
    output = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, output.out, output.err


def _texts(folder: Path, lines: int) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"body": f"{i} {TEXT[: 40 + i % 900]}"}) + "\n" for i in range(lines)))
    return path


def test_a_prepared_folder_is_a_jobs_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = trained_tokenizer(tmp_path / "tokenizer.json")
    texts = _texts(tmp_path, 50)
    options = ("--field", "body", "--tokenizer", tokenizer, "--processes", 1)
    code, out, err = eth(capsys, "prepare", texts, "--output", tmp_path / "tokens", *options)
    assert (code, err) == (0, "") and "tokens of 50 documents; a job names it as data.path" in out
    direct = prepare_text(
        TextSource(texts, text_field="body", tokenizer=tokenizer), cache_dir=tmp_path / "cache"
    )
    made = prepare_text(TextSource(tmp_path / "tokens"), cache_dir=tmp_path / "unused")
    assert made.path.name == direct.path.name and made.tokens.tolist() == direct.tokens.tolist()
    assert not (tmp_path / "unused").exists()
    code, out, _ = eth(capsys, "show", tmp_path / "tokens", "--json")
    shown = json.loads(out)
    assert code == 0 and shown["tokens"] == made.count and shown["documents"] == 50
    assert shown["vocabulary"] == 400 and shown["tokenizer"] == made.tokenizer
    assert "tokens" in eth(capsys, "show", tmp_path / "tokens")[1]
    # The tokenizer may be named again, another one not.
    same = TextSource(tmp_path / "tokens", tokenizer=tokenizer)
    assert prepare_text(same, cache_dir=tmp_path / "unused").path == made.path
    other = trained_tokenizer(tmp_path / "other.json", vocabulary=300)
    with pytest.raises(
        UserError, match=r"other.json' \(.*\) did not make the tokens in .*; prepare them anew"
    ):
        prepare_text(TextSource(tmp_path / "tokens", tokenizer=other), cache_dir=tmp_path / "unused")


def test_parts_of_no_more_use_are_told_and_deleted_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither is the rest of a folder touched, nor is a tokenizer that made none of its tokens taken for theirs."""
    texts, folder = tmp_path / "texts", tmp_path / "tokens"
    texts.mkdir()
    # Nothing but white space is worked on, and gives no token.
    (texts / "blank.jsonl").write_text("\n\n")
    (texts / "a.jsonl").write_text('{"text": "as it was"}\n')
    tokenizer = trained_tokenizer(tmp_path / "tokenizer.json")
    arguments = ("prepare", texts, "--output", folder, "--processes", 1)
    assert eth(capsys, *arguments, "--tokenizer", tokenizer)[2] == ""
    assert tokenizer_of([TextSource(folder)]) == folder / "tokenizer.json"
    (folder / "notes.json").write_text("mine")
    before = set(folder.iterdir())

    (texts / "a.jsonl").write_text('{"text": "as it is now"}\n')
    code, out, err = eth(capsys, *arguments)
    assert code == 0 and "13 tokens of 1 documents" in out and err.count("\n") == 1
    assert "also holds 1 part (" in err and "--prune deletes what this text does not use" in err
    assert before < set(folder.iterdir()) and tokenizer_of([TextSource(folder)]) is None

    code, out, err = eth(capsys, *arguments, "--prune")
    assert code == 0 and err.startswith("eth: deleted 1 part (") and err.count("\n") == 1
    left = {file.suffix or file.name for file in before & set(folder.iterdir())}
    assert {"notes.json", "tokenizer.json", "prepared.json"} <= {file.name for file in folder.iterdir()}
    assert not {".tokens", ".ends"} & left
    assert prepare_text(TextSource(folder), cache_dir=tmp_path / "unused").count == 13
    assert "deleted 0 parts" in eth(capsys, *arguments, "--prune")[2]


def test_a_part_that_was_cut_short_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert eth(capsys, "prepare", _texts(tmp_path, 5), "--output", tmp_path / "a", "--field", "body")[0] == 0
    (part,) = (tmp_path / "a").glob("*.tokens")
    os.truncate(part, part.stat().st_size - 2)
    with pytest.raises(
        UserError, match=rf"{part} has \d+ bytes and not \d+; delete it and run eth data prepare"
    ):
        prepare_text(TextSource(tmp_path / "a"), cache_dir=tmp_path / "unused")


def test_ends_that_are_gone_are_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the message about them says to do is enough."""
    arguments = ("prepare", _texts(tmp_path, 5), "--output", tmp_path / "a", "--field", "body")
    assert eth(capsys, *arguments)[0] == 0
    (ends,) = (tmp_path / "a").glob("*.ends")
    before = ends.read_bytes()
    ends.unlink()
    with pytest.raises(
        UserError, match=rf"{ends} has 0 bytes and not 40; delete it and run eth data prepare"
    ):
        prepare_text(TextSource(tmp_path / "a"), cache_dir=tmp_path / "unused")
    assert eth(capsys, *arguments)[0] == 0 and ends.read_bytes() == before


def test_tokens_are_never_read_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither when they lie among the texts that they were made of, nor in a folder that was not finished."""
    folder = tmp_path / "texts"
    (folder / "out").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXT)
    arguments = ("prepare", folder, "--output", folder / "out")
    assert eth(capsys, *arguments)[0] == 0
    code, _, err = eth(capsys, *arguments)
    assert code == 2 and "holds tokens that eth data prepare made (out/" in err and len(err.splitlines()) == 1
    assert eth(capsys, *arguments, "--pattern", "*.txt")[0] == 0
    (folder / "out" / "prepared.json").unlink()
    with pytest.raises(
        UserError, match=r"holds tokens that eth data prepare made .* let eth data prepare finish"
    ):
        prepare_text(TextSource(folder / "out"), cache_dir=tmp_path / "unused")


def test_a_full_disk_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever file has no room: the tokens, or the tokenizer beside them."""
    tokenizer, folder = trained_tokenizer(tmp_path / "tokenizer.json"), tmp_path / "tokens"
    (tmp_path / "a.txt").write_text("short")
    arguments = ("prepare", tmp_path / "a.txt", "--output", folder, "--tokenizer", tokenizer)
    for room in (1, 1000):
        with largest_file(room):
            code, _, err = eth(capsys, *arguments)
        assert code == 2 and err.count("\n") == 1, err
        assert (
            f"token files cannot be written to {folder}: File too large; name a folder that has room" in err
        )
        assert not (folder / "prepared.json").exists()
    assert eth(capsys, *arguments)[0] == 0


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("a")
    for arguments, told in (
        (("show", tmp_path), "holds no prepared.json; name a folder"),
        (("prepare", tmp_path / "none", "--output", tmp_path / "a"), "does not exist"),
        (("prepare", tmp_path / "file", "--output", tmp_path / "a", "--format", "csv"), "format = 'csv'"),
        (("prepare", tmp_path / "file", "--output", tmp_path / "file"), "cannot be written: File exists"),
    ):
        code, _, err = eth(capsys, *arguments)
        assert code == 2 and told in err and len(err.splitlines()) == 1, err


@pytest.mark.slow
def test_a_killed_run_is_gone_on_with_and_processes_make_the_same(tmp_path: Path) -> None:
    """Killed as soon as a part is whole: that part is not made again, and all is as one process makes it."""
    texts = _texts(tmp_path, 150_000)
    tokenizer = trained_tokenizer(tmp_path / "tokenizer.json")
    folder = tmp_path / "tokens"
    arguments = ["data", "prepare", texts, "--output", folder, "--field", "body", "--tokenizer", tokenizer]
    program = "from eth_service.cli import main; main()"
    command = [sys.executable, "-c", program, *map(str, arguments), "--processes", "2"]
    with subprocess.Popen(command, start_new_session=True) as running:
        deadline = time.monotonic() + 120
        while not (whole := list(folder.glob("*.tokens"))):
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.01)
        os.killpg(running.pid, signal.SIGKILL)
    assert not (folder / "prepared.json").exists()
    before = {part: part.stat().st_mtime_ns for part in whole}
    subprocess.run(command, check=True, timeout=200)
    assert {part: part.stat().st_mtime_ns for part in whole} == before
    assert not list(folder.glob(".*"))
    made = prepare_text(TextSource(folder), cache_dir=tmp_path)
    assert len(made.header.parts) > len(whole) and made.header.documents == 150_000
    alone = prepare_text(
        TextSource(texts, text_field="body", tokenizer=tokenizer), cache_dir=tmp_path / "cache"
    )
    assert alone.path.name == made.path.name


@pytest.mark.slow
@pytest.mark.parametrize("stopped_by", [signal.SIGINT, signal.SIGKILL])
def test_nothing_goes_on_when_it_is_stopped(tmp_path: Path, stopped_by: signal.Signals) -> None:
    """Ctrl-C reaches every process of a terminal, and the one that was called says what is next; a kill reaches that
    one alone, and those that it started end with it."""
    folder = tmp_path / "tokens"
    arguments = ["data", "prepare", _texts(tmp_path, 250_000), "--output", folder, "--field", "body"]
    command = [sys.executable, "-m", "eth_service.console", *map(str, arguments), "--processes", "2"]
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        deadline = time.monotonic() + 120
        while not list(folder.glob(".*.tokens.*")):
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.002)
        if stopped_by == signal.SIGINT:
            os.killpg(running.pid, stopped_by)
        else:
            running.kill()
        # Whoever is left holds the streams open.
        out, err = running.communicate(timeout=60)
    assert out == "" and not (folder / "prepared.json").exists()
    if stopped_by == signal.SIGINT:
        assert running.returncode == 130
        assert (
            err
            == f"eth: stopped; what is finished stays in {folder}, and the same command goes on from there\n"
        )
