"""Plan of a recipe on a topology: memory, FLOPs and roofline of every compiled phase of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from jaxrl_llm.builders.sizes import derived, make_meshes, with_prefixes
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.host.command import working
from jaxrl_llm.models.kernels import check_kernels_setting, describe_kernels, turing_warning
from jaxrl_llm.plan.compiled import CompiledStats, CompileTarget, compile_program
from jaxrl_llm.plan.experts import ExpertGather, expert_gather
from jaxrl_llm.plan.floors import copied_layers
from jaxrl_llm.plan.models import ABSTRACT_MODELS, planned_model
from jaxrl_llm.plan.phases import Phase, phases
from jaxrl_llm.recipe.checks import architectures, check_models, check_on_devices
from jaxrl_llm.recipe.rules_devices import with_sizes
from jaxrl_llm.sharding.config import POLICY
from jaxrl_llm.sharding.placement import device_ranges, placement_of, slice_numbers
from jaxrl_llm.sharding.rules import HOST, bytes_per_device

MEMORY_KINDS = (
    "parameters",
    "optimizer",
    "gradients",
    "frozen models",
    "rollout weights",
    "KV cache",
    "batch",
)


@dataclass(frozen=True)
class PhaseCost:
    """A phase on one device. Bytes, FLOPs and seconds are per call."""

    name: str
    memory: dict[str, float]  # kind -> bytes, of MEMORY_KINDS and "activations"; the sum is the peak
    calls: int  # a step, at most
    unit: str  # of `calls`: "call" or "token"
    flops: float  # of the arithmetic that the recipe chooses, recomputation included
    collectives: dict[str, Any]  # kind of collective -> count and bytes sent
    roofline: dict[str, float]  # bound (compute, memory, links) -> least seconds of a call; {} = unknown
    compile_seconds: float
    error: str  # of the compiler, if the program alone is too large
    host: float = 0.0  # offloaded bytes in the memory of the host, for each device
    devices: str = ""  # of each process, on which it needs the most; "" = all are alike
    compiled: dict[str, float] = field(default_factory=dict)  # `ProgramWork` of the compiled program
    floor: dict[str, float] = field(default_factory=dict)  # `ProgramWork` that is needed (`plan.floors`)
    synchronous: list[dict[str, Any]] = field(default_factory=list)
    """Collectives in loops that no computation overlaps, most bytes first (`SynchronousCollective`)."""

    @property
    def peak(self) -> float:
        """Peak memory in bytes."""
        return sum(self.memory.values())

    @property
    def step_seconds(self) -> float:
        """Roofline of all calls of a step: the slowest of compute, memory and links."""
        return self.calls * max(self.roofline.values(), default=0.0)


@dataclass(frozen=True)
class Plan:
    """The result of `make_plan`, for the tables and for JSON."""

    model: str
    topology: str
    mesh: dict[str, int]
    memory: float  # bytes of a device that the run may use
    phases: list[PhaseCost]
    derived: dict[str, int]
    versions: dict[str, str]
    kernels: str = ""  # implementations of attention and log-probs, and the reason
    meshes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Role -> devices and mesh, of the policy and of models with others; {} if all share the policy's."""
    experts: ExpertGather | None = None  # of the policy; None = a dense model, or nothing is gathered
    layers_before_stages: int = 0  # that all devices compute (`floors.copied_layers`)
    copied_layers: float = 0.0  # bytes of a copy of the others that stages hold, a part of the activations
    selected: str = ""  # filter of the phases that were compiled, such as "update"; "" = all
    advice: list[str] = field(default_factory=list)

    @property
    def peak(self) -> PhaseCost:
        """Phase with the highest peak memory."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def fits(self) -> bool:
        """True where every phase fits the memory of a device."""
        return self.peak.peak <= self.memory and not any(phase.error for phase in self.phases)

    @property
    def step_seconds(self) -> float:
        """Roofline of a step; 0 if the chip is unknown."""
        return sum(phase.step_seconds for phase in self.phases)

    def to_json(self) -> dict[str, Any]:
        """Return all results as a JSON object: bytes, FLOPs and seconds per device."""
        phases = [
            {**asdict(phase), "peak": phase.peak, "step_seconds": phase.step_seconds} for phase in self.phases
        ]
        peak = {"phase": self.peak.name, "bytes": self.peak.peak}
        return {
            "label": "compiled, not run",
            **asdict(self),
            "phases": phases,
            "peak": peak,
            "fits": self.fits,
            "step_seconds": self.step_seconds,
        }


def make_plan(
    config: TrainConfig, target: CompileTarget, only: str = "", log: Callable[[str], None] = lambda text: None
) -> Plan:
    """Compile the phases of the recipe's step for the target's devices, one after the other.

    Args:
        only: words separated by commas; phases whose name contains one are compiled; "" = all.
        log: receives warnings, and a line before each compilation.

    Raises:
        UserError: the recipe cannot run on these devices, with the fix.
    """
    config, meshes, step = trace_step(config, target)
    model, mesh, sized = planned_model(config.model), meshes[POLICY], with_sizes(config, target.devices)
    selected = [p for p in step if not only or any(word.strip() in p.name for word in only.split(","))]
    if not selected:
        names = ", ".join(phase.name for phase in step)
        raise UserError(f"--only {only}: no phase of this recipe has such a name; known are {names}.")
    if warning := turing_warning(config.dtypes, mesh):
        log(warning)
    # Compile each phase and take its numbers. GPUs that only compile do not tell the slices of their hosts.
    costs, slices = [], {}
    for role, own in meshes.items():
        if target.topology.platform == "cuda":
            numbers = {device: device.process_index for device in own.devices.flat}
        else:
            numbers = slice_numbers(own, sized.mesh_of(role).slices)
        slices = numbers | slices
    for phase in selected:
        log(f"compiling {phase.name}")
        with working(f"compiling {phase.name}"):
            of_devices = [slices[device] for device in phase.mesh.devices.flat]
            stats = compile_program(
                phase.program, phase.mesh, target.topology.platform, phase.hints, slices=of_devices
            )
        costs.append(phase_cost(phase, stats, target, device_groups(meshes)))
    # The phases, with the sizes, versions and kernels that they depend on.
    before, copied = copied_layers(step[0].resident["parameters"][0], mesh.shape)
    return Plan(
        config.model.path or "architecture of the recipe",
        target.topology.name,
        dict(mesh.shape),
        target.memory,
        phases=costs,
        derived=derived(config, mesh.size),
        versions={"jax": jax.__version__, "compiler": target.compiler},
        kernels=describe_kernels(model, config.model.dtype, mesh, config.strict),
        meshes={
            role.rstrip("."): placement_of(own, target.devices)
            for role, own in meshes.items()
            if own != mesh or (role == POLICY and len(set(meshes.values())) > 1)
        },
        experts=expert_gather(config, model, mesh.shape, target.chip),
        layers_before_stages=before,
        copied_layers=copied,
        selected=only,
    )


def trace_step(
    config: TrainConfig, target: CompileTarget
) -> tuple[TrainConfig, dict[str, Mesh], list[Phase]]:
    """Return the recipe as these models read its rows, the mesh of each role, and the phases of a step.

    Raises:
        UserError: the recipe cannot run on these devices, with the fix.
    """
    check_kernels_setting()
    check_models(check_on_devices(config, target.devices), architectures(config, ABSTRACT_MODELS.config))
    meshes = make_meshes(config, target.devices)
    config = with_prefixes(config, planned_model(config.model), meshes[POLICY], ABSTRACT_MODELS)
    return config, meshes, phases(config, meshes)


def device_groups(meshes: Mapping[str, Mesh]) -> list[list[Any]]:
    """Group the devices by the meshes that contain them."""
    groups: dict[tuple[bool, ...], list[Any]] = {}
    for device in dict.fromkeys(device for mesh in meshes.values() for device in mesh.devices.flat):
        groups.setdefault(tuple(device in mesh.devices for mesh in meshes.values()), []).append(device)
    return list(groups.values())


def phase_cost(
    phase: Phase, stats: CompiledStats, target: CompileTarget, groups: Sequence[Sequence[Any]]
) -> PhaseCost:
    """Return memory, FLOPs and roofline of the phase on one device, of the group that needs the most.

    Args:
        groups: `device_groups`; the same arrays are on all devices of a group.
    """

    def resident(devices, memory: Literal["device", "pinned_host"] = "device") -> dict[str, float]:
        kept = {kind: phase.resident.get(kind, []) for kind in MEMORY_KINDS}
        return {kind: float(bytes_per_device(tree, memory, devices)) for kind, tree in kept.items()}

    # The fullest group of devices decides.
    used = [group for group in groups if group[0] in phase.mesh.devices]
    fullest = max(used, key=lambda group: sum(resident(group).values()))
    memory, host = resident(fullest), stats.host + sum(resident(fullest, HOST).values())
    padding = max(stats.arguments - bytes_per_device(phase.program.args), 0.0)
    outputs = max(stats.outputs - bytes_per_device(phase.results), 0.0)
    memory["activations"] = stats.temporary + outputs + padding
    # The roofline of a known chip.
    flops, roofline = phase.flops / phase.mesh.size, {}
    if target.chip:
        across = sum(collective.across for collective in stats.collectives.values())
        sent = sum(collective.bytes for collective in stats.collectives.values()) - across
        roofline = {
            "compute": flops / target.chip.flops,
            "memory": (stats.arguments + stats.outputs + 2 * stats.temporary) / target.chip.bandwidth,
            "interconnect": sent / target.chip.interconnect,
        }
        if across and target.chip.between:
            roofline["links between slices"] = across / target.chip.between
    # Estimates beside the compiler's numbers.
    return PhaseCost(
        phase.name,
        memory,
        phase.calls,
        phase.unit,
        flops=flops,
        collectives={kind: collective._asdict() for kind, collective in sorted(stats.collectives.items())},
        roofline=roofline,
        compile_seconds=stats.seconds,
        error=stats.error,
        host=host,
        devices=device_ranges(fullest, target.devices) if len(groups) > 1 else "",
        compiled=stats.work._asdict(),
        floor=phase.floor._asdict(),
        synchronous=[collective._asdict() for collective in stats.synchronous],
    )
