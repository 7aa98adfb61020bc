"""Group-relative advantages: fixed numbers of other systems, degenerate groups, masks."""

from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest
from golden import advantages, rollouts

from jaxrl_llm.algos import grpo, reinforce, remax
from jaxrl_llm.algos.advantages import batch_advantages, group_advantages
from jaxrl_llm.algos.config import Scale
from jaxrl_llm.algos.estimators import PER_RESPONSE, whiten
from jaxrl_llm.structs import Rollouts

REWARDS = jnp.array([1.0, 0.0, 2.0, 0.5])
GROUP = jnp.array([0, 0, 1, 1])
ALL = jnp.ones(4)


def step_of(rewards, group, valid=None):
    """Responses of two tokens each."""
    ones = jnp.ones((len(rewards), 2))
    return Rollouts(
        jnp.array(rewards), jnp.array(group), ones, jnp.array(ones[:, 0] if valid is None else valid, float),
        old_logprobs=-ones, rollout_logprobs=-ones, sum_pi_squared=0.3 * ones,
    )  # fmt: skip


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


def test_epsilon_is_added_to_the_deviation():
    """Rewards 0.001 and 0: +-0.0005 / (0.00070711 + 0.000001). Within the root it would leave 0.408."""
    rewards, group = REWARDS[:2] / 1000, GROUP[:2]
    expected = pytest.approx([0.70611, -0.70611], abs=1e-5)
    assert group_advantages(rewards, group, ALL[:2]).tolist() == expected
    assert batch_advantages(rewards, ALL[:2], "std").tolist() == expected


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


@pytest.mark.parametrize(
    "name", [*sorted(set(PER_RESPONSE) - {"gdpo", "reinforce", "reward"}), "otb", "otb_tail"]
)
def test_equal_rewards_have_advantages_of_exactly_zero(name):
    """The float32 mean of seven times 0.7 is 0.70000005, which over 1e-6 became an advantage of 0.056."""
    given = step_of([0.7] * 7 + [1000.1] * 3, [0] * 7 + [1] * 3)
    np.testing.assert_array_equal(advantages(given, grpo.Config(advantage=name)), np.zeros((10, 2)))


def test_a_batch_of_two_is_scaled_by_its_unbiased_deviation():
    given = step_of([1.0, 0.0], [0, 0])
    got = advantages(given, reinforce.Config(scale="batch_std"))
    np.testing.assert_allclose(got[:, 0], np.array([0.5, -0.5]) / np.std([1, 0], ddof=1), rtol=1e-5)


def test_a_batch_of_equal_rewards_is_scaled_to_nothing():
    given = step_of([1000.1] * 3, [0, 1, 2])
    np.testing.assert_array_equal(advantages(given, reinforce.Config(scale="batch_std")), np.zeros((3, 2)))
    np.testing.assert_array_equal(whiten(jnp.full((7, 2), 0.7), jnp.ones((7, 2))), np.zeros((7, 2)))


@pytest.mark.parametrize("scale", get_args(Scale))
def test_one_response_to_a_prompt_keeps_its_reward(scale):
    """Also in a batch without spread, by which "batch_std" would divide."""
    got = group_advantages(jnp.array([3.0, 3.0]), jnp.array([0, 1]), jnp.ones(2), scale)
    np.testing.assert_allclose(got, [3.0, 3.0])


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "reinforce_pp_baseline", "otb", "otb_tail"])
def test_the_last_one_that_failures_leave_of_a_group_has_no_advantage(name):
    """Rewards 3, NaN | 1, 0, NaN: 3 has nothing to compare with, 1 and 0 have each other."""
    given = step_of([3.0, jnp.nan, 1.0, 0.0, jnp.nan], [0, 0, 1, 1, 1], [1, 0, 1, 1, 0])
    config = grpo.Config(advantage=name, whiten="none", scale="none")
    got = np.asarray(advantages(given, config))
    np.testing.assert_array_equal(got[[0, 1, 4]], np.zeros((3, 2)))
    assert (got[2] > 0).all() and (got[3] < 0).all()


def test_a_failed_greedy_reward_gives_its_prompt_no_advantage():
    """Rewards-to-go 1, 0 | 2, .5 less greedy rewards NaN | 1."""
    given = rollouts(greedy=jnp.array([jnp.nan, jnp.nan, 1, 1]))
    got = np.asarray(advantages(given, remax.config))
    np.testing.assert_array_equal(got[:2], np.zeros((2, 5)))
    np.testing.assert_allclose(got[2:, 0], [1.0, -0.5])


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
    given = Rollouts(jnp.array([1.0, 0.0]), jnp.zeros(2, jnp.int32), mask, jnp.ones(2))
    out = advantages(given, grpo.Config(scale="none"))
    np.testing.assert_allclose(out, [[0.5, 0.5, 0, 0], [-0.5, 0, -0.5, 0]])
