"""Settings of PPO's clipped loss with other advantages: ReMax, OPO, pass@k, GDPO, GiGPO ..."""

from __future__ import annotations

from jaxrl_llm.algos.clipped import clipped_loss
from jaxrl_llm.algos.config import ClippedConfig
from jaxrl_llm.algos.policy_gradient import policy_algorithm

remax = policy_algorithm(
    "remax",
    """ReMax (arXiv 2310.10505, algorithm 2): REINFORCE with the greedy response as baseline.

    A_t = rewards from t on - reward of the greedy response to the same prompt; loss = -A r_t, summed over
    tokens.""",
    ClippedConfig(advantage="remax", aggregation="sequence_sum"),
    clipped_loss,
)

opo = policy_algorithm(
    "opo",
    """On-policy RL with optimal reward baseline: OPO (arXiv 2505.23585, eq. 7).

    A = r - sum(length r) / sum(length) over the group; loss = -A r_t, summed over tokens; no KL, no entropy,
    and meant for one update a step.""",
    ClippedConfig(advantage="opo", aggregation="sequence_sum"),
    clipped_loss,
)

passk = policy_algorithm(
    "passk",
    """GRPO for pass@k (arXiv 2503.19595, eq. 9): a group is worth its best response.

    A = (best - second best) / std of the group for the best response, 0 for all others. Where one response is
    enough, only what it adds over the rest is learned.""",
    ClippedConfig(advantage="passk", aggregation="sequence"),
    clipped_loss,
)

otb = policy_algorithm(
    "otb",
    """Optimal token baseline: each token has the baseline of least variance.

    A_t = G_t - sum(G_t W_t) / sum(W_t) over the group at the t-th own token, W_t = running sum of
    1 - 2 p + sum(p^2). Where the longest response of a group is the only one left its advantage is 0;
    `advantage = "otb_tail"` drops the baseline there (veRL's optimal_token_baseline with its default
    handle_zero_tail). Both count own tokens only, so that a tool's output shifts nothing.""",
    ClippedConfig(advantage="otb", aggregation="sequence_sum"),
    clipped_loss,
)

gdpo = policy_algorithm(
    "gdpo",
    """Group reward-decoupled normalization: GDPO (arXiv 2601.05242, eq. 4 to 6).

    Each reward is normalised in its group by itself, then they are added with `component_weights` and
    whitened over the step: a reward of small spread is not drowned by one of large spread.""",
    ClippedConfig(advantage="gdpo", aggregation="sequence"),
    clipped_loss,
)

mt_grpo = policy_algorithm(
    "mt_grpo",
    """Multi-turn GRPO: MT-GRPO (arXiv 2505.11821), with returns (the authors' advantage_est "cae").

    A = (G_k - mean) / std for all tokens of turn k, over the responses to the prompt that have a turn k.
    G_k = r_k + gamma G_(k+1), r_k the reward of turn k; the last one has the rest of the response's reward.
    The authors have two turns.""",
    ClippedConfig(advantage="mt_grpo", aggregation="sequence"),
    clipped_loss,
)

gigpo = policy_algorithm(
    "gigpo",
    """Group-in-group policy optimization: GiGPO (arXiv 2505.10978, eq. 3 to 9), for conversations.

    A = A^E + omega A^S. A^E = (r - group mean) / F, r the reward of the response. A^S = (G_k - mean) / F over
    the turns of all responses to the prompt that were taken in the same state of the environment (anchor
    states), G_k = r_k + gamma G_(k+1); 0 for a state that was met once. F is 1 (`scale = "none"`), or with
    `scale = "std"` the std + 1e-6. gamma, omega and F are verl-agent's defaults.""",
    ClippedConfig(advantage="gigpo", gamma=0.95, scale="none", aggregation="sequence"),
    clipped_loss,
)
