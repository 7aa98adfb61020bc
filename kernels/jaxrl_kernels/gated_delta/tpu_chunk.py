"""A chunk of the gated delta rule on TPU, for some heads at once: matrices have the heads as their first dim.

Functions of arrays in VMEM that Pallas kernels call. They can be differentiated, also within a kernel.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

SUBLANES = 8
"""Rows of a tile of float32 numbers."""


def add_chunk(
    inside: Float[Array, "R C"],
    before: Float[Array, "R D"],
    exact: bool,
    states: list[Float[Array, "H K V"]],
    q: Float[Array, "Hk C K"],
    k: Float[Array, "Hk C K"],
    v: Float[Array, "H C V"],
    g: Float[Array, "H 1 C"],
    beta: Float[Array, "H 1 C"],
) -> tuple[Float[Array, "H C V"], list[Float[Array, "H K V"]]]:
    """Add a chunk to the states of some heads, as `reference._add_chunk`; return (out, states).

    Args:
        inside, before: of `ChunkPaths`, as numbers; NaN = a state that lacks a level. R is C + D or more.
        exact: q and k are numbers of bfloat16.
        states: of each level.
    """
    size, levels, repeats = v.shape[1], range(len(states)), v.shape[0] // k.shape[0]
    row, column = _indices(size)
    later = _number(row > column)  # [token, earlier token]
    heads = lambda x: jnp.broadcast_to(x[:, None], (len(x), repeats, *x.shape[1:])).reshape(-1, *x.shape[1:])
    upright = lambda x: jnp.sum(x * _number(row == column), axis=-1, keepdims=True)  # a row as a column
    by_keys = functools.partial(_product, exact=(exact, False))

    # Decay along the path: of each token, and of the state before the chunk.
    terms = inside[:size] * g
    decay = inside[:size] * jnp.exp(_product(terms, later, (1, 0), (False, True)))
    fade = jnp.exp(jnp.sum(terms, axis=2, keepdims=True))

    # The state before the chunk, read by keys and queries.
    read_level = lambda x, d: _where(before[:size, d : d + 1], by_keys(heads(x), states[d], (1, 0)))
    read = lambda x: sum(read_level(x, d) for d in levels)
    pairs = lambda x: heads(_product(x, k, (1, 1), (exact, exact))) * decay

    # Corrections, and the outputs with them.
    beta = upright(beta)
    u = _solve(beta * pairs(k) * later, beta * (v - fade * read(k)))
    out = fade * read(q) + _product(pairs(q), u, (1, 0), (False, False))

    # The states at the ends of the path up to each level: `later` of the end of the chunk is a column.
    def after(d):
        end, kept = (x[size + d : size + d + 1] for x in (inside, before))
        terms = end * g
        decay = upright(end) * jnp.exp(jnp.sum(terms * _number(row < column), axis=2, keepdims=True))
        fade = jnp.exp(jnp.sum(terms, axis=2, keepdims=True))
        start = sum(_where(kept[:, e : e + 1], kept[:, e : e + 1] * states[e]) for e in levels)
        return fade * start + by_keys(heads(k), decay * u, (0, 0))

    return out, [after(d) for d in levels]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: Array, y: Array, contracted: tuple[int, int], exact: tuple[bool, bool]) -> Array:
    """Multiply matrices [.. M N], one a head, and sum over these of their two dims, in float32.

    Args:
        exact: which factors are numbers of bfloat16.
    """
    batch = tuple(range(y.ndim - 2))
    if y.ndim < x.ndim:  # the same matrix for all heads
        x, shape = x.reshape(-1, x.shape[-1]), x.shape
        return _product(x, y, contracted, exact).reshape(*shape[:-1], -1)
    dims = tuple((len(batch) + n,) for n in contracted), (batch, batch)
    dot = functools.partial(lax.dot_general, dimension_numbers=dims, preferred_element_type=jnp.float32)
    if not any(exact):
        return dot(x, y, precision=lax.Precision.HIGHEST)
    parts = lambda x, exact: [x.astype(jnp.bfloat16)] if exact else bfloat16_parts(x)
    pairs = [(a, b) for b in parts(y, exact[1]) for a in parts(x, exact[0])]
    return sum(dot(a, b) for a, b in reversed(pairs))  # small terms first


def _product_forward(x, y, contracted, exact):
    return _product(x, y, contracted, exact), (x, y)


def _product_backward(contracted, exact, factors, d):
    (x, y), (of_x, of_y) = factors, contracted
    by_y, by_x = (False, exact[1]), (False, exact[0])
    d_x = _product(d, y, (1, 1 - of_y), by_y) if of_x else _product(y, d, (1 - of_y, 1), by_y[::-1])
    if y.ndim < x.ndim:
        return d_x, jnp.zeros_like(y)  # a constant
    return d_x, _product(d, x, (0, 1 - of_x), by_x) if of_y else _product(x, d, (1 - of_x, 0), by_x[::-1])


_product.defvjp(_product_forward, _product_backward)


def bfloat16_parts(x: Float[Array, "..."]) -> list[Float[Array, "..."]]:
    """Return bfloat16 numbers whose sum is x: the first 8 bits of each number, the next 8, the last 8."""
    parts = []
    for _ in range(3):
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(2**16))
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts


@jax.custom_vjp
def _solve(a: Float[Array, "H C C"], b: Float[Array, "H C V"]) -> Float[Array, "H C V"]:
    """Solve (I + A) x = b, A strictly lower triangular."""
    return _solve_forward(a, b)[0]


def _solve_forward(a, b):
    inverse = _inverse(a)
    x = _product(inverse, b, (1, 0), (False, False))
    return x, (inverse, x)


def _solve_backward(residuals, d):
    inverse, x = residuals
    d_b = _product(inverse, d, (0, 0), (False, False))
    return -_product(d_b, x, (1, 1), (False, False)), d_b


_solve.defvjp(_solve_forward, _solve_backward)


def _inverse(a: Float[Array, "H C C"]) -> Float[Array, "H C C"]:
    """Compute `reference.inverse_of_chunk`, but blocks of 8 rows by substitution, without products."""
    heads, size, _ = a.shape
    row, column = _indices(size)
    inverse = jnp.broadcast_to(_number(row == column), a.shape)
    tiles = (heads, size // SUBLANES, SUBLANES, size)
    for n in range(SUBLANES - 1):
        factor = jnp.sum(a * _number(column == row // SUBLANES * SUBLANES + n), axis=2, keepdims=True)
        known = jnp.broadcast_to(inverse.reshape(tiles)[:, :, n : n + 1], tiles).reshape(a.shape)
        inverse -= factor * known

    # Merge pairs of blocks: only rows of the second block of each pair change.
    highest, s = functools.partial(_product, contracted=(1, 0), exact=(False, False)), SUBLANES
    while s < size:
        lower = a * _number((row // (2 * s) == column // (2 * s)) & (row // s != column // s))
        blocks = [inverse[:, i : i + s] for i in range(0, size, s)]
        second = jnp.concatenate(blocks[1::2], axis=1)
        second -= highest(highest(second, lower), inverse)
        blocks[1::2] = [second[:, i : i + s] for i in range(0, size // 2, s)]
        inverse = jnp.concatenate(blocks, axis=1)
        s *= 2
    return inverse


def _indices(size: int) -> tuple[Array, Array]:
    """Return the row and the column of each number of a matrix."""
    return tuple(lax.broadcasted_iota(jnp.int32, (size, size), dim) for dim in range(2))


def _number(mask: Array) -> Array:
    return jnp.where(mask, 1.0, 0.0)


def _where(mask: Array, x: Array) -> Array:
    """Return x, 0 where the number of the mask is 0."""
    return jnp.where(jnp.broadcast_to(mask, x.shape) != 0, x, 0.0)
