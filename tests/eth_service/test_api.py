"""The REST interface over HTTP, with a real database and a cluster that the test moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from eth_service.backend import AttemptStatus
from eth_service.settings import Settings
from tests.eth_service.double import ClusterDouble, DriverDouble, example_plan, job_values
from tests.eth_service.running import wait_for

JOBS = "/api/v1/jobs"


def submit(client: httpx.Client, **changes: Any) -> dict[str, Any]:
    answer = client.post(JOBS, json=job_values(**changes))
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def get(client: httpx.Client, job_id: str) -> dict[str, Any]:
    return dict(client.get(f"{JOBS}/{job_id}").raise_for_status().json())


def submission_of(client: httpx.Client, cluster: ClusterDouble, job_id: str) -> str:
    submission = f"eth-{job_id}-1"
    wait_for(lambda: submission in cluster.reports, what="the submission")
    return submission


def running_job(client: httpx.Client, cluster: ClusterDouble, *, iterations: int) -> tuple[str, DriverDouble]:
    job_id = submit(client)["id"]
    submission = submission_of(client, cluster, job_id)
    driver = DriverDouble(Path(cluster.commands[submission][-1]))
    driver.make_plan()
    for iteration in range(1, iterations + 1):
        driver.iterate(iteration, loss=3.0 / iteration, validated=2 if iteration >= 2 else None)
    cluster.outputs[submission] = "first line\nsecond line\n"
    cluster.set(submission, AttemptStatus.RUNNING)
    wait_for(lambda: get(client, job_id)["state"] == "running", what="the job to run")
    return job_id, driver


def assert_problem(answer: httpx.Response, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    assert problem["title"]
    assert "\n" not in problem["detail"]
    for word in words:
        assert word in problem["detail"]


def test_a_posted_job_is_located_and_listed(client: httpx.Client) -> None:
    answer = client.post(
        JOBS, content=yaml.safe_dump(job_values()), headers={"Content-Type": "application/yaml"}
    )
    assert answer.status_code == 201
    job = client.get(answer.headers["Location"]).raise_for_status().json()
    assert (job["name"], job["steps"], job["emulated"]) == ("double", 20, True)
    listed = client.get(JOBS).raise_for_status().json()
    assert [one["id"] for one in listed["jobs"]] == [job["id"]]
    assert listed["next_before"] is None


def test_pages_of_jobs_join_up(client: httpx.Client) -> None:
    ids = [submit(client, name=f"job{number}")["id"] for number in range(5)]
    found: list[str] = []
    before = None
    while True:
        page = client.get(JOBS, params={"limit": 2} | ({"before": before} if before else {})).json()
        found += [job["id"] for job in page["jobs"]]
        before = page["next_before"]
        if before is None:
            break
    assert found == ids[::-1]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            job_values(training={"global_batch_size": 0, "sequence_length": 8, "steps": 1}),
            ["global_batch_size", "0"],
        ),
        (job_values(data={"path": "nowhere.txt"}), ["data.path = 'nowhere.txt'", "check the path"]),
        (job_values(cluster="2x2:TPU9"), ["TPU9"]),
        ({}, ["name is missing"]),
    ],
)
def test_a_users_mistake_is_a_422(client: httpx.Client, values: dict[str, Any], words: list[str]) -> None:
    assert_problem(client.post(JOBS, json=values), 422, *words)
    assert client.get(JOBS).json()["jobs"] == []


def test_problems_for_everything_else(client: httpx.Client, settings: Settings) -> None:
    assert_problem(client.get(f"{JOBS}/unknown"), 404, "unknown")
    for path in ("metrics", "logs", "metrics/stream"):
        assert_problem(client.get(f"{JOBS}/unknown/{path}"), 404, "unknown")
    assert_problem(client.post(f"{JOBS}/unknown/stop"), 404, "unknown")
    assert_problem(client.get("/api/v2/jobs"), 404, "/api/v2/jobs")
    assert_problem(client.delete(JOBS), 405)
    assert_problem(client.get(JOBS, params={"limit": 0}), 422, "limit", "'0'")
    assert_problem(client.post(JOBS, content="a=b"), 415, "application/yaml")
    large = b" " * (settings.max_job_bytes + 1)
    assert_problem(client.post(JOBS, content=large, headers={"Content-Type": "application/json"}), 413)


def test_a_waiting_job_says_for_what(client: httpx.Client, cluster: ClusterDouble) -> None:
    first, second, third = (submit(client, name=name) for name in ("first", "second", "third"))
    submission_of(client, cluster, first["id"])
    note = get(client, third["id"])["note"]
    assert "place 2" in note
    assert first["id"] in note
    cluster.set(f"eth-{first['id']}-1", AttemptStatus.SUCCEEDED)
    submission_of(client, cluster, second["id"])
    assert second["id"] in get(client, third["id"])["note"]


def test_a_running_job_shows_its_plan_with_measured_beside_predicted(
    client: httpx.Client, cluster: ClusterDouble
) -> None:
    job_id, driver = running_job(client, cluster, iterations=3)
    job = get(client, job_id)
    assert job["plan"] == json.loads(driver.plan.model_dump_json())
    assert (job["iteration"], job["loss"], job["samples_per_second"]) == (3, 1.0, 9.75)
    # Of an evaluation some iterations ago.
    validation = {"iteration": 2, "loss": 2.5, "perplexity": 12.18, "tokens": 64}
    for told in (job["validation"], job["latest"]["validation"]):
        assert {key: told[key] for key in validation} == validation
    assert job["predicted"]["iteration_seconds"] == 0.5
    assert job["latest"]["iteration_seconds"] == 0.62
    first, second = job["pipelines"]
    assert (first["samples"], second["samples"]) == (4, 2)
    assert (first["measured_samples_per_second"], first["predicted_samples_per_second"]) == (6.5, 8.0)
    assert (first["measured_seconds"], first["predicted_seconds"]) == (0.45, pytest.approx(0.39))
    assert [stage["devices"] for stage in first["stages"]] == [{"910B2": 1}, {"910B2": 1}]
    assert [stage["devices"] for stage in second["stages"]] == [{"910B4": 1}]
    assert [stage["layers"] for stage in first["stages"]] == [[0, 1], [1, 2]]


def test_metrics_go_on_from_an_iteration(client: httpx.Client, cluster: ClusterDouble) -> None:
    job_id, driver = running_job(client, cluster, iterations=4)

    def rows(**query: int) -> dict[str, Any]:
        return dict(client.get(f"{JOBS}/{job_id}/metrics", params=query).raise_for_status().json())

    assert [row["iteration"] for row in rows()["rows"]] == [1, 2, 3, 4]
    part = rows(since=1, limit=2)
    assert ([row["iteration"] for row in part["rows"]], part["next_since"]) == ([2, 3], 3)
    assert rows(since=4) == {"attempt": 1, "rows": [], "next_since": 4, "complete": False}
    driver.iterate(5)
    assert [row["iteration"] for row in rows(since=4)["rows"]] == [5]
    assert rows(since=4)["rows"][0]["pipelines"][1]["samples_per_second"] == 3.25
    cluster.set(f"eth-{job_id}-1", AttemptStatus.SUCCEEDED)
    wait_for(lambda: rows(since=5)["complete"], what="the end of the rows")


def test_logs_go_on_from_an_offset(client: httpx.Client, cluster: ClusterDouble) -> None:
    job_id, _ = running_job(client, cluster, iterations=1)

    def part(**query: int) -> dict[str, Any]:
        return dict(client.get(f"{JOBS}/{job_id}/logs", params=query).raise_for_status().json())

    wait_for(lambda: part()["text"] == "first line\nsecond line\n", what="the log")
    head = part(limit=11)
    assert (head["text"], head["next_offset"], head["complete"]) == ("first line\n", 11, False)
    assert part(offset=11)["text"] == "second line\n"
    assert part(offset=-5)["text"] == "line\n"
    cluster.outputs[f"eth-{job_id}-1"] += "the end"
    cluster.set(f"eth-{job_id}-1", AttemptStatus.SUCCEEDED)
    wait_for(lambda: part()["complete"], what="the whole log")
    assert part(offset=head["next_offset"])["text"] == "second line\nthe end"
    # Ray forgets; the copy stays.
    cluster.outputs.clear()
    assert part()["text"] == "first line\nsecond line\nthe end"


def test_the_stream_sends_rows_as_they_come_and_then_ends(
    client: httpx.Client, cluster: ClusterDouble
) -> None:
    job_id, driver = running_job(client, cluster, iterations=2)
    events: list[tuple[str, str]] = []
    event = ""
    with client.stream("GET", f"{JOBS}/{job_id}/metrics/stream", headers={"Last-Event-ID": "1"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            if line.startswith("data: "):
                events.append((event, line.removeprefix("data: ")))
                if len(events) == 1:
                    driver.iterate(3)
                if len(events) == 2:
                    cluster.set(f"eth-{job_id}-1", AttemptStatus.SUCCEEDED)
    assert [kind for kind, _ in events] == ["metrics", "metrics", "end"]
    assert [json.loads(data)["iteration"] for _, data in events[:2]] == [2, 3]


def test_stop_works_in_every_state_and_once_ended_is_a_conflict(
    client: httpx.Client, cluster: ClusterDouble
) -> None:
    running, _ = running_job(client, cluster, iterations=1)
    queued = submit(client)["id"]
    assert client.post(f"{JOBS}/{queued}/stop").status_code == 202
    assert get(client, queued)["state"] == "stopped"
    for _ in range(2):
        answer = client.post(f"{JOBS}/{running}/stop")
        assert answer.status_code == 202
        assert answer.json()["stop_requested"]
    submission = f"eth-{running}-1"
    wait_for(lambda: submission in cluster.stops, what="the stop to reach the cluster")
    cluster.set(submission, AttemptStatus.STOPPED)
    wait_for(lambda: get(client, running)["state"] == "stopped", what="the job to stop")
    assert get(client, running)["transitions"][-1]["reason"] == "stopped on request"
    assert_problem(client.post(f"{JOBS}/{running}/stop"), 409, running, "stopped")


def test_ready_only_while_ray_answers(client: httpx.Client, cluster: ClusterDouble) -> None:
    assert client.get("/readyz").json() == {"status": "ready"}
    cluster.reachable = False
    assert_problem(client.get("/readyz"), 503, "switched off")
    assert client.get("/healthz").status_code == 200


def test_unreachable_shows_since_when(client: httpx.Client, cluster: ClusterDouble) -> None:
    job_id, _ = running_job(client, cluster, iterations=1)
    cluster.reachable = False
    job = wait_for(
        lambda: (found := get(client, job_id))["unreachable_since"] and found, what="the loss to be noticed"
    )
    assert job["state"] == "running"
    assert "may still be running" in job["note"]


def test_other_sites_pages_cannot_post_or_rebind(client: httpx.Client) -> None:
    job_id = submit(client)["id"]
    foreign = {"Origin": "https://elsewhere.example"}
    assert_problem(client.post(f"{JOBS}/{job_id}/stop", headers=foreign), 403, "elsewhere.example")
    own = {"Origin": str(client.base_url).rstrip("/")}
    assert client.post(f"{JOBS}/{job_id}/stop", headers=own).status_code == 202
    assert client.get(JOBS, headers={"Host": "rebound.example"}).status_code == 400


def test_openapi_describes_the_job_file_and_every_answer(client: httpx.Client) -> None:
    document = client.get("/openapi.json").raise_for_status().json()
    schemas = document["components"]["schemas"]

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*(references(item) for item in value.values()))
        if isinstance(value, list):
            return set().union(*(references(item) for item in value))
        return set()

    missing = {r for r in references(document) if r.removeprefix("#/components/schemas/") not in schemas}
    assert missing == set()
    body = document["paths"][JOBS]["post"]["requestBody"]["content"]
    assert set(body) == {"application/json", "application/yaml"}
    assert {"type": "string", "description": "a preset's name or a file"} in schemas["Job"]["properties"][
        "model"
    ]["anyOf"]
    stop = document["paths"][f"{JOBS}/{{job_id}}/stop"]["post"]["responses"]
    assert "application/problem+json" in stop["409"]["content"]


def test_the_page_takes_nothing_from_elsewhere(client: httpx.Client) -> None:
    page = client.get("/").raise_for_status()
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name in ("page.js", "style.css", "pipelines.js", "chart.js", "dom.js"):
        text = client.get(f"/static/{name}").raise_for_status().text
        assert "innerHTML" not in text
        assert "https://" not in text


def test_a_job_that_brings_a_plan_for_emulated_devices_says_so_at_once(client: httpx.Client) -> None:
    plan = example_plan()
    training = {"global_batch_size": 6, "sequence_length": plan.sequence_length, "steps": 2}
    values = job_values(
        model=plan.model.model_dump(mode="json"),
        cluster="auto",
        plan=plan.model_dump(mode="json"),
        training=training | {"precision": plan.dtypes.param},
    )
    assert client.post(JOBS, json=values).raise_for_status().json()["emulated"] is True


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "127.0.0.2", "[::1]", "[::1]:8080"])
def test_the_service_answers_to_any_name_of_loopback(client: httpx.Client, host: str) -> None:
    assert client.get("/api/v1/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1.example.org", "192.0.2.7:8080", "[::1", "[::2]"])
def test_another_host_s_name_is_a_problem_document(client: httpx.Client, host: str) -> None:
    answer = client.get("/api/v1/jobs", headers={"Host": host})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"].startswith(f"Host = {host!r} is no loopback address")
