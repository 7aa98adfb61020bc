"""Tokens of older weights: which log-probs are the old ones, and the gradient that follows, by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import POLICY, ROLLOUT, loss_inputs

from jaxrl_llm import algos
from jaxrl_llm.algos import ALGOS, dpo, gkd, gpg, grpo, otb, requirements, sft
from jaxrl_llm.algos.config import Correction, PolicyConfig
from jaxrl_llm.algos.contract import choose_old_logprobs, ignores_staleness
from jaxrl_llm.algos.estimators import optimal_token_baseline

POLICY_GRADIENTS = [
    name for name, a in ALGOS.items() if isinstance(a.config, PolicyConfig) and name != "a_star_po"
]  # a regression, which any data serves


def source(config, updates=1, on_policy=False):
    return choose_old_logprobs(algos.of(config), requirements(config), updates, on_policy)


def gradient_of(config, logprobs=POLICY, **kwargs):
    loss = lambda p: algos.of(config).loss(loss_inputs(p, **kwargs), config)[0]
    return np.asarray(jax.jit(jax.grad(loss))(logprobs))


def test_a_response_of_older_weights_gets_the_clipped_gradient_by_default():
    """Probabilities .5, .5, .5 then and .45, .75, .3 now: ratios .9, 1.5, .6; A is 1 and -1.

    Against the policy's own log-probs all ratios would be 1, and the gradient -A / 6 everywhere.
    """
    then = jnp.log(jnp.full((2, 4), 0.5))
    now = jnp.log(jnp.array([[0.45, 0.75, 0.3, 0.5]] * 2))
    fields = dict(mask=jnp.array([[1.0, 1, 1, 0]] * 2), num_tokens=jnp.float32(6), ref_logprobs=None)
    config = grpo.Config(kl_coef=0.0, aggregation="token")
    assert source(config) == "rollout"
    clipped = np.array([[-0.9, 0, -0.6, 0], [0.9, 1.5, 0, 0]])  # 1.5 > 1.2 with A = 1; .6 < .8 with A = -1
    np.testing.assert_allclose(gradient_of(config, now, old_logprobs=then, **fields), clipped / 6, atol=1e-6)
    weighted = np.array([[-0.9, -1.5, -0.6, 0], [0.9, 1.5, 0.6, 0]])
    np.testing.assert_allclose(
        gradient_of(gpg.config, now, old_logprobs=then, **fields), weighted / 6, atol=1e-6
    )


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_no_policy_gradient_takes_stale_tokens_for_the_policys_own(name):
    config = replace(ALGOS[name].config, kl_coef=0.0, advantage="grpo")
    assert source(config) == "rollout" and not ignores_staleness(ALGOS[name], requirements(config))
    stale, own = (gradient_of(config, old_logprobs=old, ref_logprobs=None) for old in (ROLLOUT, POLICY))
    assert np.abs(stale - own).max() > 0.05 * np.abs(own).max()


def test_old_log_probs_of_stale_tokens_are_the_rollouts_unless_refused():
    settings = ("auto", "policy", "recompute", "rollout")
    assert [source(grpo.Config(old=old)) for old in settings] == ["rollout", "policy", "recompute", "rollout"]
    assert [source(grpo.Config(old=old), updates=2) for old in settings[:2]] == ["rollout", "recompute"]
    assert [source(grpo.Config(old=old), on_policy=True) for old in settings[:2]] == ["policy", "policy"]
    refused = [ignores_staleness(grpo, requirements(grpo.Config(old=old))) for old in settings]
    assert refused == [False, True, True, False]


def test_a_correction_stands_in_for_the_rollouts_log_probs():
    """Decoupled PPO: the ratio is against the policy before the updates, the weight is old / rollout."""
    for correction in (Correction("token"), Correction(reject=(("token_k1", 0.8, 1.2),))):
        config = grpo.Config(correction=correction)
        assert source(config) == "policy" and source(config, updates=2) == "recompute"
        assert not ignores_staleness(grpo, requirements(config))


def test_rows_of_a_dataset_are_never_stale():
    assert source(sft.config) == source(dpo.config) == "policy"
    assert source(gkd.Config(form="policy_gradient")) == "rollout"


def test_reinforce_is_not_weighted_twice():
    """With the policy as the correction's numerator the weight is policy / rollout already."""
    config = gpg.Config(correction=Correction("token", cap=9.0, of="policy"))
    stale = gradient_of(config, old_logprobs=ROLLOUT, rollout_logprobs=ROLLOUT)
    np.testing.assert_allclose(
        stale, gradient_of(config, old_logprobs=POLICY, rollout_logprobs=ROLLOUT), atol=1e-7
    )


def test_optimal_token_baseline_stands_log_probs_of_older_weights():
    """p = .9 then, where the policy now has sum p^2 = .3: the energy is .1^2, not 1 - 1.8 + .3 < 0."""
    assert requirements(otb.config).old_logprobs_source == "auto"
    old = jnp.log(jnp.array([[0.9], [0.5]]))
    got = jax.jit(optimal_token_baseline)(
        jnp.array([[1.0], [0.0]]),
        old,
        jnp.array([[0.3], [0.5]]),
        jnp.zeros(2, jnp.int32),
        mask=jnp.ones((2, 1)),
    )
    weights = 0.01, 0.25 + 0.25
    np.testing.assert_allclose(got[0, 0], 1 - weights[0] / sum(weights), rtol=1e-5)
