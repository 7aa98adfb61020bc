"""Configs of the commands. Imports no jax, since the commands' flags are read before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.ranges import LARGEST, Count, CountOrZero, Finite, Positive, Range
from jaxrl_llm.rewards.config import RewardConfig
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.sharding.config import MeshConfig

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """Checkpoint and adapters of the model that a command names."""

    step: CountOrZero | None = None
    """Step of the checkpoint, where --model is the directory of a run; None = the newest."""
    adapter: str = ""
    """PEFT folder, or hub name, of adapters for the model."""


@dataclass(frozen=True)
class GenerateConfig(SamplingConfig):
    """Settings of generation."""

    n: Count = 1
    """Responses to each prompt."""
    max_tokens: Count = 256
    """Maximum tokens of a response, limited by the model's positions."""
    seed: Annotated[int, Range(0, LARGEST)] = 0
    """Response g to prompt p depends on (seed, p, g) alone, not on the other prompts or on slots."""
    slots: Annotated[int, Range(1, 65536)] = 64
    """Sequences decoded concurrently."""
    dtype: Dtype = "auto"
    """Type of weights and activations; auto = float32 on CPU, float16 on Turing GPUs, else bfloat16."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    """Chat template."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Mesh of the devices."""


@dataclass(frozen=True)
class SelectConfig:
    """Rewards of responses, and the rows that are written of them."""

    select: Literal["all", "best", "filter", "pairs", "conditional"] = "all"
    """all: a row for each row, every response with its reward. Others need a reward, and write rows to train
    on. best: the response with the highest reward (best of n, rejection sampling). filter: each response.
    pairs: the best against the worst. conditional: each response, its reward at the end of the prompt."""
    keep: Count = 1
    """best: responses of each prompt."""
    threshold: Finite | None = None
    """best, filter, conditional: lowest reward of a response; pairs: of the chosen one. None = any."""
    margin: Positive = 1e-6
    """pairs: smallest difference of the rewards."""
    reward: RewardConfig = field(default_factory=lambda: RewardConfig(name="none"))
    """Rewards, as in training; none by default."""


def gives_rewards(config: RewardConfig) -> bool:
    """Return whether a verifier or a reward model is set."""
    return config.name != "none" or bool(config.models)


def check_selection(config: SelectConfig, rewarded: bool) -> None:
    """Refuse a selection of responses that nothing rewards.

    Raises:
        UserError: with the fix.
    """
    if config.select != "all" and not rewarded:
        raise UserError(
            f"--select {config.select}: nothing rewards the responses. Set a verifier (--reward.name math, "
            "or my_rewards.py:f) or a reward model (--reward.models.0.path FOLDER)."
        )
