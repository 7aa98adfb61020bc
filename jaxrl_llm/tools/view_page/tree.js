// A conversation as a tree: what the policy read and wrote, its tool calls, rewards and trained tokens.

const counted = (count, name) => `${count} ${name}${count === 1 ? "" : "s"}`;

/** Return the turns as a list; branches and further conversations are lists within it. */
function conversationTree(s, tokens) {
  const turns = s.tree.map((turn, number) => ({ ...turn, number })),
    prompt = turns[0].tokens?.[0] ?? 0,
    textOf = tokens && ((spans) => spanText(spans, prompt, tokens.text));
  const chain = (first, label) => {
    const items = [];
    for (let turn = first; turn; turn = turns.find((t) => t.after === turn.number && t.under == null)) {
      const branches = turns.filter((t) => t.under === turn.number);
      items.push(el("li", {}, turnNode(turn, textOf), branches.map((branch) => branchNode(branch, chain))));
    }
    return el("ol", { class: "tree", "aria-label": label }, items);
  };
  const keys = (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!move || event.target.tagName !== "SUMMARY" || event.altKey || event.metaKey || event.ctrlKey) return;
    const heads = [...event.currentTarget.querySelectorAll("summary")].filter((e) => e.offsetParent);
    event.preventDefault();
    heads[heads.indexOf(event.target) + move]?.focus();
  };
  return el("div", { onkeydown: keys }, chain(turns[0], "Conversation"));
}

/** Return a conversation that branches off, or that begins beside the first one. */
function branchNode(first, chain) {
  const label =
    first.after < 0
      ? "Another conversation begins (a sub-agent, an edited history)"
      : `Branch: turn ${first.after + 1} is continued in another way`;
  return el("div", { class: "branch" }, el("div", { class: "role" }, label), chain(first, label));
}

/** Return one turn, with what the policy read since the turn before. */
function turnNode(turn, textOf) {
  const [start, end] = turn.tokens ?? [0, 0],
    context = turn.read.reduce((sum, [a, b]) => sum + b - a, 0);
  const facts = [
    turn.after >= 0 && turn.after !== turn.number - 1 && `continues turn ${turn.after + 1}`,
    turn.tokens && `${counted(end - start, "token")} after ${context}`,
    turn.rewritten && "history rewritten",
    turn.reward != null && `reward ${format(turn.reward)}`,
  ];
  const trained = turn.trained == null ? "" : turn.trained > 0 ? " (trained)" : " (not trained on)";
  const content = turn.text?.[1] ?? textOf?.([[start, end]]) ?? "";
  return el(
    "details",
    { open: true },
    el(
      "summary",
      {},
      el("strong", {}, `Turn ${turn.number + 1}`),
      trainedTag(turn),
      facts.filter(Boolean).map((fact) => el("span", { class: "fact" }, fact)),
    ),
    turn.tools.length > 0 &&
      el(
        "details",
        { class: "other" },
        el("summary", {}, counted(turn.tools.length, "tool")),
        turnsOf(turn.tools.map((tool) => ["tool schema", tool])),
      ),
    turnsOf(turn.inputs),
    el(
      "div",
      { class: `turn assistant${turn.trained === 0 ? " masked" : ""}` },
      el("div", { class: "role" }, `assistant${trained}`),
      content.trim()
        ? el("div", { class: "content" }, marked(content))
        : el("div", { class: "content nothing" }, nothing(content)),
      turn.calls.map(callNode),
    ),
    textOf && contextNode(turn.read, textOf, context),
  );
}

/** Return whether a turn is in the loss, as a mark with words. */
function trainedTag(turn) {
  if (turn.trained == null || !turn.tokens) return null;
  const total = turn.tokens[1] - turn.tokens[0];
  return turn.trained > 0
    ? el("span", { class: "tag correct" }, `\u2713 trained: ${turn.trained} of ${counted(total, "token")}`)
    : el("span", { class: "tag other" }, "\u2717 not trained on");
}

/** Return a tool call with its arguments and its answer. */
function callNode(call) {
  return el(
    "div",
    { class: "call" },
    el("div", { class: "role" }, call.error ? "invalid tool call" : "tool call"),
    el("div", { class: "content" }, el("strong", {}, marked(call.name))),
    call.arguments.length > 0 &&
      el(
        "dl",
        {},
        call.arguments.map(([name, value]) => [
          el("dt", {}, marked(name)),
          el("dd", { class: "content" }, marked(value)),
        ]),
      ),
    call.error && el("div", { class: "content nothing" }, marked(call.error)),
    call.answer != null && turnsOf([["tool", call.answer]]),
  );
}

/** Return the text of tokens, which are numbered from the prompt's first one. */
function spanText(spans, prompt, texts) {
  const missing = (count, what) => (count > 0 ? `\u27e8${count} tokens ${what}\u27e9` : "");
  return spans
    .map(([a, b]) => {
      const start = Math.max(a - prompt, 0),
        end = Math.max(b - prompt, 0),
        known = Math.min(end, texts.length);
      return (
        missing(Math.min(b, prompt) - a, "of the prompt") +
        texts.slice(start, known).join("") +
        missing(end - Math.max(start, known), "without a text: --log.sample_tokens")
      );
    })
    .join("");
}

/** Return the context of a turn, made when it is opened. */
function contextNode(read, textOf, count) {
  const body = el("div", { class: "content" });
  const open = () => {
    if (!body.firstChild) body.append(marked(textOf(read)));
  };
  return el(
    "details",
    { class: "other", ontoggle: open },
    el("summary", {}, `${counted(count, "token")} that the policy read before this turn`),
    body,
  );
}
