"""The page in a real browser, over a real service whose jobs the test moves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from eth_service.backend import AttemptStatus
from eth_service.settings import Settings
from tests.eth_service.double import ClusterDouble, DriverDouble, job_values
from tests.eth_service.running import serving, wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="chromium is not installed: `make system-packages` installs it"
    ),
]
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
# A name that would act, were it ever put into the page as HTML, cannot pass the job file's pattern;
# what a driver prints can hold anything.
HOSTILE = "<img src=x onerror=\"document.title='broken'\"> & <b>bold</b>\n"


@pytest.fixture
def page() -> Iterator[Page]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        opened = browser.new_page(viewport={"width": 1240, "height": 1300})
        problems: list[str] = []
        opened.on("pageerror", lambda error: problems.append(str(error)))
        yield opened
        browser.close()
        assert problems == []


def submit(url: str, name: str) -> str:
    answer = httpx.post(f"{url}/api/v1/jobs", json=job_values(name=name))
    return str(answer.raise_for_status().json()["id"])


def start(cluster: ClusterDouble, job_id: str) -> DriverDouble:
    submission = f"eth-{job_id}-1"
    wait_for(lambda: submission in cluster.commands, what="the submission")
    cluster.set(submission, AttemptStatus.RUNNING)
    return DriverDouble(Path(cluster.commands[submission][-1]))


def test_the_page_follows_a_job_from_queue_to_end(
    page: Page, service_url: str, cluster: ClusterDouble
) -> None:
    from playwright.sync_api import expect

    page.goto(service_url)
    expect(page.get_by_text("No job yet")).to_be_visible()
    job_id = submit(service_url, "first")
    waiting = submit(service_url, "second")
    driver = start(cluster, job_id)
    row = page.locator(f'tr[data-job="{job_id}"]')
    expect(row).to_contain_text("planning")
    expect(page.locator(f'tr[data-job="{waiting}"]')).to_contain_text(f"waits for the end of {job_id}")
    row.get_by_role("link").click()
    expect(page.get_by_text("The plan is not made yet.")).to_be_visible()

    driver.make_plan()
    for iteration in range(1, 9):
        driver.iterate(iteration, loss=5.0 / iteration, validated=4 if iteration >= 4 else None)
    cluster.outputs[f"eth-{job_id}-1"] = HOSTILE
    expect(page.locator("#detail-state")).to_have_text("running")
    expect(page.locator("#emulated")).to_contain_text("EMULATED")
    first, second = page.locator(".pipeline").all()
    expect(first.locator(".stage")).to_have_count(2)
    expect(first.locator(".stage").first).to_contain_text("1 × 910B2")
    expect(second.locator(".stage")).to_contain_text("layers 0–1")
    expect(first.locator(".live")).to_contain_text("6.5 samples/s (predicted 8)")
    expect(second.locator(".live")).to_contain_text("440 ms (predicted 390 ms)")
    expect(page.locator("#loss svg")).to_have_attribute(
        "aria-label",
        "Loss: 5 at iteration 1, 0.625 at iteration 8;"
        " Validation loss: 2.5 at iteration 4, 2.5 at iteration 4",
    )
    expect(page.locator("#loss svg .ring")).to_have_count(1)
    expect(page.locator("#figures")).to_contain_text("2.5 (perplexity 12.18, after iteration 4)")
    expect(row).to_contain_text("8 of 20")
    expect(page.locator("#log")).to_have_text(HOSTILE)
    assert page.title() == "ETH service"
    assert page.locator("#log img, #log b").count() == 0

    driver.iterate(9, loss=0.25)
    expect(page.locator("#figures")).to_contain_text("9 of 20")
    expect(page.locator("#figures")).to_contain_text("waited for data2.5 % of the time")
    driver.end("failed", failure="rank 2 (pipeline 1) was killed")
    cluster.set(f"eth-{job_id}-1", AttemptStatus.FAILED)
    expect(page.locator("#events")).to_contain_text("rank 2 (pipeline 1) was killed")
    expect(page.get_by_role("button", name="Stop job")).to_be_hidden()


def test_the_stop_button_stops_the_job(page: Page, service_url: str, cluster: ClusterDouble) -> None:
    from playwright.sync_api import expect

    job_id = submit(service_url, "stopped")
    start(cluster, job_id)
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(f"{service_url}/#{job_id}")
    page.get_by_role("button", name="Stop job").click()
    wait_for(lambda: f"eth-{job_id}-1" in cluster.stops, what="the stop")
    expect(page.get_by_role("button", name="Stop job")).to_be_disabled()
    cluster.set(f"eth-{job_id}-1", AttemptStatus.STOPPED)
    expect(page.locator("#detail-state")).to_have_text("stopped")


def test_a_lost_connection_is_shown(page: Page, settings: Settings, cluster: ClusterDouble) -> None:
    from playwright.sync_api import expect

    with serving(settings, cluster) as url:
        page.goto(url)
        expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#connection")).to_have_text("connection lost")
    expect(page.locator("#lost")).to_contain_text("has not answered since")
