"""Weights as a pytree: made, named, laid out and cast without knowing Flax."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.sharding.rules import Rules, fit
from jaxrl_llm.structs import Params


def init(config: TransformerConfig, key: jax.Array) -> Transformer:
    """Random float32 weights: normal with `initializer_range`, norms 1, biases 0.

    Under `jax.jit` with `out_shardings=shardings(...)` each device makes only its own shard, and the
    numbers do not depend on the layout.
    """
    return Transformer(config, key)


def abstract(config: TransformerConfig) -> Transformer:
    """The tree of `init` with `jax.ShapeDtypeStruct` leaves; nothing is computed."""
    return jax.eval_shape(functools.partial(Transformer, config), jax.random.key(0))


def named_leaves(params: Params) -> list[tuple[str, Any]]:
    """(dotted name such as "layers.q", leaf), in the order of `jax.tree.leaves(params)`."""
    return [(name, param.get_value()) for name, param in _named_params(params)]


def logical_axes(params: Params) -> dict[str, tuple[str, ...]]:
    """Dotted name -> logical axes of its dims: "layers.q" -> ("layers", "embed", "heads", "head_dim")."""
    return {name: param.get_metadata("axes") for name, param in _named_params(params)}


def shardings(config: TransformerConfig, mesh: Mesh, rules: Rules) -> Params:
    """The tree of `init` with `NamedSharding` leaves: for `out_shardings`, `jax.device_put`, restoring.

    A dim that its mesh axes do not divide stays whole.
    """
    shapes = abstract(config)
    axes = logical_axes(shapes)
    leaves = [fit(mesh, axes[name], leaf.shape, rules) for name, leaf in named_leaves(shapes)]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def with_heads(params: Params, config: TransformerConfig) -> Params:
    """The same decoder with the heads of `config`: a value head that is new holds zeros."""
    shapes = abstract(config)
    leaves = dict(named_leaves(params))
    found = [
        leaves[name] if name in leaves else jnp.zeros(x.shape, x.dtype) for name, x in named_leaves(shapes)
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def without_value_head(params: Params) -> Params:
    """The decoder as others load it: the value head serves training alone."""
    if not params.config.value_head:
        return params
    return with_heads(params, dataclasses.replace(params.config, value_head=False))


def cast(params: Params, dtype: DTypeLike) -> Params:
    """The same weights in another float type."""
    return jax.tree.map(lambda w: w.astype(dtype), params)


def _named_params(params: Params) -> list[tuple[str, nnx.Param]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, nnx.Param))
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]
