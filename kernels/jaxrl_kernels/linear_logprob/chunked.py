"""The dense definition, a few tokens at a time: never more than [chunk, V] of logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_kernels.linear_logprob import reference
from jaxrl_kernels.linear_logprob.reference import Found, Spec, d_logits

__all__ = ["backward", "d_logits", "forward"]


def forward(
    spec: Spec,
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "M"],
    count: int | Int[Array, ""],
    chunk: int = 512,
) -> Found:
    """0 in the chunks that begin after `count` tokens."""
    length = targets.shape[0]
    hidden, targets = _split(chunk, hidden, targets)

    def one(i, out):
        found = reference.forward(spec, hidden[i], head, targets[i])
        return jax.tree.map(lambda x, y: x.at[i].set(y), out, found)

    nothing = jnp.zeros(targets.shape, jnp.float32)
    out = jax.lax.fori_loop(0, -(-count // chunk), one, (nothing, nothing if spec.entropy else None, nothing))
    return jax.tree.map(lambda x: x.reshape(-1)[:length], out)


def backward(
    spec: Spec,
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "M"],
    count: int | Int[Array, ""],
    *columns: Float[Array, "M"] | None,
    chunk: int = 512,
    d_logits=d_logits,
) -> tuple[Float[Array, "M D"], Float[Array, "V D"]]:
    """(d_hidden like hidden, d_head float32) from `d_logits` of [chunk, V] at a time: 6 M D V FLOPs.

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
        # [D, V], with a dim of 1: else XLA's CPU backend copies the transpose of all of d.
        products = jnp.einsum("bcd,bcv->dv", hidden[i][None], d[None], preferred_element_type=jnp.float32)
        return d_hidden, d_head + products

    zeros = jnp.zeros_like(hidden), jnp.zeros(head.shape[::-1], jnp.float32)
    d_hidden, d_head = jax.lax.fori_loop(0, -(-count // chunk), one, zeros)
    return d_hidden.reshape(-1, hidden.shape[-1])[:length], d_head.T


def _split(chunk: int, *arrays):
    """[M, ...] -> [chunks, chunk, ...], the last filled up with zeros."""
    fill = lambda x: jnp.pad(x, ((0, -x.shape[0] % chunk), *((0, 0),) * (x.ndim - 1)))
    return [None if x is None else fill(x).reshape(-1, chunk, *x.shape[1:]) for x in arrays]
