"""The definition of the gated delta rule (Gated DeltaNet, arXiv 2412.06464), over trees of segments.

A value head has a state S [K, V], a linear map from keys to values. A token decays it, and then corrects the
value that it has for the token's key:

    S <- e^g S,   u = beta (v - S^T k),   S <- S + k u^T,   out = S^T q

`recurrent_delta` does so token by token, `gated_delta` for chunks of C tokens (section 3.3 of the paper).
With S the state before the chunk, c_i the sum of g from the start of the chunk to token i, and G_ij = e^(sum
of g after token j to token i) for j <= i, else 0:

    u = (I + A)^-1 beta (v - e^c S^T k),   A_ij = beta_i (k_i . k_j) G_ij for j < i, else 0
    out = e^c S^T q + (q k^T * G) u,       S <- e^(c_C) S + sum_j G_Cj k_j u_j^T

Sums and S belong to the path of a token: the earlier tokens of its segment, and of the segments that it
continues, as in attention (`flash_attention.spec.DynamicMask`). Segments are in depth-first order, so a later
token continues the newest token's path, from its end or from the end of a shared prefix. A stack has the
states at these ends, one for each level: the tokens of a path that have the same `last`.

All arithmetic is float32, and TPU products are not rounded to bfloat16. Sums of g add the terms themselves:
differences of cumulative sums lose the last bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxrl_kernels import batch_invariant
from jaxrl_kernels.chunks import split
from jaxrl_kernels.gated_delta.paths import ChunkPaths, clear_padding, follow_paths

CHUNK = 64
"""The most tokens of a chunk. On a CPU half the key size, at least 16, is fastest with its gradient: 32 of 64
take 0.75 of the time of 64, and 16 of 32 half. Fewer tokens would keep more states for the gradient."""
SAVED = "gated_delta"
"""Name, for `jax.checkpoint` policies, of the output and the states between chunks; only of plain JAX."""
INVERTED_BLOCK = 8
"""Rows of the blocks from which the inverse of a chunk is made: on a CPU a sixth of the time of products of
all 64 rows. With 4 and 16 it takes 1.3 to 3 times as long as with 8."""

_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def gated_delta(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T Hv V"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"] | None = None,
    *,
    segments: Int[Array, "B T"],
    last: Int[Array, "B T"] | None = None,
    initial: Float[Array, "B Hv K V"] | None = None,
    chunk: int | None = None,
    levels: int = 2,
) -> tuple[Float[Array, "B T Hv V"], Float[Array, "B Hv K V"]]:
    """Compute the gated delta rule over the path of each token, one chunk of all rows and heads at a time.

    Args:
        q, k: normalised, and q scaled. Key head j serves the r = Hv / Hk value heads from j r on.
        g: log of the decay, at most 0.
        beta: strength of the correction, 0 to 1, or to 2 for negative eigenvalues. None = no correction, u =
            v: the state space dual form of Mamba-2 (arXiv 2405.21060), with its C, B, dt x and dt A as q, k,
            v and g.
        segments: number of each token's segment, 1, 2, ... in the order of the row, 0 = padding.
        last: number of the last segment that continues each token's segment, 0 = padding, as in
            `flash_attention`; None = no segment continues another.
        initial: state before the row, which the first segment of the row continues; None = 0.
        chunk: tokens of a chunk, a power of two; None = by the key size, at most CHUNK.
        levels: the most levels of a path, if `last` is given: 2 for responses to a prompt, 1 more for each
            prefix that prompts share. The gradient keeps as many states a chunk in memory. A row with more
            levels at the end of a chunk is NaN from the next chunk on.

    Returns:
        out: like v, 0 for padding.
        final: the state after the last token of each row, float32.
    """
    up = lambda size: 1 << (size - 1).bit_length()  # to a power of two
    chunk = min(chunk or min(max(up(k.shape[3]) // 2, 16), CHUNK), up(q.shape[1]))
    tokens = (q, k, v, g) if beta is None else (q, k, v, g, beta)
    return _scan(_scan_chunks, tokens, segments, last=last, initial=initial, chunk=chunk, levels=levels)


def recurrent_delta(
    q: Float[Array, "B T Hk K"],
    k: Float[Array, "B T Hk K"],
    v: Float[Array, "B T Hv V"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"] | None = None,
    *,
    segments: Int[Array, "B T"],
    last: Int[Array, "B T"] | None = None,
    initial: Float[Array, "B Hv K V"] | None = None,
    levels: int = 2,
) -> tuple[Float[Array, "B T Hv V"], Float[Array, "B Hv K V"]]:
    """Compute `gated_delta` by `exact_step`, one token at a time; the gradient keeps a state a token."""
    tokens = (q, k, v, g) if beta is None else (q, k, v, g, beta)
    scan = functools.partial(jax.lax.scan, _add_token)
    return _scan(scan, tokens, segments, last=last, initial=initial, chunk=1, levels=levels)


def delta_step(
    state: Float[Array, "B Hv K V"],
    q: Float[Array, "B Hk K"],
    k: Float[Array, "B Hk K"],
    v: Float[Array, "B Hv V"],
    g: Float[Array, "B Hv"],
    beta: Float[Array, "B Hv"] | None = None,
) -> tuple[Float[Array, "B Hv V"], Float[Array, "B Hv K V"]]:
    """Add one token to each state, float32. Returns (out like v, state); g = beta = 0 leaves the state as is,
    without beta g = v = 0.

    Args: see `gated_delta`.
    """
    q, k = (jnp.repeat(x.astype(jnp.float32), v.shape[1] // k.shape[1], axis=1) for x in (q, k))
    state = jnp.exp(g)[..., None, None] * state
    correct = lambda: beta[..., None] * (v - _product("bhk,bhkv->bhv", k, state))
    u = v.astype(jnp.float32) if beta is None else correct()
    state = state + _product("bhk,bhv->bhkv", k, u)
    return _product("bhk,bhkv->bhv", q, state).astype(v.dtype), state


def exact_step(state: Float[Array, "B Hv K V"], *tokens: Array) -> tuple[Array, Array]:
    """Compute `delta_step`, whose bits depend neither on B nor on the program.

    Elsewhere XLA fuses products and sums as it likes, so that a state has other bits beside other states.
    """
    step = lambda _, x: jax.tree.map(lambda y: y[None], delta_step(*(y[0] for y in x)))
    row = tuple(x[None] for x in (state, *tokens))
    return jax.tree.map(lambda y: y[0], batch_invariant.map_tokens(step, (), row))


class _Stack(NamedTuple):
    """The states that the next token may continue."""

    states: Float[Array, "B Hv D K V"]
    """After the newest token's path up to each level; after the whole path from its deepest level on."""
    last: Int[Array, "B D"]
    """`last` of each level's tokens, 0 = the path has fewer levels."""


