"""Settings with which a run takes less memory: the list that `plan` and `doctor` advise from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm import algos, models
from jaxrl_llm.builders.models import trained_config
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.learn.optim import make_optimizer
from jaxrl_llm.models.lora import frozen_config, split_params
from jaxrl_llm.models.quantize import SCALE, TILE
from jaxrl_llm.plan.models import planned_model
from jaxrl_llm.plan.plan import PhaseCost
from jaxrl_llm.recipe.keys import replace_at
from jaxrl_llm.sharding.rules import bytes_per_device

BITS = 4 + 32 / TILE
"""Bits a weight in nf4, with its share of a scale."""


class MemorySetting(NamedTuple):
    """A setting that may save memory, of devices or of the host."""

    key: str
    value: Any
    saved: Callable[[TrainConfig, PhaseCost], float]
    """Returns the bytes that a phase of scoring or update has less on a device; 0 = it holds none of them."""
    applies: Callable[[TrainConfig], bool] = lambda config: True
    """Returns whether the recipe is of the kind that the setting is for."""
    effect: str = ""
    """Clause on the setting's effect, if the flag does not tell."""

    @property
    def flag(self) -> str:
        """The setting as a word and a value of the command line."""
        return f"--{self.key} {self.value}"

    def changed(self, config: TrainConfig) -> TrainConfig:
        """Return the recipe with the setting."""
        return replace_at(config, self.key.split("."), self.value)


def _moments(config: TrainConfig, phase: PhaseCost) -> float:
    """Return the bytes of the moments outside `apply`, which still reads them, weight by weight."""
    return 0 if config.optim.offload or phase.name.endswith("apply") else phase.memory["optimizer"]


def _reference(config: TrainConfig, phase: PhaseCost) -> float:
    requires = algos.requirements(config.algo)
    offloads = (requires.ref_logprobs or requires.teachers) and not config.reference.offload
    return phase.memory["frozen models"] if offloads else 0


def _int8_moments(config: TrainConfig, phase: PhaseCost) -> float:
    """Return the bytes that 8-bit moments save of the optimizer state."""
    optim = config.optim
    if optim.name in ("adafactor", "adafactor_unscaled", "adagrad") or optim.moments == "int8":
        return 0
    trained = split_params(models.abstract(trained_config(planned_model(config.model), config)))[0]
    size = lambda optim: bytes_per_device(jax.eval_shape(make_optimizer(optim, 1).init, trained))
    return phase.memory["optimizer"] * (1 - size(replace(optim, moments="int8")) / max(size(optim), 1))


def _half_gradients(config: TrainConfig, phase: PhaseCost) -> float:
    return phase.memory["gradients"] / 2 if config.optim.grad_dtype == "float32" else 0


def _remainders(config: TrainConfig, phase: PhaseCost) -> float:
    """Return the bytes of weights whose lower halves an offloaded optimizer state holds."""
    offloads = config.optim.offload and not config.optim.store_param_remainders
    return phase.memory["parameters"] / 2 if offloads else 0


def _adapters(config: TrainConfig, phase: PhaseCost) -> float:
    """Return the bytes of master weights, moments and gradients that frozen weights need not have."""
    stored = 2 if config.optim.store_param_remainders else 4
    parameters = phase.memory["parameters"] * (1 - jnp.dtype(config.model.dtype).itemsize / stored)
    return parameters + phase.memory["optimizer"] + phase.memory["gradients"]


def _nf4(config: TrainConfig, phase: PhaseCost) -> float:
    """Return the bytes that linear layers in 4 bits save of the policy's frozen weights."""
    if config.lora.quantize != "none":
        return 0
    model = planned_model(config.model)
    sizes = {name: x.size for name, x in models.named_leaves(models.abstract(frozen_config(model, "nf4")))}
    linear = sum(size for name, size in sizes.items() if name + SCALE in sizes)
    share = linear / (linear + model.vocab_size * model.hidden_size * (2 - model.tie_embeddings))
    return phase.memory["parameters"] * share * (1 - BITS / 8 / jnp.dtype(config.model.dtype).itemsize)


MEMORY_SETTINGS = (
    MemorySetting("checkpoint.optimizer", False, lambda config, phase: 0),
    MemorySetting("optim.offload", True, _moments),
    MemorySetting("reference.offload", True, _reference),
    MemorySetting("optim.moments", "int8", _int8_moments),
    MemorySetting("optim.grad_dtype", "bfloat16", _half_gradients),
    MemorySetting("reference.offload", False, lambda config, phase: 0),
    MemorySetting(
        "optim.store_param_remainders", True, _remainders,
        applies=lambda config: config.model.dtype == "bfloat16" and not config.lora.rank,
    ),
    MemorySetting(
        "lora.rank", 32, _adapters,
        applies=lambda config: not config.lora.rank,
        effect="which trains adapters in place of the weights",
    ),
    MemorySetting(
        "lora.quantize", "nf4", _nf4,
        applies=lambda config: bool(config.lora.rank),
        effect="which holds linear layers in 4 bits",
    ),
)  # fmt: skip
"""The settings, least costly first. Each saves memory of devices, of the host, or of both: `plan` computes
the first from the memory of a phase, `doctor` measures the second on the changed recipe."""
