"""Formats of quantized weights, as config.json names them: the ones that are read, and fixes for others."""

from __future__ import annotations

from typing import NamedTuple

from jaxrl_llm.hf.json_file import JsonKeys

_DEQUANTIZE = (
    "Dequantize it once: transformers.AutoModelForCausalLM.from_pretrained(FOLDER, "
    "quantization_config=transformers.FineGrainedFP8Config(dequantize=True)).save_pretrained(NEW_FOLDER)"
)
_UNQUANTIZED = "Take the folder of the model before its quantization"
_LARGEST_BLOCK = 2**20
MX_BLOCK = 32  # numbers that share a scale, in each microscaling (MX) format


class Quantization(NamedTuple):
    """Format of a folder's quantized weights."""

    method: str  # "fp8", "mxfp4"
    block: tuple[int, int]  # rows and columns that share a scale


def read_quantization(keys: JsonKeys) -> Quantization | None:
    """Return the format of a model's quantized weights; None if they are not quantized.

    Args:
        keys: of the language model's config.

    Raises:
        UserError: a format that is not read: another method, or fp8 without blocks; has the fix.
    """
    key = "quantization_config" if keys.get("quantization_config") else "compression_config"
    section = keys.section(key)
    if not keys.get(key):
        return None
    method = section.get("quant_method")
    if method == "mxfp4":
        return Quantization(method, (1, MX_BLOCK))
    if method != "fp8":
        requirement = f"is not supported; supported: fp8 in blocks, mxfp4. {_UNQUANTIZED}"
        raise section.wrong(f"{key}.quant_method", method, requirement)
    # Activations and their scales belong to the kernels of servers.
    for inner, supported in (("activation_scheme", "dynamic"), ("fmt", "e4m3")):
        value = section.get(inner)
        if value not in (None, supported):
            requirement = f"is not supported; supported: {supported}. {_DEQUANTIZE}"
            raise section.wrong(f"{key}.{inner}", value, requirement)
    block = section.get("weight_block_size")
    if block is None:
        requirement = f"is one scale a tensor, which is not supported. {_DEQUANTIZE}"
        raise section.wrong(f"{key}.weight_block_size", block, requirement)
    is_pair = isinstance(block, list) and len(block) == 2 and all(type(size) is int for size in block)
    if not is_pair or not all(1 <= size <= _LARGEST_BLOCK for size in block):
        requirement = f"must be two whole numbers from 1 to {_LARGEST_BLOCK:,}"
        raise section.wrong(f"{key}.weight_block_size", block, requirement)
    return Quantization(method, tuple(block))
