"""Ring attention (arXiv 2310.01889): context parallelism in which keys and values rotate around the devices.

A row is 2n chunks on n devices, in zigzag order: device i holds chunks i and 2n - 1 - i. So every device has
the same causal work at every step of the ring: two products of chunks (three at the first step, including two
diagonal ones). In the natural order, the first device would wait for the last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxrl_kernels.flash_attention.blocks import key_blocks, query_blocks, visible_blocks
from jaxrl_kernels.flash_attention.reference import merge_keys
from jaxrl_kernels.flash_attention.spec import MASKED_LSE, AttentionSpec, DynamicMask

PAIRS = ((0, 0), (1, 0), (1, 1))
"""(Query chunk, key chunk) of two devices, 0 = the early one: an early chunk never attends to a late one."""


class RingAttention(NamedTuple):
    """`forward` and `backward` of the attention contract for a device's shard of a row, under `shard_map`.

    Queries, keys and segments are the device's two chunks. Reads only the mask's window. Fully masked pairs
    of chunks are skipped.
    """

    implementation: Any
    """Module with `forward` and `backward` of the contract, for one chunk of queries and one of keys."""
    axis: str
    """Mesh axis that shards the row."""

    def forward(  # noqa: PLR0917 - by position, as kernels are called
        self, spec: AttentionSpec, q, k, v, q_segments, kv_last, mask: DynamicMask
    ):
        """Compute (out, lse) of the local queries over the keys of all devices."""

        def add(results, operands):
            return merge_keys(results, self.implementation.forward(spec, *operands))

        def step(s, carry):
            kv, results = carry
            following = self._rotate(kv)  # overlaps with the computation
            for i, _, visible, operands in self._pairs(s, q, q_segments, kv, mask=mask):
                result = jax.lax.cond(visible, add, lambda result, _: result, results[i], operands)
                results = (result, results[1]) if i == 0 else (results[0], result)
            return following, results

        batch, length, heads, dim = q.shape
        empty = (
            jnp.zeros((batch, length // 2, heads, dim), jnp.float32),
            jnp.full((batch, heads, length // 2), MASKED_LSE, jnp.float32),
        )
        _, (early, late) = self._all_steps(step, ((k, v, kv_last), (empty, empty)))
        out = jnp.concatenate([early[0], late[0]], axis=1).astype(q.dtype)
        return out, jnp.concatenate([early[1], late[1]], axis=2)

    def backward(  # noqa: PLR0917
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
        """Compute (dq, dk, dv); dk and dv rotate with their keys, one step later, in float32."""
        d_lse = jnp.zeros_like(lse) if d_lse is None else d_lse
        results = list(zip(_halves(out), _halves(lse, 2), _halves(d_out), _halves(d_lse, 2), strict=True))

        # One step: gradients of the visible pairs of chunks, added to the gradients that have arrived.
        def compute(operands, result):
            gradients = self.implementation.backward(spec, *operands, *result)
            return [x.astype(jnp.float32) for x in gradients]

        def skip(operands, _):
            return [jnp.zeros(x.shape, jnp.float32) for x in operands[:3]]

        def step(s, carry):
            kv, d_kv, d_q = carry
            following, arrived = self._rotate((kv, d_kv))
            parts = [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]  # of dq, dk, dv: early and late chunk
            for i, j, visible, operands in self._pairs(s, q, q_segments, kv, mask=mask):
                gradients = jax.lax.cond(visible, compute, skip, operands, results[i])
                for part, chunk, gradient in zip(parts, (i, j, j), gradients, strict=True):
                    part[chunk] = part[chunk] + gradient
            d_q_part, *d_kv_part = [jnp.concatenate(part, axis=1) for part in parts]
            return following, jax.tree.map(jnp.add, arrived, d_kv_part), d_q + d_q_part

        # After the last step, dk and dv are one device short of the device of their keys.
        d_q, *d_kv = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
        _, d_kv, d_q = self._all_steps(step, ((k, v, kv_last), d_kv, d_q))
        d_k, d_v = self._rotate(d_kv)  # to the devices of their keys
        return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)

    def _all_steps(self, step, carry):
        """Run all steps of the ring; XLA drops the unused rotation of the last step."""
        last = jax.lax.axis_size(self.axis) - 1
        return step(last, jax.lax.fori_loop(0, last, step, carry))

    def _rotate(self, tree):
        """Send the arrays to the next device of the ring."""
        n = jax.lax.axis_size(self.axis)
        return jax.lax.ppermute(tree, self.axis, [(i, (i + 1) % n) for i in range(n)])

    def _pairs(self, s, q, q_segments, kv, *, mask: DynamicMask):
        """Yield (query chunk, key chunk, whether any pair is visible, operands of `forward`) of step s."""
        n, device = jax.lax.axis_size(self.axis), jax.lax.axis_index(self.axis)
        length = q.shape[1] // 2
        start = lambda i, chunk: length * (2 * n - 1 - i if chunk else i)
        whole = jnp.ndim(mask.window) == 0  # a single window, which cuDNN compiles
        windows = (mask.window, mask.window) if whole else _halves(mask.window)
        queries = list(zip(_halves(q), _halves(q_segments), windows, strict=True))
        keys = list(zip(*[_halves(x) for x in kv], strict=True))
        for i, j in PAIRS:
            (q_i, q_segments_i, window), (k_j, v_j, kv_last_j) = queries[i], keys[j]
            chunk_mask = DynamicMask(start(device, i), start((device - s) % n, j), window)
            of_q = query_blocks(chunk_mask, q_segments_i, chunk_mask.windows(q_segments_i), length)
            some, _ = visible_blocks(chunk_mask, of_q, key_blocks(kv_last_j, length), (length, length))
            yield i, j, jnp.any(some), (q_i, k_j, v_j, q_segments_i, kv_last_j, chunk_mask)


def to_zigzag(x: Shaped[Array, "B T ..."], axis: str) -> Shaped[Array, "B T ..."]:
    """Return this device's tokens of rows in zigzag order, from its tokens in the natural order."""
    first, second = jnp.split(x, 2, axis=1)
    even = jax.lax.ppermute(first, axis, _moves(axis, 0))
    odd = jax.lax.ppermute(second, axis, _moves(axis, 1))
    return jnp.concatenate(_swap_on_odd(even, odd, axis), axis=1)


def from_zigzag(x: Shaped[Array, "B T ..."], axis: str) -> Shaped[Array, "B T ..."]:
    """Invert `to_zigzag`."""
    even, odd = _swap_on_odd(*jnp.split(x, 2, axis=1), axis)
    back = lambda moves: [(target, source) for source, target in moves]
    first = jax.lax.ppermute(even, axis, back(_moves(axis, 0)))
    second = jax.lax.ppermute(odd, axis, back(_moves(axis, 1)))
    return jnp.concatenate([first, second], axis=1)


def _moves(axis: str, half: int) -> list[tuple[int, int]]:
    """Return (source, target) of the chunks 2i + half of all devices i; all targets differ."""
    n = jax.lax.axis_size(axis)
    return [(i, min(2 * i + half, 2 * n - 1 - 2 * i - half)) for i in range(n)]


def _swap_on_odd(a, b, axis: str):
    """Swap a and b on devices of odd index, which hold an odd early chunk and an even late one."""
    odd = jax.lax.axis_index(axis) % 2 == 1
    return jnp.where(odd, b, a), jnp.where(odd, a, b)


def _halves(x: Array, axis: int = 1) -> list[Array]:
    return jnp.split(x, 2, axis=axis)
