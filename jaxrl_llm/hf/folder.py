"""Hugging Face folders, checked before a byte of their weights is used."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.carried import (
    PROCESSOR_FILES,
    Carried,
    Outer,
    nothing_carried,
    predictor_keys,
    predictor_names,
)
from jaxrl_llm.hf.config import WRAPPERS, language_config
from jaxrl_llm.hf.family_names import OTHER_NAMES, TABLE
from jaxrl_llm.hf.json_file import JsonKeys, read_json
from jaxrl_llm.hf.names import HFTensor, hf_tensors
from jaxrl_llm.hf.quantization import read_quantization
from jaxrl_llm.hf.stored import FLOATS, StoredTensor, join_scales, read_header, read_values
from jaxrl_llm.host.processes import print_on_first
from jaxrl_llm.models import TransformerConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING, HEAD, SCORE = (TABLE[ours][0] for ours in ("embed", "lm_head", "value"))

_KEYS = re.compile(r"model\.layers\.(\d{1,9})\.self_attn\.[kv]_(?:proj|norm)\.")
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")  # buffers in old checkpoints
_PREFIX = re.compile(r"^(base_model\.model\.)?(?:language_model\.|(model\.)language_model\.)")
_OTHER_MODEL = re.compile(
    r"(base_model\.model\.)?(model\.)?(?P<module>(vision|audio)_tower|embed_(vision|audio)|multi_modal_projector|vision_model|visual)\."
)
FUSED_EXPERTS = {
    "layers.router": ("gate.weight", 0, 1),
    "layers.router_bias": ("e_score_correction_bias", 0, 1),
    "layers.expert_gate": ("experts.gate_up_proj", 0, 2),
    "layers.expert_up": ("experts.gate_up_proj", 1, 2),
    "layers.expert_down": ("experts.down_proj", 0, 1),
}
"""Our weight -> (module of the fused experts, index of the part, number of parts), concatenated by rows."""
CONVOLUTIONS = ("layers.delta_conv_q", "layers.delta_conv_k", "layers.delta_conv_v")
FUSED_CONVOLUTION = "model.layers.{}.linear_attn.conv1d.weight"
_SHOWN = 8
_COMPARED_ROWS = 4096  # of two vocabularies, at once
MAX_NAME = 255  # bytes of a file's name


def read_headers(folder: Path, config: TransformerConfig) -> dict[str, StoredTensor]:
    """Return the weights of the folder; check that names, shapes and types match the model.

    Raises:
        UserError: see `_weight_files`, `read_header`, `_check_tied_head`; or tensors are missing, unexpected,
            of another shape or type: one message lists all of them.
    """
    raw = read_json(folder / "config.json")
    stored, others = language_model(_read_tensors(folder))
    unused = predictor_names(config, language_config(raw), stored)
    stored = _split_convolutions(_original_names(_split_experts(stored, config), config), config)
    expected = {tensor.name: tensor.shape for tensor in hf_tensors(config)}
    ignored = {HEAD} if config.tie_embeddings else set()
    unread = _unread_keys(stored, config)
    ignored |= {name for name in stored if _DERIVED.fullmatch(name)} | unused | unread
    if problem := list_mismatches(stored, expected, "config.json", ignored):
        what = f"not the weights that its {config.family} config.json describes"
        raise UserError(f"{folder}: {what}; {problem}")
    if config.tie_embeddings and HEAD in stored and SCORE not in stored:  # a classifier does not use it
        _check_tied_head(stored[HEAD], stored[EMBEDDING])
    if others and not _is_carried(config, raw):
        print_on_first(f"{folder}: left out of the model and of exports: {list_modules(others)}")
    elif others:
        print_on_first(f"{folder}: {list_modules(others)} are not used; exports copy them")
    if unused:
        line = f"{len(unused)} weights of multi-token prediction are not used; exports copy them"
        print_on_first(f"{folder}: {line}")
    if unread:
        line = f"left out: {len(unread)} weights of keys and values of layers that read other layers'"
        print_on_first(f"{folder}: {line}")
    return {name: stored[name] for name in expected}


def read_carried(folder: Path, config: TransformerConfig) -> Carried:
    """Return the parts of the folder that exports of its language model copy.

    Args:
        config: of the language model.

    Raises:
        UserError: see `_weight_files`, `read_header`; or tensors have a type that cannot be copied.
    """
    raw = read_json(folder / "config.json")
    inner, others = language_model(stored := _read_tensors(folder))
    text = language_config(raw)
    predictors = {name: inner[name] for name in predictor_names(config, text, inner)}
    outer = None
    if others and _is_carried(config, raw):
        prefix = next(match[0] for name in stored if (match := _PREFIX.match(name)))
        files = [file_inside(folder, name) for name in PROCESSOR_FILES if (folder / name).is_file()]
        outer = Outer(raw, prefix, tuple(files))
    # The outer model has all names as they are in the folder.
    tensors = {x.source: x for x in predictors.values()} | others if outer else predictors
    for name, tensor in tensors.items():
        if not tensor.can_copy:
            raise UserError(
                f"{tensor.file}: {name} {list(tensor.shape)} has type {tensor.dtype}, which is not copied"
            )
    keys = predictor_keys(config, text) if predictors else nothing_carried(config).keys
    return Carried(keys, dict(sorted(tensors.items())), outer)


def _is_carried(config: TransformerConfig, raw: Mapping[str, Any]) -> bool:
    """Return whether exports are folders of the outer model that config.json describes."""
    return "text_config" in raw and config.family in WRAPPERS.get(str(raw.get("model_type")), ())


def _read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of the folder, quantized ones with their scales.

    Raises:
        UserError: as `_weight_files` and `read_header`, or a tensor is in two files.
    """
    stored: dict[str, StoredTensor] = {}
    for file in _weight_files(folder):
        for name, entry in read_header(file).items():
            if name in stored:
                raise UserError(
                    f"{file}: {name} is also in {stored[name].file.name}; one of the files is stale"
                )
            stored[name] = entry
    file = str(folder / "config.json")
    raw = language_config(read_json(folder / "config.json"))
    return join_scales(stored, read_quantization(JsonKeys(raw, file, {})))


