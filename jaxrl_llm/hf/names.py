"""Our weights <-> Hugging Face's: one table of names and layouts, used in both directions.

Our weights are stacked over equal layers (and over experts) and have a separate dim of heads ("layers.q" is
[L, D, H, E]; "dense_layers.q" the same for leading dense layers). HF has one matrix per layer and expert,
[outputs, inputs] ("model.layers.3.self_attn.q_proj.weight" is [H*E, D]).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.hf.expert_config import GROUPED, SHARED
from jaxrl_llm.hf.family_names import (
    BLOCK_SPARSE,
    CONV_ROWS,
    DELTA_ROWS,
    FOUR_NORMS,
    GEMMA4,
    GRANITE_HYBRID,
    INDEX_ROWS,
    INPUT_ROWS,
    LFM2,
    MAMBA_ROWS,
    MIXER,
    MODULES,
    NEMOTRON,
    OLMO_HYBRID,
    QWEN1,
    QWEN1_JOINED,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    STACKED_ROWS,
)
from jaxrl_llm.hf.layouts import Join, hf_shape, parse_layout
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.experts.router import copy_dtype
from jaxrl_llm.models.lora import MARK
from jaxrl_llm.models.params import abstract, named_leaves
from jaxrl_llm.models.stacks import is_dense, layer_places, layer_stacks

TABLE: dict[str, tuple[str, str]] = {
    # ours, without L and X  HF name ({} = layer, {} = expert)                  layout, ours -> HF
    "embed": ("model.embed_tokens.weight", "v d -> v d"),
    "norm": ("model.norm.weight", "d -> d"),
    "lm_head": ("lm_head.weight", "v d -> v d"),
    "value": ("score.weight", "n d -> n d"),
    "per_layer_embed": ("model.embed_tokens_per_layer.weight", "v c -> v c"),
    "per_layer_proj": ("model.per_layer_model_projection.weight", "d l p -> (l p) d"),
    "per_layer_norm": ("model.per_layer_projection_norm.weight", "p -> p"),
    "layers.attention_norm": ("model.layers.{}.input_layernorm.weight", "d -> d"),
    "layers.q": ("model.layers.{}.self_attn.q_proj.weight", "d h e -> (h e) d"),
    "layers.k": ("model.layers.{}.self_attn.k_proj.weight", "d k e -> (k e) d"),
    "layers.v": ("model.layers.{}.self_attn.v_proj.weight", "d k e -> (k e) d"),
    "layers.o": ("model.layers.{}.self_attn.o_proj.weight", "h e d -> d (h e)"),
    "layers.q_bias": ("model.layers.{}.self_attn.q_proj.bias", "h e -> (h e)"),
    "layers.k_bias": ("model.layers.{}.self_attn.k_proj.bias", "k e -> (k e)"),
    "layers.v_bias": ("model.layers.{}.self_attn.v_proj.bias", "k e -> (k e)"),
    "layers.o_bias": ("model.layers.{}.self_attn.o_proj.bias", "d -> d"),
    "layers.q_norm": ("model.layers.{}.self_attn.q_norm.weight", "e -> e"),
    "layers.k_norm": ("model.layers.{}.self_attn.k_norm.weight", "e -> e"),
    "layers.sinks": ("model.layers.{}.self_attn.sinks", "h -> h"),
    "layers.q_a": ("model.layers.{}.self_attn.q_a_proj.weight", "d c -> c d"),
    "layers.q_a_bias": ("model.layers.{}.self_attn.q_a_proj.bias", "c -> c"),
    "layers.q_a_norm": ("model.layers.{}.self_attn.q_a_layernorm.weight", "c -> c"),
    "layers.q_b": ("model.layers.{}.self_attn.q_b_proj.weight", "c h e -> (h e) c"),
    "layers.kv_a": ("model.layers.{}.self_attn.kv_a_proj_with_mqa.weight", "d c -> c d"),
    "layers.kv_a_bias": ("model.layers.{}.self_attn.kv_a_proj_with_mqa.bias", "c -> c"),
    "layers.kv_a_norm": ("model.layers.{}.self_attn.kv_a_layernorm.weight", "c -> c"),
    "layers.kv_b": ("model.layers.{}.self_attn.kv_b_proj.weight", "c h e -> (h e) c"),
    **INDEX_ROWS,
    **DELTA_ROWS,
    **CONV_ROWS,
    **MAMBA_ROWS,
    "layers.mlp_norm": ("model.layers.{}.post_attention_layernorm.weight", "d -> d"),
    "layers.attention_out_norm": ("model.layers.{}.post_attention_layernorm.weight", "d -> d"),
    "layers.mlp_out_norm": ("model.layers.{}.post_feedforward_layernorm.weight", "d -> d"),
    **INPUT_ROWS,
    "layers.layer_scalar": ("model.layers.{}.layer_scalar", "n -> n"),
    "layers.gate": ("model.layers.{}.mlp.gate_proj.weight", "d f -> f d"),
    "layers.up": ("model.layers.{}.mlp.up_proj.weight", "d f -> f d"),
    "layers.down": ("model.layers.{}.mlp.down_proj.weight", "f d -> d f"),
    "layers.gate_bias": ("model.layers.{}.mlp.gate_proj.bias", "f -> f"),
    "layers.up_bias": ("model.layers.{}.mlp.up_proj.bias", "f -> f"),
    "layers.down_bias": ("model.layers.{}.mlp.down_proj.bias", "d -> d"),
    "layers.router": ("model.layers.{}.mlp.gate.weight", "d x -> x d"),
    "layers.router_bias": ("model.layers.{}.mlp.gate.e_score_correction_bias", "x -> x"),
    "layers.router_norm": ("model.layers.{}.router.scale", "d -> d"),
    "layers.router_gain": ("model.layers.{}.router.per_expert_scale", "x -> x"),
    "layers.experts_norm": ("model.layers.{}.pre_feedforward_layernorm_2.weight", "d -> d"),
    "layers.experts_out_norm": ("model.layers.{}.post_feedforward_layernorm_2.weight", "d -> d"),
    "layers.shared_out_norm": ("model.layers.{}.post_feedforward_layernorm_1.weight", "d -> d"),
    "layers.expert_gate": ("model.layers.{}.mlp.experts.{}.gate_proj.weight", "d f -> f d"),
    "layers.expert_up": ("model.layers.{}.mlp.experts.{}.up_proj.weight", "d f -> f d"),
    "layers.expert_down": ("model.layers.{}.mlp.experts.{}.down_proj.weight", "f d -> d f"),
    "layers.latent_in": (f"{MIXER}.fc1_latent_proj.weight", "d c -> c d"),
    "layers.latent_out": (f"{MIXER}.fc2_latent_proj.weight", "c d -> d c"),
    "layers.router_logit_bias": ("model.layers.{}.mlp.router.bias", "x -> x"),
    "layers.expert_gate_bias": ("model.layers.{}.mlp.experts.gate_up_proj_bias", "x f -> x f"),
    "layers.expert_up_bias": ("model.layers.{}.mlp.experts.gate_up_proj_bias", "x f -> x f"),
    "layers.expert_down_bias": ("model.layers.{}.mlp.experts.down_proj_bias", "x d -> x d"),
    "layers.shared_gate": ("model.layers.{}.mlp.shared_expert_gate.weight", "d n -> n d"),
}
FAMILY_NAMES: dict[str, dict[str, str]] = {
    "nemotron_h": NEMOTRON,
    "granitemoehybrid": GRANITE_HYBRID,
    "qwen": QWEN1,
    **dict.fromkeys(("lfm2", "lfm2_moe"), LFM2),
    "hunyuan_v1_dense": {
        "layers.q_norm": "model.layers.{}.self_attn.query_layernorm.weight",
        "layers.k_norm": "model.layers.{}.self_attn.key_layernorm.weight",
    },
    "gemma3_text": FOUR_NORMS,
    "gemma4_text": GEMMA4,
    "gpt_oss": {
        "layers.router": "model.layers.{}.mlp.router.weight",
        "layers.expert_down": "model.layers.{}.mlp.experts.down_proj",
    },
    "olmo_hybrid": OLMO_HYBRID,
    **dict.fromkeys(("mixtral", "minimax_m2"), BLOCK_SPARSE),
    **dict.fromkeys(GROUPED, SHARED_EXPERTS),
    "mistral4": {**SHARED_EXPERTS, "layers.expert_down": "model.layers.{}.mlp.experts.down_proj"},
    **dict.fromkeys(SHARED, SHARED_EXPERT),
}
"""HF names of families that differ from TABLE, of all stacks ("layers.up") or of one ("mlp_layers.up")."""
OTHER_NAMES: dict[str, dict[str, str]] = {
    "olmo_hybrid": {
        "layers.attention_norm": "model.layers.{}.input_layernorm.weight",
        "layers.mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
        "layers.attention_out_norm": "model.layers.{}.feedforward_layer_norm.weight",
    }
}
"""HF names that folders saved by transformers have, too: it renames in layers of both kinds."""
FAMILY_LAYOUTS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("gemma4_text", "mistral4", "granitemoehybrid"), STACKED_ROWS),
    "gpt_oss": {
        "layers.expert_gate": "x d f -> x d f",
        "layers.expert_up": "x d f -> x d f",
        "layers.expert_down": "x f d -> x f d",
    },
}
"""Layouts of families that differ from TABLE: a layout with x is for all experts of a layer."""
FUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "baichuan": {"model.layers.{}.self_attn.W_pack.weight": ("layers.q", "layers.k", "layers.v")},
    "mistral4": {"model.layers.{}.mlp.experts.gate_up_proj": ("layers.expert_gate", "layers.expert_up")},
    "gemma4_text": {"model.layers.{}.experts.gate_up_proj": ("layers.expert_gate", "layers.expert_up")},
    "qwen": QWEN1_JOINED,
    "phi3": {
        "model.layers.{}.self_attn.qkv_proj.weight": ("layers.q", "layers.k", "layers.v"),
        "model.layers.{}.mlp.gate_up_proj.weight": ("layers.gate", "layers.up"),
    },
    "granitemoehybrid": {
        "model.layers.{}.shared_mlp.input_linear.weight": ("layers.gate", "layers.up"),
        "model.layers.{}.block_sparse_moe.input_linear.weight": ("layers.expert_gate", "layers.expert_up"),
    },
}
"""HF matrices that concatenate the rows of several of our weights: of all experts of a layer, in each one."""
INTERLEAVED: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt_oss": {
        "model.layers.{}.mlp.experts.gate_up_proj": ("layers.expert_gate", "layers.expert_up"),
        "model.layers.{}.mlp.experts.gate_up_proj_bias": ("layers.expert_gate_bias", "layers.expert_up_bias"),
    }
}
"""HF tensors that interleave several of our weights along the last dim."""

Index = tuple[int, ...]
"""Index of a matrix in one of our stacks: (), (layer,) or (layer, expert)."""


class TensorRows(NamedTuple):
    """One matrix of one of our weights in an HF tensor: its rows [start, start + rows)."""

    index: Index
    name: str  # HF name
    layout: str
    start: int
    rows: int
    column: int = 0  # of interleaved tensors: its columns column, column + step, ...
    step: int = 1
    inside: int = 0  # first row in each expert, if the rows above are experts


class Encoding(NamedTuple):
    """Stored form of a tensor that is not just rounded to the common type."""

    dtype: str
    apply: Callable[[jax.Array], jax.Array]  # to one HF matrix


class HFTensor(NamedTuple):
    """A tensor of an HF folder, and the weights of ours in it."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, Index], ...]  # (our name, index in its stack)
    layouts: tuple[str, ...]  # of the parts
    join: Join = "rows"
    encoding: Encoding | None = None


