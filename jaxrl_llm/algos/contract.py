"""An algorithm is one frozen object, `Algorithm`: a Config and pure functions on arrays.

    input         "rollouts"  responses of the policy itself, with rewards
                  "tokens"    examples to imitate
                  "pairs"     a chosen and a rejected response to each prompt
                  "labels"    single responses, each with a label
    requires      config -> Requirements: the arrays and models to compute
    loss          (LossInputs, config) -> (Float[Array, ""], Metrics)
    advantages    (Rollouts, config) -> Float[Array, "N R"], if input is "rollouts"
    returns       (Rollouts, config) -> Float[Array, "N R"], the critic's targets
    select        (Rollouts in numpy, config, rng) -> int [M], the trajectories that are learned from
    baseline      (LossInputs, config) -> Float[Array, "*shape"], a micro-batch's part of one number of the
                  whole mini-batch, before its update

Metrics are sums over the micro-batch's tokens divided by the global denominators, so that micro-batches add
up to the mean of the mini-batch; keys that end in "/max" or "/max_abs" are combined by max.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from jaxrl_llm.algos.config import AlgoConfig, AlgorithmName

if TYPE_CHECKING:  # structs imports jax
    import numpy as np

    from jaxrl_llm.structs import LossInputs, Metrics, Rollouts

Input = Literal["rollouts", "tokens", "pairs", "labels"]
OldSource = Literal["auto", "policy", "rollout"]
RENAMED = {
    "policy": "logprobs",
    "old": "old_logprobs",
    "old_source": "old_logprobs_source",
    "rollout": "rollout_logprobs",
    "reference": "ref_logprobs",
}
"""Fields of log-probs by their names in earlier versions."""


class Divergence(NamedTuple):
    """Settings of `linear_divergence` from a teacher's whole next-token distribution."""

    beta: float
    temperature: float
    top_k: int


@dataclass(frozen=True)
class Requirements:
    """The arrays and models that an algorithm reads; each costs a forward pass, memory or a gradient."""

    logprobs: bool = True
    """Log-probs of the policy; critics and reward models learn without."""
    entropy: bool = False
    """Gradient through the entropy; its value is a metric anyway."""
    old_logprobs: bool = False
    """Old log-probs before the first update: `advantages` or `baseline` reads them."""
    old_logprobs_source: OldSource = "auto"
    """Old log-probs come from the policy before this step's updates, or from the rollout. auto: from the
    rollout if older weights may have generated tokens, unless `corrected`; else the policy."""
    corrected: bool = False
    """The loss itself weighs or rejects tokens by policy / rollout, so old log-probs need not come from
    there."""
    ref_logprobs: bool = False
    """Log-probs of the frozen reference model, or of the teachers instead."""
    values: bool = False
    """A value head on the trained model."""
    critic: bool = False
    """Values of a critic with its own backbone."""
    sequences: bool = False
    """The loss adds up tokens of a response (`LossInputs.segments`), so its contexts must share a row."""
    sum_pi_squared: bool = False
    """Sum over the vocabulary of p^2 of the policy before the first update: `advantages` reads it."""
    square_in_loss: bool = False
    """Sum over the vocabulary of the present policy's p^2: the loss reads it, without gradient."""
    old_entropy: bool = False
    """Entropy of the policy before the first update: `advantages` reads it."""
    rewards: bool = True
    """Rewards of the responses; only for algorithms that learn from responses."""
    greedy: bool = False
    """A greedy response to every prompt, and its reward."""
    components: bool = False
    """The separate rewards, not only their sum; dynamic sampling compares them."""
    turns: bool = False
    """Turns of conversations: `advantages` compares them (`Rollouts.turns`, `Rollouts.states`)."""
    draws: int = 1
    """Batches of prompts that may be rolled out for one step; with several, only groups whose rewards differ
    are kept, until the step is full (DAPO's dynamic sampling)."""
    teachers: tuple[str, ...] = ()
    """Folders of the teachers' weights."""
    divergence: Divergence | None = None
    """Divergence from the teachers' whole distributions; None = not computed."""


def _policy_alone(config: AlgoConfig) -> Requirements:
    return Requirements()


@dataclass(frozen=True, eq=False)
class Algorithm:
    """One algorithm; the module's docstring has the signatures."""

    name: str
    doc: str
    """Name, paper and formula; `--list` shows the first line."""
    input: Input
    config: AlgoConfig
    """The algorithm's Config with its defaults."""
    loss: Callable[[LossInputs, Any], tuple[Any, Metrics]]
    requires: Callable[[Any], Requirements] = _policy_alone
    advantages: Callable[[Rollouts, Any], Any] | None = None
    returns: Callable[[Rollouts, Any], Any] | None = None
    select: Callable[[Rollouts, Any, np.random.Generator], np.ndarray] | None = None
    baseline: Callable[[LossInputs, Any], Any] | None = None
    data: str = ""
    """Kind of dataset rows, if `input` does not determine it: "steps", "teachers"; "" = `input`."""
    group_size: int = 1
    """Sequences that stay side by side in a packed row; 2: chosen, rejected, chosen, ..."""

    def __post_init__(self):
        known = get_args(Input)
        assert self.input in known, f"{self.name}: input is {self.input!r}, not one of {known}"
        updates_policy = self.on_rollouts and self.requires(self.config).logprobs
        assert self.advantages or not updates_policy, f"{self.name} learns from rollouts without advantages"
        derived = {
            "config": replace(self.config, algorithm=AlgorithmName(self.name)),
            "data": self.data or self.input,
            "doc": inspect.cleandoc(self.doc),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def Config(self, **settings: Any) -> Any:
        """Return the algorithm's defaults with these settings: `grpo.Config(kl_coef=0.0)`."""
        return replace(self.config, **settings)

    @property
    def on_rollouts(self) -> bool:
        """True for algorithms that learn from the policy's own responses."""
        return self.input == "rollouts"


def choose_old_logprobs(
    algorithm: Algorithm, requires: Requirements, updates: int, on_policy: bool = True
) -> Literal["policy", "recompute", "rollout"]:
    """Return the source of a step's old log-probs.

    Args:
        updates: updates of this step; from the second on, the policy differs from the old policy.
        on_policy: the weights before the first update generated every token. False for asynchronous and
            partial rollouts: with the policy's log-probs as old ones, stale tokens would have ratio 1 and no
            clip.

    Returns:
        "policy": the policy's log-probs in the update, so the ratio is 1. "recompute": a forward pass before
            the first update. "rollout": the log-probs that the rollout engine reported.
    """
    stale = algorithm.on_rollouts and not on_policy and not requires.corrected
    if requires.old_logprobs_source == "rollout" or (requires.old_logprobs_source == "auto" and stale):
        return "rollout"
    return "recompute" if requires.old_logprobs or (algorithm.on_rollouts and updates > 1) else "policy"


def renamed(error: Exception) -> str:
    """Return " It is called ... now." for an error about a field of log-probs by its earlier name."""
    pattern = r"((LossInputs|Rollouts)' object has no attribute|keyword argument) '(\w+)'"
    found = re.search(pattern, str(error))
    return f". It is called {RENAMED[found[3]]} now." if found and found[3] in RENAMED else ""


def ignores_staleness(algorithm: Algorithm, requires: Requirements) -> bool:
    """Return True if off-policy tokens are treated as on-policy (never the default)."""
    return algorithm.on_rollouts and requires.old_logprobs_source == "policy" and not requires.corrected
