"""Our weights <-> Hugging Face's: one table of names and layouts, used in both directions.

Our weights are stacked over equal layers (and over experts) and have a separate dim of heads ("layers.q" is
[L, D, H, E]; "dense_layers.q" the same for leading dense layers). HF has one matrix per layer and expert,
[outputs, inputs] ("model.layers.3.self_attn.q_proj.weight" is [H*E, D]).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.hf.family_names import (
    FAMILY_LAYOUTS,
    FAMILY_NAMES,
    FUSED,
    INTERLEAVED,
    MODULES,
    PARAMETERS,
    SHARED_EXPERTS,
    TABLE,
)
from jaxrl_llm.hf.layouts import Join, hf_shape, parse_layout
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.experts.router import copy_dtype
from jaxrl_llm.models.lora import MARK
from jaxrl_llm.models.params import abstract, named_leaves
from jaxrl_llm.models.quantize import SCALE
from jaxrl_llm.models.stacks import is_dense, layer_places, layer_stacks

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
    nameless = [ours for ours, rows in by_name.items() if not rows and not ours.endswith(SCALE)]
    assert not nameless, f"no row of TABLE has {nameless}"
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


def as_parameters(config: TransformerConfig) -> TransformerConfig:
    """Return the config with a family of whose experts an adapter has one tensor for all in a layer."""
    family = config.family + PARAMETERS
    return dataclasses.replace(config, family=family) if config.moe and family in FAMILY_LAYOUTS else config


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
        is_nested = not hf.endswith("down_proj") and "layers.expert_down" in map(_row, weights)
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
