"""`eth serve` as a user starts it: a process, a real Ray, real training, an end that leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from eth_service.cli import app
from planner.errors import UserError
from tests.eth_service.double import example_plan, job_values
from tests.eth_service.running import wait_for

ETH = [sys.executable, "-c", "from eth_service.cli import main; main()"]
JOBS = "/api/v1/jobs"
MARK = "ETH_TEST_SERVICE"


@dataclass
class Service:
    """A running `eth serve`, and what it has said so far."""

    process: subprocess.Popen[bytes]
    client: httpx.Client
    said: Path

    def end(self, number: int = signal.SIGTERM) -> str:
        self.process.send_signal(number)
        assert self.process.wait(60) == 0
        return self.said.read_text()


@contextmanager
def eth_serve(root: Path, *arguments: str) -> Iterator[Service]:
    """The service over the data root `root`, on a free port; killed if the test has not ended it."""
    said = root / "said.txt"
    # The token that the Ray of `other_ray` made: Ray sends it to a given address only when told to.
    token = {"RAY_AUTH_MODE": "token"} if "--address" in arguments else {}
    with said.open("wb") as output:
        process = subprocess.Popen(
            [*ETH, "serve", "--port", "0", "--data-root", str(root), *arguments],
            stderr=output,
            stdout=output,
            env=os.environ | {MARK: str(root), "OMP_NUM_THREADS": "1"} | token,
        )
    try:
        wait_for(lambda: "serving on" in said.read_text() or process.poll() is not None, what="the service")
        found = re.search(r"serving on (http://\S+)", said.read_text())
        assert found, said.read_text()
        with httpx.Client(base_url=found[1], timeout=60) as client:
            yield Service(process, client, said)
    finally:
        process.kill()
        process.wait()


def left_behind(root: Path) -> list[str]:
    """Command lines of the processes that a service over `root`, or anything it started, has left."""
    mark = f"{MARK}={root}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except (OSError, UnicodeDecodeError):
            continue
    return [line for line in found if line]


# Ray that outlives the services: what `ray start --head` is on a user's machine, without its fixed ports.
RAY_ALONE = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
from eth_service.embedded_ray import embedded_ray
with embedded_ray() as address:
    print(address, flush=True)
    signal.sigwait({signal.SIGTERM})
"""


@pytest.fixture(scope="module")
def other_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray cluster that runs beside whatever a test starts."""
    mark = tmp_path_factory.mktemp("ray")
    process = subprocess.Popen(
        [sys.executable, "-c", RAY_ALONE], stdout=subprocess.PIPE, env=os.environ | {MARK: str(mark)}
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()
    finally:
        process.terminate()
        process.wait(30)
        wait_for(lambda: not left_behind(mark), what="Ray to end")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data root with a text, and a plan of two unlike pipelines on three emulated devices."""
    (tmp_path / "plan.json").write_text(example_plan().model_dump_json())
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return tmp_path


def planned(steps: int) -> dict[str, Any]:
    """What a job says that uses the plan of the data root."""
    plan = example_plan()
    return {
        "model": plan.model.model_dump(),
        "cluster": "auto",
        "plan": "plan.json",
        "training": training(steps) | {"precision": plan.dtypes.param},
    }


def submit(service: Service, **changes: Any) -> str:
    values = job_values(data={"path": "text.txt"}, **changes)
    answer = service.client.post(
        JOBS, content=yaml.safe_dump(values), headers={"Content-Type": "application/yaml"}
    )
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def get(service: Service, job_id: str) -> dict[str, Any]:
    return dict(service.client.get(f"{JOBS}/{job_id}").raise_for_status().json())


