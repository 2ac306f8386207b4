// Building the page. Everything that comes from the service goes in as text, never as HTML.

/** An element with attributes, and children that are nodes or text. */
export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Set text only when it differs, so that a reader's selection and a screen reader are left in peace. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, String(Math.trunc(value)).length) });
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const [scale, unit] = value >= 1 ? [1, "s"] : value >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${number(value * scale)} ${unit}`;
}

export function bytes(value) {
  let amount = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (amount < 1024 || unit === "GiB") return `${number(amount)} ${unit}`;
    amount /= 1024;
  }
  return "";
}

/** Date and time to the minute, as the reader's language writes them. */
export function moment(iso) {
  return new Date(iso).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

export function clock(iso) {
  return new Date(iso).toLocaleTimeString([], { hour12: false });
}
