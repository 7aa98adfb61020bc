"""The page of a suite of studies: verdicts, tables, pictures and responses, from results/learning/."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from machine import ROOT
from studies import SUITES
from study import Study, Suite

RESULTS = ROOT / "benchmarks/results/learning"
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#767676")
STYLES = ("-", "--", ":")
ACRONYMS = {"sft": "SFT", "rl": "RL", "ppo": "PPO", "lora": "LoRA", "grpo": "GRPO"}
BUSY = 1.5  # load average a core above which times are not reported
Z = 1.96  # of a 95% interval
Points = list[tuple[int, float]]  # (step, value) of one run
Series = dict[str, list[Points]]  # label -> one curve a seed

EXPLANATION = """\
A heading ends in "reproduced" if the claim below it holds for every seed; for a difference between two
runs, if it holds with the stated margin for the mean over the seeds. Tables have one value for each seed,
at the first and at the last evaluation; for metrics of training steps it is the mean over the first and the
last tenth of the run. Intervals (shaded in the pictures) are 95% Wilson intervals for the evaluated
problems of all seeds together: they cover the error of evaluating so few problems. The values of the seeds
show how much seeds differ.
"""


def result_path(suite_name: str, name: str) -> Path:
    return RESULTS / suite_name / f"{name}.json"


def read_result(suite_name: str, name: str) -> dict[str, Any]:
    """Return {label: {seed: run}} of a study and the facts common to its runs; {} = no run has ended."""
    path = result_path(suite_name, name)
    return json.loads(path.read_text()) if path.exists() else {}


def series_of(result: dict[str, Any], metric: str) -> Series:
    """Return a metric over the steps since the SFT warm-up, of the labels that have it."""
    series = {
        label: [run["curves"][metric] for run in seeds.values() if metric in run["curves"]]
        for label, seeds in result["runs"].items()
    }
    return {label: curves for label, curves in series.items() if curves}


def write_report(suite_name: str) -> None:
    """Write the suite's page and a picture of each study with results; others keep their section."""
    suite = SUITES[suite_name]
    page = ROOT / "docs" / suite.page
    before = read_sections(page.read_text()) if page.exists() else {}
    results = {name: result for name in suite.studies if (result := read_result(suite_name, name))}
    kept = [title(name) for name in suite.studies if name not in results and title(name) in before]
    lines = [suite.intro]
    if suite.starts:
        lines += [*(f"- {name}: {start.task}" for name, start in suite.starts.items()), ""]
        words = {name: suite.start_arguments(name, 0) for name in suite.starts}
        lines += [*(f"      {name}: python -m jaxrl_llm.train {words[name]}" for name in words), ""]
    lines.append(EXPLANATION)
    if kept:
        lines += [f"Not run again for this page, but kept from an earlier one: {', '.join(kept)}.", ""]
    for name in suite.studies:
        lines += section(suite, name, results[name]) if name in results else before.get(title(name), [])
    page.write_text("\n".join(lines).rstrip("\n") + "\n")
    print(f"docs/{suite.page}: {len(results)} studies, {len(kept)} more kept")


def read_sections(page: str) -> dict[str, list[str]]:
    """Return the lines of each section of an earlier report by its heading, the verdict left out."""
    sections = [f"## {text.rstrip()}" for text in page.split("\n## ")[1:]]
    return {text[3:].partition(":")[0]: [*text.splitlines(), ""] for text in sections}


