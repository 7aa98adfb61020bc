"""Configs that several algorithms share: the base of all, policy gradients, PPO's clip, the critic. Imports
no jax, so that `--help` is fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from jaxrl_llm.ranges import Finite, Fraction, Positive, Range, Unbounded, Weight

Advantage = Literal[
    "gae", "grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "gpg",
    "gpg_rewards", "passk", "otb", "otb_tail", "gdpo", "optimal_value", "reward", "mt_grpo", "gigpo",
]  # fmt: skip
Aggregation = Literal["token", "sequence", "sequence_sum", "token_sum"]
"""Sums over tokens and their denominators, see `reduce.aggregate`."""
PolicyAggregation = Literal[Aggregation, "constant"]
"""Aggregations of policy gradients, which have a `constant` to divide by."""
Bound = Annotated[float, Range(0.0, math.inf)]
"""Distance of a ratio or log-ratio from 1 or 0; inf = no bound."""
Estimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]
KLPlace = Literal["loss", "reward", "advantage"]
Old = Literal["auto", "policy", "recompute", "rollout"]
Rule = Literal[
    "token_k1", "token_k2", "token_k3", "token_tv", "token_binary_kl",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_mean_tv", "seq_mean_binary_kl",
    "seq_max_k2", "seq_max_k3",
]  # fmt: skip
Scale = Literal["std", "population_std", "batch_std", "none"]
MAX_ENTROPY_COEF = 1.0  # of the entropy controller


class AlgorithmName(str):
    """Key of an algorithm in ALGOS, or the path of a user's file; no option of the command line."""


@dataclass(frozen=True)
class AlgoConfig:
    """Base of every algorithm's Config."""

    algorithm: AlgorithmName = field(default=AlgorithmName(""), kw_only=True)
    """Name of the algorithm whose settings these are; `Algorithm` sets it."""

    @property
    def initial_kl_coef(self) -> float:
        """Coefficient that the KL controller starts with."""
        return 0.0

    @property
    def initial_entropy_coef(self) -> tuple[float, float] | None:
        """State that the entropy controller starts with: (coefficient, applied); None = no controller."""
        return None


@dataclass(frozen=True)
class Correction:
    """Options of importance weights and rejection for the gap between rollout and trainer.

    Usual settings: truncated importance sampling (TIS) is weight "token", cap 2; IcePop is weight "token",
    floor 0.5, cap 5, outside "zero"; a sequence mask is weight "token", cap inf, reject seq_mean_k1.
    """

    weight: Literal["none", "token", "sequence"] = "none"
    """Weigh the policy loss by exp(old_logprobs - rollout_logprobs), of each token or its product over the
    sequence."""
    cap: Annotated[float, Range(0.0, math.inf, open_low=True)] = 2.0
    """Largest weight."""
    floor: Annotated[float, Range(0.0, 1e6)] = 0.0
    """Smallest weight."""
    outside: Literal["clip", "zero"] = "clip"
    """Clip a weight outside [floor, cap] to the bound, or set it to 0 (IcePop, masked sampling)."""
    of: Literal["old", "policy"] = "old"
    """Numerator of the ratio: the policy before this step's updates, or the present one (RL2)."""
    reject: tuple[tuple[Rule, Unbounded, Unbounded], ...] = ()
    """Rules, lowest and highest value allowed: tokens or sequences that break one have weight 0.
    Nats; for k1 a ratio rollout / old, for tv a probability. Such as token_k1 0.8 1.25 seq_mean_k3 0 0.02."""

    reject_only: Literal["all", "negative"] = "all"
    """Apply `reject` to all tokens, or only to tokens with a negative advantage. The off-policy sequence mask
    of DeepSeek-V3.2 (arXiv 2512.02556) is of "policy", reject seq_mean_k1 0.001 exp(delta), negative."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) of rules across fields."""
        if not self.floor < self.cap:
            yield "floor", f"is {self.floor:g}: it must be below cap, {self.cap:g}."
        for rule, low, high in self.reject:
            if not low < high or (rule.endswith("k1") and low <= 0):
                yield (
                    "reject",
                    f"has {rule} {low:g} {high:g}: it must have the lower bound first; above 0 for k1.",
                )

    @property
    def active(self) -> bool:
        return self.weight != "none" or bool(self.reject)


