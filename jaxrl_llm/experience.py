"""Where a step's sequences come from: the policy's own rollouts, or a dataset's examples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm import algos
from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.data.loader import Loader, Prompt
from jaxrl_llm.data.packing import PackItem, from_trajectory
from jaxrl_llm.reward_models import RewardModel, add_scores
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import Result, Sample
from jaxrl_llm.rollout.engine import Engine, Request, SamplingConfig
from jaxrl_llm.structs import Metrics, Outcome, Params, Trajectory

Phase = Callable[[str], contextlib.AbstractContextManager]


@dataclass
class Experience:
    """What one step learns from."""

    items: list[PackItem]
    metrics: Metrics
    tokens: int  # prompt and response tokens, for throughput
    prompts: list[Prompt] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)  # one an item; [] = examples of a dataset


class Source(Protocol):
    """A pure function of (seed, step, weights): resuming needs no cursor."""

    def next(self, step: int, params: Params, version: int, phase: Phase) -> Experience:
        """The experience of step 0, 1, ... of a stage; `phase(name)` times its parts."""


@dataclass
class DatasetSource:
    """Examples of a dataset, as the algorithm wants them."""

    loader: Loader
    examples: int
    algo: AlgoConfig

    def next(self, step: int, params: Params, version: int, phase: Phase) -> Experience:
        with phase("data"):
            items = dataset_items(self.loader, self.algo, step, self.examples)
        return Experience(items, {}, sum(len(item.tokens) for item in items))


def dataset_items(loader: Loader, algo: AlgoConfig, step: int, size: int) -> list[PackItem]:
    """`size` examples of a dataset; a pair is two items, chosen and rejected."""
    kind = algos.data(algo)
    if kind == "tokens":
        return [PackItem(ids, mask) for ids, mask in loader.supervised_batch(step, size)]
    if kind in ("pairs", "labels"):
        read = loader.pair_batch if kind == "pairs" else loader.label_batch
        return [labelled(*one, label) for *both, label in read(step, size) for one in both]
    if kind == "steps":
        return [labelled(*example) for example in loader.step_batch(step, size)]
    assert kind == "teachers", kind
    return [labelled(*example) for example in loader.teacher_batch(step, size)]


def labelled(ids: np.ndarray, mask: np.ndarray, label: float | np.ndarray) -> PackItem:
    """An item with one label for all its tokens, or one each."""
    return PackItem(ids, mask, {"labels": np.broadcast_to(np.asarray(label, np.float32), ids.shape)})


@dataclass
class RolloutSource:
    """Prompts -> rollouts by the current policy -> rewards."""

    loader: Loader
    engine: Engine
    rewards: RewardPool
    algo: AlgoConfig
    sampling: SamplingConfig
    key: jax.Array
    prompts: int
    responses: int
    max_tokens: int
    judges: Sequence[RewardModel] = ()
    weight_noise: float = 0.0

    def next(self, step: int, params: Params, version: int, phase: Phase) -> Experience:
        with phase("rollout"):
            if self.weight_noise:
                params = perturbed(params, jax.random.fold_in(self.key, step), self.weight_noise)
            metrics = dict(self.engine.publish(params, version))
        prompts: list[Prompt] = []
        kept: list[Trajectory] = []
        draws, full = self.algo.draws, self.prompts * self.responses
        for draw in range(step * draws, (step + 1) * draws):
            more = self.loader.batch(draw, self.prompts)
            drawn = self._draw(more, len(prompts), jax.random.fold_in(self.key, draw), metrics, phase)
            prompts += more
            kept += drawn if draws == 1 else [t for group in groups(drawn) if varied(group) for t in group]
            if len(kept) >= full:
                break
        with phase("rollout"):
            self.engine.rest()
        if draws > 1:
            metrics["dynamic/draws"] = len(prompts) / self.prompts
            metrics["dynamic/kept_fraction"] = len(kept) / (len(prompts) * self.responses)
        kept = kept[:full] or drawn  # where no group differs there is nothing to learn, and nothing breaks
        metrics |= statistics(kept)
        items = [from_trajectory(t) for t in kept]
        if self.algo.teachers:
            for item, t in zip(items, kept, strict=True):
                item.signals["labels"] = np.full(len(item.tokens), prompts[t.prompt_index].example.teacher)
        return Experience(items, metrics, sum(t.num_tokens for t in kept), prompts, kept)

    def _draw(self, prompts, first_index: int, key, metrics: Metrics, phase: Phase) -> list[Trajectory]:
        """Scored responses to these prompts, which are numbered from `first_index`."""
        with phase("rollout"):
            drawn = sample(self.engine, prompts, self.responses, self.max_tokens, self.sampling, key)
            greedy = []
            if self.algo.needs_greedy:
                argmax = replace(self.sampling, temperature=0.0)
                greedy = sample(self.engine, prompts, 1, self.max_tokens, argmax, key)
        with phase("reward"):
            everything = [*drawn, *greedy]
            metrics |= judge(self.rewards, prompts, everything)
            add_scores(self.judges, everything, [prompt_text(prompts[t.prompt_index]) for t in everything])
        for trajectory in drawn:
            if greedy:
                trajectory.greedy_reward = greedy[trajectory.prompt_index].reward
            trajectory.prompt_index += first_index
        return drawn


@jax.jit
def perturbed(params: Params, key: jax.Array, scale: float) -> Params:
    """Weights times 1 + scale times a standard normal number each."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    noisy = [
        w * (1 + scale * jax.random.normal(k, w.shape, w.dtype)) for w, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, noisy)


def groups(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Trajectories of one prompt together, in order."""
    by_prompt: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_prompt.setdefault(trajectory.prompt_index, []).append(trajectory)
    return list(by_prompt.values())


def varied(group: Sequence[Trajectory]) -> bool:
    """Whether the rewards of a group differ; those that failed are not counted."""
    return len({t.reward for t in group if np.isfinite(t.reward)}) > 1


def sample(
    engine: Engine, prompts: Sequence[Prompt], responses: int, max_tokens: int, sampling: SamplingConfig, key
) -> list[Trajectory]:
    """`responses` to each prompt, in order; their prompt_index is the place in `prompts`."""
    requests = [Request(p.ids, i, responses, max_tokens) for i, p in enumerate(prompts)]
    return engine.generate(requests, sampling, key)


def judge(pool: RewardPool, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> Metrics:
    """Write reward and outcome into each trajectory. Process 0 scores and tells the others."""
    if pool.config.name == "none":  # reward models alone judge: nothing is correct or wrong
        results = [Result(0.0, Outcome.FAILED)] * len(trajectories)
    elif jax.process_index() == 0:
        results = pool.score([as_sample(prompts[t.prompt_index], t) for t in trajectories])
    else:
        results = [Result(float("nan"), Outcome.FAILED)] * len(trajectories)
    width = 1 + len(pool.config.shaping)
    none = (float("nan"),) * width
    table = np.array([(r.score, r.outcome, *(r.components or none)) for r in results], np.float32)
    if jax.process_count() > 1:
        table = np.asarray(multihost_utils.broadcast_one_to_all(table))
    for trajectory, (score, outcome, *components) in zip(trajectories, table.tolist(), strict=True):
        trajectory.reward, trajectory.outcome = score, Outcome(int(outcome))
        trajectory.components = tuple(components)
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


def statistics(trajectories: Sequence[Trajectory]) -> Metrics:
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
        "zero_variance_fraction": np.mean([not varied(group) for group in groups(trajectories)]),
    }
