// Config: what differs between the runs, then all settings.

function configView() {
  const sections = el("div", {}),
    keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  let query = "";
  const fill = () => {
    const shown = visibleRuns().filter((run) => Object.keys(run.config).length);
    const match = (key) =>
      key.toLowerCase().includes(query) ||
      shown.some((run) => (run.config[key] ?? "").toLowerCase().includes(query));
    const differs = (key) => new Set(shown.map((run) => run.config[key])).size > 1;
    const matching = keys.filter((key) => match(key) && shown.some((run) => key in run.config));
    const different = matching.filter(differs),
      same = matching.filter((key) => !differs(key));
    const parts = [];
    if (shown.length > 1)
      parts.push(
        el("h2", {}, "Differences", el("span", { class: "count" }, different.length)),
        different.length
          ? configTable(different, shown)
          : el(
              "p",
              { class: "empty" },
              query ? "No difference has this text." : "The runs have the same settings.",
            ),
      );
    const all = configTable(shown.length > 1 ? same : matching, shown.length > 1 ? shown.slice(0, 1) : shown);
    const open = shown.length < 2 || query !== "";
    parts.push(
      el(
        "details",
        { class: "section", open },
        el(
          "summary",
          {},
          shown.length > 1 ? "The same in all runs" : "Settings",
          el("span", { class: "count" }, shown.length > 1 ? same.length : matching.length),
        ),
        all,
      ),
    );
    sections.replaceChildren(
      ...(keys.length ? parts : [el("p", { class: "empty" }, "These runs have no config.json.")]),
    );
  };
  fill();
  const find = el("input", {
    type: "search",
    id: "find-key",
    placeholder: "key or value",
    oninput: (e) => {
      query = e.target.value.trim().toLowerCase();
      fill();
    },
  });
  return {
    node: el("div", {}, el("div", { class: "tools" }, labelled("Settings", find)), sections),
    update: fill,
  };
}

function configTable(keys, shown) {
  const several = shown.length > 1;
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { class: "config" },
      el(
        "thead",
        { class: several ? null : "hidden" },
        el(
          "tr",
          {},
          el("th", { scope: "col" }, "Key"),
          shown.map((run) => el("th", { scope: "col" }, swatch(run), run.name)),
        ),
      ),
      el(
        "tbody",
        {},
        keys.map((key) =>
          el(
            "tr",
            {},
            el("th", { scope: "row" }, key),
            shown.map((run) =>
              el("td", { class: key in run.config ? null : "absent" }, run.config[key] ?? "absent"),
            ),
          ),
        ),
      ),
    ),
  );
}
