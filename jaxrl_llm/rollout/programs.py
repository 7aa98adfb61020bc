"""What rollout runs on the device: a few jitted programs around the ring cache."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.models import TransformerConfig, decode
from jaxrl_llm.models.decode import DecodeWeights, RingCache
from jaxrl_llm.rollout.sampling import Draw, sample, uniforms
from jaxrl_llm.sharding.rules import ROLLOUT, fit
from jaxrl_llm.structs import Params

PromptKV = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]


class Slots(NamedTuple):
    """The state of S slots between chunks; the host's copy (numpy) is the master."""

    tokens: np.ndarray  # int32 [S], the next token to read
    positions: np.ndarray  # int32 [S], its place in the trajectory = tokens in the cache
    counts: np.ndarray  # int32 [S], response tokens written
    limits: np.ndarray  # int32 [S], response tokens at most
    active: np.ndarray  # bool [S]
    keys: np.ndarray  # uint32 [S, 2], key data of the sample


class Chunk(NamedTuple):
    """What one call of `decode` wrote. Slot s wrote tokens[:produced[s], s]."""

    tokens: jax.Array  # int32 [chunk, S]
    logprobs: jax.Array  # float32 [chunk, S], nats
    produced: jax.Array  # int32 [S]
    active: jax.Array  # bool [S]
    steps: jax.Array  # int32


class Ends(NamedTuple):
    """What ends a response or a chunk."""

    tokens: np.ndarray  # int32 [.], ids that end a response; -1 = none
    steps: np.ndarray  # int32, tokens a slot
    idle: np.ndarray  # int32, stop when no device's share of slots has more than this active


