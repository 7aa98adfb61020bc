"""GGUF files (llama.cpp), converted once to a Hugging Face folder in the user's cache.

Loading, tokenizers, export and servers then read the folder and need no separate code for GGUF. Weights are
dequantized to float32, which represents quantized values exactly, unlike bfloat16.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.extensions import import_extra
from jaxrl_llm.hf.config import read_config, to_hf_config
from jaxrl_llm.hf.export import plan_files, write_description, write_safetensors
from jaxrl_llm.hf.folder import list_problems
from jaxrl_llm.hf.gguf_names import (
    EXPERT,
    FAMILIES,
    GGUF_YARN,
    ROPE_FACTORS,
    gguf_keys,
    gguf_name,
    gguf_shape,
)
from jaxrl_llm.hf.gguf_tokenizer import Read, end_ids, make_gguf_tokenizer
from jaxrl_llm.hf.names import HFTensor, hf_tensors
from jaxrl_llm.hf.tokenizer import special_ids
from jaxrl_llm.host.command import working
from jaxrl_llm.host.files import cache_folder, write_json
from jaxrl_llm.host.lock import cache_lock
from jaxrl_llm.host.processes import print_on_first
from jaxrl_llm.models import TransformerConfig

_FORMAT = 4
"""Version of conversions. Version 1 (without a number) lacked tokens that begin a text, 2 lacked settings of
RoPE, 3 split text into other tokens than llama.cpp."""
_SHARD_BYTES = 4 * 2**30
_PARTIAL = ".partial"  # ends the names of folders that are being written
_FRACTIONS = ("rms_norm_eps", "rope_theta")
_NEUTRAL = {
    **{"expert_count": 0, "expert_shared_count": 0, "expert_group_count": 0, "expert_weights_scale": 1},
    **{"attention.sliding_window": 0, "attention.layer_norm_epsilon": 0, "logit_scale": 0},
    **{"attention.causal": True, "rope.scaling.attn_factor": 1, "rope.scaling.yarn_attn_factor": 1},
    **{"rope.scaling.yarn_ext_factor": 1, "rope.scaling.yarn_log_multiplier": 0},
}
"""Keys that change the computation in unsupported ways -> the value that changes nothing."""
_KINDS = {int: "a whole number", float: "a number", str: "text"}
"""Types of metadata, in words."""


def convert_gguf(file: Path) -> Path:
    """Return the Hugging Face folder of a GGUF file, which is converted on first use.

    The folder is named by the SHA-256 of the file and the version of conversions, in
    $XDG_CACHE_HOME/jaxrl_llm/gguf (~/.cache by default).

    Raises:
        UserError: the extra `gguf` is not installed; the file is damaged or one of several parts;
            architecture, RoPE or quantization is not supported; or the disk is full.
    """
    folder = converted_folder(file)
    if (folder / "config.json").is_file():
        return folder
    model = _GgufModel(file, _open(file))
    try:
        with cache_lock(folder.parent) as alone:
            for left in folder.parent.glob(f".*{_PARTIAL}") if alone else ():  # left by a killed process
                shutil.rmtree(left, ignore_errors=True)
            if not (folder / "config.json").is_file():  # another process may have been faster
                _convert(model, folder)
    except OSError as error:
        raise UserError(
            f"{file}: its conversion cannot be written to {folder.parent} ({error.strerror}). Set "
            "XDG_CACHE_HOME to a folder that you may write to, on a disk with room for it."
        ) from error
    return folder


def _convert(model: _GgufModel, folder: Path) -> None:
    """Write the folder of a GGUF file: complete or absent."""
    tensors = model.check_tensors()
    shards = plan_files(tensors, dtype="float32", limit=_SHARD_BYTES)
    needed = sum(size for _, _, size in shards)
    partial = folder.with_name(f".{folder.name}.{uuid4().hex[:8]}{_PARTIAL}")
    try:
        partial.mkdir()
        if (free := shutil.disk_usage(partial).free) < needed + 2**26:
            raise UserError(
                f"{model.file}: converting it needs {needed:,} bytes in {folder.parent}, but {free:,} are "
                "free. Free some space, or set XDG_CACHE_HOME to a larger disk."
            )
        for name, members, _ in shards:
            write_safetensors(partial / name, members, map(model.tensor, members), "float32")
        tokenizer = model.tokenizer()
        raw = to_hf_config(model.config, "float32") | special_ids(tokenizer)
        write_description(partial, raw, shards, tokenizer)
        write_json(partial / "generation_config.json", model.generation_config())
        if not folder.exists():  # another process may win on filesystems without locks
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def converted_folder(file: Path) -> Path:
    """Return the folder of a GGUF file's conversion, whether it exists or not."""
    status = file.stat()
    digest = _digest(file, status.st_size, status.st_mtime_ns)[:16]
    return gguf_cache() / f"{file.stem}-{digest}-{_FORMAT}"


