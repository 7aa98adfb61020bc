"""Every surrogate: the numbers of other systems on one small case, and gradients worked by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import ADVANTAGES, MASK, OLD, POLICY, ROLLOUT, loss_inputs

from jaxrl_llm import algos
from jaxrl_llm.algos import (
    ALGOS,
    a_star_po,
    cispo,
    clip_cov,
    dppo,
    dro,
    gmpo,
    gpg,
    grpo,
    gspo,
    kl_cov,
    luspo,
    reinforce,
    sapo,
    vespo,
)  # fmt: skip
from jaxrl_llm.algos.clipped import clip
from jaxrl_llm.algos.config import Correction
from jaxrl_llm.algos.kl import clamp, next_entropy_coef
from jaxrl_llm.algos.policy_gradient import value_loss
from jaxrl_llm.algos.selection import covariance, hash_uniform, largest
from jaxrl_llm.algos.surrogates import vespo_weight

RATIO = np.exp(np.array(POLICY - OLD))
CLIP = dict(clip_low=0.2, clip_high=0.28)


def loss_of(config, **kwargs):
    return float(jax.jit(lambda s: algos.of(config).loss(s, config)[0])(loss_inputs(**kwargs)))


def gradient_of(config, logprobs=POLICY, **kwargs):
    loss = lambda p: algos.of(config).loss(loss_inputs(p, **kwargs), config)[0]
    return np.asarray(jax.jit(jax.grad(loss))(logprobs))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_ratio_at_its_bound_keeps_its_gradient_as_in_torch(sign):
    """torch.clamp has the gradient 1 at a bound: max(-A r, -A clamp(r)) then has -A r, as below the bound."""
    advantages = jnp.full((2, 4), sign)
    for config in (
        grpo.Config(clip_low=0.0, clip_high=0.0, kl_coef=0.0),
        gmpo.Config(clip_low=0.0, clip_high=0.0),
    ):
        gradient = gradient_of(config, OLD, advantages=advantages)
        within = gradient_of(replace(config, clip_low=0.5, clip_high=0.5), OLD, advantages=advantages)
        np.testing.assert_allclose(gradient, within, rtol=1e-6)
    np.testing.assert_allclose(gradient, -sign * MASK / MASK.sum(axis=1, keepdims=True) / 2, rtol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(jax.grad(lambda x: clamp(x, -1.0, 1.0)))(jnp.array([-2.0, -1, 0, 1, 2])), [0, 1, 1, 1, 0]
    )


def test_a_value_at_its_bound_keeps_its_gradient_as_in_torch():
    """V = old + clip: both squares are equal, and each has the gradient V - R."""
    loss = lambda v: value_loss(v, jnp.zeros((1, 3)), jnp.full((1, 3), 2.0), clip=0.5)[0].sum()
    np.testing.assert_allclose(jax.grad(loss)(jnp.array([[0.5, -0.5, 0.25]])), [[-1.5, -2.5, -1.75]])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (gspo.Config(**CLIP), -0.015078),
        (gspo.Config(**CLIP, aggregation="token"), 0.157254),
        (cispo.Config(**CLIP), 0.203363),
        (dro.Config(beta=0.5), 0.160357),
        (kl_cov.Config(fraction=0.2, penalty=0.1), 0.220578),
        (sapo.Config(), -0.027434),
        (gmpo.Config(**CLIP), 0.074493),
        (dppo.Config(delta_low=0.1, delta_high=0.1), 0.335061),
        (dppo.Config(divergence_of="kl", delta_low=0.02, delta_high=0.02), 0.335061),
    ],
    ids=lambda x: getattr(x, "algorithm", str(x)),
)
def test_equals_other_systems(config, expected):
    assert loss_of(config) == pytest.approx(expected, abs=1e-6)


def test_vespo_weights():
    weights = vespo_weight(POLICY, loss_inputs(), vespo.Config())
    np.testing.assert_allclose(weights[:, 0], [0.281857, 1.075187], atol=1e-5)


def test_gradient_of_gspo_is_the_sequence_ratios():
    """s A / (length * sequences) at each token of the sequence that is not clipped."""
    ratio = np.exp([0.6 / 3, 0.7 / 4])  # 1.2214 < 1.28; 1.19 with a negative advantage
    expected = np.array([[-ratio[0] / 3] * 3 + [0], [ratio[1] / 4] * 4]) / 2
    np.testing.assert_allclose(gradient_of(gspo.Config(**CLIP)), expected, atol=1e-6)
    assert gradient_of(gspo.Config(clip_low=0.2, clip_high=0.2))[0].max() == 0  # 1.2214 > 1.2


def test_gradient_of_gspo_is_of_each_tokens_advantage():
    """The token form (arXiv 2507.18071, eq. 14), for turns of different advantage: -s A_t / (length 2)."""
    advantages = np.array([[1, 0.5, 0.25, 0], [1, 2, 3, -4]], np.float32)
    expected = -np.exp([[0.6 / 3], [0.7 / 4]]) * advantages * MASK / np.array([[6], [8]])
    config = gspo.Config(clip_low=0.9, clip_high=0.9)
    np.testing.assert_allclose(gradient_of(config, advantages=jnp.array(advantages)), expected, atol=1e-6)


def test_gradient_of_cispo_keeps_clipped_tokens():
    expected = -np.clip(RATIO, 0.8, 1.28) * ADVANTAGES * MASK / 7
    np.testing.assert_allclose(gradient_of(cispo.Config(**CLIP)), expected, atol=1e-6)
    twice = gradient_of(cispo.Config(**CLIP), advantages=2 * ADVANTAGES)
    np.testing.assert_allclose(twice, 2 * expected, atol=1e-6)


@pytest.mark.parametrize(("config", "count"), [(gpg.config, 7), (reinforce.config, 2)])
def test_gradient_of_reinforce_and_gpg_is_minus_the_weighted_advantage(config, count):
    """The weight is 1 where the policy is the old one; veRL's gpg, which has none, is 0.114286 here."""
    same = gradient_of(config, old_logprobs=POLICY)
    np.testing.assert_allclose(same, -ADVANTAGES * MASK / count, atol=1e-7)
    assert loss_of(replace(config, aggregation="token"), old_logprobs=POLICY) == pytest.approx(
        0.114286, abs=1e-6
    )
    expected = -np.minimum(RATIO, 1.5) * ADVANTAGES * MASK / count
    capped = replace(config, correction=Correction(cap=1.5))
    np.testing.assert_allclose(gradient_of(capped), expected, atol=1e-6)


