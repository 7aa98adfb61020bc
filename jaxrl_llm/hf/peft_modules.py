"""Modules of a model that an adapter_config.json adapts or saves, by the rules of peft 0.21.

A module's rank and alpha may be its own (`rank_pattern`, `alpha_pattern`), and layers may have no adapter
(`layers_to_transform`, a regex of `target_modules`). The model has one rank, and another one of experts: the
missing ranks of A and B are 0, both, so their gradients are 0 too and training leaves them, as peft does.

Experts are modules, each with an adapter, or one parameter with one adapter for all experts of a layer
(`target_parameters`), which neither `layers_to_transform` nor `exclude_modules` concern.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.export import export_config
from jaxrl_llm.hf.family_names import FUSED, PARAMETERS
from jaxrl_llm.hf.json_file import JsonKeys
from jaxrl_llm.hf.names import HFTensor, adapter_tensors, as_parameters, hf_name, is_stacked
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.lora import MARK, base_config, with_lora
from jaxrl_llm.models.lora_config import ALL_TARGETS, LoraConfig

WITHOUT = "train the adapter without it, or merge it (peft: merge_and_unload) and give that model"
PREFIX = "base_model.model."
"""Begins the names of tensors in a PEFT file."""
_LAYER = r".*?\.[^.]*\.(\d+)\."
PARAMETER = ".weight"  # ends the names of adapted parameters; modules have none
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
BESIDE_MLP = "experts.gate_up_proj", "experts.down_proj"
_GRANITE = tuple(f"block_sparse_moe.{name}" for name in BESIDE_MLP)
_UP = "experts.up_proj"  # of Nemotron-H, whose experts have no gate
STACKED = (GATE_UP, DOWN, *_GRANITE, *BESIDE_MLP, _UP)
"""Parameters that hold all experts of a layer, in gpt-oss and in every family of transformers 5, in Granite,
and in Gemma 4 and others; PEFT has a separate kind of adapter for them."""
EXPERTS = tuple(f".{name}" for name in (*BESIDE_MLP, _UP))
"""Ends of the full names of these parameters."""
SUMS = {
    **{name: 2 for name in STACKED if name.endswith("gate_up_proj")},
    **{
        hf.split(".")[-2]: len(rows)
        for names in FUSED.values()
        for hf, rows in names.items()
        if hf.endswith(PARAMETER)
    },
}
"""Parameter, or module that computes several of our layers (Phi-3, Granite), whose adapter adds up ranks ->
number of ranks."""
HEADS = ("score", "classifier")
"""Names of a classifier's head in PEFT's `modules_to_save`; ours is "score", as in Hugging Face's models."""


class FileAdapter(NamedTuple):
    """The adapter of a module or a parameter in a file."""

    weights: tuple[str, ...]
    """Our names of its weights: "q", or "q", "k" and "v" of a joined module."""
    rank: int
    """Rank in the file."""
    scale: float
    """Factor of its output."""
    parts: int
    """Number of matrices A below each other, one a weight; 1 = the weights share A."""

    @property
    def rank_of_weight(self) -> int:
        """Rank of each of the weights."""
        return self.rank // self.parts


def module_of(tensor: str) -> str:
    """Return the module of an adapter's tensor: "base_model.model.lm_head.lora_A.weight" -> "lm_head"."""
    return tensor.removeprefix(PREFIX).rpartition(".lora_")[0]


def target_of(tensor: HFTensor, config: TransformerConfig) -> str:
    """Return the module that a tensor of an adapter adapts, or the parameter of all experts of a layer
    ("model.layers.0.mlp.experts.down_proj"), as transformers 5 names it."""
    module, weight = module_of(tensor.name), tensor.parts[0][0].partition(MARK)[0]
    if not is_stacked(config, weight):
        return module
    first = "gate_up_proj" if config.mlp_gate else "up_proj"
    parameter = "down_proj" if _leaf(weight) == "expert_down" else first
    return f"{module.removesuffix('.base_layer')}.{parameter}"


