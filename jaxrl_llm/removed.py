"""Keys that runs no longer have, and what to write instead. Imports only the standard library."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple


class Removed(NamedTuple):
    """A removed key."""

    owner: str
    """Name of the Config that had the field; the Configs derived from it had it too."""
    keys: str
    """Keys of the field, with a space between; a key of a list has no index: data.train.score_mean."""
    neutral: Any
    """JSON value with which the key had no effect, so that a run saved with it continues as it was."""
    instead: str
    """Sentence that tells the user what to do."""
    continues: bool = False
    """A saved run continues without the key, whatever its value was: the key changes no result."""


REMOVED = (
    Removed(
        "PolicyConfig", "algo.gaps", "skip", "GAE always skips the tokens of tools; a gap changes no value."
    ),
    Removed("ClippedConfig", "algo.loss_cap", None, "Set --algo.dual_clip 3, which bounds the loss too."),
    Removed(
        "PolicyConfig",
        "algo.reward_clip",
        None,
        "Clip in a reward function: --reward.name my_rewards.py:my_reward (min(max(score, low), high)).",
    ),
    Removed(
        "PolicyConfig",
        "algo.reward_scale",
        "none",
        "Set --algo.scale batch_std (with --algo.advantage grpo or reinforce), or --algo.whiten unbiased.",
    ),
    Removed("PolicyConfig", "algo.entropy_coef_max", 1.0, "The adaptive coefficient is at most 1."),
    Removed(
        "Correction",
        "algo.correction.normalize",
        False,
        "Weights are not normalized; --algo.correction.cap bounds them.",
    ),
    Removed(
        "DPOConfig",
        "algo.reference_free algo.dpo.reference_free",
        False,
        "Set --algo cpo --algo.nll_coef 0, the same loss without a reference.",
    ),
    Removed(
        "OptimConfig",
        "optim.warmup_ratio critic.optim.warmup_ratio",
        0.0,
        "Give the ratio to warmup_steps: below 1 it is a fraction of the run's updates.",
    ),
    Removed(
        "SourceConfig",
        "data.train.score_mean data.eval.score_mean warm_start.sources.score_mean",
        0.0,
        "Normalize the column of score_key in the data.",
    ),
    Removed(
        "SourceConfig",
        "data.train.score_std data.eval.score_std warm_start.sources.score_std",
        1.0,
        "Normalize the column of score_key in the data.",
    ),
    Removed("RewardModelConfig", "reward.models.scale", 1.0, "Divide the weight of the reward model by it."),
    Removed(
        "TrainConfig",
        "sglang",
        {},
        "Its keys are those of any server now: --servers.flags, --servers.transport and so on.",
        continues=True,
    ),
    Removed(
        "LogConfig",
        "log.id",
        "",
        "Set WANDB_RUN_ID, MLFLOW_RUN_ID or SWANLAB_RUN_ID in the environment.",
        continues=True,
    ),
    Removed(
        "LogConfig",
        "log.directory",
        "",
        "Set WANDB_DIR or SWANLAB_LOG_DIR in the environment.",
        continues=True,
    ),
    Removed(
        "ToolsConfig",
        "env.toolbox.search",
        {"path": "", "results": 3, "passage_words": 200},
        "Set --env.tools 'mcp:python examples/search_server.py CORPUS' (docs/agents_tools.md).",
        continues=True,
    ),
    Removed(
        "LogConfig", "log.tracking_uri", "", "Set MLFLOW_TRACKING_URI in the environment.", continues=True
    ),
)


def removed_key(key: str) -> Removed | None:
    """Return the row of a key as it is typed or saved, such as data.train.0.score_mean; None = none."""
    plain = re.sub(r"\.\d+(?=\.)", "", key.replace("-", "_"))
    parent, _, name = plain.rpartition(".")
    for row in REMOVED:
        for full in row.keys.split():
            inside = full.startswith(f"{parent}.") and full.rpartition(".")[2] == name
            if plain == full or plain.startswith(f"{full}.") or (parent and inside):
                return row
    return None


def removed_field(classes: Iterable[str], field: str) -> Removed | None:
    """Return the row of a field of a Config, given by the names of its class and base classes."""
    owners = set(classes)
    found = (row for row in REMOVED if row.owner in owners and f".{row.keys}".endswith(f".{field}"))
    return next(found, None)
