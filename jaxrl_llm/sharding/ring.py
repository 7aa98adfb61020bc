"""Attention of a row divided among devices: keys and values travel around a ring (arXiv 2310.01889).

A row is 2n chunks on n devices, in zigzag order: device i holds chunks i and 2n - 1 - i. So every device
has the same causal work at every step of the ring, two products of chunks (three at the first, its own
two diagonals among them), whereas in the natural order the first device would wait for the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxrl_kernels.flash_attention.blocks import needed, segments_of
from jaxrl_kernels.flash_attention.spec import NOTHING, Place, Spec

PAIRS = 3
"""Of chunks of two devices, (query, key), 0 = the early one: (0, 0), (1, 0), (1, 1). An early chunk never
sees a late one. They are gone through in a loop, so that their kernels are compiled once."""


class Ring(NamedTuple):
    """`forward` and `backward` of the attention contract for the part of a row that a device holds.

    For use under `shard_map`. Queries, keys and segments are one device's two chunks; of `place` only the
    window counts. Chunks that order, window or segments keep apart are not computed.
    """

    implementation: Any
    """Module with `forward` and `backward` of the contract, for one chunk of queries and one of keys."""
    axis: str
    """Mesh axis that the row is divided over."""

    def forward(self, spec: Spec, q, k, v, q_segments, kv_segments, place: Place):
        """(out, lse) of the local queries over the keys of all devices."""

        def look(found, operands):
            return _join(found, self.implementation.forward(spec, *operands))

        def step(s, carry):
            kv, found = carry
            following = self._pass_on(kv)  # on its way while this one is computed
            pair_of = self._pairs(spec, s, q, q_segments, kv, place)

            def add(pair, found):
                i, _, meet, operands = pair_of(pair)
                seen = jax.lax.cond(meet, look, lambda old, _: old, [x[i] for x in found], operands)
                return [x.at[i].set(y) for x, y in zip(found, seen, strict=True)]

            return following, jax.lax.fori_loop(0, PAIRS, add, found)

        batch, length, heads, dim = q.shape
        blind = [
            jnp.zeros((2, batch, length // 2, heads, dim), jnp.float32),
            jnp.full((2, batch, heads, length // 2), NOTHING, jnp.float32),
        ]
        _, (out, lse) = self._around(step, ((k, v, kv_segments), blind))
        return _whole(out).astype(q.dtype), _whole(lse, 2)

    def backward(
        self, spec: Spec, q, k, v, q_segments, kv_segments, place: Place, out, lse, d_out, d_lse=None
    ):
        """(dq, dk, dv); dk and dv follow their keys around the ring, one step behind, in float32."""
        d_lse = jnp.zeros_like(lse) if d_lse is None else d_lse
        results = _halves(out), _halves(lse, 2), _halves(d_out), _halves(d_lse, 2)

        def look(operands, result):
            found = self.implementation.backward(spec, *operands, *result)
            return [x.astype(jnp.float32) for x in found]

        def skip(operands, _):
            return [jnp.zeros(x.shape, jnp.float32) for x in operands[:3]]

        def step(s, carry):
            kv, d_kv, d_q = carry
            following, arrived = self._pass_on((kv, d_kv))
            pair_of = self._pairs(spec, s, q, q_segments, kv, place)

            def add(pair, parts):
                i, j, meet, operands = pair_of(pair)
                found = jax.lax.cond(meet, look, skip, operands, [x[i] for x in results])
                return [x.at[at].add(y) for x, at, y in zip(parts, (i, j, j), found, strict=True)]

            empty = [jnp.zeros(_halves(x).shape, jnp.float32) for x in (q, k, v)]
            d_q_part, *d_kv_part = [_whole(x) for x in jax.lax.fori_loop(0, PAIRS, add, empty)]
            return following, jax.tree.map(jnp.add, arrived, d_kv_part), d_q + d_q_part

        d_q, *d_kv = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
        _, d_kv, d_q = self._around(step, ((k, v, kv_segments), d_kv, d_q))
        d_k, d_v = self._pass_on(d_kv)  # home
        return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)

    def _around(self, step, carry):
        """All steps of the ring; the keys that the last one would pass on are seen to be unused."""
        last = jax.lax.axis_size(self.axis) - 1
        return step(last, jax.lax.fori_loop(0, last, step, carry))

    def _pass_on(self, tree):
        n = jax.lax.axis_size(self.axis)
        return jax.lax.ppermute(tree, self.axis, [(i, (i + 1) % n) for i in range(n)])

    def _pairs(self, spec: Spec, s, q, q_segments, kv, place: Place):
        """Of step s: pair -> (query chunk, key chunk, whether they meet, what `forward` takes)."""
        n, here = jax.lax.axis_size(self.axis), jax.lax.axis_index(self.axis)
        length = q.shape[1] // 2
        start = lambda device, chunk: length * jnp.where(chunk == 1, 2 * n - 1 - device, device)
        queries, keys = [_halves(x) for x in (q, q_segments)], [_halves(x) for x in kv]

        def pair_of(pair):
            i, j = (pair + 1) // 2, pair // 2
            (q, q_segments), (k, v, kv_segments) = [x[i] for x in queries], [x[j] for x in keys]
            there = Place(start(here, i), start((here - s) % n, j), place.window)
            of = [segments_of(x, length) for x in (q_segments, kv_segments)]
            meet = jnp.any(needed(spec, there, *of, (length, length)))
            return i, j, meet, (q, k, v, q_segments, kv_segments, there)

        return pair_of


def zigzag(x: Shaped[Array, "B T ..."], axis: str) -> Shaped[Array, "B T ..."]:
    """This device's tokens of rows in zigzag order, from its tokens in the natural order."""
    first, second = jnp.split(x, 2, axis=1)
    even = jax.lax.ppermute(first, axis, _moves(axis, 0))
    odd = jax.lax.ppermute(second, axis, _moves(axis, 1))
    return jnp.concatenate(_swap_on_odd(even, odd, axis), axis=1)


