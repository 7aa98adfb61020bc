"""Our weights <-> Hugging Face's: one table of names and layouts, and the layout of one layer both ways.

Ours are stacked over layers and keep heads apart ("layers.q" is [L, D, H, E]); HF has one matrix a layer,
[outputs, inputs] ("model.layers.3.self_attn.q_proj.weight" is [H*E, D]).
"""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.lora import MARK
from jaxrl_llm.models.params import abstract, named_leaves

TABLE: dict[str, tuple[str, str]] = {
    # ours, without L        HF name ({} = layer)                               layout, ours -> HF
    "embed": ("model.embed_tokens.weight", "v d -> v d"),
    "norm": ("model.norm.weight", "d -> d"),
    "lm_head": ("lm_head.weight", "v d -> v d"),
    "value": ("score.weight", "n d -> n d"),
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
    "layers.mlp_norm": ("model.layers.{}.post_attention_layernorm.weight", "d -> d"),
    "layers.gate": ("model.layers.{}.mlp.gate_proj.weight", "d f -> f d"),
    "layers.up": ("model.layers.{}.mlp.up_proj.weight", "d f -> f d"),
    "layers.down": ("model.layers.{}.mlp.down_proj.weight", "f d -> d f"),
    "layers.gate_bias": ("model.layers.{}.mlp.gate_proj.bias", "f -> f"),
    "layers.up_bias": ("model.layers.{}.mlp.up_proj.bias", "f -> f"),
    "layers.down_bias": ("model.layers.{}.mlp.down_proj.bias", "d -> d"),
}
FUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "baichuan": {"model.layers.{}.self_attn.W_pack.weight": ("layers.q", "layers.k", "layers.v")},
}
"""HF matrices that hold several of ours, their rows one after the other."""


class TensorRows(NamedTuple):
    """One layer of one of our weights in an HF tensor: its rows [start, start + rows)."""

    name: str  # HF name
    layout: str
    start: int
    rows: int


class HFTensor(NamedTuple):
    """A tensor of an HF folder, and our weights that it is made of in the order of its rows."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, int | None], ...]  # (our name, layer or None)


def tensor_rows(config: TransformerConfig) -> dict[str, list[TensorRows]]:
    """Return our names, in the order of the leaves -> rows of HF tensors, one entry a layer if stacked."""
    by_name = {ours: [] for ours in _shapes(config)}
    for tensor in hf_tensors(config):
        start = 0
        for ours, _ in tensor.parts:
            layout = TABLE[ours][1]
            rows = _hf_shape(_layer_shape(config, ours), layout)[0]
            by_name[ours].append(TensorRows(tensor.name, layout, start, rows))
            start += rows
    return by_name


def hf_tensors(config: TransformerConfig) -> list[HFTensor]:
    """Return all tensors of the model's HF folder, layer by layer; a tied head has none of its own."""
    names = _shapes(config)
    fused = FUSED.get(config.family, {})
    groups = [((ours,), TABLE[ours][0]) for ours in TABLE if ours in names]
    inside = {ours for members in fused.values() for ours in members}
    groups = [g for g in groups if g[0][0] not in inside] + [(members, hf) for hf, members in fused.items()]
    tensors = []
    for layer in [None, *range(config.num_layers)]:
        for members, hf in groups:
            if members[0].startswith("layers.") != (layer is not None):
                continue
            shapes = [_hf_shape(_layer_shape(config, ours), TABLE[ours][1]) for ours in members]
            shape = (sum(s[0] for s in shapes), *shapes[0][1:])
            tensors.append(HFTensor(hf.format(layer), shape, tuple((ours, layer) for ours in members)))
    return tensors


def adapter_tensors(config: TransformerConfig) -> list[HFTensor]:
    """Return the tensors of a PEFT adapter, layer by layer: lora_A [R, inputs], lora_B [outputs, R].

    A value head, which is trained beside adapters, comes last, as PEFT's `modules_to_save` has it.

    Args:
        config: with adapters.
    """
    adapters = [(ours, *ours.split(MARK)) for ours in _shapes(config) if MARK in ours]
    tensors = []
    for layer in range(config.num_layers):
        for ours, weight, matrix in adapters:
            module = TABLE[weight][0].format(layer).removesuffix(".weight")
            shape = _hf_shape(_layer_shape(config, ours), tensor_layout(ours))
            name = f"base_model.model.{module}.lora_{matrix.upper()}.weight"
            tensors.append(HFTensor(name, shape, ((ours, layer),)))
    if config.value_head:
        shape = _layer_shape(config, "value")
        tensors.append(HFTensor(f"base_model.model.{TABLE['value'][0]}", shape, (("value", None),)))
    return tensors


def tensor_layout(ours: str) -> str:
    """Return the layout of one of our weights, ours -> HF; an adapter's follows from that of its weight.

    "layers.o" is "h e d -> d (h e)", so its A is "h e r -> r (h e)" and its B is "r d -> (d) r".
    """
    weight, _, matrix = ours.partition(MARK)
    layout = TABLE[weight][1]
    if not matrix:
        return layout
    outputs, inputs = (" ".join(group) for group in parse_layout(layout)[1])
    return f"{inputs} r -> r ({inputs})" if matrix == "a" else f"r {outputs} -> ({outputs}) r"


def to_hf(ours: np.ndarray | jax.Array, layout: str) -> np.ndarray | jax.Array:
    """Return one layer of a weight in HF's layout: "d h e -> (h e) d" turns [D, H, E] into [H*E, D]."""
    source, groups = parse_layout(layout)
    order = [source.index(dim) for group in groups for dim in group]
    return ours.transpose(order).reshape(_hf_shape(ours.shape, layout))


def from_hf(tensor: np.ndarray, layout: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a view in our layout, of shape `shape`: the inverse of `to_hf`."""
    source, groups = parse_layout(layout)
    flat = [dim for group in groups for dim in group]
    sizes = dict(zip(source, shape, strict=True))
    return tensor.reshape([sizes[dim] for dim in flat]).transpose([flat.index(dim) for dim in source])


@functools.cache
def parse_layout(layout: str) -> tuple[list[str], list[list[str]]]:
    """Split "d h e -> (h e) d" into (["d", "h", "e"], [["h", "e"], ["d"]])."""
    source, target = layout.split(" -> ")
    return source.split(), [(a or b).split() for a, b in re.findall(r"\(([^)]*)\)|(\S+)", target)]


def _hf_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    source, groups = parse_layout(layout)
    sizes = dict(zip(source, shape, strict=True))
    return tuple(math.prod(sizes[dim] for dim in group) for group in groups)


def _layer_shape(config: TransformerConfig, ours: str) -> tuple[int, ...]:
    shape = _shapes(config)[ours]
    return shape[1:] if ours.startswith("layers.") else shape


@functools.cache
def _shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in named_leaves(abstract(config))}
