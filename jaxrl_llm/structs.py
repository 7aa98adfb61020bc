"""The nouns of the system, and the one legend of shapes.

    P prompts a step      G responses a prompt (the group)     N trajectories (P * G)
    B rows (packed)       T tokens of a row                    R response tokens, padded
    D hidden size         H query heads    K key/value heads   E head_dim
    F feed-forward size   V vocabulary     L layers            S rollout slots    C cache length

Per-token arrays of a `Batch` are aligned with `targets`: position t speaks of the token the model
predicts when it has read tokens[..t]. No array is ever shifted on the device, rows keep a length that
shards and tiles evenly, and a packed neighbour can never leak in by an off-by-one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.outcome import Outcome

Metrics = dict[str, Any]
Params = Any  # a pytree of arrays; outside models/ nobody looks inside


@dataclass
class Episode:
    """What an environment says of one trajectory."""

    turns: int = 0  # of the policy that it has answered
    reward: float | None = None  # sum of what its steps gave; None = none gave any
    failure: str = ""  # why the conversation broke off; the trajectory is then masked
    tool_calls: int = 0
    tool_errors: int = 0  # calls that could not be read or that failed, cut-off ones among them
    timeouts: int = 0  # calls that were cut off
    messages: tuple[dict[str, Any], ...] = ()  # of the turns that it has answered, its own included


@dataclass
class Trajectory:
    """One response to one prompt, as the engine made it (host, numpy; never re-tokenised text)."""

    prompt_ids: np.ndarray  # int32 [.], the prompt as the policy read it
    response_ids: np.ndarray  # int32 [R'], with the end-of-sequence token when the policy wrote one
    logprobs: np.ndarray  # float32 [R'], nats, of each response token under the sampling policy
    mask: np.ndarray  # int8 [R'], 1 = the policy wrote it (0 = a tool or the environment did)
    versions: np.ndarray  # int32 [R'], the policy version that wrote each token
    prompt_index: int  # which prompt of the step; trajectories of one prompt form a group
    response_index: int  # which of the G responses
    finish: str  # "stop" (end token or stop string) or "length"
    text: str = ""  # response text for people; training reads only ids
    answer: str | None = None  # what rewards read, the last of several turns; None = all of `text`
    episode: Episode | None = None  # of a conversation with an environment
    reward: float = float("nan")
    outcome: Outcome = Outcome.FAILED
    components: tuple[float, ...] = ()  # the rewards that `reward` is the weighted sum of
    token_rewards: np.ndarray | None = None  # float32 [R'], of a process reward model
    greedy_reward: float = float("nan")  # of the greedy response to the same prompt, where it was asked for

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The response as chat messages: one turn of the assistant, or the turns of a conversation."""
        messages = list(self.episode.messages) if self.episode else []
        if not messages:
            return [{"role": "assistant", "content": self.text}]
        turns = int((np.diff(self.mask, prepend=0) > 0).sum())
        if turns > sum(message["role"] == "assistant" for message in messages):  # the last one was cut off
            messages.append({"role": "assistant", "content": self.answer or ""})
        while messages[-1]["role"] != "assistant":  # an observation for which there were no tokens left
            messages.pop()
        return messages


def pytree(cls):
    """Frozen dataclass whose fields are all arrays (or None): a pytree."""
    cls = dataclass(frozen=True)(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    return jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])


@pytree
class Rollouts:
    """N trajectories side by side, padded to R response tokens: what `advantages` reads.

    Log-probs are in nats; masked places hold 0. What an algorithm did not ask for is None.
    """

    rewards: Float[Array, "N"]
    group: Int[Array, "N"]  # trajectories of one prompt share a number in [0, P)
    mask: Float[Array, "N R"]  # 1 = the policy wrote this token
    valid: Float[Array, "N"]  # 0 = the reward failed: takes no part in baselines or loss
    truncated: Float[Array, "N"] | None = None  # 1 = cut off at the longest length allowed
    components: Float[Array, "N C"] | None = None  # the rewards that `rewards` is the weighted sum of
    token_rewards: Float[Array, "N R"] | None = None  # of a process reward model
    greedy: Float[Array, "N"] | None = None  # reward of the greedy response to the same prompt
    rollout: Float[Array, "N R"] | None = None  # log-probs that the rollout engine reported
    old: Float[Array, "N R"] | None = None  # log-probs of the policy before this step's updates
    reference: Float[Array, "N R"] | None = None  # log-probs of the frozen reference
    values: Float[Array, "N R"] | None = None  # the critic's, of the state in which the token was chosen
    square: Float[Array, "N R"] | None = None  # sum over the vocabulary of the policy's p^2
    kl_coef: Float[Array, ""] | None = None  # the KL controller's present coefficient


