"""Held-out evaluation: accuracy of responses (pass@1, pass@k, maj@k), and loss of examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.envs.load import Conversations
from jaxrl_llm.experience.rollouts import generate_responses
from jaxrl_llm.experience.score import verify
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.rewards.extract import find_answer, last_number
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rollout.engine import Engine, SamplingConfig
from jaxrl_llm.structs import Metrics, Outcome, Params, TrainState, Trajectory

ReferenceParams = Callable[[], Params | None]
"""Returns the weights of the frozen reference, None where the algorithm needs none."""


@dataclass
class HeldOutAccuracy:
    """Accuracy on the same held-out prompts, with the same random keys each time."""

    prompts: list[Prompt]
    engine: Engine
    rewards: RewardPool
    sampling: SamplingConfig
    samples: int  # responses per prompt
    max_tokens: int
    key: jax.Array
    env: Conversations | None = None  # as in training

    def __call__(self, state: TrainState, reference: ReferenceParams) -> Metrics:
        """Return metrics eval/..."""
        self.engine.publish(state.params, int(state.version))
        trajectories = generate_responses(
            self.engine, self.prompts, self.samples, self.max_tokens, self.sampling, self.key, self.env
        )
        self.engine.release_memory()
        verify(self.rewards, self.prompts, trajectories)
        groups = [trajectories[i : i + self.samples] for i in range(0, len(trajectories), self.samples)]
        return accuracies(groups)


@dataclass
class HeldOutLoss:
    """Loss and metrics of the algorithm on the same held-out examples."""

    items: list[PackItem]
    stage: Stage

    def __call__(self, state: TrainState, reference: ReferenceParams) -> Metrics:
        """Return metrics eval/..."""
        metrics = jax.device_get(self.stage.measure(state, self.items, reference()))
        return {f"eval/{name}": float(value) for name, value in metrics.items()}


def accuracies(groups: Sequence[Sequence[Trajectory]]) -> Metrics:
    """Return pass@1, pass@k and maj@k over prompts with k responses each.

    eval/pass@1 = fraction of responses that are correct; eval/pass@k = fraction of prompts with any correct
    one (Chen et al. 2021, arXiv 2107.03374, eq. 1 with n = k); eval/maj@k = fraction of prompts whose most
    common answer is correct (Wang et al. 2022, arXiv 2203.11171), ties going to the first.
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
    """Return whether the most common answer of the group is correct."""
    texts = [t.text if t.answer is None else t.answer for t in group]
    answers = [find_answer(text) or last_number(text) or text.strip() for text in texts]
    winner = Counter(answers).most_common(1)[0][0]
    return group[answers.index(winner)].outcome == Outcome.CORRECT
