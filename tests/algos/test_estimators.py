"""Every estimator goes with every policy loss, and no layout changes what it says."""

from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import TURNS, advantages, rollouts

from jaxrl_llm import ranges
from jaxrl_llm.algos import cispo, gdpo, gpg, grpo, gspo, opo, passk, reinforce, rloo
from jaxrl_llm.algos.advantages import leave_one_out
from jaxrl_llm.algos.config import Advantage  # fmt: skip
from jaxrl_llm.algos.estimators import PER_RESPONSE, PER_TOKEN, PER_TURN, best_over_second, length_weighted
from jaxrl_llm.algos.kl import kl
from jaxrl_llm.errors import UserError

NAMES = get_args(Advantage)


def test_the_tables_hold_every_name_once():
    assert sorted([*PER_RESPONSE, *PER_TOKEN, *PER_TURN]) == sorted(NAMES)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (grpo.Config(), [0.70711, -0.70711, 0.70711, -0.70711]),
        (rloo.Config(kl_coef=0.0), [1, -1, 1.5, -1.5]),
        (opo.Config(), [0.625, -0.375, 1, -0.5]),
        (gpg.Config(advantage="gpg_rewards"), [0.66667, -0.66667, 1, -1]),  # veRL: 3 of 4 rewards are not 0
        (gpg.Config(), [0.5, -0.5, 0.75, -0.75]),  # the paper: all groups differ
        (passk.Config(), [1.41421, 0, 1.41421, 0]),
        (reinforce.Config(), [0.125, -0.875, 1.125, -0.375]),
        (gspo.Config(advantage="rloo"), [1, -1, 1.5, -1.5]),
    ],
    ids=lambda x: getattr(x, "algorithm", ""),
)
def test_fixed_numbers(config, expected):
    got = advantages(rollouts(), config)
    np.testing.assert_allclose(got[:, 0], expected, atol=2e-5)
    np.testing.assert_array_equal(got, got[:, :1] * rollouts().mask)


def test_gpg_makes_up_for_groups_of_equal_rewards():
    got = advantages(rollouts(rewards=jnp.array([1.0, 1, 2, 1])), gpg.Config())
    np.testing.assert_allclose(got[:, 0], [0, 0, 1, -1], atol=1e-6)  # alpha = 4 / 2


def test_gdpo_normalises_each_reward_then_whitens():
    """Rewards (1, 0 | 1, 0) and (0, 0 | 1, .5): the second counts in its group as much as the first."""
    one = 1 / np.sqrt(2)
    expected = np.array([one, -one, 2 * one, -2 * one])
    config = gdpo.Config(whiten="none")
    np.testing.assert_allclose(advantages(rollouts(), config)[:, 0], expected, atol=1e-5)
    weighted = replace(config, component_weights=(1.0, 3.0))
    got = advantages(rollouts(), weighted)[:, 0]
    np.testing.assert_allclose(got, [one, -one, 4 * one, -4 * one], atol=2e-5)
    tokens = np.repeat(expected, [3, 5, 2, 4])
    whitened = (expected - tokens.mean()) / tokens.std(ddof=1)
    np.testing.assert_allclose(advantages(rollouts(), gdpo.Config())[:, 0], whitened, atol=1e-5)
    with pytest.raises(UserError, match="component_weights has 3 values for 2 rewards"):
        advantages(rollouts(), gdpo.Config(component_weights=(1.0, 1.0, 1.0)))


def test_gdpo_counts_a_response_by_the_rewards_that_it_has():
    components = jnp.array([[1.0, jnp.nan], [0, jnp.nan], [jnp.nan, 1], [0, 0.5]])
    got = advantages(rollouts(components=components), gdpo.Config(whiten="none"))[:, 0]
    one = 1 / np.sqrt(2)
    np.testing.assert_allclose(got, [one, -one, one, -one], atol=1e-5)


def test_gdpo_refuses_the_kl_in_the_reward():
    (problem,) = ranges.problems(gdpo.Config(kl_in="reward", kl_coef=0.1))
    assert problem[0] == "kl_in" and "GDPO normalises each reward by itself" in problem[1]
    assert not list(ranges.problems(gdpo.Config(kl_in="advantage", kl_coef=0.1)))


