"""What to change when a plan does not fit, in the order in which it costs least.

Only arithmetic: nothing is compiled again, so a change "would fit" where its saving is known (caches, copies
of weights, shares of the state) and "may be enough" where the compiler alone knows (activations).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxrl_llm.config import TrainConfig
from jaxrl_llm.models.transformer import REMAT
from jaxrl_llm.plan.plan import Plan, Row
from jaxrl_llm.plan.report import size

DIVIDED = ("parameters", "optimizer", "gradients", "frozen models")
"""Parts of which each device holds 1 / (fsdp x tensor)."""


def advise(plan: Plan, config: TrainConfig) -> Plan:
    """The plan with its advice; a plan that fits needs none."""
    tight = [row for row in plan.rows if row.peak > plan.memory or row.refused]
    learns = [row for row in tight if not row.name.startswith("rollout")]
    writes = [row for row in tight if row.name.startswith("rollout")]
    lines = [*_learning(plan, config, learns), *_writing(plan, config, writes), *_devices(plan, tight)]
    return replace(plan, advice=[f"  {i}. {line}" for i, line in enumerate(lines, 1)])


def _learning(plan: Plan, config: TrainConfig, tight: list[Row]) -> Iterator[str]:
    """Fewer activations."""
    if not tight:
        return
    worst = max(tight, key=lambda row: row.peak)
    fixed = worst.peak - worst.memory["activations"]
    if fixed > plan.memory:
        yield f"Activations are not the matter: what {worst.name} holds besides is {size(fixed)} (see below)."
        return
    room = f"activations of {worst.name} may be {size(plan.memory - fixed)}, now {_activations(worst)}"
    smaller = list(REMAT)[list(REMAT).index(config.model.remat) + 1 :]
    if smaller and any("accumulate" in row.name for row in tight):
        yield f"--model.remat {', then '.join(smaller)}: may be enough ({room})."
    row, now = config.row_tokens, config.tokens_per_device
    least = -(-row // plan.mesh["sequence"])
    if now // least > 1:
        wanted = (plan.memory - fixed) / worst.memory["activations"] * now
        tokens = max(int(wanted) // least, 1) * least
        yield f"--tokens_per_device {tokens}: may be enough if activations follow the tokens ({room})."
    yield (
        "--mesh.sequence or --mesh.tensor above 1: both divide activations; one row of "
        f"{row} tokens is the least that a micro-batch holds."
    )


def _writing(plan: Plan, config: TrainConfig, tight: list[Row]) -> Iterator[str]:
    """Fewer slots, smaller types."""
    if not tight:
        return
    worst = max(tight, key=lambda row: row.peak)
    cache, weights = worst.memory["KV cache"], worst.memory["rollout weights"]
    over = worst.peak - plan.memory
    if config.rollout.dtype == "float32":
        saved = (weights + cache * (config.rollout.cache_dtype is None)) / 2
        yield f"--rollout.dtype bfloat16: saves {size(saved)} of {size(over)}{_enough(saved, over)}."
    elif config.rollout.cache_dtype == "float32":
        saved = cache / 2
        yield f"--rollout.cache_dtype bfloat16: saves {size(saved)} of {size(over)}{_enough(saved, over)}."
    slots = config.rollout.slots
    while slots > 1 and cache * (1 - slots / config.rollout.slots) < over:
        slots //= 2
    if slots < config.rollout.slots and cache:
        saved = cache * (1 - slots / config.rollout.slots)
        yield f"--rollout.slots {slots}: saves {size(saved)} of {size(over)}{_enough(saved, over)}."
    if weights > plan.memory / 4:
        yield (
            f"--mesh.tensor above {plan.mesh['tensor']}: each device holds {size(weights)} of weights to "
            "write with, whole but for tensor."
        )


def _devices(plan: Plan, tight: list[Row]) -> Iterator[str]:
    """More devices, of which each holds less of the state."""
    if not tight:
        return
    factor = 2
    while factor < 4096 and any(_on_more(row, factor) > plan.memory for row in tight):
        factor *= 2
    if factor < 4096:
        count = factor
        for ways in plan.mesh.values():
            count *= ways
        yield (
            f"More devices, as --mesh.fsdp {factor * plan.mesh['fsdp']}: {count} in all would fit, by the "
            "shares of parameters, optimizer and gradients alone."
        )
    else:
        yield "More devices over fsdp alone do not help: what is not divided over fsdp is too large already."


def _on_more(row: Row, factor: int) -> float:
    return row.peak - sum(row.memory[part] for part in DIVIDED) * (1 - 1 / factor)


def _activations(row: Row) -> str:
    return size(row.memory["activations"])


def _enough(saved: float, over: float) -> str:
    return ", would fit" if saved >= over else ", not enough alone"