Encode = Callable[[list[HFTensor]], list[HFTensor]]
"""Tensors of a model -> the tensors with encodings, and additional tensors for decoding."""


def tensor_rows(config: TransformerConfig) -> dict[str, list[TensorRows]]:
    """Return our names, in the order of the leaves -> rows of HF tensors, one entry per matrix."""
    by_name = {ours: [] for ours in _shapes(config)}
    for tensor in hf_tensors(config):
        start, step = 0, len(tensor.parts) if tensor.join == "columns" else 1
        for i, ((ours, index), layout) in enumerate(zip(tensor.parts, tensor.layouts, strict=True)):
            shape = hf_shape(_matrix_shape(config, ours), layout)
            part = TensorRows(index, tensor.name, layout, start, rows=shape[0], column=i % step, step=step)
            if tensor.join == "inside":
                part = part._replace(start=0, inside=start)
            by_name[ours].append(part)
            start += shape[1] if tensor.join == "inside" else shape[0] * (step == 1)
    assert all(by_name.values()), f"weights without a row in TABLE are among {by_name}"
    return by_name


def hf_tensors(config: TransformerConfig) -> list[HFTensor]:
    """Return all tensors of the model's HF folder, layer by layer; a tied head is not among them."""
    stacks = {stack: _groups(config, stack) for stack in ("", *layer_stacks(config))}
    tensors = []
    for layer, (stack, i) in enumerate([("", None), *layer_places(config)], -1):
        for members, hf in stacks[stack]:
            layouts = tuple(tensor_layout(ours, config.family) for ours in members)
            pairs = zip(members, layouts, strict=True)
            shapes = [hf_shape(_matrix_shape(config, ours), layout) for ours, layout in pairs]
            shape, join = (sum(s[0] for s in shapes), *shapes[0][1:]), "rows"
            if hf in INTERLEAVED.get(config.family, {}):
                shape, join = (*shapes[0][:-1], sum(s[-1] for s in shapes)), "columns"
            elif len(members) > 1 and is_stacked(config, members[0]):
                shape, join = (shapes[0][0], sum(s[1] for s in shapes), *shapes[0][2:]), "inside"
            for index in _indices(config, members[0], i):
                parts = tuple((ours, index) for ours in members)
                tensors.append(HFTensor(hf.format(layer, *index[1:]), shape, parts, layouts, join=join))
    return tensors


