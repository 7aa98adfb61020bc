"""Estimators of KL(policy || reference) from sampled tokens (Schulman 2020, "Approximating KL")."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

Estimator = Literal["k1", "k2", "k3", "abs"]


def kl(policy: Float[Array, "B T"], reference: Float[Array, "B T"], how: Estimator) -> Float[Array, "B T"]:
    """Per-token estimate, nats. With d = policy - reference:

    k1   d              unbiased
    k2   d^2 / 2        its gradient is unbiased
    k3   e^-d - 1 + d   unbiased, never negative
    abs  |d|

    d is held within +-20 so that k3 stays finite.
    """
    d = jnp.clip(policy - reference, -20.0, 20.0)
    if how == "k1":
        return d
    if how == "k2":
        return 0.5 * d * d
    if how == "k3":
        return jnp.expm1(-d) + d
    return jnp.abs(d)
