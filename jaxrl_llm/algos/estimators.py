"""Every advantage estimator by name, with one signature, so that each goes with each policy loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algos import advantages as response
from jaxrl_llm.algos import returns as token
from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.algos.correction import importance_weights
from jaxrl_llm.structs import Rollouts

Advantage = Literal[
    "gae", "grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "gpg",
    "gpg_rewards", "passk", "otb", "otb_tail", "gdpo",
]  # fmt: skip
WHITENED = {"gae", "reinforce_pp", "reinforce_pp_baseline", "gdpo"}  # by their definition


def _passk(scores: Float[Array, "N"], r: Rollouts, config: AlgoConfig) -> Float[Array, "N"]:
    gain = response.best_over_second(scores, r.group, r.valid)
    return gain / response.spread(scores, r.group, r.valid, config.scale)


def _gpg(counted: Literal["groups", "rewards"]) -> Callable[..., Float[Array, "N"]]:
    def fn(scores: Float[Array, "N"], r: Rollouts, config: AlgoConfig) -> Float[Array, "N"]:
        advantages = response.rescaled(scores, r.group, r.valid, counted)
        return advantages / response.spread(scores, r.group, r.valid, config.scale)

    return fn


def _otb(zero_tail: bool) -> Callable[..., Float[Array, "N R"]]:
    def fn(rewards: Float[Array, "N R"], r: Rollouts, config: AlgoConfig) -> Float[Array, "N R"]:
        mask = r.mask * r.valid[:, None]
        returns = token.return_to_go(rewards, mask, config.gamma)
        ratio = None
        if config.correction.weight != "none":
            ids = jnp.ones(mask.shape, jnp.int32)
            ratio = importance_weights(r.old - r.rollout, mask, ids, config.correction)
        return token.optimal_token_baseline(returns, r.old, r.square, r.group, mask, ratio, zero_tail)

    return fn


PER_RESPONSE: dict[str, Callable[..., Float[Array, "N"]]] = {
    "grpo": lambda s, r, c: response.group_advantages(s, r.group, r.valid, c.scale),
    "rloo": lambda s, r, c: response.leave_one_out(s, r.group, r.valid),
    "reinforce": lambda s, r, c: response.batch_advantages(s, r.valid, c.scale),
    "reinforce_pp_baseline": lambda s, r, c: response.group_advantages(s, r.group, r.valid, "none"),
    "opo": lambda s, r, c: response.length_weighted(s, r.group, r.valid, r.mask.sum(axis=1)),
    "gpg": _gpg("groups"),
    "gpg_rewards": _gpg("rewards"),
    "passk": _passk,
    "gdpo": lambda s, r, c: response.decoupled(r.components, r.group, r.valid, c.component_weights, c.scale),
}
"""From scores [N], rollouts and config to the advantage of each response."""

PER_TOKEN: dict[str, Callable[..., Float[Array, "N R"]]] = {
    "gae": lambda t, r, c: token.gae(t, r.values, r.mask * r.valid[:, None], c.gamma, c.lam, c.gaps)[0],
    "reinforce_pp": lambda t, r, c: token.return_to_go(t, r.mask, c.gamma),
    "remax": lambda t, r, c: token.return_to_go(t, r.mask, c.gamma) - r.greedy[:, None],
    "otb": _otb(False),
    "otb_tail": _otb(True),
}
"""From rewards [N, R], rollouts and config to the advantage of each token."""