@pytree
class Batch:
    """Packed rows of one micro-batch. Row = trajectories end to end, then padding (segment 0)."""

    tokens: Int[Array, "B T"]
    targets: Int[Array, "B T"]  # the next token of the same trajectory; 0 where there is none
    positions: Int[Array, "B T"]  # 0, 1, 2, ... in each trajectory
    segments: Int[Array, "B T"]  # 1, 2, ... number the trajectories of a row; 0 = padding
    mask: Float[Array, "B T"]  # 1 where the target is trained on
    lengths: Float[Array, "B T"]  # trained tokens of the trajectory that this token belongs to (>= 1)
    advantages: Float[Array, "B T"] | None = None
    rollout: Float[Array, "B T"] | None = None  # log-probs (nats) the rollout engine reported
    old: Float[Array, "B T"] | None = None  # log-probs before the first update of this step
    reference: Float[Array, "B T"] | None = None  # log-probs of the frozen reference
    values: Float[Array, "B T"] | None = None  # the critic's values before the first update of this step
    returns: Float[Array, "B T"] | None = None  # what the critic learns to predict
    labels: Float[Array, "B T"] | None = None  # what the data says of the token, or of its whole sequence


@pytree
class BatchTotals:
    """Numbers of a whole mini-batch: what its micro-batches cannot know by themselves."""

    num_tokens: Float[Array, ""]  # trained tokens
    num_sequences: Float[Array, ""]  # sequences with any
    kl_coef: Float[Array, ""]
    baseline: Float[Array, "*shape"] | None = None


@pytree
class LossInputs:
    """All that a loss may look at. [B, T] float32, log-probs in nats, aligned with `targets`.

    The denominators are global: over all micro-batches and devices of one optimizer update, so that
    the sum over micro-batches is the loss of the whole mini-batch.
    """

    policy: Float[Array, "B T"]  # carries the gradient
    mask: Float[Array, "B T"]
    segments: Int[Array, "B T"]
    lengths: Float[Array, "B T"]
    num_tokens: Float[Array, ""]
    num_sequences: Float[Array, ""]
    entropy: Float[Array, "B T"] | None = None  # nats, of the policy; carries gradient
    advantages: Float[Array, "B T"] | None = None
    rollout: Float[Array, "B T"] | None = None
    old: Float[Array, "B T"] | None = None
    reference: Float[Array, "B T"] | None = None
    values: Float[Array, "B T"] | None = None  # of the value head; carries gradient
    old_values: Float[Array, "B T"] | None = None
    returns: Float[Array, "B T"] | None = None
    labels: Float[Array, "B T"] | None = None
    divergence: Float[Array, "B T"] | None = None  # from the teacher's whole distribution; carries gradient
    kl_coef: Float[Array, ""] | None = None  # the KL controller's present coefficient
    baseline: Float[Array, "*shape"] | None = None  # the algorithm's `baseline`, summed over the mini-batch


@pytree
class TrainState:
    """What one update reads and writes; donated to it."""

    params: Params  # float32 master weights
    opt_state: Any
    version: Int[Array, ""]  # optimizer updates applied so far = the policy version
    nonfinite: Int[Array, ""]  # updates skipped in a row for NaN or Inf
    kl_coef: Float[Array, ""]  # of the KL controller
    critic: TrainState | None = None  # of the critic that learns beside it


class Program(NamedTuple):
    """A jitted function and what it is called with, abstract: to be compiled without being run."""

    fn: Any
    args: tuple
    static: dict[str, Any]
