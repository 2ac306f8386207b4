"""Checkpoints as folders: which stay, what is told of one that failed, and what is refused."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from actors.checkpoints import (
    check_continues,
    check_whole,
    checkpoint_path,
    checkpoints,
    incomplete,
    problems,
    read_manifest,
)
from actors.engine.checkpoint import load_slices
from actors.engine.checkpoint_files import CheckpointFileReader
from actors.engine.state_slices import StateSlice
from actors.engine.trainer import TrainerConfig
from actors.job import Optimizer
from planner.errors import UserError
from planner.parameters import model_parameters
from tests.engine.checkpoint_runs import STAGES, UNLIKE, RankRun, run, run_rank, whole_state
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import training_of, write_tokens


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def test_a_checkpoint_is_whole_and_the_newest_stay(rank_pool: RankPool, tokens: Path, tmp_path: Path) -> None:
    training = training_of(UNLIKE, steps=4)
    ended = run(rank_pool, UNLIKE, training, tokens, tmp_path, first=1, last=4, save_after=[1, 2, 3, 4])
    assert [saved.iteration for saved in ended.saved] == [1, 2, 3, 4]
    kept = checkpoints(tmp_path)
    assert [checkpoint.iteration for checkpoint in kept] == [3, 4] and not incomplete(tmp_path)
    for checkpoint in kept:
        assert list(problems(checkpoint)) == []
        assert checkpoint.bytes == sum(
            file.stat().st_size
            for file in checkpoint_path(tmp_path, checkpoint.iteration).iterdir()
            if file.name != "manifest.json"
        )
    # Parameters and two moments in fp32, each element once, and what the format adds.
    elements = sum(parameter.numel for parameter in model_parameters(UNLIKE.model))
    assert 12 * elements < kept[-1].bytes < 14 * elements + 400_000
    manifest = read_manifest(kept[-1].path)
    assert manifest.progress.updates == 4 and manifest.loss == ended.losses[-1]


def test_a_save_that_fails_is_told_and_training_goes_on(
    rank_pool: RankPool, tokens: Path, tmp_path: Path
) -> None:
    # A file where the folder of checkpoints should be: nothing can be written below it.
    blocked = tmp_path / "blocked"
    blocked.write_text("in the way")
    training = training_of(UNLIKE, steps=3)
    ended = run(rank_pool, UNLIKE, training, tokens, blocked, first=1, last=3, save_after=[1])
    (saved,) = ended.saved
    assert saved.error is not None and "blocked" in saved.error
    assert len(ended.losses) == 3


def _run_rank_without_deletion(rank: int, config: TrainerConfig, folder: Path) -> RankRun:
    """Three saves of three iterations, in storage that deletes nothing."""
    with patch.object(Path, "unlink", side_effect=PermissionError(1, "deletion is forbidden")):
        return run_rank(rank, config, 1, 3, folder, (1, 2, 3))


def test_storage_that_forbids_deletion_keeps_every_checkpoint(
    rank_pool: RankPool, tokens: Path, tmp_path: Path
) -> None:
    training = training_of(STAGES, steps=3)
    config = TrainerConfig(
        plan=STAGES, training=training, tokens=tokens, timeout_seconds=30, keep_checkpoints=1
    )
    ranks = rank_pool.run(_run_rank_without_deletion, config, tmp_path, world_size=STAGES.world_size)
    first, *pruning = ranks[0].saved
    assert first.error is None and first.prune_error is None
    for saved in pruning:
        assert saved.error is None and saved.bytes > 0
        assert saved.prune_error is not None and "deletion is forbidden" in saved.prune_error
    found = checkpoints(tmp_path)
    assert [checkpoint.iteration for checkpoint in found] == [1, 2, 3]
    assert [list(problems(checkpoint)) for checkpoint in found] == [[], [], []]


@pytest.fixture(scope="module")
def saved_once(rank_pool: RankPool, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    training = training_of(STAGES, steps=4)
    (done,) = run(rank_pool, STAGES, training, tokens, folder, first=1, last=1, save_after=[1]).saved
    return checkpoint_path(folder, done.iteration)


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    return Path(shutil.copytree(saved_once, tmp_path / saved_once.name))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 3}, "training.seed = 3 but checkpoint"),
        ({"global_batch_size": 9}, "training.global_batch_size = 9"),
        ({"steps": 1}, "training.steps = 1"),
        ({"precision": "bf16"}, "training.precision = bf16"),
        ({"optimizer": Optimizer(name="sgd")}, "training.optimizer.name = sgd"),
        (
            {"optimizer": Optimizer(betas=(0.9, 0.98))},
            r"optimizer.betas = \[0.9, 0.98\] but .* \[0.9, 0.95\]",
        ),
    ],
)
def test_another_training_does_not_go_on(saved_once: Path, change: dict[str, Any], told: str) -> None:
    manifest = read_manifest(saved_once)
    training = manifest.training.model_copy(update=change)
    with pytest.raises(UserError, match=told):
        check_continues(
            manifest, model=manifest.model, training=training, data=manifest.data, source=saved_once
        )


def test_another_model_or_text_does_not_go_on(saved_once: Path) -> None:
    manifest = read_manifest(saved_once)
    renamed = manifest.model.model_copy(update={"name": "other"})
    given: dict[str, Any] = {
        "model": renamed,
        "training": manifest.training,
        "data": manifest.data,
        "source": saved_once,
    }
    check_continues(manifest, **given)
    deeper = manifest.model.model_copy(update={"layers": 9})
    with pytest.raises(UserError, match="its layers is 4, not 9"):
        check_continues(manifest, **(given | {"model": deeper}))
    mixed = manifest.data.model_copy(update={"weights": (1.0, 2.5)})
    with pytest.raises(UserError, match=r"data\.mixture has weights 1, 2\.5 but .* with none; write those"):
        check_continues(manifest, **(given | {"data": mixed}))
    text = manifest.data.model_copy(update={"name": "abc"})
    with pytest.raises(UserError, match="another text"):
        check_continues(manifest, **(given | {"data": text}))


def test_every_tensor_lies_as_torch_writes_it(saved_once: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.serialization.config.save, "compute_crc32", False)
    places = CheckpointFileReader(saved_once).read_metadata().storage_data
    for place in places.values():
        with (saved_once / place.relative_path).open("rb") as stream:
            stream.seek(place.offset)
            content = stream.read(place.length)
        again = io.BytesIO()
        torch.save(torch.load(io.BytesIO(content), weights_only=True), again)
        assert again.getvalue() == content
    assert len(places) == 3 * len(model_parameters(STAGES.model))


def test_a_truncated_file_is_named(saved: Path) -> None:
    victim = next(iter(sorted(saved.glob("__1_*"))))
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    (checkpoint,) = checkpoints(saved.parent)
    (problem,) = problems(checkpoint)
    assert str(victim) in problem.told and "bytes" in problem.told
    with pytest.raises(UserError, match="cannot be read"):
        whole_state(saved, STAGES)


def test_an_altered_byte_is_found(saved: Path) -> None:
    victim = next(iter(sorted(saved.glob("__2_*"))))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    (checkpoint,) = checkpoints(saved.parent)
    with pytest.raises(UserError, match=r"was changed.*eth checkpoint delete"):
        check_whole(checkpoint)


def test_a_tensor_that_is_not_there_is_named(saved: Path) -> None:
    missing = StateSlice("model.nothing", (2,), (0,), torch.empty(2), owned=True)
    with pytest.raises(UserError, match=r"it holds no model\.nothing"):
        load_slices(saved, [missing])


class _Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (pickle.dumps(_Call(os.mkdir, "made")), r"names posix\.mkdir"),
        (pickle.dumps(_Call(eval, "__import__('os').mkdir('made')")), r"names builtins\.eval"),
        (pickle.dumps(_Call(torch.load, "made")), r"names torch\.serialization\.load"),
        # Names with a dot are attributes of what may be named.
        (
            pickle.PROTO + b"\x04\x8c\x05torch\x8c\x12serialization.load\x93.",
            r"names torch\.serialization\.load",
        ),
        (pickle.dumps({}), "holds no metadata of a checkpoint"),
    ],
    ids=["system call", "built-in", "function beside a class", "attribute", "no metadata"],
)
def test_metadata_that_names_anything_else_is_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=told):
        whole_state(saved, STAGES)
    assert not Path("made").exists()