def hf_name(config: TransformerConfig, ours: str) -> str:
    """Return the HF name of one of our weights, with {} for the layer, and for the expert."""
    for hf, members in joined_weights(config.family).items():
        if _row(ours) in members:
            return hf
    row, names = _row(ours), FAMILY_NAMES.get(config.family, {})
    is_shared = SHARED_EXPERTS.get(row) == names.get(row, "")  # a dense layer has no shared expert
    name = TABLE[row][0] if is_dense(ours) and is_shared else names.get(row, TABLE[row][0])
    return names.get(ours, name)


def joined_weights(family: str) -> dict[str, tuple[str, ...]]:
    """Return the HF tensors of a family that hold several of our weights, with their parts."""
    return FUSED.get(family, {}) | INTERLEAVED.get(family, {})


def stored_dtype(tensor: HFTensor, dtype: str) -> str:
    """Return the type of a tensor in files and buckets of type `dtype` (`copy_dtype`)."""
    return jnp.dtype(tensor.encoding.dtype if tensor.encoding else copy_dtype(tensor.parts[0][0], dtype)).name


def tensor_bytes(tensor: HFTensor, dtype: str) -> int:
    """Return the bytes of a tensor in files and buckets of type `dtype`."""
    return jnp.dtype(stored_dtype(tensor, dtype)).itemsize * math.prod(tensor.shape)


