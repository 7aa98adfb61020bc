"""The same work by jaxrl_llm, google-tunix, transformers/TRL and SkyRL, interleaved on this machine's CPU.

Suites (peers/work.py), all float32:

    dense    Qwen3 of 4 layers, width 256, vocabulary 2048; 4 prompts of 64 tokens with 8 responses each of
             128 tokens (ragged: geometric lengths, mean 40, at most 256), log-probs of 32 x 192 tokens, an
             AdamW step on them, and the whole GRPO step
    lora     both steps with adapters of rank 8, alpha 32, on all linear layers of the same model (peft in
             TRL, qwix in Tunix); SkyRL, which trains adapters alone, does the train step and dense's rollouts
    moe      Qwen3-MoE of 8 experts of width 384, 2 a token, so with the same active weights
    long     an AdamW step of the dense model on 8 responses of 64 tokens to a prompt of 1,024, which ours
             computes once; not by Tunix
    smollm2  random weights in the shape of SmolLM2-135M; 8 prompts of 38 tokens with 8 responses each of 11,
             the work of a step of configs/grpo_smollm2.py; not by Tunix

Each system runs each case in a separate process; the driver requests one repetition of each in turn
(A B C A B C ...), so that other load affects all alike. Reported are medians, and medians of the paired
ratios peer / ours, of wall time and of CPU seconds of the process; and the process's peak of resident memory,
compilation included. "floor" is the matrix products of the work alone (peers/floor.py). On a busy machine use
`--core 0`: threads that wait for each other cost CPU seconds, OpenMP's (torch) most; one thread on one
core does not wait. All systems have their arrays in huge pages, as `make` and `doctor` advise.

The peers' environments:

    python3.12 -m venv tunix && tunix/bin/pip install google-tunix==0.1.7
    python3.11 -m venv trl && trl/bin/pip install torch==2.13.0 transformers trl peft  # torch for CPUs
    python3.12 -m venv skyrl && skyrl/bin/pip install torch 'skyrl[jax,tinker]==0.3.0'  # torch for CPUs

Run (20 to 40 minutes a suite; --smoke: one repetition):

    make bench TUNIX_PYTHON=tunix/bin/python TRL_PYTHON=trl/bin/python SKYRL_PYTHON=skyrl/bin/python  # all
    python benchmarks/cpu_peers.py --suites smollm2 --torch trl/bin/python
    python benchmarks/cpu_peers.py --report                       # the pages again from the results, no runs

Writes results/cpu_SUITE_PROCESSOR.json, so that each processor keeps its results (with --core
cpu_SUITE_one_core_PROCESSOR.json); with --cases those of the other cases are kept, too, if all packages of
systems in both runs have the same versions. Then the tables in README.md beside this file, a line for each
case into results/cpu_history.jsonl and from it HISTORY.md: the ratios over the commits.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import RESULTS, git_commit, kept_results, processor_name, results_path
from paired import paired_ratios

from jaxrl_llm.host import huge_pages

HERE = Path(__file__).parent
CASES = {
    "rollout_fixed": "rollout, 32 x 128 new tokens",
    "rollout_ragged": "rollout, 32 ragged lengths",
    "score": "log-probs, 32 x 192 tokens",
    "train_step": "train step, 32 x 192 tokens",
    "grpo_step": "whole GRPO step",
}
LORA_CASES = {
    "lora_train_step": "LoRA train step, 32 x 192 tokens",
    "lora_grpo_step": "whole GRPO step with LoRA",
}
MOE_CASES = {
    "moe_rollout_fixed": "rollout with experts, 32 x 128 new tokens",
    "moe_rollout_ragged": "rollout with experts, 32 ragged lengths",
    "moe_score": "log-probs with experts, 32 x 192 tokens",
    "moe_train_step": "train step with experts, 32 x 192 tokens",
    "moe_grpo_step": "whole GRPO step with experts",
}
DELTA_CASES = {
    "delta_rollout_fixed": "rollout of a hybrid, 32 x 128 new tokens",
    "delta_rollout_ragged": "rollout of a hybrid, 32 ragged lengths",
    "delta_score": "log-probs of a hybrid, 32 x 192 tokens",
    "delta_train_step": "train step of a hybrid, 32 x 192 tokens",
    "delta_grpo_step": "whole GRPO step of a hybrid",
}
LONG_CASES = {"long_train_step": "train step, 8 responses of 64 tokens to a prompt of 1,024"}
SMOLLM2_CASES = {
    "smollm2_rollout_fixed": "rollout of SmolLM2-135M, 64 x 11 new tokens",
    "smollm2_score": "log-probs of SmolLM2-135M, 64 x 49 tokens",
    "smollm2_train_step": "train step of SmolLM2-135M, 64 x 49 tokens",
    "smollm2_grpo_step": "whole GRPO step of SmolLM2-135M",
}
SUITES = {
    "dense": CASES,
    "lora": LORA_CASES,
    "moe": MOE_CASES,
    "delta": DELTA_CASES,
    "long": LONG_CASES,
    "smollm2": SMOLLM2_CASES,
}
ALL_CASES = CASES | LORA_CASES | MOE_CASES | DELTA_CASES | LONG_CASES | SMOLLM2_CASES
SCRIPTS = {
    "ours": "ours.py",
    "floor": "floor.py",
    "tunix": "tunix_peer.py",
    "torch_trl": "torch_trl.py",
    "skyrl": "skyrl_peer.py",
}
ENVIRONMENTS = {"tunix": ("tunix", "tunix"), "torch_trl": ("torch", "trl"), "skyrl": ("skyrl", "skyrl")}
"""The flag of each peer's interpreter, and the folder of its environment in the docstring above."""
SKYRL_CASES = {"rollout_fixed", "rollout_ragged", "lora_train_step"}
NOT_DONE = {
    "floor": {"rollout_ragged", "moe_rollout_ragged", *DELTA_CASES},
    "tunix": {*DELTA_CASES, *LONG_CASES, *SMOLLM2_CASES},
    "skyrl": ALL_CASES.keys() - SKYRL_CASES,
}
HISTORY_EXPLANATION = """\
Medians of the paired ratios of each run of [cpu_peers.py](cpu_peers.py), of wall time (of CPU seconds): above
1 ours is faster. "floor" is the matrix products alone, so below 1: the share of our time that they take.
From commit 7dec2a6 on attention's products are among them, and huge pages are set for all systems. Floors of
training before 2026-11-25 were 1.5 to 2 times too high: passes that averaged the results of products were in
them, and the head multiplied prompts, too.
Versions and machine of each run are in [results/cpu_history.jsonl](results/cpu_history.jsonl); a "+" after a
commit says that files had changed since.
"""
HISTORY = RESULTS / "cpu_history.jsonl"
Timing = dict[str, float]  # wall, cpu: seconds; peak_mb


