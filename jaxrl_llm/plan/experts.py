"""Experts: whether gathering their weights takes longer than computing, and the tiles of their rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_kernels.chips import GPUS_PER_HOST, Chip
from jaxrl_kernels.dispatch import choose
from jaxrl_kernels.grouped_matmul.tiled import rows_of_tile
from jaxrl_llm.builders.sizes import derived
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.models import TransformerConfig, abstract, named_leaves
from jaxrl_llm.models.flops import layer_weights
from jaxrl_llm.sharding.rules import Rules, num_shards

TILES = r"experts\b.*while/body/.*while$"
"""The loop over the tiles of an expert's rows, as `hlo.Instruction.source` names it."""


@dataclass(frozen=True)
class ExpertGather:
    """One forward pass of a micro-batch on a device: weights gathered over the mesh, and computed with."""

    tokens: float  # of a device, in a micro-batch
    flops: float  # FLOP/s of a device
    interconnect: float  # bytes/s into a device
    gathered: float  # weights of all layers that a device gathers
    active: float  # weights of all layers that a token passes
    itemsize: int  # bytes of a gathered weight

    @property
    def least_tokens(self) -> float:
        """Tokens from which on gathering takes no longer than computing.

        itemsize * gathered / interconnect <= 2 * tokens * active / flops
        """
        return self.flops / self.interconnect * self.itemsize / 2 * self.gathered / self.active

    def describe(self) -> str:
        """Return the inequality with its numbers, and the settings that change it."""
        hidden = self.tokens >= self.least_tokens
        line = (
            f"Experts: gathering weights takes {'no longer than' if hidden else 'longer than'} computing: "
            f"{self.tokens:,.0f} tokens per device and micro-batch {'>=' if hidden else '<'} "
            f"{self.least_tokens:,.0f} = {self.flops / 1e12:,.0f} TFLOP/s / {self.interconnect / 1e9:,.0f} "
            f"GB/s x {self.itemsize} bytes / 2 x {self.gathered / 1e9:.3g}B gathered / "
            f"{self.active / 1e9:.3g}B active weights of the layers."
        )
        if hidden:
            return line
        return (
            f"{line} Larger micro-batches (--tokens_per_device), or a larger --mesh.expert, which divides "
            "the experts and gathers tokens in their place."
        )


def expert_gather(
    config: TrainConfig, model: TransformerConfig, sizes: Mapping[str, int], chip: Chip | None
) -> ExpertGather | None:
    """Return the numbers of a model whose experts are gathered; None if no experts are gathered.

    All weights of the layers are sharded over fsdp, sequence and expert, and gathered, except that experts
    stay divided over expert. Tensor parallelism divides both sides equally. Weights that the GPUs of a host
    gather from other hosts arrive once, through all of its adapters, and are distributed over NVLink.

    Args:
        sizes: mesh axis -> size. chip: None = unknown.
    """
    if model.moe is None or chip is None or num_shards("expert_embed", sizes) == 1:
        return None
    weights = {name: math.prod(leaf.shape) for name, leaf in named_leaves(abstract(model))}
    experts = sum(size for name, size in weights.items() if ".expert_" in name)
    others = sum(size for name, size in weights.items() if "." in name) - experts
    rows = derived(config, math.prod(sizes.values()))["rows_per_microbatch"]
    several_hosts = not chip.torus_dims and math.prod(sizes.values()) > GPUS_PER_HOST
    of_host = GPUS_PER_HOST * chip.between or chip.interconnect
    replicas = num_shards("batch", sizes) * num_shards("sequence", sizes)
    return ExpertGather(
        rows * config.row_tokens / replicas,
        chip.flops,
        min(chip.interconnect, of_host) if several_hosts else chip.interconnect,
        others + experts / num_shards("experts", sizes),
        active=layer_weights(model),
        itemsize=jnp.dtype(config.model.dtype).itemsize,
    )


def tile_trips(
    model: TransformerConfig, mesh: Mesh, rules: Rules, dtype: DTypeLike, *, tokens: float
) -> dict[str, float]:
    """Return TILES -> tiles of an expert at a balanced load, if the mesh's devices have no grouped kernel.

    Args:
        tokens: of all devices, in a call of the program.
    """
    if model.moe is None:
        return {}
    with jax.set_mesh(mesh):
        name, _ = choose("grouped_matmul", dtype)
    if name != "tiled":
        return {}
    replicas = num_shards("batch", mesh.shape) * num_shards("sequence", mesh.shape)
    shared = num_shards("experts", mesh.shape, rules)  # by devices that gather their tokens
    rows = tokens / replicas * shared * model.moe.experts_per_token
    experts = model.moe.num_experts
    return {TILES: math.ceil(rows / experts / rows_of_tile(int(rows), max(experts // shared, 1)))}
