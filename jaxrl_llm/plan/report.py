"""Tables of a plan, and advice for one that does not fit: settings to change, least costly first.

The advice is arithmetic, without another compilation: a change "would fit" if its saving can be computed
(caches, copies of weights, sharded state) and "may be enough" if it depends on the compiler (activations).
`savings` lists the settings for a smaller state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from jaxrl_llm.builders.sizes import derived
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.models.remat import REMAT
from jaxrl_llm.plan.models import planned_model
from jaxrl_llm.plan.plan import MEMORY_KINDS, PhaseCost, Plan
from jaxrl_llm.plan.savings import MEMORY_SETTINGS
from jaxrl_llm.sharding.config import MeshConfig
from jaxrl_llm.sharding.pipeline import bubble_work
from jaxrl_llm.sharding.placement import format_placement
from jaxrl_llm.sharding.rules import ROLLOUT, axes_of, dividing_spec, num_shards

MIN_SYNCHRONOUS = 2**20
"""Bytes a call below which a synchronous collective is not printed; JSON has all."""


def print_plan(plan: Plan, console: Console) -> None:
    """Print the memory table, the work table and the verdict."""
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.items() if size > 1) or "1 device"
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    console.print(f"{plan.model} on {plan.topology} ({mesh}); compiled, not run ({versions})")
    for role, placement in plan.meshes.items():
        console.print(f"{role or 'policy'}: {format_placement(placement)}", highlight=False)
    console.print(plan.kernels, highlight=False, soft_wrap=True)
    console.print(memory_table(plan))
    console.print(work_table(plan))
    console.print(floor_table(plan))
    for line in [*synchronous_lines(plan), *slice_lines(plan), *stage_lines(plan), *verdict(plan)]:
        console.print(line, highlight=False, soft_wrap=True)


def _phase_table(title: str, columns: Sequence[str]) -> Table:
    """Return a table without rows, whose first column names the phase."""
    table = Table(title=title, title_justify="left")
    table.add_column("phase", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="left" if name.startswith("collectives") else "right")
    return table


def memory_table(plan: Plan) -> Table:
    """Return the bytes of one device by phase and kind, without kinds that are 0 in all phases."""
    kinds = (*MEMORY_KINDS, "activations")
    used = [kind for kind in kinds if any(phase.memory[kind] for phase in plan.phases)]
    grouped = any(phase.devices for phase in plan.phases)
    columns = (*["devices"] * grouped, *used, "peak", "of device memory")
    table = _phase_table("Memory of each device", columns)
    for phase in plan.phases:
        over = phase.peak > plan.memory or phase.error
        cells = [format_bytes(phase.memory[kind]) for kind in used]
        share = f"{phase.peak / plan.memory:.0%}"
        style = "bold red" if over else None
        table.add_row(
            phase.name, *[phase.devices] * grouped, *cells, format_bytes(phase.peak), share, style=style
        )
    return table


def work_table(plan: Plan) -> Table:
    """Return FLOPs and collectives of one call on one device, and the roofline of a step."""
    columns = ("calls a step", "FLOPs", "collectives: bytes sent (count)", "roofline", "bound by")
    table = _phase_table("Work of each device (one call), roofline of a step", columns)
    for phase in plan.phases:
        calls = f"{phase.calls:,}" + (f" {phase.unit}s" if phase.unit != "call" else "")
        bound = max(phase.roofline, key=phase.roofline.get) if phase.roofline else "unknown chip"
        time = format_seconds(phase.step_seconds) if phase.roofline else "-"
        work = format_flops(phase.flops) if phase.flops else "-"
        table.add_row(phase.name, calls, work, format_collectives(phase), time, bound)
    if plan.step_seconds:
        table.add_row("step", "", "", "", format_seconds(plan.step_seconds), "roofline, a lower bound")
    return table


def floor_table(plan: Plan) -> Table:
    """Return the work of each compiled program, its floor (`plan.floors`) and their ratio."""
    columns = ("FLOPs", "floor", "ratio", "memory traffic", "floor", "ratio", "sent", "floor", "ratio")
    table = _phase_table("Work of each device (one call) as compiled, and its floor", columns)
    for phase in plan.phases:
        cells = []
        for kind, number in phase.compiled.items():
            format_number = format_flops if kind == "flops" else format_bytes
            floor = phase.floor[kind]
            ratio = f"{number / floor:.2f}" if floor else "-"
            cells += [format_number(number), format_number(floor), ratio]
        table.add_row(phase.name, *cells)
    return table


def synchronous_lines(plan: Plan) -> list[str]:
    """Return lines on collectives in loops that the devices wait for, if they have a MiB or more."""
    return [
        f"Synchronous in {phase.name}: {one['kind']}, {format_bytes(one['bytes'])} ({one['count']:.0f}), of "
        f"{one['source'] or 'no operation of JAX'}"
        for phase in plan.phases
        for one in phase.synchronous
        if one["bytes"] >= MIN_SYNCHRONOUS
    ]


def format_collectives(phase: PhaseCost) -> str:
    """Format the collectives of a call, most bytes first."""
    by_bytes = sorted(phase.collectives.items(), key=lambda item: -item[1]["bytes"])
    each = [f"{kind} {format_bytes(x['bytes'])} ({x['count']:.0f})" for kind, x in by_bytes]
    return ", ".join(each) or "none"


def slice_lines(plan: Plan) -> list[str]:
    """Return a line on the bytes of a step that each device sends to other slices, if there are several."""
    of_phase = lambda phase: phase.calls * sum(x["across"] for x in phase.collectives.values())
    each = {phase.name: of_phase(phase) for phase in plan.phases if of_phase(phase)}
    if not each:
        return []
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in each.items())
    return [f"Between slices or hosts each device sends {format_bytes(sum(each.values()))} a step: {parts}."]


def stage_lines(plan: Plan) -> list[str]:
    """Return lines on the bubble of the policy's pipeline, and on layers that its stages do not divide."""
    if (stages := num_shards("layers", plan.mesh)) == 1:
        return []
    rows = plan.derived["rows_per_microbatch"]
    work = bubble_work(rows, plan.mesh)
    chunks, idle = rows // num_shards("batch_of_stage", plan.mesh), work / (1 + work)
    lines = [
        f"Pipeline: {stages} stages compute {chunks} chunks of a micro-batch in {chunks + stages - 1} ticks: "
        f"a bubble of {idle:.0%}. A larger --tokens_per_device makes it smaller."
    ]
    if count := plan.layers_before_stages:
        line = f"All devices compute the first {count} layers, before the {stages} stages"
        copy = f"; these copy the others' weights, {format_bytes(plan.copied_layers)} among activations"
        lines.append(f"{line}{copy if plan.copied_layers else ''}.")
    return lines


