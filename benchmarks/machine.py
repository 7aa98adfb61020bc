"""Facts of the machine and of the code that a result comes from."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"


def report_head(computes: bool = True) -> dict[str, Any]:
    """Return command, device, commit, load (of one minute, before) and versions.

    Args:
        computes: False = only child processes do, on a CPU; accelerators are not taken from them.
    """
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words]),
        "device": processor_name(computes),
        "commit": git_commit(),
        "load": os.getloadavg()[0],
        "versions": {name: version_text(name) for name in ("jaxrl-llm", "jax", "jaxlib")},
    }


def version_text(package: str) -> str:
    """Return the version of a package; "not installed" for a checkout on PYTHONPATH."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def git_commit() -> str:
    """Return the commit of the code, "+" after it where files have changed; "" outside a repository or
    without git."""
    if not shutil.which("git"):
        return ""
    git = lambda *words: subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    changed = git("status", "--porcelain", "--untracked-files=no").stdout.strip()
    return git("rev-parse", "--short", "HEAD").stdout.strip() + "+" * bool(changed)


def sglang_version(python: str) -> str:
    """Return the version of SGLang in the environment of an interpreter."""
    script = "import importlib.metadata as m; print(m.version('sglang'))"
    return subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def processor_name(accelerators: bool = True) -> str:
    """Return the processor, or where jax is in use, which takes them, the accelerators."""
    jax = sys.modules.get("jax")
    if accelerators and jax and jax.default_backend() != "cpu":
        return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = [[part.strip() for part in line.partition(":")[::2]] for line in text.splitlines()]
    facts = dict(reversed(lines))  # of the first core
    name = facts.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in facts and not re.search(r"\d", name):  # a virtual machine may hide the model
        name += f", family {facts['cpu family']} model {facts['model']}"
    return f"{os.cpu_count()} cores of {name}"


def results_path(benchmark: str, processor: str) -> Path:
    """Return the file of a benchmark's results on a processor (`processor_name`), whatever its cores."""
    slug = re.sub("[^a-z0-9]+", "-", processor.rpartition(" cores of ")[2].lower()).strip("-")
    return RESULTS / f"{benchmark}_{slug}.json"


def kept_results(path: Path, part: str, versions: dict[str, Any]) -> dict[str, Any]:
    """Return the results of earlier runs in a file, unless another version of a package was used.

    Args:
        part: key of the report that has them, by name.
        versions: of the present run; packages that only one of the runs has do not matter.
    """
    report = json.loads(path.read_text()) if path.exists() else {"versions": {}, part: {}}
    known = report["versions"]
    if any(known.get(name, found) != found for name, found in versions.items()):
        return {}
    return {name: {"commit": report["commit"], **result} for name, result in report[part].items()}


def measure_cases(
    benchmark: str,
    description: str,
    cases: Mapping[str, Any],
    measure: Callable[[Any, int], dict[str, Any]],
    *,
    part: str,
    repetitions: int,
) -> None:
    """Measure the cases of the command line, print each, and save them with --save.

    Args:
        description: of the command.
        measure: returns the results of a case with so many repetitions.
        part: key of the report that has the results by name, and the flag that chooses cases.
        repetitions: by default.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(f"--{part}", nargs="+", choices=list(cases), default=list(cases))
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--save", action="store_true", help=f"write results/{benchmark}_PROCESSOR.json")
    options = parser.parse_args()
    report: dict[str, Any] = {**report_head(), part: {}}
    path = results_path(benchmark, report["device"])
    for name in getattr(options, part):
        result = {"commit": report["commit"], **measure(cases[name], options.repetitions)}
        report[part][name] = result
        print(f"{name}: {json.dumps(result)}", flush=True)
        if options.save:
            report[part] = kept_results(path, part, report["versions"]) | report[part]
            path.write_text(json.dumps(report, indent=1) + "\n")
