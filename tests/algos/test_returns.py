"""Advantages of single tokens: fixed numbers of other systems, gaps left by tools, whitening."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import LENGTHS, OWN, VALUES, advantages, rollouts

from jaxrl_llm.algos import estimators as tokens
from jaxrl_llm.algos import otb, ppo, reinforce_pp, remax, requirements
from jaxrl_llm.algos.config import Correction
from jaxrl_llm.algos.estimators import gae, on_last_token, return_to_go, whiten

optimal_token_baseline = jax.jit(tokens.optimal_token_baseline, static_argnames="zero_tail")

RETURNS = [
    [0.59328, 0.774, 1, 0, 0],
    [0.13626, 0.08925, 0.04896, 0.018, 0],
    [1.458, 2, 0, 0, 0],
    [0.26721, 0.32112, 0.396, 0.5, 0],
]


def test_gae_equals_veRL():
    config = ppo.Config(gamma=0.9, lam=0.8, kl_coef=0.0)
    np.testing.assert_allclose(ppo.returns(rollouts(), config), RETURNS, atol=1e-5)
    whitened = advantages(rollouts(), config)
    np.testing.assert_allclose(whitened[0], [0.24704, 0.36822, 0.55737, 0, 0], atol=1e-5)


def test_gae_with_lambda_1_is_return_minus_value_and_with_0_one_step():
    rewards = on_last_token(jnp.array([1.0, 0, 2, 0.5]), OWN)
    advantages, returns = gae(rewards, VALUES, OWN, gamma=0.9, lam=1.0)
    np.testing.assert_allclose(advantages, (return_to_go(rewards, OWN, 0.9) - VALUES) * OWN, atol=1e-6)
    np.testing.assert_allclose(returns, return_to_go(rewards, OWN, 0.9), atol=1e-6)
    one_step, _ = gae(rewards, VALUES, OWN, gamma=0.9, lam=0.0)
    np.testing.assert_allclose(one_step[0, :3], [0.9 * 0.2 - 0.1, 0.9 * 0.3 - 0.2, 1 - 0.3], atol=1e-6)


def test_a_tools_tokens_are_skipped():
    """Reward 1 after two own tokens, a tool's between; V = .5, .9 (tool), .2; gamma .9, lambda .8."""
    mask = jnp.array([[1.0, 0, 1]])
    values, rewards = jnp.array([[0.5, 0.9, 0.2]]), jnp.array([[0.0, 7.0, 1.0]])
    last = 1 - 0.2
    skipped = 0.9 * 0.2 - 0.5 + 0.72 * last
    got, returns = gae(rewards, values, mask, 0.9, lam=0.8)
    np.testing.assert_allclose(got, [[skipped, 0, last]], atol=1e-6)
    np.testing.assert_allclose(returns, [[skipped + 0.5, 0, 1.0]], atol=1e-6)


def test_return_to_go_passes_over_gaps():
    mask = jnp.array([[1.0, 0, 1, 1, 0]])
    rewards = jnp.array([[1.0, 99, 0, 2, 99]])
    np.testing.assert_allclose(return_to_go(rewards, mask, 0.5), [[1.5, 0, 1, 2, 0]])


