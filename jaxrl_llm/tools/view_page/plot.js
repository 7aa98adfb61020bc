// A plot of one metric: a line for each run, a cross-hair with values, redrawn to the width of its card.

const MARGIN = { left: 52, right: 12, top: 8, bottom: 24 };

/** Return about `count` round numbers, or only `whole` ones, from `low` to `high`. */
function ticks(low, high, count, whole = false) {
  const raw = (high - low) / Math.max(count, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const steps = [1, 2, 2.5, 5, 10].map((k) => (whole ? Math.max(k * power, 1) : k * power));
  const step = steps.find((s) => s >= raw && (!whole || Number.isInteger(s))) ?? 1;
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
    values.push(+(i * step).toPrecision(12));
  return values;
}

/** Return the texts of ticks, which differ from each other as the ticks do. */
function tickTexts(values, whole = false) {
  const short = values.map((x) => (whole ? String(x) : format(x)));
  return new Set(short).size === values.length ? short : values.map(String);
}

/** Return powers of ten from `low` to `high`, at most `count`. */
function logTicks(low, high, count) {
  const [first, last] = [Math.ceil(Math.log10(low)), Math.floor(Math.log10(high))];
  if (last - first < 1) return ticks(low, high, count).filter((x) => x > 0);
  const every = Math.max(1, Math.ceil((last - first + 1) / count));
  return Array.from({ length: Math.floor((last - first) / every) + 1 }, (_, i) => 10 ** (first + i * every));
}

/** Return the exponential moving average, corrected for its start as in TensorBoard. */
function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0,
    norm = 0;
  return values.map((y) => {
    mean = weight * mean + (1 - weight) * y;
    norm = weight * norm + (1 - weight);
    return mean / norm;
  });
}

/** Return the place of row i on the axis; "after" counts steps from the end of the SFT warm-up. */
function position(run, i, view) {
  if (view.axis === "time") return run.seconds[i] - (view.warmUp ? 0 : run.warmUp.seconds);
  return run.steps[i] - (view.axis === "after" ? run.warmUp.steps : 0);
}

/** Return the points of a metric of a run: x, y, smoothed y and step. */
function seriesOf(run, metric, view) {
  const values = run.metrics[metric] ?? [],
    isEval = metric.startsWith("eval/"),
    x = [],
    y = [],
    step = [];
  values.forEach((value, i) => {
    if (value == null || (!view.warmUp && run.warm[i] && !isEval)) return;
    x.push(position(run, i, view));
    y.push(value);
    step.push(run.steps[i]);
  });
  const smooth = isEval ? y : smoothed(y, view.smoothing);
  return { run, x, y, smooth, step };
}

