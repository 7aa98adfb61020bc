"""OptimConfig -> an optax transformation over float32 master weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import optax


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "adafactor", "lion", "sgd"] = "adamw"
    """Which optimizer (optax)."""
    learning_rate: float = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """What the rate does after the warm-up: stays, or falls to final_fraction over the run."""
    warmup_steps: int = 0
    """Updates over which the rate rises from 0."""
    final_fraction: float = 0.1
    """Rate at the end of the run as a fraction of the peak."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices; norms and biases are left alone."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 = never."""
    max_nonfinite: int = 5
    """Updates with NaN or Inf in loss or gradient are skipped; after this many in a row the run stops."""


def make_schedule(config: OptimConfig, total_updates: int) -> optax.Schedule:
    """Learning rate by update number."""
    peak, end = config.learning_rate, config.learning_rate * config.final_fraction
    decay_updates = max(total_updates - config.warmup_steps, 1)
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_updates, config.final_fraction),
        "linear": lambda: optax.linear_schedule(peak, end, decay_updates),
    }[config.schedule]()
    if not config.warmup_steps:
        return after
    rise = optax.linear_schedule(0.0, peak, config.warmup_steps)
    return optax.join_schedules([rise, after], [config.warmup_steps])


def make_optimizer(config: OptimConfig, total_updates: int) -> optax.GradientTransformation:
    """The optimizer without gradient clipping: step.py clips, since it has the norm anyway."""
    rate = make_schedule(config, total_updates)
    decay = dict(weight_decay=config.weight_decay, mask=decayed)
    if config.name == "adamw":
        return optax.adamw(rate, b1=config.b1, b2=config.b2, eps=config.eps, **decay)
    if config.name == "lion":
        return optax.lion(rate, b1=config.b1, b2=config.b2, **decay)
    if config.name == "adafactor":
        return optax.adafactor(rate, weight_decay_rate=config.weight_decay or None, weight_decay_mask=decayed)
    return optax.sgd(rate, momentum=config.b1 or None)


def decayed(params):
    """True for the weights that decay: all but norms and biases."""
    exempt = lambda path: any(word in jax.tree_util.keystr(path) for word in ("norm", "bias"))
    return jax.tree_util.tree_map_with_path(lambda path, _: not exempt(path), params)
