"""Incremental decoding: the rollout's weights, the ring KV cache, prefill and decode.

The layers are the `block` of training. Models of up to MAX_UNROLLED_LAYERS are unrolled, with separate arrays
for each layer: on a CPU, a scan copies every weight and cache out of its stack for every token, which takes a
third longer. Deeper models are scanned, as in training, so that compile time does not grow with depth.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrl_kernels import batch_invariant
from jaxrl_kernels.flash_attention.reference import dense_attention
from jaxrl_kernels.flash_attention.sinks import add_sinks
from jaxrl_kernels.flash_attention.spec import AttentionSpec
from jaxrl_llm.models.attention import (
    attention_scale,
    layer_numbers,
    layer_rope,
    rope_fn,
    sinks_of,
    stacked_numbers,
)
from jaxrl_llm.models.block import block, final_norm_fn, make_attention_fn
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.experts.router import join_routes
from jaxrl_llm.models.indexer import choose_exactly, choose_keys, pack_keys, read_choice, unpack_keys
from jaxrl_llm.models.layers import Layers
from jaxrl_llm.models.linear import scale_embeddings
from jaxrl_llm.models.mixer_config import ATTENTION
from jaxrl_llm.models.mla import DecodeLatents, ring_array
from jaxrl_llm.models.params import shardings
from jaxrl_llm.models.per_layer import NAMES, PerLayerWeights, per_layer_inputs
from jaxrl_llm.models.recurrent import RECURRENT, State, with_paths
from jaxrl_llm.models.rows import Packing, per_token_call
from jaxrl_llm.models.shared_kv import kv_sources, no_shared_kv, put_shared, read_shared
from jaxrl_llm.models.slot_states import make_state_fn
from jaxrl_llm.models.stacks import collect_layers, layer_places, layer_stacks, scan_layers
from jaxrl_llm.models.transformer import Transformer, cast_weights
from jaxrl_llm.sharding.rules import ROLLOUT, Rules, constrain_residual

PromptCache = tuple[
    tuple[Float[Array, "*L B K E T"], ...],
    tuple[Float[Array, "*L B K T E"], ...],
    tuple[State, ...],
]
"""Keys, values and states of prompts, arrays of the layout of `RingCache`."""
MAX_UNROLLED_LAYERS = 12
"""Each unrolled layer costs about 0.1 s of compile time, in every program."""


class DecodeWeights(NamedTuple):
    """The policy's weights in the layout of decoding."""

    embed: Float[Array, "V D"]
    norm: Float[Array, "D"]
    head: Float[Array, "V D"] | None  # None = tied to embed
    layers: tuple[Layers, ...]  # unrolled: one per layer, without the layer axis; scanned: one per stack
    per_layer: PerLayerWeights | None = None  # None = layers have no inputs of their own


class RingCache(NamedTuple):
    """Keys and values of S slots in ring buffers with one shared write index.

    The newest token of every slot is at `cursor` - 1, the one before at `cursor` - 2, and so on modulo C: a
    step writes one column for all slots, of any lengths, instead of scattering. C is the longest sequence,
    or for arrays of layers with a window the window (`ring_array`). A cache of latents has them in k, one
    head of E = kv_rank + rope_dim, and no v.
    """

    k: tuple[Float[Array, "*L S K E C"], ...]  # per layer, or [L, ...] per `ring_array`; C last suits q k^T
    v: tuple[Float[Array, "*L S K C E"], ...]
    cursor: Int[Array, ""]  # write index of the next token, modulo the C of each array
    states: tuple[State, ...] = ()  # of layers with a state: a tree per layer, or one [L, ...]

    @property
    def length(self) -> int:
        """Return the capacity of a slot in tokens."""
        return max(k.shape[-1] for k in self.k)


def is_unrolled(c: TransformerConfig) -> bool:
    """Return whether the layers are unrolled rather than scanned."""
    return c.num_layers <= MAX_UNROLLED_LAYERS


