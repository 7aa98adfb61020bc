"""Estimators of KL(policy || reference) from sampled tokens, and the controller of its coefficient."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Estimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]


def kl(
    policy: Float[Array, "*shape"], reference: Float[Array, "*shape"], how: Estimator
) -> Float[Array, "*shape"]:
    """Per-token estimate, nats (Schulman 2020, "Approximating KL divergence"). With d = policy - reference:

    k1   d              unbiased
    k2   d^2 / 2        biased, but its gradient is that of the KL
    k3   e^-d - 1 + d   unbiased, never negative; its gradient is that of the reverse KL
    abs  |d|

    A name with + has the value of the one and the gradient of k2 (arXiv 2512.21852). d is held within +-20
    so that k3 stays finite (veRL also holds k3 within +-10).
    """
    d = jnp.clip(policy - reference, -20.0, 20.0)
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
    return d * jnp.sign(d)  # the gradient of jnp.abs at 0 is 1, where policy and reference are equal


def next_kl_coef(
    coef: Float[Array, ""] | float,
    measured: Float[Array, ""] | float,
    num_samples: Float[Array, ""] | float | int,
    target: float,
    horizon: float,
) -> Float[Array, ""]:
    """The adaptive controller of arXiv 1909.08593, section 2.2: coef (1 + e n / horizon).

    e is the proportional error measured / target - 1, held within +-0.2.

    Args:
        coef: its present value.
        measured: mean KL of the step, nats a token.
        num_samples: trajectories n that it was measured on.
        target: the KL to hold, nats a token.
        horizon: trajectories over which a constant error of 1 would double the coefficient.
    """
    error = jnp.clip(measured / target - 1.0, -0.2, 0.2)
    return jnp.asarray(coef * (1.0 + error * num_samples / horizon), jnp.float32)
