"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): y = W x + scale * B (A x), with W frozen.

Adapters are leaves of the model beside the weights that they adapt: "layers.q_lora_a" [L, D, R] and
"layers.q_lora_b" [L, R, H, E] beside "layers.q" [L, D, H, E]. Each expert has its own adapters, of smaller
rank: "layers.expert_up_lora_a" is [L, X, D, R]. Training, scoring and decoding compute the same unmerged sum
(`block.block`, `models.experts.dispatch`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.lora_config import AdaptedConfig, LoraConfig, Quantize, QuantizedConfig
from jaxrl_llm.models.params import abstract, init, named_leaves
from jaxrl_llm.models.quantize import SCALE, dequantize_weight
from jaxrl_llm.models.stacks import layer_stacks
from jaxrl_llm.structs import Params, TrainState

MARK = "_lora_"  # in the names of adapters


def with_lora(config: TransformerConfig, lora: LoraConfig) -> TransformerConfig:
    """Return the architecture with these adapters; unchanged if their rank is 0."""
    return AdaptedConfig(**vars(config), lora=lora) if lora.rank else config


def base_config(config: TransformerConfig) -> TransformerConfig:
    """Return the architecture without adapters and quantization."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(TransformerConfig)}
    return TransformerConfig(**fields)


def frozen_config(config: TransformerConfig, quantize: Quantize | None = None) -> TransformerConfig:
    """Return the architecture without adapters, with weights quantized as `quantize`; None = as in
    `config`."""
    kind, base = quantize or config.quantize, base_config(config)
    return base if kind == "none" else QuantizedConfig(**vars(base), quantize=kind)


def add_adapters(params: Params, config: TransformerConfig, key: jax.Array) -> Params:
    """Return the model with new adapters: A uniform as in PEFT, B zero, so that the outputs do not change.

    Args:
        params: a model without adapters, with the heads of `config`.
        config: with adapters.
    """
    weights = dict(named_leaves(params))
    new = init(config, key)
    leaves = [weights.get(name, leaf) for name, leaf in named_leaves(new)]
    return jax.tree.unflatten(jax.tree.structure(new), leaves)


def replace_weights(params: Params, weights: Mapping[str, np.ndarray]) -> Params:
    """Return the model with the named weights replaced; they keep their sharding and type."""

    def put(name, x):
        if name not in weights:
            return x
        value = lambda index: weights[name][index].astype(x.dtype)
        return jax.make_array_from_callback(x.shape, x.sharding, value)

    return _map_named(put, params)


def is_trained(name: str, config: TransformerConfig) -> bool:
    """Return whether a weight is trained: all weights, or with adapters only the adapters and the value
    head."""
    return config.lora is None or MARK in name or name == "value"


def split_params(params: Params) -> tuple[Params, Params]:
    """Return (trained, frozen): two trees of the model, each with None for the weights of the other."""
    config = params.config
    trained = _map_named(lambda name, x: x if is_trained(name, config) else None, params)
    frozen = _map_named(lambda name, x: None if is_trained(name, config) else x, params)
    return trained, frozen


def join_params(trained: Params, frozen: Params) -> Params:
    """Return the model of the two parts of `split_params`."""
    return jax.tree.map(lambda t, f: f if t is None else t, trained, frozen, is_leaf=lambda x: x is None)


def trained_state(state: TrainState) -> TrainState:
    """Return the state with only the trained weights, also of its critic, as checkpoints store it."""
    return dataclasses.replace(
        state, params=split_params(state.params)[0], critic=state.critic and trained_state(state.critic)
    )


def with_frozen(state: TrainState, frozen: Params) -> TrainState:
    """Return a model's state with these frozen weights."""
    return dataclasses.replace(state, params=join_params(state.params, frozen))


def with_frozen_of(state: TrainState, other: TrainState) -> TrainState:
    """Return the state of `trained_state` with the frozen weights of another state, also of its critic."""
    critic = state.critic and with_frozen_of(state.critic, other.critic)
    return dataclasses.replace(with_frozen(state, split_params(other.params)[1]), critic=critic)


def frozen_fingerprint(params: Params) -> str:
    """Return a checksum of the frozen weights, the same for every sharding; "" if no weight is frozen."""
    if params.config.lora is None:
        return ""
    sums = jax.device_get(_checksums(split_params(params)[1]))
    return hashlib.sha256(repr([int(x) for x in sums]).encode()).hexdigest()[:16]


@jax.jit
def _checksums(params: Params) -> list[jax.Array]:
    """Return for each weight the sum, modulo 2^32, of its bits times odd numbers that differ by place."""

    def one(x):
        x = x.astype(jnp.uint8) if x.dtype == jnp.uint4 else x
        bits = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])
        place = jnp.uint32(1)
        for axis in range(x.ndim):
            odd = jnp.uint32((2 * axis + 1) * 0x9E3779B1 & 0xFFFFFFFF)
            place += 2 * odd * jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        return jnp.sum(bits.astype(jnp.uint32) * place, dtype=jnp.uint32)

    return [one(x) for x in jax.tree.leaves(params)]


