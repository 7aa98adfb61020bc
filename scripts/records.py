"""Write docs/records.md: the largest models that train on one device, and its longest rows.

    python scripts/records.py               # estimate docs/records.json again, then write the page
    python scripts/records.py --render      # only write the page
    python scripts/records.py --compile h100 "LoRA"     # compile the records of a device with these words

Needs `pip install 'jaxrl-llm[plan]'` and no accelerator. A compilation takes a minute or more; its result is
kept as long as the estimate finds the same command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE, PAGE = ROOT / "docs/records.json", ROOT / "docs/records.md"
GIB = 2**30
ONLY = "rollout,update"
"""Phases that are compiled: scoring takes less memory than the update."""
INTRO = """\
# Records by device

The largest models that train on one device, and the longest rows. **Estimated, not compiled**: state,
gradients, rollout weights and KV cache are the arrays of the run's own programs, activations are
arithmetic. A number after "compiled" is the peak that the real compiler reports for the rollout and the
update of the same command: **compiled, not run**. No record is confirmed on a card yet. The arithmetic was
compared with compiled plans of GPUs alone; programs of TPUs may take more.

    pip install 'jaxrl-llm[plan]'    # the TPU and CUDA compilers; no accelerator is needed
    python -m jaxrl_llm plan --records True --topology h100     # of your device, in a few minutes

Each of the [commands](#commands) compiles its recipe; with `train` in place of `plan`, and without
`--topology`, it runs. A run may use three quarters of a GPU's memory, XLA's default
(`XLA_CLIENT_MEM_FRACTION`). `python scripts/records.py` writes this page from [records.json](records.json).
"""
LARGEST = """\
## Largest model

GRPO of `configs/grpo_qwen.py` (64 prompts x 8 responses, old and reference log-probs, native rollout) with
rows of 4,096 tokens, `--model.remat full`, and as many `--rollout.slots` as fit, at least 4. Adapters have
rank 16; 8-bit moments come with bfloat16 weights, their remainders and bfloat16 gradients (on a T4 with
float32 ones). Models: SmolLM2 135M, Qwen3 0.6B to 32B, Llama 3.1 70B. In GiB the peak.
"""
LONGEST = """\
## Longest row

Tokens of a row with LoRA of rank 16. SFT: layer inputs in host memory (`--model.remat offload`), which is
not counted. GRPO: `--model.remat full`, 4 responses decoded at a time by the native engine, 8 prompts x 8
responses. Rows beyond 40,960 tokens have [YaRN](long_context.md#beyond-the-models-positions); 1,048,576 is
the longest that was tried.
"""
COMMANDS = "## Commands\n"


def estimate() -> None:
    """Estimate all records; results of compilations are kept for commands that stay."""
    before = {row["command"]: row.get("compiled") for row in _read()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.json"
        argv = [sys.executable, "-m", "jaxrl_llm", "plan", "--records", "True", "--json", str(file)]
        subprocess.run(argv, env=_environment(), cwd=ROOT, check=True)
        rows = json.loads(file.read_text())
    _write([row | {"compiled": before.get(row["command"])} for row in rows])


def compile_records(device: str, words: str) -> None:
    """Compile the commands of the records of a device whose names contain the words, one process each."""
    rows = _read()
    chosen = [row for row in rows if row["device"] == device and words in row["name"] and row["tokens"]]
    if not chosen:
        raise SystemExit(f"no record of {device} has a name with {words!r}")
    for row in chosen:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plan.json"
            argv = [sys.executable, *row["command"].split()[1:], "--only", ONLY, "--json", str(file)]
            print(row["command"], flush=True)
            subprocess.run(argv, env=_environment(), cwd=ROOT)
            plan = json.loads(file.read_text())
        row["compiled"] = {key: plan[key] for key in ("peak", "memory", "fits", "versions")}
        _write(rows)


def write_page() -> None:
    """Write docs/records.md."""
    rows = _read()
    devices = list(dict.fromkeys(row["device"] for row in rows))
    of = {device: [row for row in rows if row["device"] == device] for device in devices}
    text = INTRO
    for kind, head, cell in (("largest model, ", LARGEST, _model), ("longest row, ", LONGEST, _row)):
        lines = []
        for device in devices:
            found = [row for row in of[device] if row["name"].startswith(kind)]
            if not lines:
                names = [_column(row, kind) for row in found]
                lines = [["device", "GiB", *names], ["---"] * (len(names) + 2)]
            lines.append([device, f"{found[0]['memory'] / GIB:.2f}", *map(cell, found)])
        text += f"\n{head}\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
    compiled = [row["compiled"]["versions"] for row in rows if row["compiled"]]
    versions = sorted({", ".join(f"{name} {version}" for name, version in one.items()) for one in compiled})
    text += f"\nCompiled with {'; '.join(versions)}.\n" if versions else ""
    text += f"\n{COMMANDS}"
    for device in devices:
        text += f"\n### {device}\n\n"
        text += "".join(f"    {row['command']}\n" for row in of[device] if row["tokens"])
    PAGE.write_text(text)


def _column(row: dict[str, Any], kind: str) -> str:
    """Return the head of a column: the method, and of rows the model."""
    name = row["name"].removeprefix(kind)
    return name if kind.startswith("largest") else f"{name}, {row['model'].split('/')[1]}"


def _model(row: dict[str, Any]) -> str:
    return (
        f"{row['model'].split('/')[1]}, {row['estimate'] / GIB:.1f}{_compiled(row)}" if row["tokens"] else "-"
    )


def _row(row: dict[str, Any]) -> str:
    return f"{row['tokens']:,}{_compiled(row)}" if row["tokens"] else "-"


def _compiled(row: dict[str, Any]) -> str:
    """Return what the compiler found, if it was asked."""
    if not (plan := row["compiled"]):
        return ""
    peak = f"compiled {plan['peak']['bytes'] / GIB:.1f}"
    return f" ({peak})" if plan["fits"] else f" (**does not fit**: {peak})"


def _read() -> list[dict[str, Any]]:
    return json.loads(FILE.read_text()) if FILE.exists() else []


def _write(rows: list[dict[str, Any]]) -> None:
    FILE.write_text(json.dumps(rows, indent=1) + "\n")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}


def main(argv: list[str]) -> None:
    if argv[:1] == ["--compile"] and len(argv) == 3:
        compile_records(*argv[1:])
    elif argv not in ([], ["--render"]):
        raise SystemExit(__doc__)
    elif not argv:
        estimate()
    write_page()


if __name__ == "__main__":
    main(sys.argv[1:])