def verdict(plan: Plan) -> list[str]:
    """Return lines that state whether the plan fits, and the advice."""
    peak, memory = plan.peak, f"of the {format_bytes(plan.memory)} that a run may use"
    host = max(phase.host for phase in plan.phases)
    lines = [f"Host memory: {format_bytes(host)} for each device, offloaded."] if host else []
    lines += [
        f"Devices {name}: at most {format_bytes(cost.peak)}, in {cost.name}."
        for name, cost in peaks(plan).items()
    ]
    if plan.experts:
        lines.append(plan.experts.describe())
    if plan.fits:
        return [*lines, f"Fits: at most {format_bytes(peak.peak)} {memory} on each device, in {peak.name}."]
    lines += [f"Does not fit: {peak.name} needs {format_bytes(peak.peak)} {memory} on each device."]
    lines += [f"Compilation of {phase.name} failed: {phase.error}" for phase in plan.phases if phase.error]
    return [*lines, *(["Settings to change, in this order:"] if plan.advice else []), *plan.advice]


def peaks(plan: Plan) -> dict[str, PhaseCost]:
    """Return the phase with the highest peak of each group of devices; {} if all devices are alike."""
    by_group: dict[str, PhaseCost] = {}
    for phase in plan.phases:
        if phase.devices and phase.peak > getattr(by_group.get(phase.devices), "peak", 0.0):
            by_group[phase.devices] = phase
    return by_group


