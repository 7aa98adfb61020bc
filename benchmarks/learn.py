"""Learning curves: run the studies of a suite, keep their results, draw them, write the suite's page.

Command:   make learn                        docs/learning.md, about an hour on 2 cores
           make real RECIPES=all             docs/real.md, hours on 2 cores; without RECIPES GRPO alone
           python benchmarks/learn.py --only dynamic_sampling --jobs 2
           python benchmarks/learn.py --suite real --only grpo/full sft --seeds 0 1 2 --jobs 1
           python benchmarks/learn.py --suite real --only grpo --time --trl_python PYTHON   seconds a step
           python benchmarks/learn.py --suite real --report      the page anew from finished runs and results

Finished runs are not repeated, and interrupted ones are continued. Results are kept in results/learning/,
with device, versions, command and commit; the page is written from them. `--time` is for a machine with
nothing else to do: a few steps of each label, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from studies import SUITES, TRL, Study, Suite

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/learning"
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#767676")
ACRONYMS = {"sft": "SFT", "rl": "RL", "ppo": "PPO", "lora": "LoRA", "grpo": "GRPO"}
STYLES = ("-", "--", ":")
BUSY = 1.5  # load average a core above which times are not reported
TIMED = "--steps 7 --eval.every 100 --eval.prompts 8"  # of `--time`
WARM_UP_STEPS = 2  # not counted there
TIME_ROUNDS = 2
Z = 1.96  # of a 95% interval
NUM_SAMPLES = 8  # held-out problems whose responses before and after are kept
Points = list[tuple[int, float]]  # (step, value) of one run
Series = dict[str, list[Points]]  # label -> one curve a seed

EXPLANATION = """\
A heading ends in "reproduced" where the claim below it holds for every seed; of a difference between two
runs, with the stated margin on the mean of the seeds. Tables have one value a seed, of the first and the last
evaluation; of metrics of the training steps, the mean over the first and the last tenth of the run. Intervals
(shaded in the pictures) are Wilson's of 95% for the evaluated problems of all seeds together: the error of
evaluating so few problems. How far another seed may end is seen in the values of the seeds.
"""


@dataclass(frozen=True)
class Job:
    """One run of a study."""

    path: Path
    arguments: str


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=SUITES, default="tiny")
    parser.add_argument("--only", nargs="*", default=["all"], help="STUDY or STUDY/LABEL; default all")
    parser.add_argument("--seeds", nargs="*", type=int, help="in place of the studies' own")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once; 1 prints their progress")
    parser.add_argument("--trl_python", default="", help="interpreter with trl; without it TRL is not run")
    parser.add_argument("--time", action="store_true", help="a few steps of the runs, on an idle machine")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    suite = SUITES[options.suite]
    chosen = choose_runs(suite, options.only)
    if options.time:
        for name, labels in chosen.items():
            time_steps(options, name, labels or list(suite.studies[name].runs))
    elif not options.report:
        starts = [(suite.studies[name].start, s) for name in chosen for s in seeds_of(suite, name, options)]
        starts = [start_job(suite, *start) for start in dict.fromkeys(starts) if start[0]]
        run_all(starts, options)
        for names in in_order(suite, list(chosen)):
            write_files(suite, names)
            run_all(
                [
                    job
                    for name in names
                    for job in jobs_of(suite, name, seeds_of(suite, name, options), chosen.get(name))
                ],
                options,
            )
    for name in suite.studies:
        write_before_after(suite, name)
        collect(options.suite, name)
    write_report(options.suite)
    print_summary(options.suite, chosen)


def choose_runs(suite: Suite, only: Sequence[str]) -> dict[str, list[str] | None]:
    """Return study -> its labels to run, None = all."""
    chosen: dict[str, list[str] | None] = {}
    for word in suite.studies if list(only) == ["all"] else only:
        name, _, label = word.partition("/")
        if name not in suite.studies or (label and label not in suite.studies[name].runs):
            sys.exit(f"--only {word}: there are {', '.join(suite.studies)}")
        chosen[name] = [*(chosen.get(name) or []), label] if label else None
    return chosen


def seeds_of(suite: Suite, name: str, options: argparse.Namespace) -> Sequence[int]:
    return options.seeds or suite.studies[name].seeds


def start_job(suite: Suite, start: str, seed: int) -> Job:
    """Return the SFT warm-up that a seed's runs begin with."""
    return Job(Path(suite.runs) / "start" / start / str(seed), start_arguments(suite, start, seed))


def start_arguments(suite: Suite, start: str, seed: int) -> str:
    chosen = suite.starts[start]
    return " ".join(f"--config {chosen.config} --steps 0 {chosen.arguments} --seed {seed}".split())


