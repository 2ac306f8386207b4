"""Importing folders of operator and link CSVs."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import UserError
from planner.model_spec import PRESETS
from planner.profile.importers import Import, import_folder
from planner.profile.importers.names import preset_of
from tests.planner.profile.sources import (
    GROUPED,
    MIB,
    SINGLE,
    microseconds,
    write_collective,
    write_operators,
    write_transfers,
)


def one(folder: Path, **options: object) -> Import:
    found = import_folder(folder, device_type="A100", **options)  # type: ignore[arg-type]
    assert len(found) == 1
    return found[0]


def test_times_and_bytes_are_in_seconds_and_bytes(tmp_path: Path) -> None:
    profile = one(write_operators(tmp_path / "fp16")).profile
    group = next(group for group in profile.groups if group.name == "mlp_up")
    time = next(time for time in group.times if (time.tp, time.samples) == (2, 4))
    forward, backward = microseconds(SINGLE.index("enc-MLP-GEMM-1"), tp=2, samples=4)
    assert (time.forward_seconds, time.backward_seconds) == pytest.approx((forward * 1e-6, backward * 1e-6))
    assert time.parameter_bytes == 2048 * 8192 * 2 // 2
    assert time.saved_bytes == {"mlp_up": 4 * 2048 * 2048 * 2}
    assert time.workspace_bytes == 3 * MIB
    assert (time.sequence_length, time.precision, time.spread_seconds) == (2048, "fp16", None)
    assert profile.provenance == "imported" and profile.includes_tp_collectives


def test_the_shape_is_read_off_the_sizes(tmp_path: Path) -> None:
    found = one(write_operators(tmp_path / "fp16"))
    shape = found.profile.shape
    assert (shape.hidden_size, shape.heads, shape.vocab_size) == (2048, 16, 51_200)
    assert found.is_preset and found.model.name == "gpt3-1.3b"


def test_other_heads_than_the_presets_make_another_model(tmp_path: Path) -> None:
    found = one(write_operators(tmp_path / "fp16", heads=32))
    assert not found.is_preset
    assert (found.model.name, found.model.heads) == ("gpt3-1.3b-heads32", 32)
    assert "heads = 32 (the model has 16)" in found.notes[0]


def test_groups_leave_heads_unknown(tmp_path: Path) -> None:
    profile = one(write_operators(tmp_path / "fp16", names=GROUPED)).profile
    assert profile.shape.heads is None
    assert [(group.name, len(group.operators)) for group in profile.groups] == [
        ("embedding", 1),
        ("attention", 8),
        ("mlp", 5),
        ("head", 3),
    ]


def test_precisions_of_subfolders_come_together(tmp_path: Path) -> None:
    write_operators(tmp_path / "fp16")
    write_operators(tmp_path / "fp32", width=4)
    for precision, speed in (("fp16", 10.0), ("fp32", 20.0)):
        write_transfers(tmp_path / precision, "intra", {1: speed, 2: speed})
    profile = one(tmp_path).profile
    assert profile.precisions == ("fp16", "fp32")
    seconds = {link.precision: link.points[0].seconds for link in profile.links}
    assert seconds == pytest.approx({"fp16": MIB / 10e9, "fp32": MIB / 20e9})


def test_sixteen_bits_need_a_name(tmp_path: Path) -> None:
    folder = write_operators(tmp_path / "somewhere")
    with pytest.raises(UserError, match="--precision fp16 or --precision bf16"):
        one(folder)
    assert one(folder, precision="bf16").profile.precisions == ("bf16",)


def test_a_wrong_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds fp32 values"):
        one(write_operators(tmp_path / "a", width=4), precision="fp16")
    with pytest.raises(UserError, match="holds 16-bit values"):
        one(write_operators(tmp_path / "b"), precision="fp32")


def test_collectives_are_sorted_and_the_unmeasured_left_out(tmp_path: Path) -> None:
    folder = write_operators(tmp_path / "fp16")
    write_collective(folder, "all_gather", 2, [(8, 0.4), (2, 0.1), (3, 1e9), (0, 0.1), (4, 0.2), (8, 0.6)])
    found = one(folder)
    (times,) = found.profile.links
    assert [point.message_bytes // MIB for point in times.points] == [2, 4, 8]
    assert [point.seconds for point in times.points] == pytest.approx([1e-4, 2e-4, 5e-4])
    assert "1 collectives are marked as not measured; left out" in found.notes
    assert "1 collectives have a size or time written as 0; left out" in found.notes


def test_a_collective_of_which_nothing_was_measured_is_missing(tmp_path: Path) -> None:
    folder = write_operators(tmp_path / "fp16")
    write_collective(folder, "all_reduce", 2, [(1, 1e9)])
    found = one(folder)
    assert found.profile.links == ()
    assert any("all_reduce of 2" in line for line in found.missing)


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    folder = write_operators(tmp_path / "fp16", names=SINGLE[:-1])
    (folder / "gpt_1_3B_mbs4_tp2_algo0.csv").unlink()
    missing = one(folder).missing
    assert "operators: vocabulary_projection, loss" in missing
    assert "fp16: tp 4, 8" in missing
    assert "fp16: tp 2 with micro-batches of 4: all operators" in missing
    assert any(line.startswith("transfers between nodes") for line in missing)


def test_transfers_that_are_there_are_not_missing(tmp_path: Path) -> None:
    folder = write_operators(tmp_path / "fp16")
    for scope in ("intra", "inter"):
        write_transfers(folder, scope, {1: 10.0, 2: 11.0})
    assert not any(line.startswith("transfers") for line in one(folder).missing)


def test_negative_memory_is_unknown(tmp_path: Path) -> None:
    changes: dict[str, dict[str, object]] = {"enc-MLP-gelu": {"activations": -24.056}}
    found = one(write_operators(tmp_path / "fp16", changes=changes))
    group = next(group for group in found.profile.groups if group.name == "activation")
    assert {time.saved_bytes is None for time in group.times} == {True}
    assert "6 cases have negative memory figures (activation); left unknown" in found.notes


def test_zero_times_are_told(tmp_path: Path) -> None:
    changes: dict[str, dict[str, object]] = {"enc-1st-layernorm": {"forward-compute": 0.0}}
    found = one(write_operators(tmp_path / "fp16", changes=changes))
    assert any("below the timer's resolution (attention_norm)" in note for note in found.notes)


@pytest.mark.parametrize(
    ("operator", "column", "value", "told"),
    [
        ("enc-MLP-gelu", "forward-compute", "fast", "forward-compute = 'fast' is not a number"),
        ("enc-MLP-gelu", "backward-compute", -1, "backward-compute = '-1' is not a number from 0 up"),
        ("enc-MLP-gelu", "weights", "nan", "weights = 'nan'"),
        ("enc-MLP-gelu", "op_name", "enc-mystery", "operator 'enc-mystery' is not known; known are encoder"),
        ("enc-MLP-gelu", "op_name", "enc-MLP-GEMM-1", "operator 'enc-MLP-GEMM-1' has two rows"),
        ("enc-MLP-GEMM-1", "weights", 12.0, "name the model that was measured with --model"),
        ("encoder-embedding", "output_size", 0, "no whole number of tokens"),
    ],
)
def test_a_wrong_cell_is_named(tmp_path: Path, operator: str, column: str, value: object, told: str) -> None:
    folder = write_operators(tmp_path / "fp16", changes={operator: {column: value}})
    with pytest.raises(UserError) as error:
        one(folder)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    folder = write_operators(tmp_path / "fp16", degrees=(1,), sizes=(1,))
    path = folder / "gpt_1_3B_mbs1_tp1_algo0.csv"
    path.write_text(path.read_text().replace("weights", "mass"))
    with pytest.raises(UserError, match="column 'weights' is missing"):
        one(folder)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1,2\n3\n", "two lines of equal length"),
        ("1,2\n", "two lines of equal length"),
        ("1,2\n3,0\n", "column 2"),
        ("1,2\n3,x\n", "column 2"),
    ],
)
def test_wrong_transfers_are_named(tmp_path: Path, text: str, told: str) -> None:
    folder = write_operators(tmp_path / "fp16", degrees=(1,), sizes=(1,))
    (folder / "p2p_inter_node.csv").write_text(text)
    with pytest.raises(UserError, match=told):
        one(folder)


def test_a_wrong_collective_line_is_named(tmp_path: Path) -> None:
    folder = write_operators(tmp_path / "fp16", degrees=(1,), sizes=(1,))
    (folder / "prim_gpt_1_3B_all_reduce_2gpus.csv").write_text("data_size(MB),time(ms)\n1,fast\n")
    with pytest.raises(UserError, match=r"2gpus\.csv:2: '1,fast'"):
        one(folder)


def test_several_models_make_several_profiles(tmp_path: Path) -> None:
    write_operators(tmp_path / "fp16")
    write_operators(tmp_path / "fp16", name="gpt_13B", model=PRESETS["gpt3-13b"])
    write_collective(tmp_path / "fp16", "all_reduce", 2, [(1, 1.0)], name="gpt_13B")
    found = import_folder(tmp_path, device_type="A100")
    assert {each.model.name: len(each.profile.links) for each in found} == {"gpt3-1.3b": 0, "gpt3-13b": 1}
    assert one(tmp_path, model=PRESETS["gpt3-13b"]).model.name == "gpt3-13b"


def test_an_unknown_name_needs_the_model(tmp_path: Path) -> None:
    folder = write_operators(tmp_path / "fp16", name="mine")
    with pytest.raises(UserError, match="'mine' in the file names is not known; name it with --model"):
        one(folder)
    assert one(folder, model=PRESETS["gpt3-1.3b"]).model.name == "gpt3-1.3b"
    with pytest.raises(UserError, match="name the model that was measured with --model"):
        one(folder, model=PRESETS["gpt3-13b"])


def test_a_model_among_several_others_is_refused(tmp_path: Path) -> None:
    write_operators(tmp_path / "fp16")
    write_operators(tmp_path / "fp16", name="mine")
    with pytest.raises(UserError, match="holds several models"):
        one(tmp_path, model=PRESETS["gpt3-350m"])


def test_other_files_are_left_out_and_told(tmp_path: Path) -> None:
    folder = write_operators(tmp_path / "fp16")
    (folder / "notes.csv").write_text("x")
    (folder / "gpt_1_3B_mbs1_tp1_algo1.csv").write_text("another algorithm")
    notes = one(folder).notes
    assert "notes.csv: not a profile, left out" in notes
    assert "gpt_1_3B_mbs1_tp1_algo1.csv: not a profile, left out" in notes


def test_a_folder_without_profiles_says_what_they_look_like(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no profile: expected <model>_mbs<m>_tp<t>_algo0\.csv"):
        one(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        one(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("gpt_1_3B", "gpt3-1.3b"),
        ("gpt_13B", "gpt3-13b"),
        ("gpt_2_6B", "gpt3-2.6b"),
        ("gpt3-350M", "gpt3-350m"),
        ("OPT-350", "gpt3-350m"),
        ("GPT-Neo-2.7", "gpt3-2.6b"),
        ("llama2-7b", "llama2-7b"),
    ],
)
def test_names_of_models(name: str, preset: str) -> None:
    found = preset_of(name)
    assert found is not None and found.name == preset


def test_unknown_names_are_no_model() -> None:
    assert preset_of("gpt_99B") is None
