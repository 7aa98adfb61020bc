"""Folders of adapters in the format of PEFT, written and read: adapter_model.safetensors, and its config."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.export import export_config, write_folder
from jaxrl_llm.hf.folder import file_inside, language_model, list_mismatches, list_modules
from jaxrl_llm.hf.json_file import JsonKeys
from jaxrl_llm.hf.layouts import from_hf, hf_shape
from jaxrl_llm.hf.load import read_slice
from jaxrl_llm.hf.names import HFTensor, TensorRows, adapter_tensors, as_parameters, is_stacked
from jaxrl_llm.hf.peft_config import (
    CONFIG,
    WEIGHTS,
    adapts_experts,
    check_same_adapters,
    file_factors,
    peft_config,
    read_adapter_config,
    read_adapter_keys,
)
from jaxrl_llm.hf.peft_modules import (
    PREFIX,
    FileAdapter,
    adapted_modules,
    check_trainable,
    config_of_file,
    module_of,
    saved_weights,
    target_of,
)
from jaxrl_llm.hf.stored import StoredTensor, read_header
from jaxrl_llm.host.files import write_json
from jaxrl_llm.host.processes import print_on_first
from jaxrl_llm.models import AdaptedConfig, abstract, named_leaves
from jaxrl_llm.models.lora import MARK, named_adapters, scale_b
from jaxrl_llm.structs import Params

PICKLE = "adapter_model.bin"
AS_PARAMETERS = ("qwen3_5_moe_text", "lfm2_moe", "nemotron_h")
"""Families whose experts peft adapts as parameters alone."""


def save_adapter(params: Params, folder: Path | str, base_name: str, *, is_part: bool = False) -> Path:
    """Write the model's adapters, float32, as a folder that PEFT and this project load.

    Replaces an earlier export. The folder is written under another name and then renamed, so it is never
    incomplete. A value head is written as PEFT writes the head of a sequence classifier. In a multi-process
    run every process calls this and process 0 writes.

    Args:
        params: with adapters; of any sharding.
        base_name: hub name or folder of the base model, whose weights are not written.
        is_part: PEFT loads the base as a model that also sees images, in which names are longer.

    Raises:
        UserError: no space on the disk, or a folder that holds anything but an earlier export.
        RunError: adapters that are NaN or Inf; names them. An earlier export stays.
        OSError: the disk fails or fills up. An earlier export stays.
    """
    folder, config = Path(folder).absolute(), export_config(params.config)
    config = as_parameters(config) if config.family in AS_PARAMETERS else config
    raw = peft_config(config, base_name)
    params = scale_b(params, file_factors(config))
    tensors = adapter_tensors(config)
    if is_part:
        inner, outer = f"{PREFIX}model.", f"{PREFIX}model.language_model."
        tensors = [tensor._replace(name=tensor.name.replace(inner, outer, 1)) for tensor in tensors]
    files = {WEIGHTS: tensors}
    write_folder(
        params,
        folder,
        files,
        "float32",
        write_rest=lambda path: write_json(path / CONFIG, raw),
        config_name=CONFIG,
    )
    return folder


def unread_by_peft(config: AdaptedConfig) -> str:
    """Return a line about adapters that PEFT does not load, or "".

    peft 0.21 does not know the names of Qwen2-MoE's experts in transformers 5; it warns and continues.
    """
    if config.family != "qwen2_moe" or not any(name.startswith("expert_") for name in config.adapters):
        return ""
    return (
        f"peft with transformers 5 ignores the adapters of {config.family}'s experts, with at most a warning "
        "on its rank_pattern: load the merged model there"
    )


def load_adapter(folder: Path | str, config: AdaptedConfig, trains: bool = False) -> dict[str, np.ndarray]:
    """Load the weights of a PEFT folder by our names ("layers.q_lora_a" [L, D, R] ...), float32.

    Also the embedding and the head, if the folder holds them.

    Args:
        folder: with bf16, fp16 or fp32 safetensors.
        config: of the model that gets the adapters; its `lora` is `read_adapter_config(folder)`. If it has a
            value head, the folder needs one too.
        trains: refuse an adapter that training would change differently from peft.

    Raises:
        UserError: as `read_adapter_config`; rank, scale or layers differ from `config`; tensors are missing,
            unexpected, misshapen, damaged, pickled, outside the folder, NaN or Inf.
    """
    folder, family = Path(folder), config.family
    check_same_adapters(read_adapter_config(folder, config), config, folder / CONFIG)
    keys, file = read_adapter_keys(folder / CONFIG), _weight_file(folder)
    config = config_of_file(config, keys)
    tensors = adapter_tensors(config)
    shapes = {name: leaf.shape for name, leaf in named_leaves(abstract(config))}
    modules, saved = _read_modules(folder, keys, config), saved_weights(keys, config)
    adapters = named_adapters(config)
    # The tensors that the file must have: one per matrix, or one for all experts of a layer.
    trained = {ours for tensor in tensors for ours, _ in tensor.parts}
    targets = {tensor.name: target_of(tensor, config) for tensor in tensors}
    tensors = [tensor for tensor in tensors if targets[tensor.name] in {*modules, ""}]
    weights = {tensor.name: tensor.parts[0][0].partition(MARK)[0] for tensor in tensors}
    scales = {targets[name]: adapters[ours][1] for name, ours in weights.items() if ours in adapters}
    factors = {target: modules[target].scale / scale for target, scale in scales.items()}
    if trains:
        check_trainable(keys, config, factors, saved)
    stored = _read_language_model(file, family)
    names = {tensor.name: _stored_name(tensor.name, modules) for tensor in tensors}
    expected = {names[t.name]: _stored_shape(t, modules.get(targets[t.name]), config) for t in tensors}
    expected |= {name: shapes[ours] for name, ours in saved.items()}
    if problem := list_mismatches(stored, expected, "the model"):
        raise UserError(
            f"{file}: not the adapters of this {family} model; {problem}. "
            "Give the base model that the adapter was trained on, or another adapter."
        )
    # Read each and convert it to our layout.
    adapter = {ours: np.zeros(shapes[ours], np.float32) for ours in shapes if ours in trained}
    read = functools.lru_cache(4)(lambda name: _read_whole(name, stored[name]))
    for tensor in tensors:
        module, ours = modules.get(targets[tensor.name]), weights[tensor.name]
        pairs = zip(tensor.parts, tensor.layouts, strict=True)
        rows = [hf_shape(shapes[ours][len(index) :], layout)[0] for (ours, index), layout in pairs]
        is_shared = module is not None and module.parts == 1
        parts = _split(tensor, read(names[tensor.name]), is_shared, config, rows=rows, file=file)
        if module:
            is_b = tensor.parts[0][0].endswith("b")
            parts = [_fill_rank(x, is_b, module.rank_of_weight, adapters[ours][0]) for x in parts]
            parts = [x * np.float32(factors[targets[tensor.name]]) for x in parts] if is_b else parts
        for (ours, index), layout, part in zip(tensor.parts, tensor.layouts, parts, strict=True):
            adapter[ours][index or ...] = from_hf(part, layout, shapes[ours][len(index) :])
    return adapter | {ours: read(name) for name, ours in saved.items()}


def _read_modules(folder: Path, keys: JsonKeys, config: AdaptedConfig) -> dict[str, FileAdapter]:
    """Return the adapted modules (`adapted_modules`); print a line if experts are not among them."""
    modules = adapted_modules(keys, config, adapts_experts(folder, keys))
    if len(modules) < len(adapted_modules(keys, config)):
        line = "no adapters of experts, which peft with transformers 5 adapts as target_parameters alone"
        print_on_first(f"{folder}: {line}")
    return modules


def _read_language_model(file: Path, family: str) -> dict[str, StoredTensor]:
    """Return the adapters of a language model, under the names of a folder without other models."""
    stored, others = language_model(read_header(file))
    if others:
        print_on_first(f"{file}: left out of the model and of exports: {list_modules(others)}")
    if family == "nemotron_h":  # in transformers 5 its decoder, "backbone" in files, is "model"
        old, new = f"{PREFIX}model.", f"{PREFIX}backbone."
        stored = {name.replace(old, new, 1): entry for name, entry in stored.items()}
    return stored


def _stored_name(name: str, modules: Collection[str]) -> str:
    """Return the name of a tensor in the file. The adapter of all experts' gate and up is inside the adapter
    of down, if down has an adapter."""
    outer = module_of(name).removesuffix(".base_layer")
    return name if f"{outer}.down_proj" in modules else name.replace(".base_layer.", ".")


def _fill_rank(part: np.ndarray, is_b: bool, rank: int, model_rank: int) -> np.ndarray:
    """Return A [R, inputs] or B [outputs, R] with 0 up to the model's rank; of all experts, A [X, R, inputs]
    or B [outputs, R * X]."""
    if not is_b:
        ends = [(0, 0)] * (part.ndim - 2) + [(0, model_rank - rank), (0, 0)]
        return np.pad(part, ends)
    part = np.pad(part.reshape(part.shape[0], rank, -1), ((0, 0), (0, model_rank - rank), (0, 0)))
    return part.reshape(part.shape[0], -1)


def _read_whole(name: str, stored: StoredTensor) -> np.ndarray:
    """Return a matrix of the file, float32."""
    whole = TensorRows((), name, "o i -> o i", 0, rows=stored.shape[0])
    return read_slice(
        stored, whole, stored.shape, tuple((0, n) for n in stored.shape), dtype=np.dtype(np.float32)
    )


def _stored_shape(tensor: HFTensor, module: FileAdapter | None, config: AdaptedConfig) -> tuple[int, ...]:
    """Return the shape of a tensor in a file; of a value head, which has no module, its own."""
    if module is None:
        return tensor.shape
    rank = module.rank
    if is_stacked(config, tensor.parts[0][0].partition(MARK)[0]):
        rank *= config.moe.num_experts
    is_a = tensor.parts[0][0].endswith("a")
    return (rank, tensor.shape[1]) if is_a else (tensor.shape[0], rank)


def _split(
    tensor: HFTensor,
    array: np.ndarray,
    shared: bool,
    config: AdaptedConfig,
    *,
    rows: Sequence[int],
    file: Path,
) -> list[np.ndarray]:
    """Split a tensor into its parts (`Join`); parts that share an A in the file get a copy each.

    Args:
        rows: of each part, if it is a B.

    Raises:
        UserError: a B is not block diagonal, as in exports.
    """
    # A: the parts' ranks follow each other.
    count = len(tensor.parts)
    ranks = 1 if shared else count  # parts of the rank
    if tensor.join == "rows":
        return [array] * count if shared else np.split(array, count)
    if tensor.join == "ranks":
        array = array.reshape(config.moe.num_experts, ranks, -1, array.shape[1])
        return [array[:, i % ranks] for i in range(count)]
    # B: block diagonal, unless the parts share an A.
    if tensor.join == "diagonal":
        blocks = [np.split(part, ranks, axis=1) for part in np.split(array, np.cumsum(rows)[:-1])]
    else:
        array = array.reshape(-1, count, ranks, array.shape[1] // ranks)
        blocks = [[array[:, i, j] for j in range(ranks)] for i in range(count)]
    if not shared and any(blocks[i][j].any() for i in range(count) for j in range(count) if i != j):
        raise UserError(
            f"{file}: {tensor.name} lets its parts read each other's A, as PEFT trains them. "
            "Merge the adapter (peft: merge_and_unload) and give that model."
        )
    return [blocks[i][i % ranks] for i in range(count)]


def _weight_file(folder: Path) -> Path:
    """Return the safetensors file of the adapter."""
    if (folder / WEIGHTS).exists():
        return file_inside(folder, WEIGHTS)
    if (folder / PICKLE).exists():
        raise UserError(
            f"{folder / PICKLE}: a pickle, which can run code when read and is refused. Convert it: "
            "peft.PeftModel.from_pretrained(base, folder).save_pretrained(...)"
        )
    raise UserError(f"{folder / WEIGHTS}: no such file; a PEFT adapter has one. Copy or download it again.")
