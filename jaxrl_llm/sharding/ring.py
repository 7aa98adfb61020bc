"""Attention of a row divided among devices: keys and values travel around a ring (arXiv 2310.01889).

A row is 2n chunks on n devices, in zigzag order: device i holds chunks i and 2n - 1 - i. So every device
has the same causal work at every step of the ring, two products of chunks (three at the first, its own
two diagonals among them), whereas in the natural order the first device would wait for the last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxrl_kernels.flash_attention.blocks import needed, segments_of
from jaxrl_kernels.flash_attention.spec import NOTHING, Place, Spec

PAIRS = ((0, 0), (1, 0), (1, 1))
"""(Query chunk, key chunk) of two devices, 0 = the early one: an early chunk never sees a late one."""


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
            for i, _, meet, operands in self._pairs(spec, s, q, q_segments, kv, place):
                seen = jax.lax.cond(meet, look, lambda found, _: found, found[i], operands)
                found = (seen, found[1]) if i == 0 else (found[0], seen)
            return following, found

        batch, length, heads, dim = q.shape
        blind = (
            jnp.zeros((batch, length // 2, heads, dim), jnp.float32),
            jnp.full((batch, heads, length // 2), NOTHING, jnp.float32),
        )
        _, (early, late) = self._around(step, ((k, v, kv_segments), (blind, blind)))
        out = jnp.concatenate([early[0], late[0]], axis=1).astype(q.dtype)
        return out, jnp.concatenate([early[1], late[1]], axis=2)

    def backward(
        self, spec: Spec, q, k, v, q_segments, kv_segments, place: Place, out, lse, d_out, d_lse=None
    ):
        """(dq, dk, dv); dk and dv follow their keys around the ring, one step behind, in float32."""
        d_lse = jnp.zeros_like(lse) if d_lse is None else d_lse
        results = list(zip(_halves(out), _halves(lse, 2), _halves(d_out), _halves(d_lse, 2), strict=True))

        def look(operands, result):
            found = self.implementation.backward(spec, *operands, *result)
            return [x.astype(jnp.float32) for x in found]

        def skip(operands, _):
            return [jnp.zeros(x.shape, jnp.float32) for x in operands[:3]]

        def step(s, carry):
            kv, d_kv, d_q = carry
            following, arrived = self._pass_on((kv, d_kv))
            parts = [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]  # of dq, dk, dv: early and late chunk
            for i, j, meet, operands in self._pairs(spec, s, q, q_segments, kv, place):
                found = jax.lax.cond(meet, look, skip, operands, results[i])
                for part, chunk, more in zip(parts, (i, j, j), found, strict=True):
                    part[chunk] = part[chunk] + more
            d_q_part, *d_kv_part = [jnp.concatenate(part, axis=1) for part in parts]
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
        """Of step s: (query chunk, key chunk, whether they meet, what `forward` takes after the spec)."""
        n, here = jax.lax.axis_size(self.axis), jax.lax.axis_index(self.axis)
        length = q.shape[1] // 2
        start = lambda device, chunk: length * (2 * n - 1 - device if chunk else device)
        queries = list(zip(_halves(q), _halves(q_segments), strict=True))
        keys = list(zip(*[_halves(x) for x in kv], strict=True))
        for i, j in PAIRS:
            (q_i, q_segments_i), (k_j, v_j, kv_segments_j) = queries[i], keys[j]
            there = Place(start(here, i), start((here - s) % n, j), place.window)
            of = [segments_of(x, length) for x in (q_segments_i, kv_segments_j)]
            meet = jnp.any(needed(spec, there, *of, (length, length)))
            yield i, j, meet, (q_i, k_j, v_j, q_segments_i, kv_segments_j, there)


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
    a: tuple[Float[Array, "B T H E"], Float[Array, "B H T"]],
    b: tuple[Float[Array, "B T H E"], Float[Array, "B H T"]],
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
    """(out, lse) over the keys of both, from those over the keys of each; float32."""
    lse = jnp.logaddexp(a[1], b[1])
    weigh = lambda out, part: out * jnp.exp(part - lse).transpose(0, 2, 1)[..., None]
    return weigh(a[0], a[1]) + weigh(b[0], b[1]), lse


def _halves(x: Array, axis: int = 1) -> list[Array]:
    return jnp.split(x, 2, axis=axis)
