"""Attention sinks: a learnt score a head in the denominator of the softmax (gpt-oss, arXiv 2508.10925).

A sink is one more key, of value 0, that every query attends to. Its effect is computed from the log-sum-exp
of the other keys, so implementations of attention do not handle it. `backward` accepts out and lse of a
longer sequence of keys, and the sink is the last key of this sequence, so the lse needs no gradient.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def add_sinks(
    out: Float[Array, "B T H E"], lse: Float[Array, "B H T"], sinks: Float[Array, "H"]
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
    """Return (out, lse) of attention over the keys and the sinks: out * sigmoid(lse - sink).

    Args:
        out, lse: of attention over the keys, as `reference.forward` returns them.
        sinks: the score of each head's sink, not scaled and not soft-capped.

    Returns: out, 0 for a fully masked query, and lse, for such a query the sink.
    """
    total = jnp.logaddexp(lse, sinks[:, None])
    scaled = out * jnp.moveaxis(jnp.exp(lse - total), 1, 2)[..., None]
    return scaled.astype(out.dtype), total


def d_sinks(
    sinks: Float[Array, "H"],
    out: Float[Array, "B T H E"],
    lse: Float[Array, "B H T"],
    d_out: Float[Array, "B T H E"],
    d_lse: Float[Array, "B H T"] | None = None,
) -> Float[Array, "H"]:
    """Return the gradient of the sinks from the outputs of `add_sinks` and their gradients.

    The sink's weight is w = exp(sink - lse) and its value 0: its score's gradient is -w (d_out out - d_lse).
    """
    delta = jnp.einsum("bthe,bthe->bht", d_out.astype(jnp.float32), out.astype(jnp.float32))
    delta = delta if d_lse is None else delta - d_lse
    return -jnp.sum(jnp.exp(sinks[:, None] - lse) * delta, axis=(0, 2)).astype(sinks.dtype)
