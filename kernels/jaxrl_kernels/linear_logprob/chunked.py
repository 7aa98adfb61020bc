"""Log-probabilities of a vocabulary without ever holding [B, T, V]."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@functools.partial(jax.jit, static_argnames=("temperature", "softcap", "chunk", "with_entropy"))
def linear_logprob(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int = 128,
    with_entropy: bool = True,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"] | None]:
    """log softmax(hidden head^T / temperature) at the targets, and its entropy, chunk by chunk over T.

    Peak memory is one chunk of logits, [B, chunk, V] float32, forward and backward: the backward pass
    recomputes them (8 B T D V FLOPs in all instead of 6). `softcap` c first turns the logits into
    c * tanh(logit / c).

    Returns: (log-prob, entropy), float32, nats; entropy is None without `with_entropy`.
    """
    shape = targets.shape
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:  # one token dim: with two, XLA's CPU backend copies a transpose
        hidden, targets = hidden.reshape(1, -1, hidden.shape[-1]), targets.reshape(1, -1)
        chunk *= shape[0]
    batch, length, _ = hidden.shape
    chunk = min(chunk, length)
    pad = -length % chunk
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, pad)))
    steps = (length + pad) // chunk

    @jax.checkpoint
    def one(hidden_c, targets_c):
        logits = jnp.einsum("btd,vd->btv", hidden_c, head, preferred_element_type=jnp.float32)
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        logits = logits / temperature
        lse = jax.nn.logsumexp(logits, axis=-1)
        # Compare with an iota instead of gathering: the vocabulary may be divided among devices.
        at_target = targets_c[..., None] == jnp.arange(head.shape[0])
        logprob = jnp.sum(jnp.where(at_target, logits, 0.0), axis=-1) - lse
        if not with_entropy:
            return logprob, None
        surprise = lse[..., None] - logits  # -log p; multiplied out, lse - sum(p logits) would cancel
        return logprob, jnp.sum(jnp.exp(-surprise) * surprise, axis=-1)

    if steps == 1:
        logprob, entropy = one(hidden, targets)
    else:
        split = lambda x: jnp.moveaxis(x.reshape(batch, steps, chunk, *x.shape[2:]), 1, 0)
        merged = lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, steps * chunk)
        out = jax.lax.map(lambda xs: one(*xs), (split(hidden), split(targets)))
        logprob, entropy = jax.tree.map(merged, out)
    cut = lambda x: x[:, :length].reshape(shape)
    return cut(logprob), None if entropy is None else cut(entropy)
