// A plan's pipelines and stages, and what each pipeline does at the moment.

import { line } from "./chart.js";
import { bytes, element, number, seconds } from "./dom.js";

const COLOURS = 6;

/** Draw the pipelines of a job once; returns a function that shows new rows of metrics in them. */
export function drawPipelines(job, container, legend) {
  const types = Object.keys(job.plan.cluster.device_types);
  legend.replaceChildren(
    ...types.map((type) => element("li", { class: colour(types, type) }, countOf(job, type))),
  );
  const drawn = job.pipelines.map((pipeline) => drawPipeline(pipeline, job, types));
  container.replaceChildren(...drawn.map((one) => one.node));
  return (rows) => drawn.forEach((one, index) => one.show(rows, index));
}

function countOf(job, type) {
  let count = 0;
  for (const node of job.plan.cluster.nodes) {
    for (const entry of node.devices) if (entry.type === type) count += entry.count;
  }
  return `${type} × ${count}`;
}

function drawPipeline(pipeline, job, types) {
  const live = element("p", { class: "live" });
  const meter = element("div", { class: "meter", "aria-hidden": "true" });
  const trace = element("div", { class: "trace" });
  const node = element(
    "article",
    { class: "pipeline", "data-pipeline": pipeline.id },
    element("h4", {}, `Pipeline ${pipeline.id} `, element("small", {}, shareOf(pipeline, job))),
    element("ol", { class: "stages" }, ...pipeline.stages.map((stage, index) => drawStage(stage, index, types))),
    live,
    meter,
    trace,
  );
  return { node, show: (rows, index) => showLive(pipeline, rows, index, { live, meter, trace }) };
}

function shareOf(pipeline, job) {
  const padded = pipeline.local_batch_size - pipeline.samples;
  const share = `${pipeline.samples} of ${job.plan.global_batch_size} samples in micro-batches of ${pipeline.micro_batch_size}`;
  return padded > 0 ? `${share}, ${padded} masked` : share;
}

function drawStage(stage, index, types) {
  const kinds = Object.entries(stage.devices);
  const [first, end] = stage.layers;
  const layers = end === first ? "no layers" : end - first === 1 ? `layer ${first}` : `layers ${first}–${end - 1}`;
  const parts = [stage.embedding ? "embedding" : null, layers, stage.head ? "head" : null].filter(Boolean);
  const box = element(
    "li",
    { class: `stage ${colour(types, kinds[0][0])}` },
    element("strong", {}, kinds.map(([type, count]) => `${count} × ${type}`).join(" + ")),
    element("span", {}, parts.join(", ")),
    element("span", {}, `TP ${stage.tp}, DP ${stage.dp}`),
    stage.predicted_bytes === null
      ? null
      : element("span", { class: "memory" }, `${bytes(stage.predicted_bytes)} of ${bytes(stage.memory_limit_bytes)}`),
  );
  box.setAttribute("aria-label", `Stage ${index}: ${[...box.children].map((child) => child.textContent).join("; ")}`);
  box.style.flexGrow = String(Math.max(1, end - first));
  return box;
}

function showLive(pipeline, rows, index, { live, meter, trace }) {
  const measured = rows.at(-1)?.pipelines[index];
  const rate = measured?.samples_per_second ?? null;
  const predicted = pipeline.predicted_samples_per_second;
  live.replaceChildren(
    element("strong", {}, number(rate)),
    ` samples/s (predicted ${number(predicted)}); compute ends at `,
    element("strong", {}, seconds(measured?.end_seconds)),
    ` (predicted ${seconds(pipeline.predicted_seconds)})`,
  );
  const full = Math.max(rate ?? 0, predicted ?? 0) || 1;
  meter.replaceChildren(bar("measured", rate, full), bar("predicted", predicted, full));
  const points = rows.map((row) => [row.iteration, row.pipelines[index]?.samples_per_second]);
  const label = `Samples a second of pipeline ${pipeline.id}`;
  trace.replaceChildren(line(points, { label, width: 220, height: 44, axis: false, from: 0 }));
}

function bar(kind, value, full) {
  const filled = element("span", { class: `bar ${kind}` });
  filled.style.width = `${(100 * (value ?? 0)) / full}%`;
  return element("span", { class: "bar-row" }, element("span", { class: "bar-name" }, kind), filled);
}

const colour = (types, type) => `type-${types.indexOf(type) % COLOURS}`;
