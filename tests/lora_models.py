"""Models with adapters, for tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.hf.peft import load_adapter
from jaxrl_llm.hf.peft_config import read_adapter_config
from jaxrl_llm.models import LoraConfig, abstract, logical_axes, named_leaves
from jaxrl_llm.models.linear import matrix_dims
from jaxrl_llm.models.lora import adapter_scale, add_adapters, base_config, merged_weight, with_lora
from jaxrl_llm.models.quantize import SCALE, quantize_weight
from jaxrl_llm.structs import Params


def replace_weights(params: Params, values: dict) -> Params:
    """Return the model with these weights by our names in place of its own."""
    leaves = [jnp.asarray(values.get(name, leaf)) for name, leaf in named_leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def with_random_adapters(base: Params, lora: LoraConfig, seed: int = 0) -> Params:
    """Return the model with A and B of standard deviation 0.2: neither is zero."""
    params = add_adapters(base, with_lora(base.config, lora), jax.random.key(0))
    rng = np.random.default_rng(seed)
    adapters = {name: leaf for name, leaf in named_leaves(params) if "_lora_" in name}
    noise = {name: 0.2 * rng.standard_normal(leaf.shape, np.float32) for name, leaf in adapters.items()}
    return replace_weights(params, noise)


def with_quantized_base(base: Params, lora: LoraConfig) -> Params:
    """Return the model of `with_random_adapters` with codes of its linear layers' weights."""
    config = with_lora(base.config, lora)
    shapes = abstract(config)
    plain = with_random_adapters(base, dataclasses.replace(lora, quantize="none"))
    weights, names, axes = dict(named_leaves(plain)), dict(named_leaves(shapes)), logical_axes(shapes)
    for name in names:
        if name + SCALE in names:
            codes = quantize_weight(weights[name], config.quantize, matrix_dims(axes[name])[0][-1])
            weights |= dict(zip((name, name + SCALE), codes, strict=True))
    return jax.tree.unflatten(jax.tree.structure(shapes), [weights[name] for name in names])


def merged(params: Params) -> Params:
    """Return the plain model with adapters added and quantized weights dequantized, float32."""
    plain, weights = base_config(params.config), dict(named_leaves(params))
    shapes = abstract(plain)
    scale = functools.partial(adapter_scale, params.config)
    leaves = [merged_weight(weights, name, scale(name)) for name, _ in named_leaves(shapes)]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def with_stored_adapters(base: Params, folder) -> Params:
    """Return the model with the adapters of a PEFT folder."""
    config = with_lora(base.config, read_adapter_config(folder, base.config))
    return replace_weights(add_adapters(base, config, jax.random.key(0)), load_adapter(folder, config))