class Peer:
    """A worker process with a protocol of JSON lines."""

    def __init__(self, name: str, python: str, core: int | None):
        self.name = name
        self.log = tempfile.NamedTemporaryFile("w+", suffix=f"_{name}.log", delete=False)  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, str(HERE / "peers" / SCRIPTS[name])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            bufsize=1,
            env={**os.environ, "GLIBC_TUNABLES": huge_pages.SETTING},
            preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
        )
        self.versions = self._answer()

    def request(self, **message: Any) -> dict[str, Any]:
        """Send a message and return the reply."""
        self.process.stdin.write(json.dumps(message) + "\n")
        return self._answer()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it ended; see {self.log.name}"}
        if "error" in answer:
            raise SystemExit(f"{self.name}: {answer['error']}")
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tunix", help="python of an environment with google-tunix; left out: not compared")
    parser.add_argument("--torch", help="python of an environment with torch, transformers, trl and peft")
    parser.add_argument("--skyrl", help="python of an environment with skyrl")
    parser.add_argument("--suites", nargs="+", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--cases", nargs="+", choices=list(ALL_CASES), help="some of them only")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--core", type=int, help="run on this core alone, with one thread")
    parser.add_argument("--smoke", action="store_true", help="one repetition, nothing is written")
    parser.add_argument("--report", action="store_true", help="only write the pages from the results")
    arguments = parser.parse_args()
    commit = git_commit()  # before anything is written, which would count as a change
    for suite in () if arguments.report else arguments.suites:
        cases = [case for case in SUITES[suite] if case in (arguments.cases or SUITES[suite])]
        if cases:
            measure_suite(suite, cases, commit, arguments)
    if arguments.report:
        write_tables()


