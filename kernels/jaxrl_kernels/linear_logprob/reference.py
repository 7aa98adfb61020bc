"""Log-prob and entropy of a linear head's prediction: the dense definition.

Every implementation has two functions. For M tokens and V rows of the head:

    forward(spec, hidden, head, targets, count) -> (log-prob, entropy, lse), each [M] float32
    d_logits(spec, hidden, head, targets, lse, entropy, d_logprob, d_entropy) -> [M, V] like hidden

`head` may be a shard of the vocabulary. `forward` then covers these rows alone, `merge_shards` merges them,
and `d_logits` takes the lse and entropy over the whole vocabulary. A target outside the rows (indices 0..V-1)
has log-prob 0. Outputs of `forward` from token `count` on are ignored. Entropy (and its gradient) is None
without `spec.entropy`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKED_LOGIT = -1e30
"""A logit without mass; finite, so that no difference or gradient becomes NaN."""


class LogprobSpec(NamedTuple):
    """Static arguments. logits = softcap * tanh(hidden head^T / softcap) / temperature."""

    temperature: float = 1.0
    softcap: float | None = None
    entropy: bool = True

    def logits(self, products: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
        """Return the logits from hidden head^T."""
        if self.softcap is not None:
            products = self.softcap * jnp.tanh(products * (1 / self.softcap))
        return products * (1 / self.temperature)

    def slope(
        self,
        logits: Float[Array, "*B V"],
        at_target: Bool[Array, "*B V"],
        lse: Float[Array, "*B #V"],
        entropy: Float[Array, "*B #V"] | None,
        d_logprob: Float[Array, "*B #V"],
        d_entropy: Float[Array, "*B #V"] | None,
    ) -> Float[Array, "*B V"]:
        """Return the loss's gradient with respect to hidden head^T."""
        logprobs = logits - lse
        d_total = d_logprob
        if self.entropy:
            d_total = d_total + d_entropy * (logprobs + entropy)
        slope = (jnp.where(at_target, d_logprob, 0.0) - jnp.exp(logprobs) * d_total) * (1 / self.temperature)
        if self.softcap is not None:
            slope = slope * (1.0 - (logits * (self.temperature / self.softcap)) ** 2)
        return slope


LogprobOutputs = tuple[Float[Array, "M"], Float[Array, "M"] | None, Float[Array, "M"]]
"""(log-prob, entropy, log-sum-exp)."""


def forward(
    spec: LogprobSpec,
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "M"],
    count=None,
) -> LogprobOutputs:
    """Compute log-prob of the targets, entropy and log-sum-exp, float32, nats."""
    logits = _logits(spec, hidden, head)
    top = jnp.max(logits, axis=-1)
    below = logits - top[:, None]
    weights = jnp.exp(below)
    total = jnp.sum(weights, axis=-1)
    log_total = jnp.log(total)
    logprob = jnp.sum(jnp.where(_is_target(targets, head), below - log_total[:, None], 0.0), axis=-1)
    entropy = None
    if spec.entropy:
        entropy = log_total - jnp.sum(weights * below, axis=-1) / total  # two positive terms
    return logprob, entropy, log_total + top


def d_logits(
    spec: LogprobSpec,
    hidden: Float[Array, "M D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "M"],
    lse: Float[Array, "M"],
    entropy: Float[Array, "M"] | None,
    d_logprob: Float[Array, "M"],
    d_entropy: Float[Array, "M"] | None,
) -> Float[Array, "M V"]:
    """Compute the gradient of hidden head^T from the gradients of log-prob and entropy."""
    column = lambda x: None if x is None else x[:, None]
    logits, at_target = _logits(spec, hidden, head), _is_target(targets, head)
    slope = spec.slope(logits, at_target, *map(column, (lse, entropy, d_logprob, d_entropy)))
    return slope.astype(hidden.dtype)


def merge_shards(
    outputs: LogprobOutputs, has_target: Bool[Array, "M"], axis: str | tuple[str, ...]
) -> LogprobOutputs:
    """Merge the outputs of `forward` over shards of the vocabulary.

    Args:
        has_target: whether the target is in this shard.
        axis: mesh axes of the shards, or the axis of a `jax.vmap`.
    """
    logprob, entropy, lse = outputs
    top = jax.lax.pmax(lse, axis)
    below = lse - top
    share = jnp.exp(below)
    total = jax.lax.psum(share, axis)
    log_total = jnp.log(total)
    logprob = jax.lax.psum(jnp.where(has_target, logprob + below - log_total, 0.0), axis)
    if entropy is not None:  # of the choice of a shard, and within each; positive terms
        entropy = jax.lax.psum(share * (entropy + log_total - below), axis) / total
    return logprob, entropy, log_total + top


def _logits(spec: LogprobSpec, hidden, head) -> Float[Array, "M V"]:
    return spec.logits(jnp.einsum("md,vd->mv", hidden, head, preferred_element_type=jnp.float32))


def _is_target(targets, head) -> Bool[Array, "M V"]:
    """Compare with an iota, not gather: a target may be in another shard of the head."""
    return targets[:, None] == jnp.arange(head.shape[0])
