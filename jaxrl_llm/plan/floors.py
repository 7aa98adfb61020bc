"""Floors of a phase: the minimum work of one device by its arithmetic and its sharding.

- FLOPs: the model's FLOPs once forward, and twice that number backward, without recomputation.
- Device memory: each matrix product reads its input and writes its output once, attention reads queries, keys
  and values and writes its output; everything else is fused into them. Weights are read once a pass, in the
  type of the products, and their gradient is written once. Logits are never in memory.
- Links: weights of the layers are gathered once per pass, embedding and head once per call, and gradients
  scattered once; of the table of per-layer inputs, rows of tokens are sent. Tensor parallelism gathers and
  scatters tokens before and after attention and MLP (arXiv 2205.05198), context parallelism sends keys and
  values around the ring or heads all to all, and experts get a token once a device that it chooses, and
  return it. A pipeline sends each token to all following stages, and before to the first and afterwards back
  to its own.
- The bubble of a pipeline is in no floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_llm.models import TransformerConfig, abstract, flops, layer_matrices, named_leaves, shardings
from jaxrl_llm.models.delta import STATE
from jaxrl_llm.models.lora import MARK
from jaxrl_llm.models.per_layer import NAMES
from jaxrl_llm.models.quantize import SCALE
from jaxrl_llm.models.stacks import layer_stacks, layers_outside, stack_names
from jaxrl_llm.plan.work import ATTENTION, ProgramWork
from jaxrl_llm.sharding.compile import Program
from jaxrl_llm.sharding.pipeline import bubble_work
from jaxrl_llm.sharding.rules import GATHERED, ROLLOUT, TRAIN, Rules, bytes_per_device, num_shards
from jaxrl_llm.structs import Params

Sizes = Mapping[str, float]
"""Name of a weight -> its bytes on one device."""
TABLE = NAMES[0]  # of per-layer inputs


class Rows(NamedTuple):
    """Tokens that a program computes."""

    tokens: int  # of all devices
    context: float  # keys of each query
    logits: bool  # whether the head is applied
    bubble: float = 0.0  # `bubble_of` a pipeline


def rows_flops(c: TransformerConfig, rows: Rows) -> float:
    """Return the model FLOPs of a forward pass, on all devices."""
    return flops.forward_flops(c, rows.tokens, rows.context) + flops.head_flops(c, rows.tokens) * rows.logits


def bubble_of(model: TransformerConfig, rows: int, sizes: Mapping[str, int]) -> float:
    """Return `bubble_work` relative to the work on all layers, of which some may be before the pipeline."""
    outside = layers_outside(model, num_shards("layers", sizes)) or 0
    return bubble_work(rows, sizes) * (1 - outside / model.num_layers)


def copied_layers(params: Params, sizes: Mapping[str, int]) -> tuple[int, float]:
    """Return how many layers all devices compute before a pipeline, and the bytes on one device of the
    weights that stages copy, since they do not divide the layers of a stack.

    Args:
        params: abstract, of the policy.
        sizes: as of `num_shards`.
    """
    names, stages = stack_names(params.config), num_shards("layers", sizes)
    before = 0 if stages == 1 else layers_outside(params.config, stages) or 0
    size = lambda name: bytes_per_device(getattr(params, name))
    parts = {name: names[before:].count(name) / names.count(name) for name in names[:before]}
    return before, sum(part * size(name) for name, part in parts.items())


def work_with_bubble(count: Callable[[Rows], float], rows: Rows) -> float:
    """Return count(rows), and what devices compute of layers in the bubble of a pipeline."""
    return count(rows) + rows.bubble * count(rows._replace(logits=False))


def forward_floor(
    c: TransformerConfig, mesh: Mesh, dtype: DTypeLike, rows: Rows, *, rules: Rules = TRAIN
) -> ProgramWork:
    """Return the floor of a forward pass.

    Args:
        dtype: of activations and products.
        rules: of the weights: TRAIN, of which all are gathered, or ROLLOUT.
    """
    used = ROLLOUT if rules is ROLLOUT else GATHERED
    stored, held = (weight_bytes(c, mesh, x, dtype) for x in (rules, used))
    return ProgramWork(
        rows_flops(c, rows) / mesh.size,
        _bytes_read(c, held, rows) + _activation_bytes(c, mesh, dtype, rows),
        _gathers(held, stored, passes=1) + _activation_links(c, mesh, dtype, rows, rules=used),
    )


def training_floor(
    c: TransformerConfig, mesh: Mesh, dtype: DTypeLike, rows: Rows, *, grads: float
) -> ProgramWork:
    """Return the floor of forward and backward pass over a micro-batch.

    Args:
        dtype: of activations and products.
        grads: bytes of the gradients that the micro-batch's are added to, read and written.
    """
    is_frozen = c.lora is not None
    stored, held = (weight_bytes(c, mesh, rules, dtype) for rules in (TRAIN, GATHERED))
    trained = lambda sizes: {name: size for name, size in sizes.items() if MARK in name or not is_frozen}
    work = 3 * rows_flops(c, rows) - flops.frozen_flops(c, rows.tokens, rows.logits)
    memory = (2 if is_frozen else 3) * _activation_bytes(c, mesh, dtype, rows)
    memory += 2 * _bytes_read(c, held, rows) + sum(trained(held).values()) + grads
    links = _gathers(held, stored, passes=2) + _gathers(trained(held), stored, passes=1)
    links += _activation_links(c, mesh, dtype, rows, rules=GATHERED, backward=True)
    return ProgramWork(work / mesh.size, memory, links)


def rollout_rows(calls: Mapping[str, Program], longest: int) -> dict[str, Rows]:
    """Return program of the native engine -> the rows that it computes.

    Args:
        calls: `NativeEngine.largest_calls`.
        longest: tokens that a slot's cache may hold.
    """
    rows, width = calls["prefill"].args[1].shape
    slots = lambda name: len(calls[name].args[2].tokens)
    found = {"prefill": Rows(rows * width, width / 2, False), "decode": Rows(slots("decode"), longest, True)}
    if drafts := calls.get("decode_drafts"):
        read = slots("decode_drafts") * (drafts.static["num_drafts"] + 1)
        found["decode_drafts"] = Rows(read, longest, True)
    if "extend" in calls:
        found["extend"] = Rows(math.prod(calls["extend"].args[2].tokens.shape), longest, False)
    return found


def rollout_floors(
    c: TransformerConfig, mesh: Mesh, calls: Mapping[str, Program], computed: Mapping[str, Rows], *, page: int
) -> dict[str, ProgramWork]:
    """Return program of the native engine -> its floor. What only moves data reads and writes it once.

    Args:
        calls: `NativeEngine.largest_calls`.
        computed: `rollout_rows`; all but prefill read the cache.
        page: tokens of a page.
    """
    weights, cache = calls["decode"].args[:2]
    dtype, size = weights.embed.dtype, bytes_per_device
    floors = {
        name: forward_floor(c, mesh, dtype, rows, rules=ROLLOUT).plus(size(cache) * (name != "prefill"))
        for name, rows in computed.items()
    }
    sent = size(weights) - sum(weight_bytes(c, mesh, TRAIN, dtype).values())
    publish = ProgramWork(memory=size(calls["publish"].args) + size(weights), links=max(sent, 0.0))
    floors["publish"] = publish
    if "write_pages" in calls:
        prompts = 2.0 * size(calls["write_pages"].args[1])
        tokens = len(calls["copy_pages"].args[1]) / num_shards("batch", mesh.shape) * page
        copied = tokens / computed["prefill"].tokens
        return floors | {
            "write_pages": ProgramWork(memory=prompts),
            "copy_pages": ProgramWork(memory=copied * prompts),
        }
    if "resize" in calls:
        floors["resize"] = ProgramWork(memory=size(calls["resize"].args[0]) + size(cache))
    inserted = ProgramWork(memory=2.0 * size(calls["insert"].args[1]))
    copied = dict.fromkeys(calls.keys() & {"read_kept", "write_kept"}, ProgramWork(memory=2.0 * size(cache)))
    return floors | copied | {"gather": inserted, "insert": inserted}


def kernel_flops(
    c: TransformerConfig, mesh: Mesh, rows: Rows, trained: bool = False, *, remat: str = "none"
) -> dict[str, float]:
    """Return scope of a kernel in the model -> FLOPs of all its runs on one device, if it is a kernel.

    Attention is two products forward, and backward seven: each of two kernels computes the scores again.
    The delta rule's backward kernel computes the forward pass again; its FLOPs are those token by token, as
    in the floor, without the products of a chunk's tokens. Of log-probs the kernel backward computes the
    logits again; the two products that follow are XLA's.
    """
    again = trained and flops.RECOMPUTED[remat] is flops.forward_flops
    computed = rows.tokens * (1 + rows.bubble)
    state = flops.state_flops(c, computed)
    attention = flops.attention_flops(c, computed, rows.context) - state
    head = flops.head_flops(c, rows.tokens) * rows.logits * (1 + trained)
    found = {ATTENTION: attention * (1 + 3.5 * trained + again), "linear_logprob": head}
    if c.recurrent_kind:
        found[STATE] = state * (1 + 3 * trained + again)
    if c.moe:
        found["experts"] = 2.0 * computed * _expert_weights(c) * (1 + 2 * trained + again)
    return {name: number / mesh.size for name, number in found.items()}


def weight_bytes(c: TransformerConfig, mesh: Mesh, rules: Rules, dtype: DTypeLike) -> Sizes:
    """Return the bytes of each weight on one device, floats in `dtype`; a tied head is the embedding."""
    placed = jax.tree.leaves(shardings(c, mesh, rules))
    width = lambda leaf: min(jnp.dtype(dtype).itemsize, leaf.dtype.itemsize)
    return {
        name: float(math.prod(sharding.shard_shape(leaf.shape)) * width(leaf))
        for (name, leaf), sharding in zip(named_leaves(abstract(c)), placed, strict=True)
    }


def product_widths(c: TransformerConfig, mesh: Mesh) -> float:
    """Return the numbers of a token that a device reads and writes in the products of all layers and in
    attention. Tensor parallelism divides the outputs of some matrices and the inputs of others."""
    params, total, tensor = abstract(c), 0.0, num_shards("heads", mesh.shape)
    placed = jax.tree.leaves(shardings(c, mesh, GATHERED))
    for (name, leaf), dims, sharding in zip(
        named_leaves(params), layer_matrices(params), placed, strict=True
    ):
        if dims is None or name.endswith(SCALE):
            continue
        of_expert = ".expert_" in name
        shape = leaf.shape if of_expert else sharding.shard_shape(leaf.shape)
        width = sum(math.prod(shape[dim] for dim in side) for side in dims)
        total += leaf.shape[0] * width * (c.moe.experts_per_token / tensor if of_expert else 1)
    stacks = layer_stacks(c).values()
    return total + sum(stack.num_attention_layers * _attention_width(stack) for stack in stacks) / tensor


def _key_value_width(c: TransformerConfig) -> int:
    if c.mla:
        return c.num_heads * (c.head_dim + c.mla.value_dim)
    return 2 * c.num_kv_heads * c.head_dim


def _attention_width(c: TransformerConfig) -> int:
    """Return the numbers of a token's queries, keys, values and outputs of attention."""
    return c.num_heads * (c.head_dim + (c.mla.value_dim if c.mla else c.head_dim)) + _key_value_width(c)