def test_gradient_of_sapo_is_the_gates_slope():
    tau = np.array([[1.0], [1.05]])
    sigmoid = 1 / (1 + np.exp(-tau * (RATIO - 1)))
    expected = -ADVANTAGES * 4 * sigmoid * (1 - sigmoid) * RATIO * MASK / np.array([[3.0], [4.0]]) / 2
    np.testing.assert_allclose(gradient_of(sapo.Config()), expected, atol=1e-6)


def test_gradient_of_gmpo_spreads_over_unclipped_tokens():
    kept = np.array([[0.2, -0.1, 0.28], [0, 0, 0]])  # .5 is cut at .28
    first = np.exp(kept[0].sum() / 3)
    second = np.exp((-0.2 + 0 + 0.5 + 0.7) / 4)  # -.5 is cut at -.2: the advantage is negative
    expected = np.array([[-first / 3, -first / 3, 0, 0], [0, second / 4, second / 4, second / 4]]) / 2
    np.testing.assert_allclose(gradient_of(gmpo.Config(**CLIP)), expected, atol=1e-6)


def test_gradient_of_dro_is_linear_in_the_log_ratio():
    expected = (-ADVANTAGES + 0.5 * (POLICY - OLD)) * MASK / 7
    np.testing.assert_allclose(gradient_of(dro.Config(beta=0.5)), expected, atol=1e-7)


def test_gradient_of_vespo_is_phi_times_reinforce():
    phi = np.array([[0.281857], [1.075187]])
    np.testing.assert_allclose(gradient_of(vespo.Config()), -phi * ADVANTAGES * MASK / 7, atol=1e-5)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_gradient_of_dppo_drops_only_what_moves_away(divergence):
    """Token 0 of either row has left the trust region on the side to which its advantage pushes it."""
    p, q = np.exp(np.array(OLD)), np.exp(np.array(POLICY))
    kl = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    far = np.abs(p - q) > 0.1 if divergence == "tv" else kl > 0.02
    away = (np.array(ADVANTAGES) > 0) == (q > p)
    dropped = far & away
    assert dropped[:, 0].all() and far[1, 3] and not dropped[1, 3]
    config = dppo.Config(divergence_of=divergence, delta_low=0.1, delta_high=0.1)
    if divergence == "kl":
        config = replace(config, delta_low=0.02, delta_high=0.02)
    expected = -RATIO * ADVANTAGES * ~dropped * MASK / 7
    np.testing.assert_allclose(gradient_of(config), expected, atol=1e-6)
    capped = replace(config, ratio_cap=1.0)
    np.testing.assert_allclose(
        gradient_of(capped), -np.minimum(RATIO, 1) * ADVANTAGES * ~dropped * MASK / 7, atol=1e-6
    )


