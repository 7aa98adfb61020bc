"""FP8 weights for SGLang servers: linear layers in 8 bits, with a scale for each block of 128 x 128.

    W [O, I] -> weight, float8_e4m3fn [O, I]; weight_scale_inv, float32 [ceil(O / 128), ceil(I / 128)]

The format is DeepSeek-V3's (arXiv 2412.19437, 3.3.2), which SGLang's `--quantization fp8` uses too.
Embedding, LM head, routers, norms and biases stay in `--rollout.dtype`. Servers compute with the received
weights, so the probe compares them with the trainer's weights rounded the same way (`rounded_params`).
"""

from __future__ import annotations

import functools
import json
import shlex

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.bridge.servers import Json
from jaxrl_llm.hf.export import export_tensors
from jaxrl_llm.hf.layouts import from_hf, to_hf
from jaxrl_llm.hf.names import Encoding, HFTensor, stack_dims, tensor_layout
from jaxrl_llm.models import TransformerConfig, named_leaves
from jaxrl_llm.structs import Params

BLOCK = 128
LARGEST = 448.0  # number of float8_e4m3fn
FUSED = ("q", "k", "v", "gate", "up", "expert_gate", "expert_up")
"""Layers that SGLang joins with others, for which it takes whole blocks of outputs."""
QUANTIZED = (*FUSED, "o", "down", "expert_down")
CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
"""`quantization_config` of a config.json. Servers get it by a flag, whatever folder they start from."""
FLAGS = (
    *("--quantization", "fp8"),
    *("--json-model-override-args", json.dumps({"quantization_config": CONFIG})),
)


def quantize_blocks(weight: Float[Array, "O I"]) -> tuple[Float[Array, "O I"], Float[Array, "P Q"]]:
    """Return (codes, float8_e4m3fn; scales, float32) of a matrix: block [p, q] is about codes * scales[p, q].

    A scale is the block's largest magnitude / 448; a block of zeros has scale 1. Blocks at the lower and the
    right edge may be smaller: P = ceil(O / 128), Q = ceil(I / 128). NaN and Inf leave NaN in the codes.
    """
    weight = weight.astype(jnp.float32)
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    edges = [(0, -size % BLOCK) for size in weight.shape]
    blocks = jnp.pad(weight, edges).reshape(rows, BLOCK, columns, BLOCK)
    scales = jnp.abs(blocks).max(axis=(1, 3)) / LARGEST
    scales = jnp.where(scales >= jnp.finfo(jnp.float32).tiny, scales, 1.0)  # a subnormal one divides as 0
    codes = jnp.clip(weight / _repeat(scales, weight.shape), -LARGEST, LARGEST)
    return codes.astype(jnp.float8_e4m3fn), scales


def dequantize_blocks(codes: Float[Array, "O I"], scales: Float[Array, "P Q"]) -> Float[Array, "O I"]:
    """Return the matrix of these codes and scales, float32."""
    return codes.astype(jnp.float32) * _repeat(scales, codes.shape)


def _repeat(scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the scale of each number of a matrix."""
    return jnp.repeat(jnp.repeat(scales, BLOCK, 0), BLOCK, 1)[: shape[0], : shape[1]]


def _codes(weight: jax.Array) -> jax.Array:
    return quantize_blocks(weight)[0]


def _scales(weight: jax.Array) -> jax.Array:
    return quantize_blocks(weight)[1]


def quantized_tensors(tensors: list[HFTensor]) -> list[HFTensor]:
    """Return the tensors of the quantized model: linear layers as codes; all scales come last."""
    weights, scales = [], []
    for tensor in tensors:
        if _is_quantized(tensor.parts[0][0]):
            shape = tuple(-(-size // BLOCK) for size in tensor.shape)
            scale = tensor._replace(name=f"{tensor.name}_scale_inv", shape=shape)
            scales.append(scale._replace(encoding=Encoding("float32", _scales)))
            tensor = tensor._replace(encoding=Encoding("float8_e4m3fn", _codes))
        weights.append(tensor)
    return weights + scales


def _is_quantized(ours: str) -> bool:
    """Return whether one of our weights, such as "layers.q", is quantized."""
    return ours.rpartition(".")[2] in QUANTIZED


def rounded_params(params: Params, dtype: str) -> Params:
    """Return the weights that servers compute with: codes times scales in `dtype`, and the others."""
    family = params.config.family

    def rounded(name: str, weight: jax.Array) -> jax.Array:
        if not _is_quantized(name):
            return weight
        layout, stacked = tensor_layout(name, family), stack_dims(name, family)
        return _rounding(layout, stacked, dtype, weight.sharding)(weight)

    leaves = [rounded(name, weight) for name, weight in named_leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


@functools.cache
def _rounding(layout: str, stacked: int, dtype: str, sharding: jax.sharding.Sharding):
    """Return the jitted rounding of a weight of ours, with this many leading dims; it keeps its sharding."""

    def rounding(matrix: jax.Array) -> jax.Array:
        blocks = dequantize_blocks(*quantize_blocks(to_hf(matrix, layout)))
        return from_hf(blocks, layout, matrix.shape).astype(dtype)

    for _ in range(stacked):
        rounding = jax.vmap(rounding)
    return jax.jit(rounding, out_shardings=sharding)


def architecture_problem(config: TransformerConfig) -> str:
    """Return why SGLang does not take a model in this form, by its family or layer; "" = it does."""
    if config.mla or config.family == "gpt_oss":
        return f"not for {config.family}, whose layers SGLang reads in another form"
    for tensor in export_tensors(config):
        outputs = tensor.shape[0]
        if tensor.parts[0][0].rpartition(".")[2] in FUSED and outputs % BLOCK:
            return f"{tensor.name} has {outputs} outputs, and SGLang needs a multiple of {BLOCK}"
    return ""


def quantization_problem(info: Json) -> str:
    """Return why a server does not take these weights, with the flags to add; "" = it does.

    Args:
        info: its reply to /server_info.
    """
    try:
        config = json.loads(info["json_model_override_args"])["quantization_config"]
        if info["quantization"] == "fp8" and {**config, **CONFIG} == config:
            return ""
    except (ValueError, TypeError, LookupError):
        pass
    return (
        "does not compute with weights in fp8 blocks (--servers.quantization fp8). Start it with "
        f"{shlex.join(FLAGS)} --load-format dummy"
    )