def _expert_weights(c: TransformerConfig) -> int:
    """Return the number of weights of the experts that a token passes."""
    of_expert = (3 if c.mlp_gate else 2) * c.moe.expert_size * c.expert_width
    return c.num_sparse_layers * c.moe.experts_per_token * of_expert


def _is_of_layer(name: str) -> bool:
    return "." in name


def _bytes_read(c: TransformerConfig, held: Sizes, rows: Rows) -> float:
    """Return the bytes of the weights that products read in one pass; a lookup reads next to nothing."""
    head = "embed" if c.tie_embeddings else "lm_head"
    return sum(x for name, x in held.items() if _is_of_layer(name) or (rows.logits and name == head))


def _gathers(held: Sizes, stored: Sizes, passes: int) -> float:
    """Return the bytes of gathering each weight: of the layers in every pass, the others once."""
    calls = lambda name: 0 if name == TABLE else passes if _is_of_layer(name) else 1
    return sum((held[name] - stored[name]) * calls(name) for name in held)


def _local_tokens(mesh: Mesh, rows: Rows) -> float:
    """Return the tokens of a replica's part of the rows; tensor parallelism does not divide it."""
    return rows.tokens / (num_shards("batch", mesh.shape) * num_shards("sequence", mesh.shape))


def _activation_bytes(c: TransformerConfig, mesh: Mesh, dtype: DTypeLike, rows: Rows) -> float:
    widths = product_widths(c, mesh) + c.hidden_size * rows.logits
    return _local_tokens(mesh, rows) * widths * jnp.dtype(dtype).itemsize


