"""Metrics of a step's responses: rewards, lengths, conversations, staleness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.structs import Metrics, Outcome, Trajectory


def group_by_prompt(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Return the trajectories of each prompt together, in order."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.prompt_index, []).append(trajectory)
    return list(groups.values())


def has_variance(group: Sequence[Trajectory], components: bool = False) -> bool:
    """Return whether the rewards of a group differ, without failed ones.

    Args:
        components: compare each component separately: sums can be equal if components differ.
    """
    scored = [t for t in group if np.isfinite(t.reward)]
    rewards = np.array([t.components if components else (t.total_reward,) for t in scored], np.float64)
    return any(len(set(column[np.isfinite(column)])) > 1 for column in rewards.T)


def statistics(trajectories: Sequence[Trajectory], components: bool = False) -> Metrics:
    """Return rewards, lengths and, of conversations, turns and tool calls of a step's responses.

    Args:
        components: which rewards a group of zero variance has equal, see `has_variance`.
    """
    groups = group_by_prompt(trajectories)
    rewards = np.array([t.reward for t in trajectories], np.float64)
    scored = rewards[np.isfinite(rewards)]
    lengths = np.array([t.once.sum() for t in trajectories])
    verified = [t.outcome == Outcome.CORRECT for t in trajectories if t.outcome != Outcome.FAILED]
    return {
        "reward/mean": scored.mean() if len(scored) else float("nan"),
        "reward/std": scored.std() if len(scored) else float("nan"),
        "accuracy": np.mean(verified) if verified else float("nan"),
        "response_tokens/mean": lengths.mean(),
        "response_tokens/max": lengths.max(),
        "truncated_fraction": np.mean([t.finish == "length" for t in trajectories]),
        "zero_variance_fraction": np.mean([not has_variance(g, components) for g in groups]),
        **_conversation_statistics(trajectories),
    }


def _conversation_statistics(trajectories: Sequence[Trajectory]) -> Metrics:
    episodes = [t.episode for t in trajectories if t.episode]
    if not episodes:
        return {}
    calls = sum(e.tool_calls for e in episodes)
    return {
        "env/turns_mean": np.mean([t.num_turns for t in trajectories]),
        "env/tool_calls": calls / len(trajectories),
        "env/tool_errors": sum(e.tool_errors for e in episodes) / max(calls, 1),
        "env/timeouts": sum(e.timeouts for e in episodes),
        "env/failed_fraction": sum(bool(e.failure) for e in episodes) / len(trajectories),
    }


def staleness(trajectories: Sequence[Trajectory], version: int) -> Metrics:
    """Return mean and maximum of the tokens' staleness: optimizer updates since their weights."""
    ages = [version - t.versions[t.mask > 0] for t in trajectories]
    ages = np.concatenate(ages) if ages else np.zeros(0)
    return {"staleness/mean": ages.mean(), "staleness/max": ages.max()} if len(ages) else {}
