"""Where a step's sequences come from: the policy's own rollouts, or a dataset's examples."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm import algos
from jaxrl_llm.algos.advantages import zero_variance_fraction
from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.data.loader import Loader, Prompt
from jaxrl_llm.data.packing import PackItem, from_trajectory
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import Result, Sample
from jaxrl_llm.rollout.engine import Engine, Request, SamplingConfig
from jaxrl_llm.structs import Metrics, Outcome, Params, Rollouts, Trajectory

Phase = Callable[[str], contextlib.AbstractContextManager]


@dataclass
class Experience:
    """What one step learns from."""

    minibatches: list[list[PackItem]]
    metrics: Metrics
    tokens: int  # prompt and response tokens, for throughput
    prompts: list[Prompt] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)


class Source(Protocol):
    """A pure function of (seed, step, weights): resuming needs no cursor."""

    def next(self, step: int, params: Params, version: int, phase: Phase) -> Experience:
        """The experience of step 0, 1, ... of a stage; `phase(name)` times its parts."""


@dataclass
class SupervisedSource:
    """Examples of a dataset, loss on their target tokens."""

    loader: Loader
    examples: int
    minibatches: int = 1

    def next(self, step: int, params: Params, version: int, phase: Phase) -> Experience:
        with phase("data"):
            items = [PackItem(ids, mask) for ids, mask in self.loader.supervised_batch(step, self.examples)]
        tokens = sum(len(item.tokens) for item in items)
        return Experience(split(items, self.minibatches, seed=step), {}, tokens)


@dataclass
class RolloutSource:
    """Prompts -> rollouts by the current policy -> rewards -> advantages."""

    loader: Loader
    engine: Engine
    rewards: RewardPool
    algo: AlgoConfig
    sampling: SamplingConfig
    key: jax.Array
    prompts: int
    responses: int
    max_tokens: int
    minibatches: int = 1

    def next(self, step: int, params: Params, version: int, phase: Phase) -> Experience:
        prompts = self.loader.batch(step, self.prompts)
        with phase("rollout"):
            published = self.engine.publish(params, version)
            trajectories = sample(
                self.engine, prompts, self.responses, self.max_tokens, self.sampling,
                jax.random.fold_in(self.key, step),
            )  # fmt: skip
        with phase("reward"):
            reward_metrics = judge(self.rewards, prompts, trajectories)
        rollouts = side_by_side(trajectories)
        advantages = np.asarray(_advantages(rollouts, self.algo))
        items = [
            from_trajectory(t, row, valid=np.isfinite(t.reward))
            for t, row in zip(trajectories, advantages, strict=True)
        ]
        return Experience(
            split(items, self.minibatches, seed=step),
            {**reward_metrics, **statistics(trajectories, rollouts), **published},
            sum(t.num_tokens for t in trajectories),
            prompts,
            trajectories,
        )


_zero_variance = jax.jit(zero_variance_fraction)


@functools.partial(jax.jit, static_argnums=1)
def _advantages(rollouts: Rollouts, algo: AlgoConfig) -> jax.Array:
    return algos.module_of(algo).advantages(rollouts, algo)


def sample(
    engine: Engine, prompts: Sequence[Prompt], responses: int, max_tokens: int, sampling: SamplingConfig, key
) -> list[Trajectory]:
    """`responses` to each prompt, in order; their prompt_index is the place in `prompts`."""
    requests = [Request(p.ids, i, responses, max_tokens) for i, p in enumerate(prompts)]
    return engine.generate(requests, sampling, key)


def judge(pool: RewardPool, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> Metrics:
    """Write reward and outcome into each trajectory. Process 0 scores and tells the others."""
    if jax.process_index() == 0:
        results = pool.score([as_sample(prompts[t.prompt_index], t) for t in trajectories])
    else:
        results = [Result(float("nan"), Outcome.FAILED)] * len(trajectories)
    scores = np.array([(r.score, r.outcome) for r in results], np.float32)
    if jax.process_count() > 1:
        scores = np.asarray(multihost_utils.broadcast_one_to_all(scores))
    for trajectory, (score, outcome) in zip(trajectories, scores, strict=True):
        trajectory.reward, trajectory.outcome = float(score), Outcome(int(outcome))
    return dict(pool.metrics)


def as_sample(prompt: Prompt, trajectory: Trajectory) -> Sample:
    """What the verifier reads."""
    example = prompt.example
    return Sample(
        response=trajectory.text,
        answer=example.answer,
        prompt=prompt_text(prompt),
        messages=example.messages or (),
        response_ids=tuple(int(i) for i in trajectory.response_ids),
        source=example.source,
        columns=example.columns,
    )


def prompt_text(prompt: Prompt) -> str:
    """The prompt for people: plain text, or the last message of the chat."""
    example = prompt.example
    return example.text if example.messages is None else example.messages[-1]["content"]


def side_by_side(trajectories: Sequence[Trajectory]) -> Rollouts:
    """Arrays over the trajectories, padded to the longest response (to a power of two: few shapes)."""
    longest = max(len(t.response_ids) for t in trajectories)
    mask = np.zeros((len(trajectories), 1 << max(longest - 1, 0).bit_length()), np.float32)
    for row, t in zip(mask, trajectories, strict=True):
        row[: len(t.mask)] = t.mask
    rewards = np.array([t.reward for t in trajectories], np.float32)
    return Rollouts(
        rewards=jnp.asarray(rewards),
        group=jnp.asarray([t.prompt_index for t in trajectories], jnp.int32),
        mask=jnp.asarray(mask),
        valid=jnp.asarray(np.isfinite(rewards), jnp.float32),
    )


def statistics(trajectories: Sequence[Trajectory], rollouts: Rollouts) -> Metrics:
    """What every rollout step reports of its responses."""
    rewards = np.array([t.reward for t in trajectories], np.float64)
    scored = rewards[np.isfinite(rewards)]
    lengths = np.array([len(t.response_ids) for t in trajectories])
    judged = [t.outcome == Outcome.CORRECT for t in trajectories if t.outcome != Outcome.FAILED]
    return {
        "reward/mean": scored.mean() if len(scored) else float("nan"),
        "reward/std": scored.std() if len(scored) else float("nan"),
        "accuracy": np.mean(judged) if judged else float("nan"),
        "response_tokens/mean": lengths.mean(),
        "response_tokens/max": lengths.max(),
        "truncated_fraction": np.mean([t.finish == "length" for t in trajectories]),
        "zero_variance_fraction": _zero_variance(rollouts.rewards, rollouts.group, rollouts.valid),
    }


def split(items: list[PackItem], parts: int, seed: int) -> list[list[PackItem]]:
    """Mini-batches of a shuffled step; a single one keeps its order."""
    if parts == 1:
        return [items]
    order = np.random.default_rng(seed).permutation(len(items))
    return [[items[i] for i in part] for part in np.array_split(order, parts)]