def stack_dims(ours: str, family: str = "") -> int:
    """Return the leading dims of a weight that number its matrices in files: none, L, or L and X."""
    row = _row(ours)
    if not row.startswith("layers.expert_"):
        return row.startswith("layers.")
    return 1 if "x" in parse_layout(tensor_layout(ours, family))[0] else 2


def _row(ours: str) -> str:
    """Return the key of a weight in TABLE; all stacks of layers use the keys of "layers"."""
    stack, dot, weight = ours.partition(".")
    return f"layers.{weight}" if dot else stack


def _groups(config: TransformerConfig, stack: str) -> list[tuple[tuple[str, ...], str]]:
    """Return (our names, HF name) of each matrix of a layer of a stack; "" = weights outside the layers."""
    names, joined = _shapes(config), joined_weights(config.family) if stack else {}
    inside = {row for rows in joined.values() for row in rows}
    rows = [row for row in TABLE if row.startswith("layers.") == bool(stack) and row not in inside]
    ours = [row.replace("layers", stack, 1) for row in rows]
    groups = [((name,), hf_name(config, name)) for name in ours if name in names]
    for hf, rows in joined.items():
        members = tuple(row.replace("layers", stack, 1) for row in rows)
        groups += [(members, hf)] if members[0] in names else []
    return groups


def _indices(config: TransformerConfig, ours: str, layer: int | None) -> list[Index]:
    """Return the indices of a layer's matrices in its stack; [()] for a weight outside the layers."""
    if stack_dims(ours, config.family) == 2:
        return [(layer, expert) for expert in range(config.moe.num_experts)]
    return [() if layer is None else (layer,)]


