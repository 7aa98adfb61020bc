"""Sum over the vocabulary of p^2, in chunks: [B, T, V] is never in memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_kernels.chunks import map_chunks
from jaxrl_kernels.linear_logprob.reference import LogprobSpec


@functools.partial(jax.jit, static_argnames=("temperature", "softcap", "chunk"))
def linear_square(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int = 128,
) -> Float[Array, "B T"]:
    """Compute sum(softmax(hidden head^T / temperature)^2) at each position, float32, in chunks over T.

    It is the probability that two samples agree (1 - it is the Gini impurity). Not meant for gradients.

    Args:
        temperature, softcap, chunk: as of `linear_logprob`.
    """
    spec = LogprobSpec(temperature, softcap)

    def one(piece):
        products = jnp.einsum("bcd,vd->bcv", piece, head, preferred_element_type=jnp.float32)
        return jnp.sum(jax.nn.softmax(spec.logits(products)) ** 2, axis=-1)

    return map_chunks(one, chunk, hidden)
