"""Settings without effect: values that other settings keep a run from reading.

They are noted and not refused: a recipe may state a value that the command line makes idle, such as the
alpha of its adapters with --lora.rank 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxrl_llm import algos
from jaxrl_llm.algos.config import PolicyConfig
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
    is_idle: Callable[[Any], bool]
    """Says of the config, or of the algorithm's settings, that they are not read."""


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
        "--algo has no separate critic",
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
"""Rows about a TrainConfig."""
OF_POLICY = (
    Idle(
        "algo.kl algo.kl_in algo.kl_target algo.kl_importance",
        "--algo.kl_coef is 0",
        lambda algo: not algo.kl_coef,
    ),
    Idle(
        "algo.kl_importance",
        "--algo.kl_in is not loss",
        lambda algo: algo.kl_coef and algo.kl_in != "loss" and algo.kl_target is None,
    ),
    Idle("algo.omega", "--algo.advantage is not gigpo", lambda algo: algo.advantage != "gigpo"),
    Idle("algo.constant", "--algo.aggregation is not constant", lambda algo: algo.aggregation != "constant"),
    Idle("algo.max_draws", "--algo.dynamic_sampling is False", lambda algo: not algo.dynamic_sampling),
    Idle(
        "algo.correction.cap",
        "--algo.correction.weight is none",
        lambda algo: algo.correction.weight == "none" and algo.algorithm not in READ_CAP,
    ),
    Idle(
        "algo.correction.floor algo.correction.outside",
        "--algo.correction.weight is none",
        lambda algo: algo.correction.weight == "none",
    ),
    Idle(
        "algo.correction.reject_only",
        "--algo.correction.reject is empty",
        lambda algo: not algo.correction.reject,
    ),
    Idle(
        "algo.correction.of",
        "--algo.correction.weight is none, and --algo.correction.reject is empty",
        lambda algo: not algo.correction.active,
    ),
)
"""Rows about the settings of a policy gradient of the library."""
OF_PAIRS = (
    Idle("algo.tau algo.dpo.tau", "it is read by the loss discopop only", lambda dpo: dpo.loss != "discopop"),
    Idle(
        "algo.alpha algo.dpo.alpha",
        "it is read by the divergence alpha only",
        lambda dpo: dpo.divergence != "alpha",
    ),
)
"""Rows about the settings of DPO's loss."""


def without_effect(config: TrainConfig) -> list[str]:
    """Return a note on each setting that is not its default and has no effect on this run."""
    known = dict(iter_fields(config))
    at_defaults = dataclasses.replace(TrainConfig(), algo=algos.of(config.algo).config)
    defaults = dict(iter_fields(at_defaults))
    notes = []
    for row in _idle_rows(config):
        keys = [
            f"--{key}"
            for key in row.keys.split()
            if key in known and key in defaults and known[key].value != defaults[key].value
        ]
        if keys:
            has = "has" if len(keys) == 1 else "have"
            notes.append(f"{', '.join(keys)} {has} no effect: {row.reason}")
    return notes


def _idle_rows(config: TrainConfig) -> Iterator[Idle]:
    """Yield the rows whose settings this run does not read."""
    algo: Any = config.algo
    yield from (row for row in IDLE if row.is_idle(config))
    if isinstance(algo, PolicyConfig) and algo.algorithm in algos.ALGOS:
        yield from (row for row in OF_POLICY if row.is_idle(algo))
    if algo.algorithm in ("dpo", "online_dpo"):
        pairs = getattr(algo, "dpo", algo)
        yield from (row for row in OF_PAIRS if row.is_idle(pairs))
