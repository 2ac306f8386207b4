"""What the monitor makes of the cluster's answers, with a real database."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest
import uvicorn
import yaml

from actors.job import parse_job
from eth_service import embedded_ray
from eth_service.app import create_app
from eth_service.backend import AttemptStatus
from eth_service.monitor import Monitor, output_path
from eth_service.server import Server
from eth_service.settings import (
    DRIVER_STOP_SECONDS,
    DRIVER_STOP_VARIABLE,
    EMBEDDED,
    Settings,
    stop_seconds,
)
from eth_service.states import JobState
from eth_service.store import AttemptRow, JobRow, Store, new_job_id
from eth_service.submission import job_document
from tests.eth_service.double import ClusterDouble, DriverDouble, job_values
from tests.eth_service.running import serving, wait_for


def queue(store: Store, name: str = "job") -> JobRow:
    document = job_document(parse_job(job_values(name=name), base=Path("/")))
    return store.add(job_id=new_job_id(), name=name, document=document)


def read(store: Store, job: JobRow) -> JobRow:
    found = store.get(job.id)
    assert found is not None
    return found


def attempt_of(store: Store, job: JobRow) -> AttemptRow:
    attempt = read(store, job).attempt
    assert attempt is not None
    return attempt


def states(store: Store, job: JobRow) -> list[str]:
    return [step.state.value for step in read(store, job).transitions]


def begun(store: Store, monitor: Monitor) -> tuple[JobRow, str]:
    """A job that was handed to the cluster, and its submission id."""
    job = queue(store)
    monitor.tick()
    return job, attempt_of(store, job).submission_id


def test_a_job_goes_through_every_state(store: Store, monitor: Monitor, cluster: ClusterDouble) -> None:
    job, submission = begun(store, monitor)
    driver = DriverDouble(Path(attempt_of(store, job).folder))
    cluster.set(submission, AttemptStatus.RUNNING)
    monitor.tick()
    assert read(store, job).state is JobState.PLANNING
    driver.make_plan()
    monitor.tick()
    assert read(store, job).state is JobState.STARTING
    driver.iterate(1)
    monitor.tick()
    assert read(store, job).state is JobState.RUNNING
    driver.end("succeeded")
    cluster.outputs[submission] = "all done"
    cluster.set(submission, AttemptStatus.SUCCEEDED)
    monitor.tick()
    assert states(store, job) == ["queued", "planning", "starting", "running", "succeeded"]
    assert output_path(attempt_of(store, job)).read_text() == "all done"


def test_states_that_no_look_saw_are_still_written_down(
    store: Store, monitor: Monitor, cluster: ClusterDouble
) -> None:
    job, submission = begun(store, monitor)
    driver = DriverDouble(Path(attempt_of(store, job).folder))
    driver.make_plan()
    driver.iterate(1)
    cluster.set(submission, AttemptStatus.SUCCEEDED)
    monitor.tick()
    assert states(store, job) == ["queued", "planning", "starting", "running", "succeeded"]


def test_the_command_runs_the_stored_job_with_this_interpreter(
    store: Store, monitor: Monitor, cluster: ClusterDouble
) -> None:
    job, submission = begun(store, monitor)
    interpreter, flag, module, job_file, option, folder = cluster.commands[submission]
    assert (interpreter, flag, module, option) == (sys.executable, "-m", "actors.driver", "--output")
    assert Path(job_file).is_absolute()
    assert yaml.safe_load(Path(job_file).read_text()) == read(store, job).document
    assert not Path(folder).exists(), "the driver refuses a run folder that is not empty"


def test_one_job_at_a_time_in_order(store: Store, monitor: Monitor, cluster: ClusterDouble) -> None:
    jobs = [queue(store, f"job{number}") for number in range(3)]
    for number, job in enumerate(jobs):
        monitor.tick()
        assert [read(store, one).state for one in jobs[number + 1 :]] == [JobState.QUEUED] * (2 - number)
        cluster.set(attempt_of(store, job).submission_id, AttemptStatus.SUCCEEDED)
        monitor.tick()
    assert [read(store, job).state for job in jobs] == [JobState.SUCCEEDED] * 3


@pytest.mark.parametrize("state", ["planning", "running"])
def test_unreachable_is_not_failed(
    store: Store, monitor: Monitor, cluster: ClusterDouble, state: str
) -> None:
    job, submission = begun(store, monitor)
    driver = DriverDouble(Path(attempt_of(store, job).folder))
    cluster.set(submission, AttemptStatus.RUNNING)
    if state == "running":
        driver.make_plan()
        driver.iterate(1)
    monitor.tick()
    cluster.reachable = False
    for _ in range(3):
        monitor.tick()
    lost = read(store, job)
    assert lost.state.value == state
    assert lost.unreachable_since is not None
    cluster.reachable = True
    monitor.tick()
    assert read(store, job).unreachable_since is None
    cluster.set(submission, AttemptStatus.SUCCEEDED)
    monitor.tick()
    assert read(store, job).state is JobState.SUCCEEDED


def test_progress_is_seen_while_ray_is_not(store: Store, monitor: Monitor, cluster: ClusterDouble) -> None:
    job, submission = begun(store, monitor)
    cluster.set(submission, AttemptStatus.RUNNING)
    cluster.reachable = False
    driver = DriverDouble(Path(attempt_of(store, job).folder))
    driver.make_plan()
    driver.iterate(1)
    monitor.tick()
    assert states(store, job) == ["queued", "planning", "starting", "running"]


def test_a_job_queued_while_ray_is_away_starts_when_it_is_back(
    store: Store, monitor: Monitor, cluster: ClusterDouble
) -> None:
    cluster.reachable = False
    job = queue(store)
    monitor.tick()
    assert read(store, job).state is JobState.QUEUED
    assert monitor.obstacle == "the double is switched off"
    cluster.reachable = True
    monitor.tick()
    assert list(cluster.commands) == [attempt_of(store, job).submission_id]
    assert attempt_of(store, job).number == 1
    assert monitor.obstacle is None


def test_a_cluster_that_is_lost_while_a_job_is_handed_over_gets_it_later(
    settings: Settings, store: Store, cluster: ClusterDouble
) -> None:
    job = queue(store)
    store.begin_attempt(job, cluster=settings.cluster, home=settings.runs / job.id)
    cluster.reachable = False
    again = restarted(settings, store, cluster)
    again.tick()
    assert read(store, job).unreachable_since is not None
    cluster.reachable = True
    again.tick()
    assert list(cluster.commands) == [attempt_of(store, job).submission_id]


def test_stop_is_asked_again_until_the_job_is_gone(
    store: Store, monitor: Monitor, cluster: ClusterDouble
) -> None:
    job, submission = begun(store, monitor)
    assert store.ask_to_stop(read(store, job), reason="stopped on request")
    for _ in range(3):
        monitor.tick()
    assert cluster.stops == [submission] * 3
    assert read(store, job).state is JobState.PLANNING
    cluster.set(submission, AttemptStatus.STOPPED)
    monitor.tick()
    assert (read(store, job).state, read(store, job).reason) == (JobState.STOPPED, "stopped on request")


def test_a_driver_that_ends_with_an_error_while_being_stopped_was_stopped(
    store: Store, monitor: Monitor, cluster: ClusterDouble
) -> None:
    job, submission = begun(store, monitor)
    store.ask_to_stop(read(store, job), reason="stopped on request")
    cluster.set(submission, AttemptStatus.FAILED, "exit code 143")
    monitor.tick()
    assert read(store, job).state is JobState.STOPPED


def test_the_failure_is_the_drivers_own_word(store: Store, monitor: Monitor, cluster: ClusterDouble) -> None:
    job, submission = begun(store, monitor)
    driver = DriverDouble(Path(attempt_of(store, job).folder))
    driver.make_plan()
    driver.end("failed", failure="rank 3 (pipeline 1) was killed")
    cluster.set(submission, AttemptStatus.FAILED, "Job entrypoint command failed with exit code 1")
    monitor.tick()
    assert (read(store, job).state, read(store, job).reason) == (
        JobState.FAILED,
        "rank 3 (pipeline 1) was killed",
    )


def test_a_users_mistake_is_found_in_the_output(
    store: Store, monitor: Monitor, cluster: ClusterDouble
) -> None:
    job, submission = begun(store, monitor)
    cluster.outputs[submission] = "Running entrypoint\neth: stage 2 needs 3 GiB too many\n[ray] bye\n"
    cluster.set(submission, AttemptStatus.FAILED)
    monitor.tick()
    assert read(store, job).reason == "stage 2 needs 3 GiB too many"


def test_what_ray_refuses_has_failed(store: Store, monitor: Monitor, cluster: ClusterDouble) -> None:
    cluster.refusal = "no agent on the head"
    job = queue(store)
    monitor.tick()
    assert (read(store, job).state, read(store, job).reason) == (
        JobState.FAILED,
        "Ray refused the job: no agent on the head",
    )


def restarted(settings: Settings, store: Store, cluster: ClusterDouble) -> Monitor:
    """The monitor of a service that starts on what another one left."""
    return Monitor(settings=settings, store=store, backend=cluster)


def test_a_restarted_service_finds_its_running_job(
    settings: Settings, store: Store, monitor: Monitor, cluster: ClusterDouble
) -> None:
    job, submission = begun(store, monitor)
    cluster.set(submission, AttemptStatus.RUNNING)
    cluster.outputs[submission] = "line 1\n"
    monitor.tick()
    again = restarted(settings, store, cluster)
    cluster.outputs[submission] = "line 1\nline 2\n"
    again.tick()
    assert list(cluster.commands) == [submission]
    assert read(store, job).state is JobState.PLANNING
    assert output_path(attempt_of(store, job)).read_text() == "line 1\nline 2\n"


def test_a_service_that_died_while_submitting_submits_once(
    settings: Settings, store: Store, cluster: ClusterDouble
) -> None:
    job = queue(store)
    store.begin_attempt(job, cluster=settings.cluster, home=settings.runs / job.id)
    restarted(settings, store, cluster).tick()
    assert list(cluster.commands) == [attempt_of(store, job).submission_id]


def test_a_service_that_died_just_after_submitting_does_not_submit_again(
    settings: Settings, store: Store, cluster: ClusterDouble
) -> None:
    job = queue(store)
    store.begin_attempt(job, cluster=settings.cluster, home=settings.runs / job.id)
    cluster.set(attempt_of(store, job).submission_id, AttemptStatus.RUNNING)
    restarted(settings, store, cluster).tick()
    assert cluster.commands == {}
    assert attempt_of(store, job).submitted_at is not None


def test_a_stop_that_comes_before_the_submission_prevents_it(
    settings: Settings, store: Store, cluster: ClusterDouble
) -> None:
    job = queue(store)
    store.begin_attempt(job, cluster=settings.cluster, home=settings.runs / job.id)
    store.ask_to_stop(read(store, job), reason="stopped on request")
    restarted(settings, store, cluster).tick()
    assert cluster.commands == {}
    assert read(store, job).state is JobState.STOPPED


def test_a_job_that_ray_forgot_has_failed_unless_it_was_done(
    settings: Settings, store: Store, monitor: Monitor, cluster: ClusterDouble
) -> None:
    first, submission = begun(store, monitor)
    del cluster.reports[submission]
    monitor.tick()
    assert read(store, first).state is JobState.FAILED
    assert "started anew" in read(store, first).reason
    second, submission = begun(store, monitor)
    DriverDouble(Path(attempt_of(store, second).folder)).make_plan()
    DriverDouble(Path(attempt_of(store, second).folder)).end("succeeded")
    del cluster.reports[submission]
    monitor.tick()
    assert read(store, second).state is JobState.SUCCEEDED


def test_jobs_of_another_cluster_are_left_alone(
    settings: Settings, store: Store, monitor: Monitor, cluster: ClusterDouble
) -> None:
    job, _ = begun(store, monitor)
    other = ClusterDouble()
    elsewhere = settings.model_copy(update={"cluster": "http://other:8265"})
    restarted(elsewhere, store, other).tick()
    assert read(store, job).state is JobState.PLANNING
    own, submission = queue(store), None
    restarted(elsewhere, store, other).tick()
    submission = attempt_of(store, own).submission_id
    assert list(other.commands) == [submission]


def test_stopping_with_the_embedded_cluster_ends_every_job(
    settings: Settings, store: Store, monitor: Monitor, cluster: ClusterDouble
) -> None:
    job, submission = begun(store, monitor)
    waiting = queue(store, "waiting")
    cluster.set(submission, AttemptStatus.RUNNING)
    monitor.stop_active(reason="the service was stopped", timeout_seconds=0.2)
    assert submission in cluster.stops
    assert read(store, job).state is JobState.STOPPED
    assert read(store, job).reason.startswith("the service was stopped")
    assert read(store, waiting).state is JobState.QUEUED


class _Ends(ClusterDouble):
    """Whose drivers end when they are asked to."""

    def stop(self, submission_id: str) -> None:
        super().stop(submission_id)
        self.set(submission_id, AttemptStatus.STOPPED)


@pytest.mark.parametrize(
    ("cluster", "ray_waits", "reason"),
    [
        (_Ends(), 120, "the service was stopped, and its embedded Ray with it"),
        # Shorter than the news of Ray's take: who does not end at once is not waited for.
        (ClusterDouble(), -5, "its driver did not end in time"),
    ],
)
def test_a_service_that_ends_gives_its_jobs_the_time_that_its_ray_does(
    settings: Settings,
    store: Store,
    cluster: ClusterDouble,
    ray_waits: float,
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(DRIVER_STOP_VARIABLE, str(ray_waits))
    job = queue(store)
    with serving(settings.model_copy(update={"cluster": EMBEDDED}), cluster):
        submission = wait_for(lambda: next(iter(cluster.reports), None), what="the job to be submitted")
        wait_for(lambda: attempt_of(store, job).submitted_at, what="that to be written down")
        cluster.set(submission, AttemptStatus.RUNNING)
    assert (cluster.stops and set(cluster.stops) == {submission}) or ray_waits < 0
    assert read(store, job).state is JobState.STOPPED
    assert read(store, job).reason.endswith(reason)
    assert f"most_seconds={ray_waits + 5.0}" in capsys.readouterr().out


def test_a_second_signal_ends_the_wait_for_jobs(
    settings: Settings,
    store: Store,
    monitor: Monitor,
    cluster: ClusterDouble,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hurry = threading.Event()
    server = Server(uvicorn.Config(create_app(settings, cluster)), hurry=hurry)
    for _ in range(2):  # one Ctrl-C that came twice
        server.handle_exit(signal.SIGINT, None)
        assert server.should_exit and not hurry.is_set()
    job, submission = begun(store, monitor)
    cluster.set(submission, AttemptStatus.RUNNING)
    waiting = threading.Thread(
        target=monitor.stop_active, kwargs={"reason": "ended", "timeout_seconds": 600, "hurry": hurry}
    )
    waiting.start()
    wait_for(lambda: submission in cluster.stops, what="the job to be asked to stop")
    monkeypatch.setattr("eth_service.server._DOUBLE_SECONDS", 0.0)
    server.handle_exit(signal.SIGINT, None)
    waiting.join(30)
    assert not waiting.is_alive() and read(store, job).reason == "ended; its driver did not end in time"


def test_an_embedded_ray_and_its_service_wait_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DRIVER_STOP_VARIABLE, raising=False)
    assert float(embedded_ray.ENVIRONMENT[DRIVER_STOP_VARIABLE]) == DRIVER_STOP_SECONDS == stop_seconds() - 5


def test_one_job_that_cannot_be_followed_does_not_stop_the_others(
    settings: Settings, store: Store, cluster: ClusterDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = restarted(settings.model_copy(update={"concurrent_jobs": 2}), store, cluster)
    first, second = queue(store, "first"), queue(store, "second")
    pair.tick()
    # A file where the driver's output should go is a surprise that only the first job has.
    output_path(attempt_of(store, first)).mkdir(parents=True)
    cluster.outputs[attempt_of(store, first).submission_id] = "x" * 100_000 + "\n"
    cluster.set(attempt_of(store, second).submission_id, AttemptStatus.SUCCEEDED)
    pair.tick()
    assert read(store, second).state is JobState.SUCCEEDED
    assert "following a job failed" in capsys.readouterr().out
