"""The definition of the divergence of two next-token distributions, over logits of the whole vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MASKED_LOGIT = -1e30  # of a token without mass; finite, so that no gradient becomes NaN


def divergence(
    log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"], beta: float, top_k: int = 0
) -> Float[Array, "*B"]:
    """Compute the generalised Jensen-Shannon divergence (see `chunked.linear_divergence`), nats.

    Args:
        log_p, log_q: log-probs of teacher and student.
        top_k: keep the teacher's k likeliest tokens, pool the rest; 0 = keep all.
    """
    if not 0 < top_k < log_p.shape[-1]:
        return jnp.sum(_terms(log_p, log_q, beta), axis=-1)
    kept = log_p >= jax.lax.top_k(log_p, top_k)[0][..., -1:]
    pooled = lambda log: jax.nn.logsumexp(jnp.where(kept, MASKED_LOGIT, log), axis=-1)
    of_kept = jnp.sum(jnp.where(kept, _terms(log_p, log_q, beta), 0.0), axis=-1)
    return of_kept + _terms(pooled(log_p), pooled(log_q), beta)


def log_probs(
    hidden: Float[Array, "B T D"], head: Float[Array, "V D"], temperature: float, softcap: float | None
) -> Float[Array, "B T V"]:
    """Compute log softmax(hidden head^T / temperature), float32, soft-capped where the model is."""
    logits = jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    return jax.nn.log_softmax(logits / temperature)


def _terms(log_p: Float[Array, "..."], log_q: Float[Array, "..."], beta: float) -> Float[Array, "..."]:
    """Return each outcome's term of the divergence, from its log-probs under teacher and student."""
    if beta == 0.0:
        return jnp.exp(log_p) * (log_p - log_q)
    if beta == 1.0:
        return jnp.exp(log_q) * (log_q - log_p)
    log_m = jnp.logaddexp(log_p + jnp.log(beta), log_q + jnp.log1p(-beta))
    return beta * jnp.exp(log_p) * (log_p - log_m) + (1 - beta) * jnp.exp(log_q) * (log_q - log_m)
