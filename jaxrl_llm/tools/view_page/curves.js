// Curves: a table of the runs, then plots of the metrics in sections by the first part of their names.

const MAIN = [
  "eval/pass@1",
  "eval/accuracy",
  "eval/win_rate",
  "eval/score",
  "eval/loss",
  "reward/mean",
  "accuracy",
  "loss",
  "kl",
  "entropy",
  "response_tokens/mean",
  "grad_norm",
  "mismatch/mean_abs",
  "tokens_per_second",
];
const view = { axis: "step", smoothing: 0.6, log: false, warmUp: false, query: "" };

/** Choose the view that the runs can be compared in: without SFT warm-ups, which may differ in length. */
function initView() {
  view.warmUp = !runs.some((run) => run.warm.includes(false));
  if (new Set(runs.map((run) => run.warmUp.steps)).size > 1) view.axis = "after";
}

/** Return the names of the metrics of all runs, sorted. */
const metricNames = () => [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].sort();

/** Return the metrics of the first section: those that were pinned, or the usual ones that the runs have. */
function pinned() {
  const names = metricNames(),
    kept = recall("pinned", null);
  const same = (run) =>
    run.metrics.accuracy?.every((v, i) => v === (run.metrics["reward/mean"]?.[i] ?? null)) ?? true;
  const known = MAIN.filter(
    (name) => names.includes(name) && !(name === "accuracy" && runs.every(same)),
  );
  const isCurve = (name) =>
    runs.some((run) => (run.metrics[name] ?? []).filter((v) => v != null).length > 1);
  const usual = known.some(isCurve) ? known.filter(isCurve) : known; // after the first step all are points
  const own = kept?.filter((name) => names.includes(name));
  return own?.length || kept?.length === 0 ? own : usual;
}

function curvesView() {
  const some = runs.some((run) => run.warm.includes(true) && run.warm.includes(false));
  const plots = new Set(),
    sections = el("div", {});
  const redraw = debounced(() => plots.forEach((plot) => plot.draw()), 10);
  const check = (text, key) =>
    el(
      "label",
      { class: "check" },
      el("input", {
        type: "checkbox",
        onchange: (e) => {
          view[key] = e.target.checked;
          redraw();
        },
      }),
      text,
    );
  const amount = el("output", {}, format(view.smoothing));
  const fill = () => {
    plots.clear();
    sections.replaceChildren(...metricSections(plots));
  };
  const tools = el(
    "div",
    { class: "tools" },
    labelled(
      "Metrics",
      el("input", {
        type: "search",
        id: "find-metric",
        placeholder: "find, such as entropy",
        oninput: (e) => {
          view.query = e.target.value.trim().toLowerCase();
          fill();
        },
      }),
    ),
    labelled(
      "Over",
      el(
        "select",
        {
          id: "axis",
          onchange: (e) => {
            view.axis = e.target.value;
            redraw();
          },
        },
        option("step", "steps"),
        some && option("after", "steps after the SFT warm-up"),
        option("time", "time of training"),
      ),
    ),
    labelled(
      "Smoothing",
      el(
        "span",
        { class: "slider" },
        el("input", {
          type: "range",
          id: "smoothing",
          min: 0,
          max: 0.99,
          step: 0.01,
          value: view.smoothing,
          oninput: (e) => {
            view.smoothing = +e.target.value;
            amount.textContent = format(view.smoothing);
            redraw();
          },
        }),
        amount,
      ),
    ),
    check("log scale", "log"),
    some && check("SFT warm-up", "warmUp"),
  );
  tools.querySelector("#axis").value = view.axis;
  fill();
  return {
    node: el("div", {}, ...noteList(), runTable(), tools, sections),
    update: () => redraw(),
  };
}

/** Return the sections of plots that the query admits; a closed section draws when it is opened. */
function metricSections(plots) {
  const names = metricNames().filter((name) => name.toLowerCase().includes(view.query));
  if (view.query)
    return [
      plotGrid(names, plots),
      !names.length && el("p", { class: "empty" }, "No metric has this in its name."),
    ].filter(Boolean);
  const groups = new Map();
  for (const name of names) {
    const group = name.includes("/") ? name.split("/")[0] : "other";
    groups.set(group, [...(groups.get(group) ?? []), name]);
  }
  const closed = [...groups].map(([group, members]) =>
    el(
      "details",
      {
        class: "section",
        ontoggle: (e) => {
          if (e.target.open && e.target.children.length === 1) e.target.append(plotGrid(members, plots));
        },
      },
      el("summary", {}, group, el("span", { class: "count" }, members.length)),
    ),
  );
  return [plotGrid(pinned(), plots), ...closed];
}

function plotGrid(names, plots) {
  return el(
    "div",
    { class: "grid" },
    names.map((name) => plotCard(name, plots)),
  );
}

function plotCard(name, plots) {
  const plot = new Plot(name, view),
    chosen = pinned().includes(name);
  plots.add(plot);
  const widen = (event) => {
    const wide = card.classList.toggle("wide");
    event.target.setAttribute("aria-pressed", wide);
    plot.height = wide ? 380 : 190;
    plot.draw();
  };
  const pin = (event) => {
    const names = pinned().filter((other) => other !== name);
    if (names.length === pinned().length) names.push(name);
    remember("pinned", names);
    event.target.setAttribute("aria-pressed", names.includes(name));
    announce(`${name} ${names.includes(name) ? "is in" : "left"} the first section`);
  };
  const card = el(
    "section",
    { class: "card" },
    el(
      "div",
      { class: "card-head" },
      el("h3", {}, name),
      el(
        "button",
        {
          type: "button",
          class: "small",
          title: "Show in the first section",
          "aria-pressed": chosen,
          onclick: pin,
        },
        "pin",
      ),
      el(
        "button",
        { type: "button", class: "small", title: "Full width", "aria-pressed": false, onclick: widen },
        "wide",
      ),
    ),
    plot.node,
  );
  return card;
}

function noteList() {
  const notes = runs.flatMap((run) =>
    run.notes.map((note) => el("li", {}, el("b", {}, run.name), `: ${note}`)),
  );
  return notes.length ? [el("ul", { class: "notes" }, notes)] : [];
}

/** Return a table of the runs: algorithm, model, length and the last values of the main metrics. */
function runTable() {
  const names = ["eval/pass@1", "eval/accuracy", "eval/win_rate", "eval/score", "reward/mean", "loss"].filter(
    (name) => runs.some((run) => lastOf(run, name)),
  );
  const model = (run) =>
    (run.config["model.path"] || run.config["model.architecture.family"] || "\u2013").split("/").pop();
  const rows = runs.map((run) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, swatch(run), run.name),
      el("td", {}, run.config["algo.name"] ?? "\u2013"),
      el("td", {}, model(run)),
      el("td", { class: "number" }, format(run.steps[run.steps.length - 1])),
      el("td", { class: "number" }, duration(run.seconds[run.seconds.length - 1])),
      ...names.map((name) => el("td", { class: "number" }, format(lastOf(run, name)?.value))),
    ),
  );
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { class: "runs" },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          ["Run", "Algorithm", "Model"].map((h) => el("th", { scope: "col" }, h)),
          ["Last step", "Time", ...names].map((h) => el("th", { scope: "col", class: "number" }, h)),
        ),
      ),
      el("tbody", {}, rows),
    ),
  );
}
