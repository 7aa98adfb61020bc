"""Draws: batches of prompts whose responses have been started, and the choice of complete ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.rollout.engine import Pending
from jaxrl_llm.rollout.servers.engine import ServerEngine
from jaxrl_llm.structs import Metrics, Trajectory


@dataclass
class Draw:
    """A batch of prompts whose responses have been started."""

    prompts: list[Prompt]
    pending: list[Pending]  # the sampled responses; then, for ReMax, the greedy ones
    step: int  # that started them


def join_draws(draws: Sequence[Draw]) -> list[list[Trajectory]]:
    """Wait for draws and return their responses, sampled and greedy ones apart, in order.

    `prompt_index` becomes the place among the prompts of all draws.
    """
    joined, first = [[] for _ in draws[0].pending], 0
    for draw in draws:
        for responses, pending in zip(joined, draw.pending, strict=True):
            for trajectory in pending.result():
                trajectory.prompt_index += first
                responses.append(trajectory)
        first += len(draw.prompts)
    return joined


def choose_finished(
    engine: ServerEngine, draws: Sequence[Draw], count: int, *, step: int, max_staleness: int
) -> tuple[list[int], Metrics]:
    """Wait for the first `count` complete draws. A collective.

    Draws that were started `max_staleness` steps ago are waited for; of the others that are complete by then,
    the first in order are chosen.

    Args:
        step: the present one.

    Returns: (the places of the chosen draws, in order; metrics of the others and of the choice).
    """
    required = [i for i, draw in enumerate(draws) if step - draw.step >= max_staleness]
    chosen, lengths = engine.first_finished([draw.pending for draw in draws], count, required)
    carried = list(itertools.chain(*(each for i, each in enumerate(lengths) if i not in chosen)))
    metrics = {"oversample/carried": len(carried), "oversample/carried_tokens": sum(carried)}
    if new := list(itertools.chain(*(lengths[i] for i in chosen if draws[i].step == step))):
        every = list(itertools.chain(*(lengths[i] for i in chosen)))
        metrics["oversample/length_ratio"] = float(np.mean(new) / max(np.mean(every), 1.0))
    return chosen, metrics
