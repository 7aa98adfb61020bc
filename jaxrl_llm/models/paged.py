"""The paged KV cache on the device (PagedAttention, arXiv 2309.06180): layout, writes and decode attention.

A page holds `page_size` consecutive tokens of one layer. A page table maps each slot to its pages; the host
allocates them (`rollout/native/paged_cache.py`). All layers are stored in one array, so that a scan over
layers reads and writes it in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num, UInt

from jaxrl_kernels.batch_invariant import RingKeys, invariant_attention
from jaxrl_kernels.chips import LANES
from jaxrl_kernels.chunks import map_chunks
from jaxrl_kernels.decode_attention import reference
from jaxrl_kernels.decode_attention.api import decode_attention, write_token
from jaxrl_kernels.decode_attention.chunks import chunk_attention
from jaxrl_kernels.dispatch import choose, device
from jaxrl_kernels.flash_attention.reference import dense_attention
from jaxrl_kernels.flash_attention.sinks import add_sinks
from jaxrl_kernels.flash_attention.spec import NO_WINDOW, AttentionSpec
from jaxrl_llm.models.attention import attention_scale, layer_rope, rope_fn, sinks_of
from jaxrl_llm.models.block import block, final_norm_fn
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.decode import DecodeWeights, PromptCache, apply_layers, embed_tokens
from jaxrl_llm.models.indexer import (
    IndexInputs,
    block_of_queries,
    choose_exactly,
    choose_keys,
    key_room,
    pack_keys,
    unpack_keys,
)
from jaxrl_llm.models.mla import DecodeLatents, cache_dims
from jaxrl_llm.models.recurrent import RECURRENT, State
from jaxrl_llm.models.rows import per_token_call
from jaxrl_llm.models.slot_states import make_state_fn
from jaxrl_llm.sharding.rules import ROLLOUT, current_spec

NULL_PAGE = 0
"""The page that inactive slots write to and that pads page tables; it is never read."""
NO_PAGE = 2**30
"""Target of a copy that is skipped: an index past all pages, so that nothing is written."""


class PagedCache(NamedTuple):
    """Pages of the L layers with keys and values. X = num_shards L P: each shard of the slots has P pages a
    layer, page n of layer l at l P + n.

    R is head_dim, on TPU rounded up to LANES: memory is padded to LANES anyway, and otherwise the compiler
    sometimes lays out the pages with other dims last, and copies them all for the kernels.
    """

    k: Num[Array, "X K page R"]
    v: Num[Array, "X K page R"] | None  # None: k holds latents (`models.mla`), which also serve as values
    k_scales: Float[Array, "X K page"] | None  # of 8-bit pages
    v_scales: Float[Array, "X K page"] | None
    states: tuple[State, ...] = ()  # rows of states (`slot_states`), in the layout of `RingCache`


def init_paged_cache(
    c: TransformerConfig, num_pages: int, page_size: int, dtype: DTypeLike, *, strict: bool = False
) -> PagedCache:
    """Return zeros for `num_pages` pages of `page_size` tokens, counted over all shards of the slots.

    A strict cache holds keys and values instead of latents.
    """
    lanes = LANES if device()[0] == "tpu" else 1
    heads, size = cache_dims(c, strict)
    shape = (c.num_kv_layers * num_pages, heads, page_size, -(-size // lanes) * lanes)
    quantized = jnp.dtype(dtype).itemsize == 1
    scales = lambda: jnp.zeros(shape[:3], jnp.float32) if quantized else None
    if c.mla and not strict:
        return PagedCache(jnp.zeros(shape, dtype), None, scales(), None)
    return PagedCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), scales(), scales())


def decode_paged(
    c: TransformerConfig,
    weights: DecodeWeights,
    cache: PagedCache,
    table: Int[Array, "S N"],
    tokens: Int[Array, "S T"],
    positions: Int[Array, "S T"],
    strict: bool = False,
) -> tuple[Float[Array, "S T D"], PagedCache, UInt[Array, "S T sparse chosen"] | None, tuple]:
    """Feed T tokens per slot through the model, after the tokens in the paged cache.

    Args:
        cache: its states are of the slots.
        table: pages of each slot, in order, counted within its shard.
        tokens: the next tokens of each slot; T = 1 in decoding.
        positions: their positions in the sequence, 0, 1, ...; -1 = padding, which writes to NULL_PAGE.

    Returns: (hidden states after the final norm, cache with the tokens' keys and values and the states after
        them, their routes, inputs of the recurrences for `states_after`).
    """
    by_row, valid = per_token_call(strict), positions >= 0
    tables = by_row(rope_fn(c), None, jnp.maximum(positions, 0))

    def layer(model, carry, w, numbers, array, index):
        x, cache, states, chosen = carry
        rope = layer_rope(model, tables, numbers)
        run = partial(
            block, model, w, x, rope, strict=strict, valid=valid, rules=ROLLOUT, layer_inputs=numbers.inputs
        )
        if not model.mixes:
            x, _, routing = run(attention_fn=None)
            return (x, cache, states, chosen), None, routing
        if model.kind in RECURRENT:
            step = make_state_fn(model, w, states, valid, at=(array, index), strict=strict)
            x, (states, inputs), routing = run(attention_fn=step)
            return (x, cache, states, chosen), inputs, routing
        layer_index, sinks = index[0] if index else array, sinks_of(w)
        attend_pages = partial(_shard_mapped, c, partial(_attend, strict, sinks))

        # Sinks join the softmax after attention to the pages.
        def attend(*new):
            new, choice = _split_choice(model, new, chosen)
            (out, lse, made), new = attend_pages(
                cache, new, table, positions, layer_index, numbers.window, choice
            )
            return out if sinks is None or strict else add_sinks(out, lse, sinks)[0], (new, made)

        attend = DecodeLatents(attend) if cache.v is None else attend
        x, (cache, made), routing = run(attention_fn=attend)
        return (x, cache, states, made if c.index_layers else None), None, routing

    x, inputs = embed_tokens(c, weights, tokens, strict)
    shape = (*tokens.shape, table.shape[1] * cache.k.shape[2])
    carry = x, cache._replace(states=()), cache.states, jnp.zeros(shape, bool) if c.index_layers else None
    (x, pages, states, _), (_, mixed), routes = apply_layers(c, weights.layers, layer, carry, inputs=inputs)
    return by_row(final_norm_fn(c), weights.norm, x), pages._replace(states=states), routes, tuple(mixed)


def states_after(
    c: TransformerConfig,
    weights: DecodeWeights,
    states: tuple[State, ...],
    inputs: tuple,
    *,
    valid: Bool[Array, "S T"],
    strict: bool = False,
) -> tuple[State, ...]:
    """Return the states after some of the tokens that `decode_paged` has read.

    Args:
        states: before these tokens.
        inputs: returned by `decode_paged`.
        valid: the tokens, the first ones of each slot.
    """

    def layer(model, states, w, numbers, array, index):
        if model.kind not in RECURRENT:
            return states, None, None
        take = lambda x: jax.lax.dynamic_index_in_dim(x, *index, keepdims=False) if index else x
        add = make_state_fn(model, w, states, valid, at=(array, index), strict=strict)
        _, (states, _) = add(*jax.tree.map(take, inputs[array]))
        return states, None, None

    return apply_layers(c, weights.layers, layer, states)[0]


def write_prompts(
    c: TransformerConfig,
    cache: PagedCache,
    prompts: PromptCache,
    lengths: Int[Array, "B"],
    *,
    tables: Int[Array, "R N"],
) -> PagedCache:
    """Write the keys and values of `decode.prefill` into pages; `cache` and `prompts` are without states.

    Args:
        tables: page tables, R = num_shards B rows; row s B + b has the pages of prompt b in shard s, in
            order; NULL_PAGE = that shard has no slot with this prompt.
    """
    page_size = cache.k.shape[2]

    def to_pages(arrays, last):
        x = jnp.stack(arrays) if arrays[0].ndim == 4 else arrays[0]  # [L, B, K, ., .]
        x = jnp.moveaxis(x, last, 3)  # [L, B, K, T, E]
        at = jnp.arange(tables.shape[1] * page_size) + (x.shape[3] - lengths)[:, None]
        at = jnp.minimum(at, x.shape[3] - 1)[None, :, None, :, None]
        x = jnp.take_along_axis(x, at, axis=3)
        x = x.reshape(*x.shape[:3], -1, page_size, x.shape[4])
        return jnp.moveaxis(x, 2, 3)  # [L, B, N, K, page, E]

    new = (to_pages(prompts[0], 4), *((to_pages(prompts[1], 3),) if prompts[1] else ()))
    return _shard_mapped(c, _write, cache, new, tables)


def copy_pages(
    c: TransformerConfig, cache: PagedCache, sources: Int[Array, "X"], targets: Int[Array, "X"]
) -> PagedCache:
    """Copy page sources[i] to targets[i] in every layer; target NO_PAGE = no copy. `cache` is without states.

    X = num_shards N: the first N copies belong to the first shard; page numbers count within a shard.
    """
    return _shard_mapped(c, _copy, cache, (), sources, targets)


def _split_choice(c: TransformerConfig, new: tuple, chosen):
    """Return queries and the tokens' entries in the pages, and the layer's `IndexInputs` or the choice of an
    earlier layer; None = the model has no indexer."""
    if not c.index:
        return new, None
    *new, index = new
    if len(new) == 3:  # strict
        new[1:] = pack_keys(c, new[1], index), pack_keys(c, new[2], None)
    return tuple(new), chosen if index is None else index


def _attend(strict, sinks, c, cache: PagedCache, new, table, positions, layer, window, choice):
    """Write the new keys and values, then attend to the pages of each slot; returns ((out, lse, choice),
    cache).

    In strict mode the result includes the sinks, and lse is None.

    Args:
        choice: of `_split_choice`; the one returned is of positions.
    """
    # The page of each new token; padding goes to NULL_PAGE.
    (q, *new), page_size = new, cache.k.shape[2]
    table = table + layer * _pages_per_layer(c, cache)
    at, page_of = jnp.maximum(positions, 0), jnp.minimum(positions // page_size, table.shape[1] - 1)
    pages = jnp.where(positions >= 0, jnp.take_along_axis(table, page_of, axis=1, mode="clip"), NULL_PAGE)
    # Write the tokens, if the layer has keys: one token per slot by the kernel, else by scatter.
    is_step, scale = q.shape[1] == 1 and not strict, attention_scale(c)
    implementation = choose("decode_attention", q[:, 0], cache.k, table)[0] if is_step else None
    new = _to_storage(cache, new) if new else None
    if new and is_step:
        one = jax.tree.map(lambda x: x[:, 0], new)
        cache = write_token(cache, one, pages[:, 0], at[:, 0] % page_size, implementation=implementation)
    elif new:
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), new)
        cache = reference.write_token(cache, flat, pages.ravel(), (at % page_size).ravel())
    # Attend to the pages, which now hold the new tokens.
    k, k_scales = cache.k, cache.k_scales
    v, v_scales = (k, k_scales) if cache.v is None else (cache.v, cache.v_scales)
    if c.index and (strict or table.shape[1] * page_size > c.index.topk):
        return _attend_selected(strict, c, cache, q, table, positions, choice), cache
    if strict:
        k, v = (reference.gather_pages(x, None, table)[..., : q.shape[-1]] for x in (k, v))
        where, softcap = RingKeys(jnp.zeros_like(at)), c.attention_softcap
        out = invariant_attention(q, k, v, where, at, window, scale=scale, softcap=softcap, sinks=sinks)
        return (out, None, None), cache
    settings = {"scale": scale, "window": window, "softcap": c.attention_softcap}
    settings |= {"k_scales": k_scales, "v_scales": v_scales}
    padded = _pad_head_dim(q, cache)
    if q.shape[1] == 1:
        settings |= {"implementation": implementation, "return_lse": True}
        out, lse = decode_attention(padded[:, 0], k, v, table, positions[:, 0] + 1, **settings)
        out, lse = out[:, None], lse[..., None]
    else:
        out, lse = chunk_attention(padded, k, v, table, positions, **settings)
    shape = (*positions.shape, table.shape[1] * page_size)
    return (out[..., : q.shape[-1]], lse, jnp.zeros(shape, bool) if c.index_layers else None), cache


def _attend_selected(strict, c, cache: PagedCache, q, table, positions, choice):
    """Return (out, lse, choice) of attention to the pages' tokens that an indexer chooses."""
    room = key_room(c, cache.k.shape[1])

    def gather(pages):
        x = reference.gather_pages(pages, None, table)
        return unpack_keys(c, x[..., : q.shape[-1] + room])

    # A layer with an indexer chooses, another reuses a choice.
    (k, keys), at = gather(cache.k), jnp.maximum(positions, 0)
    is_made = not isinstance(choice, IndexInputs)
    if strict:
        where = RingKeys(jnp.zeros_like(at))
        choice = choice if is_made else choose_exactly(c, choice._replace(k=keys), where, at)
        out = invariant_attention(
            q, k, gather(cache.v)[0], where, at, NO_WINDOW, scale=attention_scale(c), chosen=choice
        )
        return out, None, choice
    k, spec, columns = k.astype(q.dtype), AttentionSpec(attention_scale(c)), jnp.arange(k.shape[1])
    inputs = (choice,) if is_made else (choice.q, choice.weights)

    def block(q, positions, *inputs):
        seen = columns <= positions[..., None]
        if not is_made:
            seen = choose_keys(c, IndexInputs(inputs[0], keys.astype(q.dtype), inputs[1]), seen)
        chosen = inputs[0] if is_made else seen
        out, lse = dense_attention(spec, q, k, k, chosen)
        return out, jnp.swapaxes(lse, 1, 2), chosen

    size = block_of_queries(c, len(columns))
    out, lse, choice = map_chunks(block, size, q, positions, *inputs)
    return out, jnp.swapaxes(lse, 1, 2), choice