def test_gradient_of_kl_cov_penalises_the_largest_covariance():
    """A - mean = 8/7 or -6/7, log pi - mean: largest product at row 2, token 0: (-6/7) (-1.5 + .88571)."""
    expected = -RATIO * ADVANTAGES * MASK / 7
    expected = expected.at[1, 0].add(0.1 * -1 / 7)  # d|logprobs - old_logprobs| / d policy = -1 there
    got = gradient_of(kl_cov.Config(fraction=0.2, penalty=0.1))
    np.testing.assert_allclose(got, expected, atol=1e-6)
    cov = np.where(MASK > 0, covariance(loss_inputs()), -np.inf)
    assert cov.argmax() == 4
    assert cov[1, 0] == pytest.approx(-6 / 7 * (-1.5 + 6.2 / 7), abs=1e-6)


def test_kl_cov_takes_its_share_by_rank():
    """Ties are not all taken: advantages of 0 give all tokens the covariance 0."""
    mask = jnp.ones((2, 4)).at[0, 0].set(0.0)
    count = lambda x, fraction: int(largest(x, mask, fraction).sum())
    assert [count(jnp.zeros((2, 4)), f) for f in (0.0, 1e-4, 0.3, 0.6, 1.0)] == [1, 1, 2, 4, 7]
    x = jnp.array([[9.0, 1, 2, 3], [3, 5, 0, -1]])
    np.testing.assert_array_equal(largest(x, mask, 0.45), [[0, 0, 0, 1], [1, 1, 0, 0]])
    assert not largest(x, jnp.zeros((2, 4)), 0.5).any()
    same = gradient_of(kl_cov.Config(fraction=1.0), old_logprobs=POLICY, advantages=jnp.zeros((2, 4)))
    np.testing.assert_array_equal(same, np.zeros((2, 4)))


def test_clip_cov_drops_a_share_of_tokens_of_high_covariance():
    """With fraction 1 all candidates go: those within the bounds that the clip has left."""
    config = clip_cov.Config(**CLIP, fraction=1.0, covariance_low=0.1, covariance_high=2.0)
    cov = np.asarray(covariance(loss_inputs()))
    _, clipped = clip(jnp.asarray(RATIO), ADVANTAGES, config)
    dropped = (cov > 0.1) & (cov < 2.0) & ~np.asarray(clipped) & (np.asarray(MASK) > 0)
    assert dropped.sum() >= 1
    expected = -RATIO * ADVANTAGES * MASK / 7 * ~np.asarray(clipped) * ~dropped
    np.testing.assert_allclose(gradient_of(config), expected, atol=1e-6)
    none = clip_cov.Config(**CLIP, fraction=0.0, covariance_low=0.1)
    assert loss_of(none) == pytest.approx(0.293748, abs=1e-6)


def test_masked_tokens_are_no_candidates_and_move_no_mean():
    """Covariance 1.5 everywhere: with fraction 1 both tokens go, whatever the masked places hold."""
    policy, advantages = jnp.array([[-1.0] * 4, [-2.0] * 4]), jnp.array([[3.0] * 4, [-3.0] * 4])
    mask = jnp.zeros((2, 4)).at[:, 0].set(1.0)
    inputs = dict(mask=mask, num_tokens=jnp.float32(2), old_logprobs=policy, advantages=advantages)
    config = clip_cov.Config(**CLIP, fraction=1.0, covariance_low=1.0)
    np.testing.assert_array_equal(gradient_of(config, policy, **inputs), np.zeros((2, 4)))
    alone = loss_inputs(policy, mask=mask.at[1, 0].set(0.0), advantages=advantages)
    assert float(covariance(alone)[0, 0]) == 0


def test_the_hash_is_uniform_and_depends_on_the_value_alone():
    x = -jnp.abs(jax.random.normal(jax.random.key(0), (100, 100)))
    drawn = np.asarray(hash_uniform(x))
    assert drawn.min() >= 0 and drawn.max() < 1
    np.testing.assert_allclose(np.histogram(drawn, 10, (0, 1))[0], 1000, atol=120)
    np.testing.assert_array_equal(hash_uniform(x[::-1]), drawn[::-1])


def test_a_bounded_loss_has_no_gradient_beyond_the_bound():
    config = grpo.Config(clip_high=9e9, dual_clip=3.0)
    for sign, bounded in ((-1.0, True), (1.0, False)):
        at = jnp.array([[3.0]])
        loss = lambda p, sign=sign: clip(jnp.exp(p), jnp.full((1, 1), sign), config)
        assert float(loss(at)[0][0, 0]) == (3.0 if bounded else pytest.approx(-np.exp(3.0), rel=1e-6))
        assert bool(loss(at)[1][0, 0]) is bounded
        assert (float(jax.grad(lambda p, f=loss: f(p)[0].sum())(at)[0, 0]) == 0) is bounded


