"""Batch-invariant operations: a token's bits do not depend on the rest of the batch or on the program.

XLA chooses the summation order of a product by its shape, so a row of a larger batch has other bits than the
same row alone. Here every number is computed in the body of a loop with fixed shapes: TILE tokens at a time,
KEYS keys at a time, in the order of their positions, whatever the batch. XLA compiles a loop body separately
from the surrounding code, so programs that decode, score and train do the same arithmetic.

Only values are batch-invariant. Gradients come from the plain functions at the same inputs, whose products
may be as large as the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from jaxrl_kernels.chunks import map_chunks
from jaxrl_kernels.flash_attention.spec import (
    MASKED_LSE,
    NO_WINDOW,
    AttentionSpec,
    DynamicMask,
    capped_scores,
    visible,
)
from jaxrl_kernels.linear_logprob.api import linear_logprob as plain_linear_logprob

TILE = 16
"""Tokens computed together."""
KEYS = 32
"""Keys of each token that attention computes together."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def straight_through(plain: Callable[..., Any], exact: Callable[..., Any], *args: Any) -> Any:
    """Return exact(*args), with the gradient of plain(*args), which is equal up to rounding."""
    return exact(*args)


def _forward(plain, exact, *args):
    return exact(*args), args


def _backward(plain, exact, args, cotangents):
    return jax.vjp(plain, *args)[1](cotangents)


straight_through.defvjp(_forward, _backward)


def map_tokens(f: Callable[..., Any], weights: Any, *xs: Any, plain: Callable[..., Any] | None = None) -> Any:
    """Apply f(weights, *xs) TILE tokens at a time.

    Args:
        f: computes each token independently of the others.
        xs: trees of arrays [B, T, ...]; f gets [1, TILE, ...] of each.
        plain: the same up to rounding, of all tokens at once, for the gradient; None = f.
    """
    return straight_through(plain or f, functools.partial(_in_tiles, f), weights, *xs)


