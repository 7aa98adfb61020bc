"""Learning curves: run the studies of a suite, keep their results, draw them, write the suite's page.

Command:   make learn                        docs/learning.md, about three hours on 2 cores
           make real RECIPES=all             docs/real.md, hours on 2 cores; without RECIPES GRPO alone
           python benchmarks/learn.py --only dynamic_sampling --jobs 2
           python benchmarks/learn.py --suite real --only grpo/full sft --seeds 0 1 2 --jobs 1
           python benchmarks/learn.py --suite real --only grpo --time --trl_python PYTHON   seconds a step
           python benchmarks/learn.py --suite real --report      the page again from finished runs and results

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
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from learn_page import Points, read_result, result_path, write_report
from machine import ROOT, git_commit, processor_name
from studies import SUITES, TRL
from study import Suite

TIMED = "--steps 7 --eval.every 100 --eval.prompts 8"  # of `--time`
WARM_UP_STEPS = 2  # not counted there
TIME_ROUNDS = 2
NUM_SAMPLES = 8  # held-out problems whose responses before and after are kept


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
    return Job(Path(suite.runs) / "start" / start / str(seed), suite.start_arguments(start, seed))


def in_order(suite: Suite, names: list[str]) -> list[list[str]]:
    """Return the studies that need no other, then the others."""
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
    started = datetime.datetime.now(datetime.UTC)
    command = [*script, *words, "--run_dir", str(job.path)]
    log = contextlib.nullcontext() if options.jobs == 1 else job.path.with_suffix(".log").open("a")
    with log as output:
        code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    if not code:
        (job.path / "record.json").write_text(json.dumps(record_since(started)) + "\n")
    print(f"{'failed' if code else 'done'}  {job.path}", flush=True)
    return code


def record_since(started: datetime.datetime) -> dict[str, Any]:
    """Return facts of a run for its result: the load of the last 15 minutes, the start and the commit."""
    load = round(os.getloadavg()[2], 1)
    return {"load": load, "started": started.isoformat(timespec="seconds"), "commit": git_commit()}


def time_steps(options: argparse.Namespace, name: str, labels: Sequence[str]) -> None:
    """Measure the seconds of a step of each label, in turn so that other load affects all alike."""
    suite, seconds = SUITES[options.suite], {label: [] for label in labels}
    started = datetime.datetime.now(datetime.UTC)
    for turn in range(TIME_ROUNDS):
        for label in labels:
            job = jobs_of(suite, name, [turn], [label])[0]
            job = Job(Path(suite.runs) / "time" / name / label / str(turn), f"{job.arguments} {TIMED}")
            run_all([job], options)
            rows = rows_after_warm_up(job.path) if (job.path / "hf").is_dir() else []
            seconds[label] += [step_seconds(row) for row in rows if row["step"] > WARM_UP_STEPS]
    result = read_result(options.suite, name)
    medians = {label: median(values) for label, values in seconds.items() if values}
    result["timing"] = {**record_since(started), "step_seconds": medians}
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
        return Loader(config.data, tokenizer, config.seed, config.max_prompt_tokens, split=split)

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


# Results


def step_seconds(row: dict[str, Any]) -> float:
    """Return the seconds of a step without its evaluation."""
    return row["time/step"] - row.get("time/evaluate", 0.0)


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
        "seconds": sum(row["time/step"] for row in rows if row["step"]),
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
    """Return the metrics of a run from the end of its SFT warm-up on: step 0, with its last evaluation."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    end = max((i for i, row in enumerate(rows) if row["kind"] == "warm_start"), default=None)
    if end is None:
        return rows
    evaluation = {key: value for key, value in rows[end].items() if key.startswith("eval/")}
    steps = rows[end]["step"]
    later = [{**row, "step": row["step"] - steps} for row in rows[end + 1 :]]
    return [{"step": 0, "kind": "warm_start", "time/step": 0.0, **evaluation}, *later]


def points_of(rows: list[dict[str, Any]], metric: str) -> Points:
    return [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]


def command_of(job: Job) -> str:
    """Return the command of a run as a user types it."""
    if job.arguments.startswith(TRL):
        return f"python benchmarks/peers/{TRL} --run_dir {job.path}"
    return f"python -m jaxrl_llm.train {job.arguments}"


def print_summary(suite_name: str, chosen: dict[str, list[str] | None]) -> None:
    """Print a line for each run that was asked for and has finished."""
    suite = SUITES[suite_name]
    for name, labels in chosen.items():
        result, metric = read_result(suite_name, name), suite.studies[name].metric
        for label, seeds in result.get("runs", {}).items():
            for seed, run in seeds.items() if labels is None or label in labels else ():
                (_, first), (step, last) = run["curves"][metric][0], run["curves"][metric][-1]
                minutes = f"{run['seconds'] / 60:.0f} minutes"
                print(
                    f"{name}/{label} seed {seed}: {metric} {first:.3f} -> {last:.3f}, step {step}, {minutes}"
                )


if __name__ == "__main__":
    main()