def in_order(suite: Suite, names: list[str]) -> list[list[str]]:
    """Return the studies that need no other, then those that do."""
    after = [suite.studies[name].after for name in names if suite.studies[name].after]
    return [[*after, *(name for name in names if not suite.studies[name].after)], names]


def jobs_of(suite: Suite, name: str, seeds: Sequence[int], labels: Sequence[str] | None = None) -> list[Job]:
    """Return the runs of a study."""
    study, jobs = suite.studies[name], []
    for label, arguments in study.runs.items():
        for seed in seeds if labels is None or label in labels else ():
            start = str(start_job(suite, study.start, seed).path / "hf") if study.start else ""
            path = Path(suite.runs) / name / label / str(seed)
            words = arguments.replace("{start}", start).replace("{seed}", str(seed))
            jobs.append(Job(path, f"{words} --seed {seed}"))
    return jobs


def write_files(suite: Suite, names: list[str]) -> None:
    """Write the files that runs of the studies need and that are not there."""
    for path, command in dict.fromkeys(pair for name in names for pair in suite.studies[name].files.items()):
        if not Path(path).exists():
            print(f"python {command}", flush=True)
            subprocess.run([sys.executable, *shlex.split(command)], check=True)


def run_all(todo: list[Job], options: argparse.Namespace) -> None:
    """Run the jobs that have no model yet; stop at the first failure."""
    todo = [job for job in dict.fromkeys(todo) if not (job.path / "hf").is_dir()]
    if not options.trl_python:
        without = [job for job in todo if not job.arguments.startswith(TRL)]
        print("".join(f"skipped {job.path}: no --trl_python\n" for job in todo if job not in without), end="")
        todo = without
    with ThreadPoolExecutor(options.jobs) as pool:
        for job, code in zip(todo, pool.map(lambda job: run_job(job, options), todo), strict=True):
            if code:
                sys.exit(f"{job.path} failed" + ("" if options.jobs == 1 else f"; see {job.path}.log"))


def run_job(job: Job, options: argparse.Namespace) -> int:
    """Run one training and return its exit code; of several at once, output goes to a .log file."""
    words, script = shlex.split(job.arguments), [sys.executable, "-m", "jaxrl_llm.train"]
    if words[0] == TRL:
        write_trl_spec(job, words[1:])
        script, words = [options.trl_python, str(ROOT / "benchmarks/peers" / TRL)], []
    job.path.parent.mkdir(parents=True, exist_ok=True)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    command = [*script, *words, "--run_dir", str(job.path)]
    log = contextlib.nullcontext() if options.jobs == 1 else job.path.with_suffix(".log").open("a")
    with log as output:
        code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    if not code:
        record = {"load": round(os.getloadavg()[2], 1), "started": started, "commit": git_commit()}
        (job.path / "record.json").write_text(json.dumps(record) + "\n")
    print(f"{'failed' if code else 'done'}  {job.path}", flush=True)
    return code


def time_steps(options: argparse.Namespace, name: str, labels: Sequence[str]) -> None:
    """Measure the seconds of a step of each label, in turn so that other load affects all alike."""
    suite, seconds = SUITES[options.suite], {label: [] for label in labels}
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    for turn in range(TIME_ROUNDS):
        for label in labels:
            job = jobs_of(suite, name, [turn], [label])[0]
            job = Job(Path(suite.runs) / "time" / name / label / str(turn), f"{job.arguments} {TIMED}")
            run_all([job], options)
            rows = rows_after_warm_up(job.path) if (job.path / "hf").is_dir() else []
            seconds[label] += [step_seconds(row) for row in rows if row["step"] > WARM_UP_STEPS]
    result = read_result(options.suite, name)
    record = {"started": started, "load": round(os.getloadavg()[2], 1), "commit": git_commit()}
    result["timing"] = {**record, "step_seconds": {k: median(v) for k, v in seconds.items() if v}}
    result_path(options.suite, name).write_text(format_result(result))