@pytest.mark.parametrize("name", NAMES)
def test_no_layout_changes_an_advantage(name):
    """Order of trajectories, numbering of groups, padding, a failed reward beside them: all the same."""
    config = cispo.Config(
        advantage=name, gamma=0.9, lam=0.8, kl_coef=0.1, kl="k1", kl_in="reward", whiten="unbiased"
    )
    plain = rollouts(**TURNS)
    expected = np.asarray(advantages(plain, config))
    assert np.isfinite(expected).all() and np.abs(expected).max() > 0.1

    order = np.array([3, 0, 2, 1])
    shuffled = jax.tree.map(lambda x: x[order] if x.ndim else x, plain)
    np.testing.assert_allclose(advantages(shuffled, config), expected[order], atol=1e-5)
    np.testing.assert_allclose(
        advantages(replace(shuffled, group=1 - shuffled.group), config), expected[order], atol=1e-5
    )

    garbage = lambda x: jnp.pad(x, ((0, 1), (0, 3)), constant_values=jnp.nan)
    more = lambda x: jnp.append(x, x[:1])
    wider = jax.tree.map(lambda x: garbage(x) if x.ndim == 2 else more(x) if x.ndim else x, plain)
    wider = replace(
        wider,
        mask=jnp.pad(plain.mask, ((0, 1), (0, 3))).at[4, :2].set(1.0),
        components=jnp.pad(plain.components, ((0, 1), (0, 0)), constant_values=jnp.nan),
        rewards=wider.rewards.at[4].set(jnp.nan),
        valid=wider.valid.at[4].set(0.0),
        **{name: jnp.pad(TURNS[name], ((0, 1), (0, 3))) for name in ("turns", "states")},
    )
    got = np.asarray(advantages(wider, config))
    np.testing.assert_allclose(got[:4, :5], expected, atol=1e-5)
    assert (got[4] == 0).all() and (got[:, 5:] == 0).all()


def test_groups_of_one_and_ties():
    one = (jnp.array([3.0]), jnp.array([0]), jnp.ones(1))
    assert float(leave_one_out(*one)[0]) == 3.0
    assert float(length_weighted(*one, jnp.ones(1))[0]) == 3.0
    assert float(best_over_second(*one)[0]) == 0.0
    tie = (jnp.array([2.0, 2, 1]), jnp.zeros(3, jnp.int32), jnp.ones(3))
    np.testing.assert_array_equal(best_over_second(*tie), [0, 0, 0])
    np.testing.assert_allclose(leave_one_out(*tie), [0.5, 0.5, -1.0])


def test_process_rewards_and_kl_enter_the_tokens_reward():
    process = jnp.full((4, 5), 0.1).at[0, 4].set(9.0)  # the 9 lies under the mask
    given = rollouts(token_rewards=process)
    plain = grpo.Config(advantage="rloo", kl_coef=0.0)
    got = advantages(given, plain)[:, 0]  # 1.3, .5, 2.2, .9
    np.testing.assert_allclose(got, [0.8, -0.8, 1.3, -1.3], atol=1e-5)
    config = grpo.Config(advantage="rloo", kl_coef=0.5, kl="k1", kl_in="reward")
    total = np.asarray(
        rollouts().rewards - 0.5 * ((given.old_logprobs - given.ref_logprobs) * given.mask).sum(axis=1)
    )
    got = advantages(rollouts(), config)[:, 0]
    np.testing.assert_allclose(got[0], total[0] - total[1], atol=1e-5)


def test_kl_in_the_advantage_and_the_controllers_coefficient():
    config = grpo.Config(kl_coef=0.1, kl="k2", kl_in="advantage")
    plain = advantages(rollouts(), grpo.Config())
    penalty = kl(rollouts().old_logprobs, rollouts().ref_logprobs, "k2") * rollouts().mask
    np.testing.assert_allclose(
        advantages(rollouts(), config), np.asarray(plain) - 0.1 * np.asarray(penalty), atol=1e-6
    )
    adaptive = replace(config, kl_target=0.05)  # the rollouts say 0.5
    np.testing.assert_allclose(
        advantages(rollouts(), adaptive), np.asarray(plain) - 0.5 * np.asarray(penalty), atol=1e-6
    )