def section(suite: Suite, name: str, result: dict[str, Any]) -> list[str]:
    """Return the lines of a study: verdict, claim, tables, picture, responses and commands."""
    study, series = suite.studies[name], series_of(result, suite.studies[name].metric)
    folder = Path(suite.page).stem
    draw_curves(ROOT / "docs" / folder / f"{name}.png", study.metric, series, num_evaluated(result))
    lines = [f"## {title(name)}: {claim_verdict(study, series)}", "", study.claim, ""]
    lines += [*main_table(study, series, num_evaluated(result)), ""]
    if is_share(study.metric) and len(series) > 1:
        lines += [apart_line(series, num_evaluated(result)), ""]
    lines += [line for metric in study.also for line in metric_table(metric, series_of(result, metric))]
    if "reward/mean" in study.also:
        lines += cost_table(result)
    if suite.minutes:
        lines += [minutes_line(result), ""]
    lines += [f"![{name}]({folder}/{name}.png)", ""]
    for label in study.shows:
        lines += response_table(label, next(iter(result["runs"].get(label, {}).values()), {}))
    runs = {label: next(iter(seeds.values())) for label, seeds in result["runs"].items()}
    return [*lines, *(f"    {label}: {run['command']}" for label, run in runs.items()), ""]


def claim_verdict(study: Study, series: Series) -> str:
    if set(series) != set(study.runs):
        return f"{', '.join(label for label in study.runs if label not in series)} not run"
    first = max(points[0][1] for seeds in series.values() for points in seeds)
    holds = first < study.starts_below and study.holds(claim_values(study, series))
    verdict = "reproduced" if holds else "not reproduced"
    total = len(study.seeds)
    fewer = {label: len(seeds) for label, seeds in series.items() if len(seeds) < total}
    if len(fewer) == len(series):
        return f"{verdict}, {min(fewer.values())} of {total} seeds"
    return ", ".join([verdict, *(f"{label} with {count} of {total} seeds" for label, count in fewer.items())])


def title(name: str) -> str:
    """Return the heading of a study: "sft_then_rl" -> "SFT then RL"."""
    words = [ACRONYMS.get(word, word) for word in name.split("_")]
    return " ".join([words[0][0].upper() + words[0][1:], *words[1:]])


def claim_values(study: Study, series: Series) -> dict[str, list[float]]:
    """Return the values that the study's claim is about: one a seed."""
    value = {
        "last": lambda points: points[-1][1],
        "gain": lambda points: points[-1][1] - points[0][1],
        "run_mean": lambda points: mean(value for _, value in points),
    }[study.of]
    return {label: [value(points) for points in seeds] for label, seeds in series.items()}


def num_evaluated(result: dict[str, Any]) -> int:
    """Return the responses that an evaluation judges."""
    return next(iter(next(iter(result["runs"].values())).values()))["eval_prompts"]


