// Elements, formats and data. Every text of a run is set as text (createTextNode, setAttribute), never as HTML.

/** Return an element; `on...` attributes are listeners, false and null ones are left out. */
function make(document_, tag, attributes, children) {
  const node = document_(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-") && value != null) node.setAttribute(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(2).filter((child) => child != null && child !== false));
  return node;
}
const el = (tag, attributes = {}, ...children) =>
  make((name) => document.createElement(name), tag, attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  make((name) => document.createElementNS("http://www.w3.org/2000/svg", name), tag, attributes, children);
const byId = (id) => document.getElementById(id);

/** Announce a text to screen readers. */
const announce = (text) => {
  byId("live").textContent = text;
};

/** Return a number with 4 significant digits. */
function format(x) {
  if (x == null || Number.isNaN(x)) return "\u2013";
  if (Number.isInteger(x) && Math.abs(x) < 1e9) return x.toLocaleString("en");
  const size = Math.abs(x);
  if (size >= 1e-3 && size < 1e5) return String(+x.toPrecision(4));
  return x.toExponential(2).replace(/\.?0*e\+?/, "e");
}

const UNSEEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u200b\u202a-\u202e\u2060\ufeff]|\r(?!\n)/g;

/** Return a text with marks for characters that are not seen, or that turn the direction of others. */
const marked = (text) =>
  text.replace(UNSEEN, (c) => `\u27e8U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`);

/** Return seconds as text: 42 s, 3:07, 2:03:07. */
function duration(seconds) {
  if (seconds < 60) return `${+seconds.toPrecision(2)} s`;
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds) % 60];
  if (!parts[0]) parts.shift();
  return parts.map((part, i) => (i ? String(part).padStart(2, "0") : part)).join(":");
}

/** Return the JSON of one of the page's data elements, whose text is then dropped. */
async function unpack(id) {
  const element = byId(id);
  if (!element) return null;
  const text = atob(element.textContent);
  element.remove();
  const bytes = Uint8Array.from(text, (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

/** Return a function that runs `action` once, `wait` milliseconds after its last call. */
function debounced(action, wait) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, wait);
  };
}

/** Return a value that the browser keeps for this page, or the default where it keeps none. */
function recall(key, initial) {
  try {
    return JSON.parse(localStorage.getItem(`jaxrl_llm.${key}`)) ?? initial;
  } catch {
    return initial;
  }
}
function remember(key, value) {
  try {
    localStorage.setItem(`jaxrl_llm.${key}`, JSON.stringify(value));
  } catch {
    /* not kept */
  }
}

/** Return a labelled form control. */
const labelled = (text, control) => el("label", { class: "field" }, el("span", {}, text), control);
const option = (value, text = value) => el("option", { value }, text);
const swatch = (run) =>
  el("span", { class: `swatch run-${run.color}${run.dash ? " dashed" : ""}`, "aria-hidden": "true" });

/** Runs of the page; `visible` is set by the legend. */
const runs = [];
const visibleRuns = () => runs.filter((run) => run.visible);

/** Read the runs and derive what all views use: seconds since the start, rows and length of the SFT warm-up. */
async function loadRuns() {
  for (const [index, data] of (await unpack("runs")).entries()) {
    let total = 0;
    const seconds = data.steps.map((_, i) => (total += data.metrics["time/step"]?.[i] ?? 0));
    const warm = data.kinds.map((kind) => kind === "warm_start"),
      last = warm.lastIndexOf(true);
    runs.push({
      ...data,
      index,
      seconds,
      warm,
      warmUp: last < 0 ? { steps: 0, seconds: 0 } : { steps: data.steps[last], seconds: seconds[last] },
      color: index % 8,
      dash: Math.floor(index / 8),
      visible: true,
    });
  }
}

/** Return the index and value of the last number of a metric, or null. */
function lastOf(run, metric) {
  const values = run.metrics[metric] ?? [];
  for (let i = values.length - 1; i >= 0; i--) if (values[i] != null) return { i, value: values[i] };
  return null;
}
