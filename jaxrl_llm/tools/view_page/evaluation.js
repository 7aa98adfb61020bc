// Evaluation: first, best and last values of eval/ metrics by data source, and their curves.

const HIGHER_IS_BETTER = /^((pass|maj)@|accuracy|reward|score|win_rate|margin)/;
const LOWER_IS_BETTER = /loss|perplexity|divergence|^kl/;

/** Return [metric, data source] of eval/METRIC/SOURCE, where there is eval/METRIC; the source "" is all of them. */
function evalParts(name, names) {
  const parts = name.split("/");
  for (let i = 2; i < parts.length; i++) {
    if (names.includes(parts.slice(0, i).join("/")))
      return [parts.slice(1, i).join("/"), parts.slice(i).join("/")];
  }
  return [parts.slice(1).join("/"), ""];
}

function evaluationView() {
  const names = metricNames().filter((name) => name.startsWith("eval/"));
  if (!names.length) {
    const node = el(
      "p",
      { class: "empty" },
      "These runs have no evaluation: it is off (--eval.every 0), or there is no held-out data yet.",
    );
    return { node, update: () => {} };
  }
  const sources = [...new Set(names.map((name) => evalParts(name, names)[1]))].sort();
  const plots = new Set(),
    tables = el("div", {});
  const fill = () => tables.replaceChildren(...sources.map((source) => sourceTable(source, names)));
  fill();
  const grid = el(
    "div",
    { class: "grid" },
    names.map((name) => plotCard(name, plots)),
  );
  return {
    node: el("div", {}, tables, el("h2", {}, "Over the run"), grid),
    update: () => {
      fill();
      plots.forEach((p) => p.draw());
    },
  };
}

/** Return the table of one data source: a row for each metric and run. */
function sourceTable(source, names) {
  const rows = names
    .filter((name) => evalParts(name, names)[1] === source)
    .flatMap((name) => {
      const shown = visibleRuns().filter((run) => lastOf(run, name));
      return shown.map((run, i) => evalRow(name, names, run, i === 0 && shown.length));
    });
  const heads = ["Metric", "Run", "First", "Best", "Last"];
  return el(
    "section",
    { class: "source" },
    el("h2", {}, source || "All held-out data"),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { class: "eval" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            heads.map((h, i) => el("th", { scope: "col", class: i > 1 ? "number" : null }, h)),
            el("td", {}),
          ),
        ),
        el("tbody", {}, rows),
      ),
    ),
  );
}

function evalRow(name, names, run, span) {
  const [metric] = evalParts(name, names),
    points = run.metrics[name]
      .map((value, i) => ({ value, step: run.steps[i] }))
      .filter((p) => p.value != null);
  const sign = HIGHER_IS_BETTER.test(metric) ? 1 : LOWER_IS_BETTER.test(metric) ? -1 : 0;
  const best = points.reduce((a, b) => (sign * (b.value - a.value) > 0 ? b : a)),
    last = points[points.length - 1];
  const isRate = points.every((p) => p.value >= 0 && p.value <= 1) && !/loss/.test(metric);
  const cell = (p) =>
    el("td", { class: "number" }, format(p.value), el("small", {}, ` step ${format(p.step)}`));
  return el(
    "tr",
    {},
    span ? el("th", { scope: "rowgroup", rowspan: span }, metric) : null,
    el("td", { class: "run-name" }, swatch(run), run.name),
    cell(points[0]),
    sign ? cell(best) : el("td", { class: "number" }, format(null)),
    cell(last),
    el("td", { class: "meter-cell" }, isRate && meter(last.value, run)),
  );
}

function meter(value, run) {
  const fill = el("span", { class: `run-${run.color}` });
  fill.style.width = `${100 * value}%`;
  return el("span", { class: "meter", "aria-hidden": "true" }, fill);
}
