// Tokens of a response, coloured by advantage, log-prob or mismatch.

const COLOURINGS = {
  advantages: {
    label: "advantage",
    scale: (values) => Math.max(1, ...values.map((v) => Math.abs(v ?? 0))),
    tone: (v, top) => [v < 0 ? "negative" : "positive", Math.abs(v) / top],
    legend: (top) => [-top, -top / 2, 0, top / 2, top],
  },
  logprobs: {
    label: "log-prob",
    scale: () => 6,
    tone: (v, top) => ["surprise", Math.min(-v / top, 1)],
    legend: (top) => [0, -top / 4, -top / 2, -top],
  },
  mismatch: {
    label: "mismatch",
    scale: () => 1,
    tone: (v) => ["negative", v === 0 ? 0 : Math.min(Math.max((Math.log10(Math.abs(v)) + 7) / 7, 0.05), 1)],
    legend: () => [0, 1e-6, 1e-4, 1e-2, 1],
  },
};

/** Return the value of token i: an array has one for each token, a number stands for all. */
const valueAt = (column, i) => (Array.isArray(column) ? column[i] : column) ?? null;

/** Return the names of the colourings that a response has values for. */
function colouringsOf(tokens) {
  if (!tokens) return [];
  return Object.keys(COLOURINGS).filter((name) => tokens.text.some((_, i) => shade(tokens, name, i) != null));
}

/** Return the number that colours token i; log-probs of responses without an update are the rollout's. */
function shade(tokens, name, i) {
  const own = valueAt(tokens[name], i);
  return own ?? (name === "logprobs" ? valueAt(tokens.rollout_logprobs, i) : null);
}

function paint(node, [tone, amount]) {
  node.style.backgroundColor = `color-mix(in srgb, var(--${tone}) ${Math.round(amount * 55)}%, transparent)`;
}

/** Return the response as coloured tokens in blocks of the policy's and of the environment's. */
function tokenView(tokens, name, total) {
  const colouring = COLOURINGS[name],
    values = tokens.text.map((_, i) => shade(tokens, name, i));
  const top = colouring.scale(values),
    readout = el("p", { class: "readout" }, "Point at a token, or use the arrow keys.");
  const nodes = [],
    blocks = [];
  let block = null;
  tokens.text.forEach((text, i) => {
    const byPolicy = valueAt(tokens.rollout_logprobs, i) != null,
      trained = valueAt(tokens.trained, i) === 1;
    if (!block || block.byPolicy !== byPolicy) {
      block = { byPolicy, body: el("div", { class: "token-text" }) };
      blocks.push(
        el(
          "div",
          { class: `turn ${byPolicy ? "assistant" : "tool"}` },
          el("div", { class: "role" }, byPolicy ? "assistant" : "environment (not trained on)"),
          block.body,
        ),
      );
    }
    const token = el(
      "span",
      { class: `token${trained ? "" : " untrained"}`, "data-i": i },
      visibleText(text),
    );
    if (values[i] != null) paint(token, colouring.tone(values[i], top));
    nodes.push(token);
    block.body.append(token);
    if (text.endsWith("\n")) block.body.append(el("br"));
  });
  let current = -1;
  const select = (i, say) => {
    nodes[current]?.classList.remove("current");
    current = i;
    nodes[i].classList.add("current");
    readout.textContent = describeToken(tokens, i);
    if (say) {
      announce(readout.textContent);
      nodes[i].scrollIntoView({ block: "nearest" });
    }
  };
  const hover = (event) => {
    const i = event.target.dataset?.i;
    if (i != null) select(+i, false);
  };
  const key = (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!move || event.altKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    select(Math.min(Math.max(current + move, 0), nodes.length - 1), true);
  };
  const body = el(
    "div",
    {
      class: "tokens",
      tabindex: 0,
      role: "group",
      "aria-label": `Tokens by ${colouring.label}; arrow keys read values`,
      onpointerover: hover,
      onkeydown: key,
    },
    blocks,
  );
  const more =
    total > tokens.text.length
      ? el(
          "p",
          { class: "empty" },
          `The first ${tokens.text.length} of ${total} tokens have values (--log.sample_tokens).`,
        )
      : null;
  return el("div", {}, el("div", { class: "token-head" }, tokenLegend(colouring, top), readout), body, more);
}

function tokenLegend(colouring, top) {
  const marks = colouring.legend(top).map((value) => {
    const mark = el("span", { class: "mark" }, format(value));
    paint(mark, colouring.tone(value, top));
    return mark;
  });
  return el(
    "div",
    { class: "token-legend" },
    el("span", {}, `${colouring.label}:`),
    marks,
    el("span", { class: "untrained" }, "not trained on"),
  );
}

function describeToken(tokens, i) {
  const part = (label, value) => (value == null ? [] : [`${label} ${format(value)}`]);
  const rollout = valueAt(tokens.rollout_logprobs, i);
  return [
    `${i + 1}: ${JSON.stringify(tokens.text[i])}`,
    ...part("advantage", valueAt(tokens.advantages, i)),
    ...part("log-prob", valueAt(tokens.logprobs, i)),
    ...part("of the rollout", rollout),
    ...part("mismatch", valueAt(tokens.mismatch, i)),
    ...(rollout != null && valueAt(tokens.trained, i) !== 1 ? ["not trained on"] : []),
  ].join("   ");
}

/** Return the text with marks for what cannot be seen. */
function visibleText(text) {
  if (text === "") return "\u00b7";
  return marked(text)
    .replace(/\n/g, "\u21b5")
    .replace(/\t/g, "\u2192")
    .replace(/^ +$/, (blank) => "\u2423".repeat(blank.length));
}
