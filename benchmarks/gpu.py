"""Kernels, trainer and rollout on one Hopper GPU, beside their targets (gpu_targets.py).

    make bench-gpu                               # with the packages that it needs
    python benchmarks/gpu.py                     # on a GPU, 12 minutes: benchmarks/results/gpu_parts_*.json
    python benchmarks/gpu.py --only update qlora # these parts alone; the others keep their results
    python benchmarks/gpu.py --compile h100      # no GPU: the same programs through the CUDA compiler
    python benchmarks/gpu.py --small             # any device, tiny shapes: a test of the script
    python benchmarks/gpu.py --table             # only write the table of README.md from the results

Each part (gpu_parts.py) is a separate process with a time limit, so that a part that fails or hangs ends
alone. Each number is saved as soon as it is measured. The same command again continues: parts with a result
of the same code, versions and device are not measured again (`--again` does), parts that were never started
come first, then parts that failed or ran out of time. `--compile` (gpu_compiled.py) needs `pip install
'jaxrl-llm[plan]'`; it proves that programs compile and what memory they take, and no speed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_targets import HEAD_SECONDS, PARTS, kind_of, mem_fraction, with_target, write_table
from machine import RESULTS, ROOT, report_head

RESULT, FAILURE = "RESULT ", "FAILURE "
"""Marks of the lines of a part's process that its parent reads."""
COMPILE_SECONDS = 3600
HEAD = "head"
SAME = ("sources", "versions", "device", "arguments")
"""Keys of a part's entry that a result must share with the present run to count as measured."""
CODE = ("jaxrl_llm", "kernels/jaxrl_kernels", "benchmarks", "configs")
Entry = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", metavar="KIND", help="h100 or h200: compile for it, run nothing")
    parser.add_argument("--small", action="store_true", help="tiny shapes; results in runs/gpu_small.json")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="these parts")
    parser.add_argument("--again", action="store_true", help="also measure parts that have a result")
    parser.add_argument("--limit", type=float, help="seconds of each part, in place of gpu_targets.py's")
    parser.add_argument("--results", type=Path, help="file of the results, if not in benchmarks/results")
    parser.add_argument("--table", action="store_true", help="only write the table of README.md")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        run_part(options.part, options.small, options.compile)
    elif options.table:
        write_table()
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the part, too
        path = measure_parts(options)
        if path.parent == RESULTS and not options.compile:
            write_table()


def run_part(name: str, small: bool, compiled_for: str | None) -> None:
    """Measure one part in this process: a line for each result, and for a failure."""
    emit = lambda mark, value: print(mark + json.dumps(value), flush=True)
    try:
        if name == HEAD:
            import jax

            jax.devices()
            emit(RESULT, ["device", report_head()["device"]])
            return
        if compiled_for:
            from gpu_compiled import compile_part

            results = compile_part(name, compiled_for)
        else:
            from gpu_parts import PARTS as functions

            results = functions[name](small)
        for result in results:
            emit(RESULT, result)
    except (Exception, SystemExit) as error:  # the other parts are measured
        traceback.print_exc()
        emit(FAILURE, f"{type(error).__name__}: {str(error)[-500:]}")


def measure_parts(options: argparse.Namespace) -> Path:
    """Measure the parts that have no result, each in a separate process. Returns the file of the results.

    Raises:
        SystemExit: the device cannot be opened, or is a CPU.
    """
    head = report_head(computes=False)
    head["device"] = options.compile or open_device()
    if " cores of " in head["device"] and not options.small:
        raise SystemExit(f"JAX sees no GPU, but {head['device']}: --small runs every part with tiny shapes")
    head["command"] = shown_command(sys.argv[1:])
    present = {**head, "sources": hash_sources(), "arguments": {"small": options.small}}
    path = options.results or results_file(head["device"], options)
    report = json.loads(path.read_text()) if path.exists() else {}
    entries: dict[str, Entry] = report.get("parts", {})
    label = {"label": "compiled, not run"} if options.compile else {}

    def save(name: str, entry: Entry) -> None:
        entries[name] = entry
        ordered = {part: entries[part] for part in PARTS if part in entries}
        write_atomically(path, {**label, "device": head["device"], "parts": ordered})

    start = time.perf_counter()
    for name in parts_to_measure(options.only, entries, present, again=options.again):
        limit = options.limit or (COMPILE_SECONDS if options.compile else PARTS[name].limit)
        print(f"{name}: at most {limit:.0f} s", flush=True)
        entry = {**present, "load": os.getloadavg()[0], "limit": limit}
        measure_part(name, entry, earlier=entries.get(name, {}), save=save, options=options)
    print(f"{time.perf_counter() - start:.0f} s in all; results in {path}", flush=True)
    return path