def language_model(
    stored: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Return the language model's tensors, under the names of a folder without other models, and the others.

    In a model that also sees images they have a prefix, in one of two places (transformers 4 and 5).
    """
    if not any(_PREFIX.match(name) for name in stored):
        return dict(stored), {}
    others = {name: entry for name, entry in stored.items() if _OTHER_MODEL.match(name)}
    inner = {_PREFIX.sub(r"\1\2", name): entry for name, entry in stored.items() if name not in others}
    return inner, others


def list_modules(others: Collection[str]) -> str:
    """Return the modules of tensors that are not the language model's, and their number."""
    found = {match["module"] for name in others if (match := _OTHER_MODEL.match(name))}
    return f"{' and '.join(sorted(found))} ({len(others)} weights)"


def _check_tied_head(head: StoredTensor, embedding: StoredTensor) -> None:
    """Refuse a head that differs from tied embeddings: transformers 5 uses it, 4 does not.

    Raises:
        UserError: head and embedding differ.
    """
    equal = head.shape == embedding.shape and head.is_readable
    for start in range(0, head.shape[0], _COMPARED_ROWS) if equal else ():
        rows = slice(start, min(start + _COMPARED_ROWS, head.shape[0]))
        index = (rows, slice(0, head.shape[1]))
        blocks = [read_values(tensor, index).astype(np.float32) for tensor in (head, embedding)]
        equal = equal and np.array_equal(*blocks)
    if not equal:
        raise UserError(
            f"{head.file}: {HEAD} differs from {EMBEDDING}, but tie_word_embeddings is true in config.json. "
            "Make it false to use this head, as transformers 5 does, or remove the tensor, which 4 ignores."
        )


def _unread_keys(stored: Collection[str], config: TransformerConfig) -> set[str]:
    """Return the key and value weights of layers that read earlier layers' keys; transformers skips them,
    too."""
    first = config.num_layers - config.shared_kv_layers
    found = ((name, _KEYS.match(name)) for name in stored if config.shared_kv_layers)
    return {name for name, match in found if match and first <= int(match[1]) < config.num_layers}


def _split_experts(stored: dict[str, StoredTensor], config: TransformerConfig) -> dict[str, StoredTensor]:
    """Split tensors that hold all experts of a layer into one tensor per expert, under the usual names.
    Transformers 5 fuses experts in memory, and `save_pretrained(..., save_original_format=False)` writes
    fused experts.
    """
    model = [tensor for tensor in hf_tensors(config) if _row(tensor) in FUSED_EXPERTS]
    if any(tensor.name in stored for tensor in model if ".experts." in tensor.name):
        return stored
    out = dict(stored)
    for tensor in model:
        _, (_, *expert) = tensor.parts[0]
        module, part, parts = FUSED_EXPERTS[_row(tensor)]
        name = f"{'.'.join(tensor.name.split('.')[:3])}.mlp.{module}"  # "model.layers.3.mlp.gate.weight"
        rows, *columns = tensor.shape
        shape = (*[config.moe.num_experts for _ in expert], parts * rows, *columns)
        if name in stored and stored[name].shape == shape:
            entry = stored[name]._replace(shape=tensor.shape)
            out.pop(name, None)
            out[tensor.name] = entry._replace(expert=expert[0] if expert else None, start=part * rows)
    return out


def _original_names(stored: dict[str, StoredTensor], config: TransformerConfig) -> dict[str, StoredTensor]:
    """Return the weights under the names of published folders (`OTHER_NAMES`)."""
    other_names, out = OTHER_NAMES.get(config.family, {}), dict(stored)
    for tensor in hf_tensors(config) if other_names else ():
        other = other_names.get(_row(tensor), "").format(*_layer(tensor))
        if tensor.name not in stored and other in stored:
            out[tensor.name] = out.pop(other)
    return out


def _split_convolutions(
    stored: dict[str, StoredTensor], config: TransformerConfig
) -> dict[str, StoredTensor]:
    """Split convolutions of queries, keys and values together into one each.

    Transformers 5.24 keeps the three of OLMo-hybrid in one tensor, and `save_pretrained` writes this in three
    equal parts, whatever the channels of queries, keys and values are.
    """
    convolutions = [tensor for tensor in hf_tensors(config) if _row(tensor) in CONVOLUTIONS]
    out = dict(stored)
    for i in range(0, len(convolutions), len(CONVOLUTIONS)):
        parts = convolutions[i : i + len(CONVOLUTIONS)]
        channels, rest = sum(part.shape[0] for part in parts), parts[0].shape[1:]
        third = -(-channels // len(parts))
        whole = FUSED_CONVOLUTION.format(*_layer(parts[0]))
        thirds = {p.name: min(third, channels - k * third) for k, p in enumerate(parts)}
        for sizes in ({whole: channels}, thirds):
            if all(name in stored and stored[name].shape == (n, *rest) for name, n in sizes.items()):
                joined, start = tuple(out.pop(name) for name in sizes), 0
                for part in parts:
                    out[part.name] = joined[0]._replace(shape=part.shape, start=start, joined=joined)
                    start += part.shape[0]
                break
    return out


def _row(tensor: HFTensor) -> str:
    """Return the key in TABLE of the first weight of ours in a tensor of a layer."""
    return f"layers.{tensor.parts[0][0].partition('.')[2]}"


def _layer(tensor: HFTensor) -> list[str]:
    """Return the number of a tensor's layer, as in its name; [] outside the layers."""
    return re.findall(r"\.layers\.(\d+)\.", tensor.name)


def list_mismatches(
    stored: dict[str, StoredTensor],
    expected: dict[str, tuple[int, ...]],
    source: str,
    ignored: Collection[str] = (),
) -> str:
    """Return how the stored tensors differ from the expected ones in name, shape and type; "" if they match.

    Args:
        expected: name -> shape.
        source: origin of the expected shapes, for the message.
        ignored: names that may be present without being expected.
    """
    extra = [name for name in stored if name not in expected and name not in ignored]
    both = [name for name in expected if name in stored]
    place = lambda n: f"{n} {list(stored[n].shape)} in {stored[n].file.name}"
    return list_problems(
        {
            "missing": [f"{n} {list(expected[n])}" for n in expected if n not in stored],
            "unexpected": [place(n) for n in extra],
            "of another shape": [
                f"{place(n)}, {source} says {list(expected[n])}"
                for n in both
                if stored[n].shape != expected[n]
            ],
            f"of a type other than {', '.join(FLOATS)}": [
                f"{n} {stored[n].dtype} in {stored[n].file.name}" for n in both if not stored[n].is_readable
            ],
        }
    )


def refuse_remote_code(folder: Path) -> None:
    """Refuse a folder whose config.json names custom Python code, which is never run.

    Baichuan, Qwen 1, DeepSeek-V3, MiniMax-M2 and Phi-3.5 always name code; it is not needed here, since their
    decoders are built in.

    Raises:
        UserError: config.json names classes of Python files in the folder.
    """
    raw = read_json(folder / "config.json")
    built_in = ("baichuan", "qwen", "deepseek_v3", "minimax_m2", "phi3")
    if raw.get("auto_map") and raw.get("model_type") not in built_in:
        raise UserError(
            f"{folder / 'config.json'}: auto_map={raw['auto_map']} asks for the folder's own code, which is "
            f"never run. If the model is a plain {raw.get('model_type')}, remove auto_map to use it."
        )


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: the files of its index, or the single file.

    `save_pretrained` over an earlier folder may leave a stale index without its files beside a single file.

    Raises:
        UserError: no files, only pickle files, a missing file, a path that leads out of the folder, or both a
            single file and an index with other files.
    """
    # An index names the files, unless it is stale.
    has_single = (folder / SINGLE).exists()
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise UserError(f"{folder / INDEX}: weight_map must map tensor names to file names")
        names = sorted(set(weight_map.values()))
        for name in names:
            _check_name(folder, name)
        is_stale = has_single and SINGLE not in names
        if is_stale and any((folder / name).exists() for name in names):
            raise UserError(
                f"{folder}: both {SINGLE}, which transformers reads, and {INDEX} with other files "
                f"({names[0]}); one is stale. Remove {SINGLE}, or the index and its files."
            )
        if not is_stale:
            return [file_inside(folder, name) for name in names]
    if has_single:
        return [file_inside(folder, SINGLE)]
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise UserError(
            f"{folder}: only pickle weights ({pickles[0]}), which can run code when read and are refused. "
            "Convert them: transformers.AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    raise UserError(f"{folder}: no weights; looked for {SINGLE} and {INDEX}")


def _check_name(folder: Path, name: str) -> None:
    """Refuse an index entry that is not the name of a safetensors file in the folder."""
    is_plain = Path(name).name == name and Path(name).suffix == ".safetensors" and name.isprintable()
    if not is_plain or len(os.fsencode(name)) > MAX_NAME:
        raise UserError(f"{folder / INDEX}: {name[:80]!r} is not a safetensors file of this folder")


def file_inside(folder: Path, name: str) -> Path:
    """Return the file of this name; refuse a link that leads out of the folder (or hub cache)."""
    path = folder / name
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":  # the hub's cache: snapshots/<revision>/file -> blobs/<hash>
        allowed.append(home.parent.parent / "blobs")
    if path.resolve().parent not in allowed:
        raise UserError(f"{path}: a link out of the folder, to {path.resolve()}; copy the file instead")
    if not path.is_file():
        raise UserError(f"{path}: missing; {INDEX} names it. Copy or download the model again.")
    return path


def shorten_names(names: list[str]) -> str:
    """List the first few names and count the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def list_problems(problems: Mapping[str, list[str]]) -> str:
    """Return the problems that some names have, such as "2 missing: a, b; 1 unexpected: c"."""
    return "; ".join(
        f"{len(names)} {what}: {shorten_names(names)}" for what, names in problems.items() if names
    )
