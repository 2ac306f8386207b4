"""What a save writes is the state as it began, at whatever moment training goes on and changes it (law 8)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.checkpoints import check_whole, checkpoint_path, checkpoints
from actors.engine import late_copy
from actors.engine.late_copy import Address, Bytes, LateCopies
from actors.engine.state_slices import StateSlice
from actors.engine.trainer import TrainerConfig
from planner.plan import Plan
from tests.engine.checkpoint_runs import STAGES, UNLIKE, in_precision, with_zero
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import make_trainer, training_of, write_tokens

PIECE = 64
"""Bytes: a few pieces a tensor."""
ROUNDS = 3

Kept = dict[Address, torch.Tensor]


def slices_of(sizes: list[tuple[int, torch.dtype, bool]]) -> list[StateSlice]:
    """Tensors of two rows and so many columns; those marked lie in strides."""
    found = []
    for number, (columns, dtype, strided) in enumerate(sizes):
        tensor = torch.arange(2 * columns).to(dtype).view(2, columns) + number
        tensor = tensor.t().contiguous().t() if strided else tensor
        found.append(StateSlice(f"model.{number}", (2, columns), (0, 0), tensor, owned=True))
    return found


def content(slices: list[StateSlice]) -> list[bytes]:
    return [piece.tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for piece in slices]


def written(copies: LateCopies, before_piece: Callable[[], None] = lambda: None) -> list[bytes]:
    """All that a writer gets, slice by slice."""
    found = []
    for piece in copies.slices:
        parts = []
        for part in copies.pieces((piece.key, piece.offsets)):
            parts.append(bytes(part))
            before_piece()
        found.append(b"".join(parts))
    return found


def update(slices: list[StateSlice]) -> None:
    """What training does next."""
    for piece in slices:
        piece.tensor.copy_(-piece.tensor - 1)


SIZES = st.lists(
    st.tuples(
        st.integers(1, 60), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans()
    ),
    min_size=1,
    max_size=6,
)


@given(sizes=SIZES, moment=st.integers(0, 80))
def test_an_update_between_two_pieces_changes_nothing(
    sizes: list[tuple[int, torch.dtype, bool]], moment: int
) -> None:
    slices = slices_of(sizes)
    expected, count = content(slices), 0
    kept: Kept = {}
    with patch.object(late_copy, "PIECE_BYTES", PIECE):
        copies = LateCopies(slices, kept)
        at_once = set(kept)
        assert at_once == {(piece.key, piece.offsets) for piece in slices if not piece.tensor.is_contiguous()}

        def train() -> None:
            nonlocal count
            if count == moment:
                copies.take()
                update(slices)
                # Later updates copy nothing more.
                copies.take()
            count += 1

        train()
        assert written(copies, train) == expected
    # A slice that was read to its end was not copied.
    pieces = [-(-len(part) // PIECE) for part in expected]
    read = [sum(pieces[: number + 1]) <= moment for number in range(len(pieces))]
    late = {(piece.key, piece.offsets) for piece, done in zip(slices, read, strict=True) if not done}
    assert set(kept) == at_once | (late if moment < count else set())


@given(sizes=SIZES, moment=st.integers(0, 40), part=st.floats(0, 1))
def test_an_update_in_the_middle_of_a_read_changes_nothing(
    sizes: list[tuple[int, torch.dtype, bool]], moment: int, part: float
) -> None:
    slices = slices_of(sizes)
    expected = content(slices)
    copies, count = LateCopies(slices, {}), 0
    torn = False

    def copyto(target: Bytes, source: Bytes) -> None:
        nonlocal count, torn
        first = round(part * source.size)
        target[:first] = source[:first]
        if count == moment:
            copies.take()
            update(slices)
            torn = True
        count += 1
        target[first:] = source[first:]

    with patch.object(late_copy, "PIECE_BYTES", PIECE), patch("actors.engine.late_copy.np.copyto", copyto):
        assert written(copies) == expected
    # The write after the read that was torn needs live tensors no more.
    assert not torn or count == moment + 1


def test_memory_of_earlier_copies_is_used_again() -> None:
    slices = slices_of([(30, torch.float32, False), (20, torch.bfloat16, True)])
    kept: Kept = {}
    LateCopies(slices, kept).take()
    before = {address: copy.data_ptr() for address, copy in kept.items()}
    update(slices)
    expected = content(slices)
    copies = LateCopies(slices, kept)
    copies.take()
    update(slices)
    assert written(copies) == expected
    assert {address: copy.data_ptr() for address, copy in kept.items()} == before


def test_nothing_is_copied_for_a_save_that_has_ended() -> None:
    slices = slices_of([(30, torch.float32, False)])
    kept: Kept = {}
    copies = LateCopies(slices, kept)
    copies.close()
    copies.take()
    assert not kept


def test_the_writer_waits_until_training_has_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = slices_of([(30, torch.float32, False), (20, torch.float32, False)])
    expected = content(slices)
    copies = LateCopies(slices, {})
    copying, go_on = threading.Event(), threading.Event()
    staged = StateSlice.staged

    def slow(self: StateSlice, buffer: torch.Tensor | None = None) -> StateSlice:
        copying.set()
        assert go_on.wait(30)
        return staged(self, buffer)

    monkeypatch.setattr(StateSlice, "staged", slow)

    def train() -> None:
        copies.take()
        update(slices)

    training = threading.Thread(target=train)
    training.start()
    assert copying.wait(30)
    got: list[list[bytes]] = []
    writer = threading.Thread(target=lambda: got.append(written(copies)))
    writer.start()
    writer.join(0.1)
    assert writer.is_alive() and not got
    go_on.set()
    writer.join(30)
    training.join(30)
    assert got == [expected]


def test_a_copy_that_fails_fails_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = LateCopies(slices_of([(30, torch.float32, False)]), {})
    monkeypatch.setattr(StateSlice, "staged", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError):
        copies.take()
    with pytest.raises(RuntimeError, match="training failed while it copied"):
        written(copies)


class _Reads:
    """In place of np.copyto: counts reads of live tensors, and stops in the middle of one."""

    def __init__(self) -> None:
        self.count = 0
        self.stop_in: int | None = None
        self.stopped, self.go_on = threading.Event(), threading.Event()

    def __call__(self, target: Bytes, source: Bytes) -> None:
        half = source.size // 2
        target[:half] = source[:half]
        if self.count == self.stop_in:
            self.stopped.set()
            assert self.go_on.wait(60)
        self.count += 1
        target[half:] = source[half:]


def _save_across_updates(rank: int, config: TrainerConfig, folder: Path) -> int:
    """Save each state twice: while training stands still, and again with the writer stopped in the middle of a read
    until training has made its next update. Returns how often it was."""
    trainer = make_trainer(config, rank)
    trainer.run_iteration(1)
    stops = 0
    for iteration in range(1, ROUNDS + 1):
        still, moving = _Reads(), _Reads()
        with patch.object(late_copy, "PIECE_BYTES", 256):
            with patch("actors.engine.late_copy.np.copyto", still):
                path = checkpoint_path(folder / "still", iteration)
                trainer.save_checkpoint(path, iteration=iteration, loss=0.0)
                trainer.finish_checkpoints()
            if still.count:
                # Another read on every rank and in every round, the first and the last among them.
                moving.stop_in = (still.count - 1) * ((iteration + rank) % ROUNDS) // (ROUNDS - 1)
            with patch("actors.engine.late_copy.np.copyto", moving):
                path = checkpoint_path(folder / "moving", iteration)
                trainer.save_checkpoint(path, iteration=iteration, loss=0.0)
                if moving.stop_in is not None:
                    assert moving.stopped.wait(60)
                    stops += 1
                assert not trainer.run_iteration(iteration + 1).skipped
                moving.go_on.set()
                trainer.finish_checkpoints()
        # What was read before the update, and the read that it tore.
        assert moving.count == (0 if moving.stop_in is None else moving.stop_in + 1)
    trainer.close()
    return stops


@pytest.mark.parametrize(
    "plan",
    [
        in_precision(with_zero(UNLIKE, 1), "bf16"),
        pytest.param(STAGES, marks=pytest.mark.slow),
        pytest.param(with_zero(UNLIKE, 2), marks=pytest.mark.slow),
        pytest.param(in_precision(with_zero(UNLIKE, 2, "pipeline"), "fp16"), marks=pytest.mark.slow),
    ],
    ids=["zero1 bf16", "zero0", "zero2", "zero2 pipeline fp16"],
)
def test_training_that_goes_on_changes_no_byte_of_a_save(
    rank_pool: RankPool, tmp_path: Path, plan: Plan
) -> None:
    tokens = write_tokens(tmp_path)
    config = TrainerConfig(
        plan=plan,
        training=training_of(plan, steps=ROUNDS + 1),
        tokens=tokens,
        timeout_seconds=60,
        keep_checkpoints=ROUNDS,
    )
    stops = rank_pool.run(_save_across_updates, config, tmp_path, world_size=plan.world_size)
    assert stops[0] == ROUNDS and sum(stops) > ROUNDS
    still, moving = checkpoints(tmp_path / "still"), checkpoints(tmp_path / "moving")
    assert len(still) == len(moving) == ROUNDS
    states = set()
    for one, other in zip(still, moving, strict=True):
        check_whole(one)
        check_whole(other)
        # `.metadata` has an id of its own.
        expected, found = (
            {name: total for name, total in checkpoint.manifest.files.items() if name != ".metadata"}
            for checkpoint in (one, other)
        )
        assert found == expected
        states.add(tuple(str(total.xxh3_128) for total in expected.values()))
    assert len(states) == ROUNDS, "every update changes the state"
