"""Held-out evaluation: responses, verified, scored and compared with the start; loss of examples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm import algos
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.envs.load import DialogueSource
from jaxrl_llm.experience.reward_models import add_scores
from jaxrl_llm.experience.rewards import Rewarder, verify
from jaxrl_llm.experience.rollouts import start_responses
from jaxrl_llm.experience.win_rate import WinRate, eval_rows, source_name, win_rate_metrics
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.rewards.extract import answer_key
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.structs import Metrics, Outcome, Params, TrainState, Trajectory
from jaxrl_llm.thoughts import split_thought

ReferenceParams = Callable[[], Params | None]
"""Returns the weights of the frozen reference, or None if the algorithm needs none."""
MAX_SOURCES = 32  # data sources with separate metrics: the ones with the most prompts
BY_SOURCE = ("loss", "perplexity", "accuracy", "margin")  # of examples


class Evaluation(NamedTuple):
    """Results of one evaluation."""

    metrics: Metrics
    samples: list[dict[str, Any]]  # rows of samples.jsonl


@dataclass
class HeldOutResponses:
    """Responses to the same held-out prompts, with the same random keys each time."""

    prompts: list[Prompt]
    is_verifiable: list[bool]  # of each prompt: the verifier can tell right from wrong
    engine: Engine
    rewarder: Rewarder  # verifier and reward models
    sampling: SamplingConfig
    samples: int  # responses per prompt
    max_tokens: int
    key: jax.Array
    chat: ChatConfig
    env: DialogueSource | None = None  # as in training
    win_rate: WinRate | None = None
    num_logged: int = 64  # prompts whose first response is returned as a sample

    def __call__(self, state: TrainState, reference: ReferenceParams, step: int) -> Evaluation:
        """Return metrics eval/..., metrics of a data source as eval/NAME/SOURCE, and samples."""
        self.engine.publish(state.params, int(state.version))
        pending = start_responses(
            self.engine,
            self.prompts,
            self.samples,
            self.max_tokens,
            sampling=self.sampling,
            key=self.key,
            env=self.env,
        )
        trajectories = pending.result()
        self.engine.release_memory()
        scores = self._score(trajectories)
        wins = np.full(len(trajectories), np.nan)
        if self.win_rate is not None:
            compared = scores if self.rewarder.reward_models else [t.reward for t in trajectories]
            wins = self.win_rate(step, self.prompts, trajectories, compared)
        metrics = self._metrics(trajectories, scores, wins)
        return Evaluation(metrics, self._samples(trajectories, scores, wins))

    def _score(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """Write rewards as in training; return the reward models' score of each response, NaN without any.

        The models' scores are averaged by their weights, so that one model's is its own.
        """
        reward_models = self.rewarder.reward_models
        examples = [self.prompts[t.prompt_index].example for t in trajectories]
        pending = [model.start(trajectories, examples) for model in reward_models]
        for trajectory in trajectories:  # rows without an answer keep reward 0
            trajectory.reward = 0.0
        verifiable = [t for t in trajectories if self.is_verifiable[t.prompt_index]]
        verify(self.rewarder.pool, self.prompts, verifiable)
        results = [finish() for finish in pending]
        add_scores(reward_models, trajectories, [lambda rows=rows: rows for rows in results])
        if not reward_models:
            return np.full(len(trajectories), np.nan)
        weights = np.array([model.config.weight for model in reward_models])
        weights = weights if weights.any() else np.ones(len(weights))
        totals = np.array([[row.sum() for row in rows] for rows in results], np.float64)
        return weights @ totals / np.abs(weights).sum()

    def _metrics(self, trajectories: Sequence[Trajectory], scores: np.ndarray, wins: np.ndarray) -> Metrics:
        """Return the metrics over all responses, and the main ones of each data source."""
        groups = [trajectories[i : i + self.samples] for i in range(0, len(trajectories), self.samples)]
        verified = [group for group, known in zip(groups, self.is_verifiable, strict=True) if known]
        sources = np.repeat([source_name(prompt.example) for prompt in self.prompts], self.samples)
        correct = [
            np.nan if t.outcome == Outcome.FAILED else t.outcome == Outcome.CORRECT for t in trajectories
        ]
        values = {
            "pass@1": np.where(np.repeat(self.is_verifiable, self.samples), correct, np.nan),
            "reward": np.array([t.reward for t in trajectories]),
            "score": scores,
            "win_rate": wins,
        }
        metrics = lengths(trajectories) | (group_accuracies(verified) if verified else {})
        metrics |= win_rate_metrics(wins.reshape(-1, self.samples))
        for name, array in values.items():
            metrics |= by_source(name, array, sources)
        return metrics

    def _samples(
        self, trajectories: Sequence[Trajectory], scores: np.ndarray, wins: np.ndarray
    ) -> list[dict[str, Any]]:
        """Return the first response to some prompts, always the same ones, spread over them."""
        count = min(self.num_logged, len(self.prompts))
        chosen = [i * len(self.prompts) // count * self.samples for i in range(count)]
        rows = eval_rows(self.prompts, [trajectories[i] for i in chosen], self.chat)
        for row, i in zip(rows, chosen, strict=True):
            row |= {k: float(x[i]) for k, x in (("score", scores), ("win", wins)) if np.isfinite(x[i])}
        return rows


@dataclass
class HeldOutLoss:
    """Loss and metrics of the algorithm on the same held-out examples."""

    items: list[PackItem]
    stage: Stage
    sources: Mapping[str, list[PackItem]]  # data source -> its examples; {} = a single source

    def __call__(self, state: TrainState, reference: ReferenceParams, step: int) -> Evaluation:
        """Return metrics eval/..., and metrics of a data source as eval/NAME/SOURCE."""
        whole = self._measure(state, self.items, reference)
        metrics = {f"eval/{name}": value for name, value in whole.items()}
        for source, items in self.sources.items():
            values = self._measure(state, items, reference)
            metrics |= {f"eval/{name}/{source}": values[name] for name in BY_SOURCE if name in values}
        return Evaluation(metrics, [])

    def _measure(self, state: TrainState, items: list[PackItem], reference: ReferenceParams) -> Metrics:
        metrics = jax.device_get(self.stage.measure(state, items, reference()))
        values = {name: float(value) for name, value in metrics.items()}
        algo = self.stage.policy.algo
        if algos.of(algo).name == "sft" and algo.aggregation == "token":
            values["perplexity"] = math.exp(min(values["loss"], 100.0))
        return values


def evaluate_all(
    evaluators: Sequence[HeldOutResponses | HeldOutLoss],
    state: TrainState,
    reference: ReferenceParams,
    step: int,
) -> Evaluation:
    """Return metrics and samples of all evaluators after a step."""
    results = [evaluator(state, reference, step) for evaluator in evaluators]
    metrics = {name: value for result in results for name, value in result.metrics.items()}
    return Evaluation(metrics, [row for result in results for row in result.samples])


def group_accuracies(groups: Sequence[Sequence[Trajectory]]) -> Metrics:
    """Return pass@k and maj@k over prompts with k > 1 responses each; pass@1 is the mean over responses.

    Responses that the verifier failed on, or abstained from, are left out: eval/not_judged_fraction, if any.
    eval/pass@k = fraction of prompts with any correct response (Chen et al. 2021, arXiv 2107.03374, eq. 1
    with n = k); eval/maj@k = fraction of prompts whose most common answer is correct (Wang et al. 2022, arXiv
    2203.11171), ties going to the first.
    """
    k = len(groups[0])
    judged = [[t for t in group if t.outcome != Outcome.FAILED] for group in groups]
    failed = 1 - sum(map(len, judged)) / (k * len(groups))
    metrics = {"eval/not_judged_fraction": failed} if failed else {}
    if k == 1 or not any(judged):
        return metrics
    solved = [any(t.outcome == Outcome.CORRECT for t in group) for group in judged if group]
    voted = [majority(group) for group in judged if group]
    return metrics | {f"eval/pass@{k}": float(np.mean(solved)), f"eval/maj@{k}": float(np.mean(voted))}


def lengths(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return mean length of the responses, and the fraction that reached the maximum."""
    return {
        "eval/response_tokens/mean": float(np.mean([t.once.sum() for t in trajectories])),
        "eval/truncated_fraction": float(np.mean([t.finish == "length" for t in trajectories])),
    }


def majority(group: Sequence[Trajectory]) -> bool:
    """Return whether the most common answer of the group is correct; numbers are compared by value.

    A response whose thought is unfinished has no answer, and no vote.
    """
    texts = [t.text if t.answer is None else t.answer for t in group]
    finals = [split_thought(text, t.opens_thought).answer for text, t in zip(texts, group, strict=True)]
    answers = [answer_key(final) if final.strip() else None for final in finals]
    votes = Counter(answer for answer in answers if answer is not None)
    winner = votes.most_common(1)[0][0] if votes else None
    return winner is not None and group[answers.index(winner)].outcome == Outcome.CORRECT


def by_source(name: str, values: np.ndarray, sources: np.ndarray) -> Metrics:
    """Return the mean of the finite values as eval/NAME and, of several data sources, as eval/NAME/SOURCE."""
    known = np.isfinite(values)
    if not known.any():
        return {}
    metrics = {f"eval/{name}": float(values[known].mean())}
    counts = Counter(sources.tolist())
    for source, _ in counts.most_common(MAX_SOURCES) if len(counts) > 1 else ():
        own = known & (sources == source)
        if own.any():
            metrics[f"eval/{name}/{source}"] = float(values[own].mean())
    return metrics