def share_frozen(params: Params, other: Params) -> Params:
    """Return the model with the frozen weights of another one wherever name, shape and sharding agree."""
    config, theirs = params.config, dict(named_leaves(other))

    def choose(name, x):
        same = theirs.get(name)
        if same is None or is_trained(name, config) or (same.shape, same.sharding) != (x.shape, x.sharding):
            return x
        return same

    return _map_named(choose, params)


def base(params: Params) -> Params:
    """Return the model with zeros for each B, so that its adapters have no effect; other arrays are
    shared."""
    return _map_named(lambda name, x: jnp.zeros_like(x) if name.endswith(f"{MARK}b") else x, params)


def without_adapters(params: Params) -> Params:
    """Return the model without its adapters; other arrays are shared."""
    plain, weights = abstract(base_config(params.config)), dict(named_leaves(params))
    return jax.tree.unflatten(jax.tree.structure(plain), [weights[name] for name, _ in named_leaves(plain)])


def scale_b(params: Params, factors: Mapping[str, float]) -> Params:
    """Return the model with the B of each named weight ("layers.q") multiplied by a factor."""
    factors = {f"{name}{MARK}b": factor for name, factor in factors.items()}
    return _map_named(lambda name, x: x * factors[name] if name in factors else x, params)


def with_random_b(params: Params, size: float) -> Params:
    """Return the model with fixed random numbers for each B, so that its outputs differ visibly.

    A x is of order 1 for a new A and normalised x, so B with standard deviation size / (scale * sqrt(R)) adds
    numbers of order `size` to outputs of order 1.
    """
    rng, values, b = np.random.default_rng(0), {}, f"{MARK}b"
    adapters = named_adapters(params.config)
    for name, leaf in named_leaves(params):
        if name.endswith(b):
            rank, scale = adapters[name.removesuffix(b)]
            noise = rng.standard_normal(leaf.shape, np.float32)
            values[name] = size / (scale * math.sqrt(rank)) * noise
    return replace_weights(params, values)


def named_adapters(config: TransformerConfig) -> dict[str, tuple[int, float]]:
    """Return adapted weights by our names ("layers.q") -> rank and factor of the adapter's output."""
    stacks = layer_stacks(config).items() if config.lora else ()
    return {f"{stack}.{name}": adapter for stack, c in stacks for name, adapter in c.adapters.items()}


def rank_of_experts(config: TransformerConfig) -> int | None:
    """Return the rank of the experts' adapters; None without such adapters."""
    adapters = config.adapters if config.lora else {}
    return next((rank for name, (rank, _) in adapters.items() if name.startswith("expert_")), None)


def adapter_scale(config: TransformerConfig, name: str) -> float:
    """Return the factor of the output of a weight's adapter ("layers.q"); 0 without an adapter."""
    return named_adapters(config).get(name, (0, 0.0))[1]


def merged_weight(weights: Mapping[str, jax.Array], name: str, scale: float) -> jax.Array:
    """Return W + scale * A B of one weight [L, ...] or [L, X, ...], dequantized and added in float32.

    A weight without adapter and quantization is returned unchanged.

    Args:
        weights: names -> weights; reads the `merged_names(name)` in it.
    """
    weight, scales, a, b = (weights.get(part) for part in merged_names(name))
    if scales is not None:
        weight = dequantize_weight(weight, scales, jnp.float32)
    if a is None:
        return weight
    product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))
    product = jax.vmap(product) if ".expert_" in name else product
    change = product(a.astype(jnp.float32), b.astype(jnp.float32))
    return weight.astype(jnp.float32) + scale * change


def merged_names(name: str) -> tuple[str, str, str, str]:
    """Return the names of a weight, of its scales, and of A and B of its adapter."""
    return name, name + SCALE, f"{name}{MARK}a", f"{name}{MARK}b"


def _map_named(f: Callable[[str, Any], Any], params: Params) -> Params:
    """Return the tree of f(name, weight); f may return None to leave a weight out."""
    leaves = [f(name, leaf) for name, leaf in named_leaves(params)]  # skips weights that are None already
    return jax.tree.unflatten(jax.tree.structure(params, is_leaf=lambda x: x is None), leaves)
