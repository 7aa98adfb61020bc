"""A plan as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from jaxrl_llm.plan.plan import PARTS, Plan, Row

SHORT = {
    "all-gather": "gather",
    "all-reduce": "reduce",
    "reduce-scatter": "scatter",
    "all-to-all": "exchange",
}


def show(plan: Plan, console: Console) -> None:
    """Memory, then work, then the verdict."""
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.items() if size > 1) or "1 device"
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    console.print(f"{plan.model} on {plan.topology} ({mesh}); compiled, not run ({versions})")
    console.print(plan.kernels, highlight=False, soft_wrap=True)
    console.print(memory_table(plan))
    console.print(work_table(plan))
    for line in verdict(plan):
        console.print(line, highlight=False, soft_wrap=True)


def memory_table(plan: Plan) -> Table:
    """Bytes of one device, by phase and by what they hold; parts that no phase has are left out."""
    used = [part for part in (*PARTS, "activations") if any(row.memory[part] for row in plan.rows)]
    table = Table(title="Memory of each device", title_justify="left")
    table.add_column("phase", no_wrap=True)
    for name in (*used, "peak", "of the device"):
        table.add_column(name, justify="right")
    for row in plan.rows:
        over = row.peak > plan.memory or row.refused
        cells = [size(row.memory[part]) for part in used]
        share = f"{row.peak / plan.memory:.0%}"
        table.add_row(row.name, *cells, size(row.peak), share, style="bold red" if over else None)
    return table


def work_table(plan: Plan) -> Table:
    """Work of one call on one device, and the roofline of a step."""
    table = Table(title="Work of each device (one call), roofline of a step", title_justify="left")
    table.add_column("phase", no_wrap=True)
    for name in ("calls a step", "FLOPs", "collectives: bytes sent (count)", "estimate", "bound by"):
        table.add_column(name, justify="left" if name.startswith("coll") else "right")
    for row in plan.rows:
        calls = f"{row.calls:,}" + (f" {row.per}s" if row.per != "call" else "")
        bound = max(row.seconds, key=row.seconds.get) if row.seconds else "unknown chip"
        time = seconds(row.time) if row.seconds else "-"
        table.add_row(row.name, calls, amount(row.flops) if row.flops else "-", spoken(row), time, bound)
    if plan.step_seconds:
        table.add_row("step", "", "", "", seconds(plan.step_seconds), "estimate, a lower bound")
    return table


def spoken(row: Row) -> str:
    """The collectives of a call, the heaviest kind first."""
    by_bytes = sorted(row.traffic.items(), key=lambda item: -item[1]["bytes"])
    return ", ".join(f"{kind} {size(x['bytes'])} ({x['count']:.0f})" for kind, x in by_bytes) or "none"


def verdict(plan: Plan) -> list[str]:
    """Whether it fits, and what to change if not."""
    row, of = plan.peak, f"of the {size(plan.memory)} that a run may use"
    if plan.fits:
        return [f"Fits: at most {size(row.peak)} {of} on each device, in {row.name}."]
    lines = [f"Does not fit: {row.name} needs {size(row.peak)} {of} on each device."]
    lines += [f"The compiler refused {row.name}: {row.refused}" for row in plan.rows if row.refused]
    return [*lines, *(["What to change, in this order:"] if plan.advice else []), *plan.advice]


def size(count: float) -> str:
    """Bytes for people."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:.0f} B" if count else "-"


def amount(count: float) -> str:
    """FLOPs for people."""
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f}"


def seconds(time: float) -> str:
    """A duration for people."""
    return f"{time:.3g} s" if time >= 1 else f"{time * 1e3:.3g} ms"
