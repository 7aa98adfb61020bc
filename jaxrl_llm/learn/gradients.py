"""Gradients of a micro-batch: new ones, or added to those of other micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxrl_llm.learn.loss_scale import scale_loss, unscale
from jaxrl_llm.structs import Params


def new_gradients(
    backward: Callable, loss: Float[Array, ""], loss_scale: Float[Array, ""] | None, dtype: DTypeLike
) -> Params:
    """Return the gradients of a loss, in `dtype`, or in the type of their weight where that is narrower.

    Args:
        backward: of `jax.vjp` of the scaled loss with respect to the trained weights.
    """
    dtype = jnp.dtype(dtype)
    narrow = lambda g: g if g.dtype.itemsize <= dtype.itemsize else g.astype(dtype)
    (new,) = backward(jnp.ones_like(loss))
    return jax.tree.map(narrow, unscale(new, loss_scale))


def add_gradients(
    backward: Callable,
    loss: Float[Array, ""],
    trained: Params,
    grads: Params,
    loss_scale: Float[Array, ""] | None,
) -> Params:
    """Return `grads` plus the gradients of a loss, which the backward pass adds in place, layer by layer.

    `grads + new` would write the new gradients of all layers to memory first, and keep both. It remains where
    weights have another type than their `grads`, since a buffer adds numbers of its own type.

    Args:
        backward: see `new_gradients`.
    """
    if any(g.dtype != w.dtype for g, w in zip(*map(jax.tree.leaves, (grads, trained)), strict=True)):
        (new,) = backward(jnp.ones_like(loss))
        return jax.tree.map(lambda g, n: (g + n).astype(g.dtype), grads, unscale(new, loss_scale))
    buffers = jax.tree.map(lambda g: jax.new_ref(scale_loss(g, loss_scale)), grads)
    backward.with_refs(buffers)(jnp.ones_like(loss))
    return unscale(jax.tree.map(jax.freeze, buffers), loss_scale)