def _write(c, cache: PagedCache, new, tables):
    layers = jnp.arange(c.num_kv_layers)[:, None, None] * _pages_per_layer(c, cache)
    return jax.tree.map(lambda x, y: x.at[layers + tables].set(y), cache, _to_storage(cache, new))


def _copy(c, cache: PagedCache, _, sources, targets):
    layers = jnp.arange(c.num_kv_layers)[:, None] * _pages_per_layer(c, cache)
    copy = lambda x: x.at[layers + targets].set(x[layers + sources], mode="drop")
    return jax.tree.map(copy, cache)


def _pages_per_layer(c: TransformerConfig, cache: PagedCache) -> int:
    """Return the pages of one layer in one shard."""
    return cache.k.shape[0] // c.num_kv_layers


def _to_storage(cache: PagedCache, new: Sequence[Array]) -> PagedCache:
    """Pad and cast or quantize keys and values, or latents, to the storage format of the cache."""
    new = [_pad_head_dim(x, cache) for x in new]
    if cache.k_scales is None:
        pairs = [(x.astype(cache.k.dtype), None) for x in new]
    else:
        pairs = [quantize(x, cache.k.dtype) for x in new]
    (k, k_scales), (v, v_scales) = (*pairs, (None, None))[:2]
    return PagedCache(k, v, k_scales, v_scales)


