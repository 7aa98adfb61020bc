// One sample: prompt, response with coloured tokens, the other responses to its prompt.

/** Show a sample in the detail of the list that it belongs to. */
function showSample(list, s, tokens) {
  const facts = [
    s.run.name,
    `step ${s.step}`,
    `reward ${format(s.reward)}`,
    s.source && `source ${s.source}`,
    s.finish && `finish ${s.finish}`,
    s.tokens != null && `${s.tokens} tokens`,
  ];
  const conversation = s.tree && chosenView(list, s, tokens) === "text";
  const other = Object.entries(s.other),
    short = other.filter(([, v]) => v.length <= 40),
    long = other.filter(([, v]) => v.length > 40);
  facts.push(...short.map(([k, v]) => `${k} ${v}`));
  const back = () => {
    list.node.classList.remove("reading");
    list.list.focus();
  };
  const parts = [
    el(
      "div",
      { class: "detail-head" },
      el("button", { type: "button", class: "small back", onclick: back }, "\u2190 list"),
      tag(s.outcome),
      facts.filter(Boolean).map((fact) => el("span", { class: "fact" }, fact)),
    ),
    siblingsOf(list, s),
    long.length > 0 &&
      el("details", { class: "other" }, el("summary", {}, long.map(([k]) => k).join(", ")), turnsOf(long)),
    ...(conversation ? [] : [el("h3", {}, "Prompt"), turnsOf(s.prompt)]),
    responseOf(list, s, tokens),
  ];
  list.detail.replaceChildren(...parts.filter(Boolean));
  list.detail.scrollTop = 0;
}

/** Return buttons to the other responses to the same prompt of the step. */
function siblingsOf(list, s) {
  const group = list.groups.get(s.key);
  return group.length < 2
    ? null
    : el(
        "div",
        { class: "group", role: "group", "aria-label": "Responses to this prompt" },
        el("span", {}, "Responses to this prompt:"),
        group.map((other, i) =>
          el(
            "button",
            {
              type: "button",
              class: "small",
              "aria-pressed": other === s,
              onclick: () => list.open(other),
            },
            `${i + 1}: ${format(other.reward)}`,
          ),
        ),
      );
}

/** Return what is shown of a response: a colouring of its tokens, or "text", of a conversation its tree. */
function chosenView(list, s, tokens) {
  const names = colouringsOf(tokens);
  if (names.includes(list.colouring)) return list.colouring;
  return list.colouring === "text" || s.tree ? "text" : (names[0] ?? "text");
}

/** Return the response, its tokens coloured by what was chosen, where it has their values. */
function responseOf(list, s, tokens) {
  const names = colouringsOf(tokens),
    chosen = chosenView(list, s, tokens);
  const pick = (name) => () => {
    list.colouring = name;
    remember("colouring", name);
    const top = list.detail.scrollTop;
    showSample(list, s, tokens);
    list.detail.scrollTop = top;
    byId(`by-${name}`)?.focus();
  };
  const button = (name, label) =>
    el(
      "button",
      {
        type: "button",
        class: "small",
        id: `by-${name}`,
        "aria-pressed": name === chosen,
        onclick: pick(name),
      },
      label,
    );
  return el(
    "section",
    {},
    el(
      "div",
      { class: "card-head" },
      el("h3", {}, s.tree && chosen === "text" ? "Conversation" : "Response"),
      names.length > 0 &&
        el(
          "div",
          { class: "choices", role: "group", "aria-label": "Colour tokens by" },
          button("text", s.tree ? "conversation" : "text"),
          names.map((name) => button(name, COLOURINGS[name].label)),
        ),
    ),
    chosen !== "text"
      ? tokenView(tokens, chosen, s.tokens)
      : s.tree
        ? conversationTree(s, tokens)
        : turnsOf(s.response),
  );
}

/** Return messages with their roles. */
function turnsOf(chat) {
  return el(
    "div",
    {},
    chat.map(([role, content]) =>
      el(
        "div",
        { class: `turn ${["system", "user", "assistant", "tool"].includes(role) ? role : "other"}` },
        el("div", { class: "role" }, role),
        content.trim()
          ? el("div", { class: "content" }, marked(content))
          : el("div", { class: "content nothing" }, nothing(content)),
      ),
    ),
  );
}