def decode_weights(
    params: Transformer, dtype: DTypeLike, out_shardings: DecodeWeights | None = None
) -> DecodeWeights:
    """Copy the weights for decoding, in the types that the forward pass reads (`cast_weights`).

    Always copies, so that the trainer may donate its arrays.

    Args:
        out_shardings: `decode_shardings` of the copy. Stacked layers are then resharded one at a time:
            all at once, a TPU would hold the gathered stack and the copy of it.
    """
    c = params.config
    head = None if c.tie_embeddings else jnp.copy(batch_invariant.rounded(params.head, dtype))
    params = jax.tree.map(jnp.copy, cast_weights(params, dtype))
    layers = [getattr(params, name) for name in layer_stacks(c)]
    if is_unrolled(c):
        layers = [jax.tree.map(lambda w, i=i: w[i], getattr(params, name)) for name, i in layer_places(c)]
    elif out_shardings is not None:
        of_layer = [jax.tree.map(_without_layer_axis, stack) for stack in out_shardings.layers]
        reshard = functools.partial(jax.tree.map, jax.lax.with_sharding_constraint)
        layers = [
            jax.lax.map(lambda layer, target=target: reshard(layer, target), stack)
            for stack, target in zip(layers, of_layer, strict=True)
        ]
    return DecodeWeights(params.embed[...], params.norm[...], head, tuple(layers), params.per_layer)


def decode_shardings(c: TransformerConfig, mesh: Mesh, rules: Rules) -> DecodeWeights:
    """Return the tree of `decode_weights` with `NamedSharding` leaves."""
    tree = shardings(c, mesh, rules)
    layers = [getattr(tree, name) for name in layer_stacks(c)]
    if is_unrolled(c):
        layers = [jax.tree.map(_without_layer_axis, getattr(tree, name)) for name, _ in layer_places(c)]
    head = None if c.tie_embeddings else tree.lm_head.get_value()
    names = NAMES if c.per_layer_inputs else ()
    per_layer = PerLayerWeights(*(getattr(tree, name).get_value() for name in names)) if names else None
    return DecodeWeights(tree.embed.get_value(), tree.norm.get_value(), head, tuple(layers), per_layer)


def _without_layer_axis(stack: NamedSharding) -> NamedSharding:
    return NamedSharding(stack.mesh, PartitionSpec(*stack.spec[1:]))


def init_ring_cache(
    c: TransformerConfig, slots: int, length: int, dtype: DTypeLike, strict: bool = False
) -> RingCache:
    """Return zeros for `slots` sequences of `length` tokens; a strict cache holds no latents."""
    each = [ring_array(c, stack, strict) for stack in _stack_of_layers(c) if stack.has_kv]
    arrays = [((), of) for of in each] if is_unrolled(c) else [((n,), of) for of, n in Counter(each).items()]
    sizes = [((*n, slots, heads), size, min(length, most)) for n, (heads, size, most) in arrays]
    k = tuple(jnp.zeros((*dims, size, columns), dtype) for dims, size, columns in sizes)
    v = tuple(jnp.zeros((*dims, columns, size), dtype) for dims, size, columns in sizes)
    return RingCache(k, () if c.mla and not strict else v, jnp.int32(0), empty_states(c, slots, dtype))


def empty_states(c: TransformerConfig, slots: int, dtype: DTypeLike) -> tuple[State, ...]:
    """Return the states of `slots` sequences before their first token; () for a model without states."""
    if not (recurrent := c.num_recurrent_layers):
        return ()
    count, depth = (recurrent, ()) if is_unrolled(c) else (1, (recurrent,))
    empty = RECURRENT[c.recurrent_kind].empty_state
    return tuple(empty(c, (*depth, slots), dtype) for _ in range(count))


def embed_tokens(
    c: TransformerConfig, weights: DecodeWeights, tokens: Int[Array, "B T"], strict: bool
) -> tuple[Float[Array, "B T D"], Float[Array, "L B T P"] | None]:
    """Return the first residual stream of tokens, and the inputs of all layers if they have any."""
    x = constrain_residual(scale_embeddings(c, weights.embed[tokens]))
    if (w := weights.per_layer) is None:
        return x, None
    return x, per_layer_inputs(c, w, x, w.embed[tokens], strict=strict)


