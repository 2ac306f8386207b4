"""Importing Metis-style layer JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.catalogue import CATALOGUE
from planner.errors import UserError
from planner.model_spec import PRESETS, ModelSpec
from planner.profile.importers import Import, import_folder
from planner.profile.measured import MeasuredProfile
from tests.planner.profile.sources import MIB, write_layers

MODEL = PRESETS["gpt3-1.3b"]


def read(folder: Path, **changes: Any) -> Import:
    options: dict[str, Any] = {
        "device_type": "A100",
        "model": MODEL,
        "precision": "fp16",
        "sequence_length": 1024,
    }
    (found,) = import_folder(folder, **(options | changes))
    return found


def test_layers_become_three_groups(tmp_path: Path) -> None:
    found = read(write_layers(tmp_path))
    assert [(g.name, g.part, len(g.operators)) for g in found.profile.groups] == [
        ("embedding", "embedding", 1),
        ("layer", "layer", 13),
        ("head", "head", 3),
    ]
    layer = found.profile.groups[1]
    time = next(time for time in layer.times if (time.tp, time.samples) == (2, 2))
    assert time.forward_seconds + time.backward_seconds == pytest.approx(2e-3)
    assert time.total_bytes == 20 * MIB and time.saved_bytes is None
    assert (time.sequence_length, time.precision) == (1024, "fp16")


def test_the_split_of_the_passes_is_told_as_an_assumption(tmp_path: Path) -> None:
    found = read(write_layers(tmp_path))
    assert any("one third" in assumption for assumption in found.profile.assumptions)
    assert set(found.profile.assumptions) <= set(found.notes)
    assert "measured on 3 layers; the mean one stands for all 24" in found.notes


def test_the_table_answers_for_a_whole_layer(tmp_path: Path) -> None:
    table = MeasuredProfile(
        MODEL, {"A100": read(write_layers(tmp_path)).profile}, {"A100": CATALOGUE["A100"]}
    )
    (group,) = table.groups("A100").layer
    step = table.operator_seconds(
        device_type="A100", operator=group.name, tp=1, samples=2, sequence_length=1024, precision="fp16"
    )
    assert step.total == pytest.approx(3e-3)
    assert table.includes_tp_collectives("A100")


@pytest.mark.parametrize("option", ["model", "precision", "sequence_length"])
def test_what_the_files_do_not_tell_must_be_given(tmp_path: Path, option: str) -> None:
    with pytest.raises(UserError, match=f"add --{option.replace('_', '-')}"):
        read(write_layers(tmp_path), **{option: None})


def test_a_missing_case_is_told(tmp_path: Path) -> None:
    missing = read(write_layers(tmp_path, cases=((1, 1), (1, 2), (2, 1)))).missing
    assert "fp16: tp 2 with micro-batches of 2: all operators" in missing
    assert "fp16: tp 4, 8" in missing


def layer_bytes(model: ModelSpec, width: int) -> int:
    return width * 12 * model.hidden_size**2


def test_parameter_bytes_must_be_the_models(tmp_path: Path) -> None:
    assert read(write_layers(tmp_path / "a", parameters=layer_bytes(MODEL, 4))).profile
    with pytest.raises(UserError, match="name the model that was measured with --model"):
        read(write_layers(tmp_path / "b", parameters=layer_bytes(PRESETS["gpt3-13b"], 4)))


def test_of_several_types_the_named_one_is_taken(tmp_path: Path) -> None:
    write_layers(tmp_path, type_="A100")
    write_layers(tmp_path, type_="V100")
    assert "A100" in read(tmp_path).profile.source
    assert "V100" in read(tmp_path, device_type="V100-32").profile.source
    with pytest.raises(UserError, match="holds device types A100, V100, none of them H100"):
        read(tmp_path, device_type="H100")


def test_a_single_type_may_be_named_otherwise(tmp_path: Path) -> None:
    assert read(write_layers(tmp_path, type_="Mine")).profile.device_type == "A100"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"execution_time": {}}, "execution_time.layer_compute_total_ms is missing"),
        ({"execution_memory": {"layer_memory_total_mb": [1.0] * 4}}, "has 4 entries"),
        ({"execution_time": {"layer_compute_total_ms": [1.0, -1.0, 1.0]}}, "layer_compute_total_ms.1"),
    ],
)
def test_wrong_content_is_named(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as error:
        read(write_layers(tmp_path, **changes))
    assert told in str(error.value)


def test_two_kinds_in_one_folder_are_refused(tmp_path: Path) -> None:
    write_layers(tmp_path)
    (tmp_path / "gpt_13B_mbs1_tp1_algo0.csv").write_text("")
    with pytest.raises(UserError, match="both operator CSV and layer JSON"):
        read(tmp_path)
