"""Write a GGUF file for llama.cpp, and a Modelfile for Ollama: the inverse of `hf.gguf`."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.extensions import import_extra
from jaxrl_llm.hf.config import check_round_trip, to_hf_config
from jaxrl_llm.hf.export import check_export_disk, export_config, refuse_not_finite
from jaxrl_llm.hf.gather import gather_checked
from jaxrl_llm.hf.gguf_names import FAMILIES, GGUF_YARN, ROPE_FACTORS, gguf_keys, gguf_name, gguf_shape
from jaxrl_llm.hf.gguf_vocabulary import gguf_vocabulary
from jaxrl_llm.hf.names import Encoding, HFTensor, hf_tensors
from jaxrl_llm.hf.tokenizer import text_ends
from jaxrl_llm.host.files import replace_text, sync_to_disk
from jaxrl_llm.models import RopeConfig, TransformerConfig
from jaxrl_llm.models.attention import rope_frequencies
from jaxrl_llm.structs import Params

_ARCHITECTURES = {**{theirs: ours for ours, theirs in FAMILIES.items()}, "mistral": "llama"}
"""HF `model_type` -> `general.architecture`."""
_TYPES = {
    # dtype: (type of matrices, general.file_type)
    "float32": ("F32", "ALL_F32"),
    "float16": ("F16", "MOSTLY_F16"),
    "bfloat16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
}
_KEPT = ("vocab_size", "head_dim", "hidden_act", "initializer_range", "tie_word_embeddings", "attention_bias")
"""Keys of config.json that a file has, besides `gguf_keys` and RoPE scaling, or that change no result."""
_ROUTER = ".mlp.gate.weight"
_LLAMA3 = ("factor", "original_max_position_embeddings")
_MAGIC = b"GGUF"
_OTHER_BYTES = 2**26
"""Bytes of the metadata, at most."""


def check_gguf_file(file: Path, overwrite: bool) -> None:
    """Refuse a file that cannot be written, before the weights are read.

    Args:
        overwrite: an earlier GGUF file, and its Modelfile, may be replaced.

    Raises:
        UserError: the message names the file.
    """
    for path in (file, modelfile_path(file)):
        if path.exists() and not overwrite:
            raise UserError(f"--out {file}: {path} exists. Set another --out, or --overwrite True.")
    if file.exists() and not _is_gguf(file):
        raise UserError(f"{file}: is not a GGUF file and is not replaced; choose another name")
    check_export_disk(file.absolute(), 0)
    import_extra("gguf", "gguf", needed_by=f"--out {file}")


def modelfile_path(file: Path) -> Path:
    """Return the path of the Modelfile beside a GGUF file."""
    return file.with_suffix(".Modelfile")


def _is_gguf(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as handle:
        return handle.read(len(_MAGIC)) == _MAGIC


def save_gguf(
    params: Params, config: TransformerConfig, file: Path, tokenizer: Any, *, dtype: str = "bfloat16"
) -> Path:
    """Write a GGUF file that llama.cpp and this project read; replaces an earlier file.

    The tensors are gathered to the host one at a time, while the previous one is written. The file is written
    under another name and then renamed, so it is never incomplete. Norms and biases are float32 in every
    file, as llama.cpp expects. In one process.

    Args:
        params: of any sharding; adapters are merged, quantized weights dequantized (`hf.gather`).
        dtype: of the matrices: "float32", "float16", "bfloat16" or "q8_0", which has 8 bits a number and a
            scale for each 32 numbers of a row.

    Raises:
        UserError: a GGUF file cannot express the model or the tokenizer, q8_0 cannot hold a row, or no space
            on the disk; nothing is written.
        RunError: weights that are NaN or Inf in `dtype`; names them. An earlier file stays.
        OSError: the disk fails or fills up. An earlier file stays.
    """
    import gguf

    config = export_config(config)
    architecture = _check_config(config)
    metadata = _metadata(config, architecture) | {
        f"tokenizer.{key}": value for key, value in gguf_vocabulary(tokenizer, config.vocab_size).items()
    }
    tensors = [_encoded(tensor, config, architecture, dtype) for tensor in hf_tensors(config)]
    check_export_disk(file.absolute(), sum(_size(tensor, dtype) for tensor in tensors), _OTHER_BYTES)
    # The header, with the places of tensors that come later.
    partial = file.with_name(f".{file.name}.partial")
    writer = gguf.GGUFWriter(partial, architecture)
    writer.add_name(file.stem)
    writer.add_file_type(gguf.LlamaFileType[_TYPES[dtype][1]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_metadata(writer, metadata)
    factors = _frequency_factors(config)
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    groups = {}
    for tensor in tensors:  # the experts of a layer are one tensor in the file
        groups.setdefault(gguf_name(architecture, config.num_layers, tensor.name), []).append(tensor)
    for name, (tensor, *others) in groups.items():
        own, kind = _size(tensor, dtype), gguf.GGMLQuantizationType[_kind(tensor, dtype)]
        shape, own = gguf_shape(tensor, config), own * (1 + len(others))
        writer.add_tensor_info(name, shape, np.dtype(np.float32), own, raw_dtype=kind)
    # The file, complete or absent.
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        _write_tensors(writer, params, [*groups.values()], dtype)
        for handle in writer.fout:
            sync_to_disk(handle)
        writer.close()
        os.replace(partial, file)
    finally:  # an incomplete file must not fill the disk
        writer.close()
        partial.unlink(missing_ok=True)
    return file


def write_modelfile(file: Path, tokenizer: Any, temperature: float, stop: tuple[str, ...] = ()) -> Path:
    """Write the Modelfile of a GGUF file, for `ollama create NAME -f FILE.Modelfile`.

    Args:
        temperature: of the run's rollout.
        stop: strings that end a response, besides the end tokens.
    """
    ends = tokenizer.convert_ids_to_tokens(sorted(text_ends(tokenizer)))
    quotes = lambda text: '"""' if '"' in text or "\n" in text else '"'  # no escapes in a Modelfile
    lines = [f"FROM ./{file.name}", f"PARAMETER temperature {temperature:g}"]
    for text in dict.fromkeys((*ends, *stop)):
        lines.append(f"PARAMETER stop {quotes(text)}{text}{quotes(text)}")
    path = modelfile_path(file)
    replace_text(path, "\n".join(lines) + "\n")
    return path