def next_token_logits(
    c: TransformerConfig, weights: DecodeWeights, hidden: Float[Array, "S D"], strict: bool = False
) -> Float[Array, "S V"]:
    """Return float32 logits, soft-capped if the model is."""
    head = weights.embed if weights.head is None else weights.head
    logits = per_token_call(strict)(batch_invariant.logits_fn(c.logit_softcap), head, hidden[:, None])
    return logits[:, 0]


def prefill(
    c: TransformerConfig,
    weights: DecodeWeights,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    strict: bool = False,
) -> tuple[
    PromptCache,
    UInt[Array, "B T sparse chosen"] | None,
]:
    """Compute keys and values of left-padded prompts.

    Args:
        tokens: row b has its prompt in the last lengths[b] columns.

    Returns: ((k, v, states), arrays of the layout of `RingCache`, routes of the tokens); padding holds
        arbitrary numbers. Routes (`moe.route_spec`) are None without experts.
    """
    # Places of the tokens, and what all layers read about them.
    positions = jnp.arange(tokens.shape[1]) - (tokens.shape[1] - lengths)[:, None]
    segments, positions = (positions >= 0).astype(jnp.int32), jnp.maximum(positions, 0)
    rows = with_paths(c, Packing(segments, positions))
    tables = per_token_call(strict)(rope_fn(c), None, positions)

    # Layers return their part of the cache, in its layout.
    def layer(c, carry, w, numbers, *_):
        x, shared = carry
        settings = {"strict": strict, "shared": read_shared(c, shared)}
        mix = make_attention_fn(c, w, rows, window=numbers.window, **settings)
        settings = {"strict": strict, "valid": segments > 0, "rules": ROLLOUT, "layer_inputs": numbers.inputs}
        x, kept, routing = block(c, w, x, layer_rope(c, tables, numbers), attention_fn=mix, **settings)
        if not c.has_kv:
            return (x, shared), kept, routing
        k, v, *_ = kept
        shared, v = put_shared(c, shared, kept), None if v is None else v.transpose(0, 2, 1, 3)
        return (x, shared), (k.transpose(0, 2, 3, 1), v), routing

    x, inputs = embed_tokens(c, weights, tokens, strict)
    carry = x, no_shared_kv(c, x)
    _, (kv, states), routes = apply_layers(c, weights.layers, layer, carry, inputs=inputs)
    return (tuple(k for k, _ in kv), tuple(v for _, v in kv if v is not None), tuple(states)), routes


def decode_ring(
    c: TransformerConfig,
    weights: DecodeWeights,
    cache: RingCache,
    tokens: Int[Array, "S"],
    positions: Int[Array, "S"],
    strict: bool = False,
) -> tuple[Float[Array, "S D"], RingCache, UInt[Array, "S 1 sparse chosen"] | None]:
    """Feed one token per slot through the model, with the ring cache.

    Args:
        tokens: the token of each slot.
        positions: its position in the sequence, 0, 1, ...; -1 = none, which leaves the slot's states.

    Returns: (hidden state after the final norm, cache with the token's keys and values, its routes).
    """
    # Position embeddings of the token.
    by_row, valid, positions = per_token_call(strict), positions[:, None] >= 0, jnp.maximum(positions, 0)
    positions = positions[:, None]
    tables = by_row(rope_fn(c), None, positions)

    # Layers read their part of the cache and put the new one in its place.
    def layer(c, carry, w, numbers, array, index):
        x, ks, vs, states, chosen = carry
        put = lambda arrays, new: (*arrays[:array], new, *arrays[array + 1 :])
        rope = layer_rope(c, tables, numbers)
        run = functools.partial(
            block, c, w, x, rope, strict=strict, rules=ROLLOUT, layer_inputs=numbers.inputs
        )
        if not c.mixes:
            x, _, routing = run(attention_fn=None)
            return (x, ks, vs, states, chosen), None, routing
        if c.kind in RECURRENT:
            step = make_state_fn(c, w, states, valid, at=(array, index), strict=strict)
            x, (states, _), routing = run(attention_fn=step)
            return (x, ks, vs, states, chosen), None, routing
        # Attention over the ring.
        kv, sinks, window = (ks[array], vs[array] if vs else None), sinks_of(w), numbers.window
        place = jnp.mod(cache.cursor, kv[0].shape[-1])
        attend = _attend_ring(
            c, kv, index, place, positions=positions, window=window, sinks=sinks, chosen=chosen, strict=strict
        )
        x, (k, v, chosen), routing = run(attention_fn=attend)
        return (x, put(ks, k), put(vs, v) if vs else (), states, chosen), None, routing

    x, inputs = embed_tokens(c, weights, tokens[:, None], strict)
    chosen = jnp.zeros((len(tokens), 1, cache.length), bool) if c.index_layers else None
    carry = x, cache.k, cache.v, cache.states, chosen
    (x, ks, vs, states, _), _, routes = apply_layers(c, weights.layers, layer, carry, inputs=inputs)
    hidden = by_row(final_norm_fn(c), weights.norm, x)[:, 0]
    return hidden, RingCache(ks, vs, cache.cursor + 1, states), routes


