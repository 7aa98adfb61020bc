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
    """Return the gradients of a loss, in `dtype` or a narrower type of their weights.

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

    `grads + new` would write the new gradients of all layers to memory first, and keep both. It remains for
    weights of another type than their `grads`, since a buffer adds numbers of its own type.

    Args:
        backward: see `new_gradients`.
    """
    in_place = lambda g, w: g.dtype == w.dtype
    buffer = lambda g, w: jax.new_ref(scale_loss(g, loss_scale)) if in_place(g, w) else jax.ad.GradValue()
    buffers = jax.tree.map(buffer, grads, trained)
    (new,) = backward.with_refs(buffers)(jnp.ones_like(loss))

    def total(g, w, buffer, new):
        if in_place(g, w):
            return unscale(jax.freeze(buffer), loss_scale)
        return (g + unscale(new, loss_scale)).astype(g.dtype)

    return jax.tree.map(total, grads, trained, buffers, new)