def measure_suite(suite: str, cases: list[str], commit: str, arguments: argparse.Namespace) -> None:
    """Run the cases of one suite; after each, print its results and write them."""
    pythons = {"ours": sys.executable, "floor": sys.executable}
    pythons |= {name: getattr(arguments, flag) for name, (flag, _) in ENVIRONMENTS.items()}
    load, versions, results = os.getloadavg(), {}, {}
    cores = "" if arguments.core is None else "_one_core"
    path = results_path(f"cpu_{suite}{cores}", processor_name())
    for case in cases:
        chosen = [name for name in pythons if pythons[name] and case not in NOT_DONE.get(name, ())]
        peers = [Peer(name, pythons[name], arguments.core) for name in chosen]
        versions |= {peer.name: peer.versions for peer in peers}
        measured = measure_case(case, peers, 1 if arguments.smoke else arguments.repetitions)
        results[case] = {"commit": commit, **measured}
        for peer in peers:
            peer.close()
        kept, earlier = kept_cases(path, suite, versions)
        report = {
            "command": reproducing_command(suite, arguments),
            "commit": commit,
            "machine": describe_machine(load),
            "versions": earlier | versions,
            "cases": kept | results,
        }
        print(peers_table(report), flush=True)
        if not arguments.smoke:
            path.write_text(json.dumps(report, indent=1) + "\n")
            with HISTORY.open("a") as history:
                history.write(json.dumps(history_row(case, report)) + "\n")
            write_tables()


