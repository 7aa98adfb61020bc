"""Ulysses attention (arXiv 2309.14509): context parallelism by all-to-all between tokens and heads."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxrl_kernels.flash_attention.spec import AttentionSpec, DynamicMask


class UlyssesAttention(NamedTuple):
    """`forward` and `backward` of the attention contract for a device's shard of a row, under `shard_map`.

    All-to-all turns a shard of the tokens with all heads into all tokens with a shard of the heads, and back.
    Reads only the mask's window. If there are fewer key heads than devices, they are repeated until each
    device has one, so that no device receives a head that it does not read.
    """

    implementation: Any
    """Module with `forward` and `backward` of the contract, for the whole row."""
    axis: str
    """Mesh axis that shards the row; its size divides the number of query heads."""

    def forward(self, spec: AttentionSpec, q, k, v, q_segments, kv_last, mask: DynamicMask):
        """Compute (out, lse) of the local queries over the keys of all devices."""
        qkv = self._by_heads(q, self._repeat(k), self._repeat(v))
        of_rows = self._gather(q_segments, kv_last, mask)
        out, lse = self.implementation.forward(spec, *qkv, *of_rows)
        return self._by_tokens(out)[0], jax.lax.all_to_all(lse, self.axis, 2, 1, tiled=True)

    def backward(
        self,
        spec: AttentionSpec,
        q,
        k,
        v,
        q_segments,
        kv_last,
        mask: DynamicMask,
        out,
        lse,
        d_out,
        d_lse=None,
    ):
        """Compute (dq, dk, dv)."""
        across = lambda x: None if x is None else jax.lax.all_to_all(x, self.axis, 1, 2, tiled=True)
        q, repeated_k, repeated_v, out, d_out = self._by_heads(
            q, self._repeat(k), self._repeat(v), out, d_out
        )
        d_q, d_k, d_v = self.implementation.backward(
            spec, q, repeated_k, repeated_v, *self._gather(q_segments, kv_last, mask),
            out, across(lse), d_out, across(d_lse),
        )  # fmt: skip
        d_q, d_k, d_v = self._by_tokens(d_q, d_k, d_v)
        return d_q, _sum_repeated(d_k, k), _sum_repeated(d_v, v)

    def _by_heads(self, *arrays: Shaped[Array, "_ t _ E"]) -> list[Array]:
        return [jax.lax.all_to_all(x, self.axis, 2, 1, tiled=True) for x in arrays]

    def _by_tokens(self, *arrays: Shaped[Array, "_ T _ E"]) -> list[Array]:
        return [jax.lax.all_to_all(x, self.axis, 1, 2, tiled=True) for x in arrays]

    def _gather(
        self, q: Shaped[Array, "B t"], kv: Shaped[Array, "B t"], mask: DynamicMask
    ) -> tuple[Array, Array, DynamicMask]:
        """Return the segments and the mask of whole rows. Returns the same array twice if both segments are
        the same, since `cudnn` compares them by identity."""
        gather = lambda x: jax.lax.all_gather(x, self.axis, axis=1, tiled=True)
        whole = gather(q)
        mask = mask if jnp.ndim(mask.window) == 0 else mask._replace(window=gather(mask.window))
        return whole, whole if q is kv else gather(kv), mask

    def _repeat(self, x: Shaped[Array, "B t K E"]) -> Shaped[Array, "B t K_ E"]:
        devices = jax.lax.axis_size(self.axis)
        return jnp.repeat(x, devices // math.gcd(x.shape[2], devices), axis=2)


def _sum_repeated(d, x):
    """Return the gradient of x [B, t, K, E]: the gradients of its repeated heads, summed in float32."""
    batch, length, heads, dim = x.shape
    return d.reshape(batch, length, heads, -1, dim).sum(axis=3, dtype=jnp.float32).astype(x.dtype)
