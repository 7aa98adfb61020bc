"""Policy gradients: KL, critic, selection of trajectories."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import ADVANTAGES, MASK, OLD, POLICY, ROLLOUT, advantages, loss_inputs, rollouts

from jaxrl_llm.algos import (
    a_star_po,
    dapo,
    dr_grpo,
    grpo,
    pf_ppo,
    policy_gradient,
    ppo,
    raft,
    reinforce_pp,
    requirements,
    value,
)  # fmt: skip
from jaxrl_llm.algos.kl import kl, next_kl_coef
from jaxrl_llm.structs import Rollouts


def test_dr_grpo_divides_by_a_constant():
    loss, _ = dr_grpo.loss(
        loss_inputs(ref_logprobs=None), dr_grpo.Config(clip_high=0.28, dual_clip=3.0, constant=4.0)
    )
    assert float(loss) == pytest.approx(0.257029, abs=1e-6)


@pytest.mark.parametrize("how", ["k1+", "k3+"])
def test_unbiased_forms_have_the_value_of_one_and_the_gradient_of_k2(how):
    value_of = lambda how: lambda p: kl(p, OLD, how).sum()
    got, gradient = jax.value_and_grad(value_of(how))(POLICY)
    assert float(got) == pytest.approx(float(value_of(how[:-1])(POLICY)), abs=1e-6)
    np.testing.assert_allclose(gradient, POLICY - OLD, atol=1e-6)


def test_the_kl_controller_moves_towards_its_target():
    """coef (1 + clip(kl / target - 1, +-.2) n / horizon), arXiv 1909.08593."""
    config = grpo.Config(kl_coef=0.1, kl_target=0.06, kl_horizon=1000.0)
    assert config.initial_kl_coef == 0.1
    step = lambda config, kl: float(next_kl_coef(config, jnp.float32(0.1), {"kl": jnp.float32(kl)}, 50))
    assert step(config, 0.066) == pytest.approx(0.1 * (1 + 0.1 * 0.05))
    assert step(config, 9.0) == pytest.approx(0.1 * (1 + 0.2 * 0.05))
    assert step(config, 0.0) == pytest.approx(0.1 * (1 - 0.2 * 0.05))
    assert step(replace(config, kl_target=None), 9.0) == pytest.approx(0.1)
    assert float(next_kl_coef(config, jnp.float32(0.1), {}, jnp.float32(50))) == pytest.approx(0.1)


def test_the_controllers_coefficient_weighs_the_loss():
    config = grpo.Config(kl_coef=0.1, kl_target=0.06)
    plain, metrics = grpo.loss(loss_inputs(), replace(config, kl_target=None, kl_coef=0.0))
    loss, _ = grpo.loss(loss_inputs(kl_coef=jnp.float32(0.7)), config)
    per_sequence = grpo.loss(loss_inputs(kl_coef=jnp.float32(0.0)), config)[0]
    assert float(per_sequence) == pytest.approx(float(plain), abs=1e-6)
    assert float(loss) > float(plain) and float(metrics["kl"]) > 0


def test_kl_in_the_reward_is_measured_but_not_in_the_loss():
    config = ppo.Config(kl_in="reward")
    loss, metrics = ppo.loss(loss_inputs(), config)
    bare, _ = ppo.loss(loss_inputs(ref_logprobs=None), config)
    assert float(loss) == float(bare)
    assert float(metrics["kl"]) == pytest.approx(0.185714, abs=1e-6)


VALUE = dict(
    values=jnp.array([[1.0, 2, 0, 0], [0, 0.5, 0, 0]]),
    old_values=jnp.array([[0.2, 1.9, 0, 0], [0.1, 0.4, 0, 0]]),
    returns=jnp.array([[0.5, 1, 0, 0], [1, 1, 0, 0]]),
    mask=jnp.array([[1.0, 1, 0, 0]] * 2),
    lengths=jnp.full((2, 4), 2.0),
    num_tokens=jnp.float32(4),
)


def test_value_loss_equals_other_systems():
    loss, metrics = value.loss(loss_inputs(**VALUE), value.Config(value_clip=0.2))
    assert float(loss) == pytest.approx(0.3125, abs=1e-6)
    assert float(metrics["value_error"]) == pytest.approx((0.25 + 1 + 1 + 0.25) / 4, abs=1e-6)
    assert float(metrics["value_clip_fraction"]) == 0.0
    unclipped, _ = value.loss(loss_inputs(**VALUE), value.Config(value_clip=None, factor=1.0))
    assert float(unclipped) == pytest.approx(0.625, abs=1e-6)


def test_a_value_that_has_moved_far_learns_nothing():
    """V = 1, old 0, R = 3, clip .2: the clipped error (2.8)^2 is the larger and has no gradient."""
    given = lambda v: loss_inputs(
        values=jnp.full((2, 4), v), old_values=jnp.zeros((2, 4)), returns=jnp.full((2, 4), 3.0)
    )
    loss = lambda v, clip: value.loss(given(v), value.Config(value_clip=clip))[0]
    assert float(loss(1.0, 0.2)) == pytest.approx(0.5 * 2.8**2)
    assert float(jax.grad(loss)(1.0, 0.2)) == 0.0
    assert float(jax.grad(loss)(1.0, 5.0)) == pytest.approx(-2.0)


def test_a_shared_critic_adds_its_loss():
    config = ppo.Config(critic="shared", vf_coef=0.5, value_clip=0.2, kl_coef=0.0)
    both, metrics = ppo.loss(loss_inputs(**VALUE), config)
    alone, _ = ppo.loss(loss_inputs(**VALUE), replace(config, critic="separate"))
    assert float(both) == pytest.approx(float(alone) + 0.5 * 0.3125, abs=1e-6)
    assert float(metrics["value_loss"]) == pytest.approx(0.3125, abs=1e-6)


def test_a_target_of_the_entropy_needs_the_entropy():
    assert requirements(grpo.Config(entropy_coef=0.0, entropy_target=0.5)).entropy
    assert not requirements(grpo.Config(entropy_coef=0.0)).entropy


def test_a_kl_in_the_reward_reads_old_log_probs():
    of = lambda place, coef: requirements(grpo.Config(kl_in=place, kl_coef=coef)).old_logprobs
    assert of("reward", 0.1) and not of("loss", 0.1) and not of("reward", 0.0)


def test_a_reward_without_kl_needs_no_reference():
    given, config = rollouts(), reinforce_pp.Config(kl_in="reward", kl_coef=0.0)
    without = advantages(replace(given, ref_logprobs=None), config)
    np.testing.assert_array_equal(without, advantages(given, config))


def test_bypassed_old_log_probs_are_the_rollouts():
    """The source puts the rollout's log-probs in place of the old ones: the ratio is against the rollout."""
    config = grpo.Config(old="rollout", clip_low=9.0, clip_high=9.0, aggregation="token", kl_coef=0.0)
    assert requirements(config).old_logprobs_source == "rollout"
    loss, _ = grpo.loss(loss_inputs(old_logprobs=ROLLOUT, rollout_logprobs=ROLLOUT), config)
    expected = -float((jnp.exp(POLICY - ROLLOUT) * ADVANTAGES * MASK).sum()) / 7
    assert float(loss) == pytest.approx(expected, abs=1e-6)