def _activation_links(
    c: TransformerConfig, mesh: Mesh, dtype: DTypeLike, rows: Rows, *, rules: Rules, backward: bool = False
) -> float:
    """Return the bytes of activations that a device sends in tensor, context and expert parallelism, and in
    a pipeline."""
    tensor, ring = num_shards("heads", mesh.shape), num_shards("sequence", mesh.shape)
    sent = lambda count: (count - 1) / count
    passes = 2 if backward else 1
    width = passes * sent(tensor) * c.hidden_size * (4 * c.num_layers + rows.logits)
    for stack in layer_stacks(c).values():  # backward sends keys, values and gradients
        around = (ring - 1) * _key_value_width(stack) * (3 if backward else 1)
        all_to_all = passes * sent(ring) * _attention_width(stack)
        width += stack.num_attention_layers * min(around, all_to_all) / tensor
    stages = num_shards("layers", mesh.shape, rules)
    width += passes * 2 * (stages - 1) * c.hidden_size / tensor
    table_parts = num_shards("table_embed", mesh.shape, ROLLOUT if rules is ROLLOUT else TRAIN)
    width += passes * sent(table_parts) * c.num_layers * c.per_layer_inputs
    if c.moe:
        owners = num_shards("experts", mesh.shape, rules)
        chosen = min(c.moe.experts_per_token, owners) * sent(owners)
        width += passes * c.num_sparse_layers * 2 * chosen * c.expert_width
    return _local_tokens(mesh, rows) * width * jnp.dtype(dtype).itemsize