def _check_config(config: TransformerConfig) -> str:
    """Return the architecture of the file; refuse what it cannot express."""
    if config.family not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UserError(f"export: no GGUF file of family={config.family!r} is written; supported: {known}")
    if config.rope.scaling not in ("default", "linear", "yarn", "llama3"):
        raise UserError(
            f"export: a GGUF file cannot express rope_type={config.rope.scaling!r}; supported: default, "
            "linear, yarn, llama3"
        )
    architecture = _ARCHITECTURES[config.family]
    if architecture in ("qwen3", "qwen3moe") and config.qkv_bias:
        raise UserError(f"export: llama.cpp reads no {architecture} with attention_bias=true")
    if architecture == "qwen2" and config.num_heads * config.head_dim != config.hidden_size:
        split = f"hidden_size / num_attention_heads, {config.hidden_size} / {config.num_heads}"
        raise UserError(
            f"export: llama.cpp reads no qwen2 with head_dim={config.head_dim} other than {split}"
        )
    # The keys of the file, as config.json of this architecture.
    raw = to_hf_config(config)
    kept = {key: raw[key] for key in (*gguf_keys(architecture), *_KEPT) if key in raw}
    scaling, kind = raw["rope_scaling"], config.rope.scaling
    if scaling:
        names = {"linear": ("factor",), "yarn": ("factor", *GGUF_YARN), "llama3": _LLAMA3}[kind]
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
        scaling = {"rope_type": kind, **{name: scaling[name] for name in names}, **fixed}
    family = FAMILIES[architecture]
    kept |= {"model_type": family, "rope_scaling": scaling, "norm_topk_prob": True}
    same = dataclasses.replace(config, family=family)
    check_round_trip(same, kept, f"a GGUF file of architecture {architecture}")
    return architecture