def rng():
    return np.random.default_rng(0)


def test_select_drops_failed_and_truncated_responses():
    given = rollouts(valid=jnp.array([1.0, 1, 0, 1]))
    assert policy_gradient.select(given, grpo.Config(), rng()).tolist() == [0, 1, 3]
    assert policy_gradient.select(given, dapo.Config(), rng()).tolist() == [0, 3]
    baseline = np.asarray(advantages(given, dapo.Config()))
    assert baseline[0, 0] > 0  # the truncated response still counts in the baseline


def process_rewards(first):
    """Rewards of each response's first token, and some that lie under the mask."""
    return jnp.where(rollouts().mask > 0, 0.0, 50.0).at[:, 0].set(jnp.array(first))


def test_raft_keeps_the_best_of_each_prompt():
    given = rollouts(rewards=jnp.array([0.0, 1, 1, 2]))
    assert raft.select(given, raft.Config(), rng()).tolist() == [1, 3]
    assert raft.select(given, raft.Config(best=None), rng()).tolist() == [1, 2, 3]
    assert raft.select(given, raft.Config(above=1.0), rng()).tolist() == [3]
    assert raft.select(given, raft.Config(above=5.0), rng()).tolist() == []
    failed = replace(given, rewards=jnp.array([0.0, 1, 1, jnp.nan]), valid=jnp.array([1.0, 1, 1, 0]))
    assert raft.select(failed, raft.Config(), rng()).tolist() == [1, 2]
    tied = replace(given, rewards=jnp.ones(4))
    draws = {tuple(raft.select(tied, raft.Config(), np.random.default_rng(i))) for i in range(40)}
    assert draws == {(0, 2), (0, 3), (1, 2), (1, 3)}
    np.testing.assert_array_equal(raft.advantages(given, raft.Config()), given.mask)
    scored = replace(given, rewards=jnp.zeros(4), token_rewards=process_rewards([2.0, 1.0, -1.0, 3.0]))
    assert raft.select(scored, raft.Config(), rng()).tolist() == [0, 3]


