"""Rollout correction: importance weights, rejection and diagnostics of trainer against rollout log-probs.

The ratio is exp(old_logprobs - rollout_logprobs): trainer over rollout, before this step's updates.
Weights are per token or per sequence, so that micro-batches add up.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algos.config import Correction
from jaxrl_llm.algos.kl import MAX_LOG_RATIO, log_ratio
from jaxrl_llm.algos.reduce import aggregate, sequence_sum, token_mean
from jaxrl_llm.structs import LossInputs, Metrics


def importance_weights(
    log_ratios: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    config: Correction,
) -> Float[Array, "B T"]:
    """Return exp(log_ratios), or exp of its sum over the sequence, clipped or zeroed outside [floor, cap]."""
    if config.weight == "none":
        return mask
    if config.weight == "sequence":
        log_ratios = sequence_sum(log_ratios, mask, segments)
    ratio = jnp.exp(jnp.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    inside = (ratio >= config.floor) & (ratio <= config.cap)
    bounded = jnp.clip(ratio, config.floor, config.cap)
    weights = bounded if config.outside == "clip" else jnp.where(inside, ratio, 0.0)
    return jnp.where(mask > 0, weights, 0.0)


def accepted(
    old_logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    config: Correction,
) -> Bool[Array, "B T"]:
    """Return True for each token that, with its sequence, passes every rule in `config.reject`.

    With d = old_logprobs - rollout_logprobs, k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d estimate
    KL(rollout || old); tv and binary_kl are of the distribution {this token, any other} (arXiv 2602.04879).
    """
    keep = jnp.ones(mask.shape, bool)
    for rule, low, high in config.reject:
        level, _, name = rule.removeprefix("seq_").partition("_")
        value = _divergence(old_logprobs, rollout_logprobs, name)
        if level == "max":
            value = _sequence_max(value, mask, segments)
        elif level != "token":
            total = sequence_sum(value, mask, segments)
            value = total if level == "sum" else total / sequence_sum(jnp.ones_like(value), mask, segments)
        if name == "k1":
            low, high = math.log(low), math.log(high)
        keep &= (value >= low) & (value <= high)
    return keep


def _divergence(
    old_logprobs: Float[Array, "B T"], rollout_logprobs: Float[Array, "B T"], name: str
) -> Float[Array, "B T"]:
    d = log_ratio(old_logprobs, rollout_logprobs)
    if name == "k1":
        return -d
    if name == "k2":
        return 0.5 * d * d
    if name == "k3":
        return jnp.maximum(jnp.expm1(d) - d, 0.0)
    p, q = (jnp.clip(jnp.exp(x), 1e-6, 1 - 1e-6) for x in (rollout_logprobs, old_logprobs))
    if name == "tv":
        return jnp.abs(p - q)
    return jnp.maximum(p * jnp.log(p / q) + (1 - p) * jnp.log((1 - p) / (1 - q)), 0.0)


def _sequence_max(
    x: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    kept = jnp.where(mask > 0, x, -jnp.inf)
    largest = jax.vmap(lambda row, ids: jax.ops.segment_max(row, ids, x.shape[1] + 1))(kept, segments)
    return jnp.take_along_axis(largest, segments, axis=1)


def correct(inputs: LossInputs, config: Correction) -> tuple[Float[Array, "B T"], Metrics]:
    """Return (weight of each token's policy loss, metrics). No gradient flows through the weights.

    A rejected token weighs 0 but stays in the denominators (veRL removes it; OpenRLHF does not). The
    effective sample size, as a fraction, is is/weight^2 / is/weight_square of the mini-batch.
    """
    if inputs.rollout_logprobs is None:
        assert not config.active, "a correction needs the rollout's log-probs"
        return inputs.mask, {}
    old_logprobs = jax.lax.stop_gradient(inputs.logprobs if config.of == "policy" else inputs.old_logprobs)
    metrics = diagnostics(old_logprobs, inputs)
    if not config.active:
        return inputs.mask, metrics
    # Importance weights, bounded as configured; the unbounded ratios are for metrics alone.
    ids = inputs.segments
    weights = importance_weights(old_logprobs - inputs.rollout_logprobs, inputs.mask, ids, config)
    if config.weight != "none":
        unbounded = Correction(config.weight, cap=jnp.inf)
        ratio = importance_weights(old_logprobs - inputs.rollout_logprobs, inputs.mask, ids, unbounded)
        metrics |= {
            "is/weight": token_mean(weights, inputs),
            "is/weight_square": token_mean(weights**2, inputs),
            "is/low_fraction": token_mean((ratio < config.floor).astype(ratio.dtype), inputs),
            "is/high_fraction": token_mean((ratio > config.cap).astype(ratio.dtype), inputs),
        }
    # Rejection sets weights to 0 by token or by sequence.
    if config.reject:
        keep = accepted(old_logprobs, inputs.rollout_logprobs, inputs.mask, ids, config=config)
        if config.reject_only == "negative":
            keep |= inputs.advantages >= 0
        weights = jnp.where(keep, weights, 0.0)
        metrics["is/rejected_fraction"] = token_mean((~keep).astype(weights.dtype), inputs)
    return weights, metrics


def diagnostics(old_logprobs: Float[Array, "B T"], inputs: LossInputs) -> Metrics:
    """Return distances between the rollout's and the trainer's distribution; all add up over micro-batches.

    kl and k3_kl estimate KL(rollout || old), nats a token; ppl_ratio is the mean over sequences of the
    trainer's perplexity over the rollout's; chi2 is E[ratio^2] - 1 of tokens and of sequences.
    """
    d = log_ratio(old_logprobs, inputs.rollout_logprobs)
    total = sequence_sum(old_logprobs - inputs.rollout_logprobs, inputs.mask, inputs.segments)
    bounded = lambda x: jnp.clip(x, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    per_sequence = lambda x: aggregate(x, inputs, "sequence")
    return {
        "mismatch/kl": token_mean(-d, inputs),
        "mismatch/k3_kl": token_mean(jnp.expm1(d) - d, inputs),
        "mismatch/ppl_ratio": per_sequence(jnp.exp(bounded(-total / inputs.lengths))),
        "mismatch/chi2_token": token_mean(jnp.expm1(2 * d), inputs),
        "mismatch/chi2_sequence": per_sequence(jnp.expm1(2 * bounded(total))),
    }


def monitor(inputs: LossInputs, old_logprobs_source: str = "policy") -> Metrics:
    """Return the metrics that are common to all losses.

    mismatch/ compares the rollout engine's log-probs with the trainer's before the update; where the old
    log-probs are the rollout's (`old_logprobs_source` = "rollout"), with the policy's, which includes
    staleness. These metrics override the loss's metrics of the same names.
    """
    if inputs.entropy is None:
        return {}
    metrics = {"entropy": token_mean(inputs.entropy, inputs)}
    if inputs.rollout_logprobs is not None:
        trainer = inputs.logprobs if old_logprobs_source == "rollout" else inputs.old_logprobs
        gap = jnp.abs(trainer - inputs.rollout_logprobs)
        metrics["mismatch/mean_abs"] = token_mean(gap, inputs)
        metrics["mismatch/max_abs"] = jnp.max(gap, where=inputs.mask > 0, initial=0.0)
        if old_logprobs_source == "rollout":
            metrics |= diagnostics(trainer, inputs)
    return metrics