def shown_command(words: list[str]) -> str:
    """Return the command without the place of the results, which is of one machine."""
    at = words.index("--results") if "--results" in words else len(words)
    return shlex.join(["python", "benchmarks/gpu.py", *words[:at], *words[at + 2 :]])


def open_device() -> str:
    """Return the name of the device that the parts will use, from a process that ends and frees it."""
    found: dict[str, Any] = {}
    entry = {"device": "", "limit": HEAD_SECONDS}
    reason = run_process([sys.executable, __file__, "--part", HEAD], HEAD, entry, found.__setitem__)
    if reason:
        raise SystemExit(f"no device: {reason}")
    return found["device"]


def parts_to_measure(
    names: list[str], entries: dict[str, Entry], present: Entry, *, again: bool = False
) -> list[str]:
    """Return the parts that have no complete result of this code, versions, device and arguments.

    Parts that were never started come first, each group in order of value.
    """
    same = {name for name, entry in entries.items() if all(entry.get(key) == present[key] for key in SAME)}
    if again:
        return names
    unfinished = [name for name in names if name in same and entries[name]["reason"]]
    return [name for name in names if name not in same] + unfinished


def measure_part(
    name: str,
    entry: Entry,
    *,
    earlier: Entry,
    save: Callable[[str, Entry], None],
    options: argparse.Namespace,
) -> None:
    """Measure one part, and save it at its start, after each result and at its end.

    Args:
        entry: with head, arguments and limit of the present run.
        earlier: the part's entry of an earlier run, whose results stay if it was the same code.
    """
    kept = earlier.get("results", {}) if all(earlier.get(key) == entry.get(key) for key in SAME) else {}
    entry |= {"reason": "the run ended before the part did", "results": dict(kept)}
    save(name, entry)

    def record(key: str, value: Any) -> None:
        entry["results"][key] = with_target(name, key, value)
        print(f"  {key}: {json.dumps(value)}", flush=True)
        save(name, entry)

    words = [sys.executable, __file__, "--part", name, *["--small"] * options.small]
    words += ["--compile", options.compile] if options.compile else []
    start = time.perf_counter()
    entry["reason"] = run_process(words, name, entry, record)
    entry["seconds"] = time.perf_counter() - start
    print(f"  {entry['seconds']:.0f} s {entry['reason']}", flush=True)
    save(name, entry)


def run_process(words: list[str], name: str, entry: Entry, record: Callable[[str, Any], None]) -> str:
    """Run a part's process up to its limit, and pass on its results. Returns why it ended early, or ""."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / "runs/gpu_cache"),  # for a part that is measured again
        **os.environ,
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{mem_fraction(name, entry['device']):.3f}",
    }
    stopped, failure = threading.Event(), ""
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:

        def stop() -> None:
            stopped.set()
            end_group(process)

        timer = threading.Timer(entry["limit"], stop)
        timer.start()
        try:
            for line in process.stdout:
                if line.startswith(RESULT):
                    record(*json.loads(line.removeprefix(RESULT)))
                elif line.startswith(FAILURE):
                    failure = json.loads(line.removeprefix(FAILURE))
                else:
                    print(line, end="", flush=True)
            code = process.wait()
        finally:
            timer.cancel()
            end_group(process)  # also processes that the part started
    if stopped.is_set():
        return f"stopped after {entry['limit']:.0f} s"
    return f"failed: {failure}" if failure else f"ended with code {code}" * bool(code)


def end_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def results_file(device: str, options: argparse.Namespace) -> Path:
    """Return the file of the results of a device."""
    if options.small:
        return ROOT / "runs/gpu_small.json"
    return RESULTS / (
        f"gpu_compiled_{device}.json" if options.compile else f"gpu_parts_{kind_of(device)}.json"
    )


def write_atomically(path: Path, report: dict[str, Any]) -> None:
    """Write a file that is complete at every moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(path)


def hash_sources(root: Path = ROOT) -> str:
    """Return a hash of the code that the parts run: it needs no git, and shows changes without a commit."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in CODE for path in (root / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    main()
