"""Log-ratios, estimators of KL(policy || reference) from sampled tokens, the KL and entropy controllers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos.config import MAX_ENTROPY_COEF, AlgoConfig, Estimator, PolicyConfig
from jaxrl_llm.structs import Metrics

MAX_LOG_RATIO = 20.0  # nats


def clamp(x: Array, low: Array | float, high: Array | float) -> Array:
    """Clip x to [low, high]. The gradient at a bound is 1, as in torch.clamp; jnp.clip has 1/2."""
    return jnp.where((x >= low) & (x <= high), x, jnp.clip(x, low, high))


def log_ratio(p: Float[Array, "*shape"], q: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return p - q of two log-probs, clipped to +-20 nats, so that no ratio overflows."""
    return clamp(p - q, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl(
    logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"], how: Estimator
) -> Float[Array, "*shape"]:
    """Return a per-token estimate, nats (Schulman 2020, "Approximating KL divergence").

    With d = logprobs - ref_logprobs:

    k1   d              unbiased
    k2   d^2 / 2        biased; its gradient is the gradient of the KL
    k3   e^-d - 1 + d   unbiased, never negative; its gradient is the gradient of the reverse KL
    abs  |d|

    k1+ and k3+ have the value of k1 and k3, and the gradient of k2 (arXiv 2512.21852). d is clipped to +-20
    so that k3 stays finite (veRL also clips k3 to +-10).
    """
    d = log_ratio(logprobs, ref_logprobs)
    if how.endswith("+"):
        square = 0.5 * d * d
        return jax.lax.stop_gradient(_value(d, how[:-1]) - square) + square
    return _value(d, how)


def _value(d: Float[Array, "*shape"], how: str) -> Float[Array, "*shape"]:
    if how == "k1":
        return d
    if how == "k2":
        return 0.5 * d * d
    if how == "k3":
        return jnp.expm1(-d) + d
    return d * jnp.sign(d)  # jnp.abs has gradient 1 at 0, if policy and reference are equal


def next_kl_coef(
    config: AlgoConfig, coef: Float[Array, ""], metrics: Metrics, num_sequences: Float[Array, ""] | int
) -> Float[Array, ""]:
    """Return coef (1 + e n / kl_horizon), the adaptive controller of arXiv 1909.08593, section 2.2.

    e is the proportional error KL / kl_target - 1, clipped to +-0.2; without kl_target, coef is returned.

    Args:
        metrics: of the update: "kl" is its mean over tokens, nats.
        num_sequences: trajectories n of the update.
    """
    if not isinstance(config, PolicyConfig) or config.kl_target is None or "kl" not in metrics:
        return coef
    error = jnp.clip(metrics["kl"] / config.kl_target - 1.0, -0.2, 0.2)
    return jnp.asarray(coef * (1.0 + error * num_sequences / config.kl_horizon), jnp.float32)


def next_entropy_coef(config: PolicyConfig, coef: Float[Array, "2"], metrics: Metrics) -> Float[Array, "2"]:
    """Return the entropy controller's (coefficient, applied) of Skywork-OR1 (arXiv 2505.22312).

    The coefficient rises by entropy_delta after an update whose entropy is at most entropy_target, and falls
    after others, between 0 and 1; after the others it is not applied.
    """
    low = metrics["entropy"] <= config.entropy_target
    new = coef[0] + jnp.where(low, config.entropy_delta, -config.entropy_delta)
    new = jnp.clip(new, 0.0, MAX_ENTROPY_COEF)
    return jnp.stack([new, jnp.where(low, new, 0.0)])