def wait_for_state(service: Service, job_id: str, *states: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        job = get(service, job_id)
        ended = job["state"] in ("succeeded", "failed", "stopped")
        assert job["state"] in states or not ended, f"{job['state']}: {job['reason']}"
        return job if job["state"] in states else None

    return wait_for(look, what=f"a job that is {states}", seconds=120)


def training(steps: int) -> dict[str, Any]:
    return {"global_batch_size": 6, "sequence_length": 32, "steps": steps}


def stream(service: Service, job_id: str) -> list[dict[str, Any]]:
    """Every row of metrics, as they come, to the end of the job."""
    rows = []
    with service.client.stream("GET", f"{JOBS}/{job_id}/metrics/stream") as answer:
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: {}":
                rows.append(json.loads(line.removeprefix("data: ")))
    return rows


def whole_log(service: Service, job_id: str, *, limit: int) -> str:
    text, offset = "", 0
    while True:
        part = service.client.get(f"{JOBS}/{job_id}/logs", params={"offset": offset, "limit": limit}).json()
        text, offset = text + part["text"], part["next_offset"]
        if part["complete"]:
            return text


def losses_of_the_driver_alone(root: Path, ray_address: str, values: dict[str, Any]) -> list[float]:
    """The same job file run without the service, as `ray job submit` would run it."""
    (root / "job.yaml").write_text(yaml.safe_dump(values))
    done = subprocess.run(
        [sys.executable, "-m", "actors.driver", str(root / "job.yaml"), "--output", str(root / "alone")],
        env=os.environ | {"RAY_ADDRESS": ray_address, "RAY_AUTH_MODE": "token", MARK: str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = (root / "alone" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_job_trains_and_another_ends_with_the_service(root: Path) -> None:
    with eth_serve(root) as service:
        short, long = submit(service, **planned(4)), submit(service, training=training(5000))
        assert short in get(service, long)["note"]
        rows = stream(service, short)
        assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
        assert all(len(row["pipelines"]) == 2 for row in rows)
        assert all(pipeline["samples_per_second"] > 0 for row in rows for pipeline in row["pipelines"])
        done = wait_for_state(service, short, "succeeded")
        assert [step["state"] for step in done["transitions"]] == [
            "queued", "planning", "starting", "running", "succeeded",
        ]  # fmt: skip
        assert [pipeline["samples"] for pipeline in done["pipelines"]] == [4, 2]
        assert (Path(done["run_folder"]) / "weights.safetensors").stat().st_size > 0
        log = whole_log(service, short, limit=100)
        assert "loss" in log

        waiting = submit(service, training=training(1))
        wait_for_state(service, long, "planning", "starting", "running")
        said = service.end()
        assert f"job={long}" in said
        assert "embedded Ray" in said
        wait_for(lambda: not left_behind(root), what="every process to end")

    with eth_serve(root, "--address", "http://127.0.0.1:9") as again:
        assert get(again, long)["state"] == "stopped"
        assert get(again, waiting)["state"] == "queued"
        assert whole_log(again, short, limit=1 << 20) == log
        again.end(signal.SIGINT)


@pytest.mark.slow
def test_a_job_trains_as_without_the_service_and_a_running_one_stops(root: Path, other_ray: str) -> None:
    # The other Ray is there for another reason as well: the embedded one must not be mixed up with it.
    with eth_serve(root) as service:
        short, long = submit(service, **planned(4)), submit(service, training=training(5000))
        rows = stream(service, short)
        done = wait_for_state(service, short, "succeeded")
        alone = losses_of_the_driver_alone(root, other_ray, done["job"])
        assert [row["loss"] for row in rows] == pytest.approx(alone, rel=1e-6)

        wait_for_state(service, long, "running")
        service.client.post(f"{JOBS}/{long}/stop").raise_for_status()
        assert wait_for_state(service, long, "stopped")["reason"] == "stopped on request"
        wait_for(
            lambda: not any(long in line for line in left_behind(root)), what="the job's processes to end"
        )
        service.end()


@pytest.mark.slow
def test_a_job_on_a_cluster_goes_on_without_the_service_and_is_found_again(
    root: Path, other_ray: str
) -> None:
    with eth_serve(root, "--address", other_ray) as first:
        job_id = submit(first, training=training(12))
        wait_for_state(first, job_id, "running")
        assert re.search(f"job goes on without the service.*job={job_id}", first.end())
    with eth_serve(root, "--address", other_ray) as second:
        done = wait_for_state(second, job_id, "succeeded")
        assert (done["iteration"], done["attempt"]) == (12, 1)
        assert [row["iteration"] for row in stream(second, job_id)] == list(range(1, 13))
        assert whole_log(second, job_id, limit=1 << 20).count("Running entrypoint") == 1
        second.end()
    assert left_behind(root) == []


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert isinstance(result.exception, UserError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "::", "example.org"])
def test_an_address_that_others_reach_is_refused(host: str) -> None:
    told = refused("--host", host)
    assert f"--host = {host!r}" in told
    assert "127.0.0.1" in told


@pytest.mark.parametrize(
    "address", ["head", "ray://head:10001", "head:6379/path", "http://", "head:many", ""]
)
def test_what_is_no_address_of_a_cluster_is_refused(address: str) -> None:
    assert f"--address = {address!r}" in refused("--address", address)


def test_a_port_in_use_is_named(root: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"--port = {port}" in refused("--port", port, "--data-root", str(root))


def test_folders_that_cannot_be_had_are_named(root: Path) -> None:
    assert "--data-root" in refused("--port", "0", "--data-root", str(root / "absent"))
    assert "--runs" in refused("--port", "0", "--data-root", str(root), "--runs", "/proc/runs")


def test_two_services_never_share_a_folder(root: Path) -> None:
    with eth_serve(root, "--address", "http://127.0.0.1:9") as service:
        assert "in use by another service" in refused("--port", "0", "--data-root", str(root))
        assert service.client.get("/readyz").status_code == 503
        service.end(signal.SIGINT)