@functools.cache
def _digest(file: Path, size: int, changed: int) -> str:
    """Return the SHA-256 of a file; cached by size and modification time."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def read_gguf_config(file: Path) -> TransformerConfig:
    """Return the architecture of a GGUF file, without converting it. Raises UserError, as `convert_gguf`."""
    status = file.stat()
    return _config_of(file, status.st_size, status.st_mtime_ns)


@functools.cache
def _config_of(file: Path, size: int, changed: int) -> TransformerConfig:
    """Return the architecture of a file, whose vocabulary takes seconds to read; cached as `_digest` is."""
    return _GgufModel(file, _open(file)).config


class _GgufModel:
    """Metadata and tensors of a GGUF file, in the names of Hugging Face."""

    def __init__(self, file: Path, reader: Any):
        self.file, self.fields = file, reader.fields
        self.stored = {tensor.name: tensor for tensor in reader.tensors}
        self.family = self.value("general.architecture", kind=str)
        if self.family not in FAMILIES:
            raise self.wrong(
                f"general.architecture={self.family!r} is not supported; supported: {', '.join(FAMILIES)}"
            )
        raw = self._config()
        try:
            self.config: TransformerConfig = read_config(raw)
        except UserError as error:
            raise self.wrong(f"its metadata, as {error}") from error

    def value(self, key: str, default: Any = None, *, kind: type | None = None) -> Any:
        """Return a metadata value.

        Args:
            kind: int, float (any number) or str; None = values of all types.

        Raises:
            UserError: the value has another type, or text is not UTF-8.
        """
        if key not in self.fields:
            return default
        try:
            value = self.fields[key].contents()
        except UnicodeDecodeError as error:
            raise self.wrong(f"damaged: {key} is not text ({error.reason})") from error
        allowed = (int, float) if kind is float else kind
        if kind and (isinstance(value, bool) or not isinstance(value, allowed)):
            raise self.wrong(f"{key}={value!r:.80} is not supported; supported: {_KINDS[kind]}")
        return value

    def own(self, key: str, default: Any = None, *, kind: type | None = None) -> Any:
        """Return a metadata value of the architecture; see `value`."""
        return self.value(f"{self.family}.{key}", default, kind=kind)

    def wrong(self, problem: str) -> UserError:
        return UserError(f"{self.file}: {problem}")

    def _config(self) -> dict[str, Any]:
        """Return the content of config.json.

        Raises:
            UserError: a key is missing, or the decoder does not support its value.
        """
        # Unsupported keys are refused; then the sizes.
        keys = gguf_keys(self.family)
        for key, neutral in _NEUTRAL.items():
            if self.own(key, neutral) != neutral and key not in keys.values():
                stored = f"{self.family}.{key}={self.own(key)}"
                raise self.wrong(f"{stored} is not supported; supported: {neutral}")
        if (count := self.value("split.count", 1, kind=int)) > 1:
            raise self.wrong(f"one of {count} parts; join them with llama-gguf-split --merge")
        raw = {name: self.own(key, kind=float if name in _FRACTIONS else int) for name, key in keys.items()}
        raw["num_key_value_heads"] = raw["num_key_value_heads"] or raw["num_attention_heads"]
        raw["rope_theta"] = raw["rope_theta"] or 10_000.0
        missing = [f"{self.family}.{keys[name]}" for name, value in raw.items() if value is None]
        missing += [name for name in ("token_embd.weight",) if name not in self.stored]
        if missing:
            raise self.wrong(f"no {missing[0]}, which a {self.family} file has; it is damaged")
        # Keys of transformers that the file has in another form.
        raw = {name: _shortest(value) for name, value in raw.items()}
        vocabulary = int(self.stored["token_embd.weight"].shape[-1])
        return raw | {
            "model_type": FAMILIES[self.family],
            "norm_topk_prob": True,  # of experts
            "head_dim": self._head_dim(raw),
            "vocab_size": vocabulary,
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in self.stored,
            "attention_bias": "blk.0.attn_q.bias" in self.stored,
            "rope_scaling": self._rope_scaling(),
        }

    def _head_dim(self, raw: dict[str, Any]) -> int:
        """Return the size of a head, which must be the same for keys, values and RoPE."""
        rotary = self.own("rope.dimension_count", kind=int)
        split = raw["hidden_size"] // max(1, raw["num_attention_heads"])
        size = self.own("attention.key_length", kind=int) or rotary or split
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.own(key, size) != size:
                raise self.wrong(f"{self.family}.{key}={self.own(key)} must be the head size {size}")
        return size

    def _rope_scaling(self) -> dict[str, Any] | None:
        """Return `rope_scaling` of config.json.

        A factor without a type is linear, as in llama.cpp. For Llama 3, the file has a table of frequency
        factors instead of settings; the settings are found by comparison.
        """
        kind = self.own("rope.scaling.type", "linear", kind=str)
        factors = (self.own(f"rope.{key}", kind=float) for key in ("scaling.factor", "scale_linear"))
        factor = next(filter(None, factors), 1.0)
        if kind == "linear" and factor == 1.0:
            kind = "none"
        has_table = ROPE_FACTORS in self.stored
        if kind not in (("none",) if has_table else ("none", "linear", "yarn")):
            supported = f"none, beside {ROPE_FACTORS}" if has_table else "none, linear, yarn"
            raise self.wrong(f"rope.scaling.type={kind!r} is not supported; supported: {supported}")
        if has_table:
            return self._llama3_scaling(np.asarray(self.stored[ROPE_FACTORS].data, np.float64))
        scaling = {"rope_type": kind, "factor": factor} if kind != "none" else {}
        if kind == "yarn":
            scaling |= {name: self.own(f"rope.scaling.{key}", kind=float) for name, key in GGUF_YARN.items()}
        return {name: _shortest(value) for name, value in scaling.items()} or None

    def _llama3_scaling(self, factors: np.ndarray) -> dict[str, Any]:
        """Return the settings that give the file's factors; llama.cpp divides the frequencies by them.

        Any factor between 1 and the largest one, where the two scalings are mixed, determines the original
        length. Without such a factor, any length that reproduces the factors is equivalent: use 8192 if it
        does.
        """
        theta, low, high = self.own("rope.freq_base", 10_000.0, kind=float), 1.0, 4.0
        waves = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
        factor = float(factors.max())
        is_mixed = (factors > 1.001) & (factors < factor * 0.999)
        smooth = (1 / factors[is_mixed] - 1 / factor) / (1 - 1 / factor)
        found = np.rint(waves[is_mixed] * (low + smooth * (high - low)))[:1].astype(int).tolist()
        for original in (8192, *found, *(2**power for power in range(9, 20))):
            smooth = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
            if np.allclose(1.0 / ((1 - smooth) / factor + smooth), factors, rtol=1e-3):
                break
        else:
            raise self.wrong(f"{ROPE_FACTORS} is not the scaling of Llama 3, the only one that is supported")
        settings = {"low_freq_factor": low, "high_freq_factor": high, "factor": round(factor, 4)}
        return {"rope_type": "llama3", **settings, "original_max_position_embeddings": original}

    def check_tensors(self) -> list[HFTensor]:
        """Return the tensors of the folder; check that the file has each with its shape.

        Raises:
            UserError: tensors are missing, unexpected, of another shape, or of a type without dequantizer.
        """
        tensors = hf_tensors(self.config)
        name_of = functools.partial(gguf_name, self.family, self.config.num_layers)
        expected = {name_of(tensor.name): gguf_shape(tensor, self.config) for tensor in tensors}
        shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self.stored.items()}
        types = {name: t.tensor_type for name, t in self.stored.items()}
        problems = {
            "missing": [name for name in expected if name not in shapes],
            "unexpected": [name for name in shapes if name not in expected and name != ROPE_FACTORS],
            "of another shape": [n for n in expected if n in shapes and shapes[n] != expected[n]],
            "of a type that cannot be dequantized": [
                f"{name} {kind.name}"
                for name, kind in types.items()
                if name in expected and not _can_dequantize(self.stored[name])
            ],
        }
        if found := list_problems(problems):
            raise self.wrong(f"not the tensors that its {self.family} metadata describes; {found}")
        return tensors

    def tensor(self, tensor: HFTensor) -> np.ndarray:
        """Return a tensor as HF stores it, float32."""
        from gguf import dequantize

        name = gguf_name(self.family, self.config.num_layers, tensor.name)
        stored, expert = self.stored[name], EXPERT.search(tensor.name)
        data = stored.data[int(expert[1])] if expert else stored.data
        array = np.asarray(dequantize(data, stored.tensor_type), np.float32).reshape(tensor.shape)
        if self.family == "llama" and (".attn_q." in name or ".attn_k." in name):
            heads = self.config.num_heads if ".attn_q." in name else self.config.num_kv_heads
            array = _halves(array, heads)
        return np.ascontiguousarray(array)

    def tokenizer(self) -> Any:
        """Return the file's tokenizer with its chat template.

        Raises:
            UserError: the file has no tokenizer, or an unsupported one.
        """
        if self.value("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in self.fields:
            print_on_first(
                f"note: {self.file} has no tokenizer.ggml.pre: text is cut as llama.cpp cuts it by default, "
                "maybe not as the model was trained. Name the rules in a copy of the file: gguf-new-metadata "
                "--pre-tokenizer NAME OLD.gguf NEW.gguf"
            )
        return self._of_tokenizer(make_gguf_tokenizer)

    def generation_config(self) -> dict[str, Any]:
        """Return the content of generation_config.json: a chat model may have several end tokens."""
        return {"eos_token_id": self._of_tokenizer(end_ids)}

    def _of_tokenizer(self, function: Callable[[Read], Any]) -> Any:
        """Call the function with a reader of the tokenizer's metadata; turn its errors into UserErrors."""
        try:
            return function(lambda key, default=None: self.value(f"tokenizer.{key}", default))
        except UserError as error:
            raise self.wrong(str(error)) from error
        except BaseException as error:  # also Rust panics, not Exceptions
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            reason = " ".join(str(error).split())  # of the library's several lines
            raise self.wrong(f"its tokenizer cannot be read ({type(error).__name__}: {reason})") from error


def _open(file: Path) -> Any:
    gguf = import_extra("gguf", "gguf", needed_by=str(file))
    try:
        with working(f"reading {file.name}"):  # seconds for each 100,000 tokens of its tokenizer
            return gguf.GGUFReader(file)
    except (ValueError, IndexError, KeyError, OSError, OverflowError, MemoryError) as error:
        raise UserError(f"{file}: truncated, damaged, or no GGUF file ({error})") from error


def gguf_cache() -> Path:
    """Return the folder of converted GGUF files."""
    return cache_folder("gguf")


def _can_dequantize(stored: Any) -> bool:
    """Return whether the gguf library can dequantize the type, by trying one row."""
    from gguf import dequantize

    try:
        dequantize(stored.data[:1], stored.tensor_type)
    except NotImplementedError:
        return False
    return True


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of q or k from interleaved RoPE pairs (llama.cpp) to half-split pairs."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _shortest(value: Any) -> Any:
    """Return a float32 as the shortest decimal with the same float32 value: 1e-05, not 9.99999975e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
