"""Rewards of trajectories, from verifier, environment and reward models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.rows import Example, without_reference
from jaxrl_llm.experience.reward_models import RewardModel, add_scores
from jaxrl_llm.host.processes import on_first
from jaxrl_llm.rewards.config import RewardConfig
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import RewardResult, RewardSample, check_failures
from jaxrl_llm.structs import Metrics, Outcome, Trajectory
from jaxrl_llm.thoughts import visible_response


@dataclass
class Rewarder:
    """The verifier of a run and its reward models."""

    pool: RewardPool
    reward_models: Sequence[RewardModel] = ()

    def __call__(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> Metrics:
        """Score responses to `prompts` (by their prompt_index), and return the verifier's metrics.

        The devices run the reward models while the verifier's workers score.
        """
        examples = [prompts[t.prompt_index].example for t in trajectories]
        pending = [model.start(trajectories, examples) for model in self.reward_models]
        metrics = verify(self.pool, prompts, trajectories)
        add_scores(self.reward_models, trajectories, pending)
        return metrics


def verify(pool: RewardPool, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> Metrics:
    """Write the verifier's reward and outcome into each trajectory; process 0 scores for all.

    Raises:
        RewardFailureError: too many samples failed, on every process.
    """
    samples = [reward_sample(prompts[t.prompt_index].example, t) for t in trajectories]
    results = on_first(lambda: pool.score(samples))
    weights = pool.config.weights
    for trajectory, result in zip(trajectories, results, strict=True):
        trajectory.reward, trajectory.outcome = float(result.score), result.outcome
        missing = (0.0 if result.valid else math.nan,) * (len(weights) - len(result.components))
        scores = (*result.components, *missing)  # a failed reward has none
        trajectory.components = tuple(w * score for w, score in zip(weights, scores, strict=True))
    _apply_episodes(trajectories, pool.config)
    return dict(pool.metrics)


def _apply_episodes(trajectories: Sequence[Trajectory], config: RewardConfig) -> None:
    """Add the environments' rewards to the verifier's, or replace these; mask failed conversations.

    Raises:
        RewardFailureError: too many conversations failed.
    """
    episodes = [(t, t.episode) for t in trajectories if t.episode]
    for trajectory, episode in episodes:
        if episode.failure:
            trajectory.reward, trajectory.outcome = float("nan"), Outcome.FAILED
        elif episode.reward is not None and config.env == "add":
            trajectory.reward += episode.reward
            first, others = sum(trajectory.components[:1]), trajectory.components[1:]
            trajectory.components = (first + episode.reward, *others)
        elif episode.reward is not None:
            trajectory.reward = episode.reward
            trajectory.components = (episode.reward, *(0.0 for _ in trajectory.components[1:]))
            correct = episode.reward >= config.correct_at
            trajectory.outcome = Outcome.CORRECT if correct else Outcome.WRONG
    failed = [RewardResult(math.nan, Outcome.FAILED, e.failure) for _, e in episodes if e.failure]
    others = [RewardResult(0.0, Outcome.WRONG)] * (len(episodes) - len(failed))
    check_failures([*failed, *others], config.max_failed_fraction)


def reward_sample(example: Example, trajectory: Trajectory | None = None) -> RewardSample:
    """Return a response as verifiers read it; without a trajectory the row with an empty response."""
    written = ("", (), None)
    if trajectory is not None:
        text = trajectory.text if trajectory.answer is None else trajectory.answer
        written = text, tuple(trajectory.response_ids[trajectory.once].tolist()), trajectory.opens_thought
    messages = without_reference(example.messages or ())
    return RewardSample(
        response=visible_response(written[0]),
        answer=example.answer,
        prompt=messages[-1]["content"] if messages else example.text,
        messages=tuple(messages),
        response_ids=written[1],
        source=example.source,
        columns=example.columns,
        text=written[0],
        opens_thought=written[2],
        where=example.where,
    )
