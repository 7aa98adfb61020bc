"""Parts of benchmarks/gpu.py in order of value: limits, targets, the table of README.md. Imports no jax."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cpu_peers import replace_table
from machine import RESULTS

from jaxrl_kernels.chips import CHIPS

README = Path(__file__).parent / "README.md"
TOTAL_SECONDS = 12 * 60
"""The most seconds of a run: the head's limit and the limits of all parts."""
HEAD_SECONDS = 20
MEM_FRACTION = 0.9
"""Share of the GPU's memory that JAX takes in a part without a special share."""
CARD = "h100"
"""The card whose memory limits the QLoRA row, also on a GPU with more."""

_FA3 = "FlashAttention-3 on an H100 (arXiv 2407.08608): "
_PRIME = "prime-rl's published {} of one H100, times {}"
_H200_ATTENTION = "attention, TFLOP/s", "rows"
_H200_GROUPED = "grouped_matmul, 131072 rows, 128 groups, 2048 x 768", "rows"
_H200_UPDATE = ("update of Qwen3-0.6B, bfloat16, remat dots, 16 rows of 4624 tokens",)
_H200_ROLLOUT = ("rollout of Qwen3-0.6B, bfloat16, 256 slots, 512 in and 128 out",)


class Target(NamedTuple):
    """The target of one result."""

    goal: float
    anchor: str = ""  # where the goal comes from
    before: tuple[str | int, ...] = ()  # path in results/gpu_h200.json
    is_limit: bool = False  # the goal is the most, as of seconds, and not the least

    def reached_by(self, value: float) -> bool:
        return value <= self.goal if self.is_limit else value >= self.goal


class TimedPart(NamedTuple):
    """One process."""

    limit: float  # seconds
    targets: Mapping[str, Target]  # name of a result, as the part yields it -> its target


PARTS = {
    "attention": TimedPart(
        40,
        {
            "attention backward, head_dim 128, TFLOP/s": Target(
                500, f"{_FA3}542", (*_H200_ATTENTION, 0, "pallas_gpu", "backward")
            ),
            "attention backward, head_dim 64, TFLOP/s": Target(
                420, f"{_FA3}453", (*_H200_ATTENTION, 2, "pallas_gpu", "backward")
            ),
            "attention forward, head_dim 128, TFLOP/s": Target(
                579, f"{_FA3}579", (*_H200_ATTENTION, 0, "pallas_gpu", "forward")
            ),
            "attention forward, head_dim 64, TFLOP/s": Target(
                450, f"{_FA3}476", (*_H200_ATTENTION, 2, "pallas_gpu", "forward")
            ),
            "attention forward, head_dim 128, 4 sequences a row, TFLOP/s": Target(
                480, "our whole rows", (*_H200_ATTENTION, 1, "pallas_gpu", "forward")
            ),
            "attention backward, head_dim 128, 4 sequences a row, TFLOP/s": Target(
                400, "our whole rows", (*_H200_ATTENTION, 1, "pallas_gpu", "backward")
            ),
        },
    ),
    "update": TimedPart(
        45,
        {
            "GRPO update of Qwen3-0.6B, rows of 4,624, tokens/s": Target(
                90_000, "", (*_H200_UPDATE, "tokens_per_second")
            ),
            "GRPO update of Qwen3-0.6B, rows of 4,624, share of the peak": Target(
                0.47, "model FLOPs, each row counted as one sequence", (*_H200_UPDATE, "model_flops_of_peak")
            ),
        },
    ),
    "rollout": TimedPart(
        60,
        {
            "decoding Qwen3-0.6B, 256 slots, ms a token": Target(
                6.2, "80% of the roof that `plan` computes for an H200, 5.0", is_limit=True
            ),
            "rollout of Qwen3-0.6B, 256 prompts, tokens/s": Target(
                27_000, "vLLM's published 12,000", (*_H200_ROLLOUT, "256 prompts x 1", "tokens_per_second")
            ),
            "rollout of Qwen3-0.6B, 32 prompts x 8, tokens/s": Target(
                38_000, "vLLM's published 12,000", (*_H200_ROLLOUT, "32 prompts x 8", "tokens_per_second")
            ),
        },
    ),
    "grouped_matmul": TimedPart(
        30,
        {
            "grouped products by Zipf, forward, TFLOP/s": Target(
                520, "our balanced ones", (*_H200_GROUPED, 2, "tflops")
            ),
            "grouped products by Zipf, gradients, TFLOP/s": Target(
                460, "our balanced ones", (*_H200_GROUPED, 3, "tflops")
            ),
            "grouped products balanced, forward, TFLOP/s": Target(590, "", (*_H200_GROUPED, 0, "tflops")),
            "grouped products balanced, gradients, TFLOP/s": Target(450, "", (*_H200_GROUPED, 1, "tflops")),
        },
    ),
    "gated_delta": TimedPart(
        45,
        {
            "gated delta rule, forward and backward, times as fast as the peer": Target(
                1.2, "flash-linear-attention 0.6, the same shape on the same card"
            ),
        },
    ),
    "update, rows of 16k": TimedPart(
        40, {"GRPO update of Qwen3-0.6B, rows of 16k, tokens/s": Target(35_700, _PRIME.format("11,900", 3))}
    ),
    "LoRA, rows of 16k": TimedPart(
        40, {"LoRA 16 of Qwen3-4B, rows of 16k, tokens/s": Target(18_690, _PRIME.format("6,230", 3))}
    ),
    "update, rows of 65k": TimedPart(
        40, {"GRPO update of Qwen3-0.6B, rows of 65k, tokens/s": Target(20_300, _PRIME.format("10,150", 2))}
    ),
    "LoRA, rows of 65k": TimedPart(
        65, {"LoRA 16 of Qwen3-4B, rows of 65k, tokens/s": Target(8_320, _PRIME.format("4,160", 2))}
    ),
    "qlora": TimedPart(
        155,
        {
            "QLoRA of Qwen3-8B, longest row that trains in 80 GB, tokens": Target(
                110_000, "unsloth's published 110,000 on such a card, with a rollout engine in it"
            ),
            "QLoRA of Qwen3-8B, peak of memory against `plan`, difference": Target(0.05, "", is_limit=True),
        },
    ),
    "start": TimedPart(
        65,
        {
            "command to first update of grpo_smollm2.py, cold cache, s": Target(
                25, "", ("GRPO on SmolLM2-135M-Instruct", "seconds to the end of step 1"), is_limit=True
            ),
            "command to first update of grpo_smollm2.py, warm cache, s": Target(15, "", is_limit=True),
        },
    ),
    "strict": TimedPart(
        55,
        {
            "strict mode, bfloat16, largest mismatch, nats": Target(0.0, is_limit=True),
            "strict mode, bfloat16 with a cache of fp8, largest mismatch, nats": Target(0.0, is_limit=True),
        },
    ),
    "more kernels": TimedPart(
        20,
        {
            "linear_logprob, forward, TFLOP/s": Target(
                670, "Liger on an H100", ("linear_logprob", "rows", 0, "forward_tflops")
            ),
            "linear_logprob, both passes, TFLOP/s": Target(
                670, "Liger on an H100", ("linear_logprob", "rows", 0, "tflops_done")
            ),
            "decode_attention, 256 slots of 576 tokens, TB/s": Target(
                4.08, "85% of an H200's bandwidth", ("decode_attention", "rows", 2, "terabytes_per_second")
            ),
        },
    ),
}
"""Name -> part. Goals are for an H100 except where they name an H200."""


