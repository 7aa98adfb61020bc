"""Optimizers and learning-rate schedules: an optax transformation over float32 master weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxrl_llm import models
from jaxrl_llm.learn.optim_states import average_weights, quantize_moments, store_remainders
from jaxrl_llm.learn.routing import move_bias
from jaxrl_llm.ranges import Count, CountOrZero, Fraction, Range
from jaxrl_llm.structs import Params

LearningRate = Annotated[float, Range(0, 10, open_low=True, usual="1e-6 is usual for RL, 1e-5 for SFT")]
Decay = Annotated[float, Range(0, 1, open_high=True)]
MUON_RMS = 0.2  # of Muon's updates, about AdamW's, so that its learning rates carry over (arXiv 2502.16982)


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "adafactor", "lion", "sgd", "muon"] = "adamw"
    """AdamW (arXiv 1711.05101), Adafactor (1804.04235), Lion (2302.06675), SGD with momentum b1, or Muon
    (2502.16982): orthogonalized momentum b1 for the matrices of the layers, AdamW for the other weights."""
    learning_rate: LearningRate = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up: constant, or falling to final_fraction of the peak over the run."""
    warmup_steps: CountOrZero = 0
    """Updates over which the learning rate rises from 0."""
    warmup_ratio: Fraction = 0.0
    """The same as a fraction of the updates of the run, rounded up; 0 = warmup_steps."""
    final_fraction: Fraction = 0.1
    """Learning rate at the end of the run as a fraction of the peak."""
    b1: Decay = 0.9
    """Decay of the first moment; momentum of sgd and muon, for which 0.95 is usual."""
    b2: Decay = 0.999
    """Decay of the second moment (adamw, lion, muon's AdamW)."""
    eps: Annotated[float, Range(1e-30, 1, usual="1e-8 is usual")] = 1e-8
    """Added to the root of the second moment (adamw, muon's AdamW)."""
    weight_decay: Annotated[float, Range(0, 10)] = 0.0
    """Decoupled decay of matrices, scaled by the learning rate; norms and biases do not decay."""
    moments: Literal["float32", "int8"] = "float32"
    """Storage of the moments; int8 is blockwise and companded, embeddings, norms and biases stay float32."""
    store_param_remainders: bool = False
    """Weights are bfloat16, and the other 16 bits of the float32 masters part of the optimizer state."""
    ema: Annotated[float, Range(0, 1, open_high=True, usual="0.999 is usual")] = 0.0
    """Decay of an exponential moving average of the trained weights, one step an update, kept in float32
    beside the moments and exported to hf_ema; 0 = none."""
    init_from: str = ""
    """Run directory whose newest checkpoint has the moments to start from, of the same weights and optimizer;
    the learning-rate schedule starts anew. "" = zeros."""
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the gradients between the micro-batches of an update, and until it is applied."""
    offload: bool = False
    """Keep the moments in host memory except during an update, which waits for the transfer both ways."""
    max_grad_norm: Annotated[float, Range(0, 1e9)] = 1.0
    """Global norm that gradients are clipped to; 0 = no clipping."""
    max_nonfinite: Count = 5
    """Updates with NaN or Inf in loss, gradient or weights are skipped; so many in a row end the run."""

    @property
    def has_compressed_state(self) -> bool:
        """True where decoding the whole state at once would take more memory than it saves."""
        return self.moments != "float32" or self.store_param_remainders

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, what is wrong with it and the fix)."""
        if self.name == "adafactor" and self.moments != "float32":
            yield "moments", "is int8: adafactor's moments are factored and small; it must be float32."
        if self.warmup_steps and self.warmup_ratio:
            steps = f"warmup_steps {self.warmup_steps}"
            yield "warmup_ratio", f"is {self.warmup_ratio}, beside {steps}: set one of them to 0."


def make_schedule(config: OptimConfig, total_updates: int) -> optax.Schedule:
    """Return the learning rate as a function of the update number."""
    peak, end = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total_updates - 1e-6)  # 0.07 x 100 > 7
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
        bias_rate: of the selection bias of routers (`learn.routing.move_bias`).
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
    if config.name == "adafactor":  # relative step sizes, clipped to an RMS of 1: the paper's algorithm 4
        return [
            optax.scale_by_factored_rms(),
            optax.clip_by_block_rms(1.0),
            optax.scale_by_param_block_rms(),
        ]
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
    """Return a tree of bools: True for the weights that decay, all but norms and biases."""
    exempt = lambda path: any(word in jax.tree_util.keystr(path) for word in ("norm", "bias"))
    return jax.tree_util.tree_map_with_path(lambda path, _: not exempt(path), params)
