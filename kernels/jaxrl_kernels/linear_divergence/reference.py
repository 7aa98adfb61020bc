"""The definition of the divergence of two next-token distributions, over logits of the whole vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_kernels.linear_logprob.reference import MASKED_LOGIT, LogprobSpec


def divergence(
    log_p: Float[Array, "*B V"],
    log_q: Float[Array, "*B V"],
    beta: float,
    kept: Bool[Array, "*B V"] | None = None,
) -> Float[Array, "*B"]:
    """Compute the generalised Jensen-Shannon divergence (see `chunked.linear_divergence`), nats.

    Args:
        log_p, log_q: log-probs of teacher and student.
        kept: of `top_tokens`; the others are pooled into one outcome. None = all are kept.
    """
    if kept is None:
        return jnp.sum(_terms(log_p, log_q, beta), axis=-1)
    pooled = lambda log: jax.nn.logsumexp(jnp.where(kept, MASKED_LOGIT, log), axis=-1)
    of_kept = jnp.sum(jnp.where(kept, _terms(log_p, log_q, beta), 0.0), axis=-1)
    return of_kept + _terms(pooled(log_p), pooled(log_q), beta)


def top_tokens(products: Float[Array, "*B V"], k: int) -> Bool[Array, "*B V"] | None:
    """Return which tokens are the k likeliest, including ties with the k-th; None if k is 0 or keeps all.

    Args:
        products: hidden head^T, not log-probs: XLA may compute log-probs twice with different rounding, and a
            comparison with the k-th log-prob could then drop the k-th token itself.
    """
    if not 0 < k < products.shape[-1]:
        return None
    return products >= jax.lax.top_k(products, k)[0][..., -1:]


def vocabulary_logprobs(
    products: Float[Array, "*B V"], temperature: float, softcap: float | None
) -> Float[Array, "*B V"]:
    """Compute log softmax(logits / temperature); logits are the products, soft-capped if the model is."""
    return jax.nn.log_softmax(LogprobSpec(temperature, softcap).logits(products))


def _terms(log_p: Float[Array, "..."], log_q: Float[Array, "..."], beta: float) -> Float[Array, "..."]:
    """Return each outcome's term of the divergence, from its log-probs under teacher and student."""
    if beta == 0.0:
        return jnp.exp(log_p) * (log_p - log_q)
    if beta == 1.0:
        return jnp.exp(log_q) * (log_q - log_p)
    log_m = jnp.logaddexp(log_p + jnp.log(beta), log_q + jnp.log1p(-beta))
    return beta * jnp.exp(log_p) * (log_p - log_m) + (1 - beta) * jnp.exp(log_q) * (log_q - log_m)