def apply_layers(c: TransformerConfig, layers: tuple[Layers, ...], layer, carry, *, inputs=None):
    """Apply `layer(config, carry, weights, numbers, array, index) -> (carry, out, routing)` to all layers.

    The cache of a layer is `arrays[array][index]`, in the arrays of its kind (keys and values, or states):
    array = 0, 1, ... and index () for unrolled layers. Scanned layers share an array and have index (i,);
    keys of each kind have one (`ring_array`). A layer without keys has the place of the layer whose keys it
    reads. `config` is the config of the layer's stack.

    Args:
        inputs: of all layers (`per_layer_inputs`), if they have any.

    Returns: (carry, (outs of attention, outs of other kinds), routes): a list with one out per layer, or with
        one stack of the outs of each array.
    """
    stacks, at = layer_stacks(c), _cache_indices(c)
    attends = {name: stack.has_kv for name, stack in stacks.items()}
    recurs = {name: stack.kind in RECURRENT for name, stack in stacks.items()}
    # One layer after the other.
    if is_unrolled(c):
        outs, chosen = ([], []), []
        names = [name for name, _ in layer_places(c)]
        each = (None,) * c.num_layers if inputs is None else inputs
        of_layers = [n._replace(inputs=x) for n, x in zip(layer_numbers(c), each, strict=True)]
        for name, weights, numbers, i in zip(names, layers, of_layers, at, strict=True):
            carry, out, routing = layer(stacks[name], carry, weights, numbers, i, ())
            if attends[name] or recurs[name]:
                outs[recurs[name]].append(out)
            chosen += [routing.chosen] if routing else []
        return carry, outs, join_routes(c, jnp.stack(chosen) if chosen else None)

    # Scans.
    arrays = _scanned_arrays(c)

    def step(config, carry, weights, numbers):
        numbers, index = numbers
        carry, out, routing = layer(config, carry, weights(), numbers, arrays[config], (index,))
        return carry, (out, routing and routing.chosen)

    def numbers_of(run):
        return jax.tree.map(lambda x: x[run.layers], (stacked_numbers(c, inputs), jnp.asarray(at)))

    carry, outs = scan_layers(c, dict(zip(stacks, layers, strict=True)), numbers_of, step, carry=carry)
    part = lambda i: [(run, tuple(x[i] for x in out)) for run, out in outs]
    of_array = lambda i: lambda name: attends[name] and arrays[stacks[name]] == i
    kept = [collect_layers(part(0), of_array(i)) for i in range(max(arrays.values()) + 1)]
    states = collect_layers(part(0), recurs.get)
    chosen = collect_layers(part(1), lambda name: bool(stacks[name].moe))
    return carry, (kept, [] if states is None else [states]), join_routes(c, chosen)


def _scanned_arrays(c: TransformerConfig) -> dict[TransformerConfig, int]:
    """Return stack -> the array of its scanned layers: keys of each kind have one, all states have one."""
    kinds = {stack: ring_array(c, stack) for stack in layer_stacks(c).values() if stack.kind == ATTENTION}
    order = list(dict.fromkeys(kinds.values()))
    return {stack: order.index(kinds[stack]) if stack in kinds else 0 for stack in layer_stacks(c).values()}