def interval(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a binomial share (Wilson 1927; Brown et al. 2001, eq. 4)."""
    center = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return center - half, center + half


def is_share(metric: str) -> bool:
    return metric.startswith("eval/pass@") or metric == "eval/accuracy"


def main_table(study: Study, series: Series, count: int) -> list[str]:
    """Return the table of the study's metric: a value a seed, means, the interval of a share."""
    over_run, shares = study.of == "run_mean", is_share(study.metric)
    columns = [study.metric, "first", "last", "mean of last"]
    columns += ["95% interval"] * shares + ["mean over the run"] * over_run
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for label, seeds in series.items():
        first, last = ([points[at][1] for points in seeds] for at in (0, -1))
        cells = [label, numbers(first), numbers(last), f"{mean(last):.3f}"]
        if shares:
            cells.append("{:.3f} to {:.3f}".format(*interval(mean(last), count * len(last))))
        if over_run:
            means = claim_values(study, series)[label]
            cells.append(f"{numbers(means)}: {mean(means):.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def apart_line(series: Series, count: int) -> str:
    """Return which labels end apart from which, by intervals that do not overlap."""
    ends = {
        label: interval(mean(points[-1][1] for points in seeds), count * len(seeds))
        for label, seeds in series.items()
    }
    below = {a: [b for b in ends if ends[b][1] < ends[a][0]] for a in ends}
    pairs = [f"{label} above {', '.join(others)}" for label, others in below.items() if others]
    return f"Ends whose intervals do not overlap: {'; '.join(pairs) or 'none'}."


def metric_table(metric: str, series: Series) -> list[str]:
    """Return a table of a metric of the training steps: its first and last tenth."""
    lines = [f"| {metric} | first tenth | last tenth |", "|---|---|---|"]
    for label, seeds in series.items():
        ends: list[list[float]] = [[], []]
        for points in seeds:
            values = [value for _, value in points]
            tenth = max(len(values) // 10, 1)
            for end, part in zip(ends, (values[:tenth], values[-tenth:]), strict=True):
                end.append(mean(part))
        lines.append(f"| {label} | {numbers(ends[0])} | {numbers(ends[1])} |")
    return [*lines, ""]


def cost_table(result: dict[str, Any]) -> list[str]:
    """Return reward by response and by hour; times are of an otherwise idle machine, or left out.

    If a few steps of each label have been timed in turn (`--time`), these are the times.
    """
    timed = result.get("timing", {}).get("step_seconds", {})
    lines = [
        "| | responses | reward a response, over the run | hours | reward an hour |",
        "|---|---|---|---|---|",
    ]
    for label, seeds in result["runs"].items():
        rewards = [mean(value for _, value in run["curves"]["reward/mean"]) for run in seeds.values()]
        steps = [len(run["curves"]["reward/mean"]) for run in seeds.values()]
        counts = [n * run["samples_per_step"] for n, run in zip(steps, seeds.values(), strict=True)]
        known = all("step_seconds" in run and "load" in run for run in seeds.values())
        hours = [timed[label] * n / 3600 for n in steps] if label in timed else []
        if not hours and known and all(run["load"] < BUSY * (os.cpu_count() or 1) for run in seeds.values()):
            hours = [run["step_seconds"] / 3600 for run in seeds.values()]
        times = ["other load", "other load"]
        if hours:
            an_hour = [r * n / h for r, n, h in zip(rewards, counts, hours, strict=True)]
            times = [numbers(hours, 2), numbers(an_hour, 0)]
        lines.append(f"| {' | '.join([label, numbers(counts, 0), numbers(rewards), *times])} |")
    return [*lines, ""]


def minutes_line(result: dict[str, Any]) -> str:
    """Return the minutes of the steps of each run, evaluations included, and the load at its end."""
    runs = {
        label: " ".join(f"{run['seconds'] / 60:.0f} ({run.get('load', '?')})" for run in seeds.values())
        for label, seeds in result["runs"].items()
    }
    words = "; ".join(f"{label} {minutes}" for label, minutes in runs.items())
    return f"Minutes of the steps and their evaluations, in brackets the load average of two cores: {words}."


def response_table(label: str, run: dict[str, Any]) -> list[str]:
    """Return held-out problems with the responses before and after a run."""
    if not run.get("samples"):
        return []
    cell = lambda text: "`" + " ".join(str(text).replace("`", "'").replace("|", "/").split()) + "`"
    lines = [f"| held-out problem | answer | before | after ({label}) |", "|---|---|---|---|"]
    for row in run["samples"]:
        cells = [cell(str(row["prompt"]).rpartition(":")[2]), str(row["answer"])]
        lines.append(f"| {' | '.join([*cells, cell(row['before']), cell(row['after'])])} |")
    return [*lines, ""]


def numbers(values: Sequence[float], digits: int = 3) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)


def draw_curves(path: Path, metric: str, series: Series, count: int) -> None:
    """Draw the mean over the seeds as a line, the seeds as faint lines, and the interval of a share."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.2)
    for index, (label, seeds) in enumerate(series.items()):
        color, style = COLORS[index % len(COLORS)], STYLES[index // len(COLORS)]
        for points in seeds if len(seeds) > 1 else ():
            axes.plot(*zip(*points, strict=True), color=color, alpha=0.2, lw=1)
        steps = [step for step, _ in seeds[0]]
        middle = [mean(dict(points).get(step, float("nan")) for points in seeds) for step in steps]
        if is_share(metric):
            low, high = zip(*(interval(share, count * len(seeds)) for share in middle), strict=True)
            axes.fill_between(steps, low, high, color=color, alpha=0.12, lw=0)
        axes.plot(steps, middle, color=color, ls=style, lw=2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    axes.legend(frameon=False, ncols=3, fontsize=9)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)
