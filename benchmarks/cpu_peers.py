"""The same work by jaxrl_llm, google-tunix and transformers/TRL, interleaved on this machine's CPU.

Work (peers/work.py): Qwen3 of 4 layers, width 256, vocabulary 2048, float32; 4 prompts of 64 tokens with 8
responses each of 128 tokens (ragged: geometric lengths, mean 40, at most 256), an AdamW step on 32 x 192
tokens, and the whole GRPO step. Each system runs in a process of its own; the driver requests one
repetition of each in turn (A B C A B C ...), so that other load affects all alike. Reported are medians,
and medians of the paired ratios peer / ours, of wall time and of CPU seconds of the process.

The peers' environments:

    python3.12 -m venv tunix && tunix/bin/pip install google-tunix==0.1.7
    python3.11 -m venv trl && trl/bin/pip install torch==2.13.0 transformers trl      # a CPU build of torch

Run (20 to 40 minutes; --smoke: one repetition):

    python benchmarks/cpu_peers.py --tunix tunix/bin/python --torch trl/bin/python

Writes results/cpu_peers.json and the table in README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CASES = {
    "rollout_fixed": "rollout, 32 x 128 new tokens",
    "rollout_ragged": "rollout, 32 ragged lengths",
    "train_step": "train step, 32 x 192 tokens",
    "grpo_step": "whole GRPO step",
}
SCRIPTS = {"ours": "ours.py", "tunix": "tunix_peer.py", "torch_trl": "torch_trl.py"}
BEGIN, END = "<!-- cpu_peers begin -->", "<!-- cpu_peers end -->"
Timing = dict[str, float]  # wall, cpu: seconds


class Peer:
    """A worker process with a protocol of JSON lines."""

    def __init__(self, name: str, python: str):
        self.name = name
        self.log = tempfile.NamedTemporaryFile("w+", suffix=f"_{name}.log", delete=False)  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, str(HERE / "peers" / SCRIPTS[name])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            bufsize=1,
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
    parser.add_argument("--torch", help="python of an environment with torch, transformers and trl")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--smoke", action="store_true", help="one repetition, nothing is written")
    arguments = parser.parse_args()
    pythons = {"ours": sys.executable, "tunix": arguments.tunix, "torch_trl": arguments.torch}
    peers = [Peer(name, python) for name, python in pythons.items() if python]
    results = {
        case: measure_case(case, peers, 1 if arguments.smoke else arguments.repetitions)
        for case in arguments.cases
    }
    report = {
        "command": reproducing_command(arguments),
        "machine": describe_machine(),
        "versions": {peer.name: peer.versions for peer in peers},
        "cases": results,
    }
    for peer in peers:
        peer.close()
    print(peers_table(report))
    if not arguments.smoke:
        (HERE / "results").mkdir(exist_ok=True)
        (HERE / "results" / "cpu_peers.json").write_text(json.dumps(report, indent=1) + "\n")
        replace_table(HERE / "README.md", peers_table(report))


def reproducing_command(arguments: argparse.Namespace) -> str:
    """Return the command of this run, with the paths of the environments as in the docstring above."""
    words = ["python benchmarks/cpu_peers.py"]
    words += ["--tunix tunix/bin/python"] * bool(arguments.tunix)
    words += ["--torch trl/bin/python"] * bool(arguments.torch)
    words += [f"--cases {' '.join(arguments.cases)}"] * (arguments.cases != list(CASES))
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
    }


def median(runs: list[Timing]) -> Timing:
    return {kind: statistics.median(run[kind] for run in runs) for kind in ("wall", "cpu")}


def ratios(peer: list[Timing], ours: list[Timing]) -> Timing:
    """Return medians of the paired ratios peer / ours: above 1 = ours is faster."""
    return median(
        [{kind: a[kind] / b[kind] for kind in ("wall", "cpu")} for a, b in zip(peer, ours, strict=True)]
    )


def peers_table(report: dict[str, Any]) -> str:
    """Return Markdown: seconds of each system (wall / CPU), and their ratios to ours."""
    names = list(report["versions"])
    versions = "; ".join(
        f"{name}: " + ", ".join(f"{package} {version}" for package, version in packages.items())
        for name, packages in report["versions"].items()
    )
    others = [name for name in names if name != "ours"]
    head = [
        "work",
        *(f"{name}, s (CPU s)" for name in names),
        *(f"{name} / ours, wall (CPU)" for name in others),
    ]
    lines = [f"`{report['command']}`", "", f"{report['machine']}", "", versions, ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for case, result in report["cases"].items():
        seconds = [
            f"{result['median'][name]['wall']:.2f} ({result['median'][name]['cpu']:.2f})" for name in names
        ]
        times = [
            f"{result['ratio'][name]['wall']:.2f} ({result['ratio'][name]['cpu']:.2f})" for name in others
        ]
        lines.append("| " + " | ".join([CASES[case], *seconds, *times]) + " |")
    return "\n".join(lines)


def replace_table(readme: Path, text: str) -> None:
    """Replace the text between the two marks."""
    page = readme.read_text()
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def describe_machine() -> str:
    """Return cores, processor, system and load."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if "model name" in line
        ]
        model = names[0] if names else model
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores of {model}, {platform.system()}; load average at the end {load}."


if __name__ == "__main__":
    main()
