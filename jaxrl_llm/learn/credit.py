"""Credit assignment: advantages of each token, selection of trajectories, and mini-batches."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import algos
from jaxrl_llm.algos.config import AlgoConfig
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.errors import UserError
from jaxrl_llm.learn.turns import check_turns, turn_arrays
from jaxrl_llm.structs import SIGNALS, Rollouts, Trajectory

IN_ADVANTAGES = tuple(signal.name for signal in SIGNALS if signal.in_advantages)


def assign_credit(
    algo: AlgoConfig,
    items: Sequence[PackItem],
    trajectories: Sequence[Trajectory],
    kl_coef: float,
    *,
    seed: int,
) -> list[PackItem]:
    """Write advantages (and returns) into the items' signals; return the items that the algorithm selects.

    Items of a dataset, which have no trajectories, are returned as they are. The tokens of a trajectory
    without a finite reward are masked.

    Args:
        kl_coef: current coefficient of the KL controller.
        seed: of the algorithm's random selection, if it has one.
    """
    if not trajectories:
        return list(items)
    # The step as arrays, then the algorithm's advantages and returns.
    algorithm = algos.of(algo)
    if algos.requirements(algo).turns:
        check_turns(trajectories)
    turns = any(t.episode for t in trajectories) or algos.requirements(algo).turns
    rollouts = side_by_side(items, trajectories, kl_coef, turns=turns)
    signals = {name: np.asarray(array) for name, array in _advantages(rollouts, algo).items()}
    # Signals of each item, and the selected items.
    for i, (item, trajectory) in enumerate(zip(items, trajectories, strict=True)):
        prompt, response = len(trajectory.prompt_ids), len(trajectory.response_ids)
        lead = np.zeros(prompt, np.float32)
        for name, rows in signals.items():
            item.signals[name] = np.concatenate([lead, rows[i, :response]])
        if not np.isfinite(trajectory.reward):
            item.mask = np.zeros_like(item.mask)
    if algorithm.select:
        chosen = algorithm.select(jax.tree.map(np.asarray, rollouts), algo, np.random.default_rng(seed))
        return [items[i] for i in chosen]
    return list(items)


def side_by_side(
    items: Sequence[PackItem],
    trajectories: Sequence[Trajectory],
    kl_coef: float = 0.0,
    *,
    turns: bool = False,
) -> Rollouts:
    """Return the trajectories as arrays, padded to the longest response (to a power of two: few shapes).

    Args:
        turns: with the turns of conversations, and their rewards.
    """
    longest = max(len(t.response_ids) for t in trajectories)
    shape = (len(trajectories), 1 << max(longest - 1, 0).bit_length())

    def padded(rows: Sequence[np.ndarray]) -> jax.Array:
        out = np.zeros(shape, np.float32)
        for line, row in zip(out, rows, strict=True):
            line[: len(row)] = row
        return jnp.asarray(out)

    # Signals of an item cover its prompt too; responses start after it.
    numbers = lambda values: jnp.asarray(np.array(values, np.float32))
    rewards = numbers([t.reward for t in trajectories])
    response_part = lambda name: [
        i.signals[name][len(t.prompt_ids) :] for i, t in zip(items, trajectories, strict=True)
    ]
    scores = [t.token_rewards for t in trajectories]
    index = {prompt: n for n, prompt in enumerate(dict.fromkeys(t.prompt_index for t in trajectories))}
    return Rollouts(
        rewards=rewards,
        group=jnp.asarray([index[t.prompt_index] for t in trajectories], jnp.int32),
        mask=padded([t.mask for t in trajectories]),
        valid=jnp.asarray(jnp.isfinite(rewards), jnp.float32),
        truncated=numbers([t.finish == "length" for t in trajectories]),
        components=numbers([t.components for t in trajectories]) if trajectories[0].components else None,
        token_rewards=None if scores[0] is None else padded(scores),
        greedy=numbers([t.greedy_reward for t in trajectories]),
        greedy_process=numbers([t.greedy_process for t in trajectories]),
        kl_coef=jnp.float32(kl_coef),
        **(turn_arrays(trajectories, shape) if turns else {}),
        **{name: padded(response_part(name)) for name in IN_ADVANTAGES if name in items[0].signals},
    )


@functools.partial(jax.jit, static_argnums=1)
def _advantages(rollouts: Rollouts, algo: AlgoConfig) -> dict[str, jax.Array]:
    algorithm = algos.of(algo)
    signals = {"advantages": algorithm.advantages(rollouts, algo)}
    if rollouts.values is not None and algorithm.returns:
        signals["returns"] = algorithm.returns(rollouts, algo)
    for name, array in signals.items():
        if (shape := getattr(array, "shape", type(array).__name__)) != rollouts.mask.shape:
            raise UserError(
                f"--algo {algorithm.name}: its function `{name}` returns {shape}; expected an array "
                f"[trajectories, response tokens], here {rollouts.mask.shape}"
            )
    return signals


def split_minibatches(
    items: Sequence[PackItem],
    count: int,
    seed: int,
    *,
    group_size: int = 1,
    epochs: int = 1,
    whole_prompts: bool = False,
) -> list[list[PackItem]]:
    """Split the shuffled items into at most `count` nonempty mini-batches; a single one keeps their order.

    Args:
        group_size: consecutive items that are kept together.
        epochs: passes over the items, each shuffled separately; their mini-batches follow one another.
        whole_prompts: keep all responses to a prompt together, in their order, given at least `count`
            prompts.
    """
    if count == 1:
        return [list(items)] * epochs if items else []
    groups = [items[i : i + group_size] for i in range(0, len(items), group_size)]
    if whole_prompts:
        prompts: dict[int | None, list[PackItem]] = {}  # all examples of a dataset have None
        for group in groups:
            prompts.setdefault(group[0].prompt, []).extend(group)
        groups = list(prompts.values()) if len(prompts) >= count else groups
    orders = [np.random.default_rng([seed, n]).permutation(len(groups)) for n in range(epochs)]
    parts = [part for order in orders for part in np.array_split(order, count) if len(part)]
    return [[item for g in part for item in groups[g]] for part in parts]