def test_outcome_falls_on_the_policys_last_token():
    mask = jnp.array([[1.0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    expected = [[0, 0, 5.0, 0], [0] * 4, [0, 0, 0, 7]]
    np.testing.assert_array_equal(on_last_token(jnp.array([5.0, 6, 7]), mask), expected)


def test_reinforce_pp_equals_veRL():
    got = advantages(rollouts(), reinforce_pp.Config(gamma=0.9, kl_coef=0.0))
    np.testing.assert_allclose(got[:, 0], [0.33797, -0.89418, 1.84394, -0.33971], atol=1e-5)
    baseline = reinforce_pp.Config(advantage="reinforce_pp_baseline", kl_coef=0.0)
    got = advantages(rollouts(), baseline)
    np.testing.assert_allclose(got[:, 0], [1.10206, -0.52203, 1.50809, -0.92805], atol=1e-5)


def test_remax_subtracts_the_greedy_reward():
    two = dict(rewards=jnp.array([1.0, 0]), group=jnp.zeros(2, jnp.int32), mask=jnp.ones((2, 3)))
    given = rollouts(**two, valid=jnp.ones(2), greedy=jnp.array([0.25, 0.25]), values=None)
    np.testing.assert_allclose(advantages(given, remax.Config()), [[0.75] * 3, [-0.25] * 3])
    process = jnp.array([[0.0, 1, 0], [0, 0, 2]])  # returns-to-go 2 2 1 | 2 2 2, the greedy one's .25 + 1.5
    scored = replace(given, token_rewards=process, greedy_process=jnp.array([1.5, 1.5]))
    np.testing.assert_allclose(advantages(scored, remax.Config()), [[0.25, 0.25, -0.75], [0.25] * 3])


OTB = [[0.578947, 0.575758, 0.526316], [-0.421053, -0.424242, -0.473684]]
PI = jnp.log(jnp.array([[0.5, 0.6, 0.7], [0.4, 0.5, 0.9]]))
SQUARE = jnp.array([[0.4, 0.5, 0.6], [0.35, 0.4, 0.85]])


def test_optimal_token_baseline_equals_veRL():
    returns, group = jnp.array([[1.0] * 3, [0.0] * 3]), jnp.zeros(2, jnp.int32)
    got = optimal_token_baseline(returns, PI, SQUARE, group, mask=jnp.ones((2, 3)))
    np.testing.assert_allclose(got, OTB, atol=1e-6)
    # a response of another prompt changes nothing, and alone in its group it has no baseline
    more = lambda x: jnp.concatenate([x, x[:1]])
    got = optimal_token_baseline(
        more(returns), more(PI), more(SQUARE), jnp.array([0, 0, 1]), mask=jnp.ones((3, 3))
    )
    np.testing.assert_allclose(got, [*OTB, [1, 1, 1]], atol=1e-6)


def test_optimal_token_baseline_counts_own_tokens_only():
    """With a tool's token in one response its later tokens still meet their counterparts in the other."""
    spread = lambda x: jnp.stack([jnp.insert(x[0], 1, -3.0), jnp.append(x[1], -3.0)])
    mask = jnp.array([[1.0, 0, 1, 1], [1, 1, 1, 0]])
    returns = jnp.array([[1.0] * 4, [0.0] * 4])
    got = optimal_token_baseline(returns, spread(PI), spread(SQUARE), jnp.zeros(2, jnp.int32), mask=mask)
    np.testing.assert_allclose(got[0], [OTB[0][0], 0, *OTB[0][1:]], atol=1e-6)
    np.testing.assert_allclose(got[1], [*OTB[1], 0], atol=1e-6)


def test_optimal_token_baseline_where_one_response_is_left():
    mask = jnp.array([[1.0, 1, 1], [1, 0, 0]])
    returns = jnp.array([[1.0] * 3, [0.0, 0, 0]])
    run = lambda tail: optimal_token_baseline(
        returns, PI, SQUARE, jnp.zeros(2, jnp.int32), mask=mask, zero_tail=tail
    )
    np.testing.assert_allclose(run(False), [[OTB[0][0], 0, 0], [OTB[1][0], 0, 0]], atol=1e-6)
    np.testing.assert_allclose(run(True), [[OTB[0][0], 1, 1], [OTB[1][0], 0, 0]], atol=1e-6)


def test_optimal_token_baseline_under_importance_weights():
    """W then sums rho^2 w: .4 * 4 and .55 for the first token."""
    ratio = jnp.array([[2.0] * 3, [1.0] * 3])
    returns, group = jnp.array([[1.0] * 3, [0.0] * 3]), jnp.zeros(2, jnp.int32)
    got = optimal_token_baseline(returns, PI, SQUARE, group, mask=jnp.ones((2, 3)), ratio=ratio)
    assert float(got[0, 0]) == pytest.approx(1 - 1.6 / (1.6 + 0.55), abs=1e-6)


def test_otb_reads_the_arrays_it_requires():
    config = otb.Config()
    needs = requirements(config)
    assert needs.sum_pi_squared and needs.old_logprobs and not needs.critic
    given = rollouts(rewards=jnp.array([1.0, 0, 1, 0]))
    mask, old, square = given.mask, given.old_logprobs, given.sum_pi_squared
    returns = jnp.array([1.0, 0, 1, 0])[:, None] * mask
    expected = optimal_token_baseline(returns, old, square, given.group, mask=mask)
    np.testing.assert_allclose(advantages(given, config), expected, atol=1e-6)
    weighed = otb.Config(correction=Correction(weight="token", cap=1.5))
    ratio = jnp.minimum(jnp.exp(old - given.rollout_logprobs), 1.5)
    assert not np.allclose(ratio * mask, mask)
    expected = optimal_token_baseline(returns, old, square, given.group, mask=mask, ratio=ratio)
    np.testing.assert_allclose(advantages(given, weighed), expected, atol=1e-6)


def test_whitening():
    x = jnp.array([[1.0, 2, 77], [3, 6, 77]])
    mask = jnp.array([[1.0, 1, 0], [1, 1, 0]])
    kept = np.array([1.0, 2, 3, 6])
    for how, ddof in (("unbiased", 1), ("biased", 0)):
        expected = (kept - 3) / kept.std(ddof=ddof)
        got = whiten(x, mask, how)
        np.testing.assert_allclose(np.asarray(got)[:, :2].ravel(), expected, atol=1e-6)
        np.testing.assert_array_equal(got[:, 2], 0)
        np.testing.assert_array_equal(whiten(jnp.full((1, 2), 4.0), jnp.ones((1, 2)), how), [[0, 0]])


def test_lengths_of_the_case():
    np.testing.assert_array_equal(OWN.sum(axis=1), LENGTHS)