def adapter_tensors(config: TransformerConfig) -> list[HFTensor]:
    """Return the tensors of a PEFT adapter, layer by layer: lora_A [R, inputs], lora_B [outputs, R].

    If all experts of a layer are one tensor, their A are one tensor and their B another (`Join`): PEFT's
    adapters of parameters (`target_parameters`). Gate and up share such an A: gate has the first half of its
    rank, up the second. A value head, which is trained with adapters, comes last, as in PEFT's
    `modules_to_save`.

    Args:
        config: with adapters.
    """
    adapters = [(*adapter, matrix) for adapter in _adapted(config) for matrix in "ab"]
    tensors = []
    for layer, (stack, i) in enumerate(layer_places(config)):
        for weights, module, matrix in adapters:
            if weights[0].partition(".")[0] != stack:
                continue
            # Shape and arrangement of the tensor; of several weights, one A of all their ranks.
            members = tuple(f"{weight}{MARK}{matrix}" for weight in weights)
            layouts = tuple(tensor_layout(ours, config.family) for ours in members)
            shapes = [hf_shape(_matrix_shape(config, m), of) for m, of in zip(members, layouts, strict=True)]
            shape, join = shapes[0], "rows"
            if len(members) > 1 and not is_stacked(config, weights[0]):
                rows, columns = (sum(sizes) for sizes in zip(*shapes, strict=True))
                shape, join = ((rows, shape[1]), "rows") if matrix == "a" else ((rows, columns), "diagonal")
            elif is_stacked(config, weights[0]) and matrix == "a":
                shape, join = (len(members) * shape[0] * shape[1], shape[2]), "ranks"
            elif is_stacked(config, weights[0]):
                shape = tuple(len(members) * size for size in shape)
                join = "blocks" if config.family in INTERLEAVED else "diagonal"
            # One tensor a matrix, or one for all experts of the layer.
            for index in _indices(config, members[0], i):
                name = f"base_model.model.{module.format(layer, *index[1:])}.lora_{matrix.upper()}.weight"
                tensors.append(HFTensor(name, shape, tuple((m, index) for m in members), layouts, join=join))
    if config.value_head:
        shape, (name, layout) = _matrix_shape(config, "value"), TABLE["value"]
        tensors.append(HFTensor(f"base_model.model.{name}", shape, (("value", ()),), (layout,)))
    return tensors


def _adapted(config: TransformerConfig) -> list[tuple[tuple[str, ...], str]]:
    """Return (weights, PEFT's name of their adapter) of each matrix with an adapter.

    PEFT nests adapters of two parameters of one module: the adapter of the last one, down_proj, is outside.
    """
    weights = [ours.removesuffix(f"{MARK}a") for ours in _shapes(config) if ours.endswith(f"{MARK}a")]
    groups, joined = {}, joined_weights(config.family)
    for weight in weights:
        groups.setdefault((weight.partition(".")[0], hf_name(config, weight)), []).append(weight)

    def module(hf, weight):
        if not is_stacked(config, weight):
            return hf.removesuffix(".weight")
        hf = MODULES.get(hf, hf)
        is_nested = not hf.endswith("down_proj") and "layers.expert_down" in weights
        return hf.rpartition(".")[0] + is_nested * ".base_layer"

    in_order = lambda hf, members: sorted(members, key=lambda m: joined.get(hf, (_row(m),)).index(_row(m)))
    return [(tuple(in_order(hf, members)), module(hf, members[0])) for (_, hf), members in groups.items()]


def is_stacked(config: TransformerConfig, ours: str) -> bool:
    """Return whether files store a weight of all experts of a layer as one tensor."""
    return ".expert_" in ours and stack_dims(ours, config.family) == 1


def tensor_layout(ours: str, family: str = "") -> str:
    """Return the layout of one of our weights, ours -> HF. The layout of an adapter follows from its weight.

    "layers.o" is "h e d -> d (h e)", so its A is "h e r -> r (h e)" and its B is "r d -> (d) r". A weight of
    all experts, "x d f -> x d f", has A "x d r -> x r d" and B "x r f -> f (r x)". Weights never name a dim
    r.
    """
    weight, _, matrix = ours.partition(MARK)
    row = _row(weight)
    layout = FAMILY_LAYOUTS.get(family, {}).get(row, TABLE[row][1])
    if not matrix:
        return layout
    source, groups = parse_layout(layout)
    groups = [" ".join(group) for group in groups]
    if len(groups) == 3:
        experts, inputs, outputs = source
        a, b = f"{inputs} r -> {experts} r {inputs}", f"r {outputs} -> {outputs} (r {experts})"
        return f"{experts} {a if matrix == 'a' else b}"
    outputs, inputs = groups
    return f"{inputs} r -> r ({inputs})" if matrix == "a" else f"r {outputs} -> ({outputs}) r"


def _matrix_shape(config: TransformerConfig, ours: str) -> tuple[int, ...]:
    return _shapes(config)[ours][stack_dims(ours, config.family) :]


@functools.cache
def _shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in named_leaves(abstract(config))}