def _scan(
    scan: Callable[..., Any],
    tokens: tuple[Array, ...],
    segments: Int[Array, "B T"],
    *,
    last: Int[Array, "B T"] | None,
    initial: Float[Array, "B Hv K V"] | None,
    chunk: int,
    levels: int,
) -> tuple[Float[Array, "B T Hv V"], Float[Array, "B Hv K V"]]:
    """Apply scan(stack, chunks) -> (stack, out of each chunk) to the chunks of all rows."""
    (batch, length), (_, k, v, *_) = segments.shape, tokens
    levels, last = (1, segments) if last is None else (levels, last)
    pad = lambda x: jnp.pad(x, ((0, 0), (0, -length % chunk), *((0, 0),) * (x.ndim - 2)))
    q, k, v, g, *beta, segments, last = map(pad, (*tokens, segments, last))

    segments, last, (q, v, g, *beta) = clear_padding(segments, last, (q, v, g, *beta))

    # The state before the row is the first level's.
    shape = (batch, v.shape[2], levels, k.shape[3], v.shape[3])
    states = jnp.broadcast_to(jnp.float32(0) if initial is None else initial[:, :, None], shape)
    stack = _Stack(states, jnp.pad(last[:, :1], ((0, 0), (0, levels - 1))))
    stack, out = scan(stack, [split(x, chunk) for x in (q, k, v, g, *beta, segments, last)])
    out = jnp.moveaxis(out, 0, 1).reshape(batch, -1, *v.shape[2:])
    return out[:, :length], stack.states[:, :, -1]


@jax.custom_vjp
def _scan_chunks(stack: _Stack, chunks: list[Array]) -> tuple[_Stack, Float[Array, "N B C Hv V"]]:
    """Add N chunks to the states in order. The gradient keeps the states between chunks, named SAVED."""
    return jax.lax.scan(_add_chunk, stack, chunks)


def _scan_chunks_forward(stack: _Stack, chunks: list[Array]):
    def step(before, chunk):
        after, out = _add_chunk(before, chunk)
        return after, (out, before)

    stack, outputs = jax.lax.scan(step, stack, chunks)
    out, before = jax.tree.map(lambda x: checkpoint_name(x, SAVED), outputs)
    return (stack, out), (before, chunks)


def _scan_chunks_backward(residuals, gradients):
    """Pass the gradients of the states back from the last chunk, which is computed again."""
    *inputs, d_out = *residuals, gradients[1]

    def step(d_states, chunk):
        before, (*tokens, segments, last), d_out = chunk

        def add(states, tokens):
            after, out = _add_chunk(before._replace(states=states), [*tokens, segments, last])
            return after.states, out

        _, backward = jax.vjp(add, before.states, tokens)
        return backward((d_states, d_out))

    d_states, d_tokens = jax.lax.scan(step, gradients[0].states, (*inputs, d_out), reverse=True)
    return _Stack(d_states, None), [*d_tokens, None, None]


_scan_chunks.defvjp(_scan_chunks_forward, _scan_chunks_backward)


