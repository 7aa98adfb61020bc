"""The plan of a recipe on a topology: compiled phases and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from jaxrl_llm.config import TrainConfig, derived
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.kernels import describe
from jaxrl_llm.plan.compiled import Compiled, compile_call
from jaxrl_llm.plan.models import shape_of
from jaxrl_llm.plan.phases import Phase, phases
from jaxrl_llm.plan.target import Target
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.sharding.rules import bytes_per_device

PARTS = ("parameters", "optimizer", "gradients", "frozen models", "rollout weights", "KV cache", "batch")


@dataclass(frozen=True)
class Row:
    """A phase on one device. Bytes, FLOPs and seconds are those of one call."""

    name: str
    memory: dict[str, float]  # what -> bytes, of PARTS and "activations"; its sum is the peak
    calls: int  # a step, at most
    per: str
    flops: float
    traffic: dict[str, Any]  # kind of collective -> count and bytes sent
    seconds: dict[str, float]  # what a call takes at least for compute, memory and interconnect; {} = unknown
    compile_seconds: float
    refused: str

    @property
    def peak(self) -> float:
        """Bytes."""
        return sum(self.memory.values())

    @property
    def time(self) -> float:
        """Roofline, seconds of all calls of a step: the slowest of compute, memory and interconnect."""
        return self.calls * max(self.seconds.values(), default=0.0)


@dataclass(frozen=True)
class Plan:
    """All of it, for the table and for JSON."""

    model: str
    topology: str
    mesh: dict[str, int]
    memory: float  # bytes of a device that the run may use
    rows: list[Row]
    derived: dict[str, int]
    versions: dict[str, str]
    kernels: str = ""  # what computes attention and log-probs, and why
    only: str = ""  # words of the phases that were asked for; "" = all
    advice: list[str] = field(default_factory=list)

    @property
    def peak(self) -> Row:
        """The phase that needs most."""
        return max(self.rows, key=lambda row: row.peak)

    @property
    def fits(self) -> bool:
        return self.peak.peak <= self.memory and not any(row.refused for row in self.rows)

    @property
    def step_seconds(self) -> float:
        """Roofline of a step; 0 where the chip is not known."""
        return sum(row.time for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Everything, in bytes, FLOPs and seconds a device."""
        rows = [{**asdict(row), "peak": row.peak, "step_seconds": row.time} for row in self.rows]
        peak = {"phase": self.peak.name, "bytes": self.peak.peak}
        return {
            "label": "compiled, not run",
            **asdict(self),
            "rows": rows,
            "peak": peak,
            "fits": self.fits,
            "step_seconds": self.step_seconds,
        }


def make_plan(
    config: TrainConfig, target: Target, only: str = "", say: Callable[[str], None] = lambda text: None
) -> Plan:
    """Compile every phase of the recipe's step for the target's devices, one after the other.

    Args:
        only: compile the phases whose name holds one of these words, separated by commas; "" = all.
        say: told what is being compiled.

    Raises:
        ValueError: the recipe cannot run on these devices, with the fix.
    """
    mesh = make_mesh(config.mesh, target.devices)
    rows = []
    for phase in phases(config, mesh):
        if only and not any(word.strip() in phase.name for word in only.split(",")):
            continue
        say(f"compiling {phase.name}")
        rows.append(make_row(phase, compile_call(phase.call, mesh, target.topology.platform), target))
    if not rows:
        raise UserError(f"--only {only}: no phase of this recipe has such a name")
    return Plan(
        config.model.path or "architecture of the recipe",
        target.topology.name,
        dict(mesh.shape),
        target.memory,
        rows,
        derived(config, mesh.size),
        {"jax": jax.__version__, "compiler": target.compiler},
        describe(shape_of(config.model), config.model.dtype, mesh, config.strict),
        only,
    )


def make_row(phase: Phase, found: Compiled, target: Target) -> Row:
    """The phase's memory, work and roofline on one device."""
    memory = {part: float(bytes_per_device(phase.held.get(part, []))) for part in PARTS}
    padding = max(found.arguments - bytes_per_device(phase.call.args), 0.0)
    memory["activations"] = found.temporary + found.outputs + padding
    work, seconds = phase.flops / len(target.devices), {}
    if target.chip:
        sent = sum(traffic.bytes for traffic in found.traffic.values())
        seconds = {
            "compute": work / target.chip.flops,
            "memory": (found.arguments + found.outputs + 2 * found.temporary) / target.chip.bandwidth,
            "interconnect": sent / target.chip.interconnect,
        }
    return Row(
        phase.name,
        memory,
        phase.times,
        phase.per,
        work,
        {kind: traffic._asdict() for kind, traffic in sorted(found.traffic.items())},
        seconds,
        found.seconds,
        found.refused,
    )
