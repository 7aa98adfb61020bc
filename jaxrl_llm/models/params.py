"""Weights as a pytree: initialise, name, shard and cast them, without Flax in the interface."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.linear import matrix_dims
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.sharding.rules import Rules, on_host, sharding_for, with_shardings
from jaxrl_llm.structs import Params


def init(config: TransformerConfig, key: jax.Array) -> Transformer:
    """Initialise float32 weights: normal with `initializer_range`, norms 1, biases 0.

    Under `jax.jit` with `out_shardings=shardings(...)` each device computes only its own shard, and the
    numbers do not depend on the sharding.
    """
    return Transformer(config, key)


def abstract(config: TransformerConfig) -> Transformer:
    """Return the tree of `init` with `jax.ShapeDtypeStruct` leaves; nothing is computed."""
    return jax.eval_shape(functools.partial(Transformer, config), jax.random.key(0))


def named_leaves(params: Params) -> list[tuple[str, Any]]:
    """Return (dotted name such as "layers.q", leaf), in the order of `jax.tree.leaves(params)`."""
    return [(name, param.get_value()) for name, param in _named_params(params)]


def logical_axes(params: Params) -> dict[str, tuple[str, ...]]:
    """Return dotted name -> logical axes: "layers.q" -> ("layers", "embed", "heads", "head_dim")."""
    return {name: param.get_metadata("axes") for name, param in _named_params(params)}


def layer_matrices(params: Params) -> list[tuple[tuple[int, ...], tuple[int, ...]] | None]:
    """Return `matrix_dims` of each of `jax.tree.leaves(params)`; weights may be missing (None, masked)."""
    present = [param for _, param in _named_params(params) if jax.tree.leaves(param)]
    return [matrix_dims(param.get_metadata("axes")) for param in present]


def shardings(config: TransformerConfig, mesh: Mesh, rules: Rules) -> Params:
    """Return the tree of `init` with `NamedSharding` leaves: for `out_shardings`, `jax.device_put`,
    restoring.

    A dim that its mesh axes do not divide evenly is replicated.
    """
    shapes = abstract(config)
    axes = logical_axes(shapes)
    leaves = [sharding_for(mesh, axes[name], leaf.shape, rules) for name, leaf in named_leaves(shapes)]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def to_host(params: Params) -> Params:
    """Return weights in host memory, each with its sharding; some may be missing (None).

    Norms and biases stay on the devices: a TPU cannot read a single layer of a stack in host memory. Abstract
    weights stay abstract.
    """
    leaves, tree = jax.tree.flatten(params)
    present = [param.get_metadata("axes") for _, param in _named_params(params) if jax.tree.leaves(param)]
    moves = [matrix_dims(axes) or "vocab" in axes for axes in present]
    shardings = [on_host(x.sharding) if move else x.sharding for move, x in zip(moves, leaves, strict=True)]
    is_abstract = isinstance(leaves[0], jax.ShapeDtypeStruct)
    return (with_shardings if is_abstract else jax.device_put)(params, jax.tree.unflatten(tree, shardings))


def nonfinite(params: Params) -> list[str]:
    """Return the names of the weights that hold NaN or Inf. A collective."""
    finite = jax.device_get(_finite(params))
    return [name for (name, _), good in zip(named_leaves(params), finite, strict=True) if not good]


@jax.jit
def _finite(params: Params) -> list[jax.Array]:
    return [jnp.isfinite(weight).all() for weight in jax.tree.leaves(params)]


def with_heads(params: Params, config: TransformerConfig) -> Params:
    """Return the decoder with the heads of `config`; a new value head is zero."""
    shapes = abstract(config)
    leaves = dict(named_leaves(params))
    new = [
        leaves[name] if name in leaves else jnp.zeros(x.shape, x.dtype) for name, x in named_leaves(shapes)
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), new)


def without_value_head(params: Params) -> Params:
    """Return the decoder without its value head, for export and servers."""
    if not params.config.value_head:
        return params
    return with_heads(params, dataclasses.replace(params.config, value_head=False))


def _named_params(params: Params) -> list[tuple[str, nnx.Param]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, nnx.Param))
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


@jax.jit
def perturbed(params: Params, key: jax.Array, scale: Float[Array, ""] | float) -> Params:
    """Return the weights w (1 + scale z), z standard normal for each weight; codes of quantized ones stay."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    noise = lambda w, k: w * (1 + scale * jax.random.normal(k, w.shape, w.dtype))
    is_float = lambda w: jnp.issubdtype(w.dtype, jnp.floating)
    noisy = [noise(w, k) if is_float(w) else w for w, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)