/** Return the path of a line; where points are closer than pixels, the extremes of each pixel. */
function linePath(xs, ys) {
  let path = "",
    column = null,
    low = 0,
    high = 0;
  const put = (x, y) => {
    path += `${path ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
  };
  const flush = () => {
    if (column != null) {
      put(column, low);
      if (high !== low) put(column, high);
    }
  };
  const dense = xs.length > 1500;
  for (let i = 0; i < xs.length; i++) {
    if (!Number.isFinite(ys[i])) continue;
    if (!dense) {
      put(xs[i], ys[i]);
      continue;
    }
    const pixel = Math.round(xs[i]);
    if (pixel !== column) {
      flush();
      column = pixel;
      low = high = ys[i];
    }
    low = Math.min(low, ys[i]);
    high = Math.max(high, ys[i]);
  }
  flush();
  return path;
}

/** Return the index of the number in a sorted array that is nearest to x. */
function nearest(sorted, x) {
  let low = 0,
    high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(sorted[low] - x) <= Math.abs(sorted[high] - x) ? low : high;
}

class Plot {
  /** `view` has axis, smoothing, log and warmUp; `height` is in pixels. */
  constructor(metric, view, height = 190) {
    Object.assign(this, { metric, view, height, at: null });
    this.root = svg("svg", { class: "plot", tabindex: 0, role: "img" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.node = el("div", { class: "plot-box" }, this.root, this.tip);
    this.root.addEventListener("pointermove", (event) => this.point(event));
    this.root.addEventListener("pointerdown", (event) => this.point(event));
    this.root.addEventListener("pointerleave", () => this.leave());
    this.root.addEventListener("blur", () => this.leave());
    this.root.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  /** Draw the plot anew: after a change of the view, the runs or the width. */
  draw() {
    const width = this.node.clientWidth,
      { height, view } = this;
    if (!width) return;
    this.series = visibleRuns()
      .map((run) => seriesOf(run, this.metric, view))
      .filter((s) => s.x.length);
    this.leave();
    this.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.root.setAttribute("height", height);
    this.root.setAttribute("aria-label", this.summary());
    if (!this.series.length) {
      this.root.replaceChildren(
        svg("text", { x: width / 2, y: height / 2, class: "none" }, "no values in the runs shown"),
      );
      return;
    }
    this.scale(width);
    this.cross = svg("g", { class: "cross" });
    const [x, y, w, h] = [
      MARGIN.left - 3,
      0,
      width - MARGIN.left - MARGIN.right + 6,
      height - MARGIN.bottom + 3,
    ];
    const clip = { x, y, width: w, height: h, viewBox: `${x} ${y} ${w} ${h}` }; // extremes beyond the axes
    const lines = svg("svg", clip, ...this.series.map((s) => this.line(s)));
    this.root.replaceChildren(this.axes(width), lines, this.cross);
  }

  scale(width) {
    const xs = this.series.flatMap((s) => [s.x[0], s.x[s.x.length - 1]]);
    let ys = this.series.flatMap((s) =>
      this.view.smoothing && s.smooth !== s.y ? s.smooth.concat(trimmed(s.y)) : s.y,
    );
    this.log = this.view.log && ys.some((y) => y > 0);
    if (this.log) ys = ys.filter((y) => y > 0);
    const range = (values) =>
      values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    const [x0, x1] = range(xs);
    let [y0, y1] = range(ys);
    if (this.log) {
      [y0, y1] = y0 === y1 ? [y0 / 2, y1 * 2] : [y0 / 1.15, y1 * 1.15];
    } else {
      const pad = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 1;
      y0 = y0 >= 0 && y0 - pad < 0 ? 0 : y0 - pad;
      y1 += pad;
    }
    const inner = width - MARGIN.left - MARGIN.right,
      tall = this.height - MARGIN.top - MARGIN.bottom;
    const t = this.log ? Math.log10 : (y) => y;
    this.domain = { x0, x1: x1 === x0 ? x0 + 1 : x1, y0, y1 };
    this.px = (x) => MARGIN.left + ((x - x0) / (this.domain.x1 - x0)) * inner;
    this.py = (y) => MARGIN.top + (1 - (t(y) - t(y0)) / (t(y1) - t(y0))) * tall;
    this.invert = (pixel) => x0 + ((pixel - MARGIN.left) / inner) * (this.domain.x1 - x0);
  }

  axes(width) {
    const { x0, x1, y0, y1 } = this.domain,
      bottom = this.height - MARGIN.bottom,
      time = this.view.axis === "time";
    const group = svg("g", { class: "axes" });
    const many = Math.max(2, Math.floor(this.height / 40));
    const ys = this.log ? logTicks(y0, y1, many) : ticks(y0, y1, many);
    const texts = tickTexts(ys);
    for (const [i, y] of ys.entries()) {
      if (this.py(y) < MARGIN.top - 1 || this.py(y) > bottom + 1) continue;
      group.append(
        svg("line", {
          class: "grid",
          x1: MARGIN.left,
          x2: width - MARGIN.right,
          y1: this.py(y),
          y2: this.py(y),
        }),
        svg("text", { x: MARGIN.left - 6, y: this.py(y) + 4, class: "y" }, texts[i]),
      );
    }
    const unit = time && x1 - x0 > 7200 ? 3600 : time && x1 - x0 > 120 ? 60 : 1;
    const wide = Math.max(2, Math.floor(width / 90));
    const xs = ticks(x0 / unit, x1 / unit, wide, !time);
    const names = tickTexts(xs, !time);
    for (const [i, x] of xs.entries()) {
      const suffix = time ? { 1: " s", 60: " min", 3600: " h" }[unit] : "";
      group.append(
        svg(
          "text",
          {
            x: this.px(x * unit),
            y: this.height - 6,
            class: this.px(x * unit) > width - 24 ? "x last" : "x",
          },
          `${names[i]}${suffix}`,
        ),
      );
    }
    group.append(
      svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }),
    );
    return group;
  }

  line({ run, x, y, smooth }) {
    const xs = x.map(this.px),
      path = (values) =>
        linePath(
          xs,
          values.map((v) => (this.log && v <= 0 ? NaN : this.py(v))),
        );
    const group = svg("g", { class: `line run-${run.color} dash-${run.dash % 4}` });
    if (smooth !== y) group.append(svg("path", { class: "raw", d: path(y) }));
    group.append(svg("path", { class: "main", d: path(smooth) }));
    if (x.length <= 20)
      smooth.forEach((v, i) => group.append(svg("circle", { cx: xs[i], cy: this.py(v), r: 2.5 })));
    return group;
  }

  point(event) {
    if (!this.series?.length) return;
    const box = this.root.getBoundingClientRect();
    this.show(this.invert(event.clientX - box.left));
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.leave();
    if (!move || !this.series?.length) return;
    event.preventDefault();
    const xs = [...new Set(this.series.flatMap((s) => s.x))].sort((a, b) => a - b);
    const now = this.at == null ? (move > 0 ? -1 : xs.length) : nearest(xs, this.at);
    this.show(xs[Math.min(Math.max(now + move, 0), xs.length - 1)]);
    announce([...this.tip.children].map((line) => line.textContent).join("; "));
  }

  /** Show the values at x: cross-hair, dots and a box. */
  show(x) {
    const rows = this.series.map((s) => ({ s, i: nearest(s.x, x) }));
    const best = rows.reduce((a, b) => (Math.abs(b.s.x[b.i] - x) < Math.abs(a.s.x[a.i] - x) ? b : a));
    this.at = best.s.x[best.i];
    const left = this.px(this.at);
    this.cross.replaceChildren(
      svg("line", { x1: left, x2: left, y1: MARGIN.top, y2: this.height - MARGIN.bottom }),
      ...rows
        .filter(({ s, i }) => !this.log || s.smooth[i] > 0)
        .map(({ s, i }) =>
          svg("circle", { class: `run-${s.run.color}`, cx: this.px(s.x[i]), cy: this.py(s.smooth[i]), r: 4 }),
        ),
    );
    const step = format(best.s.step[best.i]);
    const head = {
      step: `step ${step}`,
      after: `step ${format(this.at)} after the SFT warm-up`,
      time: `${duration(this.at)}, step ${step}`,
    }[this.view.axis];
    this.tip.replaceChildren(
      el("div", { class: "when" }, head),
      ...rows.map(({ s, i }) => {
        const away = this.view.axis !== "time" && s.x[i] !== this.at ? ` at ${format(s.x[i])}` : "";
        const raw = s.smooth === s.y ? "" : ` (${format(s.y[i])})`;
        return el(
          "div",
          {},
          swatch(s.run),
          el("span", { class: "who" }, s.run.name),
          el("b", {}, format(s.smooth[i])),
          el("span", { class: "more" }, raw + away),
        );
      }),
    );
    this.tip.hidden = false;
    const room = this.node.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(left + 12 > room ? left - 12 - this.tip.offsetWidth : left + 12, room))}px`;
  }

  leave() {
    this.at = null;
    this.tip.hidden = true;
    this.cross?.replaceChildren();
  }

  /** Return first and last values in words, for screen readers. */
  summary() {
    const ends = this.series.map(({ run, y, step }) => {
      const last = y.length - 1;
      return `${run.name} from ${format(y[0])} at step ${step[0]} to ${format(y[last])} at step ${step[last]}`;
    });
    return `${this.metric}: ${ends.join("; ") || "no values"}. Arrow keys read values.`;
  }
}

/** Return the values without the outermost hundredth, so that one outlier does not flatten a smoothed line. */
function trimmed(values) {
  if (values.length < 100) return values;
  const sorted = [...values].sort((a, b) => a - b),
    cut = Math.floor(values.length / 100);
  return sorted.slice(cut, -cut);
}