def kept_cases(path: Path, suite: str, versions: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the cases of earlier runs of the suite with these versions, and their systems' versions."""
    cases = kept_results(path, "cases", versions)
    if path.exists() and not cases:
        print(f"results of other versions are replaced: {path.name}", flush=True)
    earlier = json.loads(path.read_text())["versions"] if cases else {}
    return {case: cases[case] for case in SUITES[suite] if case in cases}, earlier


def write_tables() -> None:
    """Write the tables of README.md and HISTORY.md from the results."""
    for suite in SUITES:
        replace_table(HERE / "README.md", f"cpu_{suite}", suite_tables(suite))
    (HERE / "HISTORY.md").write_text(history_page(read_history()))


def processor_of(report: dict[str, Any]) -> str:
    """Return the processor of a report or of a row of the history, without cores, system and load."""
    cores_and_processor = report["machine"].rpartition("; load average")[0].rpartition(", ")[0]
    return cores_and_processor.partition(" cores of ")[2]


def suite_tables(suite: str, folder: Path = RESULTS) -> str:
    """Return the tables of a suite on all processors that have results, sorted by processor."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob(f"cpu_{suite}_*.json"))]
    return "\n\n".join(peers_table(report) for report in sorted(reports, key=processor_of))


def reproducing_command(suite: str, arguments: argparse.Namespace) -> str:
    """Return the command of this suite, with the paths of the environments as in the docstring above."""
    words = [f"python benchmarks/cpu_peers.py --suites {suite}"]
    words += [
        f"--{flag} {folder}/bin/python"
        for name, (flag, folder) in ENVIRONMENTS.items()
        if getattr(arguments, flag) and not SUITES[suite].keys() <= NOT_DONE.get(name, set())
    ]
    words += [f"--core {arguments.core}"] * (arguments.core is not None)
    words += [f"--cases {' '.join(arguments.cases or ())}"] * bool(arguments.cases)
    return " ".join([*words, f"--repetitions {arguments.repetitions}"])


def measure_case(case: str, peers: list[Peer], repetitions: int) -> dict[str, Any]:
    """Run all repetitions of one case, interleaving the systems; the first repetition is not counted."""
    first = {peer.name: peer.request(prepare=case)["first_seconds"] for peer in peers}
    timings: dict[str, list[Timing]] = {peer.name: [] for peer in peers}
    for repetition in range(repetitions + 1):
        for peer in peers:
            timing = peer.request(run=case, repetition=repetition)
            print(
                f"{case} {repetition} {peer.name:10} {timing['wall']:7.3f} s, CPU {timing['cpu']:7.3f} s",
                flush=True,
            )
            if repetition:
                timings[peer.name].append(timing)
    return {
        "first_seconds": first,
        "timings": timings,
        "median": {name: median(runs) for name, runs in timings.items()},
        "ratio": {name: ratios(runs, timings["ours"]) for name, runs in timings.items() if name != "ours"},
        "peak_mb": {name: max(run["peak_mb"] for run in runs) for name, runs in timings.items()},
    }


def median(runs: list[Timing]) -> Timing:
    return {kind: statistics.median(run[kind] for run in runs) for kind in ("wall", "cpu")}


def ratios(peer: list[Timing], ours: list[Timing]) -> Timing:
    """Return medians of the paired ratios peer / ours: above 1 = ours is faster."""
    return {kind: statistics.median(paired_ratios(peer, ours, kind)) for kind in ("wall", "cpu")}


def peers_table(report: dict[str, Any]) -> str:
    """Return Markdown: seconds of each system (wall, CPU), peak memory, and ratios to ours of the seconds."""
    names = list(report["versions"])
    versions = "; ".join(
        f"{name}: " + ", ".join(f"{package} {version}" for package, version in packages.items())
        for name, packages in report["versions"].items()
    )
    others = [name for name in names if name != "ours"]
    head = [
        "work",
        *(f"{name}, s (CPU s), MB" for name in names),
        *(f"{name} / ours, wall (CPU)" for name in others),
    ]
    lines = [
        f"`{report['command']}`, commit {report['commit']}",
        "",
        f"{report['machine']}",
        "",
        versions,
        "",
    ]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for case, result in report["cases"].items():
        commit = result.get("commit", report["commit"])
        work = ALL_CASES[case] + f" (commit {commit})" * (commit != report["commit"])
        seconds = [
            f"{seconds_text(result['median'][name])}, {result['peak_mb'][name]:.0f}"
            if name in result["median"]
            else ""
            for name in names
        ]
        times = [seconds_text(result["ratio"][name]) if name in result["ratio"] else "" for name in others]
        lines.append("| " + " | ".join([work, *seconds, *times]) + " |")
    return "\n".join(lines)


def seconds_text(timing: Timing) -> str:
    return f"{timing['wall']:.2f} ({timing['cpu']:.2f})"


def history_row(case: str, report: dict[str, Any]) -> dict[str, Any]:
    """Return a case's row of the history: the ratios, which machines and load change least."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    same = {key: report[key] for key in ("commit", "machine", "versions")}
    return {"case": case, "date": date, **same, "ratio": report["cases"][case]["ratio"]}


def read_history() -> list[dict[str, Any]]:
    return [json.loads(line) for line in HISTORY.read_text().splitlines()] if HISTORY.exists() else []


def history_page(rows: list[dict[str, Any]]) -> str:
    """Return Markdown with a table a case: the ratios by commit, oldest first."""
    lines = ["# Ratios over the commits", "", HISTORY_EXPLANATION]
    for case, description in ALL_CASES.items():
        chosen = [row for row in rows if row["case"] == case]
        names = [name for name in SCRIPTS if any(name in row["ratio"] for row in chosen)]
        if chosen:
            heads = " | ".join(f"{name} / ours" for name in names)
            lines += [
                f"## {description}",
                "",
                f"| date | commit | processor | {heads} |",
                "|" + "---|" * (3 + len(names)),
            ]
        for row in chosen:
            ratios = " | ".join(
                seconds_text(row["ratio"][name]) if name in row["ratio"] else "" for name in names
            )
            lines.append(f"| {row['date']} | {row['commit']} | {processor_of(row)} | {ratios} |")
        lines += [""] * bool(chosen)
    return "\n".join(lines).rstrip() + "\n"


def replace_table(readme: Path, name: str, text: str) -> None:
    """Replace the text between the two marks of this name."""
    begin, end = f"<!-- {name} begin -->", f"<!-- {name} end -->"
    page = readme.read_text()
    before, after = page.partition(begin)[0], page.partition(end)[2]
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def describe_machine(load_before: tuple[float, ...]) -> str:
    """Return cores, processor, system and load."""
    before, after = (", ".join(f"{value:.1f}" for value in load) for load in (load_before, os.getloadavg()))
    return f"{processor_name()}, {platform.system()}; load average at the start {before}, at the end {after}."


if __name__ == "__main__":
    main()
