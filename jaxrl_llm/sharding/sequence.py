"""Attention of rows under the current mesh: rows, heads and the tokens of a row each divided, or not.

Nothing here is left to the partitioner: kernels are opaque to it, so they run under `shard_map`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from jaxrl_kernels.flash_attention import api
from jaxrl_kernels.flash_attention.spec import Place, Spec
from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding.ring import Ring, unzigzag, zigzag
from jaxrl_llm.sharding.rules import TRAIN, Rules, layout
from jaxrl_llm.sharding.ulysses import Ulysses

Division = Literal["whole", "ring", "ulysses"]
WHOLE: Rules = {**TRAIN, "sequence": None}
DIVIDED = {"ring": Ring, "ulysses": Ulysses}
AXIS = TRAIN["sequence"]
ROWS = ("batch", "sequence", "heads", "head_dim")


def row_division(length: int, wanted: Division) -> Division:
    """The division of rows of `length` tokens: "whole" where nothing divides them or they divide unevenly."""
    mesh = jax.sharding.get_abstract_mesh()
    parts = 1 if mesh.empty else mesh.shape[AXIS]
    chunks = 2 * parts if wanted == "ring" else parts
    return "whole" if parts == 1 or length % chunks else wanted


def arrange_rows(x: Shaped[Array, "B T ..."], division: Division) -> Shaped[Array, "B T ..."]:
    """Rows in the order in which attention wants them: zigzag for a ring, otherwise as they are."""
    return _reorder(zigzag, x) if division == "ring" else x


def restore_rows(x: Shaped[Array, "B T ..."], division: Division) -> Shaped[Array, "B T ..."]:
    """The inverse of `arrange_rows`."""
    return _reorder(unzigzag, x) if division == "ring" else x


def row_attention(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    segments: Int[Array, "B T"],
    *,
    scale: float,
    window: int | Int[Array, ""],
    softcap: float | None = None,
    division: Division = "whole",
) -> Float[Array, "B T H E"]:
    """Causal attention within the segments of each row, on every device of the current mesh.

    Args:
        segments: 0 = padding.
        window: tokens that a token sees, itself included.
        division: of `row_division`; q, k, v and segments are in its order (`arrange_rows`).

    Raises:
        ValueError: Ulysses with heads that its devices do not divide.
    """
    rows = layout(ROWS, q.shape, WHOLE if division == "whole" else TRAIN)
    if rows is None:
        return api.flash_attention(q, k, v, segments, scale=scale, window=window, softcap=softcap)
    mesh = jax.sharding.get_abstract_mesh()
    tensor = q.shape[2] // NamedSharding(mesh, rows).shard_shape(q.shape)[2]
    if division == "ulysses" and q.shape[2] % (tensor * mesh.shape[AXIS]):
        raise UserError(heads_problem(q.shape[2], tensor * mesh.shape[AXIS]))
    # A key head is repeated only until every device has one: its query heads are then all of one group.
    repeats = tensor // math.gcd(k.shape[2], tensor)
    k, v = (x if repeats == 1 else jnp.repeat(x, repeats, axis=2) for x in (k, v))
    implementation = api.IMPLEMENTATIONS[api.choose(q.shape[3], q.dtype)[0]]
    if division in DIVIDED:
        implementation = DIVIDED[division](implementation, AXIS)
    return _attend(_Divided(implementation, Spec(scale, True, softcap), rows), q, k, v, segments, window)


def heads_problem(heads: int, parts: int) -> str:
    """What to say of heads that Ulysses cannot divide."""
    return (
        f"--mesh.sequence_parallel ulysses divides the {heads} query heads among tensor x sequence = {parts} "
        "devices, which does not come out even. Set --mesh.sequence_parallel ring, or a smaller "
        "--mesh.sequence."
    )


class _Divided(NamedTuple):
    """An implementation of attention, and how the arrays that it reads are divided."""

    implementation: Any
    spec: Spec
    rows: PartitionSpec

    def map(self, function, inputs: str, outputs: str):
        """`function` on each device; a letter an array: r = like q, l = lse, s = segments, w = one number."""
        batch, sequence, heads, _ = self.rows
        specs = {
            "r": self.rows,
            "l": PartitionSpec(batch, heads, sequence),
            "s": PartitionSpec(batch, sequence),
            "w": PartitionSpec(),
        }
        each = lambda letters: tuple(specs[letter] for letter in letters)
        return jax.shard_map(function, in_specs=each(inputs), out_specs=each(outputs), check_vma=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(divided: _Divided, q, k, v, segments, window):
    return _forward(divided, q, k, v, segments, window)[0]


def _forward(divided: _Divided, q, k, v, segments, window):
    def local(q, k, v, segments, window):
        place = Place(window=window)
        return divided.implementation.forward(divided.spec, q, k, v, segments, segments, place)

    window = jnp.asarray(window, jnp.int32)
    found = divided.map(local, "rrrsw", "rl")(q, k, v, segments, window)
    out, lse = [checkpoint_name(x, api.SAVED) for x in found]
    return out, (q, k, v, segments, window, out, lse)


def _backward(divided: _Divided, kept, d_out):
    def local(q, k, v, segments, window, out, lse, d_out):
        place = Place(window=window)
        return divided.implementation.backward(
            divided.spec, q, k, v, segments, segments, place, out, lse, d_out
        )

    return *divided.map(local, "rrrswrlr", "rrr")(*kept, d_out), None, None


_attend.defvjp(_forward, _backward)


def _reorder(function, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
    spec = layout((*ROWS[:2], *(None,) * (x.ndim - 2)), x.shape)
    move = functools.partial(function, axis=AXIS)
    return jax.shard_map(move, in_specs=spec, out_specs=spec)(x)
