"""Learning curves of the algorithms on generated tasks: run the studies, draw, write docs/learning.md.

Command:   make learn                        everything, about an hour on 2 cores
           python benchmarks/learn.py --only dynamic_sampling --jobs 2
Runs go to runs/learn/; finished runs are not repeated, so an interrupted collection continues.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

from studies import STARTS, STUDIES, Study

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/learning.md"
RUNS = Path("runs/learn")
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#767676")
ACRONYMS = {"sft": "SFT", "rl": "RL", "ppo": "PPO", "lora": "LoRA"}
STYLES = ("-", "--", ":")
Series = dict[str, list[list[tuple[int, float]]]]  # label -> one curve a seed, of (step, value)

INTRO = """\
# Learning curves and reproduced claims

Small Qwen3 models on generated tasks, on a CPU, three seeds each; `make learn` runs all of it and writes this
page. Every run starts from the SFT warm-up of its seed, so that the runs of a study differ in the algorithm
alone:
"""
EXPLANATION = """\
A heading ends in "reproduced" where the claim below it holds for every seed; of a difference between two
runs, with the stated margin on the mean of the seeds. Tables have one value a seed, of the first and the last
evaluation; of metrics of the training steps, the mean over the first and the last tenth of the run.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    options = parser.parse_args()
    starts = dict.fromkeys(
        (study.start, seed) for study in map(STUDIES.get, options.only) for seed in study.seeds
    )
    run_all([(start_dir(*start), start_words(*start)) for start in starts], options)
    for names in in_order(options.only):
        run_all([job for name in names for job in jobs_of(name)], options)
    write_report()


def start_dir(start: str, seed: int) -> Path:
    return RUNS / "start" / start / str(seed)


def start_words(start: str, seed: int) -> str:
    words = f"--config {STARTS[start].config} --steps 0 {STARTS[start].arguments.format()}"
    return f"{words.strip()} --seed {seed}"


def in_order(names: list[str]) -> list[list[str]]:
    """Return the studies that need no other, then those that do."""
    first = [name for name in names if not STUDIES[name].after]
    return [[STUDIES[name].after for name in names if STUDIES[name].after] + first, names]


def jobs_of(name: str) -> list[tuple[Path, str]]:
    """Return (run directory, arguments) of each run of a study."""
    study = STUDIES[name]
    jobs = []
    for label, arguments in study.runs.items():
        for seed in study.seeds:
            words = arguments.format(start=start_dir(study.start, seed) / "hf", seed=seed)
            jobs.append((RUNS / name / label / str(seed), f"{words} --seed {seed}"))
    return jobs


def run_all(todo: list[tuple[Path, str]], options: argparse.Namespace) -> None:
    """Run the jobs that have no model yet; stop at the first failure."""
    todo = list(dict.fromkeys((path, words) for path, words in todo if not (path / "hf").is_dir()))
    with ThreadPoolExecutor(options.jobs) as pool:
        for (path, _), code in zip(todo, pool.map(run_job, todo), strict=True):
            if code:
                sys.exit(f"{path} failed; see {path}.log")


