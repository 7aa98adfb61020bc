"""Group-relative advantages: fixed numbers of other systems, degenerate groups, masks."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algos import grpo
from jaxrl_llm.algos.advantages import group_advantages
from jaxrl_llm.structs import Rollouts

REWARDS = jnp.array([1.0, 0.0, 2.0, 0.5])
GROUP = jnp.array([0, 0, 1, 1])
ALL = jnp.ones(4)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("std", [0.70711, -0.70711, 0.70711, -0.70711]),  # veRL, OpenRLHF, RL2
        ("population_std", [1.0, -1.0, 1.0, -1.0]),  # ChatLearn
        ("none", [0.5, -0.5, 0.75, -0.75]),  # Dr. GRPO
        ("batch_std", list(np.array([0.5, -0.5, 0.75, -0.75]) / np.std([1, 0, 2, 0.5], ddof=1))),
    ],
)
def test_fixed_numbers(scale, expected):
    np.testing.assert_allclose(group_advantages(REWARDS, GROUP, ALL, scale), expected, atol=1e-5)


def test_group_order_and_numbering_do_not_matter():
    order = jnp.array([3, 0, 2, 1])
    plain = group_advantages(REWARDS, GROUP, ALL)
    np.testing.assert_allclose(group_advantages(REWARDS[order], GROUP[order], ALL), plain[order], atol=1e-6)
    np.testing.assert_allclose(group_advantages(REWARDS, 1 - GROUP, ALL), plain, atol=1e-6)


@pytest.mark.parametrize("scale", ["std", "population_std", "none"])
def test_shifting_rewards_of_a_group_changes_nothing(scale):
    np.testing.assert_allclose(
        group_advantages(REWARDS + 7 * GROUP, GROUP, ALL, scale),
        group_advantages(REWARDS, GROUP, ALL, scale),
        atol=1e-5,
    )


def test_equal_rewards_teach_nothing():
    rewards = jnp.array([1.0, 1.0, 0.0, 1.0])
    out = group_advantages(rewards, GROUP, ALL)
    np.testing.assert_allclose(out[:2], 0.0, atol=1e-6)


def test_group_of_one_keeps_its_reward():
    np.testing.assert_allclose(group_advantages(jnp.array([3.0]), jnp.array([0]), jnp.ones(1)), [3.0])


def test_failed_rewards_take_no_part():
    """The NaN of a reward that crashed reaches neither its own advantage nor its group's."""
    rewards = jnp.array([1.0, 0.0, jnp.nan, 2.0, 0.5])
    group = jnp.array([0, 0, 0, 1, 1])
    valid = jnp.array([1.0, 1, 0, 1, 1])
    for scale in ("std", "population_std", "none", "batch_std"):
        out = group_advantages(rewards, group, valid, scale)
        kept = group_advantages(REWARDS, GROUP, ALL, scale)
        np.testing.assert_allclose(out, [kept[0], kept[1], 0.0, kept[2], kept[3]], atol=1e-6)


def test_grpo_spreads_over_the_policys_own_tokens():
    mask = jnp.array([[1.0, 1, 0, 0], [1, 0, 1, 0]])
    rollouts = Rollouts(jnp.array([1.0, 0.0]), jnp.zeros(2, jnp.int32), mask, jnp.ones(2))
    out = grpo.advantages(rollouts, grpo.Config(scale="none"))
    np.testing.assert_allclose(out, [[0.5, 0.5, 0, 0], [-0.5, 0, -0.5, 0]])
