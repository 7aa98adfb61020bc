"""Log-probabilities of a vocabulary without ever holding [B, T, V]."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxrl_kernels.chunks import join, split

PIECE = 512
"""Tokens whose logits exist at once on one device, at most: fills its matrix units, stays near its caches."""


@functools.partial(jax.jit, static_argnames=("temperature", "softcap", "chunk", "with_entropy"))
def linear_logprob(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    mask: Num[Array, "B T"] | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int = 128,
    with_entropy: bool = True,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"] | None]:
    """log softmax(hidden head^T / temperature) at the targets, and its entropy, chunk by chunk over T.

    Peak memory is one chunk of logits, [B, chunk, V] float32, forward and backward: the backward pass
    recomputes them (8 B T D V FLOPs in all instead of 6). On one device the work is that of the tokens
    in the mask: they are brought together, and chunks without any are left out.

    Args:
        mask: above 0 = wanted; elsewhere the results and their gradients are 0. None = all are wanted.
        softcap: c first turns the logits into c * tanh(logit / c).

    Returns: (log-prob, entropy), float32, nats; entropy is None without `with_entropy`.
    """
    shape = targets.shape
    wanted = jnp.ones(shape, bool) if mask is None else mask > 0
    mesh = jax.sharding.get_abstract_mesh()
    order, count = None, shape[1]
    if mesh.empty or mesh.size == 1:  # one token dim: with two, XLA's CPU backend copies a transpose
        chunk = min(chunk * shape[0], PIECE)
        hidden, targets = hidden.reshape(1, -1, hidden.shape[-1]), targets.reshape(1, -1)
        count = targets.size
        if mask is not None:
            order = jnp.argsort(~wanted.reshape(-1))
            hidden, targets, count = hidden[:, order], targets[:, order], jnp.sum(wanted)
    length = hidden.shape[1]
    chunk = min(chunk, length)

    def placed(x):
        x = join(x, length)
        x = x if order is None else x[:, jnp.argsort(order)]
        return jnp.where(wanted, x.reshape(shape), 0)

    settings = _Settings(temperature, softcap, with_entropy)
    steps = -(-count // chunk)
    logprob, entropy = _logprob(settings, split(hidden, chunk), head, split(targets, chunk), steps)
    return placed(logprob), placed(entropy) if with_entropy else None


class _Settings(NamedTuple):
    temperature: float
    softcap: float | None
    with_entropy: bool

    def logits(self, hidden, head):
        logits = jnp.einsum("bcd,vd->bcv", hidden, head, preferred_element_type=jnp.float32)
        if self.softcap is not None:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
        return logits / self.temperature


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprob(settings: _Settings, hidden, head, targets, steps):
    """(log-prob, entropy), each [S, B, C], of the first `steps` of S chunks; 0 in the others."""
    return _forward(settings, hidden, head, targets, steps)[0]


def _forward(settings, hidden, head, targets, steps):
    def one(i, out):
        logits = settings.logits(hidden[i], head)
        top = jnp.max(logits, axis=-1, keepdims=True)
        below = logits - top
        weights = jnp.exp(below)
        total = jnp.sum(weights, axis=-1)
        lse = jnp.log(total)
        # Compare with an iota instead of gathering: the vocabulary may be divided among devices.
        at_target = targets[i][..., None] == jnp.arange(head.shape[0])
        found = [jnp.sum(jnp.where(at_target, below, 0), axis=-1) - lse, lse + top[..., 0]]
        if settings.with_entropy:
            found.append(lse - jnp.sum(weights * below, axis=-1) / total)  # two positive terms
        return [x.at[i].set(y) for x, y in zip(out, found, strict=True)]

    zeros = [jnp.zeros(targets.shape, jnp.float32)] * (2 + settings.with_entropy)
    logprob, lse, *entropy = jax.lax.fori_loop(0, steps, one, zeros)
    entropy = entropy[0] if entropy else None
    return (logprob, entropy), (hidden, head, targets, steps, lse, entropy)


def _backward(settings, kept, cotangents):
    hidden, head, targets, steps, lse, entropy = kept

    def one(i, grads):
        d_hidden, d_head = grads
        logits = settings.logits(hidden[i], head)
        logp = logits - lse[i][..., None]
        slope = cotangents[0][i][..., None]
        d = slope
        if settings.with_entropy:
            d = d + cotangents[1][i][..., None] * (logp + entropy[i][..., None])
        at_target = targets[i][..., None] == jnp.arange(head.shape[0])
        d = (jnp.where(at_target, slope, 0) - jnp.exp(logp) * d) / settings.temperature
        if settings.softcap is not None:
            d = d * (1 - (logits * settings.temperature / settings.softcap) ** 2)
        d = d.astype(hidden.dtype)
        d_hidden = d_hidden.at[i].set(jnp.einsum("bcv,vd->bcd", d, head))
        # [D, V]: as [V, D], XLA's CPU backend would copy the transpose of all of d.
        d_head = d_head + jnp.einsum("bcd,bcv->dv", hidden[i], d, preferred_element_type=jnp.float32)
        return d_hidden, d_head

    zeros = jnp.zeros_like(hidden), jnp.zeros(head.shape[::-1], jnp.float32)
    d_hidden, d_head = jax.lax.fori_loop(0, steps, one, zeros)
    return d_hidden, d_head.T.astype(head.dtype), None, None


_logprob.defvjp(_forward, _backward)
