"""Writes docs/fit.md: which models fit which slices, as `python -m jaxrl_llm plan` finds by compiling.

    python scripts/fit.py               # compiles what docs/fit/ lacks, then writes the page
    python scripts/fit.py --render      # only writes the page
    python scripts/fit.py NAME ...      # compiles these anew
    python scripts/fit.py NAME --only update,decode     # these phases alone

Needs `pip install 'jaxrl-llm[plan]'` and no accelerator; minutes a case, the largest longest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER, PAGE = ROOT / "docs/fit", ROOT / "docs/fit.md"
RECIPE = ["--config", "grpo_qwen.py", "--model.remat", "full", "--rollout.dtype", "bfloat16"]
GIB = 2**30


class Case(NamedTuple):
    """One line of the page."""

    model: str
    topology: str
    flags: str = ""

    @property
    def name(self) -> str:
        return f"{self.model.split('/')[1]}-{self.topology}".lower().replace(":", "-")

    @property
    def slots(self) -> str:
        """Sequences written side by side."""
        words = self.flags.split()
        return words[words.index("--rollout.slots") + 1] if "--rollout.slots" in words else "64"


CASES = [
    Case("Qwen/Qwen3-0.6B", "h100"),
    Case("Qwen/Qwen3-0.6B", "v5e-8", "--rollout.slots 128"),
    Case("Qwen/Qwen3-0.6B", "v6e-4", "--rollout.slots 128"),
    Case("Qwen/Qwen3-4B", "h100x8", "--rollout.slots 256"),
    Case("Qwen/Qwen3-4B", "v5e-16", "--rollout.slots 128 --mesh.tensor 2"),
    Case("Qwen/Qwen3-8B", "h100x8", "--rollout.slots 256"),
    Case("Qwen/Qwen3-8B", "v6e-16", "--rollout.slots 256"),
    Case("Qwen/Qwen3-8B", "v5e-64", "--rollout.slots 256 --mesh.tensor 4"),
    Case("Qwen/Qwen3-32B", "h200x8", "--rollout.slots 256 --mesh.tensor 4"),
    Case("Qwen/Qwen3-32B", "v5p-64", "--rollout.slots 256 --mesh.tensor 4"),
    Case("meta-llama/Llama-3.1-70B", "v5p-256", "--rollout.slots 256 --mesh.tensor 8"),
    Case("meta-llama/Llama-3.1-70B", "v6e-256", "--rollout.slots 256 --mesh.tensor 8"),
]
INTRO = """\
# What fits where

GRPO as in `configs/grpo_qwen.py` (64 prompts x 8 responses, 512 + 1024 tokens, old and reference log-probs,
native rollout), with `--model.remat full --rollout.dtype bfloat16` and the mesh and slots of each line.
**Compiled, not run**: every program of a step went through the real compiler for these devices on a machine
that has none of them. That proves that it compiles and how much memory it takes; it proves no speed. The
estimate is a roofline of a step in which every response has its full length: for each program the slowest of
arithmetic at the published peak, of memory and of the links, so a real step takes longer. Decoding counts as
if each token read the whole cache; of pages it reads those in use, some two thirds over a step.
Written by `make fit`; the numbers of every phase are in [docs/fit](fit).

Your own recipe on your own slice:

    pip install 'jaxrl-llm[plan]'    # the TPU and CUDA compilers; needs no accelerator
    python -m jaxrl_llm plan --config grpo_qwen.py --topology v5e-16
    python -m jaxrl_llm plan --config grpo_qwen.py --model.path Qwen/Qwen3-8B --topology v5p-16

prints memory by phase and device, collectives, FLOPs, the estimate, and what to change if it does not fit
(exit code 1). Keys are those of training. Names: v4-N, v5e-N, v5p-N, v6e-N, tpu7x-N, shapes such as
v5e:4x4, h100, h100xN, h200xN, cpu.

| model | devices | mesh, slots | state | rollout weights | KV cache | activations | peak | fits | step |
|---|---|---|---|---|---|---|---|---|---|
"""
NOTES = """
All bytes are GiB of each device. State: weights, optimizer, gradients and the frozen reference;
activations: the largest of any phase; peak: of the phase that needs most, against what a run may use there
(on a TPU what the compiler grants, on a GPU three quarters, XLA's default). A peak comes from one phase, so
it is no sum of the line. Where a number of phases is given, the other phases of the step were not compiled.
"""


def compile_case(case: Case, only: str) -> None:
    """Plan it in a process of its own; what the compiler says goes to the terminal."""
    argv = [sys.executable, "-m", "jaxrl_llm", "plan", *RECIPE, "--model.path", case.model, "--topology"]
    argv += [case.topology, "--only", only, "--json", str(FOLDER / f"{case.name}.json"), *case.flags.split()]
    print(" ".join(argv), flush=True)
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    subprocess.run(argv, env=env, cwd=ROOT)


def line(case: Case) -> str:
    """A row of the table."""
    file = FOLDER / f"{case.name}.json"
    if not file.exists():
        return f"| {case.model} | {case.topology} | {case.flags} | not compiled yet | | | | | | |"
    plan = json.loads(file.read_text())
    rows, peak = plan["rows"], plan["peak"]
    most = lambda *parts: max(sum(row["memory"][part] for part in parts) for row in rows) / GIB
    state = most("parameters", "optimizer", "gradients", "frozen models")
    mesh = " x ".join(f"{name} {size}" for name, size in plan["mesh"].items() if size > 1) or "one device"
    cells = [
        case.model,
        case.topology,
        f"{mesh}; {case.slots} slots",
        f"{state:.2f}",
        f"{most('rollout weights'):.2f}",
        f"{most('KV cache'):.2f}",
        f"{most('activations'):.2f}",
        f"{peak['bytes'] / GIB:.2f} of {plan['memory'] / GIB:.2f}, {peak['phase']}",
        ("yes" if plan["fits"] else "**no**") + f" ({len(rows)} phases)" * bool(plan["only"]),
        f"{plan['step_seconds']:.1f} s",
    ]
    return "| " + " | ".join(cells) + " |"


def render() -> None:
    """docs/fit.md from what has been compiled."""
    plans = [json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))]
    versions = sorted({", ".join(f"{k} {v}" for k, v in plan["versions"].items()) for plan in plans})
    compiler = f"Compiled with {'; '.join(versions)}.\n" if versions else "Nothing has been compiled yet.\n"
    PAGE.write_text(INTRO + "\n".join(map(line, CASES)) + "\n" + NOTES + compiler)


def main(argv: list[str]) -> None:
    only = argv.pop(argv.index("--only") + 1) if "--only" in argv else ""
    known = {case.name: case for case in CASES}
    if unknown := set(argv) - {*known, "--render", "--only"}:
        raise SystemExit(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    FOLDER.mkdir(exist_ok=True)
    wanted = [known[name] for name in argv if name in known]
    missing = [case for case in CASES if not (FOLDER / f"{case.name}.json").exists()]
    for case in [] if "--render" in argv else wanted or missing:
        compile_case(case, only)
    render()


if __name__ == "__main__":
    main(sys.argv[1:])
