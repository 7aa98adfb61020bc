"""Write docs/fit.md: which models fit which slices, by `python -m jaxrl_llm plan`. Also write the tables of
slices in docs/placement.md and of rows of a million tokens in docs/long_context.md.

    python scripts/fit.py               # compile the cases missing in docs/fit/, then write the pages
    python scripts/fit.py --render      # only write the pages
    python scripts/fit.py NAME ...      # compile these again
    python scripts/fit.py NAME --only update,score      # these phases again, the others as they are

Needs `pip install 'jaxrl-llm[plan]'` and no accelerator; minutes a case, the largest longest.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER, PAGE = ROOT / "docs/fit", ROOT / "docs/fit.md"
PAGE_OF_SLICES, PAGE_OF_LONG_ROWS = ROOT / "docs/placement.md", ROOT / "docs/long_context.md"
FLAGS = ["--model.remat", "full", "--rollout.dtype", "bfloat16", "--share_prefixes", "False"]
RECIPE = ["--config", "grpo_qwen.py"]
GIB = 2**30
COMPRESSED = "--optim.moments int8 --optim.store_param_remainders True --optim.grad_dtype bfloat16"
QLORA = "--lora.rank 32 --lora.quantize nf4"
SMALL = 2**20
"""Bytes of a call that the second table leaves out where their floor is 0."""
MORE_FLAGS = ("--tokens_per_device",)
"""Flags of a case that its line names besides mesh and slots."""


class Case(NamedTuple):
    """A model on a slice: a line of a table, or a column of the table of floors."""

    model: str
    topology: str
    flags: str = ""
    group: str = ""  # "" and "full" = the first table, "floors" = the recipe as it is
    only: str = ""  # of `plan`

    @property
    def name(self) -> str:
        adapters = ["lora"] * (self.group == "long" and "--lora.rank" in self.flags)
        parts = [self.group, self.model.split("/")[1], self.topology, *adapters]
        return "-".join(filter(None, parts)).lower().replace(":", "-")

    @property
    def settings(self) -> str:
        """Sequences decoded concurrently, and what is trained or offloaded."""
        words = self.flags.split()
        value = dict(zip(words[::2], words[1::2], strict=True))
        parts = [f"{value.get('--rollout.slots', '64')} slots"]
        base = f" on {value['--lora.quantize']}" if "--lora.quantize" in value else ""
        parts += [f"LoRA rank {value.get('--lora.rank')}{base}"] * ("--lora.rank" in value)
        parts += ["8-bit moments"] * ("--optim.moments" in value)
        parts += ["bfloat16 weights with remainders"] * ("--optim.store_param_remainders" in value)
        parts += ["bfloat16 gradients"] * ("--optim.grad_dtype" in value)
        parts += ["moments on the host"] * ("--optim.offload" in value)
        parts += ["reference on the host"] * ("--reference.offload" in value)
        return ", ".join(parts)


CASES = [
    Case("Qwen/Qwen3-0.6B", "h100"),
    Case("Qwen/Qwen3-4B", "h100", COMPRESSED),
    Case("Qwen/Qwen3-8B", "h100", "--lora.rank 32"),
    Case("Qwen/Qwen3-8B", "h200", COMPRESSED),
    Case("Qwen/Qwen3.5-9B", "h100", "--lora.rank 32"),
    Case("Qwen/Qwen3.5-9B", "h100", f"{COMPRESSED} --optim.offload True --reference.offload True", "full"),
    Case("Qwen/Qwen3-8B", "rtx4090", f"{QLORA} --rollout.slots 8 --tokens_per_device 1536"),
    Case("Qwen/Qwen3-8B", "v5e-4", f"{QLORA} --rollout.slots 16 --tokens_per_device 2048"),
    Case("Qwen/Qwen3-32B", "h100x8", "--lora.rank 32 --rollout.slots 256 --mesh.tensor 8"),
    Case(
        "Qwen/Qwen3-32B", "v5e-16", "--lora.rank 32 --lora.quantize int8 --rollout.slots 64 --mesh.tensor 8"
    ),
    Case("meta-llama/Llama-3.1-70B", "h100x8", f"{QLORA} --rollout.slots 128 --mesh.tensor 8"),
    Case("Qwen/Qwen3-0.6B", "v5e-8", "--rollout.slots 128"),
    Case("Qwen/Qwen3-0.6B", "v6e-4", "--rollout.slots 128"),
    Case("Qwen/Qwen3-4B", "h100x8", "--rollout.slots 256"),
    Case("Qwen/Qwen3-4B", "v5e-16", "--rollout.slots 128 --mesh.tensor 2"),
    Case("Qwen/Qwen3-8B", "h100x8", "--rollout.slots 256"),
    Case("Qwen/Qwen3-8B", "v6e-16", "--rollout.slots 256"),
    Case(
        "Qwen/Qwen3-8B",
        "v5e-16",
        "--rollout.slots 128 --mesh.tensor 2 --rollout.mesh.tensor 4 --tokens_per_device 1536 "
        "--optim.offload True",
    ),
    Case("Qwen/Qwen3-8B", "v5e-64", "--rollout.slots 256 --mesh.tensor 4"),
    Case("Qwen/Qwen3-32B", "h200x8", "--rollout.slots 256 --mesh.tensor 4"),
    Case("Qwen/Qwen3-32B", "v5p-64", "--rollout.slots 256 --mesh.tensor 4"),
    Case("Qwen/Qwen3-30B-A3B", "h100x8", f"{COMPRESSED} --rollout.slots 256 --tokens_per_device 9216"),
    Case("Qwen/Qwen3-30B-A3B", "v6e-16", f"{COMPRESSED} --rollout.slots 256 --tokens_per_device 4608"),
    Case("Qwen/Qwen3-30B-A3B", "v5p-16", "--rollout.slots 256"),
    Case("Qwen/Qwen3.5-35B-A3B", "h100x8", "--lora.rank 32 --rollout.slots 256 --tokens_per_device 3072"),
    Case("Qwen/Qwen3.5-35B-A3B", "v6e-16", "--lora.rank 32 --rollout.slots 256 --tokens_per_device 3072"),
    Case("google/gemma-4-E2B", "v5e-16", "--optim.moments int8 --rollout.slots 128 --mesh.tensor 2"),
    Case(
        "google/gemma-4-31B",
        "v5e-16",
        "--lora.rank 32 --lora.quantize int8 --rollout.slots 16 --mesh.tensor 4 --rollout.mesh.tensor 8 "
        "--tokens_per_device 4096",
    ),
    Case("Qwen/Qwen3-235B-A22B", "v5p-128", "--rollout.slots 256 --mesh.expert 8 --optim.moments int8"),
    Case("Qwen/Qwen3-235B-A22B", "h200x64", "--rollout.slots 256 --mesh.expert 8 --optim.moments int8"),
    Case("deepseek-ai/DeepSeek-V3", "v5p-512", "--rollout.slots 512 --mesh.expert 16"),
    Case(
        "deepseek-ai/DeepSeek-V3",
        "tpu7x-256",
        "--rollout.slots 512 --mesh.expert 16 --rollout.mesh.tensor 4 --optim.moments int8",
    ),
    Case("meta-llama/Llama-3.1-70B", "v5p-256", "--rollout.slots 256 --mesh.tensor 8"),
    Case("meta-llama/Llama-3.1-70B", "v6e-256", "--rollout.slots 256 --mesh.tensor 8"),
]
FLOORS = [
    Case("Qwen/Qwen3-0.6B", topology, "--rollout.slots 128", "floors")
    for topology in ("v5e-8", "v6e-4", "v5p-8", "h100x8")
]
SLICES = [
    Case("Qwen/Qwen3-32B", "2xv5e-256", "--mesh.slices 2 --mesh.data 2 --mesh.tensor 4", "slices", "update"),
    Case("Qwen/Qwen3-32B", "2xv5p-128", "--mesh.slices 2 --mesh.data 2", "slices", "update"),
    Case("Qwen/Qwen3-8B", "h100x32", "--mesh.slices 4 --mesh.data 4", "slices", "update"),
]
LORA_INT8 = "--lora.rank 32 --lora.quantize int8 --tokens_per_device 4608 --mesh.expert 8"
EIGHT_STAGES = "--mesh.fsdp 1 --mesh.stage 8"
TWO_STAGES = "--mesh.fsdp 8 --mesh.stage 2 --mesh.expert 16"
STAGES = [
    Case(
        "Qwen/Qwen3-235B-A22B", "h100x64", f"{COMPRESSED} {EIGHT_STAGES} --mesh.expert 8", "stages", "update"
    ),
    Case("deepseek-ai/DeepSeek-V3", "h100x64", f"{LORA_INT8} {EIGHT_STAGES}", "stages", "update"),
    Case("deepseek-ai/DeepSeek-V3", "h100x64", LORA_INT8, "no-stages", "update"),
    Case("deepseek-ai/DeepSeek-V3", "v5p-512", TWO_STAGES, "stages", "update"),
]
"""Lines of a table of docs/fit.md that is written by hand."""
LONG_ROWS = (
    "--model.yarn_factor 32 --model.yarn_original 32768 --mesh.fsdp 1 --max_prompt_tokens 1024 "
    "--max_response_tokens 1047552 --prompts_per_step 4 --responses_per_prompt 2 --minibatches_per_step 1"
)
LONG = [
    Case("Qwen/Qwen3-8B", topology, f"{LONG_ROWS} {mesh} {trained}".strip(), "long", "score,update")
    for topology, mesh in (
        ("h200x64", "--mesh.sequence 64 --tokens_per_device 16384"),
        ("v5p-64", "--mesh.sequence 32 --tokens_per_device 32768"),
    )
    for trained in ("--lora.rank 32", "")
]
INTRO = """\
# Memory and roofline by model and slice

