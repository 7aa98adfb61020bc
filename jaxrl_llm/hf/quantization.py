"""Formats of quantized weights, as config.json names them: the supported ones, and fixes for others."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxrl_llm.hf.json_file import JsonKeys

_UNQUANTIZED = "Take the folder of the model before its quantization"
_LARGEST_BLOCK = 2**20
MX_BLOCK = 32  # numbers that share a scale, in each microscaling (MX) format


_TENSOR = (0, 0)
KEYS = ("quantization_config", "compression_config")


class Quantization(NamedTuple):
    """Format of a folder's quantized weights."""

    method: str  # "fp8", "mxfp4"
    block: tuple[int, int]  # rows and columns that share a scale; 0 = all of a matrix


def read_quantization(keys: JsonKeys) -> Quantization | None:
    """Return the format of a model's quantized weights; None if they are not quantized.

    Args:
        keys: of the language model's config.

    Raises:
        UserError: a format that is not read, such as integers or 4 bits; has the fix.
    """
    key = next((key for key in KEYS if keys.get(key)), KEYS[-1])
    section = keys.section(key)
    if not keys.get(key):
        return None
    method = section.get("quant_method")
    if method == "mxfp4":
        return Quantization(method, (1, MX_BLOCK))
    if method == "compressed-tensors":
        return Quantization("fp8", _read_compressed(section, key))
    # Activations and their scales belong to the kernels of servers.
    if method == "modelopt":
        _require(section, key, {"quant_algo": ("FP8",)})
        return Quantization("fp8", _TENSOR)
    if method != "fp8":
        known = "supported: fp8, mxfp4, and compressed-tensors and modelopt in fp8"
        raise section.wrong(f"{key}.quant_method", method, f"is not supported; {known}. {_UNQUANTIZED}")
    _require(section, key, {"fmt": (None, "e4m3")})
    block = section.get("weight_block_size")
    return Quantization(
        method, _TENSOR if block is None else _read_block(section, f"{key}.weight_block_size", block)
    )


def _read_compressed(section: JsonKeys, key: str) -> tuple[int, int]:
    """Return the rows and columns that share a scale in a folder of compressed-tensors (llm-compressor).

    Raises:
        UserError: weights that are not fp8, sparse or rotated, or groups with different blocks.
    """
    _require(section, key, {"format": (None, "float-quantized"), "transform_config": (None, {})})
    sparsity = section.section("sparsity_config")
    _require(sparsity, f"{key}.sparsity_config", {"format": (None, "dense")})
    groups, blocks = section.section("config_groups"), set()
    for name in groups.raw:
        group, where = groups.section(name), f"{key}.config_groups.{name}"
        _require(group, where, {"format": (None, "float-quantized")})
        weights, where = group.section("weights"), f"{where}.weights"
        _require(weights, where, {"num_bits": (8,), "type": ("float",), "symmetric": (None, True)})
        _require(weights, where, {"strategy": ("tensor", "channel", "group", "block")})
        strategy, structure = weights.get("strategy"), weights.get("block_structure")
        if strategy == "group":
            structure = [1, weights.get("group_size")]
        plain = {"tensor": _TENSOR, "channel": (1, 0)}
        blocks.add(plain.get(strategy) or _read_block(weights, f"{where}.block_structure", structure))
    if len(blocks) != 1:
        problem = f"is not supported: must have groups with one size of blocks. {_UNQUANTIZED}"
        raise section.wrong(f"{key}.config_groups", section.get("config_groups"), problem)
    return blocks.pop()


def _require(section: JsonKeys, key: str, supported: dict[str, tuple[Any, ...]]) -> None:
    """Refuse a value that is not among the supported ones of its key."""
    for name, values in supported.items():
        if (value := section.get(name)) not in values:
            known = ", ".join(str(x) for x in values if x not in (None, {})) or "none"
            raise section.wrong(
                f"{key}.{name}", value, f"is not supported; supported: {known}. {_UNQUANTIZED}"
            )


def _read_block(section: JsonKeys, key: str, block: Any) -> tuple[int, int]:
    is_pair = isinstance(block, list) and len(block) == 2 and all(type(size) is int for size in block)
    if not is_pair or not all(1 <= size <= _LARGEST_BLOCK for size in block):
        requirement = f"must be two whole numbers from 1 to {_LARGEST_BLOCK:,}"
        raise section.wrong(key, block, requirement)
    return tuple(block)
