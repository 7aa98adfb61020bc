"""What rollout runs on the device: a few jitted programs around the ring cache or the paged one."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import models
from jaxrl_llm.models import TransformerConfig, decode, paged
from jaxrl_llm.models.decode import DecodeWeights, RingCache
from jaxrl_llm.models.paged import PagedCache
from jaxrl_llm.rollout.native.sampling import Draw, sample, sample_strictly, uniforms
from jaxrl_llm.sharding.rules import ROLLOUT, sharding_for
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
    """Jitted functions of one model on one mesh. `traces` counts compilations.

    Args:
        page: tokens of a page of the paged cache; 0 = the ring cache.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        dtype: str,
        cache_dtype: str,
        chunk: int,
        strict: bool = False,
        page: int = 0,
    ):
        self.config, self.mesh, self.chunk, self.strict, self.page = config, mesh, chunk, strict, page
        self.dtype, self.cache_dtype = jnp.dtype(dtype), jnp.dtype(cache_dtype)
        share = sharding_for(mesh, ("batch",), (mesh.size,), ROLLOUT).shard_shape((mesh.size,))[0]
        self.ways = mesh.size // share  # slots are divided among so many devices
        self.traces = 0
        everywhere = NamedSharding(mesh, PartitionSpec())
        # Layouts are said of every result, so that one program's output is the next one's input however
        # it came about: a cache laid out otherwise would be another program.
        shapes = jax.eval_shape(lambda: decode.ring_cache(config, self.ways, 1, self.cache_dtype))
        cache = RingCache(*self._layouts(shapes, "batch"), everywhere)
        weights = decode.decode_shardings(config, mesh, ROLLOUT)
        prompts = self._layouts(shapes, None)
        if page:
            cache = self.page_layouts()
        self.layouts = {"weights": weights, "cache": cache, "prompts": prompts, "everywhere": everywhere}
        self.publish = jax.jit(self._publish, out_shardings=weights)
        self.zero_weights = jax.jit(self._zero_weights, out_shardings=weights)
        self.empty_cache = jax.jit(self._empty_cache, static_argnums=(0, 1), out_shardings=cache)
        self.write = jax.jit(self._write, donate_argnums=0, out_shardings=cache)
        self.copy = jax.jit(self._copy, donate_argnums=0, out_shardings=cache)
        self.prefill = jax.jit(self._prefill, out_shardings=prompts)
        self.spread = jax.jit(self._spread, static_argnames="width", out_shardings=cache[:2])
        self.insert = jax.jit(self._insert, donate_argnums=0, out_shardings=cache)
        self.resize = jax.jit(self._resize, static_argnames="length", out_shardings=cache)
        self.decode = jax.jit(
            self._decode,
            static_argnames=("filtered",),
            donate_argnums=1,
            out_shardings=(cache, everywhere),
        )
        self.uniforms = jax.jit(self._uniforms, out_shardings=everywhere)

    def _layouts(self, shapes: RingCache, rows: str | None) -> PromptKV:
        """Shardings of keys and values: rows over the axes of the batch or nowhere, heads over tensor."""

        def lie(x):
            axes = (rows, "kv_heads", None, None)
            return sharding_for(self.mesh, (None,) * (x.ndim - 4) + axes, x.shape, ROLLOUT)

        return jax.tree.map(lie, (shapes.k, shapes.v))

    def page_layouts(self) -> PagedCache:
        """Shardings: each device share of the slots has pages of its own, heads are over tensor."""
        shapes = jax.eval_shape(
            lambda: paged.paged_cache(self.config, self.ways, self.page, self.cache_dtype)
        )
        lie = lambda x: ("batch", "kv_heads", *(None,) * (x.ndim - 2))
        return jax.tree.map(lambda x: sharding_for(self.mesh, lie(x), x.shape, ROLLOUT), shapes)

    def _publish(self, params: Params) -> DecodeWeights:
        self.traces += 1
        return decode.decode_weights(params, self.dtype, self.layouts["weights"])

    def _zero_weights(self) -> DecodeWeights:
        """As many zeros as `publish` gives weights."""
        shapes = jax.eval_shape(self._publish, models.abstract(self.config))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def _empty_cache(self, slots: int, length: int) -> RingCache | PagedCache:
        """A ring of so many slots and tokens; or so many pages, of so many tokens."""
        self.traces += 1
        if self.page:
            return paged.paged_cache(self.config, slots, length, self.cache_dtype)
        return decode.ring_cache(self.config, slots, length, self.cache_dtype)

    def _prefill(self, weights: DecodeWeights, tokens, lengths) -> PromptKV:
        """Right-aligned prompts to their keys and values; any slot may want them, so no row is divided."""
        self.traces += 1
        kv = decode.prefill(self.config, weights, tokens, lengths, self.strict)
        narrow = self.cache_dtype.itemsize == 1  # 8 bits get their scales when they are written
        return jax.tree.map(lambda x: x.astype(self.dtype if narrow else self.cache_dtype), kv)

    def _write(self, cache: PagedCache, prompts: PromptKV, lengths, numbers) -> PagedCache:
        self.traces += 1
        return paged.write(self.config, cache, prompts, lengths, numbers)

    def _copy(self, cache: PagedCache, sources, targets) -> PagedCache:
        self.traces += 1
        return paged.copy(self.config, cache, sources, targets)

    def _spread(self, prompts: PromptKV, rows, *, width: int) -> PromptKV:
        """A copy of prompt rows[s] for slot s, `width` columns wide. Apart from `insert`: its programs
        are as many as shapes of prompts plus lengths of caches then, not as many as their product."""
        self.traces += 1

        def take(x, axis):
            x = jnp.take(x, rows, axis=-4, mode="clip")
            return jnp.pad(x, _at(x, axis, (width - x.shape[axis], 0)))

        k, v = prompts
        return tuple(take(x, -1) for x in k), tuple(take(x, -2) for x in v)

    def _insert(self, cache: RingCache, prompts: PromptKV, chosen) -> RingCache:
        """The chosen slots take their prompt's keys and values, the newest right before the cursor."""
        self.traces += 1

        def put(old, new, axis):
            width = new.shape[axis]
            new = jax.lax.slice_in_dim(new, max(0, width - cache.length), width, axis=axis % new.ndim)
            new = jnp.pad(new, _at(new, axis, (cache.length - new.shape[axis], 0)))
            return jnp.where(chosen[:, None, None, None], jnp.roll(new, cache.cursor, axis=axis), old)

        k = tuple(put(old, new, -1) for old, new in zip(cache.k, prompts[0], strict=True))
        v = tuple(put(old, new, -2) for old, new in zip(cache.v, prompts[1], strict=True))
        return RingCache(k, v, cache.cursor)

    def _resize(self, cache: RingCache, take, *, length: int) -> RingCache:
        """A cache of other slots, or longer. take[s] = old slot, counted within its device's share."""
        self.traces += 1
        index = take.reshape(self.ways, -1)

        def move(x, axis):
            *depth, slots, heads, rows, columns = x.shape
            shares = x.reshape(-1, self.ways, slots // self.ways, heads, rows, columns)
            pick = jax.vmap(jax.vmap(lambda share, i: share[i]), in_axes=(0, None))  # layers, devices
            x = pick(shares, index).reshape(*depth, len(take), heads, rows, columns)
            x = jnp.roll(x, -cache.cursor, axis=axis)  # newest token at the old end
            return jnp.pad(x, _at(x, axis, (0, length - cache.length)))

        k, v = tuple(move(x, -1) for x in cache.k), tuple(move(x, -2) for x in cache.v)
        return RingCache(k, v, jnp.int32(cache.length % length))

    def _uniforms(self, slots: Slots) -> jax.Array:
        """The numbers that draw a chunk's tokens, [chunk, S]. Apart from `decode`, whose compilation they
        would double, and vectorised over the chunk."""
        self.traces += 1
        index = slots.counts + np.arange(self.chunk)[:, None]
        return jax.vmap(uniforms, in_axes=(None, 0))(jax.random.wrap_key_data(slots.keys), index)

    def _decode(
        self, weights: DecodeWeights, cache, slots: Slots, uniform, draw: Draw, ends, table=None, *, filtered
    ) -> tuple[RingCache | PagedCache, Chunk]:
        """Write tokens until ends.steps, or until no share of slots has more than ends.idle active.

        Args:
            table: int32 [S, N], each slot's pages, of the paged cache.
        """
        self.traces += 1
        size = slots.tokens.shape[0]

        def unfinished(carry):
            step, _, state, _ = carry
            busiest = jnp.max(jnp.sum(state.active.reshape(self.ways, -1), axis=1))
            return (step < ends.steps) & (busiest > ends.idle)

        def body(carry):
            step, cache, state, (tokens, logprobs) = carry
            place = (state.tokens, state.positions)
            if table is None:
                hidden, cache = decode.decode(self.config, weights, cache, *place, self.strict)
            else:
                hidden, cache = paged.decode(self.config, weights, cache, table, *place, state.active)
            logits = decode.logits(self.config, weights, hidden, self.strict)
            token, logprob = (sample_strictly if self.strict else sample)(
                logits, uniform[step], draw, filtered
            )
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
        return cache, chunk


def _at(x: jax.Array, axis: int, pad: tuple[int, int]) -> list[tuple[int, int]]:
    """Padding of one dim."""
    return [pad if i == axis % x.ndim else (0, 0) for i in range(x.ndim)]