**Compiled, not run**: every program of a GRPO step went through the real compiler for these devices on a
machine that has none of them. This shows that the step compiles and how much memory it takes, but not how
fast it is.

## Requirements

    pip install 'jaxrl-llm[plan]'    # the TPU and CUDA compilers; no accelerator is needed
    python -m jaxrl_llm plan --config grpo_qwen.py --topology v5e-16
    python -m jaxrl_llm plan --config grpo_qwen.py --model.path Qwen/Qwen3-8B --topology v5p-16

The last two commands print memory by phase and kind, collectives, FLOPs, the roofline, and what to change
if it does not fit (exit code 1), for any recipe and the flags of training. Topologies: v4-N, v5e-N, v5p-N,
v6e-N, tpu7x-N, shapes such as v5e:4x4, h100, h200, b200, a100 (80 GB), a100-40, l4, rtx4090, t4, up to 8
of them such as h100x8, hosts of 8 such as h200x64, cpu.

The table below is GRPO as in `configs/grpo_qwen.py` (64 prompts x 8 responses, 512 + 1024 tokens, old and
reference log-probs, native rollout), with `--model.remat full --rollout.dtype bfloat16`, `--share_prefixes
False` and the mesh and settings of each line. `make fit` writes it; the numbers of every phase are in
[docs/fit](fit).

