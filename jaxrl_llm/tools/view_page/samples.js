// Samples: a list that holds the rows on the screen alone, filters, and one sample in detail.

const ROW = 54; // pixels, as in page.css
const OUTCOMES = ["correct", "wrong", "unparsed", "failed"];
const ORDERS = {
  step: ["newest step first", (a, b) => b.step - a.step || a.id - b.id],
  old: ["oldest step first", (a, b) => a.step - b.step || a.id - b.id],
  high: [
    "highest reward first",
    (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || b.step - a.step,
  ],
  low: ["lowest reward first", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity) || b.step - a.step],
  long: ["longest first", (a, b) => (b.tokens ?? 0) - (a.tokens ?? 0)],
};

const NO_FILTER = {
  query: "",
  run: "",
  outcome: "",
  split: "",
  source: "",
  from: null,
  to: null,
  low: null,
  high: null,
  order: "step",
};

/** Return the text of a sample that the search reads, made at its first use. */
function searchText(sample) {
  sample.text ??= [...sample.prompt, ...sample.response]
    .map((m) => m[1])
    .join("\n")
    .toLowerCase();
  return sample.text;
}
/** Return the beginning of the last message in one line, as an element that keeps its direction to itself. */
function oneLine(chat, limit, name) {
  const content = chat[chat.length - 1]?.[1] ?? "";
  const line = content
    .slice(0, 4 * limit)
    .replace(/\s+/g, " ")
    .trim()
    .slice(0, limit);
  return el("bdi", { class: content.trim() ? name : "nothing" }, line ? marked(line) : nothing(content));
}
/** Return what is shown of a text without any letter. */
const nothing = (text) => (text ? "(blank)" : "(empty)");
const tag = (outcome) =>
  outcome && el("span", { class: `tag ${OUTCOMES.includes(outcome) ? outcome : "other"}` }, outcome);

class Samples {
  constructor() {
    Object.assign(this, {
      all: [],
      shown: [],
      selected: null,
      chunks: new Map(),
      groups: new Map(),
      colouring: recall("colouring", null),
    });
    this.filter = { ...NO_FILTER };
    this.count = el("p", { class: "count-line", role: "status", id: "count" }, "Loading ...");
    this.inner = el("div", { class: "rows" });
    this.list = el(
      "div",
      {
        class: "list",
        id: "list",
        role: "listbox",
        tabindex: 0,
        "aria-label": "Samples",
        onscroll: () => this.rows(),
        onkeydown: (e) => this.key(e),
      },
      this.inner,
    );
    this.none = el("p", { class: "empty no-rows", hidden: true }, "No sample passes the filters.");
    this.detail = el(
      "article",
      { class: "detail", id: "detail", tabindex: -1 },
      el("p", { class: "empty" }, "Select a sample."),
    );
    this.form = el("div", {});
    this.split = el(
      "div",
      { class: "split" },
      el("div", { class: "side" }, this.count, this.none, this.list),
      this.detail,
    );
    this.node = el("div", {}, this.form, this.split);
    new ResizeObserver(() => this.rows()).observe(this.list);
  }

  async load() {
    for (const run of runs) {
      for (const [index, sample] of ((await unpack(`samples-${run.index}`)) ?? []).entries()) {
        const key = `${run.index}|${sample.split}|${sample.step}|${sample.prompt.map((m) => m[1]).join("\n")}`;
        const entry = { ...sample, run, index, id: this.all.length, key };
        this.all.push(entry);
        if (!this.groups.has(key)) this.groups.set(key, []);
        this.groups.get(key).push(entry);
      }
    }
    if (!this.all.length) {
      this.node.replaceChildren(
        el(
          "p",
          { class: "empty" },
          "These runs have no samples: they learned from a dataset, or --log.samples is 0.",
        ),
      );
      return;
    }
    this.form.replaceChildren(this.controls());
    this.update();
    if (
      this.list.offsetParent &&
      getComputedStyle(this.detail).display !== "none" &&
      !location.hash.startsWith("#samples/")
    )
      this.open(this.shown[0]);
  }

  controls() {
    const values = (name) => [...new Set(this.all.map((s) => s[name]).filter((v) => v !== ""))].sort();
    const set = (key) => (e) => {
      this.filter[key] = e.target.value;
      soon();
    };
    const soon = debounced(() => this.update(), 120);
    const choice = (text, key, choices) =>
      labelled(text, el("select", { id: `f-${key}`, onchange: set(key) }, choices));
    const number = (key, name) =>
      el("input", {
        type: "number",
        step: "any",
        id: `f-${key}`,
        "aria-label": name,
        oninput: (e) => {
          this.filter[key] = e.target.value === "" ? null : +e.target.value;
          soon();
        },
      });
    const between = (text, a, b) =>
      el(
        "div",
        { class: "field" },
        el("span", {}, text),
        el("span", { class: "between" }, number(a, `${text} from`), "\u2013", number(b, `${text} to`)),
      );
    const among = (text, key) => {
      const names = values(key);
      return names.length > 1 && choice(text, key, [option("", "all"), ...names.map((name) => option(name))]);
    };
    return el(
      "div",
      { class: "tools" },
      labelled(
        "Search",
        el("input", {
          type: "search",
          id: "f-query",
          placeholder: "text or /expression/",
          oninput: set("query"),
        }),
      ),
      runs.length > 1 &&
        choice("Run", "run", [option("", "all"), ...runs.map((run) => option(run.index, run.name))]),
      among("Split", "split"),
      among("Data source", "source"),
      choice("Outcome", "outcome", [option("", "all"), ...values("outcome").map((o) => option(o))]),
      between("Step", "from", "to"),
      between("Reward", "low", "high"),
      choice(
        "Order",
        "order",
        Object.entries(ORDERS).map(([key, [text]]) => option(key, text)),
      ),
      el("button", { type: "button", class: "clear", onclick: () => this.clear() }, "Clear"),
    );
  }