@pytest.mark.parametrize(
    "name", ["ppo", "grpo", "gspo", "cispo", "sapo", "gmpo", "gpg", "dppo", "dro", "vespo"]
)
def test_the_first_update_is_that_of_reinforce(name):
    """Old = policy: every surrogate has the gradient -A (or one proportional to it over a sequence)."""
    config = ALGOS[name].Config(aggregation="token", kl_coef=0.0, advantage="grpo")
    same = jax.lax.stop_gradient(POLICY)
    np.testing.assert_allclose(
        gradient_of(config, old_logprobs=same, ref_logprobs=None), -ADVANTAGES * MASK / 7, atol=1e-6
    )


def test_luspo_is_gspo_times_the_length():
    """Sums over the 3 and 4 tokens instead of means: s A / sequences at each token."""
    ratio = np.exp([0.6 / 3, 0.7 / 4])
    expected = np.array([[-ratio[0]] * 3 + [0], [ratio[1]] * 4]) / 2
    np.testing.assert_allclose(gradient_of(luspo.Config(**CLIP)), expected, atol=1e-6)
    assert loss_of(luspo.Config(**CLIP)) == pytest.approx((-3 * ratio[0] + 4 * ratio[1]) / 2, rel=1e-6)


def test_a_star_po_regresses_the_log_ratio_on_the_advantage():
    """Sums of logprobs - ref_logprobs .6 and .7 (beta 0.5: .3 and .35) against 1 and -1."""
    config = a_star_po.Config(beta=0.5)
    assert loss_of(config) == pytest.approx((0.7**2 + 1.35**2) / 2, rel=1e-6)
    slope = 2 * 0.5 * np.array([[-0.7], [1.35]]) / 2
    np.testing.assert_allclose(gradient_of(config), slope * MASK, atol=1e-6)
    assert algos.requirements(config).ref_logprobs


def test_token_sum_has_no_denominator():
    assert loss_of(grpo.Config(**CLIP, aggregation="token_sum", kl_coef=0.0)) == pytest.approx(
        7 * 0.293748, abs=1e-5
    )


def test_kl_weighted_by_the_ratio():
    """With reference = old and d = log r, r k3 = r (e^-d - 1 + d) = 1 - r + r d, whose slope is r d."""
    config = grpo.Config(kl_importance=True, kl_coef=0.5, aggregation="token")
    plain = replace(config, kl_coef=0.0)
    d = np.array(POLICY - OLD)
    added = loss_of(config) - loss_of(plain)
    assert added == pytest.approx(0.5 * float(((1 - RATIO + RATIO * d) * MASK).sum()) / 7, abs=1e-6)
    np.testing.assert_allclose(
        gradient_of(config) - gradient_of(plain), 0.5 * RATIO * d * MASK / 7, atol=1e-6
    )


def test_off_policy_sequences_of_negative_advantage_are_masked():
    """Row 2 is dropped below its mean of rollout - policy; row 1 never, for its advantage is positive."""
    rule = dict(of="policy", reject_only="negative")
    masked = lambda bound: gradient_of(
        gpg.Config(correction=Correction(reject=(("seq_mean_k1", 1e-3, bound),), **rule)),
        rollout_logprobs=ROLLOUT,
    )
    means = [float(((ROLLOUT - POLICY)[i] * MASK[i]).sum() / MASK[i].sum()) for i in (0, 1)]
    below, above = np.exp(min(means) - 0.01), np.exp(means[1] + 0.01)
    assert masked(below)[0].any() and not masked(below)[1].any()  # row 1 has a positive advantage
    assert masked(above)[0].any() and masked(above)[1].any()


def test_the_entropy_bonus_holds_its_target():
    """The coefficient moves by delta an update, within 0 and its bound, and is applied below the target."""
    config = grpo.Config(entropy_target=0.5, entropy_coef=0.985, entropy_delta=0.02)
    coef, states = jnp.asarray(config.initial_entropy_coef), []
    for entropy in (0.4, 0.5, 0.6, 0.7, 0.1):
        coef = next_entropy_coef(config, coef, {"entropy": jnp.float32(entropy)})
        states.append(coef)
    expected = [(1, 1), (1, 1), (0.98, 0), (0.96, 0), (0.98, 0.98)]
    np.testing.assert_allclose(np.array(states), expected, atol=1e-7)
    assert algos.requirements(config).entropy and grpo.config.initial_entropy_coef is None
    bonus = loss_of(config, entropy_coef=jnp.float32(0.3)) - loss_of(config, entropy_coef=jnp.float32(0.0))
    assert bonus == pytest.approx(-0.3, abs=1e-6)  # an entropy of 1 at each token
