"""Application of an update only where all of its numbers are finite.

No weight may be written before every weight of the update is known to be finite. `update_if_finite` holds old
and new state until then; `update_by_leaf` computes the update twice and holds none of it, which is faster:
to write and read a new state takes longer than to compute it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jaxrl_kernels.dispatch import device
from jaxrl_llm.learn.optim_states import is_moment
from jaxrl_llm.structs import Metrics, Params

Inputs = tuple[Params, Any, Params]
"""Weights, optimizer state and gradients."""


class UpdateStep(NamedTuple):
    """An optimizer's step, before it is checked."""

    updates: Params
    masters: Params  # new weights, float32
    params: Params  # new weights as they are stored
    opt_state: Any


class Applied(NamedTuple):
    """New state, or the old one where `finite` is False."""

    params: Params
    opt_state: Any
    finite: Bool[Array, ""]
    norms: Metrics


def update_if_finite(step: Callable[..., UpdateStep], inputs: Inputs, finite: Bool[Array, ""]) -> Applied:
    """Return the state after `step(*inputs)` if that and `finite` are so, else the state before."""
    new = step(*inputs)
    norms = {"update_norm": optax.tree.norm(new.updates), "param_norm": optax.tree.norm(new.masters)}
    finite = finite & jnp.all(jnp.isfinite(jnp.stack(list(norms.values()))))
    return Applied(*_select(finite, new, inputs), finite, norms)


def update_by_leaf(
    optimizer: optax.GradientTransformation,
    step: Callable[..., UpdateStep],
    inputs: Inputs,
    finite: Bool[Array, ""],
) -> Applied:
    """Return the same as `update_if_finite`, one weight after the other; a CPU writes all at once.

    Args:
        step: treats every weight by itself.
    """

    def squares(*leaf):
        new = step(*leaf)
        return jnp.stack([optax.tree.norm(x, squared=True) for x in (new.updates, new.masters)])

    update_norm, param_norm = jnp.sqrt(sum(_each_leaf(optimizer, squares, inputs)))
    finite = finite & jnp.isfinite(update_norm) & jnp.isfinite(param_norm)
    norms = {"update_norm": update_norm, "param_norm": param_norm}
    if device()[0] == "cpu":  # XLA drops the barriers below there, so it would copy all moments
        update, keep = lambda *old: step(*old)[2:], lambda *old: old[:2]
        return Applied(*jax.lax.cond(finite, update, keep, *inputs), finite, norms)
    finite, inputs = jax.lax.optimization_barrier((finite, inputs))  # or the compiler keeps the first results
    results = _each_leaf(optimizer, lambda *leaf: _select(finite, step(*leaf), leaf), inputs)
    first = lambda *leaves: next((x for x in leaves if x is not None), None)
    joined = jax.tree.map(first, *results, is_leaf=lambda x: x is None or is_moment(x))
    return Applied(*joined, finite, norms)


def _select(finite: Bool[Array, ""], new: UpdateStep, old: Inputs) -> tuple[Params, Any]:
    select = lambda new, old: jnp.where(finite, new, old)
    return jax.tree.map(select, (new.params, new.opt_state), (old[0], old[1]))


def _each_leaf(
    optimizer: optax.GradientTransformation, f: Callable[..., Any], inputs: Inputs
) -> list[Float[Array, "*dims"] | Any]:
    """Return f(params, opt_state, grads) of each weight, with None for all others, one after the other."""
    params, opt_state, grads = inputs
    structure = jax.tree.structure(params)
    index = jax.tree.unflatten(structure, range(structure.num_leaves))
    results: list[Any] = []
    for i in range(structure.num_leaves):
        only = lambda x, j, i=i: x if i == j else None
        state = optax.tree.map_params(optimizer, only, opt_state, index, is_leaf=is_moment)
        leaf = jax.tree.map(only, params, index), state, jax.tree.map(only, grads, index)
        if results:
            leaf, results[-1] = jax.lax.optimization_barrier((leaf, results[-1]))
        results.append(f(*leaf))
    return results