def _in_tiles(f, weights, *xs):
    outer = jax.tree.leaves(xs)[0].shape[:2]
    count = outer[0] * outer[1]
    tiles = max(-(-count // TILE), 2)  # XLA would inline a loop of one trip

    def cut(x):
        x = x.reshape(count, *x.shape[2:])
        x = jnp.pad(x, ((0, tiles * TILE - count), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(tiles, 1, TILE, *x.shape[1:])

    def join(x):
        return x.reshape(tiles * TILE, *x.shape[3:])[:count].reshape(*outer, *x.shape[3:])

    out = jax.lax.map(lambda xs: f(weights, *xs), jax.tree.map(cut, xs))
    return jax.tree.map(join, out)


class RowKeys(NamedTuple):
    """Keys of a packed row, C = T: a query attends to its segment and to the segments that it continues."""

    segments: Int[Array, "B T"]
    """As of `flash_attention`."""
    last: Int[Array, "B T"]

    def of_queries(self) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
        """Return the arguments of `in_order` for each query."""
        columns = jnp.arange(self.segments.shape[1])
        return jnp.broadcast_to(columns, self.segments.shape), self.segments

    def in_order(
        self, keys: Int[Array, "N C"], columns: Int[Array, "N 1"], segments: Int[Array, "N 1"]
    ) -> Int[Array, "N C"]:
        """Return the column of the key at each position, [N, C]; 0 after the last position."""
        count = keys.shape[1]
        at = jnp.arange(count)
        seen = visible(DynamicMask(), columns, at, NO_WINDOW, segments, self.last.reshape(-1)[keys])
        position = jnp.where(seen, jnp.cumsum(seen, axis=1) - 1, count)
        order = jnp.zeros((len(keys), count), jnp.int32)
        return order.at[jnp.arange(len(keys))[:, None], position].set(at, mode="drop")


class RingKeys(NamedTuple):
    """Keys of a ring buffer: the key of position p is at index (start + p) mod C."""

    start: Int[Array, "B T"]

    def of_queries(self) -> tuple[Int[Array, "B T"]]:
        """Return the arguments of `in_order` for each query."""
        return (self.start,)

    def in_order(self, keys: Int[Array, "N C"], start: Int[Array, "N 1"]) -> Int[Array, "N C"]:
        """Return the index of the key of each position."""
        count = keys.shape[1]
        return (start + jnp.arange(count)) % count


def invariant_attention(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B C K E"],
    v: Float[Array, "B C K E"],
    where: RingKeys | RowKeys,
    positions: Int[Array, "B T"],
    window: int | Int[Array, ""],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    chosen: Bool[Array, "B T C"] | None = None,
) -> Float[Array, "B T H E"]:
    """Compute softmax attention of each query to its trajectory's keys, up to its own position. No gradient.

    Args:
        where: the keys of each position in the query's row.
        window: sliding window: the most keys that a query attends to, its own included.
        sinks: the score of one more key of value 0 for each head, float32; None = none.
        chosen: positions that each query may attend to; None = all.
    """
    batch, length, kv_heads, dim = k.shape
    row = jnp.broadcast_to(jnp.arange(batch)[:, None] * length, positions.shape)
    kv = tuple(x.reshape(batch * length, kv_heads, dim) for x in (k, v))
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    spec = AttentionSpec(scale, softcap)

    def tile(shared, q, chosen, row, positions, *of_queries):
        q = q.reshape(TILE, kv_heads, -1, dim)
        row, last, *of_queries = (x.reshape(TILE, 1) for x in (row, positions, *of_queries))
        (keys, values), window, sinks = shared
        # Looked up before the loop, so that its body is one program for rings, pages and rows.
        indices = _pad_keys(row + where.in_order(row + jnp.arange(length), *of_queries))
        chosen = None if chosen is None else _pad_keys(chosen.reshape(TILE, length))

        def add(step, carry):
            top, total, out = carry
            at = step * KEYS + jnp.arange(KEYS)
            index = jax.lax.dynamic_slice_in_dim(indices, step * KEYS, KEYS, axis=1)
            seen = (at <= last) & (last - at < window)
            if chosen is not None:
                seen &= jax.lax.dynamic_slice_in_dim(chosen, step * KEYS, KEYS, axis=1)
            scores = capped_scores(spec, product("rkge,rcke->rkgc", q, keys[index]))
            scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
            higher = jnp.maximum(top, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - higher[..., None])  # masked keys add exact zeros
            shrink = jnp.exp(top - higher)
            weighted = product("rkgc,rcke->rkge", weights.astype(v.dtype), values[index])
            total = total * shrink + jnp.sum(weights, axis=-1)
            return higher, total, out * shrink[..., None] + weighted

        zeros = jnp.zeros(q.shape, jnp.float32)
        top, total = (MASKED_LSE, 0) if sinks is None else (sinks.reshape(kv_heads, -1), 1)
        carry = zeros[..., 0] + top, zeros[..., 0] + total, zeros
        first = jnp.maximum(jnp.min(last) - window + 1, 0) // KEYS
        _, total, out = jax.lax.fori_loop(first, jnp.max(last) // KEYS + 1, add, carry)
        return (out / total[..., None]).astype(q.dtype).reshape(1, TILE, -1, dim)

    return _in_tiles(tile, (kv, jnp.asarray(window), sinks), q, chosen, row, positions, *where.of_queries())


def _pad_keys(x: Shaped[Array, "N C"]) -> Shaped[Array, "N C_"]:
    """Pad to whole blocks of KEYS."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % KEYS)))


def invariant_scores(
    scores_fn: Callable[..., Float[Array, "N 1 C"]],
    inputs: tuple[Float[Array, "B T I E"], Float[Array, "B C E"], Float[Array, "B T I"]],
    where: RingKeys | RowKeys,
    positions: Int[Array, "B T"],
) -> Float[Array, "B T C"]:
    """Compute scores of each query against its trajectory's keys, in the order of positions. No gradient.

    Args:
        scores_fn: (queries [N, 1, I, E], weights [N, 1, I], keys [N, C, E]) -> scores.
        inputs: (queries, keys, weights).
        where, positions: as of `invariant_attention`. Scores after the last key of a tile are 0.
    """
    q, keys, weights = inputs
    batch, length, dim = keys.shape
    row = jnp.broadcast_to(jnp.arange(batch)[:, None] * length, positions.shape)

    def tile(keys, q, weights, row, positions, *of_queries):
        q, weights = (x.reshape(TILE, 1, *x.shape[2:]) for x in (q, weights))
        row, last, *of_queries = (x.reshape(TILE, 1) for x in (row, positions, *of_queries))
        indices = _pad_keys(row + where.in_order(row + jnp.arange(length), *of_queries))

        def add(step, out):
            index = jax.lax.dynamic_slice_in_dim(indices, step * KEYS, KEYS, axis=1)
            part = scores_fn(q, weights, keys[index])[:, 0]
            return jax.lax.dynamic_update_slice_in_dim(out, part, step * KEYS, axis=1)

        out = jax.lax.fori_loop(0, jnp.max(last) // KEYS + 1, add, jnp.zeros(indices.shape, jnp.float32))
        return out[None, :, :length]

    flat = keys.reshape(batch * length, dim)
    return _in_tiles(tile, flat, q, weights, row, positions, *where.of_queries())


def logits_fn(softcap: float | None) -> Callable[..., Float[Array, "B T V"]]:
    """Return (head [V, D], hidden [B, T, D]) -> logits, float32; for `map_tokens`."""

    def logits(head, hidden):
        out = jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32)
        return out if softcap is None else softcap * jnp.tanh(out / softcap)

    return logits


def logprob(
    temperature: Float[Array, ""], logits: Float[Array, "B T V"], targets: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Compute (log softmax(logits / temperature) at the targets, its entropy), nats; for `map_tokens`."""
    logits = logits * (1 / temperature)  # XLA does this for division by a constant, and only then
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(below)
    total = jnp.sum(weights, axis=-1)
    at_target = targets[..., None] == jnp.arange(logits.shape[-1])
    logprobs = jnp.sum(jnp.where(at_target, below, 0), axis=-1) - jnp.log(total)
    return logprobs, jnp.log(total) - jnp.sum(weights * below, axis=-1) / total


def kept_logprob(
    temperature: Float[Array, ""],
    logits: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    kept: Int[Array, "B T K"],
) -> Float[Array, "B T"]:
    """Compute log softmax(logits / temperature) at the targets over their kept sets, nats; for `map_tokens`.

    Args:
        kept: ids, -1 = none.
    """
    return set_logprob(jnp.take_along_axis(logits, jnp.maximum(kept, 0), axis=-1), targets, kept, temperature)


def set_logprob(
    logits: Float[Array, "B T K"],
    targets: Int[Array, "B T"],
    kept: Int[Array, "B T K"],
    temperature: float | Float[Array, ""],
) -> Float[Array, "B T"]:
    """Compute `kept_logprob` from the logits of the kept sets alone. 0 for a set that lacks its target."""
    has_target = jnp.any(kept == targets[..., None], axis=-1, keepdims=True)
    member = (kept >= 0) | ~has_target  # a finite number, even without a set
    logits = jnp.where(member, logits * (1 / temperature), -jnp.inf)
    below = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    at_target = jnp.sum(jnp.where(kept == targets[..., None], below, 0), axis=-1)
    return jnp.where(has_target[..., 0], at_target - jnp.log(jnp.sum(jnp.exp(below), axis=-1)), 0)


def linear_logprob(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    mask: Num[Array, "B T"] | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int = 128,
    with_entropy: bool = True,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"] | None]:
    """Compute `linear_logprob` in tiles of tokens."""
    mask = jnp.ones(targets.shape) if mask is None else mask

    def exact(hidden, head, targets, mask):
        def one(hidden, targets):
            logits = map_tokens(logits_fn(softcap), head, hidden)
            return map_tokens(logprob, jnp.float32(temperature), logits, targets)

        logprobs, entropy = (jnp.where(mask > 0, x, 0) for x in map_chunks(one, chunk, hidden, targets))
        return logprobs, entropy if with_entropy else None

    plain = functools.partial(
        plain_linear_logprob, temperature=temperature, softcap=softcap, chunk=chunk, with_entropy=with_entropy
    )
    return straight_through(plain, exact, hidden, head, targets, mask)


def rounded(x: Float[Array, "*dims"], dtype: DTypeLike) -> Float[Array, "*dims"]:
    """Round x to `dtype`. After a plain cast XLA may keep computing with the extra bits."""
    if x.dtype == dtype:  # XLA would copy it
        return x
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, kind.nexp, kind.nmant).astype(dtype)
