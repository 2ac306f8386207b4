// Line charts as inline SVG.

import { number, svg } from "./dom.js";

/**
 * A line through values at their iterations, with its lowest and highest value written beside it.
 * points: [[iteration, value]]; label: what is drawn, for those who do not see it; from: a value that the
 * scale must reach down to; marks: [[iteration, value]] of a second quantity, drawn as rings, and what it is.
 */
export function line(points, { label, width, height, axis = true, from = Infinity, marks = [], marksLabel = "" }) {
  const shown = points.filter(([, value]) => value !== null && value !== undefined);
  const left = axis ? 56 : 1;
  const iterations = shown.map(([iteration]) => iteration);
  const inside = ([iteration, value]) => Number.isFinite(value) && iteration >= iterations[0] && iteration <= iterations.at(-1);
  const rings = marks.filter(inside);
  const told = describe(shown, label) + (rings.length ? `; ${describe(rings, marksLabel)}` : "");
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": told });
  if (shown.length === 0) return chart;
  const values = [...shown, ...rings].map(([, value]) => value);
  const low = Math.min(from, ...values);
  const high = Math.max(...values);
  const first = shown[0][0];
  const last = shown.at(-1)[0];
  const bottom = height - (axis ? 18 : 3);
  const x = (iteration) => left + ((iteration - first) / Math.max(1, last - first)) * (width - left - 6);
  const y = (value) => (high === low ? (bottom + 4) / 2 : bottom - ((value - low) / (high - low)) * (bottom - 6));
  const path = shown.map(([iteration, value]) => `${x(iteration).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  if (axis) {
    chart.append(
      svg("line", { x1: left, x2: width, y1: bottom, y2: bottom, class: "axis" }),
      svg("text", { x: left - 6, y: y(high) + 4, "text-anchor": "end" }, number(high)),
      svg("text", { x: left, y: height - 4 }, `iteration ${first}`),
      svg("text", { x: width - 6, y: height - 4, "text-anchor": "end" }, String(last)),
    );
    if (high !== low) chart.append(svg("text", { x: left - 6, y: y(low) + 2, "text-anchor": "end" }, number(low)));
  }
  const end = shown.at(-1);
  chart.append(
    svg("polyline", { points: path, class: "line" }),
    svg("circle", { cx: x(end[0]), cy: y(end[1]), r: 2.5, class: "dot" }),
    ...rings.map(([iteration, value]) => {
      const title = svg("title", {}, `${marksLabel} ${number(value, 4)} after iteration ${iteration}`);
      return svg("circle", { cx: x(iteration), cy: y(value), r: 3.5, class: "ring" }, title);
    }),
  );
  return chart;
}

function describe(points, label) {
  if (points.length === 0) return `${label}: nothing measured yet`;
  const [first, last] = [points[0], points.at(-1)];
  return `${label}: ${number(first[1])} at iteration ${first[0]}, ${number(last[1])} at iteration ${last[0]}`;
}
