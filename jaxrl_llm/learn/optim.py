"""Optimizers and learning-rate schedules: an optax transformation over float32 master weights."""

from __future__ import annotations

import math
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxrl_llm import models
from jaxrl_llm.learn.config import OptimConfig
from jaxrl_llm.learn.moe_losses import move_bias
from jaxrl_llm.learn.optim_states import average_weights, quantize_moments, store_remainders
from jaxrl_llm.structs import Params

MUON_RMS = 0.2  # of Muon's updates, about AdamW's, so that its learning rates carry over (arXiv 2502.16982)


def make_schedule(config: OptimConfig, total_updates: int) -> optax.Schedule:
    """Return the learning rate as a function of the update number."""
    peak, end = config.learning_rate, config.learning_rate * config.final_fraction
    share = config.warmup_steps if config.warmup_steps < 1 else 0.0
    warmup = math.ceil(share * total_updates - 1e-6) if share else int(config.warmup_steps)  # 0.07 x 100 > 7
    decay_updates = max(total_updates - warmup, 1)
    main = {
        "constant": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_updates, config.final_fraction),
        "linear": lambda: optax.linear_schedule(peak, end, decay_updates),
    }[config.schedule]()
    if not warmup:
        return main
    rise = optax.linear_schedule(0.0, peak, warmup)
    return optax.join_schedules([rise, main], [warmup])


def make_optimizer(
    config: OptimConfig, total_updates: int, bias_rate: float = 0.0
) -> optax.GradientTransformation:
    """Return direction + weight_decay * weights, times -learning rate: one order for every optimizer.

    Gradients are clipped in `learn.update`, which computes their norm.

    Args:
        bias_rate: of the selection bias of routers (`learn.moe_losses.move_bias`).
    """
    direction = _direction(config)
    if config.moments == "int8":
        direction = [quantize_moments(optax.chain(*direction))]
    optimizer = optax.chain(
        *direction,
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(make_schedule(config, total_updates)),
    )
    optimizer = move_bias(optimizer, bias_rate)
    if config.ema:
        optimizer = average_weights(optimizer, config.ema)
    return store_remainders(optimizer) if config.store_param_remainders else optimizer


def _direction(config: OptimConfig) -> list[optax.GradientTransformation]:
    """Return the transformations of the gradient before weight decay and learning rate."""
    if config.name == "adamw":
        return [optax.scale_by_adam(config.b1, config.b2, config.eps)]
    if config.name == "lion":
        return [optax.scale_by_lion(config.b1, config.b2)]
    if config.name in ("adafactor", "adafactor_unscaled"):  # clipped to an RMS of 1: the paper's algorithm 4
        relative = [optax.scale_by_param_block_rms()] * (config.name == "adafactor")
        return [optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), *relative]
    if config.name == "rmsprop":
        return [optax.scale_by_rms(config.b2, config.eps, eps_in_sqrt=False)]
    if config.name == "adagrad":
        return [optax.scale_by_rss(initial_accumulator_value=0.0, eps=config.eps**2)]
    if config.name == "muon":
        orthogonalized = scale_by_muon(beta=config.b1, weight_dimension_numbers=_muon_dims)
        return [
            optax.partition(
                {
                    "muon": optax.chain(orthogonalized, optax.stateless(_scale_to_rms)),
                    "adam": optax.scale_by_adam(config.b1, config.b2, config.eps),
                },
                _muon_labels,
            )
        ]
    return [optax.trace(config.b1)] if config.b1 else []


def _muon_labels(params: Params) -> Any:
    """Return the tree of "muon" for the matrices of the layers, "adam" for the other weights."""
    labels = ["adam" if dims is None else "muon" for dims in models.layer_matrices(params)]
    return jax.tree.unflatten(jax.tree.structure(params), labels)


def _muon_dims(updates: Params) -> Any:
    """Return the tree of input and output dims of the matrices; each layer is orthogonalized by itself."""
    dims = [MuonDimensionNumbers(*dims) for dims in models.layer_matrices(updates)]
    return jax.tree.unflatten(jax.tree.structure(updates), dims)


def _scale_to_rms(updates: Params, params: Any) -> Params:
    """Return orthogonalized matrices [inputs, outputs] times 0.2 sqrt(max(inputs, outputs)): equation 4 of
    arXiv 2502.16982."""

    def scale(update, dims):
        return MUON_RMS * math.sqrt(max(math.prod(update.shape[d] for d in side) for side in dims)) * update

    return jax.tree.map(scale, updates, _muon_dims(updates))


def decayed(params: Any) -> Any:
    """Return a tree of bools: True for the weights that decay; norms, biases and the like do not, nor do
    frozen weights."""
    kept = ("norm", "bias", "sinks", "a_log", "skip", "layer_scalar", "router_gain", "index_")
    exempt = lambda path: any(word in jax.tree_util.keystr(path) for word in kept)
    return jax.tree_util.tree_map_with_path(lambda path, _: not exempt(path), params)