def adapted_modules(
    keys: JsonKeys, config: TransformerConfig, experts: bool = True
) -> dict[str, FileAdapter]:
    """Return the adapted modules and parameters of a model (`target_of`) -> their adapters in the file.

    Args:
        experts: names of modules mean experts, too; False = the file has no adapters of experts
            (`peft_config.adapts_experts`).

    Raises:
        UserError: none is adapted, a target is no linear layer, or a key is malformed.
    """
    # Modules and parameters that could be adapted: their weights, and the number of weights in a tensor.
    base = dataclasses.replace(base_config(config), value_head=False)
    targets, parts, parameters = {}, {}, read_parameters(keys)
    for tensor in adapter_tensors(with_lora(base, LoraConfig(rank=1))):
        target = target_of(tensor, config)
        weights = targets.setdefault(target, {})
        weights |= dict.fromkeys(_leaf(ours.partition(MARK)[0]) for ours, _ in tensor.parts)
        parts[target] = len(tensor.parts)
    names = {target: target + PARAMETER * (not target.endswith(EXPERTS)) for target in targets}
    _check_targets(keys, targets, parameters)
    _check_parameters(keys, parameters, names.values())
    # Adapted layer -> its name as patterns of `target_modules` match it.
    adapted = {target: name for target, name in names.items() if _has_end(name, parameters)}
    modules = [target for target, name in names.items() if name != target and target not in adapted]
    modules = [target for target in modules if experts or ".experts." not in target]
    adapted |= {target: target for target in modules if _is_adapted(keys, target)}
    if not adapted:
        leaves = ", ".join(dict.fromkeys(_leaf(target) for target in targets))
        problem = (
            f"adapts no layer of this {config.family.removesuffix(PARAMETERS)} model, which has {leaves}"
        )
        raise keys.wrong("target_modules", keys.get("target_modules"), problem)
    found = {}
    for target in targets:
        if target not in adapted:
            continue
        adapter = _read_adapter(keys, adapted[target], tuple(targets[target]))
        is_sum = adapter.rank % parts[target] == 0 and _is_sum(keys, target)
        found[target] = adapter._replace(parts=parts[target] if is_sum else 1)
    return found


def _is_sum(keys: JsonKeys, target: str) -> bool:
    """Return whether each weight of a joined target has a separate A, as in exports, which name the target in
    patterns. PEFT creates one A for all."""
    patterns = {**keys.section("rank_pattern").raw, **keys.section("alpha_pattern").raw}
    if target.endswith(EXPERTS):
        return any(name in SUMS and name in STACKED and target.endswith(f".{name}") for name in patterns)
    return _leaf(target) in SUMS and _leaf(target) in patterns


def read_parameters(keys: JsonKeys) -> list[str]:
    """Return the adapted parameters: weights of linear layers, and weights of all experts of a layer."""
    names = keys.get("target_parameters") or []
    if not isinstance(names, list):
        _check_parameters(keys, [names], ())
    return names


def stacks_experts(keys: JsonKeys) -> bool:
    """Return whether the file has adapters of parameters that hold all experts of a layer."""
    return any(not str(name).endswith(PARAMETER) for name in read_parameters(keys))


def config_of_file(config: TransformerConfig, keys: JsonKeys) -> TransformerConfig:
    """Return the config of the model with the names and tensors that an adapter's file has."""
    config = export_config(config)
    return as_parameters(config) if stacks_experts(keys) else config


def _check_parameters(keys: JsonKeys, parameters: Collection[Any], names: Collection[str]) -> None:
    """Refuse a parameter that is no linear layer's or experts'."""
    for parameter in parameters:
        if not isinstance(parameter, str) or not any(_has_end(name, [parameter]) for name in names):
            known = f"supported: {GATE_UP}, {DOWN}, and weights of linear layers (mlp.up_proj{PARAMETER})"
            problem = f"is not supported for this model; {known}"
            raise keys.wrong("target_parameters", parameter, problem)