def _pad_head_dim(x: Float[Array, "*B E"], cache: PagedCache) -> Float[Array, "*B R"]:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, cache.k.shape[3] - x.shape[-1])])


def quantize(x: Float[Array, "*R E"], dtype: DTypeLike) -> tuple[Num[Array, "*R E"], Float[Array, "*R"]]:
    """Quantize each row to 8 bits with the scale absmax / largest value of the type.

    Returns: (x in `dtype`, float32 scales): x is about quantized * scale.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    max_value = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1) / max_value, jnp.finfo(jnp.float32).tiny)
    x = x / scale[..., None]
    return (jnp.round(x) if is_integer else x).astype(dtype), scale


def _shard_mapped(c, fn, cache: PagedCache, new: tuple, *rest):
    """Call `fn(c, cache, new, *rest)` on each device with the device's pages, slots and heads."""
    spec = current_spec(("batch", "kv_heads"), cache.k.shape[:2], ROLLOUT)
    if spec is None:
        return fn(c, cache, new, *rest)
    batch, heads = spec
    pages = jax.tree.map(lambda x: PartitionSpec(batch, heads), cache)
    rows = lambda x: jax.tree.map(lambda x: PartitionSpec(batch) if jnp.ndim(x) else PartitionSpec(), x)
    if fn in (_write, _copy):  # prompts [L, B, N, K, page, E], replicated over shards
        new_specs, out = tuple(PartitionSpec(None, None, None, heads) for _ in new), pages
    else:  # q, k, v [S, T, heads, E]; latents have one head, of which queries have many
        shape = (*new[0].shape[:1], new[0].shape[2])
        q_batch, q_heads = current_spec(("batch", "heads"), shape) if cache.v is None else spec
        specs = (q_batch, q_heads), *((batch, heads) for _ in new[1:])
        new_specs = tuple(PartitionSpec(rows, None, of) for rows, of in specs)
        out = ((new_specs[0], PartitionSpec(q_batch, q_heads), PartitionSpec(batch)), pages)
    specs = pages, new_specs, *map(rows, rest)
    run = jax.shard_map(lambda *args: fn(c, *args), in_specs=specs, out_specs=out, check_vma=False)
    return run(cache, new, *rest)