def test_raft_loss_is_nll():
    loss, _ = raft.loss(loss_inputs(), raft.Config())
    assert float(loss) == pytest.approx((3.5 + 2.7) / 7, abs=1e-6)


def test_pf_ppo_draws_responses_by_their_reward():
    """|r|^2 = 1, 0, 4, .25; every draw has as many as there are."""
    count = lambda config, given: np.bincount(
        np.concatenate([pf_ppo.select(given, config, np.random.default_rng(i)) for i in range(500)]),
        minlength=4,
    )
    shares = lambda *args: count(*args) / 2000
    np.testing.assert_allclose(
        shares(pf_ppo.Config(), rollouts()), np.array([1, 0, 4, 0.25]) / 5.25, atol=0.04
    )
    np.testing.assert_allclose(
        shares(pf_ppo.Config(filter="max_min"), rollouts()), [0, 0.5, 0.5, 0], atol=0.04
    )
    np.testing.assert_allclose(
        shares(pf_ppo.Config(filter="max_random"), rollouts()), np.array([1, 1, 4, 1]) / 7, atol=0.04
    )
    given = rollouts(valid=jnp.array([1.0, 1, 0, 1]))
    assert count(pf_ppo.Config(), given)[2] == 0
    assert len(pf_ppo.select(rollouts(valid=jnp.zeros(4)), pf_ppo.Config(), rng())) == 0
    given = rollouts(rewards=jnp.ones(4), token_rewards=process_rewards([0.0, -1.0, 1.0, -0.5]))
    np.testing.assert_allclose(shares(pf_ppo.Config(), given), np.array([1, 0, 4, 0.25]) / 5.25, atol=0.04)


def test_only_tokens_of_highest_entropy_keep_their_advantage():
    """The 75% quantile of .1 .2 .3 .4 .7 .8 .9 is .75, at index 4.5; padding, of 5.0, does not count."""
    mask = jnp.array([[1.0, 1, 1, 0], [1, 1, 1, 1]])
    entropy = jnp.array([[0.1, 0.9, 0.3, 5.0], [0.2, 0.8, 0.7, 0.4]])
    given = Rollouts(jnp.array([1.0, 0.0]), jnp.array([0, 0]), mask, jnp.ones(2), entropy=entropy)
    config = grpo.Config(scale="none", top_entropy=0.25)
    expected = np.zeros((2, 4))
    expected[0, 1], expected[1, 1] = 0.5, -0.5
    np.testing.assert_allclose(advantages(given, config), expected, atol=1e-6)
    assert requirements(config).old_entropy and not requirements(grpo.config).old_entropy


def test_the_optimal_value_is_a_soft_maximum_of_the_group():
    """V = 0.5 log((e^2 + 1) / 2) and 0.5 log((e^4 + e) / 2); without failed responses."""
    given = rollouts(rewards=jnp.array([1.0, 0.0, 2.0, 0.5]))
    values = [0.5 * np.log((np.exp(2) + 1) / 2), 0.5 * np.log((np.exp(4) + np.exp(1)) / 2)]
    got = np.asarray(advantages(given, a_star_po.Config()))[:, 0]
    np.testing.assert_allclose(got, [1 - values[0], -values[0], 2 - values[1], 0.5 - values[1]], atol=1e-5)
    alone = rollouts(rewards=jnp.array([1.0, np.nan, 2.0, 0.5]), valid=jnp.array([1.0, 0, 1, 1]))
    np.testing.assert_allclose(advantages(alone, a_star_po.Config())[:2, 0], [0, 0], atol=1e-6)
    plain = np.asarray(advantages(given, a_star_po.Config(advantage="reward")))[:, 0]
    np.testing.assert_allclose(plain, [1, 0, 2, 0.5])
