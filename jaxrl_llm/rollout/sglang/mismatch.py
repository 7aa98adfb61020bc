"""Mismatch: log-probs that servers report for their responses, against the trainer's of the same weights.

Log-probs can be possible and false: of another temperature or type, or of a model that differs where the
probe's fixed tokens do not reach. They would bias every importance ratio.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from jaxrl_llm.structs import Trajectory

MIN_TOKENS = 24  # of a mean that is compared: as many as the probe has


def logprob_differences(
    trajectory: Trajectory, trainer_logprobs: np.ndarray, version: int, in_place: bool
) -> np.ndarray:
    """Return |trainer - reported|, nats, of tokens that rest on the weights of `version` alone, float64 [n].

    Args:
        trainer_logprobs: log-probs of the response, [R'], under the weights of `version` and at the sampling
            temperature; what is not finite is not compared.
        in_place: whether weights change in place: then tokens after a change rest on older keys and values.
    """
    same = trajectory.versions == version
    if in_place and not same.all():
        return np.zeros(0)
    gaps = np.abs(np.asarray(trainer_logprobs, np.float64) - trajectory.logprobs)[
        same & (trajectory.mask > 0)
    ]
    return gaps[np.isfinite(gaps)]


def choose_compared(trajectories: Sequence[Trajectory], version: int) -> list[Trajectory]:
    """Return trajectories to compare, of every server: at least two and `MIN_TOKENS` tokens of `version`.

    Those with most such tokens are taken first; every process chooses the same.
    """
    counts = [int(((t.versions == version) & (t.mask > 0)).sum()) for t in trajectories]
    chosen: list[Trajectory] = []
    taken: dict[str, tuple[int, int]] = {}  # server -> trajectories and tokens chosen
    for i in sorted(range(len(trajectories)), key=lambda i: -counts[i]):
        number, tokens = taken.get(trajectories[i].server, (0, 0))
        if counts[i] and (number < 2 or tokens < MIN_TOKENS):
            taken[trajectories[i].server] = number + 1, tokens + counts[i]
            chosen.append(trajectories[i])
    return chosen


class MismatchTotals:
    """Differences added up by server, until there are enough tokens for a mean.

    Attributes:
        worst: the largest mean difference since it was last set to 0, nats.
    """

    def __init__(self):
        self.worst = 0.0
        self._totals: dict[str, tuple[float, int]] = {}

    def find_mismatches(
        self,
        trajectories: Sequence[Trajectory],
        gaps: Sequence[np.ndarray],
        tolerance: float,
        servers: Collection[str],
    ) -> tuple[dict[str, float], list[int]]:
        """Return ({server: its mean difference} beyond the tolerance, trajectories beyond it by themselves).

        Args:
            gaps: the `logprob_differences` of each trajectory.
            tolerance: largest mean difference, nats.
            servers: addresses with a mean of their own. A trajectory of several servers, or from behind a
                router, is compared by itself.
        """
        alone = []
        for i, (trajectory, each) in enumerate(zip(trajectories, gaps, strict=True)):
            if trajectory.server in servers:
                total, count = self._totals.get(trajectory.server, (0.0, 0))
                self._totals[trajectory.server] = total + float(each.sum()), count + len(each)
            elif len(each) >= MIN_TOKENS and each.mean() > tolerance:
                alone.append(i)
        means = {url: total / count for url, (total, count) in self._totals.items() if count >= MIN_TOKENS}
        self._totals = {url: value for url, value in self._totals.items() if url not in means}
        self.worst = max([self.worst, *means.values()])
        return {url: mean for url, mean in means.items() if mean > tolerance}, alone