@dataclass(frozen=True)
class PolicyConfig(AlgoConfig):
    """Options of every policy-gradient algorithm."""

    advantage: Advantage = "grpo"
    """Estimator of the advantage; each goes with each loss."""
    scale: Scale = "std"
    """Divide the centred reward by: the group's std, its population std, the batch's std, or nothing."""
    gamma: Fraction = 1.0
    """Discount a token, of estimators that follow the reward through the tokens; a turn, of mt_grpo and
    gigpo."""
    lam: Fraction = 1.0
    """GAE's lambda: 1 = returns minus values, 0 = one-step."""
    whiten: Literal["auto", "none", "unbiased", "biased"] = "auto"
    """Whiten advantages over the step's tokens; auto: if the estimator's paper does."""
    value_beta: Positive = 0.5
    """Temperature beta of the optimal value: V = beta log mean exp(r / beta) over the group (A*-PO)."""
    omega: Weight = 1.0
    """Weight of GiGPO's step-relative advantage, which is added to the episode-relative one."""
    component_weights: tuple[Finite, ...] = ()
    """Weight of each normalised reward in GDPO: reward.name, reward.shaping, reward.models; empty = all 1."""
    drop_truncated: bool = False
    """Leave truncated responses out of the loss; they still count in baselines (DAPO)."""
    dynamic_sampling: bool = False
    """Replace prompts whose responses all have the same reward by fresh ones (DAPO)."""
    keep_prompts: Annotated[float, Range(0.0, 1.0, open_low=True, usual="0.25 is usual")] = 1.0
    """Share of the step's prompts that are learned from: the prompts whose rewards have the largest standard
    deviation (StarPO-S); 1 = all."""
    max_draws: Annotated[int, Range(1, 10_000)] = 4
    """Rollout rounds that dynamic sampling may take for one step."""
    critic: Literal["separate", "shared"] = "separate"
    """GAE's values: of a critic with its own backbone, or of a second head on the policy."""
    vf_coef: Weight = 0.1
    """Weight of the value loss, shared critic only."""
    value_clip: Positive = 0.5
    """Clip values to old value +- this, shared critic only."""
    aggregation: PolicyAggregation = "token"
    """Aggregation of token losses: token, sequence (mean of means), sequence_sum, constant (Dr. GRPO),
    token_sum (no denominator)."""
    constant: Positive = 1024.0
    """Tokens that "constant" aggregation divides by."""
    kl_coef: Weight = 0.0
    """Weight of KL(policy || reference); 0 = no reference model."""
    kl: Estimator = "k3"
    """Estimator of the KL; k1+ and k3+ have the (unbiased) gradient of k2."""
    kl_in: KLPlace = "loss"
    """Subtract the KL in the loss, in each token's reward, or in its advantage."""
    kl_importance: bool = False
    """Weigh the KL in the loss by policy / old: k1 and k3, and the gradient of k3, are then unbiased for
    tokens of an older policy (DeepSeek-V3.2, arXiv 2512.02556, section 3.1)."""
    kl_target: Positive | None = None
    """Adapt kl_coef to hold this KL, nats a token; None = kl_coef is fixed."""
    kl_horizon: Positive = 10000.0
    """Trajectories over which the adaptive coefficient moves."""
    top_entropy: Annotated[float, Range(0.0, 1.0, open_low=True, usual="0.2 is usual")] = 1.0
    """Share of the step's tokens that keep their advantage: the tokens of highest entropy before the first
    update (arXiv 2506.01939); 1 = all. Other tokens still count in denominators."""
    entropy_coef: Finite = 0.0
    """Weight of the entropy bonus; below 0 a penalty. With `entropy_target`, the initial weight."""
    entropy_target: Positive | None = None
    """Adapt entropy_coef to hold this entropy, nats a token: it rises by entropy_delta after an update below
    the target, falls after others, and is not applied after one above the target (Skywork-OR1)."""
    entropy_delta: Positive = 0.005
    """Step of the adaptive coefficient (arXiv 2505.22312)."""
    old: Old = "auto"
    """Old log-probs. "policy": log-probs before this step's updates, computed by a forward pass only if a
    step has several updates; "recompute": the same, always by a forward pass; "rollout": the log-probs that
    the rollout reported; "auto": "rollout" if older weights may have generated tokens and no correction is
    on, else "policy". "policy" and "recompute" count stale tokens as on-policy unless a correction is on."""
    correction: Correction = field(default_factory=Correction)
    """Importance weights and rejection for tokens of another engine, or of older weights."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) of rules across fields."""
        if self.old == "rollout" and self.correction.active and self.correction.of == "old":
            yield (
                "old",
                'is "rollout": the correction weighs by old / rollout, which then is 1. Set it to auto, or '
                "correction.of to policy.",
            )
        if self.entropy_target is not None and not 0 <= self.entropy_coef <= MAX_ENTROPY_COEF:
            yield (
                "entropy_coef",
                f"is {self.entropy_coef:g}: entropy_target adapts it from 0 to {MAX_ENTROPY_COEF:g}.",
            )
        if self.advantage == "gdpo" and self.kl_in == "reward" and self.kl_coef:
            yield (
                "kl_in",
                'is "reward": GDPO normalises each reward by itself, so a KL among them would lose its '
                "weight. Set it to advantage or loss.",
            )

    @property
    def initial_kl_coef(self) -> float:
        return self.kl_coef

    @property
    def initial_entropy_coef(self) -> tuple[float, float] | None:
        return None if self.entropy_target is None else (self.entropy_coef, 0.0)

    def present_kl_coef(self, x: Any) -> Any:
        """Return kl_coef, or the KL controller's present coefficient in x (Rollouts or LossInputs)."""
        return self.kl_coef if self.kl_target is None else x.kl_coef


@dataclass(frozen=True)
class ClippedConfig(PolicyConfig):
    """Options of the clipped loss."""

    clip_low: Bound = 0.2
    """The ratio may fall to 1 - clip_low."""
    clip_high: Bound = 0.2
    """The ratio may rise to 1 + clip_high (DAPO: 0.28)."""
    dual_clip: Annotated[float, Range(1.0, math.inf, open_low=True, usual="3 is usual")] | None = None
    """Bound on the ratio of tokens with a negative advantage (3.0 is usual); None = no bound."""


@dataclass(frozen=True)
class ValueConfig(AlgoConfig):
    """Options of a critic."""

    value_clip: Positive | None = 0.5
    """Clip values to old value +- this; None = no clipping."""
    factor: Positive = 0.5
    """Weight of the squared error (RL2: 1)."""
    aggregation: Aggregation = "token"
    """Aggregation of token losses: token, sequence (mean of means), sequence_sum, token_sum (no
    denominator)."""


GRPO = ClippedConfig(algorithm=AlgorithmName("grpo"), aggregation="sequence", kl_coef=0.04)
"""Settings of grpo, the algorithm of a recipe that names none."""
VALUE = ValueConfig(algorithm=AlgorithmName("value"))
"""Settings of the value regression, the critic's own algorithm."""
