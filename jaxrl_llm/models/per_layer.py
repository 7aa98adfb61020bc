"""Per-layer inputs: a vector of each token for each layer (Gemma 4 E2B).

The vector is made of the token's row in a second embedding, and of a projection of its first embedding. After
its feed-forward, a layer adds a projection of the vector, times a gate, to the residual stream.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.linear import project, rms_norm
from jaxrl_llm.models.rows import per_token_call
from jaxrl_llm.sharding.rules import constrain


class PerLayerWeights(NamedTuple):
    """The weights from which the inputs of all layers are computed."""

    embed: Float[Array, "V C"] | None  # C = L P: numbers of the first layer, then of the second, ...
    proj: Float[Array, "D L P"]
    norm: Float[Array, " size"]


NAMES = tuple(f"per_layer_{name}" for name in PerLayerWeights._fields)
"""Names of these weights in the model."""


def init_per_layer(c: TransformerConfig, key: jax.Array) -> PerLayerWeights:
    """Return random weights, as the model's others."""
    first, second = jax.random.split(key)
    layers, size, std = c.num_layers, c.per_layer_inputs, c.initializer_range
    table = std * jax.random.normal(first, (c.vocab_size, layers * size), jnp.float32)
    proj = std * jax.random.normal(second, (c.hidden_size, layers, size), jnp.float32)
    return PerLayerWeights(
        nnx.Param(table, axes=("vocab", "table_embed")),
        nnx.Param(proj, axes=("embed", "layers", "mlp")),
        nnx.Param(jnp.full(size, 1 - c.norm_offset, jnp.float32), axes=("norm",)),
    )


def per_layer_inputs(
    c: TransformerConfig,
    w: PerLayerWeights,
    x: Float[Array, "B T D"],
    rows: Float[Array, "B T C"],
    *,
    strict: bool,
) -> Float[Array, "L B T P"]:
    """Return the inputs of all layers, in the type of x.

    Args:
        x: embeddings, scaled.
        rows: of the tokens in the second embedding.
    """

    def one(w, x, rows):
        projected = project(x, w.proj) * c.hidden_size**-0.5
        projected = rms_norm(projected, w.norm + c.norm_offset, c.norm_eps)
        rows = rows.reshape(projected.shape) * jnp.asarray(c.per_layer_inputs**0.5, rows.dtype)
        both = (projected + rows).astype(jnp.float32)  # bfloat16 would round the factor
        return (both * 2**-0.5).astype(x.dtype)

    inputs = jnp.moveaxis(per_token_call(strict)(one, w._replace(embed=None), x, rows), 2, 0)
    return constrain(inputs, None, "batch", "sequence", "mlp")
