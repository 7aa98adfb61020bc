"""Names of veRL's values, and how they are read (keys/verl.toml has its keys)."""

from __future__ import annotations

from typing import Any

from jaxrl_import.values import choice, count_or_never, items, lora_targets, number

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, REF = "actor_rollout_ref.model", "actor_rollout_ref.ref"
CORRECTION = "algorithm.rollout_correction"
MANAGER = "reward.reward_kwargs.overlong_buffer_cfg"
DISTILLATION = "distillation.distillation_loss"
ADVANTAGES = {  # estimator -> algorithm, advantage
    "gae": ("ppo", "gae"),
    "grpo": ("grpo", "grpo"),
    "grpo_vectorized": ("grpo", "grpo"),
    "grpo_passk": ("passk", "passk"),
    "rloo": ("rloo", "rloo"),
    "rloo_vectorized": ("rloo", "rloo"),
    "reinforce_plus_plus": ("reinforce_pp", "reinforce_pp"),
    "reinforce_plus_plus_baseline": ("reinforce_pp", "reinforce_pp_baseline"),
    "remax": ("remax", "remax"),
    "opo": ("opo", "opo"),
    "gpg": ("gpg", "gpg"),
    "gdpo": ("gdpo", "gdpo"),
    "optimal_token_baseline": ("otb", "otb"),
    "tir_optimal_token_baseline": ("otb", "otb_ta"),
}
ALONE = {"grpo", "rloo", "opo"}
"""Advantages that leave the only response to a prompt its reward, in veRL."""
LOSSES = {  # policy loss -> algorithm; vanilla: the estimator's
    "gspo": "gspo", "sapo": "sapo", "gpg": "gpg", "clip_cov": "clip_cov", "kl_cov": "kl_cov",
    "geo_mean": "gmpo", "cispo": "cispo", "dro": "dro", "dppo_tv": "dppo", "dppo_kl": "dppo",
}  # fmt: skip
LOSS_FIELDS = {  # algorithm -> key of veRL -> key here
    "sapo": {f"{ACTOR}.tau_pos": "algo.tau_positive", f"{ACTOR}.tau_neg": "algo.tau_negative"},
    "clip_cov": {
        f"{ACTOR}.policy_loss.clip_cov_ratio": "algo.fraction",
        f"{ACTOR}.policy_loss.clip_cov_lb": "algo.covariance_low",
        f"{ACTOR}.policy_loss.clip_cov_ub": "algo.covariance_high",
    },
    "kl_cov": {
        f"{ACTOR}.policy_loss.kl_cov_ratio": "algo.fraction",
        f"{ACTOR}.policy_loss.ppo_kl_coef": "algo.penalty",
    },
    "dro": {f"{ACTOR}.policy_loss.dro_beta": "algo.beta"},
    "dppo": {f"{ACTOR}.clip_ratio_c": "algo.ratio_cap"},
}
CLIPPED = {"ppo", "grpo", "passk", "rloo", "reinforce_pp", "remax", "opo", "gdpo", "otb", "pf_ppo", "gspo"}
KL = choice(
    kl="k1", k1="k1", abs="abs", mse="k2", k2="k2", low_var_kl="k3", k3="k3",
    kl_plus="k1+", k1_plus="k1+", low_var_kl_plus="k3+", k3_plus="k3+",
)  # fmt: skip
AGGREGATION = choice(
    token_mean="token",
    seq_mean_token_sum="sequence_sum",
    seq_mean_token_mean="sequence",
    seq_mean_token_sum_norm="constant",
    token_sum="token_sum",
)


def frequency(value: Any) -> int:
    """Return a number of steps between events; 0 for the ends of epochs."""
    return 0 if value == "after_each_epoch" else count_or_never(value)


def megatron_targets(value: Any) -> tuple[str, ...]:
    """Return the layers with adapters of Megatron's names, each of which may be several here."""
    names = {
        "linear_qkv": ("q_proj", "k_proj", "v_proj"),
        "linear_proj": ("o_proj",),
        "linear_fc1": ("gate_proj", "up_proj"),
        "linear_fc2": ("down_proj",),
    }
    return tuple(name for item in lora_targets(value) for name in names.get(item, (item,)))


ROUTING = choice(disabled="none", r2="old", r3="rollout")
OPTIMIZERS = {
    "adamw": "adamw", "adam": "adamw", "fusedadam": "adamw", "adafactor": "adafactor", "sgd": "sgd",
    "lion": "lion", "muon": "muon",
}  # fmt: skip


def bounds(value: Any) -> tuple[float, ...]:
    """Return one upper bound, or the lower and the upper one of "0.5_2.0"."""
    return tuple(map(number, str(value).split("_")[:2]))


def bounds_list(value: Any) -> list[tuple[float, ...]]:
    """Return the bounds of several rules."""
    return list(map(bounds, items(value)))


CRITIC_DEFAULTS = {
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.optim.lr_scheduler_type": "constant",
    "critic.cliprange_value": 0.5,
}
READERS = {
    "kl": KL,
    "aggregation": AGGREGATION,
    "routing": ROUTING,
    "frequency": frequency,
    "megatron_targets": megatron_targets,
    "bounds": bounds,
    "bounds_list": bounds_list,
}
"""Functions that keys/verl.toml names, besides the functions of values.py."""
