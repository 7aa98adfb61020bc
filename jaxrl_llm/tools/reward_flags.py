"""Flags of rewards, for commands: --reward.name and the others, as in training. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxrl_llm.errors import UserError
from jaxrl_llm.recipe.fields import check_fields
from jaxrl_llm.recipe.overrides import apply_overrides, split_arguments
from jaxrl_llm.rewards.config import RewardConfig
from jaxrl_llm.tools.config import SelectConfig

FLAG = "--reward."


@dataclass(frozen=True)
class RewardArguments:
    """Flags of rewards, as in training; nothing rewards by default."""

    reward: RewardConfig = field(default_factory=lambda: RewardConfig(name="none"))


def split_reward_flags(argv: Sequence[str]) -> tuple[RewardConfig, list[str]]:
    """Return the rewards of a command line (--reward.name, --reward.models.0.path ...) and its other words.

    Raises:
        ConfigError: an unknown key, or a value that it does not take.
    """
    reward: list[str] = []
    others: list[str] = []
    current = others
    for word in argv:
        if word.startswith("--"):
            current = reward if word.startswith(FLAG) else others
        current.append(word)
    arguments, _ = apply_overrides(RewardArguments(), split_arguments(reward))
    check_fields(arguments)
    return arguments.reward, others


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
