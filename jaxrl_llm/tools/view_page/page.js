// The page: tabs, legend of the runs, theme, keys.

const TABS = { curves: "Curves", evaluation: "Evaluation", samples: "Samples", config: "Config" };
const views = {};
let current = "curves";

function showTab(name, focus = false) {
  current = name;
  for (const tab of byId("tabs").children) {
    const chosen = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen && focus) tab.focus();
  }
  for (const key of Object.keys(TABS)) byId(`panel-${key}`).hidden = key !== name;
  views[name] ??= makeView(name);
  views[name].update();
  if (!location.hash.startsWith(`#${name}`)) history.replaceState(null, "", `#${name}`);
}

function makeView(name) {
  const view_ = { curves: curvesView, evaluation: evaluationView, samples: samplesView, config: configView }[
    name
  ]();
  byId(`panel-${name}`).append(view_.node);
  return view_;
}

let samples = null;
function samplesView() {
  samples = new Samples();
  const loaded = samples.load().catch(fail);
  return { node: samples.node, update: () => samples.update(), loaded };
}

function makeTabs() {
  const names = Object.keys(TABS);
  byId("tabs").append(
    ...names.map((name) =>
      el(
        "button",
        {
          type: "button",
          role: "tab",
          id: `tab-${name}`,
          "aria-controls": `panel-${name}`,
          onclick: () => showTab(name),
        },
        TABS[name],
      ),
    ),
  );
  byId("tabs").addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) showTab(names[(names.indexOf(current) + move + names.length) % names.length], true);
  });
  byId("main").replaceChildren(
    ...names.map((name) =>
      el("div", { role: "tabpanel", id: `panel-${name}`, "aria-labelledby": `tab-${name}`, hidden: true }),
    ),
  );
}

/** Make a button for each run that shows or hides it in all views. */
function makeLegend() {
  const toggle = (run) => (event) => {
    run.visible = !run.visible;
    event.currentTarget.setAttribute("aria-pressed", run.visible);
    views[current].update();
  };
  byId("legend").append(
    ...runs.map((run) =>
      el(
        "button",
        { type: "button", class: "run", title: run.path, "aria-pressed": true, onclick: toggle(run) },
        swatch(run),
        run.name,
      ),
    ),
  );
}

function makeTheme() {
  const button = byId("theme"),
    themes = ["auto", "light", "dark"];
  const set = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = { auto: "\u25d0", light: "\u2600", dark: "\u263e" }[theme];
    button.title = `Theme: ${theme}`;
    button.setAttribute("aria-label", `Theme: ${theme}`);
    remember("theme", theme);
  };
  let theme = themes.includes(recall("theme", "auto")) ? recall("theme", "auto") : "auto";
  set(theme);
  button.addEventListener("click", () => set((theme = themes[(themes.indexOf(theme) + 1) % 3])));
}

/** Keys of the page: 1 to 4 are the tabs, / is the search of the tab. */
function makeKeys() {
  document.addEventListener("keydown", (event) => {
    if (
      event.ctrlKey ||
      event.metaKey ||
      event.altKey ||
      /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)
    )
      return;
    const tab = Object.keys(TABS)[+event.key - 1];
    if (tab) showTab(tab, true);
    const field =
      event.key === "/" && byId({ curves: "find-metric", samples: "f-query", config: "find-key" }[current]);
    if (field) {
      event.preventDefault();
      field.focus();
    }
  });
}

function fail(error) {
  const reason =
    typeof DecompressionStream === "undefined"
      ? "this browser is too old: it has no DecompressionStream"
      : String(error);
  byId("main").prepend(
    el("p", { class: "problem", role: "alert" }, `The data of this page cannot be read: ${reason}.`),
  );
}

async function start() {
  makeTheme();
  await loadRuns();
  initView();
  makeTabs();
  makeLegend();
  makeKeys();
  const [name, run, index] = location.hash.slice(1).split("/");
  showTab(name in TABS ? name : "curves");
  document.documentElement.dataset.ready = "true";
  if (name === "samples" && run != null) {
    await views.samples.loaded;
    const sample = samples.all.find((s) => s.run.index === +run && s.index === +index);
    if (sample) samples.open(sample, true);
  }
}
start().catch(fail);
