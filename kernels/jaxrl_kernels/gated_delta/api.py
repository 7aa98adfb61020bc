"""The gated delta rule over rows of packed segments: one function over several implementations."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_kernels.dispatch import choose, load_implementation
from jaxrl_kernels.gated_delta import reference


def gated_delta(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T Hv V"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"] | None = None,
    *,
    segments: Int[Array, "B T"],
    last: Int[Array, "B T"] | None = None,
    initial: Float[Array, "B Hv K V"] | None = None,
    levels: int = 2,
    partition_spec: PartitionSpec | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "B T Hv V"], Float[Array, "B Hv K V"]]:
    """Compute the gated delta rule over the path of each token.

    Args:
        q, k, v, g, beta, segments, last, initial, levels: of `reference.gated_delta`.
        partition_spec: of v over the mesh of `jax.set_mesh`, whole rows: each device computes its rows and
            heads. None = one device. Plain JAX does not read it.
        implementation: "auto" or one of `dispatch.OPERATIONS`.

    Returns:
        out: like v, 0 for padding.
        final: the state after the last token of each row, float32.

    Raises:
        ValueError: the implementation does not support the inputs; the message names one that does.
    """
    name, _ = choose(
        "gated_delta",
        k.shape[3],
        v.shape[3],
        v.shape[2] // k.shape[2],
        q.dtype,
        beta is not None,
        implementation=implementation,
    )
    if implementation == "auto" and q.shape[1] <= reference.CHUNK:  # plain JAX computes one such chunk
        name = "reference"
    given = {"segments": segments, "last": last, "initial": initial, "levels": levels}
    if name == "reference":
        return reference.gated_delta(q, k, v, g, beta, **given)

    # Kernels run under `shard_map`; XLA partitions plain JAX.
    repeats = 1 if partition_spec is None else _key_repeats(partition_spec, k.shape[2])
    q, k = (x if repeats == 1 else jnp.repeat(x, repeats, axis=2) for x in (q, k))
    compute = load_implementation("gated_delta", name).gated_delta
    return compute(q, k, v, g, beta, **given, partition_spec=partition_spec)


def _key_repeats(partition_spec: PartitionSpec, key_heads: int) -> int:
    """Return how often key heads are repeated, so that each device has the key heads of its value heads."""
    axes = partition_spec[2] or ()
    sizes = jax.sharding.get_abstract_mesh().shape
    shards = math.prod(sizes[name] for name in ((axes,) if isinstance(axes, str) else axes))
    return shards // math.gcd(key_heads, shards)
