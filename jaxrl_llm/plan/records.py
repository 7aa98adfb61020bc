"""Records of devices: the largest models that train on one, and its longest rows, as commands of `plan`.

Nothing is compiled. State, gradients, rollout weights and KV cache are the arrays of the run's own programs
(`plan.phases`); activations are estimated. The command of a record compiles what is estimated here.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_kernels.chips import gpu_generation, lacks_bfloat16
from jaxrl_llm import models
from jaxrl_llm.builders.models import trained_config
from jaxrl_llm.builders.sizes import derived
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.lora import split_params
from jaxrl_llm.plan.compiled import CompiledStats, CompileTarget
from jaxrl_llm.plan.models import PRESETS, planned_model
from jaxrl_llm.plan.phases import Phase
from jaxrl_llm.plan.plan import PhaseCost, device_groups, phase_cost, trace_step
from jaxrl_llm.plan.report import format_bytes
from jaxrl_llm.recipe.load import from_command_line

DEVICES = ("t4", "l4", "rtx4090", "a100-40", "a100", "h100", "h200", "b200", "v5e-1", "v6e-1")
"""Devices of docs/records.md: one chip each."""
MODELS = (
    "HuggingFaceTB/SmolLM2-135M",
    *(f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")),
    "meta-llama/Llama-3.1-70B",
)
"""Dense models of `plan.models`, by size."""
SIZES = tuple(f"Qwen/Qwen3-{size}" for size in ("0.6B", "4B", "8B"))
"""Models whose longest rows are searched."""
RECIPE = "--config grpo_qwen.py --share_prefixes False --eval.every 0"
NO_HALVES = " --optim.store_param_remainders True --optim.grad_dtype bfloat16"
METHODS = {
    "all weights": ("", 18.0),
    "all weights, 8-bit moments": (f"--optim.moments int8{NO_HALVES}", 10.0),
    "LoRA": ("--lora.rank 16", 4.0),
    "LoRA on nf4": ("--lora.rank 16 --lora.quantize nf4", 1.0),
}
"""Method -> its flags, and the least bytes of a weight, by which larger models are not tried."""
LONG = "--prompts_per_step 8 --minibatches_per_step 1 --lora.rank 16"
ROW, PROMPT = 4096, 1024
"""Tokens of a row of the largest models, and of every prompt."""
FEWEST_SLOTS, MOST_SLOTS = 4, 64
SHORTEST, LONGEST, STEP = 2048, 2**20, 256
"""Range of rows, and their multiples, in tokens."""
PROBES = 4096, 32_768
"""Rows whose memory gives that of all rows, which grows linearly."""
NATIVE, ORIGINAL = 40_960, 32_768
"""Positions of SIZES, and of their pretraining, which YaRN multiplies."""
MARGIN = 1.05
"""Factor on estimated activations."""


class DeviceRecord(NamedTuple):
    """A recipe that fits by its estimate, where the next larger one does not."""

    device: str
    name: str
    model: str  # that was found, or whose row was searched
    tokens: int  # of a row; 0 = nothing fits
    flags: str
    estimate: float  # bytes of the peak
    memory: float  # bytes that a run may use

    @property
    def command(self) -> str:
        """The command that compiles the recipe; `train` in place of `plan` and without --topology runs it."""
        return f"python -m jaxrl_llm plan {RECIPE} --topology {self.device} {self.flags}"

    def to_json(self) -> dict[str, Any]:
        """Return all fields and the command."""
        return {"label": "estimated, not compiled", **self._asdict(), "command": self.command}


def record_lines(target: CompileTarget, records: Sequence[DeviceRecord]) -> list[str]:
    """Return the lines that `plan --records` prints on a device."""
    name, memory = target.topology.name, format_bytes(target.memory)
    lines = [f"{name}: {memory} that a run may use; estimated, not compiled"]
    for record in records:
        size = f"rows of {record.tokens:,} tokens, {format_bytes(record.estimate)}"
        lines += [f"  {record.name}: {record.model}, {size if record.tokens else 'does not fit'}"]
        lines += [f"    {record.command}"] if record.tokens else []
    return lines


@dataclass
class RecordSearch:
    """Search for the records of devices. Devices of one generation have the same estimates."""

    log: Callable[[str], None] = lambda line: None
    """Receives a line before each search."""
    known: dict[tuple[str, str], list[PhaseCost]] = field(default_factory=dict)
    """Generation of a device, flags -> estimated phases."""

    def records(self, target: CompileTarget) -> Iterator[DeviceRecord]:
        """Yield the records of the devices of a topology, the largest models first."""
        for method in METHODS:
            self.log(f"{target.topology.name}: the largest model with {method}")
            yield self._largest(target, method)
        kinds = {"SFT": "--algo sft --model.remat offload", "GRPO": f"--rollout.slots {FEWEST_SLOTS}"}
        for name, flags in kinds.items():
            for model in SIZES:
                self.log(f"{target.topology.name}: the longest row of {model} with {name}")
                yield self._longest(target, model, f"longest row, {name}", f"{LONG} {flags}")

    def _largest(self, target: CompileTarget, method: str) -> DeviceRecord:
        """Return the largest model that trains with a method, with as many slots as fit."""
        (flags, least), name = METHODS[method], f"largest model, {method}"
        with_slots = lambda slots: recipe_flags(target, model, f"{flags} --rollout.slots {slots}", ROW)
        for model in reversed(MODELS):
            if least * _num_weights(model) > target.memory:
                continue
            costs, slots = self.estimate(target, with_slots(FEWEST_SLOTS)), FEWEST_SLOTS
            if _peak(costs) > target.memory:
                continue
            caching = max((cost for cost in costs if cost.memory["KV cache"]), key=lambda cost: cost.peak)
            slot = caching.memory["KV cache"] / FEWEST_SLOTS
            while slots < MOST_SLOTS and caching.peak + (2 * slots - FEWEST_SLOTS) * slot <= target.memory:
                slots *= 2
            while (peak := _peak(self.estimate(target, with_slots(slots)))) > target.memory:
                slots //= 2
            return _record(target, name, model, ROW, flags=with_slots(slots), peak=peak)
        return _record(target, name, MODELS[0], 0)

    def _longest(self, target: CompileTarget, model: str, name: str, method: str) -> DeviceRecord:
        """Return the longest row that a model trains on."""
        flags = lambda tokens: recipe_flags(target, model, method, tokens)
        first, second = (self.estimate(target, flags(tokens)) for tokens in PROBES)
        bounds = [
            PROBES[0] + (target.memory - a.peak) / (b.peak - a.peak) * (PROBES[1] - PROBES[0])
            for a, b in zip(first, second, strict=True)
            if b.peak > a.peak
        ]
        tokens = int(min(*bounds, LONGEST)) // STEP * STEP
        while tokens >= SHORTEST and _peak(self.estimate(target, flags(tokens))) > target.memory:
            tokens = int(0.98 * tokens) // STEP * STEP
        if tokens < SHORTEST:
            return _record(target, name, model, 0)
        peak = _peak(self.estimate(target, flags(tokens)))
        return _record(target, name, model, tokens, flags=flags(tokens), peak=peak)

    def estimate(self, target: CompileTarget, flags: str) -> list[PhaseCost]:
        """Return the phases of a recipe with estimated activations."""
        generation = target.chip and gpu_generation(target.chip.name)
        key = generation or target.topology.name, flags
        if key not in self.known:
            with contextlib.redirect_stderr(io.StringIO()):  # notes on settings that the algorithm drops
                config = from_command_line(f"{RECIPE} {flags}".split(), writes=False).config
            config, meshes, step = trace_step(config, target)
            model, groups = trained_config(planned_model(config.model), config), device_groups(meshes)

            def cost(phase: Phase) -> PhaseCost:
                activations = MARGIN * estimated_activations(config, model, phase)
                stats = CompiledStats(0.0, 0.0, activations, {}, seconds=0.0)
                return phase_cost(phase, stats, target, groups)

            self.known[key] = list(map(cost, step))
        return self.known[key]


def recipe_flags(target: CompileTarget, model: str, method: str, tokens: int) -> str:
    """Return the flags of a model and row: with YaRN beyond its positions, and types that the device has."""
    flags = [f"--model.path {model}", method.strip()]
    flags += [] if "--model.remat" in method else ["--model.remat full"]
    flags += [] if "--algo sft" in method else ["--rollout.dtype bfloat16"]
    flags += [f"--max_prompt_tokens {PROMPT}", f"--max_response_tokens {tokens - PROMPT}"]
    flags += [f"--tokens_per_device {tokens}"]
    if tokens > NATIVE:
        flags += [f"--model.yarn_factor {-(-tokens // ORIGINAL)}", f"--model.yarn_original {ORIGINAL}"]
    text = " ".join(filter(None, flags))
    if target.chip and lacks_bfloat16(target.chip.name):
        text = text.replace(NO_HALVES, "").replace("bfloat16", "float16") + " --model.dtype float16"
    return text


def estimated_activations(config: TrainConfig, model: TransformerConfig, phase: Phase) -> float:
    """Return the bytes that a phase of a dense model needs beside its arrays, on each device.

    One layer in the backward pass holds six arrays of the MLP's size and five of the hidden size. An update
    also keeps the inputs of its layers, the log-probs of a chunk with their gradient, of trained weights a
    copy of the layers in the compute type, and of weights in 4 bits two matrices of a layer. `apply` decodes
    the moments of its largest array; prefill has the keys and values of its prompts.
    """
    # One layer.
    size, devices = jnp.dtype(config.model.dtype).itemsize, phase.mesh.size
    hidden, mlp = model.hidden_size, model.mlp_size
    layer = 6 * mlp + 5 * hidden
    if phase.name == "rollout: prefill":
        tokens = max(config.rollout.prefill_tokens, config.max_prompt_tokens)
        return tokens * size * (2 * model.num_layers * model.num_kv_heads * model.head_dim + layer)
    # Scoring and update.
    tokens = derived(config, devices)["tokens_per_microbatch"] / devices
    head = 8.0 * config.model.logprob_chunk * model.vocab_size
    if phase.name.startswith("score"):
        return tokens * size * layer + head
    weights = [x.size for x in jax.tree.leaves(split_params(models.abstract(model))[0])]
    if phase.name.endswith("apply"):
        return max(weights) * (8.0 if config.optim.moments == "int8" else 4.0)
    if not phase.name.endswith("accumulate"):
        return 0.0
    inputs = 2 if config.model.remat == "offload" else model.num_layers
    copied = 0 if model.lora else sum(weights) - model.vocab_size * hidden * (2 - model.tie_embeddings)
    copied += 2 * hidden * mlp if config.lora.quantize != "none" else 0
    return tokens * size * (inputs * hidden + layer) + head + size * copied


def _num_weights(model: str) -> int:
    return sum(x.size for x in jax.tree.leaves(models.abstract(PRESETS[model])))


def _peak(costs: Sequence[PhaseCost]) -> float:
    return max(cost.peak for cost in costs)


def _record(
    target: CompileTarget, name: str, model: str, tokens: int, *, flags: str = "", peak: float = 0.0
) -> DeviceRecord:
    return DeviceRecord(
        target.topology.name, name, model, tokens, flags=flags, estimate=peak, memory=target.memory
    )
