"""Adapters and quantized weights of a decoder, as fields of its config."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.mixer_config import Projections
from jaxrl_llm.ranges import Range, problems

Quantize = Literal["none", "int8", "nf4"]
"""Number format of frozen weights."""

TARGETS = {f"{ours}_proj": ours for ours in ("q", "k", "v", "o", "gate", "up", "down")}
"""Hugging Face's names of the linear layers -> ours."""
LATENT_TARGETS = {"q_a_proj": "q_a", "q_b_proj": "q_b", "kv_a_proj_with_mqa": "kv_a", "kv_b_proj": "kv_b"}
"""Linear layers of latent attention, instead of k_proj and v_proj, and with `q_rank` also of q_proj."""
DELTA_TARGETS: dict[Projections, dict[str, str]] = {
    "qkv": {**{f"in_proj_{part}": f"delta_{part}" for part in ("qkv", "z", "b", "a")}, "out_proj": "delta_o"},
    "qkvz": {"in_proj_qkvz": "delta_qkvz", "in_proj_ba": "delta_ba", "out_proj": "delta_o"},
    "separate": {
        **{f"{part}_proj": f"delta_{part}" for part in ("q", "k", "v", "b", "a", "o")},
        "g_proj": "delta_z",
    },
}
"""Linear layers of the gated delta rule, by `DeltaConfig.projections`."""
CONV_TARGETS = {"conv_in": "in_proj", "conv_out": "out_proj", "o": "out_proj"}
"""Our names of linear layers of a model with short convolutions, LFM2 -> Hugging Face's."""
MAMBA_TARGETS = {"mamba_in": "in_proj"}
"""Our names of linear layers of Mamba-2 -> Hugging Face's. peft refuses adapters of its out_proj, which
kernels read."""
INPUT_TARGETS = {"input_gate": "per_layer_input_gate", "input_proj": "per_layer_projection"}
"""Our names of the linear layers of per-layer inputs -> Hugging Face's."""
EXPERT_TARGETS = {"latent_in": "fc1_latent_proj", "latent_out": "fc2_latent_proj"}
"""Our names of the linear layers around experts of another width -> Hugging Face's."""
ALL_TARGETS = tuple(
    dict.fromkeys(
        name
        for part in (
            *(TARGETS, LATENT_TARGETS, *DELTA_TARGETS.values()),
            *(CONV_TARGETS.values(), INPUT_TARGETS.values(), EXPERT_TARGETS.values()),
        )
        for name in part
    )
)
"""Hugging Face's names of the linear layers of all models."""
MLP = ("gate", "up", "down")
"""Linear layers of the feed-forward, or of the shared expert and of each expert."""


def linear_layers(c: TransformerConfig) -> dict[str, str]:
    """Return our names of the model's linear layers -> Hugging Face's; each expert has the names of MLP.

    A stack of layers has some of them."""
    present = {name: ours for name, ours in TARGETS.items() if c.mlp_gate or ours != "gate"}
    if c.mla:
        absent = ("k_proj", "v_proj", *(("q_proj",) if c.mla.q_rank else ("q_a_proj", "q_b_proj")))
        present = {name: ours for name, ours in (TARGETS | LATENT_TARGETS).items() if name not in absent}
    layers = {ours: name for name, ours in present.items() if not (ours == "v" and c.keys_as_values)}
    layers |= INPUT_TARGETS if c.per_layer_inputs else {}
    layers |= EXPERT_TARGETS if c.moe and c.moe.latent_size else {}
    if c.delta:
        layers |= {ours: name for name, ours in DELTA_TARGETS[c.delta.projections].items()}
    return layers | (CONV_TARGETS if c.conv else {}) | (MAMBA_TARGETS if c.mamba else {})


@dataclass(frozen=True)
class LoraConfig:
    """Adapters, which are trained instead of the frozen weights."""

    rank: Annotated[int, Range(0, 2**14, usual="8 to 64 are usual")] = 0
    """Inner size R of each adapter; 0 = no adapters, all weights are trained."""
    alpha: Annotated[float, Range(0, 1e6, open_low=True, usual="32 is usual")] = 32.0
    """The adapter's output is multiplied by alpha / rank."""
    rank_stabilized: bool = False
    """Multiply by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)."""
    targets: tuple[str, ...] = ("all",)
    """Linear layers that get adapters: q_proj k_proj v_proj o_proj gate_proj up_proj down_proj, of latent
    attention also q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj, of recurrent layers those of
    docs/hybrids.md, or all."""
    quantize: Quantize = "none"
    """Store frozen weights of linear layers in 8 bits (int8) or 4 bits (nf4, QLoRA, arXiv 2305.14314)."""
    expert_rank: Annotated[int, Range(1, 2**14)] | None = None
    """R of the experts' adapters; None = rank / experts per token, at least 1 (LoRA Without Regret)."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for layers that no model has, and for quantized weights without adapters."""
        if self.quantize != "none" and not self.rank:
            yield (
                "quantize",
                f"is {self.quantize}, but all weights are trained: it must be none, or rank above 0 "
                "(--lora.rank 32), since only frozen weights can be quantized.",
            )
        known = ("all", *ALL_TARGETS)
        if not self.targets:
            yield "targets", "is empty: it must name linear layers, or be all."
        for name in self.targets:
            if name not in known:
                yield "targets", f"has {name!r}: it must be of {', '.join(known)}."

    @property
    def scale(self) -> float:
        """Factor of the adapter's output."""
        return self.scale_at(self.rank)

    def scale_at(self, rank: int) -> float:
        """Return the factor of the output of an adapter of this rank."""
        return self.alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    @property
    def adapted(self) -> tuple[str, ...]:
        """Hugging Face's names of the layers to adapt; a model may lack some."""
        return tuple(name for name in ALL_TARGETS if {"all", name} & {*self.targets})


@dataclass(frozen=True)
class QuantizedConfig(TransformerConfig):
    """A decoder whose linear layers have quantized weights (`models.quantize`)."""

    quantize: Quantize = "nf4"


@dataclass(frozen=True)
class AdaptedConfig(TransformerConfig):
    """A decoder whose linear layers have adapters, which are trained instead of its weights."""

    lora: LoraConfig = LoraConfig(rank=8)

    @property
    def adapters(self) -> dict[str, tuple[int, float]]:
        """Adapted weights -> rank and factor of the adapter's output, in order; a layer has some of them."""
        lora, moe = self.lora, self.moe
        names = tuple(ours for ours, name in linear_layers(self).items() if name in lora.adapted)
        dense, experts = names, ()
        if moe:
            experts = tuple(f"expert_{name}" for name in names if name in MLP)
            dense = tuple(name for name in names if moe.shared_size or name not in MLP)
        rank = lora.expert_rank or max(1, lora.rank // (moe.experts_per_token if moe else 1))
        adapters = dict.fromkeys(dense, (lora.rank, lora.scale))
        return adapters | dict.fromkeys(experts, (rank, lora.scale_at(rank)))

    @property
    def quantize(self) -> Quantize:
        """Number format of the frozen weights of linear layers."""
        return self.lora.quantize


def check_lora_config(lora: LoraConfig, where: str) -> None:
    """Refuse an invalid LoraConfig that does not come from a recipe.

    Args:
        where: file of the config, for the message.

    Raises:
        UserError: one line that names every bad field.
    """
    if wrong := [f"{name} {text}" for name, text in problems(lora)]:
        raise UserError(f"{where}: no model can have these adapters: {' '.join(wrong)}")
