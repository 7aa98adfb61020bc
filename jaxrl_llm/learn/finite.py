"""Updates whose numbers are finite: loss scaling, gradients, application, the end of a run without them.

No weight may be written before every weight of the update is known to be finite. `update_if_finite` holds old
and new state until then; `update_by_leaf` computes the update twice and holds none of it, which is faster:
to write and read a new state takes longer than to compute it again.

Loss scaling is dynamic, for float16 (arXiv 1710.03740, section 3.2), whose smallest number is about 3e-8. The
loss is multiplied by a power of two before the backward pass, and the gradients of the float32 weights are
divided by it, which is exact. If they overflow, the update is skipped and the scale is halved.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxrl_kernels.dispatch import device
from jaxrl_llm.errors import RunError
from jaxrl_llm.learn.optim_states import is_moment
from jaxrl_llm.sharding.rules import fetch
from jaxrl_llm.structs import Metrics, Params, TrainState

if TYPE_CHECKING:
    from jaxrl_llm.learn.stage import Experience

Inputs = tuple[Params, Any, Params]
"""Weights, optimizer state and gradients."""


class UpdateStep(NamedTuple):
    """An optimizer's step, before it is checked."""

    updates: Params
    masters: Params  # new weights, float32
    params: Params  # new weights as they are stored
    opt_state: Any


class Applied(NamedTuple):
    """New state; the old state if `finite` is False."""

    params: Params
    opt_state: Any
    finite: Bool[Array, ""]
    norms: Metrics


def update_if_finite(step: Callable[..., UpdateStep], inputs: Inputs, finite: Bool[Array, ""]) -> Applied:
    """Return the state after `step(*inputs)` if that and `finite` are so, else the state before."""
    inputs = _on_devices(inputs)
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

    Moments in host memory are on the devices for their own weight's turn only, on a CPU all at once.

    Args:
        step: treats every weight by itself.
    """
    at_once = device()[0] == "cpu"  # XLA drops the barriers below there, so it would copy all moments
    inputs = _on_devices(inputs) if at_once else inputs

    # Compute the norms of the update, and keep none of it.
    def squares(*leaf):
        new = step(*_on_devices(leaf))
        return jnp.stack([optax.tree.norm(x, squared=True) for x in (new.updates, new.masters)])

    update_norm, param_norm = jnp.sqrt(sum(_each_leaf(optimizer, squares, inputs)))
    finite = finite & jnp.isfinite(update_norm) & jnp.isfinite(param_norm)
    norms = {"update_norm": update_norm, "param_norm": param_norm}
    if at_once:
        update, keep = lambda *old: step(*old)[2:], lambda *old: old[:2]
        return Applied(*jax.lax.cond(finite, update, keep, *inputs), finite, norms)
    # Compute it again, and write it; without the barrier the compiler keeps the first results.
    finite, inputs = jax.lax.optimization_barrier((finite, inputs))

    def written(*leaf):
        own = _on_devices(leaf)
        params, state = _select(finite, step(*own), own)
        back = lambda x, old: jax.device_put(x, jax.typeof(old).memory_space)
        return params, jax.tree.map(back, state, leaf[1])

    results = _each_leaf(optimizer, written, inputs)
    first = lambda *leaves: next((x for x in leaves if x is not None), None)
    joined = jax.tree.map(first, *results, is_leaf=lambda x: x is None or is_moment(x))
    return Applied(*joined, finite, norms)


def _on_devices(inputs: Inputs) -> Inputs:
    """Return the inputs with a copy of moments that are in host memory."""
    params, opt_state, grads = inputs
    return params, jax.tree.map(fetch, opt_state), grads


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


INITIAL_SCALE, MIN_SCALE, MAX_SCALE = 2.0**15, 1.0, 2.0**24
GROWTH_INTERVAL = 200
"""Updates between doublings of the scale. PyTorch's 2,000 is more than most RL runs have."""


def initial_loss_scale(dtype: DTypeLike) -> Float[Array, ""] | None:
    """Return the scale of the first update; None for types with the range of float32."""
    return jnp.float32(INITIAL_SCALE) if jnp.dtype(dtype) == jnp.float16 else None


def scale_loss(loss: Float[Array, ""], scale: Float[Array, ""] | None) -> Float[Array, ""]:
    """Return loss times scale."""
    return loss if scale is None else loss * scale


def unscale(grads: Params, scale: Float[Array, ""] | None) -> Params:
    """Return float32 gradients of the loss from gradients of the scaled loss."""
    return grads if scale is None else jax.tree.map(lambda g: g / scale, grads)


