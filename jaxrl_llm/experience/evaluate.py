"""On held-out data: accuracy of answers (pass@1, pass@k, maj@k), and the loss of what is learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.envs.load import Conversations
from jaxrl_llm.experience.source import judge, sample
from jaxrl_llm.learn.trainer import Trainer
from jaxrl_llm.rewards.extract import find_answer, last_number
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rollout.engine import Engine, SamplingConfig
from jaxrl_llm.structs import Metrics, Outcome, Params, TrainState, Trajectory

Reference = Callable[[], Params | None]  # gives the frozen weights, where somebody needs them


@dataclass
class Answers:
    """Answers the same held-out prompts with the same random keys each time it is asked."""

    prompts: list[Prompt]
    engine: Engine
    rewards: RewardPool
    sampling: SamplingConfig
    samples: int
    max_tokens: int
    key: jax.Array
    env: Conversations | None = None  # the one that training has

    def __call__(self, state: TrainState, reference: Reference) -> Metrics:
        """Metrics eval/..."""
        self.engine.publish(state.params, int(state.version))
        trajectories = sample(
            self.engine, self.prompts, self.samples, self.max_tokens, self.sampling, self.key, self.env
        )
        self.engine.release_memory()
        judge(self.rewards, self.prompts, trajectories)
        groups = [trajectories[i : i + self.samples] for i in range(0, len(trajectories), self.samples)]
        return accuracies(groups)


@dataclass
class HeldOutLoss:
    """Loss and metrics of the algorithm on the same held-out examples each time it is asked."""

    items: list[PackItem]
    trainer: Trainer

    def __call__(self, state: TrainState, reference: Reference) -> Metrics:
        """Metrics eval/..."""
        found = jax.device_get(self.trainer.measure(state, self.items, reference()))
        return {f"eval/{name}": float(value) for name, value in found.items()}


def accuracies(groups: Sequence[Sequence[Trajectory]]) -> Metrics:
    """Over prompts with k responses each:

    eval/pass@1 = share of responses that are correct; eval/pass@k = share of prompts with any correct one
    (Chen et al. 2021, arXiv 2107.03374, eq. 1 with n = k); eval/maj@k = share of prompts whose commonest
    answer is correct (Wang et al. 2022, arXiv 2203.11171), the first of equally common ones deciding.
    """
    k = len(groups[0])
    correct = np.array([[t.outcome == Outcome.CORRECT for t in group] for group in groups])
    lengths = [len(t.response_ids) for group in groups for t in group]
    metrics = {
        "eval/pass@1": float(correct.mean()),
        "eval/response_tokens/mean": float(np.mean(lengths)),
        "eval/truncated_fraction": float(np.mean([t.finish == "length" for g in groups for t in g])),
    }
    if k > 1:
        metrics[f"eval/pass@{k}"] = float(correct.any(axis=1).mean())
        metrics[f"eval/maj@{k}"] = float(np.mean([majority(group) for group in groups]))
    return metrics


def majority(group: Sequence[Trajectory]) -> bool:
    """Whether the commonest answer of the group is correct."""
    texts = [t.text if t.answer is None else t.answer for t in group]
    answers = [find_answer(text) or last_number(text) or text.strip() for text in texts]
    winner = Counter(answers).most_common(1)[0][0]
    return group[answers.index(winner)].outcome == Outcome.CORRECT
