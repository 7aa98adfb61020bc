"""Settings without effect: values that other settings keep a run from reading.

They are noted and not refused: a recipe may state a value that the command line makes idle, such as the
alpha of its adapters with --lora.rank 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_llm import algos
from jaxrl_llm.algos.config import AlgoConfig, PolicyConfig
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.recipe.keys import iter_fields

WITHOUT_B2 = ("sgd", "adagrad", "adafactor", "adafactor_unscaled")
"""Optimizers that do not read b2: `learn.optim`."""
READ_CAP = ("reinforce", "gpg")
"""Algorithms whose loss reads correction.cap without a correction: `surrogates.reinforce_loss`."""


class Idle(NamedTuple):
    """Settings that are not read where others have certain values."""

    keys: str
    """Keys, with a space between."""
    reason: str
    """Settings that keep them from being read."""
    is_idle: Callable[[TrainConfig], bool]


def _policy(config: TrainConfig, is_idle: Callable[[Any], bool]) -> bool:
    """Return is_idle(settings of the policy gradient); False for others, and for a user's loss."""
    algo = config.algo
    return isinstance(algo, PolicyConfig) and algo.algorithm in algos.ALGOS and is_idle(algo)


def _dpo(config: TrainConfig, is_idle: Callable[[Any], bool]) -> bool:
    """Return is_idle(settings of DPO's loss); False for other algorithms."""
    algo: Any = config.algo
    pairs: dict[str, AlgoConfig] = {"dpo": algo, "online_dpo": getattr(algo, "dpo", algo)}
    return algo.algorithm in pairs and is_idle(pairs[algo.algorithm])


IDLE = (
    Idle(
        "rollout.sampling.kept_sets",
        "--algo learns from no rollouts",
        lambda c: not algos.of(c.algo).on_rollouts,
    ),
    Idle("model.yarn_original", "--model.yarn_factor is not set", lambda c: c.model.yarn_factor is None),
    Idle("eval.sampling.kept_sets", "nothing is learned from evaluated responses", lambda c: True),
    Idle(
        "reference.path reference.offload",
        "no reference model is used with these settings",
        lambda c: not algos.requirements(c.algo).ref_logprobs,
    ),
    Idle(
        "algo.kl algo.kl_in algo.kl_target algo.kl_importance",
        "--algo.kl_coef is 0",
        lambda c: _policy(c, lambda algo: not algo.kl_coef),
    ),
    Idle(
        "algo.kl_importance",
        "--algo.kl_in is not loss",
        lambda c: _policy(c, lambda algo: algo.kl_coef and algo.kl_in != "loss" and algo.kl_target is None),
    ),
    Idle(
        "algo.omega", "--algo.advantage is not gigpo", lambda c: _policy(c, lambda a: a.advantage != "gigpo")
    ),
    Idle(
        "algo.constant",
        "--algo.aggregation is not constant",
        lambda c: _policy(c, lambda algo: algo.aggregation != "constant"),
    ),
    Idle(
        "algo.max_draws",
        "--algo.dynamic_sampling is False",
        lambda c: _policy(c, lambda algo: not algo.dynamic_sampling),
    ),
    Idle(
        "algo.correction.cap",
        "--algo.correction.weight is none",
        lambda c: _policy(
            c, lambda algo: algo.correction.weight == "none" and algo.algorithm not in READ_CAP
        ),
    ),
    Idle(
        "algo.correction.floor algo.correction.outside",
        "--algo.correction.weight is none",
        lambda c: _policy(c, lambda algo: algo.correction.weight == "none"),
    ),
    Idle(
        "algo.correction.reject_only",
        "--algo.correction.reject is empty",
        lambda c: _policy(c, lambda algo: not algo.correction.reject),
    ),
    Idle(
        "algo.correction.of",
        "--algo.correction.weight is none, and --algo.correction.reject is empty",
        lambda c: _policy(c, lambda algo: not algo.correction.active),
    ),
    Idle(
        "algo.tau algo.dpo.tau",
        "it is read by the loss discopop only",
        lambda c: _dpo(c, lambda dpo: dpo.loss != "discopop"),
    ),
    Idle(
        "algo.alpha algo.dpo.alpha",
        "it is read by the divergence alpha only",
        lambda c: _dpo(c, lambda dpo: dpo.divergence != "alpha"),
    ),
    Idle(
        "env.tool_timeout env.max_calls env.max_observation_tokens",
        "programs (--env.gateway) execute their tools themselves",
        lambda c: c.env.gateway.active,
    ),
    Idle(
        "env.max_turns env.tool_timeout env.max_calls env.max_observation_tokens env.format env.history",
        "--env.name, --env.tools and --env.gateway are not set",
        lambda c: not c.env.active,
    ),
    Idle(
        "critic.path critic.warmup_steps critic.loss.value_clip critic.optim.learning_rate",
        "--algo has no critic",
        lambda c: not algos.requirements(c.algo).critic,
    ),
    Idle(
        "reward.overlong_from reward.overlong_to",
        "--reward.shaping is without overlong",
        lambda c: "overlong" not in (c.reward.name, *dict(c.reward.shaping)),
    ),
    Idle("data.cut_side", "--data.overlong is not cut", lambda c: c.data.overlong != "cut"),
    Idle("optim.b2", "--optim.name does not read it", lambda c: c.optim.name in WITHOUT_B2),
    Idle("optim.final_fraction", "--optim.schedule is constant", lambda c: c.optim.schedule == "constant"),
    Idle("eval.judge eval.samples", "--eval.every is 0", lambda c: not c.eval.every),
    Idle("checkpoint.hf_keep", "--checkpoint.hf_every is 0", lambda c: not c.checkpoint.hf_every),
    Idle(
        "checkpoint.best_metric",
        "--eval.every is 0, so no step has held-out metrics",
        lambda c: c.checkpoint.best_metric.startswith("eval/") and not c.eval.every,
    ),
    Idle(
        "checkpoint.keep_best checkpoint.best_mode",
        "--checkpoint.best_metric is empty",
        lambda c: not c.checkpoint.best_metric,
    ),
    Idle(
        "log.name log.group log.tags",
        "no logger is set (--log.wandb, --log.mlflow, --log.swanlab, --log.trackio)",
        lambda c: not (c.log.wandb or c.log.mlflow or c.log.swanlab or c.log.trackio or c.log.prometheus),
    ),
    Idle("hub.private", "--hub.push is empty", lambda c: not c.hub.push),
    Idle(
        "lora.alpha lora.rank_stabilized lora.targets lora.expert_rank",
        "--lora.rank is 0",
        lambda c: not c.lora.rank,
    ),
)


def without_effect(config: TrainConfig) -> list[str]:
    """Return a note on each setting that is not its default and has no effect on this run."""
    known = dict(iter_fields(config))
    at_defaults = dataclasses.replace(TrainConfig(), algo=algos.of(config.algo).config)
    defaults = dict(iter_fields(at_defaults))
    notes = []
    for row in IDLE:
        keys = [
            f"--{key}"
            for key in row.keys.split()
            if key in known and key in defaults and known[key].value != defaults[key].value
        ]
        if keys and row.is_idle(config):
            has = "has" if len(keys) == 1 else "have"
            notes.append(f"{', '.join(keys)} {has} no effect: {row.reason}")
    return notes
