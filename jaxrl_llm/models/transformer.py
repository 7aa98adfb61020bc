"""The decoder: one forward function for training, scoring and rollout; a model family is a config."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt

from jaxrl_kernels.batch_invariant import rounded
from jaxrl_llm.models.attention import (
    LayerNumbers,
    layer_rope,
    rope_fn,
    stacked_numbers,
    trajectory_lengths,
    window_spans,
)
from jaxrl_llm.models.block import block, final_norm_fn, make_attention_fn
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.experts.router import RoutingSums, join_routes, reads_float32, routing_sums
from jaxrl_llm.models.layers import Layers
from jaxrl_llm.models.linear import normalize_rows, scale_embeddings
from jaxrl_llm.models.per_layer import NAMES, PerLayerWeights, init_per_layer, per_layer_inputs
from jaxrl_llm.models.recurrent import RECURRENT, with_paths
from jaxrl_llm.models.remat import LAYER_INPUT, REMAT
from jaxrl_llm.models.rows import Packing, per_token_call
from jaxrl_llm.models.shared_kv import no_shared_kv, put_shared, read_shared
from jaxrl_llm.models.stacks import (
    LayerRun,
    collect_layers,
    cut_layers,
    join_layers,
    layer_stacks,
    layers_outside,
    scan_layers,
    stack_names,
)
from jaxrl_llm.sharding.attention import ContextParallel, context_parallel, reorder_tokens, restore_tokens
from jaxrl_llm.sharding.pipeline import pipelined
from jaxrl_llm.sharding.rules import (
    constrain,
    constrain_residual,
    current_sizes,
    fetch,
    look_up,
    num_shards,
)


class Transformer(nnx.Module):
    """The decoder: weights and config, no other state. Call it on token ids for final hidden states."""

    def __init__(self, config: TransformerConfig, key: jax.Array):
        self.config = config
        embed_key, layer_key, head_key = jax.random.split(key, 3)
        shape, axes = (config.vocab_size, config.hidden_size), ("vocab", "table_embed")
        std = config.initializer_range
        self.embed = nnx.Param(std * jax.random.normal(embed_key, shape, jnp.float32), axes=axes)
        for name, stack in layer_stacks(config).items():
            number = -1 if name == "layers" else list(layer_stacks(config)).index(name)
            key = layer_key if number < 0 else jax.random.fold_in(layer_key, number)
            setattr(self, name, Layers(stack, key, config.num_layers))
        norm = jnp.full(config.hidden_size, 1 - config.norm_offset, jnp.float32)
        self.norm = nnx.Param(norm, axes=("norm",))
        if config.value_head:  # zeros: a new critic predicts 0
            self.value = nnx.Param(jnp.zeros((1, config.hidden_size), jnp.float32), axes=("norm", "norm"))
        if config.per_layer_inputs:
            names = zip(NAMES, init_per_layer(config, jax.random.fold_in(embed_key, 1)), strict=True)
            for name, weight in names:
                setattr(self, name, weight)
        if not config.tie_embeddings:
            self.lm_head = nnx.Param(std * jax.random.normal(head_key, shape, jnp.float32), axes=axes)

    @property
    def head(self) -> Float[Array, "V D"]:
        """The LM head: the embedding itself when tied."""
        head = fetch((self.embed if self.config.tie_embeddings else self.lm_head)[...])
        return normalize_rows(head) if self.config.normalize_head else head

    @property
    def per_layer(self) -> PerLayerWeights | None:
        """The weights of the layers' inputs; None = the model has none."""
        if not self.config.per_layer_inputs:
            return None
        return PerLayerWeights(*(fetch(getattr(self, name)[...]) for name in NAMES))

    def values(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """Apply the value head to final hidden states, in float32; `logits_scaling` is for logits only."""
        values = hidden.astype(jnp.float32) @ fetch(self.value[...])[0]
        return values if self.config.logits_scaling == 1.0 else values * self.config.logits_scaling

    def __call__(self, *args, **settings) -> Float[Array, "B T D"]:
        """Return the hidden states of `forward`."""
        return self.forward(*args, **settings)[0]

    def forward(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"] | None = None,
        routes: UInt[Array, "B T L K"] | None = None,
        *,
        last: Int[Array, "B T"] | None = None,
        dtype: DTypeLike = jnp.float32,
        remat: str = "none",
        sequence_parallel: ContextParallel = "ring",
        strict: bool = False,
    ) -> tuple[Float[Array, "B T D"], RoutingSums | None, UInt[Array, "B T L K"] | None]:
        """Compute hidden states after the final norm. A token attends to earlier tokens of its segment, and
        of the segments that it continues.

        Equal layers are scanned: compile time does not grow with depth.

        Args:
            tokens, positions: ids and their positions in the trajectory (0-based).
            segments: number of each token's trajectory, or of a prefix that several trajectories share: 1, 2,
                ... in the order of the row, 0 = padding; None = one per row.
            last: number of the last segment that continues each token's segment (`flash_attention`); None =
                no segment continues another.
            routes: experts of each token (`moe.route_spec`); None = the routers choose.
            dtype: of activations and products; norms, softmax and RoPE are float32.
            remat: results saved for the backward pass: "none" = all; "dots" = layer inputs, attention outputs
                and matrix products; "attention" = layer inputs and attention outputs; "full" = layer inputs;
                "offload" = layer inputs, in host memory.
            sequence_parallel: method of context parallelism if the mesh shards the tokens of a row.
            strict: a token's bits depend only on its trajectory, and equal the bits of decoding
                (`jaxrl_kernels.batch_invariant`); one device.

        Returns: (hidden states, sums of the routing, routes); the last two are None without experts.

        Raises:
            ValueError: `last` with dynamic RoPE, which reads the length of a trajectory.
        """
        c = self.config
        if last is not None and c.rope.scaling == "dynamic":
            raise ValueError("dynamic RoPE takes no shared prefixes (`last`)")
        segments = jnp.ones_like(tokens) if segments is None else segments
        # Context parallelism may reorder the tokens of a row, so that devices have equal work.
        method = context_parallel(tokens.shape[1], sequence_parallel)
        rows = Packing(segments, positions, last, window_spans(c, segments, last, positions))
        whole = with_paths(c, rows)
        tokens, rows = jax.tree.map(lambda x: reorder_tokens(x, method), (tokens, rows))
        readers = jnp.where(rows.segments > 0, 1 if last is None else rows.last - rows.segments + 1, 0)
        x = constrain_residual(scale_embeddings(c, look_up(fetch(self.embed[...]), tokens, dtype)))
        routes = None if routes is None else jnp.moveaxis(reorder_tokens(routes, method), 2, 0)
        inputs = self._layer_inputs(x, tokens, dtype, strict)

        # Layers before the pipeline, which are all without one, then the layers of its stages.
        names, numbers, outs = stack_names(c), stacked_numbers(c), []
        layers = functools.partial(_run_layers, c=c, dtype=dtype, remat=remat, method=method, strict=strict)
        stages = num_shards("layers", current_sizes())
        first = layers_outside(c, stages)
        for part, divided in ((slice(0, first), 1), (slice(first, len(names)), stages)):
            if own := names[part]:
                run = functools.partial(layers, names=own[: len(own) // divided])
                weights, chosen = cut_layers(c, part, functools.partial(getattr, self), routes)
                of_layers = weights, jax.tree.map(lambda x, part=part: x[part], numbers)
                of_both = None if inputs is None else inputs[part], chosen
                x, *out = pipelined(run, divided)(x, of_layers, of_both, (rows, whole, readers))
                outs.append(out)
        sums, chosen = (join_layers(own) for own in zip(*outs, strict=True))
        x = per_token_call(strict)(final_norm_fn(c), fetch(self.norm[...]), x)
        hidden = restore_tokens(constrain(x, "batch", "sequence", "hidden"), method)
        return hidden, sums, None if chosen is None else restore_tokens(join_routes(c, chosen), method)

    def _layer_inputs(self, x, tokens, dtype: DTypeLike, strict: bool) -> Float[Array, "L B T P"] | None:
        """Return the inputs of all layers, if they have any, from scaled embeddings x and tokens."""
        if (w := self.per_layer) is None:
            return None
        rows = look_up(w.embed, tokens, dtype, is_wide=True)
        w = w._replace(embed=None, proj=rounded(w.proj, dtype))  # the norm is float32, as all are
        return per_layer_inputs(self.config, w, x, rows, strict=strict)


def _run_layers(
    x, of_layers, of_both, of_rows, *, c: TransformerConfig, names: Sequence[str], remat: str, **how
):
    """Return (x, sums of the routing, chosen experts [L, B, T, K]) after layers of these stacks.

    Args:
        of_layers: (weights of the stacks, `stacked_numbers`).
        of_both: (`per_layer_inputs`, routes); each may be None.
        of_rows: (rows, rows in natural order, readers of each token).
    """
    (weights, numbers), (inputs, routes), (rows, whole, readers) = of_layers, of_both, of_rows
    lengths = trajectory_lengths(c, rows.positions, rows.segments)
    tables = per_token_call(how["strict"])(rope_fn(c), None, rows.positions, lengths)
    layer = _layer_fn(c, rows, whole, tables=tables, readers=readers, **how)

    def step(c, carry, *args):
        (x, shared), run = carry, functools.partial(layer, c)
        if remat != "none" or c.moe:
            run = jax.checkpoint(run, policy=REMAT[remat], prevent_cse=False)
        x, kv, out = run((x, read_shared(c, shared)), *args)
        return (x, put_shared(c, shared, kv)), out

    of_run = functools.partial(_numbers_of, c, names, (numbers._replace(inputs=inputs), routes))
    (x, _), outs = scan_layers(c, weights, of_run, step, carry=(x, no_shared_kv(c, x)), names=names)
    return x, *(collect_layers(outs, lambda name: bool(layer_stacks(c)[name].moe)) or (None, None))


def _layer_fn(
    c: TransformerConfig,
    rows: Packing,
    in_order: Packing,
    *,
    tables,
    readers,
    dtype: DTypeLike,
    method,
    strict,
):
    """Return a layer's function for `Transformer.forward`: (stack, (x, keys and values of another layer),
    weights of `scan_layers`, (numbers, routes)) -> (x, keys and values if others read them, (sums of the
    routing, routes))."""
    keeps_kv = c.shared_kv_layers > 0 or c.index_layers is not None

    def layer(c, carry, weights, numbers):
        (x, shared), (numbers, routes) = carry, numbers
        x, w = checkpoint_name(x, LAYER_INPUT), cast_weights(weights(), dtype)
        of_kind = in_order if c.kind in RECURRENT else rows
        attend = make_attention_fn(
            c, w, of_kind, window=numbers.window, method=method, strict=strict, shared=shared
        )
        # The layer, and the sums of its experts' routing.
        rope, valid, inputs = layer_rope(c, tables, numbers), rows.segments > 0, numbers.inputs
        x, kv, routing = block(
            c, w, x, rope, attention_fn=attend, strict=strict, valid=valid, routes=routes, layer_inputs=inputs
        )
        sums = routing and (routing_sums(c.moe, routing, readers), routing.chosen)
        return x, kv if keeps_kv else None, sums

    return layer


def _numbers_of(
    c: TransformerConfig,
    names: Sequence[str],
    of_layers: tuple[LayerNumbers, UInt[Array, "L B T K"] | None],
    run: LayerRun,
) -> tuple[LayerNumbers, UInt[Array, "R B T K"] | None]:
    """Return the numbers and inputs of a run's R layers, and the routes of its layers with experts."""
    (numbers, routes), layers, stacks = of_layers, run.layers, layer_stacks(c)
    numbers = jax.tree.map(lambda x: x[layers], numbers)
    sparse = [bool(stacks[name].moe) for name in names]
    if routes is None or not any(sparse[layers]):
        return numbers, None
    # Routes of layers without experts, between layers with experts, are not read.
    start = sum(sparse[: layers.start])
    if all(sparse[layers]):
        return numbers, routes[start : start + len(sparse[layers])]
    return numbers, routes[np.maximum(np.cumsum(sparse)[layers] - 1, 0)]


def cast_weights(weights: nnx.Module, dtype: DTypeLike) -> nnx.Module:
    """Cast weights to `dtype`, except codes and weights that the forward pass reads in float32; copy the ones
    in host memory to the devices."""

    def cast(path, w):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        w = fetch(w)
        kept = reads_float32(name) or not jnp.issubdtype(w.dtype, jnp.floating)
        return w if kept else rounded(w, dtype)

    return jax.tree_util.tree_map_with_path(cast, weights)
