"""The covariance of advantage and log-prob: it says which tokens drive entropy down (arXiv 2505.22617)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos.reduce import masked_sum
from jaxrl_llm.structs import LossInputs


def covariance(signals: LossInputs) -> Float[Array, "B T"]:
    """(A - mean A) (log pi - mean log pi) of each token, without gradient.

    The means are over this micro-batch's tokens, as in the authors' code: with micro-batches of different
    content the choice of tokens depends a little on the split.
    """
    count = jnp.maximum(signals.mask.sum(), 1.0)
    centred = lambda x: x - masked_sum(x, signals.mask) / count
    return jax.lax.stop_gradient(centred(signals.advantages) * centred(signals.policy))


def lottery(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """A number in [0, 1) for each x that looks random and depends on x alone, not on its place in a batch."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    for shift in (16, 15):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(0x45D9F3B)
    return (bits >> 8).astype(jnp.float32) / 2.0**24
