"""Where a step's sequences come from: the policy's own rollouts, or a dataset's examples."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm import algos
from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.data.loader import Loader, Prompt
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.envs.load import Conversations
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import Result, RewardConfig, Sample
from jaxrl_llm.rewards.summary import check_failures
from jaxrl_llm.rollout.engine import Engine, PartialResponse, Pending, Request, SamplingConfig
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
    """A pure function of (seed, step, weights): resuming needs no cursor, only what has been begun."""

    def next(self, step: int, params: Params, version: int, phase: Phase) -> Experience:
        """The experience of step 0, 1, ... of a stage; `phase(name)` times its parts."""

    def snapshot(self) -> bytes:
        """What a checkpoint must hold; b"" = nothing."""

    def resume(self, saved: bytes, params: Params, version: int) -> None:
        """Go on from a snapshot."""


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

    def snapshot(self) -> bytes:
        return b""

    def resume(self, saved: bytes, params: Params, version: int) -> None:
        """Nothing is ever begun."""


def dataset_items(loader: Loader, algo: AlgoConfig, step: int, size: int) -> list[PackItem]:
    """`size` examples of a dataset; a pair is two items, chosen and rejected."""
    kind = algos.of(algo).data
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
    engine: Engine,
    prompts: Sequence[Prompt],
    responses: int,
    max_tokens: int,
    sampling: SamplingConfig,
    key: jax.Array,
    env: Conversations | None = None,
) -> list[Trajectory]:
    """`responses` to each prompt, in order; their prompt_index is the place in `prompts`."""
    return start(engine, prompts, responses, max_tokens, sampling, key, env).result()


def start(
    engine: Engine,
    prompts: Sequence[Prompt],
    responses: int,
    max_tokens: int,
    sampling: SamplingConfig,
    key: jax.Array,
    env: Conversations | None = None,
    written: Sequence[PartialResponse] = (),
) -> Pending:
    """Begin `responses` to each prompt."""
    requests = [Request(p.ids, i, responses, max_tokens) for i, p in enumerate(prompts)]
    return engine.start(requests, sampling, key, env and env.dialogue(prompts, key), written)


def judge(pool: RewardPool, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> Metrics:
    """Write reward and outcome into each trajectory. Process 0 scores and tells the others."""
    if pool.config.name == "none":  # reward models alone judge: nothing is correct or wrong
        results = [Result(0.0, Outcome.FAILED)] * len(trajectories)
    elif jax.process_index() == 0:
        results = pool.score([as_sample(prompts[t.prompt_index], t) for t in trajectories])
    else:
        results = [Result(float("nan"), Outcome.FAILED)] * len(trajectories)
    weights = np.array([pool.config.weight, *(weight for _, weight in pool.config.shaping)])
    components = [r.components or (0.0 if r.valid else math.nan,) * len(weights) for r in results]
    scored = [(r.score, r.outcome, *(weights * c)) for r, c in zip(results, components, strict=True)]
    table = np.array(scored, np.float32)
    if jax.process_count() > 1:
        table = np.asarray(multihost_utils.broadcast_one_to_all(table))
    for trajectory, (score, outcome, *components) in zip(trajectories, table.tolist(), strict=True):
        trajectory.reward, trajectory.outcome = score, Outcome(int(outcome))
        trajectory.components = tuple(components)
    settle(trajectories, pool.config)
    return dict(pool.metrics)


def settle(trajectories: Sequence[Trajectory], config: RewardConfig) -> None:
    """What environments say of their conversations, besides or in place of the verifier.

    Raises:
        RewardFailureError: too many conversations broke off.
    """
    held = [(t, t.episode) for t in trajectories if t.episode]
    for trajectory, episode in held:
        if episode.failure:
            trajectory.reward, trajectory.outcome = float("nan"), Outcome.FAILED
        elif episode.reward is not None and config.env == "add":
            trajectory.reward += episode.reward
            first, others = sum(trajectory.components[:1]), trajectory.components[1:]
            trajectory.components = (first + episode.reward, *others)
        elif episode.reward is not None:
            trajectory.reward = episode.reward
            trajectory.components = (episode.reward, *(0.0 for _ in trajectory.components[1:]))
            right = episode.reward >= config.correct_at
            trajectory.outcome = Outcome.CORRECT if right else Outcome.WRONG
    failed = [Result(float("nan"), Outcome.FAILED, e.failure) for _, e in held if e.failure]
    check_failures(
        [*failed, *[Result(0.0, Outcome.WRONG)] * (len(held) - len(failed))], config.max_failed_fraction
    )


def as_sample(prompt: Prompt, trajectory: Trajectory) -> Sample:
    """What the verifier reads."""
    example = prompt.example
    return Sample(
        response=trajectory.text if trajectory.answer is None else trajectory.answer,
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
    episodes = [t.episode for t in trajectories if t.episode]
    made = sum(e.tool_calls for e in episodes)
    of_env = {
        "env/turns_mean": np.mean([turns(t) for t in trajectories]),
        "env/tool_calls": made / len(trajectories),
        "env/tool_errors": sum(e.tool_errors for e in episodes) / max(made, 1),
        "env/timeouts": sum(e.timeouts for e in episodes),
        "env/failed_fraction": sum(bool(e.failure) for e in episodes) / len(trajectories),
    }
    judged = [t.outcome == Outcome.CORRECT for t in trajectories if t.outcome != Outcome.FAILED]
    return {
        "reward/mean": scored.mean() if len(scored) else float("nan"),
        "reward/std": scored.std() if len(scored) else float("nan"),
        "accuracy": np.mean(judged) if judged else float("nan"),
        "response_tokens/mean": lengths.mean(),
        "response_tokens/max": lengths.max(),
        "truncated_fraction": np.mean([t.finish == "length" for t in trajectories]),
        "zero_variance_fraction": np.mean([not varied(group) for group in groups(trajectories)]),
        **(of_env if episodes else {}),
    }


def turns(trajectory: Trajectory) -> int:
    """Turns that the policy wrote."""
    return int((np.diff(trajectory.mask, prepend=0) > 0).sum())
