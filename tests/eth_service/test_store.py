"""States and the database."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eth_service.settings import Settings
from eth_service.states import JobState
from eth_service.store import JobRow, Store, new_job_id
from planner.errors import UserError


def add(store: Store, name: str = "job") -> JobRow:
    return store.add(job_id=new_job_id(), name=name, document={"name": name})


@given(st.lists(st.sampled_from(JobState)))
def test_no_path_leads_out_of_a_final_state_or_back_to_the_queue(path: list[JobState]) -> None:
    state = JobState.QUEUED
    for wanted in path:
        if state.may_become(wanted):
            assert not state.final
            assert wanted is not JobState.QUEUED
            state = wanted


def test_every_state_is_documented() -> None:
    documented = [line.strip() for line in (JobState.__doc__ or "").splitlines()]
    assert [state.value for state in JobState if state.value not in documented] == []


def test_a_transition_is_a_row_with_time_and_reason(store: Store) -> None:
    job = add(store)
    assert store.transition(job, JobState.STOPPED, reason="for the test")
    read = store.get(job.id)
    assert read is not None
    assert (read.state, read.reason) == (JobState.STOPPED, "for the test")
    assert [(step.state, step.reason) for step in read.transitions] == [
        (JobState.QUEUED, "submitted"),
        (JobState.STOPPED, "for the test"),
    ]
    assert read.created_at <= read.transitions[1].time == read.state_since
    assert read.created_at.utcoffset() is not None


def test_a_transition_that_is_not_allowed_changes_nothing(store: Store) -> None:
    job = add(store)
    assert not store.transition(job, JobState.RUNNING, reason="too early")
    read = store.get(job.id)
    assert read is not None
    assert read.state is JobState.QUEUED
    assert len(read.transitions) == 1


def test_of_many_threads_one_takes_the_step(store: Store) -> None:
    job = add(store)

    def take(_: int) -> bool:
        return store.begin_attempt(job, cluster="c", home=Path("/runs"))

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(take, range(8))) == 1
    read = store.get(job.id)
    assert read is not None
    assert [attempt.number for attempt in read.attempts] == [1]


def test_jobs_are_paged_from_the_newest(store: Store) -> None:
    ids = [add(store).id for _ in range(5)]
    first = store.newest(limit=2)
    assert [job.id for job in first] == [ids[4], ids[3]]
    assert [job.id for job in store.newest(limit=9, before=ids[3])] == [ids[2], ids[1], ids[0]]


def test_ids_sort_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from eth_service import store as module

    moments = [module.now().replace(year=year) for year in (2024, 2025, 2031, 2042)]
    ids = []
    for moment in moments:
        monkeypatch.setattr(module, "now", lambda moment=moment: moment)
        ids.append(new_job_id())
    assert ids == sorted(ids)
    assert all(part.isalnum() for made in ids for part in made.split("-"))


def test_the_database_outlives_the_store(settings: Settings) -> None:
    first = Store(settings.database)
    job = add(first, "kept")
    first.close()
    second = Store(settings.database)
    read = second.get(job.id)
    second.close()
    assert read is not None
    assert read.name == "kept"


@pytest.mark.parametrize("url", ["sqlite:////proc/nowhere/eth.db", "no url", "postgresql://localhost/eth"])
def test_a_database_that_cannot_be_opened_is_one_line(url: str) -> None:
    with pytest.raises(UserError, match="--database = ") as caught:
        Store(url)
    assert "\n" not in str(caught.value)


def test_the_file_is_plain_sqlite(settings: Settings, store: Store) -> None:
    job = add(store)
    with sqlite3.connect(settings.database.removeprefix("sqlite:///")) as connection:
        rows = connection.execute("select id, state from jobs").fetchall()
    assert rows == [(job.id, "queued")]