def write_trl_spec(job: Job, words: list[str]) -> None:
    """Write the input of peers/trl_grpo.py: model, settings, prompts in order, held-out problems."""
    from jaxrl_llm.data.loader import Loader
    from jaxrl_llm.hf.config import read_config
    from jaxrl_llm.hf.resolve import resolve_model
    from jaxrl_llm.hf.tokenizer import load_tokenizer
    from jaxrl_llm.recipe.load import from_command_line

    config = from_command_line([*words, "--run_dir", str(job.path)], writes=False).config
    folder = resolve_model(config.model.path)
    tokenizer = load_tokenizer(folder, read_config(folder))

    def loader(split: str) -> Loader:
        return Loader(config.data, tokenizer, config.seed, config.max_prompt_tokens, split)

    def rows(prompts) -> list[dict[str, str]]:
        texts = tokenizer.batch_decode([prompt.ids for prompt in prompts])
        return [{"prompt": text, "answer": p.example.answer} for p, text in zip(prompts, texts, strict=True)]

    spec = {
        "model": str(folder.resolve()),
        "seed": config.seed,
        "steps": config.steps,
        "group": config.responses_per_prompt,
        "sequences": config.trajectories_per_step,
        "micro_batch": config.tokens_per_device // config.max_tokens,
        "max_tokens": config.max_response_tokens,
        "temperature": config.rollout.sampling.temperature,
        "clip": [config.algo.clip_low, config.algo.clip_high],
        "kl_coef": config.algo.kl_coef,
        "optim": {key: getattr(config.optim, key) for key in ("learning_rate", "b1", "b2", "eps")},
        "weight_decay": config.optim.weight_decay,
        "max_grad_norm": config.optim.max_grad_norm,
        "eval_every": config.eval.every,
        "train": rows(loader("train").prompts(0, config.steps * config.prompts_per_step)),
        "eval": rows(loader("eval").eval_set(config.eval.prompts)),
    }
    job.path.mkdir(parents=True, exist_ok=True)
    (job.path / "spec.json").write_text(json.dumps(spec))


def git_commit() -> str:
    """Return the commit of the code, "+" after it where files have changed; "" outside a repository."""
    git = lambda *words: subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    changed = git("status", "--porcelain", "--untracked-files=no").stdout.strip()
    return git("rev-parse", "--short", "HEAD").stdout.strip() + "+" * bool(changed)


def processor_name() -> str:
    """Return the processor, or the accelerator that jax would use."""
    if os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
        import jax

        return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.processor() or platform.machine()}"


# Results


def step_seconds(row: dict[str, Any]) -> float:
    """Return the seconds of a step without its evaluation."""
    return row["time/step"] - row.get("time/evaluation", 0.0)


def result_path(suite_name: str, name: str) -> Path:
    return RESULTS / suite_name / f"{name}.json"


def read_result(suite_name: str, name: str) -> dict[str, Any]:
    """Return {label: {seed: run}} of a study and what is common to its runs; {} = there are none yet."""
    path = result_path(suite_name, name)
    return json.loads(path.read_text()) if path.exists() else {}


