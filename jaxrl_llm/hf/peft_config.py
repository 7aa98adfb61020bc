"""adapter_config.json of PEFT, written and read."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.family_names import MODULES
from jaxrl_llm.hf.hub import parse_hub_name
from jaxrl_llm.hf.json_file import JsonKeys, read_json
from jaxrl_llm.hf.names import hf_name, is_stacked, joined_weights
from jaxrl_llm.hf.peft_modules import (
    PARAMETER,
    STACKED,
    SUMS,
    WITHOUT,
    adapted_modules,
    config_of_file,
    saved_weights,
    stacks_experts,
)
from jaxrl_llm.hf.stored import read_header
from jaxrl_llm.models import AdaptedConfig, LoraConfig, TransformerConfig
from jaxrl_llm.models.lora import named_adapters, rank_of_experts
from jaxrl_llm.models.lora_config import ALL_TARGETS, MLP, check_lora_config, linear_layers
from jaxrl_llm.user_file import expand_home

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LINEAR = ("input_linear", "output_linear")
"""Names of linear layers in Granite 4."""
_DEFAULTS = {"r": 8, "lora_alpha": 8, "bias": "none"}  # PEFT's
_READ = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "modules_to_save", "bias"),
    *("rank_pattern", "alpha_pattern", "target_parameters"),
    *("layers_to_transform", "layers_pattern", "exclude_modules"),
)
_NO_EFFECT = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
    *("init_lora_weights", "eva_config"),
)
"""Keys that alone do not affect the output of a trained adapter. Any other key that is set is refused."""
_KEEP_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that do not change the base model."""


def read_adapter_config(folder: Path | str, config: TransformerConfig) -> LoraConfig:
    """Return the adapters' config of a PEFT folder. Dropout, which only training applies, is not read.

    The rank is the largest of a layer, and of the experts; `load_adapter` fills smaller ones, and layers
    without an adapter, with 0.

    Args:
        config: of the base model.

    Raises:
        UserError: adapter_config.json is missing or broken, or the decoder does not support the adapters
            (DoRA, a base changed by PiSSA ...). The message names the file, the key and the supported values.
    """
    file = Path(folder) / CONFIG
    if not file.is_file():
        raise UserError(f"{file}: no such file; a PEFT adapter has one. Give the folder that holds it.")
    keys = read_adapter_keys(file)
    config = config_of_file(config, keys)
    _check_supported(keys, config)
    lora = _read_lora(keys, config, adapts_experts(Path(folder), keys))
    check_lora_config(lora, str(file))
    return lora


def read_adapter_keys(file: Path) -> JsonKeys:
    """Return the content of an adapter_config.json, with PEFT's defaults."""
    return JsonKeys(read_json(file), str(file), _DEFAULTS)


def adapts_experts(folder: Path, keys: JsonKeys) -> bool:
    """Return whether a PEFT folder may have adapters of experts.

    In transformers 5 experts are no modules, and for LFM2 and Nemotron-H peft 0.21 adapts only the modules
    with the names in `target_modules`.
    """
    file = folder / WEIGHTS
    return (
        stacks_experts(keys) or not file.is_file() or any(".experts." in name for name in read_header(file))
    )


def _read_lora(keys: JsonKeys, config: TransformerConfig, experts: bool) -> LoraConfig:
    """Return the config of the adapters, with the largest rank of experts, and of the other layers.

    If experts have adapters, alpha is the file's, else that of the largest rank.
    """
    # Ranks and scales of experts, and of the other layers.
    modules, is_stabilized = adapted_modules(keys, config, experts), keys.flag("use_rslora")
    ranks, of_experts = {}, {}
    for adapter in reversed(modules.values()):
        group = of_experts if adapter.weights[0].startswith("expert_") else ranks
        group[adapter.rank_of_weight] = adapter.scale
    known = linear_layers(config)
    names = {known[x.removeprefix("expert_")] for adapter in modules.values() for x in adapter.weights}
    # The model's rank and alpha.
    rank = max(ranks) if ranks else keys.integer("r", 2**31 - 1)
    alpha = keys.number("lora_alpha", 8.0)
    if not of_experts:
        alpha = ranks[rank] * (math.sqrt(rank) if is_stabilized else rank)
    return LoraConfig(
        rank=rank,
        expert_rank=max(of_experts, default=None),
        alpha=alpha,
        rank_stabilized=is_stabilized,
        targets=tuple(name for name in ALL_TARGETS if name in names),
    )


def peft_config(config: AdaptedConfig, base_name: str) -> dict[str, Any]:
    """Return the content of adapter_config.json; `base_name` as for `save_adapter`.

    For a mixture of experts, `r` is the rank of the experts: peft with transformers 5, which keeps the
    experts of a layer in one parameter, reads no rank pattern for them. Other layers have their rank in
    `rank_pattern`, and in `alpha_pattern` an alpha that gives them the experts' factor, since SGLang and vLLM
    ignore patterns and multiply by alpha / r everywhere. `save_adapter` corrects B for this factor. The
    parameter of gate and up of gpt-oss needs patterns too, since its rank is the sum of both ranks, and so do
    Phi-3's modules.

    peft with transformers 5 treats every module called gate_proj, up_proj or down_proj as experts. Therefore
    the layers of a shared expert and of leading dense layers are listed as parameters ("mlp.up_proj.weight"),
    not as modules; tensors have the same names either way.
    """
    # Ranks and alphas of layers other than experts.
    lora, hub = _file_lora(config), parse_hub_name(base_name)
    rank, factors = _file_rank(config), file_factors(config)
    names = {name: _pattern(config, name) for name in named_adapters(config)}
    others = [pattern for name, pattern in names.items() if name in factors]
    parameters = [pattern for pattern in dict.fromkeys(names.values()) if _is_parameter(pattern)]
    ranks = dict.fromkeys(others, lora.rank)
    each = lambda pattern: rank if pattern in STACKED else lora.rank
    ranks |= {pattern: SUMS[pattern] * each(pattern) for pattern in names.values() if pattern in SUMS}
    alphas = {name: lora.alpha * r / rank for name, r in ranks.items()}  # with experts they are plain
    if expand_home(base_name).exists():
        hub = None
    # Which layers are modules, and which are parameters.
    excluded = [name.removesuffix(PARAMETER) for name in parameters if name not in STACKED]
    modules = [p if not _is_parameter(p) else _leaf(p) for p in names.values() if p not in STACKED]
    optional = {"target_parameters": parameters, "exclude_modules": excluded}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if config.value_head else "CAUSAL_LM",
        "base_model_name_or_path": hub.repo if hub else base_name,
        "revision": hub.revision if hub else None,
        "r": rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "use_rslora": lora.rank_stabilized,
        "target_modules": list(dict.fromkeys(modules)),
        "modules_to_save": ["score"] if config.value_head else None,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": False,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "layers_to_transform": None,
    } | {key: value for key, value in optional.items() if value}


