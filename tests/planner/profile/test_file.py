"""The profile file: what is written is read back, and what is wrong is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from planner.errors import UserError
from planner.model_spec import PRESETS
from planner.profile.file import DeviceProfile, Shape, read_profile, read_profiles


@pytest.fixture
def content(imported: Callable[..., DeviceProfile]) -> dict[str, Any]:
    return json.loads(imported().to_json())


def refusal(tmp_path: Path, content: dict[str, Any]) -> str:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as error:
        read_profile(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_reads_what_it_writes(imported: Callable[..., DeviceProfile], tmp_path: Path) -> None:
    profile = imported()
    (tmp_path / "profile.json").write_text(profile.to_json())
    again = read_profile(tmp_path / "profile.json")
    assert again.groups == profile.groups and again.shape == profile.shape
    assert again.to_json() == profile.to_json()


def test_the_hash_is_of_the_measurements_not_of_the_day(imported: Callable[..., DeviceProfile]) -> None:
    profile = imported()
    assert profile.model_copy(update={"date": date(2020, 1, 1)}).sha256 == profile.sha256
    assert imported(length=1024).sha256 != profile.sha256


def test_a_case_timed_twice_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    times = content["groups"][2]["times"]
    times.append(times[0])
    assert "qkv: tp 1, 1 samples of 2048 tokens in fp16 is timed twice" in refusal(tmp_path, content)


def test_an_operator_in_two_groups_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    content["groups"][3]["operators"] = ["qkv"]
    assert "operator 'qkv' is in two groups" in refusal(tmp_path, content)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("version", 2, "version = 2"),
        ("colour", "red", "colour is not a known key"),
        ("shape_hash", "0", "shape_hash = '0' is not that of shape"),
        ("provenance", "guessed", "provenance = 'guessed'"),
    ],
)
def test_a_wrong_field_is_named(
    tmp_path: Path, content: dict[str, Any], field: str, value: object, told: str
) -> None:
    assert told in refusal(tmp_path, content | {field: value})


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_times_are_numbers_from_0(tmp_path: Path, content: dict[str, Any], seconds: float) -> None:
    content["groups"][0]["times"][0]["forward_seconds"] = seconds
    assert "groups.0.times.0.forward_seconds" in refusal(tmp_path, content)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json does not exist"):
        read_profile(tmp_path / "nowhere.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match=r"bad\.json cannot be read"):
        read_profile(tmp_path / "bad.json")


def test_an_empty_folder_says_how_to_fill_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="eth profile import"):
        read_profiles(tmp_path)


def test_a_shape_tells_every_difference() -> None:
    model = PRESETS["gpt3-1.3b"]
    shape = Shape(family="gpt3", hidden_size=1024, ffn_hidden_size=8192, heads=32, vocab_size=51_200)
    assert shape.unlike(model) == ["hidden_size = 1024 (the model has 2048)", "heads = 32 (the model has 16)"]


@pytest.mark.parametrize(
    ("vocabulary", "fits"), [(50_257, True), (51_200, True), (51_201, False), (50_000, False)]
)
def test_a_vocabulary_may_be_padded(vocabulary: int, fits: bool) -> None:
    model = PRESETS["gpt3-1.3b"]
    shape = Shape(family="gpt3", hidden_size=2048, ffn_hidden_size=8192, vocab_size=vocabulary)
    assert (shape.unlike(model) == []) == fits