def _cache_indices(c: TransformerConfig) -> list[int]:
    """Return the index of each layer, or of the layer whose keys it reads, among the layers of its kind, or,
    if scanned, of its array."""
    shared = lambda stack: (stack.kind, None if is_unrolled(c) else ring_array(c, stack))
    groups = [shared(stack) for stack in _stack_of_layers(c)]
    return [groups[:i].count(groups[i]) for i in kv_sources(c)]


def _stack_of_layers(c: TransformerConfig) -> list[TransformerConfig]:
    """Return the architecture of each layer's stack."""
    stacks = layer_stacks(c)
    return [stacks[name] for name, _ in layer_places(c)]


def _visible(cursor, positions: Int[Array, "S 1"], window, length: int) -> Bool[Array, "S 1 C"]:
    """Return the columns of a ring that slots see, by their age: how many tokens ago they were written."""
    age = jnp.mod(cursor - jnp.arange(length), length)
    return ((age <= positions) & (age < window))[:, None]


def _attend_ring(
    c: TransformerConfig,
    kv,
    index: tuple,
    cursor,
    *,
    positions: Int[Array, "S 1"],
    window,
    sinks,
    chosen: Bool[Array, "S 1 C"] | None,
    strict: bool,
):
    """Return `attend` of `block`: write the new key and value, if the layer has them, at the cursor, and
    attend to the slot's past.

    Args:
        chosen: columns that the last indexer has chosen, in strict mode positions; None = each layer has an
            indexer, or none has.
    """

    def write(cache, column, order, start):
        if column is not None:
            column = jnp.expand_dims(column.transpose(order), tuple(range(len(index))))
            cache = jax.lax.dynamic_update_slice(cache, column.astype(cache.dtype), (*index, *start))
        return cache, jax.lax.dynamic_index_in_dim(cache, *index, keepdims=False) if index else cache

    spec = AttentionSpec(attention_scale(c), c.attention_softcap)
    exact = functools.partial(batch_invariant.invariant_attention, scale=spec.scale, softcap=spec.softcap)
    visible = functools.partial(_visible, cursor, positions, window)

    # A function for a cache of latents, and one for keys and values.
    def attend_latents(q, latents, index=None):
        ks, k = write(kv[0], latents, (0, 2, 3, 1), (0, 0, 0, cursor))
        k, seen = k.transpose(0, 3, 1, 2).astype(q.dtype), visible(k.shape[-1])
        if c.index:
            of_ring = functools.partial(choose_keys, c, seen=seen, start=cursor + 1)
            k, seen = read_choice(c, k, index, chosen, choose=of_ring)
        out = dense_attention(spec, q, k, k, visible=seen)[0]
        return out, (ks, None, seen if c.index_layers else None)

    def attend(q, k, v, index=None):
        k, v = (pack_keys(c, k, index), pack_keys(c, v, None)) if c.index else (k, v)
        ks, k = write(kv[0], k, (0, 2, 3, 1), (0, 0, 0, cursor))
        vs, v = write(kv[1], v, (0, 2, 1, 3), (0, 0, cursor, 0))
        k, v = k.transpose(0, 3, 1, 2).astype(q.dtype), v.transpose(0, 2, 1, 3).astype(q.dtype)
        if strict:
            where, choice = batch_invariant.RingKeys(cursor - positions), None
            if c.index:
                exactly = functools.partial(choose_exactly, c, where=where, positions=positions)
                (k, choice), (v, _) = read_choice(c, k, index, chosen, choose=exactly), unpack_keys(c, v)
            out = exact(q, k, v, where, positions, window, sinks=sinks, chosen=choice)
            return out, (ks, vs, choice if c.index_layers else None)
        out, lse = dense_attention(spec, q, k, v, visible=visible(k.shape[1]))
        return out if sinks is None else add_sinks(out, lse, sinks)[0], (ks, vs, None)

    if not c.has_kv:
        return lambda q: attend(q, None, None)
    return DecodeLatents(attend_latents) if kv[1] is None else attend
