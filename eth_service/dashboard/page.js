// The page: asks the service every second and shows what it says.

import { line } from "./chart.js";
import { byId, clock, element, moment, number, seconds, setText } from "./dom.js";
import { drawPipelines } from "./pipelines.js";

const POLL_MS = 1000;
const KEPT_ROWS = 1000;
const KEPT_LOG = 64 * 1024;
const FINAL = new Set(["succeeded", "failed", "stopped"]);

/** What is known of the job that is shown. */
let shown = null;
let lostSince = null;

async function ask(path, options) {
  const answer = await fetch(path, options);
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({ detail: answer.statusText }));
    throw Object.assign(new Error(problem.detail), { status: answer.status });
  }
  return answer.json();
}

async function look() {
  try {
    const { jobs } = await ask("/api/v1/jobs?limit=100");
    showJobs(jobs);
    await showSelected(jobs);
    connected();
  } catch (error) {
    lost(error);
  }
}

async function run() {
  for (;;) {
    await look();
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

function connected() {
  lostSince = null;
  byId("lost").hidden = true;
  byId("connection").dataset.state = "live";
  setText(byId("connection"), "live");
}

function lost(error) {
  lostSince ??= new Date();
  byId("connection").dataset.state = "lost";
  setText(byId("connection"), "connection lost");
  byId("lost").hidden = false;
  const since = lostSince.toLocaleTimeString([], { hour12: false });
  setText(byId("lost"), `The service has not answered since ${since} (${error.message}). What is shown is old; trying again.`);
}

function showJobs(jobs) {
  byId("no-jobs").hidden = jobs.length > 0;
  byId("jobs").hidden = jobs.length === 0;
  const body = byId("jobs").tBodies[0];
  const focused = document.activeElement?.closest?.("tr")?.dataset.job;
  body.replaceChildren(...jobs.map(jobRow));
  if (focused) body.querySelector(`tr[data-job="${CSS.escape(focused)}"] a`)?.focus();
  if (!selectedId() && jobs.length > 0) history.replaceState(null, "", `#${jobs[0].id}`);
}

function jobRow(job) {
  const chosen = job.id === selectedId();
  const link = element("a", { href: `#${job.id}`, "aria-current": chosen ? "true" : null }, job.name);
  const tag = job.emulated ? element("span", { class: "tag" }, "EMULATED") : null;
  const done = element("progress", { max: job.steps, value: job.iteration, "aria-label": "Iterations done" });
  return element(
    "tr",
    { "data-job": job.id, class: chosen ? "chosen" : null },
    element("th", { scope: "row" }, link, " ", tag, element("small", {}, job.id)),
    element("td", {}, stateMark(job), element("small", {}, job.note ?? (job.state === "failed" ? job.reason : ""))),
    element("td", { class: "whole" }, done, ` ${job.iteration} of ${job.steps}`),
    element("td", { class: "number" }, number(job.loss, 4)),
    element("td", { class: "number" }, number(job.samples_per_second)),
    element("td", { class: "whole" }, moment(job.created_at)),
  );
}

function stateMark(job) {
  return element("span", { class: "state", "data-state": job.state }, job.state);
}

const selectedId = () => decodeURIComponent(location.hash.slice(1));

async function showSelected(jobs) {
  const id = selectedId();
  byId("detail").hidden = !id;
  if (!id) return;
  if (shown?.id !== id) startShowing(id);
  if (shown.complete) return;
  // The whole job holds the plan, which may be long: it is asked for only when its line in the list has changed.
  const known = jobs.find((job) => job.id === id);
  const line = known && [known.state, known.attempt, known.note, known.stop_requested].join();
  if (!shown.job?.plan || !line || line !== shown.line) await askDetail(id);
  if (shown.id !== id || shown.job === null) return;
  shown.line = line;
  const job = shown.job;
  await Promise.all([followMetrics(job), followLog(job)]);
  shown.complete = FINAL.has(job.state) && shown.metricsComplete && shown.logComplete;
}

function startShowing(id) {
  shown = { id, job: null, line: null, attempt: 0, rows: [], since: null, offset: -KEPT_LOG, draw: null };
  byId("pipelines").replaceChildren();
  byId("legend").replaceChildren();
  byId("loss").replaceChildren();
  setText(byId("log"), "");
  byId("no-plan").hidden = false;
}

async function askDetail(id) {
  try {
    const job = await ask(`/api/v1/jobs/${encodeURIComponent(id)}`);
    if (shown.attempt !== job.attempt && shown.attempt > 0) startShowing(id);
    Object.assign(shown, { job, attempt: job.attempt });
    showDetail(job);
  } catch (error) {
    if (error.status !== 404) throw error;
    showDetail({ name: id, state: "unknown", reason: error.message, transitions: [], steps: 0 });
  }
}

function showDetail(job) {
  setText(byId("detail-name"), job.name);
  setText(byId("detail-state"), job.state);
  byId("detail-state").dataset.state = job.state;
  setText(byId("detail-reason"), job.note ? `${job.reason}; ${job.note}` : job.reason);
  byId("emulated").hidden = !job.emulated;
  byId("stop").hidden = FINAL.has(job.state) || job.state === "unknown";
  byId("stop").disabled = Boolean(job.stop_requested);
  byId("no-plan").hidden = Boolean(job.plan);
  showEvents(job.transitions);
  if (job.plan && shown.draw === null) shown.draw = drawPipelines(job, byId("pipelines"), byId("legend"));
}

function showEvents(transitions) {
  const list = byId("events");
  if (list.children.length === transitions.length && list.dataset.job === shown.id) return;
  list.dataset.job = shown.id;
  list.replaceChildren(
    ...transitions.map((step) =>
      element(
        "li",
        {},
        element("time", { datetime: step.time }, clock(step.time)),
        element("span", { class: "state", "data-state": step.state }, step.state),
        element("span", {}, step.reason),
      ),
    ),
  );
}

async function followMetrics(job) {
  shown.since ??= Math.max(0, job.iteration - KEPT_ROWS);
  const path = `/api/v1/jobs/${encodeURIComponent(job.id)}/metrics?since=${shown.since}&limit=${KEPT_ROWS}`;
  const { rows, next_since: next, complete } = await ask(path);
  if (shown.id !== job.id) return;
  shown.since = next;
  shown.metricsComplete = complete;
  shown.rows = shown.rows.concat(rows).slice(-KEPT_ROWS);
  showFigures(job, shown.rows.at(-1));
  shown.draw?.(shown.rows);
  const points = shown.rows.map((row) => [row.iteration, row.loss]);
  const width = Math.max(240, byId("loss").clientWidth);
  // Rows carry the latest evaluation: each is drawn once, where it was made.
  const marks = new Map(shown.rows.flatMap(({ validation: v }) => (v ? [[v.iteration, v.loss]] : [])));
  byId("loss").replaceChildren(
    line(points, { label: "Loss", width, height: 190, marks: [...marks], marksLabel: "Validation loss" }),
  );
}

function showFigures(job, row) {
  const figures = [
    ["iteration", `${row?.iteration ?? 0} of ${job.steps}`],
    ["loss", number(row?.loss, 4)],
    ...(row?.validation ? [["validation loss", validationFigures(row.validation)]] : []),
    ["samples/s", `${number(row?.samples_per_second)} (predicted ${number(job.predicted?.samples_per_second)})`],
    ["iteration time", `${seconds(row?.iteration_seconds)} (predicted ${seconds(job.predicted?.iteration_seconds)})`],
  ];
  // An emulated device that its host could not keep up with was slower than the real one: say so.
  if (row?.late_step_share > 0) figures.push(["host late in", `${number(100 * row.late_step_share, 2)} % of steps`]);
  const waited = row?.data_wait_seconds / row?.iteration_seconds;
  if (waited > 0.005) figures.push(["waited for data", `${number(100 * waited, 2)} % of the time`]);
  byId("figures").replaceChildren(
    ...figures.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
}

function validationFigures({ iteration, loss, perplexity }) {
  return `${number(loss, 4)} (perplexity ${number(perplexity, 4)}, after iteration ${iteration})`;
}

async function followLog(job) {
  const path = `/api/v1/jobs/${encodeURIComponent(job.id)}/logs?offset=${shown.offset}&limit=${KEPT_LOG}`;
  const part = await ask(path);
  if (shown.id !== job.id) return;
  shown.logComplete = part.complete;
  shown.offset = part.next_offset;
  if (!part.text) return;
  const log = byId("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 24;
  log.textContent = (log.textContent + part.text).slice(-KEPT_LOG);
  if (atEnd) log.scrollTop = log.scrollHeight;
}

async function stopJob() {
  if (!confirm(`Stop the job ${shown.job.name}?`)) return;
  const problem = byId("detail-problem");
  problem.hidden = true;
  try {
    await ask(`/api/v1/jobs/${encodeURIComponent(shown.id)}/stop`, { method: "POST" });
  } catch (error) {
    problem.hidden = false;
    setText(problem, error.message);
  }
}

byId("submit-url").textContent = `${location.origin}/api/v1/jobs`;
byId("stop").addEventListener("click", stopJob);
addEventListener("hashchange", look);
run();