def _is_parameter(pattern: str) -> bool:
    return pattern.endswith(PARAMETER) or pattern in STACKED


def _file_lora(config: AdaptedConfig) -> LoraConfig:
    """Return the LoraConfig for a file: rank-stabilized adapters of joined layers get an equivalent plain
    alpha.

    peft with transformers 5 joins gate and up of experts into one matrix with rank 2 R and twice the alpha:
    the factor alpha / R stays the same, but alpha / sqrt(R) would grow by sqrt(2).
    """
    lora, rank = config.lora, _file_rank(config)
    is_joined = rank_of_experts(config) or joined_weights(config.family)
    if not (is_joined and lora.rank_stabilized):
        return lora
    return replace(lora, alpha=lora.scale_at(rank) * rank, rank_stabilized=False)


def _pattern(config: AdaptedConfig, name: str) -> str:
    """Return a suffix of a linear layer's HF name that matches no layer of another rank, and few others.

    "q_proj", "w1"; "shared_expert.up_proj.weight", and "mlp.up_proj.weight" of dense layers among experts.
    """
    hf = hf_name(config, name)
    end = MODULES.get(hf, hf).rpartition("{}.")[2].split(".")[-3:]
    if is_stacked(config, name):
        return next(pattern for pattern in STACKED if MODULES.get(hf, hf).endswith(f".{pattern}"))
    if end[-2] == "c_proj":  # in Qwen 1, of attention or of the feed-forward
        return ".".join(end[:2])
    is_dense = rank_of_experts(config) and name.rpartition(".")[2] in MLP and end[-2] not in _LINEAR
    return ".".join(end) if is_dense else end[-2]


def _leaf(pattern: str) -> str:
    """Return the name of the module of a pattern: "up_proj" of "mlp.up_proj.weight"."""
    return pattern.removesuffix(PARAMETER).rpartition(".")[2]


def _file_rank(config: AdaptedConfig) -> int:
    """Return `r` of adapter_config.json: the experts' rank, if experts have adapters."""
    return rank_of_experts(config) or config.lora.rank


def file_factors(config: AdaptedConfig) -> dict[str, float]:
    """Return weight -> factor of its B in a file, for adapters whose rank is not the file's `r`."""
    lora, rank = config.lora, _file_rank(config)
    if rank == lora.rank:
        return {}
    names = [name for name in named_adapters(config) if ".expert_" not in name]
    return dict.fromkeys(names, lora.scale / lora.scale_at(rank))


def _check_supported(keys: JsonKeys, config: TransformerConfig) -> None:
    """Refuse adapters that would load and then compute something else."""
    keys.one_of("peft_type", ("LORA",), "")
    if keys.get("bias") != "none":
        raise keys.wrong("bias", keys.get("bias"), f"trains biases of the base, which are frozen; {WITHOUT}")
    start = keys.get("init_lora_weights")
    if start not in _KEEP_BASE:
        fix = "save it with path_initial_model_for_weight_conversion, which makes it plain LoRA"
        raise keys.wrong("init_lora_weights", start, f"changes the base model, so is not supported; {fix}")
    saved_weights(keys, config)
    for key, value in keys.raw.items():
        if key not in (*_READ, *_NO_EFFECT) and value not in (None, False, "", [], {}):
            raise keys.wrong(key, value, f"is not supported; {WITHOUT}")


def check_same_adapters(stored: LoraConfig, config: AdaptedConfig, file: Path) -> None:
    """Refuse an adapter for a model whose adapters would give other outputs with its weights."""
    as_stated = config if stored.rank_stabilized else replace(config, lora=_file_lora(config))
    for kind in ("rank", "scale", "adapted"):
        theirs, ours = _summary(replace(config, lora=stored), kind), _summary(as_stated, kind)
        if theirs != ours:
            experts = f", expert_rank={stored.expert_rank}" if stored.expert_rank else ""
            raise UserError(
                f"{file}: holds adapters of {kind}={theirs}, but the model's have {kind}={ours}; give the "
                f"model rank={stored.rank}{experts}, alpha={stored.alpha:g}, "
                f"rank_stabilized={stored.rank_stabilized}, targets={' '.join(stored.targets)}"
            )


def _summary(config: AdaptedConfig, kind: str) -> Any:
    """Return the names of the adapted layers, or their ranks or scales: one, or also another of experts."""
    if kind == "adapted":
        return tuple(config.adapters)
    values = dict.fromkeys(adapter[kind == "scale"] for adapter in config.adapters.values())
    return next(iter(values)) if len(values) == 1 else tuple(values)