def _metadata(config: TransformerConfig, architecture: str) -> dict[str, Any]:
    """Return the keys of the architecture."""
    raw = to_hf_config(config)
    keys = {ours: raw[theirs] for theirs, ours in gguf_keys(architecture).items()}
    keys |= {"rope.freq_base": float(config.rope.theta), "vocab_size": config.vocab_size}
    keys |= dict.fromkeys(
        ("rope.dimension_count", "attention.key_length", "attention.value_length"), config.head_dim
    )
    scaling = raw["rope_scaling"] or {}
    if config.rope.scaling in ("linear", "yarn"):
        keys |= {"rope.scaling.type": config.rope.scaling, "rope.scaling.factor": float(scaling["factor"])}
    if config.rope.scaling == "yarn":
        keys |= {f"rope.scaling.{theirs}": scaling[name] for name, theirs in GGUF_YARN.items()}
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def _add_metadata(writer: Any, metadata: dict[str, Any]) -> None:
    """Add each key with the type of its value."""
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        if isinstance(value, dict):  # several chat templates
            writer.add_chat_template([{"name": name, "template": text} for name, text in value.items()])
        else:
            add.get(type(value), writer.add_array)(key, value)


def _frequency_factors(config: TransformerConfig) -> np.ndarray | None:
    """Return what llama.cpp divides the frequencies of RoPE by, float32 [head_dim / 2]; None = nothing.

    Llama 3's scaling: 1 for short waves, the factor for long ones, and between them a mixture of both
    frequencies.
    """
    rope = config.rope
    if rope.scaling != "llama3":
        return None
    frequencies, _ = rope_frequencies(config, RopeConfig(rope.theta))
    scaled, _ = rope_frequencies(config, rope)
    return (frequencies / scaled).astype(np.float32)


def _encoded(tensor: HFTensor, config: TransformerConfig, architecture: str, dtype: str) -> HFTensor:
    """Return the tensor with its form in the file: its type, and llama.cpp's order of the rows of q and k."""
    heads = 0
    if architecture == "llama" and ".self_attn." in tensor.name:
        module = tensor.name.split(".self_attn.")[1].partition(".")[0]
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(module, 0)
    is_rounded = _kind(tensor, dtype) != "F32" and dtype != "q8_0"  # float32 is what is quantized
    return tensor._replace(encoding=_encoding(dtype if is_rounded else "float32", heads))


@functools.cache
def _encoding(dtype: str, heads: int) -> Encoding:
    """Return the form of a matrix of so many heads with interleaved pairs, 0 = as it is; cached, for jit."""

    def apply(matrix: jax.Array) -> jax.Array:
        rows = matrix
        if heads:  # from half-split pairs
            rows = matrix.reshape(heads, 2, -1, *matrix.shape[1:]).swapaxes(1, 2).reshape(matrix.shape)
        return rows.astype(jnp.dtype(dtype))

    return Encoding(dtype, apply)


def _kind(tensor: HFTensor, dtype: str) -> str:
    """Return the gguf library's name of a tensor's type: vectors and routers are float32."""
    return _TYPES[dtype][0] if len(tensor.shape) > 1 and not tensor.name.endswith(_ROUTER) else "F32"


def _size(tensor: HFTensor, dtype: str) -> int:
    """Return the bytes of a tensor in the file."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[_kind(tensor, dtype)]]
    if tensor.shape[-1] % block:
        raise UserError(
            f"export: {dtype} has blocks of {block} numbers, but a row of {tensor.name} has "
            f"{tensor.shape[-1]}; supported for this model: float32, float16, bfloat16"
        )
    return math.prod(tensor.shape) // block * size


def _write_tensors(writer: Any, params: Params, groups: list[list[HFTensor]], dtype: str) -> None:
    """Write the tensors in order, one at a time; each is one of the model, or all experts of a layer.

    Raises:
        RunError: tensors are not finite.
    """
    import gguf

    bad = []
    for group, gathered in zip(groups, gather_checked(params, groups, "float32"), strict=True):
        parts = []
        for tensor, (array, finite) in zip(group, gathered, strict=True):
            if not finite:
                bad.append(tensor.name)
                array = np.zeros_like(array)
            if _kind(tensor, dtype) == "Q8_0":
                array = gguf.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        writer.write_tensor_data(np.concatenate(parts) if len(parts) > 1 else parts[0])
    refuse_not_finite(bad, f"{sum(map(len, groups))} tensors", dtype)