def next_loss_scale(
    scale: Float[Array, ""] | None, finite: Bool[Array, ""], version: Int[Array, ""]
) -> Float[Array, ""] | None:
    """Return the scale of the next update: half after one that was skipped, double every GROWTH_INTERVAL.

    Args:
        finite: whether the update was applied.
        version: updates applied so far, this one included.
    """
    if scale is None:
        return None
    grown = jnp.where(version % GROWTH_INTERVAL == 0, 2 * scale, scale)
    return jnp.clip(jnp.where(finite, grown, scale / 2), MIN_SCALE, MAX_SCALE)


def new_gradients(
    backward: Callable,
    loss: Float[Array, ""],
    trained: Params,
    *,
    loss_scale: Float[Array, ""] | None,
    dtype: DTypeLike,
) -> Params:
    """Return the gradients of a loss, in `dtype`, or in the type of their weight if it is narrower.

    Args:
        backward: of `jax.vjp` of the scaled loss with respect to the trained weights.
    """
    dtype = jnp.dtype(dtype)
    narrow = lambda g: g if g.dtype.itemsize <= dtype.itemsize else g.astype(dtype)
    new = _added(backward, loss, jax.tree.map(jnp.zeros_like, trained))
    return jax.tree.map(narrow, unscale(new, loss_scale))


def add_gradients(
    backward: Callable,
    loss: Float[Array, ""],
    trained: Params,
    grads: Params,
    *,
    loss_scale: Float[Array, ""] | None,
) -> Params:
    """Return `grads` plus the gradients of a loss, which the backward pass adds in place, layer by layer.

    `grads + new` would write the new gradients of all layers to memory first, and keep both. It is used only
    if weights and `grads` have different types, since a buffer adds only numbers of the same type.

    Args:
        backward: see `new_gradients`.
    """
    if any(g.dtype != w.dtype for g, w in zip(*map(jax.tree.leaves, (grads, trained)), strict=True)):
        new = unscale(_added(backward, loss, jax.tree.map(jnp.zeros_like, trained)), loss_scale)
        return jax.tree.map(lambda g, n: (g + n).astype(g.dtype), grads, new)
    scaled = jax.tree.map(lambda g: scale_loss(g, loss_scale), grads)
    return unscale(_added(backward, loss, scaled), loss_scale)


def _added(backward: Callable, loss: Float[Array, ""], grads: Params) -> Params:
    """Return `grads` plus the gradients of the loss, added in buffers. Without buffers a scan that reads its
    layers from a stack would add an array like the whole stack for each layer (`stacks.scan_layers`)."""
    buffers = jax.tree.map(jax.new_ref, grads)
    backward.with_refs(buffers)(jnp.ones_like(loss))
    return jax.tree.map(jax.freeze, buffers)


class NonFiniteError(RunError):
    """NaN or Inf in loss, gradient or weights of several updates in a row."""


def stop_if_nonfinite(
    state: TrainState,
    experience: Experience,
    run_dir: str,
    max_nonfinite: tuple[int, int],
    *,
    done: int,
    end: int,
) -> None:
    """End the run after too many skipped updates in a row; its checkpoints stay as they are.

    Args:
        run_dir: folder that the offending batch is written to.
        max_nonfinite: skipped updates in a row that end the run, of policy and critic.
        done: steps done.
        end: last step of the stage; a stage that skipped every update has trained nothing.

    Raises:
        NonFiniteError: names the file that the offending batch was written to.
    """
    # Find a model that has reached its limit, the policy first.
    reached = []
    for key, model, most in zip(("optim", "critic.optim"), (state, state.critic), max_nonfinite, strict=True):
        skipped = int(model.nonfinite) if model else 0
        if skipped >= most or (skipped and done == end and not int(model.version)):
            reached.append((skipped, key))
    if not reached:
        return
    # Write the batch, and end the run.
    skipped, key = reached[0]
    path = Path(run_dir) / f"nonfinite_step_{done}.npz"
    arrays = {f"{i}.tokens": item.tokens for i, item in enumerate(experience.items)}
    arrays |= {
        f"{i}.{name}": x for i, item in enumerate(experience.items) for name, x in item.signals.items()
    }
    np.savez(path, **arrays)
    raise NonFiniteError(
        f"{skipped} updates in a row had NaN or Inf in loss, gradient or weights at step {done}; none changed"
        f" the weights. The batch is in {path}. Lower --{key}.learning_rate or look at its rewards; the same "
        "command continues from the last checkpoint."
    )
