"""Tables and verdict of a plan."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from jaxrl_llm.plan.plan import MEMORY_KINDS, PhaseCost, Plan
from jaxrl_llm.sharding.placement import format_placement

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
    for line in [*synchronous_lines(plan), *verdict(plan)]:
        console.print(line, highlight=False, soft_wrap=True)


def memory_table(plan: Plan) -> Table:
    """Return the bytes of one device by phase and kind, without kinds that are 0 in all phases."""
    kinds = (*MEMORY_KINDS, "activations")
    used = [kind for kind in kinds if any(phase.memory[kind] for phase in plan.phases)]
    table = Table(title="Memory of each device", title_justify="left")
    table.add_column("phase", no_wrap=True)
    grouped = any(phase.devices for phase in plan.phases)
    for name in (*["devices"] * grouped, *used, "peak", "of device memory"):
        table.add_column(name, justify="right")
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
    table = Table(title="Work of each device (one call), roofline of a step", title_justify="left")
    table.add_column("phase", no_wrap=True)
    for name in ("calls a step", "FLOPs", "collectives: bytes sent (count)", "roofline", "bound by"):
        table.add_column(name, justify="left" if name.startswith("coll") else "right")
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
    title = "Work of each device (one call) as compiled, and its floor"
    table = Table(title=title, title_justify="left")
    table.add_column("phase", no_wrap=True)
    for name in ("FLOPs", "floor", "ratio", "memory traffic", "floor", "ratio", "sent", "floor", "ratio"):
        table.add_column(name, justify="right")
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
    """Return lines on the collectives in loops that the devices wait for, those of a MiB or more."""
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


def verdict(plan: Plan) -> list[str]:
    """Return lines that state whether the plan fits, and the advice."""
    peak, memory = plan.peak, f"of the {format_bytes(plan.memory)} that a run may use"
    host = max(phase.host for phase in plan.phases)
    lines = [f"Host memory: {format_bytes(host)} for each device, of what is offloaded."] if host else []
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
    """Return the phase with the highest peak of each group of devices; {} where all devices are alike."""
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