def collect(suite_name: str, name: str) -> None:
    """Add the finished runs of a study to its results."""
    suite = SUITES[suite_name]
    study, result = suite.studies[name], read_result(suite_name, name)
    runs, before = result.get("runs", {}), json.dumps(result)
    folder = Path(suite.runs) / name
    for label in study.runs:
        paths = sorted((folder / label).glob("*/hf"), key=lambda path: int(path.parent.name))
        for path in (path.parent for path in paths):
            runs.setdefault(label, {})[path.name] = run_result(suite, name, label, path)
    runs = {label: runs[label] for label in study.runs if label in runs}
    if runs and json.dumps({**result, "runs": runs}) != before:
        path = result_path(suite_name, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        result = {**result, "study": name, "device": processor_name(), "runs": runs}
        path.write_text(format_result(result))


def format_result(result: dict[str, Any]) -> str:
    """Return a result as JSON with a line for each run."""
    runs = {
        label: ",\n".join(f"  {json.dumps(seed)}: {json.dumps(run)}" for seed, run in seeds.items())
        for label, seeds in result["runs"].items()
    }
    body = ",\n".join(f" {json.dumps(label)}: {{\n{lines}\n }}" for label, lines in runs.items())
    head = json.dumps({key: value for key, value in result.items() if key != "runs"})
    return f'{head[:-1]}, "runs": {{\n{body}\n}}}}\n'


def run_result(suite: Suite, name: str, label: str, path: Path) -> dict[str, Any]:
    """Return command, versions, times and curves of a finished run."""
    study = suite.studies[name]
    job = jobs_of(suite, name, [int(path.name)], [label])[0]
    saved = json.loads((path / "config.json").read_text())
    record = json.loads((path / "record.json").read_text()) if (path / "record.json").exists() else {}
    rows = rows_after_warm_up(path)
    metrics = (study.metric, *study.also)
    curves = {metric: points for metric in metrics if (points := points_of(rows, metric))}
    sizes = saved["config"]
    result = {
        "command": command_of(job),
        "versions": saved["versions"],
        **record,
        "step_seconds": sum(step_seconds(row) for row in rows if row["step"]),
        "eval_prompts": sizes["eval"]["prompts"] * sizes["eval"]["samples"],
        "samples_per_step": sizes["prompts_per_step"] * sizes["responses_per_prompt"],
        "curves": curves,
    }
    if (path / "before_after.json").exists():
        result["samples"] = json.loads((path / "before_after.json").read_text())
    return result


def write_before_after(suite: Suite, name: str) -> None:
    """Write responses before and after the first seed's runs that the report shows."""
    for label in suite.studies[name].shows:
        path = jobs_of(suite, name, suite.studies[name].seeds[:1], [label])[0].path
        if not (path / "hf").is_dir() or (path / "before_after.json").exists():
            continue
        config = json.loads((path / "config.json").read_text())["config"]
        lines = (path / "prompts.jsonl").read_text().splitlines()[:NUM_SAMPLES]
        max_tokens = config["max_response_tokens"]
        before, after = (
            greedy_responses(str(model), tuple(lines), max_tokens)
            for model in (config["model"]["path"], path / "hf")
        )
        rows = [json.loads(line) for line in lines]
        shown = [
            {"prompt": row["prompt"], "answer": row["answer"], "before": b, "after": a}
            for row, b, a in zip(rows, before, after, strict=True)
        ]
        (path / "before_after.json").write_text(json.dumps(shown) + "\n")


@functools.cache
def greedy_responses(model: str, rows: tuple[str, ...], max_tokens: int) -> list[str]:
    import jaxrl_llm

    prompts = [json.loads(row) for row in rows]
    responses = jaxrl_llm.generate(model, prompts, max_tokens=max_tokens, temperature=0.0)
    return [group[0].text for group in responses]


def rows_after_warm_up(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run from the end of its SFT warm-up on."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] != "warm_start" or row["step"] == rows[-1]["step"]]


def points_of(rows: list[dict[str, Any]], metric: str) -> Points:
    return [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]


def series_of(result: dict[str, Any], metric: str) -> Series:
    """Return a metric over the steps since the SFT warm-up, of the labels that have it."""
    series = {
        label: [run["curves"][metric] for run in seeds.values() if metric in run["curves"]]
        for label, seeds in result["runs"].items()
    }
    return {label: curves for label, curves in series.items() if curves}


def command_of(job: Job) -> str:
    """Return the command of a run as a user types it."""
    if job.arguments.startswith(TRL):
        return f"python benchmarks/peers/{TRL} --run_dir {job.path}"
    return f"python -m jaxrl_llm.train {job.arguments}"


# The page


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
        words = {name: start_arguments(suite, name, 0) for name in suite.starts}
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
    lines += [line for metric in study.also for line in metric_table(metric, series_of(result, metric))]
    if "reward/mean" in study.also:
        lines += cost_table(result)
    lines += [f"![{name}]({folder}/{name}.png)", ""]
    for label in study.shows:
        lines += response_table(label, next(iter(result["runs"].get(label, {}).values()), {}))
    runs = {label: next(iter(seeds.values())) for label, seeds in result["runs"].items()}
    return [*lines, *(f"    {label}: {run['command']}" for label, run in runs.items()), ""]


def claim_verdict(study: Study, series: Series) -> str:
    if set(series) != set(study.runs):
        return f"{', '.join(label for label in study.runs if label not in series)} not run"
    return "reproduced" if study.holds(claim_values(study, series)) else "not reproduced"


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
    """Return reward by response and by hour; times are those of an otherwise idle machine, or left out.

    Where a few steps of each label have been timed in turn (`--time`), these are the times.
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
        idle = all("load" in run and run["load"] < BUSY * (os.cpu_count() or 1) for run in seeds.values())
        hours = [run["step_seconds"] / 3600 for run in seeds.values()]
        if label in timed:
            idle, hours = True, [timed[label] * n / 3600 for n in steps]
        an_hour = [r * n / h for r, n, h in zip(rewards, counts, hours, strict=True)]
        times = [numbers(hours, 2), numbers(an_hour, 0)] if idle else ["other load", "other load"]
        lines.append(f"| {' | '.join([label, numbers(counts, 0), numbers(rewards), *times])} |")
    return [*lines, ""]


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


def print_summary(suite_name: str, chosen: dict[str, list[str] | None]) -> None:
    """Print a line for each run that was asked for and has finished."""
    suite = SUITES[suite_name]
    for name, labels in chosen.items():
        result, metric = read_result(suite_name, name), suite.studies[name].metric
        for label, seeds in result.get("runs", {}).items():
            for seed, run in seeds.items() if labels is None or label in labels else ():
                (_, first), (step, last) = run["curves"][metric][0], run["curves"][metric][-1]
                minutes = f"{run['step_seconds'] / 60:.0f} minutes of training"
                print(
                    f"{name}/{label} seed {seed}: {metric} {first:.3f} -> {last:.3f}, step {step}, {minutes}"
                )


def draw_curves(path: Path, metric: str, series: Series, count: int) -> None:
    """Draw the mean over the seeds as a line, the seeds faint behind it, and the interval of a share."""
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


if __name__ == "__main__":
    main()