def run_job(job: tuple[Path, str]) -> int:
    """Run one training and return its exit code; its output goes to a .log file."""
    path, words = job
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "jaxrl_llm.train", *shlex.split(words), "--run_dir", str(path)]
    with path.with_suffix(".log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    print(f"{'failed' if code else 'done'}  {path}", flush=True)
    return code


def read_curves(name: str, metric: str) -> Series:
    """Return the metric over the steps since the SFT warm-up."""
    series: Series = {}
    for label in STUDIES[name].runs:
        for seed in STUDIES[name].seeds:
            file = RUNS / name / label / str(seed) / "metrics.jsonl"
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            rows = [row for row in rows if row["kind"] != "warm_start" or row["step"] == rows[-1]["step"]]
            points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
            series.setdefault(label, []).append(points)
    return series


def write_report() -> None:
    """Write docs/learning.md and a picture of each study with complete runs; others keep their section."""
    before = read_sections(PAGE.read_text()) if PAGE.exists() else {}
    done = [name for name in STUDIES if all((path / "hf").is_dir() for path, _ in jobs_of(name))]
    kept = [title(name) for name in STUDIES if name not in done and title(name) in before]
    lines = [
        INTRO,
        *(f"- {name}: {start.task}" for name, start in STARTS.items()),
        "",
        *(f"      {name}: python -m jaxrl_llm.train {start_words(name, 0)}" for name in STARTS),
        "",
        EXPLANATION,
    ]
    if kept:
        lines += [f"Not run again for this page, but kept from an earlier one: {', '.join(kept)}.", ""]
    for name in STUDIES:
        lines += section(name) if name in done else before.get(title(name), [])
    PAGE.write_text("\n".join(lines))
    print(f"docs/learning.md: {len(done)} studies, {len(kept)} more kept")


def read_sections(page: str) -> dict[str, list[str]]:
    """Return the lines of each section of an earlier report by its heading, the verdict left out."""
    sections = [f"## {text.rstrip()}" for text in page.split("\n## ")[1:]]
    return {text[3:].partition(":")[0]: [*text.splitlines(), ""] for text in sections}


def section(name: str) -> list[str]:
    """Return the lines of a study: verdict, claim, tables, picture and commands."""
    study, series = STUDIES[name], read_curves(name, STUDIES[name].metric)
    verdict = "reproduced" if study.holds(claim_values(study, series)) else "not reproduced"
    draw_curves(name, series)
    lines = [f"## {title(name)}: {verdict}", "", study.claim, ""]
    over_run = " mean over the run |" * study.over_run
    lines += [
        f"| {study.metric} | first | last | mean of last |{over_run}",
        "|---|---|---|---|" + "---|" * study.over_run,
    ]
    for label, seeds in series.items():
        first, last = ([points[at][1] for points in seeds] for at in (0, -1))
        row = f"| {label} | {numbers(first)} | {numbers(last)} | {mean(last):.3f} |"
        means = claim_values(study, series)[label]
        lines.append(row + f" {numbers(means)}: {mean(means):.3f} |" * study.over_run)
    lines += ["", *(line for metric in study.also for line in metric_table(name, metric))]
    lines += [f"![{name}](learning/{name}.png)", ""]
    return [*lines, *(f"    {label}: {train_command(name, label)}" for label in study.runs), ""]


def title(name: str) -> str:
    """Return the heading of a study: "sft_then_rl" -> "SFT then RL"."""
    words = [ACRONYMS.get(word, word) for word in name.split("_")]
    return " ".join([words[0][0].upper() + words[0][1:], *words[1:]])


def claim_values(study: Study, series: Series) -> dict[str, list[float]]:
    """Return the values that the study's claim is about: one a seed."""
    if study.over_run:
        return {k: [mean(value for _, value in points) for points in seeds] for k, seeds in series.items()}
    return {label: [points[-1][1] for points in seeds] for label, seeds in series.items()}


def metric_table(name: str, metric: str) -> list[str]:
    """Return a table of a metric of the training steps: its first and last tenth."""
    lines = [f"| {metric} | first tenth | last tenth |", "|---|---|---|"]
    for label, seeds in read_curves(name, metric).items():
        ends: list[list[float]] = [[], []]
        for points in seeds:
            values = [value for _, value in points]
            tenth = max(len(values) // 10, 1)
            for end, part in zip(ends, (values[:tenth], values[-tenth:]), strict=True):
                end.append(mean(part))
        lines.append(f"| {label} | {numbers(ends[0])} | {numbers(ends[1])} |")
    return [*lines, ""]


def numbers(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def train_command(name: str, label: str) -> str:
    """Return the command of a run, for seed 0."""
    words = next(words for path, words in jobs_of(name) if path.parent.name == label)
    return f"python -m jaxrl_llm.train {words}"


def draw_curves(name: str, series: Series) -> None:
    """Draw the mean over the seeds as a line, the seeds faint behind it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.2)
    for index, (label, seeds) in enumerate(series.items()):
        color, style = COLORS[index % len(COLORS)], STYLES[index // len(COLORS)]
        for points in seeds:
            axes.plot(*zip(*points, strict=True), color=color, alpha=0.2, lw=1)
        steps = [step for step, _ in seeds[0]]
        middle = [mean(dict(points).get(step, float("nan")) for points in seeds) for step in steps]
        axes.plot(steps, middle, color=color, ls=style, lw=2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel(STUDIES[name].metric)
    axes.legend(frameon=False, ncols=3, fontsize=9)
    folder = ROOT / "docs/learning"
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / f"{name}.png")


if __name__ == "__main__":
    main()