class Programs:
    """Jitted functions of one model on one mesh. `traces` counts compilations."""

    def __init__(self, config: TransformerConfig, mesh: Mesh, dtype: str, cache_dtype: str, chunk: int):
        self.config, self.mesh, self.chunk = config, mesh, chunk
        self.dtype, self.cache_dtype = jnp.dtype(dtype), jnp.dtype(cache_dtype)
        share = fit(mesh, ("batch",), (mesh.size,), ROLLOUT).shard_shape((mesh.size,))[0]
        self.ways = mesh.size // share  # slots are divided among so many devices
        self.traces = 0
        everywhere = NamedSharding(mesh, PartitionSpec())
        weights = decode.decode_shardings(config, mesh, ROLLOUT)
        self.publish = jax.jit(self._publish, out_shardings=weights)
        self.prefill = jax.jit(self._prefill)
        self.insert = jax.jit(self._insert, donate_argnums=0)
        self.resize = jax.jit(self._resize, static_argnames="length")
        self.decode = jax.jit(
            self._decode,
            static_argnames=("filtered",),
            donate_argnums=1,
            out_shardings=(None, everywhere),
        )
        self.uniforms = jax.jit(self._uniforms, out_shardings=everywhere)
        self.empty_cache = jax.jit(self._empty_cache, static_argnums=(0, 1))

    def _publish(self, params: Params) -> DecodeWeights:
        self.traces += 1
        return decode.decode_weights(params, self.dtype)

    def _empty_cache(self, slots: int, length: int) -> RingCache:
        self.traces += 1
        return self._lay_out(decode.ring_cache(self.config, slots, length, self.cache_dtype))

    def _prefill(self, weights: DecodeWeights, tokens, lengths) -> PromptKV:
        """Right-aligned prompts to their keys and values; any slot may want them, so no row is divided."""
        self.traces += 1
        kv = decode.prefill(self.config, weights, tokens, lengths)
        kv = jax.tree.map(lambda x: x.astype(self.cache_dtype), kv)
        return jax.tree.map(lambda x: self._constrain(x, None), kv)

    def _insert(self, cache: RingCache, prompts: PromptKV, rows) -> RingCache:
        """Slot s takes the keys and values of prompt rows[s]; -1 leaves it as it is."""
        self.traces += 1

        def put(old, new, axis):
            new = jax.lax.slice_in_dim(
                new, max(0, new.shape[axis] - cache.length), new.shape[axis], axis=axis
            )
            pad = [(0, 0)] * 4
            pad[axis] = (cache.length - new.shape[axis], 0)
            new = jnp.roll(jnp.pad(new, pad), cache.cursor, axis=axis)
            return jnp.where((rows >= 0)[:, None, None, None], new[jnp.maximum(rows, 0)], old)

        k = tuple(put(old, new, 3) for old, new in zip(cache.k, prompts[0], strict=True))
        v = tuple(put(old, new, 2) for old, new in zip(cache.v, prompts[1], strict=True))
        return self._lay_out(RingCache(k, v, cache.cursor))

    def _resize(self, cache: RingCache, take, length: int) -> RingCache:
        """A cache of other slots, or longer. take[s] = old slot, counted within its device's share."""
        self.traces += 1

        def move(x, axis):
            shares = x.reshape(self.ways, -1, *x.shape[1:])
            index = take.reshape(self.ways, -1)
            x = jax.vmap(lambda share, i: share[i])(shares, index).reshape(len(take), *x.shape[1:])
            pad = [(0, 0)] * 4
            pad[axis] = (0, length - cache.length)
            return jnp.pad(jnp.roll(x, -cache.cursor, axis=axis), pad)  # newest token at the old end

        k, v = tuple(move(x, 3) for x in cache.k), tuple(move(x, 2) for x in cache.v)
        return self._lay_out(RingCache(k, v, jnp.int32(cache.length % length)))

    def _uniforms(self, slots: Slots) -> jax.Array:
        """The numbers that draw a chunk's tokens, [chunk, S]. Apart from `decode`, whose compilation they
        would double, and vectorised over the chunk."""
        self.traces += 1
        index = slots.counts + np.arange(self.chunk)[:, None]
        return jax.vmap(uniforms, in_axes=(None, 0))(jax.random.wrap_key_data(slots.keys), index)

    def _decode(
        self, weights: DecodeWeights, cache: RingCache, slots: Slots, uniform, draw: Draw, ends, *, filtered
    ) -> tuple[RingCache, Chunk]:
        """Write tokens until ends.steps, or until no share of slots has more than ends.idle active."""
        self.traces += 1
        size = slots.tokens.shape[0]

        def unfinished(carry):
            step, _, state, _ = carry
            busiest = jnp.max(jnp.sum(state.active.reshape(self.ways, -1), axis=1))
            return (step < ends.steps) & (busiest > ends.idle)

        def body(carry):
            step, cache, state, (tokens, logprobs) = carry
            hidden, cache = decode.decode(self.config, weights, cache, state.tokens, state.positions)
            logits = decode.logits(self.config, weights, hidden)
            token, logprob = sample(logits, uniform[step], draw, filtered)
            one = state.active.astype(jnp.int32)
            counts = state.counts + one
            ended = jnp.any(token[:, None] == ends.tokens, axis=1) | (counts >= state.limits)
            state = state._replace(
                tokens=jnp.where(state.active, token, state.tokens),
                positions=state.positions + one,
                counts=counts,
                active=state.active & ~ended,
            )
            row = lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, step, 0)
            return step + 1, cache, state, (row(tokens, token), row(logprobs, logprob))

        out = (jnp.zeros((self.chunk, size), jnp.int32), jnp.zeros((self.chunk, size), jnp.float32))
        state = slots._replace(keys=jnp.zeros(()))
        step, cache, state, out = jax.lax.while_loop(unfinished, body, (jnp.int32(0), cache, state, out))
        chunk = Chunk(*out, state.counts - slots.counts, state.active, step)
        return self._lay_out(cache), chunk

    def _lay_out(self, cache: RingCache) -> RingCache:
        """Slots over the axes of the batch, heads over tensor."""
        spread = lambda x: self._constrain(x, "batch")
        return RingCache(*jax.tree.map(spread, (cache.k, cache.v)), cache.cursor)

    def _constrain(self, x: jax.Array, rows: str | None) -> jax.Array:
        axes = (rows, "kv_heads", None, None)
        return jax.lax.with_sharding_constraint(x, fit(self.mesh, axes, x.shape, ROLLOUT))