def unzigzag(x: Shaped[Array, "B T ..."], axis: str) -> Shaped[Array, "B T ..."]:
    """The inverse of `zigzag`."""
    even, odd = _swap_on_odd(*jnp.split(x, 2, axis=1), axis)
    back = lambda moves: [(there, here) for here, there in moves]
    first = jax.lax.ppermute(even, axis, back(_moves(axis, 0)))
    second = jax.lax.ppermute(odd, axis, back(_moves(axis, 1)))
    return jnp.concatenate([first, second], axis=1)


def _moves(axis: str, half: int) -> list[tuple[int, int]]:
    """(From, to) of the chunks 2i + half of all devices i: no two go to the same device."""
    n = jax.lax.axis_size(axis)
    return [(i, min(2 * i + half, 2 * n - 1 - 2 * i - half)) for i in range(n)]


def _swap_on_odd(a, b, axis: str):
    """A device of odd index holds an odd early chunk and an even late one."""
    odd = jax.lax.axis_index(axis) % 2 == 1
    return jnp.where(odd, b, a), jnp.where(odd, a, b)


def _join(
    a: Sequence[Float[Array, "B T H E"] | Float[Array, "B H T"]],
    b: Sequence[Float[Array, "B T H E"] | Float[Array, "B H T"]],
) -> list[Float[Array, "B T H E"] | Float[Array, "B H T"]]:
    """(out, lse) over the keys of both, from those over the keys of each; float32."""
    lse = jnp.logaddexp(a[1], b[1])
    weigh = lambda out, part: out * jnp.exp(part - lse).transpose(0, 2, 1)[..., None]
    return [weigh(*a) + weigh(*b), lse]


def _halves(x: Array, axis: int = 1) -> Array:
    """The early and the late chunk, stacked in front."""
    return jnp.stack(jnp.split(x, 2, axis=axis))


def _whole(x: Array, axis: int = 1) -> Array:
    """The inverse of `_halves`."""
    return jnp.concatenate([x[0], x[1]], axis=axis)