def format_bytes(count: float) -> str:
    """Format bytes in binary units."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:.0f} B" if count else "-"


def format_flops(count: float) -> str:
    """Format FLOPs in decimal units."""
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f}"


def format_seconds(time: float) -> str:
    """Format a duration."""
    return f"{time:.3g} s" if time >= 1 else f"{time * 1e3:.3g} ms"


SHARDED = ("parameters", "optimizer", "gradients", "frozen models")
"""Kinds of memory that fsdp and tensor shard."""


def advise(plan: Plan, config: TrainConfig) -> Plan:
    """Return the plan with advice, which is empty if the plan fits."""
    over = [phase for phase in plan.phases if phase.peak > plan.memory or phase.error]
    training = [phase for phase in over if not phase.name.startswith("rollout")]
    rollout = [phase for phase in over if phase.name.startswith("rollout")]
    lines = [*_training(plan, config, training), *_rollout(plan, config, rollout), *_devices(plan, over)]
    return replace(plan, advice=[f"  {i}. {line}" for i, line in enumerate(lines, 1)])


def _training(plan: Plan, config: TrainConfig, over: list[PhaseCost]) -> Iterator[str]:
    """Yield advice for scoring and update: fewer activations."""
    if not over:
        return
    worst = max(over, key=lambda phase: phase.peak)
    fixed, missing = worst.peak - worst.memory["activations"], worst.peak - plan.memory
    if fixed > plan.memory:
        yield (
            f"Activations are not the bottleneck: the rest of {worst.name} takes {format_bytes(fixed)} "
            "(see below)."
        )
        yield from (_saving(*change, over=missing) for change in _state(config, worst))
        return
    free, used = format_bytes(plan.memory - fixed), format_bytes(worst.memory["activations"])
    limit = f"activations of {worst.name} may take {free}, now {used}"
    smaller = list(REMAT)[list(REMAT).index(config.model.remat) + 1 :]
    if num_shards("layers", plan.mesh) > 1:  # stages exclude it
        smaller = [name for name in smaller if name != "offload"]
    if smaller and any("accumulate" in phase.name for phase in over):
        yield f"--model.remat {', then '.join(smaller)}: may be enough ({limit})."
    row, key, rows = config.row_tokens, "tokens_per_device", "rows_per_microbatch"
    if not any("accumulate" in phase.name for phase in over):  # scoring alone
        key, rows = f"score.{key}", "rows_per_scored_microbatch"
    least = -(-row // num_shards("sequence", plan.mesh))
    # A mini-batch may have fewer tokens than a micro-batch may; several micro-batches need a second gradient.
    sizes = derived(config, math.prod(plan.mesh.values()))
    tokens = sizes[rows] // num_shards("batch", plan.mesh) * least
    is_whole = sizes["microbatches_per_update_at_most"] == 1
    available = plan.memory - fixed - is_whole * worst.memory["gradients"]
    if tokens // least > 1 and available > 0:
        scaled = available / worst.memory["activations"] * tokens
        tokens = max(int(scaled) // least, 1) * least
        yield f"--{key} {tokens}: may be enough if activations grow with tokens ({limit})."
    changes = (change for change in _state(config, worst) if change[1] >= missing)
    yield from (_saving(*change, over=missing) for change in changes)
    yield (
        "--mesh.sequence or --mesh.tensor above 1: both shard activations; the smallest micro-batch is one "
        f"row of {row} tokens."
    )


def _state(config: TrainConfig, worst: PhaseCost) -> Iterator[tuple[str, float]]:
    """Yield (change, bytes it saves) for scoring and update: less optimizer state, fewer frozen weights."""
    for setting in MEMORY_SETTINGS:
        if setting.applies(config) and (saved := setting.saved(config, worst)):
            yield ", ".join(filter(None, (setting.flag, setting.effect))), saved


def _saving(change: str, saved: float, over: float) -> str:
    """Return a line on a change that saves some of the bytes that are over the memory."""
    enough = "would fit" if saved >= over else "not enough alone"
    return f"{change}: saves {format_bytes(saved)}, {format_bytes(over)} are needed: {enough}."


def _rollout(plan: Plan, config: TrainConfig, phases: list[PhaseCost]) -> Iterator[str]:
    """Yield advice for rollout: fewer slots, smaller types."""
    if not phases:
        return
    worst = max(phases, key=lambda phase: phase.peak)
    cache, weights = worst.memory["KV cache"], worst.memory["rollout weights"]
    over = worst.peak - plan.memory
    half = "float16" if config.model.dtype == "float16" else "bfloat16"
    if config.rollout.dtype == "float32":
        saved = (weights + cache * (config.rollout.cache_dtype is None)) / 2
        yield _saving(f"--rollout.dtype {half}", saved, over)
    elif config.rollout.cache_dtype == "float32":
        yield _saving(f"--rollout.cache_dtype {half}", cache / 2, over)
    slots = config.rollout.slots
    while slots > 1 and cache * (1 - slots / config.rollout.slots) < over:
        slots //= 2
    if slots < config.rollout.slots and cache:
        yield _saving(f"--rollout.slots {slots}", cache * (1 - slots / config.rollout.slots), over)
    if weights > plan.memory / 4:
        yield (
            f"--rollout.mesh.tensor above {num_shards('heads', rollout_sizes(plan))}: each device holds "
            f"{format_bytes(weights)} of rollout weights, {_sharded_by(plan, config)}."
        )


def _sharded_by(plan: Plan, config: TrainConfig) -> str:
    """Return a clause on what shards the rollout's copy of the weights (`sharding.rules.ROLLOUT`)."""
    model = planned_model(config.model)
    if not model.moe:
        return "which only tensor parallelism shards"
    sizes = rollout_sizes(plan)
    shape = model.moe.num_experts, model.expert_width, model.moe.expert_size
    spec = dividing_spec(sizes, ("experts", "expert_embed", "expert_mlp"), shape, ROLLOUT)
    count = math.prod(sizes[axis] for dim in spec for axis in axes_of(dim))
    devices = math.prod(sizes.values())
    return f"which tensor parallelism shards; experts are divided over {count} of {devices} devices"


def rollout_sizes(plan: Plan) -> Mapping[str, int]:
    """Return the axis sizes of the rollout's mesh."""
    return plan.meshes.get("rollout", plan.mesh)


def _devices(plan: Plan, over: list[PhaseCost]) -> Iterator[str]:
    """Yield advice on more devices, which shard the state further."""
    if not over:
        return
    factor = 2
    while factor < 4096 and any(_with_more_shards(phase, factor) > plan.memory for phase in over):
        factor *= 2
    if factor < 4096:
        fsdp, count = factor * MeshConfig(**plan.mesh).fsdp, factor * math.prod(plan.mesh.values())
        yield (
            f"More devices, as --mesh.fsdp {fsdp}: {count} in all would fit, counting only the shards of "
            "parameters, optimizer and gradients."
        )
    else:
        yield "A larger --mesh.fsdp alone does not help: the memory that it does not shard is too large."


def _with_more_shards(phase: PhaseCost, factor: int) -> float:
    """Return the peak with `factor` times as many shards of the state."""
    return phase.peak - sum(phase.memory[kind] for kind in SHARDED) * (1 - 1 / factor)