def kind_of(device: str) -> str:
    """Return the key of CHIPS of a device, such as h200 of "1 x NVIDIA H200"; "other" for an unknown one."""
    known = [kind for kind in CHIPS if kind.upper() in device.upper()]
    return max(known, key=len) if known else "other"


def mem_fraction(part: str, device: str) -> float:
    """Return the share of the GPU's memory that JAX takes in a part."""
    kind = kind_of(device)
    if part == "gated_delta":  # torch needs some, too
        return MEM_FRACTION / 2
    if part == "qlora" and kind in CHIPS:
        return MEM_FRACTION * min(1.0, CHIPS[CARD].memory / CHIPS[kind].memory)
    return MEM_FRACTION


def compiled_result(kind: str, part: str, name: str) -> Any:
    """Return a result of `gpu.py --compile`; None if it has not been compiled for this kind of GPU."""
    path = RESULTS / f"gpu_compiled_{kind}.json"
    parts = json.loads(path.read_text()).get("parts", {}) if path.exists() else {}
    return parts.get(part, {}).get("results", {}).get(name, {}).get("value")


def with_target(part: str, name: str, value: Any) -> dict[str, Any]:
    """Return a result beside its target, as the JSON has it."""
    target = PARTS[part].targets.get(name) if part in PARTS else None
    beside = {"target": target.goal, "anchor": target.anchor} if target else {}
    return {"value": value, **beside}


def targets_table(reports: Iterable[Mapping[str, Any]], before: Mapping[str, Any]) -> str:
    """Return Markdown: each target beside its results, and the reasons of the parts that did not finish.

    Args:
        reports: of `gpu.py`, one a device.
        before: results/gpu_h200.json.
    """
    reports = list(reports)
    heads = ["work", "target", "anchor", "H200, before", *(report["device"] for report in reports)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for part, (_, targets) in PARTS.items():
        for name, target in targets.items():
            bound = "at most " * target.is_limit + number_text(target.goal)
            earlier = number_text(value_at(before, target.before)) if target.before else ""
            found = [measured_text(report["parts"].get(part, {}), name, target) for report in reports]
            lines.append("| " + " | ".join([name, bound, target.anchor, earlier, *found]) + " |")
    for report in reports:
        commits = sorted({part["commit"] or part["sources"] for part in report["parts"].values()})
        lines += ["", f"{report['device']}: commit {', '.join(commits)}."]
        ended = {name: part["reason"] for name, part in report["parts"].items() if part["reason"]}
        lines += [f"- {name}: {reason}" for name, reason in ended.items()]
    return "\n".join(lines)


def measured_text(part: Mapping[str, Any], name: str, target: Target) -> str:
    """Return a result for the table, in bold if it reaches its target; "" if it was not measured."""
    value = part.get("results", {}).get(name, {}).get("value", "")
    if isinstance(value, str):
        return value
    text = number_text(value)
    return f"**{text}**" if target.reached_by(value) else text


def value_at(report: Any, path: Iterable[str | int]) -> float:
    for key in path:
        report = report[key]
    return report


def number_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write_table(folder: Path = RESULTS, readme: Path = README) -> None:
    """Write the table of README.md from the results."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("gpu_parts_*.json"))]
    before = json.loads((folder / "gpu_h200.json").read_text())
    replace_table(readme, "gpu", targets_table(reports, before))
