"""What the algorithms learn on generated sums: runs them, draws their curves, writes docs/learning.md.

Command:   make learn                        everything, about an hour on 2 cores
           python benchmarks/learn.py --only dynamic_sampling --jobs 2
Runs go to runs/learn/; one that is finished is not run again, so an interrupted collection goes on.

All start from the same supervised start of their seed: a small Qwen3 shown sums of three digits of which
60% are one too many (grpo_tiny.py with less noise). It has learned to add, and to make that mistake.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("runs/learn")
SEEDS = (0, 1, 2)
PASS = "eval/pass@1"
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#767676")
Series = dict[str, list[list[tuple[int, float]]]]  # label -> one curve a seed


@dataclass(frozen=True)
class Study:
    """Runs that are compared, and what they are to show."""

    claim: str
    runs: dict[str, str]  # label -> arguments; {start} is the seed's supervised start, {seed} its number
    holds: Callable[[dict[str, list[float]]], bool]  # of the last values of `metric`, by label
    metric: str = PASS
    recipe: str = "grpo_tiny.py"
    after: str = ""  # a study whose runs must exist before


def everywhere(bound: float) -> Callable[[dict[str, list[float]]], bool]:
    """Every seed of every label ends at `bound` or above."""
    return lambda last: all(value >= bound for values in last.values() for value in values)


def gains(label: str, over: str, by: float) -> Callable[[dict[str, list[float]]], bool]:
    """`label` ends above `over` by at least `by`, on the mean of the seeds."""
    return lambda last: mean(last[label]) - mean(last[over]) >= by


FLAWED = '--data.train.0.options {{"digits":1,"terms":3,"noise":0.6}}'
START = f"--config grpo_tiny.py --steps 0 {FLAWED.format()}"
RL = "--model.path {start} --warm_start.steps 0 --steps 100"
PAIRS = "--config dpo_tiny.py --model.path {start} --warm_start.steps 0 --steps 100"
OFTEN = "--minibatches_per_step 4 --optim.learning_rate 1e-3 --steps 60"
STUDIES: dict[str, Study] = {
    "online": Study(
        "Six on-line algorithms solve the quick start's task: at least 0.9 on held-out sums, each seed.",
        {
            "ppo": f"--config ppo_tiny.py {RL}",
            "grpo": RL,
            "rloo": f"{RL} --algo rloo",
            "reinforce_pp": f"{RL} --algo reinforce_pp",
            "dapo": f"{RL} --algo dapo",
            "gspo": f"{RL} --algo gspo",
        },
        everywhere(0.9),
    ),
    "sft_then_rl": Study(
        "RL adds at least 10 points to supervised training: as many more steps of either.",
        {"sft": f"{RL} --algo sft --optim.learning_rate 1e-3 {FLAWED}", "grpo": RL},
        gains("grpo", "sft", 0.10),
    ),
    "preferences": Study(
        "Preference losses raise how often the policy answers rightly (its win rate against a wrong answer).",
        {
            "dpo": PAIRS,
            "ipo": f"{PAIRS} --algo.loss ipo",
            "simpo": f"{PAIRS} --algo simpo",
            "orpo": f"{PAIRS} --algo orpo",
            "cpo": f"{PAIRS} --algo cpo",
            "kto": f"{PAIRS} --algo kto",
        },
        everywhere(0.5),
    ),
    "reward_model": Study(
        "A reward model tells right from wrong in at least 95% of held-out pairs.",
        {"reward_model": "--config reward_model_tiny.py"},
        everywhere(0.95),
        metric="eval/accuracy",
    ),
    "ppo_on_reward_model": Study(
        "PPO learns the task from that reward model alone.",
        {
            "ppo": f"--config ppo_reward_tiny.py {RL} "
            "--reward.models.0.path runs/learn/reward_model/reward_model/{seed}/hf"
        },
        everywhere(0.9),
        after="reward_model",
    ),
    "token_loss": Study(
        "Token-level loss (DAPO) does no worse than the mean of each response's mean (GRPO); on answers of "
        "one to three tokens there is little for it to change.",
        {"token": f"{RL} --algo.aggregation token", "sequence": f"{RL} --algo.aggregation sequence"},
        gains("token", "sequence", -0.02),
    ),
    "dynamic_sampling": Study(
        "Dynamic sampling: every group of an update teaches something, so small steps learn faster.",
        {
            "on": f"{RL} --prompts_per_step 8 --steps 60 --algo.dynamic_sampling True",
            "off": f"{RL} --prompts_per_step 8 --steps 60",
        },
        gains("on", "off", 0.0),
    ),
    "clip_higher": Study(
        "Clip-higher keeps entropy up when the policy is updated four times a step.",
        {"0.28": f"{RL} {OFTEN} --algo.clip_high 0.28", "0.2": f"{RL} {OFTEN} --algo.clip_high 0.2"},
        gains("0.28", "0.2", 0.0),
        metric="entropy",
    ),
    "truncated_importance_sampling": Study(
        "Rolled out with noisy weights, a run keeps learning with truncated importance sampling.",
        {
            "with": f"{RL} --rollout.weight_noise 0.5 --algo.correction.weight token",
            "without": f"{RL} --rollout.weight_noise 0.5",
        },
        gains("with", "without", 0.1),
    ),
    "distillation": Study(
        "On-policy distillation closes the gap to the teacher, a model that GRPO has taught.",
        {
            "gkd": f"--config gkd_tiny.py {RL} --algo.teachers runs/learn/online/grpo/{{seed}}/hf",
            "policy_gradient": f"--config gkd_tiny.py {RL} --algo.form policy_gradient "
            "--algo.teachers runs/learn/online/grpo/{seed}/hf",
        },
        everywhere(0.9),
        after="online",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    options = parser.parse_args()
    run_all([(start_dir(seed), f"{START} --seed {seed}") for seed in SEEDS], options.jobs)
    for wave in waves(options.only):
        run_all([job for name in wave for job in jobs(name)], options.jobs)
    write_report()


def start_dir(seed: int) -> Path:
    return RUNS / "start" / str(seed)


def waves(names: list[str]) -> list[list[str]]:
    """Studies that need no other, then those that do."""
    first = [name for name in names if not STUDIES[name].after]
    return [[STUDIES[name].after for name in names if STUDIES[name].after] + first, names]


def jobs(name: str) -> list[tuple[Path, str]]:
    study = STUDIES[name]
    found = []
    for label, arguments in study.runs.items():
        for seed in SEEDS:
            words = arguments.format(start=start_dir(seed) / "hf", seed=seed)
            recipe = "" if "--config" in words else f"--config {study.recipe} "
            found.append((RUNS / name / label / str(seed), f"{recipe}{words} --seed {seed}"))
    return found


def run_all(todo: list[tuple[Path, str]], parallel: int) -> None:
    """Run what has no model yet; stop at the first that fails."""
    todo = list(dict.fromkeys((path, words) for path, words in todo if not (path / "hf").is_dir()))
    with ThreadPoolExecutor(parallel) as pool:
        for (path, _), code in zip(todo, pool.map(run, todo), strict=True):
            if code:
                sys.exit(f"{path} failed; see {path}.log")


def run(job: tuple[Path, str]) -> int:
    path, words = job
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "jaxrl_llm.train", *words.split(), "--run_dir", str(path)]
    with path.with_suffix(".log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    print(f"{'failed' if code else 'done'}  {path}", flush=True)
    return code


def curves(name: str) -> Series:
    """label -> for each seed, (steps since the start, value of the study's metric)."""
    study = STUDIES[name]
    found: Series = {}
    for label in study.runs:
        for seed in SEEDS:
            file = RUNS / name / label / str(seed) / "metrics.jsonl"
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            rows = [row for row in rows if row["kind"] != "warm_start" or row["step"] == rows[-1]["step"]]
            points = [(row["step"], row[study.metric]) for row in rows if row.get(study.metric) is not None]
            found.setdefault(label, []).append(points)
    return found


def write_report() -> None:
    """docs/learning.md and a picture a study, of all studies whose runs are complete."""
    done = [name for name in STUDIES if all((path / "hf").is_dir() for path, _ in jobs(name))]
    lines = ["# What is learned", "", __doc__.split("\n\n", 1)[1].strip(), ""]
    lines += [
        "`make learn` makes this page. Values are of three seeds, at the first and the last evaluation.",
        "",
    ]
    lines += [f"    start: python -m jaxrl_llm.train {START} --seed 0", ""]
    for name in done:
        lines += section(name)
    (ROOT / "docs/learning.md").write_text("\n".join(lines))
    print(f"docs/learning.md: {len(done)} studies")


def section(name: str) -> list[str]:
    study, series = STUDIES[name], curves(name)
    last = {label: [points[-1][1] for points in seeds] for label, seeds in series.items()}
    verdict = "Seen" if study.holds(last) else "**Not seen**"
    draw(name, series)
    lines = [f"## {name.replace('_', ' ').capitalize()}", "", f"{study.claim} {verdict}.", ""]
    lines += [f"| {study.metric} | first | last | mean of last |", "|---|---|---|---|"]
    for label, seeds in series.items():
        numbers = lambda values: " ".join(f"{value:.3f}" for value in values)
        first = numbers(points[0][1] for points in seeds)
        lines.append(f"| {label} | {first} | {numbers(last[label])} | {mean(last[label]):.3f} |")
    lines += ["", f"![{name}](learning/{name}.png)", ""]
    arguments = {label: command(name, label) for label in study.runs}
    lines += [*(f"    {label}: {words}" for label, words in arguments.items()), ""]
    return lines


def command(name: str, label: str) -> str:
    """What was run, for seed 0."""
    words = next(words for path, words in jobs(name) if path.parent.name == label)
    return f"python -m jaxrl_llm.train {words}"


def draw(name: str, series: Series) -> None:
    """The mean over the seeds as a line, the seeds faint behind it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.2)
    for color, (label, seeds) in zip(COLORS, series.items(), strict=False):
        for points in seeds:
            axes.plot(*zip(*points, strict=True), color=color, alpha=0.2, lw=1)
        steps = [step for step, _ in seeds[0]]
        middle = [mean(dict(points).get(step, float("nan")) for points in seeds) for step in steps]
        axes.plot(steps, middle, color=color, lw=2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel(STUDIES[name].metric)
    axes.legend(frameon=False, ncols=3, fontsize=9)
    folder = ROOT / "docs/learning"
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / f"{name}.png")


if __name__ == "__main__":
    main()
