"""The gated delta rule on Hopper GPUs (H100, H200): only the states are sequential, which a kernel computes.

What chunks do not share (decays, products of keys, the inverse) is plain JAX for many chunks at once, then
`gpu_scan.scan_chunks` passes from state to state, and the outputs are plain JAX again. Plain JAX alone would
start some sixty operations a chunk.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_kernels.gated_delta.gpu_scan import COLUMNS, KEY_DIM, Scan, ScanSettings, scan_chunks
from jaxrl_kernels.gated_delta.paths import all_chunk_paths, clear_padding
from jaxrl_kernels.gated_delta.reference import inverse_of_chunk, matmul
from jaxrl_kernels.hopper import ROWS

CHUNK = ROWS
TOGETHER = 64
"""Chunks that are computed at once, whose intermediate values are in memory."""
MAX_LEVELS = 2


def unsupported(key_dim: int, value_dim: int, group: int, dtype: DTypeLike, corrects: bool) -> str | None:
    """Return why the kernel does not take heads of such sizes, `group` value heads a key head, or None."""
    if not corrects:
        return "no beta (Mamba-2): the Hopper kernel of the delta rule computes its correction"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"dtype {jnp.dtype(dtype).name}: the Hopper kernel of the delta rule takes bfloat16"
    if key_dim > KEY_DIM:
        return f"keys of {key_dim}: the Hopper kernel of the delta rule holds up to {KEY_DIM}"
    return None


def gated_delta(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T Hv V"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    *,
    segments: Int[Array, "B T"],
    last: Int[Array, "B T"] | None = None,
    initial: Float[Array, "B Hv K V"] | None = None,
    levels: int = 2,
    partition_spec: PartitionSpec | None = None,
) -> tuple[Float[Array, "B T Hv V"], Float[Array, "B Hv K V"]]:
    """Compute `reference.gated_delta`.

    Args:
        levels: at most MAX_LEVELS.
        partition_spec: as of `api.gated_delta`.
    """
    (batch, length, _, key_dim), (*_, heads, value_dim) = k.shape, v.shape
    branches, levels = last is not None, 1 if last is None else levels
    assert levels <= MAX_LEVELS
    if initial is None:
        initial = jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32)

    # Padding to whole groups of chunks, and to the kernel's sizes, changes no state.
    tokens = q, v, g, beta
    segments, last, (q, v, g, beta) = clear_padding(segments, last if branches else segments, tokens)
    together = min(TOGETHER, -(-length // CHUNK))
    more, dims = (0, -length % (CHUNK * together)), ((0, KEY_DIM - key_dim), (0, -value_dim % COLUMNS))
    pad = lambda x, *dim: jnp.pad(x, ((0, 0), more, *((0, 0),) * (x.ndim - 2 - len(dim)), *dim))
    q, k, v, g, beta = pad(q, dims[0]), pad(k, dims[0]), pad(v, dims[1]), pad(g), pad(beta)
    segments, last = (jnp.pad(x, ((0, 0), more), mode="edge") for x in (segments, last))
    initial = jnp.pad(initial.astype(jnp.float32), ((0, 0), (0, 0), *dims))

    # Groups of chunks in order; the gradient keeps the states between groups. The state before the row is
    # the first level's, the only one that a path can continue there.
    paths = all_chunk_paths(segments, last if branches else None, chunk=CHUNK, levels=levels)
    count = segments.shape[1] // CHUNK
    chunks = [x.reshape(batch, count, CHUNK, *x.shape[2:]) for x in (q, k, v, g, beta)]
    chunks += [paths.inside, paths.before, paths.fit]
    groups = [jnp.moveaxis(x.reshape(batch, -1, together, *x.shape[2:]), 1, 0) for x in chunks]
    states = jnp.broadcast_to(initial[:, :, None], (batch, heads, levels, *initial.shape[2:]))
    body = jax.checkpoint(functools.partial(_add_chunks, partition_spec), prevent_cse=False)
    states, out = jax.lax.scan(body, states, groups)
    out = jnp.moveaxis(out, 0, 1).reshape(batch, -1, *v.shape[2:])
    return out[:, :length, :, :value_dim], states[:, :, -1, :key_dim, :value_dim]


def _add_chunks(partition_spec: PartitionSpec | None, states: Float[Array, "B H D K V"], chunks: list[Array]):
    """Add N chunks to the states, as `reference._add_chunk`; return (states, out [B, N, C, H, V])."""
    *tokens, inside, before, fit = chunks
    keys, dtype = tokens[1], tokens[2].dtype
    q, k, v, g, beta = (jnp.moveaxis(x.astype(jnp.float32), 3, 1) for x in tokens)  # heads before chunks
    size, repeats, inside = q.shape[3], v.shape[1] // k.shape[1], inside[:, None]
    heads = lambda x: jnp.repeat(x, repeats, axis=1)

    # Decay along the path: of each token and of the state before the chunk; of the ends of the chunk.
    terms = jnp.where(inside, g[..., None, :], 0)
    later = jnp.tril(jnp.ones((size, size)), -1)
    decay = jnp.where(inside, jnp.exp(matmul(terms, later)), 0)
    fade = jnp.exp(jnp.sum(terms, axis=-1))
    pairs = lambda x: heads(matmul(x, jnp.swapaxes(k, -1, -2))) * decay[..., :size, :]

    # The states, one chunk after the other.
    start = jnp.swapaxes(before[:, None, :, :size], -1, -2)  # [B 1 N D C]
    kept = jnp.where(fit[..., None, None], before[:, :, size:], jnp.nan)[:, None]
    scan = Scan(
        jnp.moveaxis(keys, 3, 1),
        m=inverse_of_chunk(jnp.tril(beta[..., None] * pairs(k), -1)),
        a=beta[..., None] * v,
        p=jnp.where(start, -(beta * fade[..., :size])[..., None, :], 0),
        r=decay[..., size:, :],
        f=fade[..., size:, None] * kept,
        first=states,
    )
    u, read, states = scan_chunks(scan, ScanSettings(partition_spec))

    # The outputs.
    of_level = lambda d: jnp.where(start[..., d, :, None], matmul(heads(q), read[..., d, :, :]), 0)
    out = fade[..., :size, None] * sum(map(of_level, range(states.shape[2]))) + matmul(pairs(q), u)
    return states, jnp.moveaxis(out, 1, 3).astype(dtype)
