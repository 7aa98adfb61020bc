"""Turns of conversations as arrays, for estimators that give each turn its own advantage."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.structs import Trajectory


def check_turns(trajectories: Sequence[Trajectory]) -> None:
    """Refuse conversations whose turns are not known.

    Raises:
        UserError: a dialogue has not recorded the turns that it replied to.
    """
    for trajectory in trajectories:
        seen = int((np.diff(trajectory.mask, prepend=0) > 0).sum())
        known = 1 + len(trajectory.episode.records if trajectory.episode else ())
        if seen > known:
            raise UserError(
                f"--algo.advantage compares turns: a response has {seen}, and its Episode.records "
                f"{known - 1}. Your dialogue must add a TurnRecord (forks.py) for each turn it answers; "
                "or set --algo.advantage grpo"
            )


def turn_arrays(trajectories: Sequence[Trajectory], shape: tuple[int, int]) -> dict[str, jax.Array]:
    """Return the fields `turns`, `turn_rewards` and `states` of Rollouts.

    An observation belongs to the turn that reads it. A response without an environment's reply is one turn.
    Responses to a prompt share the states that have equal keys; their first turn is taken in the state "".

    Args:
        shape: (trajectories, response tokens).
    """
    turns, states = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    rewards = np.zeros(shape, np.float32)
    numbers: dict[tuple[int, str], int] = {}
    for row, trajectory in enumerate(trajectories):
        # The turn of each token.
        records = trajectory.episode.records if trajectory.episode else ()
        length = len(trajectory.response_ids)
        ends = [record.end for record in records]
        turns[row, :length] = np.searchsorted(ends, np.arange(length), side="right")
        for record in records:
            rewards[row, record.end - 1] += record.reward or 0.0
        # The state of each turn, but not the state after the last one.
        keys = ["", *(record.state for record in records)][: turns[row].max() + 1]
        prompt = trajectory.prompt_index
        known = [numbers.setdefault((prompt, key), len(numbers)) for key in keys]
        states[row, :length] = np.take(known, turns[row, :length])
    return {"turns": jnp.asarray(turns), "turn_rewards": jnp.asarray(rewards), "states": jnp.asarray(states)}