## Results

GiB of each device.

| model | devices | mesh | state | rollout weights | KV cache | activations | host | peak | fits | roofline |
|---|---|---|---|---|---|---|---|---|---|---|
"""
NOTES = """
- State: weights, optimizer, gradients and the frozen reference. Activations: the largest of any phase.
- Host: memory on the host for each device, for offloaded state.
- Peak: memory of the phase that needs most, and the memory that a run may use there (on a TPU what the
  compiler grants, on a GPU three quarters, XLA's default). The columns are of different phases, so a peak is
  not the sum of its line. If a number of phases is given, only these were compiled.
- Roofline: the least time of a step in which every response has its full length: for each program the
  longest of the times by FLOPs at the published peak, by memory bandwidth and by interconnect. A real step
  takes longer: a decoded token of Qwen3-0.6B in 256 slots takes 8.0 ms on an H200 instead of 5.0
  ([benchmarks](../benchmarks/README.md#one-hopper-gpu)).
  Decoding counts as if each token read the whole cache; a paged cache reads the pages in use, about two
  thirds over a step.
"""
WRITTEN_BY_HAND = "\n## Compiled work and its floor\n"
"""Heading of the part of the page that is kept, but for its table."""
TABLE_OF_FLOORS = re.compile(r"(?m)^\| phase \| work \|(.*\n\|)*.*$")
TABLE_OF_SLICES = re.compile(r"(?m)^\| model \| slices or hosts \|(.*\n\|)*.*$")
TABLE_OF_LONG_ROWS = re.compile(r"(?m)^\| devices, mesh \| trained \|(.*\n\|)*.*$")


def compile_case(case: Case, only: str) -> None:
    """Plan it in a process of its own; compiler messages go to the terminal."""
    file = FOLDER / f"{case.name}.json"
    before = json.loads(file.read_text()) if only and file.exists() else None
    argv = [sys.executable, "-m", "jaxrl_llm", "plan", *RECIPE, "--model.path", case.model, "--topology"]
    argv += [case.topology, "--only", only or case.only, "--json", str(file), *case.flags.split()]
    argv += [] if case.group == "floors" else FLAGS
    print(" ".join(argv), flush=True)
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    subprocess.run(argv, env=env, cwd=ROOT)
    if before:
        file.write_text(json.dumps(merged(before, json.loads(file.read_text())), indent=1) + "\n")


def merged(before: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """Return a plan with the phases that were compiled again in place of those before."""
    by_name = {phase["name"]: phase for phase in again["phases"]}
    phases = [by_name.get(phase["name"], phase) for phase in before["phases"]]
    largest = max(phases, key=lambda phase: phase["peak"])
    return again | {
        "phases": phases,
        "selected": before["selected"],
        "peak": {"phase": largest["name"], "bytes": largest["peak"]},
        "fits": largest["peak"] <= again["memory"] and not any(phase["error"] for phase in phases),
        "step_seconds": sum(phase["step_seconds"] for phase in phases),
    }


def line(case: Case) -> str:
    """Return a row of the table."""
    file = FOLDER / f"{case.name}.json"
    if not file.exists():
        return f"| {case.model} | {case.topology} | {case.flags} | not compiled yet | | | | | | | |"
    plan = json.loads(file.read_text())
    phases = plan["phases"]
    largest = lambda *kinds: max(sum(phase["memory"][kind] for kind in kinds) for phase in phases) / GIB
    host = max(phase.get("host", 0.0) for phase in phases) / GIB
    state = largest("parameters", "optimizer", "gradients", "frozen models")
    mesh = mesh_of(plan)
    rollout = plan.get("meshes", {}).get("rollout", plan["mesh"])
    if rollout["tensor"] != plan["mesh"]["tensor"]:
        mesh += f", of the rollout tensor {rollout['tensor']}"
    words = case.flags.split()
    others = [f"; {name[2:]} {words[words.index(name) + 1]}" for name in MORE_FLAGS if name in words]
    cells = [
        case.model,
        case.topology,
        f"{mesh}; {case.settings}{''.join(others)}",
        f"{state:.2f}",
        f"{largest('rollout weights'):.2f}",
        f"{largest('KV cache'):.2f}",
        f"{largest('activations'):.2f}",
        f"{host:.2f}",
        f"{peak_of(plan)}, {plan['peak']['phase']}",
        ("yes" if plan["fits"] else "**no**") + f" ({len(phases)} phases)" * bool(plan["selected"]),
        f"{plan['step_seconds']:.1f} s",
    ]
    return "| " + " | ".join(cells) + " |"


def mesh_of(plan: dict[str, Any]) -> str:
    return " x ".join(f"{name} {size}" for name, size in plan["mesh"].items() if size > 1) or "one device"


def peak_of(plan: dict[str, Any]) -> str:
    return f"{plan['peak']['bytes'] / GIB:.2f} of {plan['memory'] / GIB:.2f}"


def table_of(head: str, cases: list[Case], cells: Callable[[Case, dict[str, Any]], list[str]]) -> str:
    """Return a table with a line for each case that is compiled."""
    plans = [(case, FOLDER / f"{case.name}.json") for case in cases]
    rows = [cells(case, json.loads(file.read_text())) for case, file in plans if file.exists()]
    names = head.split(" | ")
    return "\n".join(f"| {' | '.join(row)} |" for row in [names, ["---"] * len(names), *rows])


def slices_table() -> str:
    """Return the bytes that a device sends to other slices or hosts in a step."""
    head = "model | slices or hosts | mesh | peak, GiB | between them a step, GiB | of it micro-batches, MiB"

    def cells(case: Case, plan: dict[str, Any]) -> list[str]:
        sent = {
            phase["name"]: phase["calls"] * sum(kind["across"] for kind in phase["collectives"].values())
            for phase in plan["phases"]
        }
        of_batches = sum(size for name, size in sent.items() if "accumulate" in name)
        total, seconds = sum(sent.values()), f"{bound_of(plan, 'links between slices'):.2f}"
        own = [f"{total / GIB:.2f}", f"{of_batches / 2**20:.2f}", seconds, f"{bound_of(plan, 'compute'):.2f}"]
        return [case.model, case.topology, mesh_of(plan), peak_of(plan), *own]

    return table_of(f"{head} | links, s | products, s", SLICES, cells)


def long_rows_table() -> str:
    """Return the work of scoring and updates of rows of a million tokens."""
    head = (
        "devices, mesh | trained | peak, GiB | products | links between hosts | of a row's update: "
        "FLOPs / floor | memory traffic / floor | sent / floor"
    )

    def cells(case: Case, plan: dict[str, Any]) -> list[str]:
        update = next(phase for phase in plan["phases"] if phase["name"] == "update: accumulate")
        between = bound_of(plan, "links between slices")
        ratios = {
            kind: (update["compiled"][kind] / unit, update["floor"][kind] / unit)
            for kind, unit in (("flops", 1e15), ("memory", 2**40), ("links", GIB))
        }
        return [
            f"{case.topology}, {mesh_of(plan)}",
            "LoRA rank 32" if "--lora.rank" in case.flags else "all weights",
            peak_of(plan),
            f"{bound_of(plan, 'compute'):.0f} s",
            f"{between:.0f} s" if between else "-",
            "{:.1f} P / {:.1f} P".format(*ratios["flops"]),
            "{:.2f} TiB / {:.2f} TiB".format(*ratios["memory"]),
            "{:.0f} GiB / {:.0f} GiB".format(*ratios["links"]),
        ]

    return table_of(head, LONG, cells)


def bound_of(plan: dict[str, Any], bound: str) -> float:
    """Return the seconds of a step by one bound of the roofline."""
    return sum(phase["calls"] * phase["roofline"].get(bound, 0.0) for phase in plan["phases"])


def floors_table() -> str:
    """Return the table of compiled work over its floor, by phase and device."""
    plans = [json.loads((FOLDER / f"{case.name}.json").read_text()) for case in FLOORS]
    phases = [{phase["name"]: phase for phase in plan["phases"]} for plan in plans]
    head = ["phase", "work", *(case.topology for case in FLOORS)]
    rows = [head, ["---"] * len(head)]
    for name in dict.fromkeys(name for of_plan in phases for name in of_plan):
        for work in ("FLOPs", "memory", "links"):
            cells = [_ratio(of_plan.get(name), work) for of_plan in phases]
            if any(cells):
                rows.append([name.removeprefix("rollout: "), work, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _ratio(phase: dict[str, Any] | None, work: str) -> str:
    """Return compiled work over its floor, of bytes in brackets GB of a call; "" = there is none."""
    found, floor = (phase[kind][work.lower()] if phase else 0.0 for kind in ("compiled", "floor"))
    if not found or (not floor and found < SMALL):
        return ""
    ratio = f"{found / floor:.2f}" if floor else "floor 0"
    if work == "FLOPs":
        return ratio
    gigabytes = found / 1e9
    return f"{ratio} ({gigabytes:{'.0f' if gigabytes >= 10 else '.2g'}})"


def render() -> None:
    """Write docs/fit.md from the compiled cases, but for the text of its last part, and two tables of other
    pages."""
    plans = [json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))]
    versions = sorted({", ".join(f"{k} {v}" for k, v in plan["versions"].items()) for plan in plans})
    compiler = f"- Compiled with {'; '.join(versions)}.\n" if versions else "- Nothing is compiled yet.\n"
    _, heading, floors = PAGE.read_text().partition(WRITTEN_BY_HAND) if PAGE.exists() else ("", "", "")
    floors = TABLE_OF_FLOORS.sub(lambda _: floors_table(), floors)
    PAGE.write_text(INTRO + "\n".join(map(line, CASES)) + "\n" + NOTES + compiler + heading + floors)
    for page, pattern, table in (
        (PAGE_OF_SLICES, TABLE_OF_SLICES, slices_table()),
        (PAGE_OF_LONG_ROWS, TABLE_OF_LONG_ROWS, long_rows_table()),
    ):
        page.write_text(pattern.sub(lambda _, table=table: table, page.read_text()))


def main(argv: list[str]) -> None:
    only = argv.pop(argv.index("--only") + 1) if "--only" in argv else ""
    known = {case.name: case for case in [*CASES, *FLOORS, *SLICES, *STAGES, *LONG]}
    if unknown := set(argv) - {*known, "--render", "--only"}:
        raise SystemExit(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    FOLDER.mkdir(exist_ok=True)
    requested = [known[name] for name in argv if name in known]
    missing = [case for case in known.values() if not (FOLDER / f"{case.name}.json").exists()]
    for case in [] if "--render" in argv else requested or missing:
        compile_case(case, only)
    render()


if __name__ == "__main__":
    main(sys.argv[1:])