  /** Reset all filters. */
  clear() {
    Object.assign(this.filter, NO_FILTER);
    this.form.replaceChildren(this.controls());
    byId("f-query").focus();
    this.update();
  }

  /** Return a function that tells whether a text has what is searched for. */
  matcher() {
    const query = this.filter.query.trim(),
      expression = /^\/(.+)\/$/.exec(query);
    byId("f-query")?.removeAttribute("aria-invalid");
    if (!query) return () => true;
    if (!expression) return (text) => text.includes(query.toLowerCase());
    try {
      const pattern = new RegExp(expression[1], "i");
      return (text) => pattern.test(text);
    } catch {
      byId("f-query")?.setAttribute("aria-invalid", "true");
      return () => false;
    }
  }

  /** Apply the filters, and show the list from its top. */
  update() {
    if (!this.all.length) return;
    const f = this.filter,
      matches = this.matcher();
    this.shown = this.all.filter(
      (s) =>
        s.run.visible &&
        (f.run === "" || s.run.index === +f.run) &&
        (f.outcome === "" || s.outcome === f.outcome) &&
        (f.split === "" || s.split === f.split) &&
        (f.source === "" || s.source === f.source) &&
        (f.from == null || s.step >= f.from) &&
        (f.to == null || s.step <= f.to) &&
        (f.low == null || (s.reward ?? -Infinity) >= f.low) &&
        (f.high == null || (s.reward ?? Infinity) <= f.high) &&
        matches(searchText(s)),
    );
    this.shown.sort(ORDERS[f.order][1]);
    this.count.textContent = `${this.shown.length.toLocaleString("en")} of ${this.all.length.toLocaleString("en")} samples`;
    this.list.scrollTop = 0;
    this.none.hidden = this.shown.length > 0;
    this.inner.style.height = `${this.shown.length * ROW}px`;
    this.first = null;
    this.rows();
  }

  /** Make the rows on the screen, and some beyond its edges. */
  rows() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 8);
    const count = Math.ceil(this.list.clientHeight / ROW) + 16;
    if (first === this.first && count === this.made) return;
    [this.first, this.made] = [first, count];
    this.inner.replaceChildren(
      ...this.shown.slice(first, first + count).map((s, i) => this.row(s, first + i)),
    );
  }

  row(s, position) {
    const chosen = s === this.selected;
    const node = el(
      "div",
      {
        class: `row${chosen ? " chosen" : ""}`,
        role: "option",
        id: `row-${s.id}`,
        "aria-selected": chosen,
        "aria-posinset": position + 1,
        "aria-setsize": this.shown.length,
        onclick: () => this.open(s, true),
      },
      el(
        "div",
        { class: "row-head" },
        runs.length > 1 && swatch(s.run),
        el("span", {}, `step ${s.step}`),
        s.split !== "train" && el("span", { class: "tag other" }, s.split),
        tag(s.outcome),
        el("span", { class: "reward" }, s.reward == null ? "no reward" : format(s.reward)),
      ),
      el(
        "div",
        { class: "snippet" },
        oneLine(s.prompt, 60, "question"),
        " \u2192 ",
        oneLine(s.response, 140, "answer"),
      ),
    );
    node.style.top = `${position * ROW}px`;
    return node;
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.list.clientHeight / ROW) - 1);
    const move = {
      ArrowDown: 1,
      j: 1,
      ArrowUp: -1,
      k: -1,
      PageDown: page,
      PageUp: -page,
      Home: -Infinity,
      End: Infinity,
    }[event.key];
    if (event.key === "Enter" && this.selected) {
      this.node.classList.add("reading");
      this.detail.focus();
    }
    if (!move || event.ctrlKey || event.metaKey || event.altKey || !this.shown.length) return;
    event.preventDefault();
    const now = this.shown.indexOf(this.selected);
    this.open(this.shown[Math.min(Math.max(now + move, 0), this.shown.length - 1)]);
  }

  /** Open a sample; `pointed` with the pointer: on a narrow screen the detail then takes the place of the list. */
  async open(s, pointed = false) {
    this.selected = s;
    const position = this.shown.indexOf(s),
      top = position * ROW,
      { list } = this;
    if (position >= 0 && top < list.scrollTop) list.scrollTop = top;
    else if (position >= 0 && top + ROW > list.scrollTop + list.clientHeight)
      list.scrollTop = top + ROW - list.clientHeight;
    this.first = null;
    this.rows();
    list.setAttribute("aria-activedescendant", `row-${s.id}`);
    history.replaceState(null, "", `#samples/${s.run.index}/${s.index}`);
    if (pointed) this.node.classList.add("reading");
    const tokens = s.per_token ? await this.tokensOf(s) : null;
    if (this.selected === s) showSample(this, s, tokens);
    if (pointed && getComputedStyle(this.detail).position === "static" && list.offsetParent === null)
      this.detail.scrollIntoView();
  }

  /** Return the values of a sample's tokens; their chunk is decompressed once. */
  async tokensOf(s) {
    const name = `tokens-${s.run.index}-${Math.floor(s.index / s.run.chunk)}`;
    if (!this.chunks.has(name)) this.chunks.set(name, unpack(name));
    return (await this.chunks.get(name))[s.index % s.run.chunk];
  }
}