def _add_chunk(stack: _Stack, tokens: list[Array]) -> tuple[_Stack, Float[Array, "B C Hv V"]]:
    """Add a chunk to the states by products of its tokens."""
    *tokens, segments, last = tokens
    q, k, v, g, *beta = (jnp.moveaxis(x.astype(jnp.float32), 2, 1) for x in tokens)  # heads before tokens
    size, repeats = q.shape[2], v.shape[1] // k.shape[1]
    paths = follow_paths(stack.last, segments, last)

    # Decay along the path: of each token (G) and of the state before the chunk (e^c).
    inside = paths.inside[:, None]
    terms = jnp.where(inside, g[:, :, None], 0)
    later = jnp.tril(jnp.ones((size, size)), -1)
    decay = jnp.where(inside, jnp.exp(_product("bhil,lj->bhij", terms, later)), 0)
    decay, end_decay = decay[:, :, :size], decay[:, :, size:]
    fade = jnp.exp(jnp.sum(terms, axis=-1))[..., None]
    fade, end_fade = fade[:, :, :size], fade[:, :, size:]

    # The state before the chunk, read by keys and queries.
    heads = lambda x: jnp.repeat(x, repeats, axis=1)
    start = paths.before[:, None, :size]
    levels = range(start.shape[-1])
    of_level = lambda d, x: jnp.where(start[..., d, None], matmul(heads(x), stack.states[:, :, d]), 0)
    read = lambda x: sum(of_level(d, x) for d in levels)
    pairs = lambda x: heads(_product("bhik,bhjk->bhij", x, k)) * decay

    def correct(beta):
        predicted, beta = fade * read(k), beta[..., None]
        inverse = inverse_of_chunk(jnp.tril(beta * pairs(k), -1))
        return _product("bhij,bhjv->bhiv", inverse, beta * (v - predicted))

    # Corrections, and the outputs and states with them.
    u, out = correct(*beta) if beta else v, fade * read(q)
    out = out + _product("bhij,bhjv->bhiv", pairs(q), u)
    states = end_fade[..., None] * _select(paths.before[:, size:], stack.states)
    add = lambda d: _product("bhjk,bhjv->bhkv", heads(k), end_decay[:, :, d, :, None] * u)
    states += jnp.stack([add(d) for d in levels], axis=2)
    return _next_stack(states, paths), jnp.moveaxis(out, 1, 2).astype(tokens[2].dtype)


def _add_token(stack: _Stack, tokens: list[Array]) -> tuple[_Stack, Float[Array, "B 1 Hv V"]]:
    """Add a chunk of one token to the states by `exact_step`."""
    *tokens, segments, last = tokens
    paths = follow_paths(stack.last, segments, last)
    states = _select(paths.before, stack.states)
    out, state = exact_step(states[:, :, 0], *(x[:, 0] for x in tokens))
    changed = paths.inside[:, None, 1:, :, None]
    states = jnp.where(changed, state[:, :, None], states[:, :, 1:])
    return _next_stack(states, paths), out[:, None]


def _next_stack(states: Float[Array, "B Hv D K V"], paths: ChunkPaths) -> _Stack:
    """Return the stack after a chunk; NaN if it lacks a level, so that no wrong state is read."""
    return _Stack(jnp.where(paths.fit[:, None, None, None, None], states, jnp.nan), paths.last)


def _select(chosen: Bool[Array, "B N D"], states: Float[Array, "B Hv D K V"]) -> Float[Array, "B Hv N K V"]:
    """Return the N chosen states, or zeros, without rounding."""
    of_level = lambda d: jnp.where(chosen[:, None, :, d, None, None], states[:, :, d, None], 0)
    return sum(map(of_level, range(chosen.shape[2])))


@jax.custom_vjp
def inverse_of_chunk(a: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """Compute (I + A)^-1 of a strictly lower triangular A, whose size is a power of two, from its halves.

    With the inverses P and Q of the two diagonal blocks, and L the block below them, the block below P and Q
    is -Q L P. As exact as substitution, unlike the sum of powers of A, which overflows for equal keys.
    """
    size = a.shape[-1]
    if size <= INVERTED_BLOCK:
        return _inverse_of_block(a)
    half = size // 2
    p, q = inverse_of_chunk(jnp.stack([a[..., :half, :half], a[..., half:, half:]]))
    below = -matmul(matmul(q, a[..., half:, :half]), p)
    rows = [[p, jnp.zeros_like(p)], [below, q]]
    return jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)


def _inverse_of_block(a: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """Compute `inverse_of_chunk` by products of all rows, of which there are few: a small product is slow."""
    size = a.shape[-1]
    row = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size), a.shape)
    for s in (1 << n for n in range(size.bit_length() - 1)):
        merged = (row[:, None] // (2 * s) == row // (2 * s)) & (row[:, None] // s != row // s)
        lower = jnp.where(merged, a, 0)
        inverse -= lower if s == 1 else matmul(matmul(inverse, lower), inverse)
    return inverse


def _inverse_forward(a):
    inverse = inverse_of_chunk(a)
    return inverse, inverse


def _inverse_backward(inverse, d_inverse):
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-matmul(matmul(transposed, d_inverse), transposed),)


inverse_of_chunk.defvjp(_inverse_forward, _inverse_backward)
