"""The jitted programs of the native engine: prefill, cache updates, and decoding in chunks of tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import models
from jaxrl_llm.models import TransformerConfig, cache_copies, decode, paged
from jaxrl_llm.models.cache_copies import pad_widths, roll
from jaxrl_llm.models.decode import DecodeWeights, PromptCache, RingCache
from jaxrl_llm.models.experts.router import route_spec
from jaxrl_llm.models.paged import PagedCache
from jaxrl_llm.models.slot_states import set_rows, take_rows
from jaxrl_llm.rollout.native.drafts import accept_drafts, propose_drafts
from jaxrl_llm.rollout.native.sampling import Filters, sample_tokens, uniforms
from jaxrl_llm.rollout.native.slots import ChunkInputs, ChunkOutput, RowsToExtend, SlotState
from jaxrl_llm.sharding.compile import compiler_options
from jaxrl_llm.sharding.rules import ROLLOUT, sharding_for, with_shardings
from jaxrl_llm.structs import Params

FAR = 2**30  # a column past all others, so that nothing is written


class Programs:
    """Jitted functions of one model on one mesh.

    Args:
        chunk: tokens that one call of `decode` generates at most.
        page_size: tokens of a page of the paged cache; 0 = the ring cache.
        routes: prefill and decoding return routes (`models.experts.router.route_spec`).
        kept: programs of the pages that hold conversations between turns (`kept.py`); None = nothing is kept.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        dtype: str,
        cache_dtype: str,
        *,
        chunk: int,
        strict: bool = False,
        page_size: int = 0,
        routes: bool = False,
        kept: Programs | None = None,
    ):
        self.config, self.mesh, self.chunk = config, mesh, chunk
        self.strict, self.page_size, self.kept = strict, page_size, kept
        self.route = route_spec(config) if routes else None
        self.dtype, self.cache_dtype = jnp.dtype(dtype), jnp.dtype(cache_dtype)
        per_shard = sharding_for(mesh, ("batch",), (mesh.size,), ROLLOUT).shard_shape((mesh.size,))[0]
        self.num_shards = mesh.size // per_shard  # that the slots are divided into
        self.has_states = config.num_recurrent_layers > 0
        self.compile_count = 0
        replicated = NamedSharding(mesh, PartitionSpec())
        # Every result has an explicit sharding, so that one program's output is the next one's input on
        # every path: a cache of another sharding would be another program.
        shapes = jax.eval_shape(lambda: self._init_ring(self.num_shards, 1))
        of_slots = self._kv_shardings(shapes, "batch")
        ring = RingCache(*of_slots[:2], replicated, of_slots[2])
        cache = self.page_shardings()._replace(states=of_slots[2]) if page_size else ring
        weights = decode.decode_shardings(config, mesh, ROLLOUT)
        prompts = self._kv_shardings(shapes, None)
        self.shardings = {"weights": weights, "cache": cache, "prompts": prompts, "replicated": replicated}
        self.shardings |= {"ring": ring, "gathered": of_slots}
        self.publish = jax.jit(self._publish, out_shardings=weights)
        self.empty_cache = jax.jit(self._empty_cache, static_argnums=(0, 1, 2), out_shardings=cache)
        self.write_pages = jax.jit(self._write_pages, donate_argnums=0, out_shardings=cache)
        self.copy_pages = jax.jit(self._copy_pages, donate_argnums=0, out_shardings=cache)
        # Programs that run the model have compiler options.
        options = compiler_options(mesh)
        jit_forward = functools.partial(
            jax.jit, donate_argnums=1, out_shardings=(cache, replicated), compiler_options=options
        )
        self.extend = jit_forward(self._extend)
        self.prefill = jax.jit(self._prefill, out_shardings=(prompts, replicated), compiler_options=options)
        self.gather = jax.jit(self._gather, static_argnames="length", out_shardings=of_slots)
        self.insert = jax.jit(self._insert, donate_argnums=0, out_shardings=cache)
        self.resize = jax.jit(self._resize, static_argnames="length", out_shardings=cache)
        self.decode = jit_forward(self._decode, static_argnames=("filters",))
        self.decode_drafts = jit_forward(self._decode_drafts, static_argnames=("num_drafts", "filters"))
        self.uniforms = jax.jit(self._uniforms, out_shardings=replicated)
        self.read = jax.jit(self._read, donate_argnums=0, out_shardings=ring)
        self.write = jax.jit(self._write, donate_argnums=1, out_shardings=cache)

    def _kv_shardings(self, shapes: RingCache, rows: str | None) -> PromptCache:
        """Return shardings of keys, values and states: rows over the batch axes or replicated, heads over
        tensor."""

        def sharding(x):
            axes = (rows, "kv_heads", None, None)
            return sharding_for(self.mesh, (None,) * (x.ndim - 4) + axes, x.shape, ROLLOUT)

        return jax.tree.map(sharding, (shapes.k, shapes.v, shapes.states))

    def page_shardings(self) -> PagedCache:
        """Return shardings of pages without states: pages over the shards of the slots, heads over tensor."""
        shapes = jax.eval_shape(
            lambda: paged.init_paged_cache(
                self.config, self.num_shards, self.page_size, self.cache_dtype, strict=self.strict
            )
        )
        axes = lambda x: ("batch", "kv_heads", *(None,) * (x.ndim - 2))
        return jax.tree.map(lambda x: sharding_for(self.mesh, axes(x), x.shape, ROLLOUT), shapes)

    def _publish(self, params: Params) -> DecodeWeights:
        self.compile_count += 1
        return decode.decode_weights(params, self.dtype, self.shardings["weights"])

    def abstract_weights(self) -> DecodeWeights:
        """Return shapes, types and shardings of what `publish` returns."""
        shapes = jax.eval_shape(self._publish, models.abstract(self.config))
        return with_shardings(shapes, self.shardings["weights"])

    def _empty_cache(self, count: int, length: int, rows: int = 0) -> RingCache | PagedCache:
        """Return a ring cache of `count` slots, or a paged one of `count` pages, of `length` tokens each.

        Args:
            rows: of states beside the pages, of all shards.
        """
        self.compile_count += 1
        if not self.page_size:
            return self._init_ring(count, length)
        pages = paged.init_paged_cache(self.config, count, length, self.cache_dtype, strict=self.strict)
        return pages._replace(states=decode.empty_states(self.config, rows, self.inputs_dtype))

    @property
    def inputs_dtype(self) -> jnp.dtype:
        """Return the type of keys, values and inputs of convolutions between prefill and the cache."""
        return self.dtype if self.cache_dtype.itemsize == 1 else self.cache_dtype  # pages make 8 bits

    def _init_ring(self, slots: int, length: int) -> RingCache:
        return decode.init_ring_cache(self.config, slots, length, self.cache_dtype, strict=self.strict)

    def _prefill(self, weights: DecodeWeights, tokens, lengths) -> tuple[PromptCache, jax.Array | None]:
        """Compute keys and values of left-padded prompts, and routes. Rows are replicated: any slot may take
        them."""
        self.compile_count += 1
        kv, routes = decode.prefill(self.config, weights, tokens, lengths, strict=self.strict)
        cast = lambda x: x.astype(self.inputs_dtype)
        states = tuple(state._replace(inputs=cast(state.inputs)) for state in kv[2])
        return (*jax.tree.map(cast, kv[:2]), states), None if self.route is None else routes

    def _write_pages(self, cache: PagedCache, prompts: PromptCache, lengths, *places) -> PagedCache:
        """Write prompts to pages, and their states to rows.

        Args:
            places: tables of `paged.write_prompts`, and rows of states [R] in the same order; None = none.
        """
        self.compile_count += 1
        (tables, rows), (k, v, states) = places, prompts
        pages, of_shard = cache._replace(states=()), (k, v, ())
        pages = paged.write_prompts(self.config, pages, of_shard, lengths, tables=tables)
        states = jax.tree.map(lambda x: jnp.concatenate([x] * self.num_shards, axis=-4), states)
        return pages._replace(states=self._put_states(cache.states, rows, states))

    def _copy_pages(self, cache: PagedCache, *copies) -> PagedCache:
        """Copy pages, (sources, targets) of `paged.copy_pages`, and rows of states, (sources, targets)."""
        self.compile_count += 1
        sources, targets, *rows = copies
        pages = paged.copy_pages(self.config, cache._replace(states=()), sources, targets)
        states = self._take_states(cache.states, rows[0])
        return pages._replace(states=self._put_states(cache.states, rows[1], states))

    def _read(self, ring: RingCache, pages: PagedCache, *slots) -> RingCache:
        """Copy kept turns from pages to the ring.

        Args:
            slots: arguments of `cache_copies.read_pages`, and the row of each slot's state.
        """
        self.compile_count += 1
        (*slots, chosen, rows), (bare, pages_alone) = slots, (x._replace(states=()) for x in (ring, pages))
        choose = lambda old, new: jnp.where(chosen[:, None, None, None], new, old)
        states = jax.tree.map(choose, ring.states, self._take_states(pages.states, rows))
        ring = cache_copies.read_pages(self.config, bare, pages_alone, *slots, chosen)
        return ring._replace(states=states)

    def _write(self, ring: RingCache, pages: PagedCache, *copies) -> PagedCache:
        """Copy ended turns from the ring to pages.

        Args:
            copies: arguments of `cache_copies.write_pages`, and the row for each slot's state.
        """
        self.compile_count += 1
        (*copies, rows), (bare, pages_alone) = copies, (x._replace(states=()) for x in (ring, pages))
        states = self._put_states(pages.states, rows, ring.states)
        return cache_copies.write_pages(self.config, bare, pages_alone, *copies)._replace(states=states)

    def _take_states(self, states, rows):
        """Return the states of these rows; None = all, as of the ring."""
        return states if rows is None else jax.tree.map(lambda x: take_rows(x, rows, self.num_shards), states)

    def _put_states(self, states, rows, new):
        """Return all rows of states, these ones replaced; None = all."""
        put = lambda x, y: set_rows(x, rows, y, self.num_shards)
        return new if rows is None else jax.tree.map(put, states, new)

    def _extend(
        self, weights: DecodeWeights, cache: PagedCache, rows: RowsToExtend
    ) -> tuple[PagedCache, jax.Array | None]:
        """Prefill tokens after the tokens in the pages; return the cache and the new tokens' routes."""
        self.compile_count += 1
        table, tokens, lengths, starts, states = rows
        at = jnp.arange(tokens.shape[1])
        positions = jnp.where(at < lengths[:, None], starts[:, None] + at, -1)
        own = cache._replace(states=self._take_states(cache.states, states))
        _, new, routes, _ = paged.decode_paged(
            self.config, weights, own, table, tokens=tokens, positions=positions, strict=self.strict
        )
        cache = new._replace(states=self._put_states(cache.states, states, new.states))
        return cache, None if self.route is None else routes

    def _gather(self, prompts: PromptCache, rows, *, length: int) -> PromptCache:
        """Copy prompt rows[s] for slot s, padded to `length` columns.

        Separate from `insert`: so there is one program per prefill shape and one per cache length, not one
        per combination.
        """
        self.compile_count += 1

        def take(x, axis):
            flat = x.reshape(-1, *x.shape[-3:])  # gathers of a later dim would be transposed
            index = jnp.arange(0, len(flat), x.shape[-4])[:, None] + jnp.maximum(rows, 0)
            x = flat[index].reshape(*x.shape[:-4], len(rows), *x.shape[-3:])
            return x if axis is None else jnp.pad(x, pad_widths(x, axis, (length - x.shape[axis], 0)))

        k, v, states = prompts
        states = jax.tree.map(lambda x: take(x, None), states)
        return tuple(take(x, -1) for x in k), tuple(take(x, -2) for x in v), states

    def _insert(self, cache: RingCache, prompts: PromptCache, chosen) -> RingCache:
        """Insert the prompts into the chosen slots, the newest key and value right before the cursor."""
        self.compile_count += 1

        choose = lambda old, new: jnp.where(chosen[:, None, None, None], new, old)

        def put(old, new, axis):
            width, columns = new.shape[axis], old.shape[axis]
            new = jax.lax.slice_in_dim(new, max(0, width - columns), width, axis=axis % new.ndim)
            new = jnp.pad(new, pad_widths(new, axis, (columns - new.shape[axis], 0)))
            return choose(old, roll(new, jnp.mod(cache.cursor, columns), axis))

        k = tuple(put(old, new, -1) for old, new in zip(cache.k, prompts[0], strict=True))
        v = tuple(put(old, new, -2) for old, new in zip(cache.v, prompts[1], strict=True))
        return RingCache(k, v, cache.cursor, jax.tree.map(choose, cache.states, prompts[2]))

    def _resize(self, cache: RingCache, old_slots, *, length: int) -> RingCache:
        """Return a longer cache, or one of fewer slots: slot s was old_slots[s] of its shard."""
        self.compile_count += 1

        new = jax.eval_shape(lambda: self._init_ring(len(old_slots), length))

        def move(old, new, axis):
            columns = old.shape[axis]
            x = take_rows(old, old_slots, self.num_shards)
            x = roll(x, jnp.mod(cache.length - cache.cursor, columns), axis)  # newest token at the old end
            return jnp.pad(x, pad_widths(x, axis, (0, new.shape[axis] - columns)))

        k = tuple(move(old, of_new, -1) for old, of_new in zip(cache.k, new.k, strict=True))
        v = tuple(move(old, of_new, -2) for old, of_new in zip(cache.v, new.v, strict=True))
        return RingCache(k, v, jnp.int32(cache.length), self._take_states(cache.states, old_slots))

    def _uniforms(self, slots: SlotState) -> jax.Array:
        """Return the uniform numbers of a chunk, [chunk, S].

        Separate from `decode`, whose compile time they would double, and vectorised over the chunk.
        """
        self.compile_count += 1
        index = slots.counts + np.arange(self.chunk)[:, None]
        return jax.vmap(uniforms, in_axes=(None, 0))(jax.random.wrap_key_data(slots.keys), index)

    def _decode(
        self, weights: DecodeWeights, cache, slots: SlotState, inputs: ChunkInputs, *, filters: Filters
    ) -> tuple[RingCache | PagedCache, ChunkOutput]:
        """Generate tokens until a condition of `inputs.stop` ends the chunk."""
        self.compile_count += 1
        uniform, params, stop, table, _, rows = inputs
        num_slots, states = slots.tokens.shape[0], cache.states
        cache = cache._replace(states=self._take_states(states, rows))

        def unfinished(carry):
            step, _, state, _ = carry
            return (step < stop.max_steps) & (self._busiest(state) > stop.min_active)

        def body(carry):
            # One token for each active slot.
            step, cache, state, out = carry
            positions = jnp.where(state.active, state.positions, -1)
            tokens = state.tokens[:, None]
            logits, cache, routes, _ = self._logits(
                weights, cache, table, tokens=tokens, positions=positions[:, None]
            )
            token, *rest = sample_tokens(logits, uniform[step], params, filters, strict=self.strict)
            one = state.active.astype(jnp.int32)
            counts = state.counts + one
            ended = jnp.any(token[:, None] == stop.token_ids, axis=1) | (counts >= state.limits)
            state = state._replace(
                tokens=jnp.where(state.active, token, state.tokens),
                positions=state.positions + one,
                counts=counts,
                active=state.active & ~ended,
            )
            put = lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, step, 0)
            new = token, *rest, None if routes is None else routes[:, 0]
            return step + 1, cache, state, jax.tree.map(put, out, new)

        state, out = slots._replace(keys=jnp.zeros(())), self._empty_output(num_slots, filters)
        step, cache, state, out = jax.lax.while_loop(unfinished, body, (jnp.int32(0), cache, state, out))
        cache = cache._replace(states=self._put_states(states, rows, cache.states))
        return cache, ChunkOutput(*out, state.counts - slots.counts, state.active, step)

    def _decode_drafts(
        self, weights, cache, slots: SlotState, inputs: ChunkInputs, *, num_drafts, filters
    ) -> tuple[PagedCache, ChunkOutput]:
        """Generate the same tokens as `_decode` in fewer steps: a step may keep several tokens of a draft.

        Ends once any slot has stop.max_steps tokens. Keys and values of rejected drafts stay in the pages,
        past the slot's length, until other tokens overwrite them.
        """
        self.compile_count += 1
        uniform, params, stop, table, texts, of_states = inputs
        states, cache = cache.states, cache._replace(states=self._take_states(cache.states, of_states))
        own_start = texts.shape[1] - table.shape[1] * self.page_size  # C - N page
        rows, places = jnp.arange(len(slots.tokens))[:, None], jnp.arange(num_drafts + 1)

        def unfinished(carry):
            _, _, state, *_ = carry
            longest = jnp.max(jnp.where(state.active, state.counts - slots.counts, 0))
            return (longest < stop.max_steps) & (self._busiest(state) > stop.min_active)

        def body(carry):
            step, cache, state, texts, counted, out = carry
            # Read the last token and its draft; places past the end or without a draft are padding.
            drafts = propose_drafts(texts, own_start, state.positions, num_drafts)
            tokens = jnp.concatenate([state.tokens[:, None], drafts], axis=1)
            at = (state.counts - slots.counts)[:, None] + places  # in the chunk
            end = jnp.minimum(stop.max_steps, state.limits - slots.counts)[:, None]
            read = state.active[:, None] & (at < end) & (tokens >= 0)
            positions = state.positions[:, None] + places
            logits, new, routes, inputs = self._logits(
                weights, cache, table, tokens=jnp.maximum(tokens, 0), positions=jnp.where(read, positions, -1)
            )
            numbers = uniform[jnp.minimum(at, self.chunk - 1), rows].ravel()
            sampled = sample_tokens(logits, numbers, params, filters, strict=self.strict)
            drawn, *rest = jax.tree.map(lambda x: x.reshape(*at.shape, *x.shape[1:]), sampled)
            state, kept = accept_drafts(state, drafts, drawn, read, stop_ids=stop.token_ids)
            # States cannot go back: they are computed again, for the tokens that are kept.
            after = paged.states_after(
                self.config, weights, cache.states, inputs, valid=places < kept[:, None], strict=self.strict
            )
            cache = new._replace(states=after)
            to_keep = lambda column: jnp.where(places < kept[:, None], column, FAR)
            texts = texts.at[rows, to_keep(own_start + positions + 1)].set(drawn, mode="drop")
            put = lambda x, y: x.at[to_keep(at), rows].set(y, mode="drop")
            out = jax.tree.map(put, out, (drawn, *rest, routes))
            counted += jnp.stack([jnp.sum(read[:, 1:]), jnp.sum(jnp.maximum(kept - 1, 0))])
            return step + 1, cache, state, texts, counted, out

        state, out = slots._replace(keys=jnp.zeros(())), self._empty_output(len(slots.tokens), filters)
        carry = jnp.int32(0), cache, state, texts, jnp.zeros(2, jnp.int32), out
        step, cache, state, _, counted, out = jax.lax.while_loop(unfinished, body, carry)
        cache = cache._replace(states=self._put_states(states, of_states, cache.states))
        return cache, ChunkOutput(*out, state.counts - slots.counts, state.active, step, counted)

    def _logits(self, weights: DecodeWeights, cache, table, *, tokens, positions):
        """Read tokens [S, T].

        Returns: (logits [S T, V] of the tokens that follow, cache, routes [S, T, ...], recurrences' inputs).

        Args:
            table: the page table; None = the ring cache, which reads one token.
        """
        c = self.config
        if table is None:
            step = *decode.decode_ring(c, weights, cache, tokens[:, 0], positions[:, 0], self.strict), ()
        else:
            step = paged.decode_paged(c, weights, cache, table, tokens, positions, self.strict)
        hidden, cache, routes, inputs = step
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits = decode.next_token_logits(c, weights, hidden, self.strict)
        return logits, cache, None if self.route is None else routes, inputs

    def _busiest(self, state: SlotState) -> jax.Array:
        """Return the largest number of active slots in a shard."""
        return jnp.max(jnp.sum(state.active.reshape(self.num_shards, -1), axis=1))

    def _empty_output(self, num_slots: int, filters: Filters) -> tuple[jax.Array | None, ...]:
        """Return zeros for the first fields of a `ChunkOutput`."""
        zeros = lambda dtype, *dims: jnp.zeros((self.chunk, num_slots, *dims), dtype)
        kept = zeros(jnp.int32, filters.num_kept) if filters.num_kept else None
        routes = None if self.route is None else zeros(self.route.dtype, *self.route.shape)
        return zeros(jnp.int32), zeros(jnp.float32), kept, routes
