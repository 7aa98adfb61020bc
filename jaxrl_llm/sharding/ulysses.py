"""Attention of a row divided among devices: each takes some heads of the whole row (arXiv 2309.14509)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxrl_kernels.flash_attention.spec import Place, Spec


class Ulysses(NamedTuple):
    """`forward` and `backward` of the attention contract for the part of a row that a device holds.

    For use under `shard_map`; of `place` only the window counts. All-to-all exchanges turn some tokens of
    all heads into all tokens of some heads, and back. Fewer key heads than devices are repeated just until
    each device has one, so that no device is sent a head that it does not read.
    """

    implementation: Any
    """Module with `forward` and `backward` of the contract, for the whole row."""
    axis: str
    """Mesh axis that the row is divided over; it divides the query heads."""

    def forward(self, spec: Spec, q, k, v, q_segments, kv_segments, place: Place):
        """(out, lse) of the local queries over the keys of all devices."""
        qkv, segments = self._by_heads(q, self._repeat(k), self._repeat(v)), (q_segments, kv_segments)
        out, lse = self.implementation.forward(spec, *qkv, *self._rows(*segments), place)
        return self._by_tokens(out)[0], jax.lax.all_to_all(lse, self.axis, 2, 1, tiled=True)

    def backward(
        self, spec: Spec, q, k, v, q_segments, kv_segments, place: Place, out, lse, d_out, d_lse=None
    ):
        """(dq, dk, dv)."""
        across = lambda x: None if x is None else jax.lax.all_to_all(x, self.axis, 1, 2, tiled=True)
        q, repeated_k, repeated_v, out, d_out = self._by_heads(
            q, self._repeat(k), self._repeat(v), out, d_out
        )
        d_q, d_k, d_v = self.implementation.backward(
            spec, q, repeated_k, repeated_v, *self._rows(q_segments, kv_segments), place,
            out, across(lse), d_out, across(d_lse),
        )  # fmt: skip
        d_q, d_k, d_v = self._by_tokens(d_q, d_k, d_v)
        return d_q, _sum_repeated(d_k, k), _sum_repeated(d_v, v)

    def _by_heads(self, *arrays: Shaped[Array, "_ t _ E"]) -> list[Array]:
        return [jax.lax.all_to_all(x, self.axis, 2, 1, tiled=True) for x in arrays]

    def _by_tokens(self, *arrays: Shaped[Array, "_ T _ E"]) -> list[Array]:
        return [jax.lax.all_to_all(x, self.axis, 1, 2, tiled=True) for x in arrays]

    def _rows(self, *segments: Shaped[Array, "B t"]) -> list[Array]:
        return [jax.lax.all_gather(x, self.axis, axis=1, tiled=True) for x in segments]

    def _repeat(self, x: Shaped[Array, "B t K E"]) -> Shaped[Array, "B t K_ E"]:
        devices = jax.lax.axis_size(self.axis)
        return jnp.repeat(x, devices // math.gcd(x.shape[2], devices), axis=2)


def _sum_repeated(d, x):
    """The gradient of x [B, t, K, E] from that of its repetition, summed in float32."""
    batch, length, heads, dim = x.shape
    return d.reshape(batch, length, heads, -1, dim).sum(axis=3, dtype=jnp.float32).astype(x.dtype)
