"""Law 8 of docs/architecture.md: what one plan saves, any other goes on with."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.checkpoints import (
    check_continues,
    check_whole,
    checkpoint_path,
    checkpoints,
    incomplete,
    problems,
    read_manifest,
)
from actors.engine.checkpoint import SavedCheckpoint, load_slices
from actors.engine.iteration import IterationReport
from actors.engine.mixture import write_mixture
from actors.engine.state_slices import StateSlice
from actors.engine.tokens import TokenFile
from actors.engine.trainer import TrainerConfig
from actors.engine.weights import DTYPES
from actors.job import Optimizer, Training
from actors.storage import StoragePath
from actors.text.text import prepare_tokens
from planner.errors import UserError
from planner.parameters import model_parameters
from planner.plan import Plan
from tests.engine.law_checks import assert_same_training, one_process
from tests.engine.law_plans import drawn_plans, plan_of
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import (
    Part,
    assembled,
    held_parameters,
    make_trainer,
    training_of,
    write_tokens,
)
from tests.engine.reference import Tensors, Trained
from tests.plans import make_llama

HALF = 4


@dataclass(frozen=True)
class RankRun:
    reports: list[IterationReport]
    saved: list[SavedCheckpoint]
    parameters: list[Part]


@dataclass(frozen=True)
class Run:
    """Iterations of a plan on real ranks."""

    losses: list[float]
    norms: list[float]
    saved: list[SavedCheckpoint]
    parameters: Tensors


def _run_rank(
    rank: int, config: TrainerConfig, first: int, last: int, folder: StoragePath, save_after: tuple[int, ...]
) -> RankRun:
    trainer = make_trainer(config, rank)
    reports = [
        trainer.run_iteration(i, checkpoint_path(folder, i) if i in save_after else None)
        for i in range(first, last + 1)
    ]
    saved = [save for report in reports for save in report.saved] + list(trainer.finish_checkpoints())
    parameters = held_parameters(trainer)
    trainer.close()
    return RankRun(reports, saved, parameters)


def run(
    pool: RankPool,
    plan: Plan,
    training: Training,
    tokens: Path,
    folder: StoragePath,
    *,
    first: int,
    last: int,
    save_after: Sequence[int] = (),
    resume_from: StoragePath | None = None,
) -> Run:
    config = TrainerConfig(
        plan=plan, training=training, tokens=tokens, timeout_seconds=30, resume_from=resume_from
    )
    ranks: list[RankRun] = pool.run(
        _run_rank, config, first, last, folder, tuple(save_after), world_size=plan.world_size
    )
    whole = {parameter.name: parameter for parameter in model_parameters(plan.model)}
    assert not any(rank.saved for rank in ranks[1:]), "rank 0 alone tells"
    return Run(
        losses=[report.loss for report in ranks[0].reports],
        norms=[report.gradient_norm for report in ranks[0].reports],
        saved=ranks[0].saved,
        parameters=assembled(whole, (part for rank in ranks for part in rank.parameters)),
    )


def broken_in_two(
    pool: RankPool, one: Plan, other: Plan, training: Training, tokens: Path, folder: Path
) -> tuple[Run, Run]:
    """The first half of training under one plan, the second under another."""
    middle = training.steps // 2
    before = run(pool, one, training, tokens, folder, first=1, last=middle, save_after=[middle])
    (saved,) = before.saved
    assert saved.error is None
    after = run(
        pool,
        other,
        training,
        tokens,
        folder,
        first=middle + 1,
        last=training.steps,
        resume_from=saved.path,
    )
    return before, after


def assert_as_unbroken(
    pool: RankPool, one: Plan, other: Plan, tokens: Path, folder: Path, **fields: Any
) -> None:
    """Law 1 over the break: two halves train as one process does in one go."""
    training = training_of(other, steps=2 * HALF, **fields)
    before, after = broken_in_two(pool, one, other, training, tokens, folder)
    expected = one_process(other, training, tokens)
    got = Trained(
        losses=before.losses + after.losses,
        norms=before.norms + after.norms,
        gradients=expected.gradients,
        parameters=after.parameters,
    )
    assert_same_training(got, expected, lambda: one_process(other, training, tokens, exact=True))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def mixture(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "few.txt").write_text("Few words, that come again and again. " * 9)
    few = prepare_tokens(folder / "few.txt", cache_dir=folder)
    return write_mixture([(TokenFile(tokens), 2), (few, 1)], folder).path


def with_zero(plan: Plan, stage: int, scope: str = "all") -> Plan:
    fields = {"zero_stage": stage, "zero_scope": scope, "gradient_sync": "block"}
    return Plan.model_validate(plan.model_dump() | fields)


UNLIKE = plan_of([(2, 1, 1), (1, 1, 3)], [(1, 2, 4)], samples=[3, 5])
STAGES = plan_of([(1, 1, 1), (1, 1, 2), (1, 1, 1)], samples=[8])
THIRDS = plan_of([(3, 1, 2), (1, 1, 2)], samples=[8])
LLAMA = [
    plan_of(*pipelines, model=make_llama(layers=4, kv_heads=6, max_sequence_length=16), samples=samples)
    for pipelines, samples in (
        ([[(2, 1, 2), (1, 1, 2)]], [8]),
        ([[(1, 1, 4)], [(3, 1, 1), (1, 1, 3)]], [4, 4]),
    )
]
PAIRS: dict[str, tuple[Plan, Plan]] = {
    "one pipeline to unlike ones": (STAGES, UNLIKE),
    "unlike pipelines to three TP ranks": (UNLIKE, THIRDS),
    "whole state to shards": (THIRDS, with_zero(UNLIKE, 1)),
    "shards to whole state": (with_zero(UNLIKE, 1), STAGES),
    "shards to other shards": (with_zero(STAGES, 1), with_zero(UNLIKE, 1)),
    "shards to shared gradients": (with_zero(STAGES, 1), with_zero(UNLIKE, 2)),
    "shards by pipeline to whole state": (with_zero(UNLIKE, 1, "pipeline"), THIRDS),
    "llama": (LLAMA[0], LLAMA[1]),
    "llama, shards": (with_zero(LLAMA[1], 1), LLAMA[0]),
}


QUICK = ("shards to whole state", "llama")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PAIRS]
)
def test_another_plan_goes_on_as_if_unbroken(
    rank_pool: RankPool, tokens: Path, mixture: Path, tmp_path: Path, name: str
) -> None:
    text = mixture if "llama" in name else tokens
    assert_as_unbroken(rank_pool, *PAIRS[name], text, tmp_path)


@pytest.mark.slow
def test_momentum_is_kept(rank_pool: RankPool, tokens: Path, tmp_path: Path) -> None:
    assert_as_unbroken(
        rank_pool, UNLIKE, STAGES, tokens, tmp_path, optimizer=Optimizer(name="sgd", momentum=0.9)
    )


@pytest.mark.parametrize(
    ("precision", "zero_stage"),
    [
        ("fp32", 0),
        ("bf16", 1),
        *(
            pytest.param(precision, stage, marks=pytest.mark.slow)
            for precision, stage in (("fp32", 1), ("bf16", 0), ("bf16", 2), ("fp16", 0), ("fp16", 1))
        ),
    ],
)
def test_the_same_plan_goes_on_to_the_bit(
    rank_pool: RankPool, tokens: Path, tmp_path: Path, precision: str, zero_stage: int
) -> None:
    plan = Plan.model_validate(
        with_zero(UNLIKE, zero_stage).model_dump()
        | {"dtypes": UNLIKE.dtypes.model_dump() | {"param": precision}}
    )
    training = training_of(plan, steps=2 * HALF)
    unbroken = run(rank_pool, plan, training, tokens, tmp_path, first=1, last=2 * HALF)
    before, after = broken_in_two(rank_pool, plan, plan, training, tokens, tmp_path)
    assert before.losses + after.losses == unbroken.losses
    for name, parameter in unbroken.parameters.items():
        assert torch.equal(after.parameters[name], parameter), name


def _resave_rank(rank: int, config: TrainerConfig, path: Path) -> None:
    trainer = make_trainer(config, rank)
    trainer.save_checkpoint(path, iteration=HALF, loss=0.0)
    trainer.finish_checkpoints()
    trainer.close()


def whole_state(path: StoragePath, plan: Plan) -> Tensors:
    """Every tensor of a checkpoint, whole."""
    states = ["exp_avg", "exp_avg_sq"] + ([] if plan.dtypes.param == "fp32" else ["master"])
    found: Tensors = {}
    for parameter in model_parameters(plan.model):
        found[f"model.{parameter.name}"] = torch.empty(parameter.shape, dtype=DTYPES[plan.dtypes.param])
        for state in states:
            found[f"optimizer.{state}.{parameter.name}"] = torch.empty(parameter.shape)
    load_slices(
        path,
        [
            StateSlice(key, tuple(tensor.shape), (0,) * tensor.dim(), tensor, owned=True)
            for key, tensor in found.items()
        ],
    )
    return found


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (with_zero(UNLIKE, 1), THIRDS),
        (THIRDS, with_zero(UNLIKE, 1)),
        (STAGES, UNLIKE),
        (with_zero(LLAMA[0], 1), LLAMA[1]),
        (with_zero(UNLIKE, 2, "pipeline"), with_zero(UNLIKE, 2)),
    ],
    ids=["shards to whole", "whole to shards", "other stages", "llama", "shared gradients"],
)
def test_no_bit_is_lost_from_plan_to_plan(
    rank_pool: RankPool, tokens: Path, tmp_path: Path, one: Plan, other: Plan, precision: str
) -> None:
    one, other = (
        Plan.model_validate(plan.model_dump() | {"dtypes": plan.dtypes.model_dump() | {"param": precision}})
        for plan in (one, other)
    )
    training = training_of(one, steps=2 * HALF)
    (saved,) = run(rank_pool, one, training, tokens, tmp_path, first=1, last=2, save_after=[2]).saved
    config = TrainerConfig(
        plan=other, training=training, tokens=tokens, timeout_seconds=30, resume_from=saved.path
    )
    rank_pool.run(_resave_rank, config, tmp_path / "again", world_size=other.world_size)
    again = whole_state(tmp_path / "again", other)
    for key, tensor in whole_state(saved.path, one).items():
        assert torch.equal(again[key], tensor), key
    assert any(tensor.any() for key, tensor in again.items() if "exp_avg" in key)


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=8, derandomize=True)
@given(data=st.data())
def test_any_plan_goes_on_with_any_other(
    rank_pool: RankPool, tokens: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    one = data.draw(drawn_plans())
    other = data.draw(drawn_plans(like=one))
    one, other = (with_zero(plan, data.draw(st.sampled_from([0, 1, 2]))) for plan in (one, other))
    assert_as_unbroken(rank_pool, one, other, tokens, tmp_path_factory.mktemp("pair"))


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
        return _run_rank(rank, config, 1, 3, folder, (1, 2, 3))


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


def test_a_truncated_file_is_named(saved: Path) -> None:
    victim = next(iter(sorted(saved.glob("__1_*"))))
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    (checkpoint,) = checkpoints(saved.parent)
    (problem,) = problems(checkpoint)
    assert str(victim) in problem and "bytes" in problem
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