def _has_end(name: str, ends: Collection[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def saved_weights(keys: JsonKeys, config: TransformerConfig) -> dict[str, str]:
    """Return the names in the file -> our names of the embedding and the head that the file holds in full.

    Raises:
        UserError: other modules, or the embedding of a model whose head is tied to it.
    """
    names = {hf_name(config, ours): ours for ours in ("embed", "lm_head")}
    by_module = {hf.split(".")[-2]: (hf, ours) for hf, ours in names.items()}
    saved = keys.get("modules_to_save") or []
    if not isinstance(saved, list) or any(_leaf(name) not in (*HEADS, *by_module) for name in saved):
        supported = f"supported: {', '.join(by_module)}, and the head {HEADS[0]} of a reward model or critic"
        raise keys.wrong("modules_to_save", saved, f"is not supported; {supported}. Else {WITHOUT}")
    found = [by_module[_leaf(name)] for name in saved if _leaf(name) in by_module]
    if found and config.tie_embeddings:
        untied = "unties head and embedding in peft, and this model has one matrix for both"
        raise keys.wrong("modules_to_save", saved, f"{untied}; {WITHOUT}")
    return {PREFIX + hf: ours for hf, ours in found}


def check_trainable(
    keys: JsonKeys, config: TransformerConfig, factors: dict[str, float], saved: dict[str, str]
) -> None:
    """Refuse an adapter that a run would train differently from peft.

    Experts and the other layers of a model with experts may differ: an export has one factor for all
    (`peft_config.peft_config`).

    Args:
        config: of the model with the adapters.
        factors: module -> scale in the file, divided by the scale of the model's adapters.
        saved: of `saved_weights`.
    """
    if saved:
        problem = f"trains these in peft, but a run with adapters keeps them as they are; {WITHOUT}"
        raise keys.wrong("modules_to_save", keys.raw["modules_to_save"], problem)
    common = {}
    for module, factor in factors.items() if config.moe else ():
        common.setdefault(".experts." in module, factor)
    expected = lambda module: common.get(".experts." in module, 1.0)
    if other := [name for name, factor in factors.items() if not math.isclose(factor, expected(name))]:
        key = "alpha_pattern" if keys.raw.get("alpha_pattern") else "rank_pattern"
        problem = (
            f"gives {other[0]} another alpha / rank than other layers have, but a run trains all adapters "
            f"with one; {WITHOUT}"
        )
        raise keys.wrong(key, keys.raw.get(key), problem)


def _leaf(name: Any) -> str:
    return str(name).rpartition(".")[2]


def _check_targets(keys: JsonKeys, modules: Collection[str], parameters: Collection[str]) -> None:
    """Check the types of the keys that select modules, and that each listed target is a linear layer."""
    targets, supported = keys.get("target_modules"), f"supported: a list of {', '.join(ALL_TARGETS)}, a regex"
    if targets in (None, []) and parameters:
        return
    if not isinstance(targets, str | list) or not targets:
        raise keys.wrong("target_modules", targets, f"is not supported; {supported}, or all-linear")
    if isinstance(targets, str):
        if targets.lower() != "all-linear" and keys.get("layers_to_transform") is not None:
            layers, problem = keys.raw["layers_to_transform"], "is not read by peft with a regex of modules"
            raise keys.wrong("layers_to_transform", layers, f"{problem}; put the layers into target_modules")
        return
    for name in targets:
        if not isinstance(name, str) or _leaf(name) not in (*ALL_TARGETS, *map(_leaf, modules)):
            raise keys.wrong("target_modules", name, f"is no layer that can be adapted; {supported}")


def _is_adapted(keys: JsonKeys, module: str) -> bool:
    """Return whether peft adapts a linear layer (`check_target_module_exists`)."""
    excluded, targets = keys.get("exclude_modules") or [], keys.get("target_modules") or []
    if _matches(keys, "exclude_modules", excluded, module):
        return False
    if isinstance(targets, str) and targets.lower() == "all-linear":
        targets = [module]
    layers = keys.get("layers_to_transform")
    layers = layers if isinstance(layers, list) or layers is None else [layers]
    if not all(type(layer) is int for layer in layers or ()):
        raise keys.wrong("layers_to_transform", layers, "must be a list of numbers of layers")
    if not _matches(keys, "target_modules", targets, module):
        return False
    return not layers or _layer_number(keys, module) in layers


def _matches(keys: JsonKeys, key: str, names: Any, module: str) -> bool:
    """Return whether a module has one of the names, or the ends of names; a string is a regex."""
    if isinstance(names, str):
        return bool(_match(keys, key, names, module))
    if not isinstance(names, list):
        raise keys.wrong(key, names, "must be a list of names of modules, or a regex")
    return _has_end(module, names)


def _layer_number(keys: JsonKeys, module: str) -> int | None:
    """Return the number of a module's layer: the first one in its name, or after a name of
    `layers_pattern`."""
    names = keys.get("layers_pattern") or []
    patterns = [rf"(?:^|.*?\.){name}\.(\d+)\..*" for name in ([names] if isinstance(names, str) else names)]
    for pattern in patterns or [rf"{_LAYER}.*"]:
        if found := _match(keys, "layers_pattern", pattern, module):
            return int(found[1])
    return None


def _read_adapter(keys: JsonKeys, module: str, weights: tuple[str, ...]) -> FileAdapter:
    """Return rank and scale by the first patterns that a name ends with, or by the file's r and alpha."""
    rank, alpha = keys.integer("r", 2**31 - 1), keys.number("lora_alpha", 8.0)
    for key, kinds in (("rank_pattern", (int,)), ("alpha_pattern", (int, float))):
        patterns = keys.section(key).raw
        for pattern, value in patterns.items():
            if not _match(keys, key, rf"(.*\.)?({pattern})", module):
                continue
            if type(value) not in kinds or not 0 < value < math.inf:
                raise keys.wrong(key, patterns, f"must have numbers above 0; that of {pattern} is {value!r}")
            rank, alpha = (value, alpha) if key == "rank_pattern" else (rank, float(value))
            break
    scale = alpha / (math.sqrt(rank) if keys.flag("use_rslora") else rank)
    return FileAdapter(weights, rank, scale, parts=1)


def _match(keys: JsonKeys, key: str, pattern: str, module: str) -> re.Match[str] | None:
    try:
        return re.fullmatch(pattern, module)
    except (re.error, RecursionError) as error:
        raise UserError(f"{keys.file}: {key}={pattern!r} is no regex of Python: {error}") from error
