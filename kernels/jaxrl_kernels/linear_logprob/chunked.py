"""The dense definition in chunks of tokens: at most [chunk, V] of logits in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_kernels.linear_logprob import reference
from jaxrl_kernels.linear_logprob.reference import LogprobOutputs, LogprobSpec, d_logits

__all__ = ["backward", "d_logits", "forward"]


def forward(
    spec: LogprobSpec,
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "M"],
    count: int | Int[Array, ""],
    chunk: int = 512,
) -> LogprobOutputs:
    """Compute `reference.forward`; 0 in the chunks that start after `count` tokens."""
    length = targets.shape[0]
    hidden, targets = _split(chunk, hidden, targets)

    def one(i, out):
        outputs = reference.forward(spec, hidden[i], head, targets[i])
        return jax.tree.map(lambda x, y: x.at[i].set(y), out, outputs)

    zeros = jnp.zeros(targets.shape, jnp.float32)
    out = jax.lax.fori_loop(0, -(-count // chunk), one, (zeros, zeros if spec.entropy else None, zeros))
    return jax.tree.map(lambda x: x.reshape(-1)[:length], out)


def backward(
    spec: LogprobSpec,
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "M"],
    count: int | Int[Array, ""],
    *columns: Float[Array, "M"] | None,
    chunk: int = 512,
    d_logits=d_logits,
) -> tuple[Float[Array, "M D"], Float[Array, "V D"]]:
    """Return (d_hidden like hidden, d_head float32) from `d_logits` in chunks: 6 M D V FLOPs.

    Args:
        columns: lse, entropy, d_logprob, d_entropy.
        d_logits: an implementation's.
    """
    length = targets.shape[0]
    hidden, targets, *columns = _split(chunk, hidden, targets, *columns)

    def one(i, grads):
        d_hidden, d_head = grads
        d = d_logits(spec, hidden[i], head, targets[i], *(None if x is None else x[i] for x in columns))
        d_hidden = d_hidden.at[i].set(jnp.einsum("cv,vd->cd", d, head))
        # [D, V], with a dim of 1: otherwise XLA's CPU backend copies the transpose of all of d.
        products = jnp.einsum("bcd,bcv->dv", hidden[i][None], d[None], preferred_element_type=jnp.float32)
        return d_hidden, d_head + products

    zeros = jnp.zeros_like(hidden), jnp.zeros(head.shape[::-1], jnp.float32)
    d_hidden, d_head = jax.lax.fori_loop(0, -(-count // chunk), one, zeros)
    return d_hidden.reshape(-1, hidden.shape[-1])[:length], d_head.T


def _split(chunk: int, *arrays):
    """Reshape [M, ...] to [chunks, chunk, ...], the last padded with zeros."""
    fill = lambda x: jnp.pad(x, ((0, -x.shape[0] % chunk), *((0, 0),) * (x.ndim - 1)))
    return [None if x is None else fill(x).reshape(-1, chunk, *x.shape[1:]) for x in arrays]
