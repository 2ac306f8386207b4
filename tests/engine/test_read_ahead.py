"""Reading ahead: the same batches, at most so many, errors where they belong, and no thread left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.checkpoints import checkpoint_path
from actors.engine.batches import ReplicaBatches
from actors.engine.data import HeldOutSamples, Samples
from actors.engine.documents import PLAIN, Documents
from actors.engine.hand_over import HandOver
from actors.engine.mixture import open_tokens
from actors.engine.read_ahead import ReadAhead, Reader
from actors.engine.tokens import HeldOut, TokenFile
from actors.engine.trainer import Trainer, TrainerConfig
from actors.storage import StoragePath
from planner.errors import UserError
from planner.plan import Plan
from tests.engine.law_plans import drawn_plans, plan_of
from tests.engine.rank_training import training_of, write_documents

DEADLINE_SECONDS = 60.0
DOCUMENTS = Documents(attention=True, packing=True)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("tokens"), longest=29)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not _readers()


def _readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read ahead"]


def _samples(plan: Plan, tokens: Path, documents: Documents = DOCUMENTS) -> Samples:
    return Samples(
        open_tokens(tokens),
        sequence_length=plan.sequence_length,
        global_batch_size=plan.global_batch_size,
        seed=3,
        documents=documents,
    )


def _batches(plan: Plan, tokens: Path, *, rank: int = 0, documents: Documents = DOCUMENTS) -> ReplicaBatches:
    return ReplicaBatches(plan=plan, place=plan.ranks[rank], samples=_samples(plan, tokens, documents))


def _ahead(plan: Plan, batches: ReplicaBatches, *, rank: int = 0) -> ReadAhead:
    place = plan.ranks[rank]
    pipeline = plan.pipelines[place.pipeline]
    stage = pipeline.stages[place.stage]
    return ReadAhead(
        batches,
        micro_batches=pipeline.micro_batches,
        reads_tokens=stage.embedding or stage.head,
        device=torch.device("cpu"),
    )


@settings(max_examples=30, deadline=None)
@given(
    plan=drawn_plans(),
    iterations=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    documents=st.builds(Documents, attention=st.booleans(), packing=st.booleans()),
    data=st.data(),
)
def test_what_is_read_ahead_is_what_is_read_when_asked(
    tokens: Path, plan: Plan, iterations: list[int], documents: Documents, data: st.DataObject
) -> None:
    """In whatever order iterations come: as after a resumption, or an evaluation of gradients alone."""
    rank = data.draw(st.integers(0, plan.world_size - 1))
    place, batches = plan.ranks[rank], _batches(plan, tokens, rank=rank, documents=documents)
    pipeline = plan.pipelines[place.pipeline]
    stage = pipeline.stages[place.stage]
    ahead = _ahead(plan, _batches(plan, tokens, rank=rank, documents=documents), rank=rank)
    for iteration in iterations:
        assert ahead.counted(iteration) == batches.counted(iteration)
        for index in range(pipeline.micro_batches):
            begins, expected = ahead.documents(iteration, index), batches.documents(iteration, index)
            assert (begins is None) == (expected is None) == (not documents.attention)
            if begins is not None and expected is not None:
                assert torch.equal(begins, expected)
            if stage.embedding or stage.head:
                pairs = zip(
                    ahead.micro_batch(iteration, index), batches.micro_batch(iteration, index), strict=True
                )
                assert all(torch.equal(got, wanted) for got, wanted in pairs)
            assert ahead.draws(iteration, index) == batches.draws(iteration, index)
    ahead.close()


class _Watched(ReplicaBatches):
    """Tells what was read, and stands still while it is told to."""

    def __init__(self, plan: Plan, tokens: Path, *, rank: int = 0) -> None:
        super().__init__(plan=plan, place=plan.ranks[rank], samples=_samples(plan, tokens))
        self.read: list[tuple[int, int]] = []
        self.grew = threading.Condition()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def micro_batch(self, iteration: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.goes_on.wait(DEADLINE_SECONDS)
        made = super().micro_batch(iteration, index)
        with self.grew:
            self.read.append((iteration, index))
            self.grew.notify_all()
        return made

    def wait_for(self, count: int) -> None:
        with self.grew:
            assert self.grew.wait_for(lambda: len(self.read) >= count, DEADLINE_SECONDS)


PLAN = plan_of([(1, 1, 4)], samples=[6], micro_batch_sizes=[2])


def test_between_one_iteration_and_two_lie_ready(tokens: Path) -> None:
    batches = _Watched(PLAN, tokens)
    ahead = _ahead(PLAN, batches)
    for taken in range(1, 20):
        waited = ahead.waited_seconds
        ahead.micro_batch(1 + (taken - 1) // 3, (taken - 1) % 3)
        assert taken == 1 or ahead.waited_seconds == waited, "what lies ready is not waited for"
        # More than half of six lie ready, and one more waits for room.
        batches.wait_for(taken + 5)
        assert len(batches.read) <= taken + 7
    assert batches.read == [(1 + number // 3, number % 3) for number in range(len(batches.read))]
    ahead.close()


def test_the_first_iteration_is_made_before_it_is_asked_for(tokens: Path) -> None:
    batches = _Watched(PLAN, tokens)
    ahead = _ahead(PLAN, batches)
    ahead.begin(4)
    # The thread lays one down before it makes the next.
    batches.wait_for(2)
    ahead.micro_batch(4, 0)
    assert ahead.waited_seconds == 0
    assert batches.read[0] == (4, 0)
    ahead.close()


def test_a_trainer_begins_to_read_before_its_first_iteration(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    monkeypatch.setattr(ReadAhead, "begin", lambda self, iteration: begun.append(iteration))
    trainer = _alone(tokens)
    trainer.save_checkpoint(checkpoint_path(tmp_path, 3), iteration=3, loss=0.0)
    trainer.close()
    _alone(tokens, resume_from=checkpoint_path(tmp_path, 3)).close()
    assert begun == [1, 4]


def test_waiting_is_measured(tokens: Path) -> None:
    batches = _Watched(PLAN, tokens)
    batches.goes_on.clear()
    ahead = _ahead(PLAN, batches)
    timer = threading.Timer(0.5, batches.goes_on.set)
    timer.start()
    ahead.micro_batch(1, 0)
    timer.join()
    assert ahead.waited_seconds > 0
    ahead.close()


def test_a_middle_stage_reads_no_tokens(tokens: Path) -> None:
    plan = plan_of([(1, 1, 1), (1, 1, 2), (1, 1, 1)], samples=[5])
    batches = _Watched(plan, tokens, rank=1)
    ahead = _ahead(plan, batches, rank=1)
    assert ahead.documents(3, 0) is not None and ahead.counted(4) > 0
    assert batches.read == []
    ahead.close()


def _alone(tokens: Path, *, resume_from: StoragePath | None = None) -> Trainer:
    config = TrainerConfig(
        plan=PLAN,
        training=training_of(PLAN, steps=9),
        tokens=tokens,
        timeout_seconds=30,
        held_out=HeldOut(share=0.1),
        documents=PLAIN,
        resume_from=resume_from,
    )
    return Trainer(config=config, rank=0, store=dist.HashStore())


class _WatchedHeldOut(HeldOutSamples):
    """Tells what is read, and by which thread."""

    read: list[tuple[int, str]]
    grew = threading.Condition()

    def batch(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = super().batch(first, last)
        with self.grew:
            self.read.append((first, threading.current_thread().name))
            self.grew.notify_all()
        return made


def test_an_evaluation_reads_ahead_of_its_forward_steps(tokens: Path) -> None:
    _WatchedHeldOut.read = []
    with mock.patch("actors.engine.trainer.HeldOutSamples", _WatchedHeldOut):
        trainer = _alone(tokens)
    training = set(_readers())
    steps = 0

    def waits_for_the_next(*_: object) -> None:
        nonlocal steps
        steps += 1
        with _WatchedHeldOut.grew:
            assert steps > 1 or _WatchedHeldOut.grew.wait_for(
                lambda: len(_WatchedHeldOut.read) > 1, DEADLINE_SECONDS
            )

    trainer._model.register_forward_pre_hook(waits_for_the_next)
    trainer.evaluate(0)
    assert steps == len(_WatchedHeldOut.read) > 2
    assert _WatchedHeldOut.read == sorted(_WatchedHeldOut.read)
    assert {name for _, name in _WatchedHeldOut.read} == {"read ahead"}
    assert set(_readers()) <= training
    trainer.close()


def test_an_evaluation_that_cannot_read_names_the_file_and_leaves_no_thread(tmp_path: Path) -> None:
    path = write_documents(tmp_path, longest=29)
    part = path.parent / TokenFile(path).header.parts[0].path
    trainer = _alone(path)
    training = set(_readers())
    with part.open("r+b") as stream:
        stream.truncate(10)
    with pytest.raises(UserError, match=f"data file {part} ends before its token .* cut short"):
        trainer.evaluate(0)
    assert set(_readers()) <= training
    trainer.close()


def test_a_reader_that_made_everything_does_not_keep_its_caller_waiting() -> None:
    reader = Reader(iter([1, 2]), most=2)
    assert [reader.take()[0], reader.take()[0]] == [1, 2]
    with pytest.raises(IndexError, match="all that was read ahead has been taken"):
        reader.take()
    reader.close()


def test_the_hosts_processor_gets_copies_out_of_plain_memory() -> None:
    hand_over, tensor = HandOver(torch.device("cpu")), torch.arange(6)
    hand_over.begin()
    prepared = hand_over.prepared(tensor)
    taken = hand_over.taken(prepared)
    assert prepared is tensor and torch.equal(taken, tensor) and taken.data_ptr() != tensor.data_ptr()
    assert hand_over.prepared_batch(None, None) == (None, None)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="this host has no accelerator")
def test_an_accelerator_gets_batches_through_page_locked_memory(tokens: Path) -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    ahead = ReadAhead(_batches(PLAN, tokens), micro_batches=3, reads_tokens=True, device=device)
    for iteration in range(1, 30):
        for index in range(3):
            pairs = zip(
                ahead.micro_batch(iteration, index),
                _batches(PLAN, tokens).micro_batch(iteration, index),
                strict=True,
            )
            assert all(got.device == device and torch.equal(got.cpu(), wanted) for got, wanted in pairs)
    ahead.close()
    prepared = HandOver(device).prepared(torch.arange(6))
    assert prepared.is_pinned() and torch.equal(HandOver(device).taken(prepared).cpu(), torch.arange(6))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this host has an accelerator")
def test_page_locked_memory_is_asked_of_the_reading_threads_device(tokens: Path) -> None:
    """Where there is none the first batch cannot be made: the error reaches who asks for it."""
    ahead = ReadAhead(_batches(PLAN, tokens), micro_batches=3, reads_tokens=True, device=torch.device("cuda"))
    with pytest.raises(RuntimeError, match="Accelerator expected"):
        ahead.micro_batch(1, 0)
    ahead.close()


def test_a_file_that_was_cut_short_is_named_where_it_is_read(tmp_path: Path) -> None:
    """Not before: what lies ready is trained on. The thread ends with the failure, before anybody closes anything."""
    path = write_documents(tmp_path, longest=29)
    text = TokenFile(path)
    trainer = _alone(path)
    trainer.run_iteration(1)
    part = path.parent / text.header.parts[0].path
    with part.open("r+b") as stream:
        stream.truncate(10)
    reports = []
    with pytest.raises(UserError, match=f"data file {part} ends before its token .* cut short"):
        for iteration in range(2, 9):
            reports.append(trainer.run_iteration(iteration))
    assert not _readers()
    assert all(report.data_wait_seconds < DEADLINE_SECONDS for report in reports)
    trainer.close()


def test_an_error_comes_again_and_a_later_reader_begins_anew(tmp_path: Path) -> None:
    path = write_documents(tmp_path, longest=29)
    part = path.parent / TokenFile(path).header.parts[0].path
    whole = part.read_bytes()
    part.write_bytes(whole[:10])
    ahead = _ahead(PLAN, _batches(PLAN, path))
    for _ in range(2):
        with pytest.raises(UserError, match=part.name):
            ahead.micro_batch(1, 0)
    ahead.close()
    part.write_bytes(whole)
    inputs, _ = ahead.micro_batch(1, 0)
    assert torch.equal(inputs, _batches(PLAN, path).micro_batch(1, 0)[0])
    ahead.close()


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    path = write_documents(tmp_path, longest=29)
    part = path.parent / TokenFile(path).header.parts[0].path
    part.unlink()
    trainer = _alone(path)
    with pytest.raises(FileNotFoundError, match=part.name):
        trainer.run_iteration(1)
    trainer.close()


def test_the_thread_ends_with_the_trainer(tokens: Path) -> None:
    trainer = _alone(tokens)
    trainer.run_iteration(1)
    assert len(_readers()) == 1
    trainer.close()


def test_reading_keeps_nothing_in_memory(tmp_path: Path) -> None:
    """Read, not mapped: pages of a mapped file would count as the process's own."""
    path = write_documents(tmp_path, longest=29)
    text = TokenFile(path)
    text.read(torch.arange(4).numpy() * 16, 17)
    assert text.header.parts[0].path not in Path("/proc/self/maps").read_text()
