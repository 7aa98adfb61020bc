"""PPO's clipped loss from ratio to aggregation, and its settings with a name: GRPO, DAPO, PPO ..."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algos.config import GRPO, ClippedConfig, PolicyConfig
from jaxrl_llm.algos.correction import correct
from jaxrl_llm.algos.kl import clamp, kl, log_ratio
from jaxrl_llm.algos.policy_gradient import policy_algorithm, value_loss
from jaxrl_llm.algos.reduce import aggregate, token_mean
from jaxrl_llm.structs import LossInputs, Metrics


def clipped_loss(inputs: LossInputs, config: ClippedConfig) -> tuple[Float[Array, ""], Metrics]:
    """Return max(-A r, -A clip(r, 1 - low, 1 + high)) + kl_coef KL - entropy_coef entropy, aggregated.

    r = exp(logprobs - old_logprobs), PPO (arXiv 1707.06347, eq. 7); r is 1 if a step has one update.
    clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476, eq. 10).
    """
    ratio = jnp.exp(log_ratio(inputs.logprobs, inputs.old_logprobs))
    surrogate, is_clipped = clip(ratio, inputs.advantages, config)
    return policy_loss(surrogate, {"clip_fraction": is_clipped}, inputs, config)


def clip(
    ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], config: ClippedConfig
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Return the clipped surrogate of each token, and whether a bound removed its gradient.

    `dual_clip` c bounds the loss of a negative advantage by -A c (arXiv 1912.09729, eq. 5).
    """
    plain = -advantages * ratio
    clipped = -advantages * clamp(ratio, 1 - config.clip_low, 1 + config.clip_high)
    loss, is_clipped = jnp.maximum(plain, clipped), clipped > plain
    if config.dual_clip is not None:
        bound = jnp.where(advantages < 0, -advantages * config.dual_clip, jnp.inf)
        over = loss > bound
        loss, is_clipped = jnp.where(over, bound, loss), is_clipped | over
    return loss, is_clipped


def policy_loss(
    surrogate: Float[Array, "B T"], fractions: Mapping[str, Array], inputs: LossInputs, config: PolicyConfig
) -> tuple[Float[Array, ""], Metrics]:
    """Correct the surrogate for the rollout, add KL, entropy and value loss, and aggregate.

    Args:
        surrogate: loss of each token.
        fractions: per-token arrays whose means are metrics.
    """
    weights, metrics = correct(inputs, config.correction)
    metrics |= {name: token_mean(jnp.asarray(x, surrogate.dtype), inputs) for name, x in fractions.items()}
    metrics["policy_kl"] = token_mean(inputs.old_logprobs - inputs.logprobs, inputs)
    per_token = weights * surrogate
    if inputs.ref_logprobs is not None:
        penalty = kl(inputs.logprobs, inputs.ref_logprobs, config.kl)
        if config.kl_importance:
            penalty = penalty * jnp.exp(log_ratio(inputs.logprobs, inputs.old_logprobs))
        metrics["kl"] = token_mean(penalty, inputs)
        if config.kl_in == "loss" and config.kl_coef:
            per_token = per_token + config.present_kl_coef(inputs) * penalty
    if config.entropy_coef or config.entropy_target is not None:
        coef = config.entropy_coef if config.entropy_target is None else inputs.entropy_coef
        per_token = per_token - coef * inputs.entropy
    loss = aggregate(per_token, inputs, config.aggregation, config.constant)
    if config.advantage == "gae" and config.critic == "shared":
        of_values, moved = value_loss(inputs.values, inputs.old_values, inputs.returns, config.value_clip)
        metrics["value_loss"] = token_mean(of_values, inputs)
        metrics["value_clip_fraction"] = token_mean(jnp.asarray(moved, surrogate.dtype), inputs)
        loss = loss + config.vf_coef * metrics["value_loss"]
    return loss, jax.lax.stop_gradient(metrics)


grpo = policy_algorithm(
    "grpo",
    """Group relative policy optimization: GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3).

    A = (r - mean of the group) / (std of the group + 1e-6), the same for all tokens of a response;
    loss = mean over responses of the mean over tokens of max(-A r_t, -A clip(r_t)) + kl_coef k3.
    ChatLearn divides by the population std; veRL averages over tokens.""",
    GRPO,
    clipped_loss,
)

dapo = policy_algorithm(
    "dapo",
    """Decoupled clip and dynamic sampling: DAPO (arXiv 2503.14476, eq. 8 to 13).

    GRPO without KL, and four changes, each an option of its own: the ratio may rise further than it may fall
    (`clip_high`); prompts whose responses are all right or all wrong are replaced (`dynamic_sampling`); every
    token counts the same (`aggregation`); truncated responses are not learned from (`drop_truncated`), and
    long ones are penalised before that (reward "overlong").""",
    ClippedConfig(clip_high=0.28, dynamic_sampling=True, drop_truncated=True),
    clipped_loss,
)

ppo = policy_algorithm(
    "ppo",
    """Proximal policy optimization: PPO (arXiv 1707.06347, eq. 7; for language arXiv 2203.02155).

    Reward of a token: -kl_coef (old_logprobs - ref_logprobs), plus the response's reward on its last token;
    A = GAE over the policy's own tokens (arXiv 1506.02438), whitened; loss = max(-A r_t, -A clip(r_t)).
    The critic (policy_gradient.py) learns A + V; `critic = "shared"` makes it a second head on the policy.
    kl_coef and lambda are InstructGPT's.""",
    ClippedConfig(advantage="gae", lam=0.95, kl_coef=0.02, kl="k1", kl_in="reward"),
    clipped_loss,
)

dr_grpo = policy_algorithm(
    "dr_grpo",
    """GRPO done right: Dr. GRPO (arXiv 2503.20783, section 3.2).

    A = r - mean of the group, without the std; loss = sum over tokens / a constant, mean over responses:
    neither hard prompts nor short wrong answers weigh more than others. `constant` is the longest response
    allowed (veRL without `loss_scale_factor` divides by the padded length instead).""",
    ClippedConfig(scale="none", aggregation="constant"),
    clipped_loss,
)

rloo = policy_algorithm(
    "rloo",
    """REINFORCE leave-one-out: RLOO (arXiv 2402.14740, eq. 8).

    A = r - mean reward of the other responses to the prompt, with -kl_coef (old_logprobs - ref_logprobs) of
    all tokens in r; loss = -A r_t, summed over tokens: with one update a step the gradient of REINFORCE, with
    several PPO's clip bounds the ratio. veRL averages over tokens.""",
    ClippedConfig(advantage="rloo", aggregation="sequence_sum", kl_coef=0.03, kl="k1", kl_in="reward"),
    clipped_loss,
)

reinforce_pp = policy_algorithm(
    "reinforce_pp",
    """REINFORCE++ (arXiv 2501.03262, eq. 4 to 6).

    A = discounted return of the token's rewards, the KL among them, whitened over all tokens of the step;
    loss = max(-A r_t, -A clip(r_t)). The baseline form is `advantage = "reinforce_pp_baseline"`: r - mean of
    the group, then whitened (OpenRLHF's reinforce_baseline; there with the KL in the loss, k2).""",
    ClippedConfig(advantage="reinforce_pp", kl_coef=0.01, kl="k1", kl_in="reward"),
    clipped_loss,
)
