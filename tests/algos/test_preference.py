"""Losses over pairs: numbers of other systems, gradients by hand, and layouts that must change nothing."""

import math
from dataclasses import replace

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from sequences import run

from jaxrl_llm.algos import Requirements, cpo, dpo, online_dpo, orpo, requirements, reward_model, simpo
from jaxrl_llm.algos.pair_losses import PAIR_LOSSES
from jaxrl_llm.structs import Rollouts

# chosen, rejected, chosen, rejected; the sums are -10, -11, -12, -9 (policy) and -10.5, -10, -11, -10
POLICY = [[-6.0, -4.0], [-11.0], [-5.0, -5.0, -2.0], [-3.0, -6.0]]
REFERENCE = [[-5.0, -5.5], [-10.0], [-4.0, -4.0, -3.0], [-9.0, -1.0]]
ONE_ROW = [[[0, 1, 2, 3]]]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def nll(x):
    """-log sigmoid(x)."""
    return math.log1p(math.exp(-x))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0.709548),
        ({"label_smoothing": 0.2}, 0.704548),
        ({"loss": "ipo"}, 30.625),  # of summed log-probs, as in OpenRLHF
        # of means, as in TRL: chosen .25, -1/3; rejected -1, .5
        ({"loss": "ipo", "length_normalized": True}, ((1.25 - 5) ** 2 + (-5 / 6 - 5) ** 2) / 2),
        ({"length_normalized": True}, (nll(0.125) + nll(-1 / 12)) / 2),
        ({"nll_coef": 0.5}, 0.709548 + 0.5 * (5 + 4) / 2),
    ],
)
def test_dpo_family(settings, expected):
    loss, _, _ = run(dpo, dpo.Config(**settings), POLICY, ONE_ROW, ref_logprobs=REFERENCE)
    assert loss == pytest.approx(expected, abs=2e-6)


PAIRS = [(0.5, -1.0), (-1.0, 1.0)]  # log-ratios of chosen and rejected: of the sums above


@pytest.mark.parametrize(
    ("settings", "of_pair"),
    [
        ({"loss": "hinge"}, lambda c, r: max(0.0, 1 - 0.5 * (c - r))),
        ({"loss": "nca"}, lambda c, r: nll(0.5 * c) + 0.5 * nll(-0.5 * c) + 0.5 * nll(-0.5 * r)),
        ({"loss": "bco"}, lambda c, r: nll(0.5 * c) + nll(-0.5 * r)),
        ({"loss": "sppo"}, lambda c, r: (c - 1) ** 2 + (r + 1) ** 2),
        ({"loss": "apo_zero"}, lambda c, r: 1 - sigmoid(0.5 * c) + sigmoid(0.5 * r)),
        ({"loss": "apo_down"}, lambda c, r: sigmoid(0.5 * c) + 1 - sigmoid(0.5 * (c - r))),
        (
            {"loss": "robust", "label_smoothing": 0.1},
            lambda c, r: (0.9 * nll(0.5 * (c - r)) - 0.1 * nll(0.5 * (r - c))) / 0.8,
        ),
        (
            {"loss": "exo", "label_smoothing": 0.1},
            lambda c, r: (
                sigmoid(0.5 * (c - r)) * math.log(sigmoid(0.5 * (c - r)) / 0.9)
                + sigmoid(0.5 * (r - c)) * math.log(sigmoid(0.5 * (r - c)) / 0.1)
            ),
        ),
        (
            {"loss": "discopop", "tau": 2.0},
            lambda c, r: (
                (1 - sigmoid(0.25 * (c - r))) * nll(0.5 * (c - r))
                + sigmoid(0.25 * (c - r)) * math.exp(-0.5 * (c - r))
            ),
        ),
        ({"divergence": "forward_kl"}, lambda c, r: nll(0.5 * (math.exp(-r) - math.exp(-c)))),
        ({"divergence": "js"}, lambda c, r: nll(0.5 * math.log(sigmoid(c) / sigmoid(r)))),
        (
            {"divergence": "alpha", "alpha": 0.5},
            lambda c, r: nll(0.5 * 2 * (math.exp(-r / 2) - math.exp(-c / 2))),
        ),
        ({"divergence": "alpha", "alpha": 1.0}, lambda c, r: nll(0.5 * (c - r))),
        ({"divergence": "alpha", "alpha": 0.0}, lambda c, r: nll(0.5 * (math.exp(-r) - math.exp(-c)))),
        (
            {"divergence": "js", "loss": "hinge"},
            lambda c, r: max(0.0, 1 - 0.5 * math.log(sigmoid(c) / sigmoid(r))),
        ),
    ],
)
def test_other_losses_of_the_log_ratios(settings, of_pair):
    """Formulas of the papers in Python; TRL 1.16 DPOTrainer has the same."""
    loss, _, gradient = run(dpo, dpo.Config(beta=0.5, **settings), POLICY, ONE_ROW, ref_logprobs=REFERENCE)
    assert loss == pytest.approx(sum(of_pair(c, r) for c, r in PAIRS) / 2, rel=1e-5)
    step = 1e-6
    for i, (c, r) in enumerate(PAIRS):  # each token of a response moves its ratio by as much
        slope = (of_pair(c + step, r) - of_pair(c - step, r)) / (2 * step) / 2
        np.testing.assert_allclose(gradient[2 * i], slope, rtol=1e-3, atol=1e-6)


def test_dpo_of_the_common_length():
    """LD-DPO: tokens beyond the shorter response count by a quarter."""
    ratios = [(-1.0 + 0.25 * 1.5, -1.0), (-2.0 + 0.25 * 1.0, 1.0)]
    for rows in (ONE_ROW, [[[0, 1], [2, 3]]], [[[0, 1]], [[2, 3]]]):
        config = dpo.Config(tail_coef=0.25)
        loss, _, gradient = run(dpo, config, POLICY, rows, ref_logprobs=REFERENCE)
        assert loss == pytest.approx(sum(nll(0.1 * (c - r)) for c, r in ratios) / 2, rel=1e-6)
        np.testing.assert_allclose(gradient[0][1], 0.25 * gradient[0][0], rtol=1e-5)
        np.testing.assert_allclose(gradient[2][[1, 2]], gradient[2][0] * np.array([1, 0.25]), rtol=1e-5)


def test_wpo_weighs_pairs_by_the_policys_confidence():
    """w = min(exp(mean(log p - log sum p^2) of c, plus of r), 1) of each pair, without gradient."""
    square = [1e-5, 1e-3, 0.3, 0.4]  # the first pair's product is above 1
    means = [np.mean(np.array(p) - np.log(s)) for p, s in zip(POLICY, square, strict=True)]
    weights = [min(np.exp(means[0] + means[1]), 1), min(np.exp(means[2] + means[3]), 1)]
    config = dpo.Config(weighted=True)
    arrays = dict(ref_logprobs=REFERENCE, sum_pi_squared=square)
    loss, metrics, gradient = run(dpo, config, POLICY, ONE_ROW, **arrays)
    assert loss == pytest.approx((weights[0] * nll(0.15) + weights[1] * nll(-0.2)) / 2, rel=1e-5)
    assert metrics["pair_weight"] == pytest.approx(np.mean(weights), rel=1e-5)
    np.testing.assert_allclose(gradient[0], -weights[0] * 0.05 * sigmoid(-0.15), rtol=1e-4)
    assert requirements(config).square_in_loss and requirements(online_dpo.Config(dpo=config)).square_in_loss


@pytest.mark.parametrize("loss", PAIR_LOSSES)
def test_extreme_ratios_give_finite_losses_and_gradients(loss):
    policy, reference = [[-300.0], [-1.0], [-1.0], [-300.0]], [[-1.0], [-300.0], [-300.0], [-1.0]]
    config = dpo.Config(loss=loss, label_smoothing=0.1 if loss == "exo" else 0.0, beta=0.3)
    value, _, gradient = run(dpo, config, policy, ONE_ROW, ref_logprobs=reference)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in gradient)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (dpo.Config(loss="hinge", label_smoothing=0.1), "label_smoothing"),
        (dpo.Config(loss="exo"), "label_smoothing"),
        (dpo.Config(loss="nca", divergence="js"), "divergence"),
        (cpo.Config(loss="hinge", label_smoothing=0.1), "label_smoothing"),
    ],
)
def test_settings_that_a_loss_does_not_read(config, field):
    assert [name for name, _ in config.problems()] == [field]


@pytest.mark.parametrize("loss", PAIR_LOSSES)
def test_each_loss_has_settings_without_a_problem(loss):
    assert not list(dpo.Config(loss=loss, label_smoothing=0.1 if loss == "exo" else 0.0).problems())


def test_alphapo_is_simpo_with_another_reward():
    """beta (1 - p^-alpha) / alpha of the mean log-probs -5, -11 and -4, -4.5 (arXiv 2501.03884)."""
    reward = lambda mean: 2.0 * (1 - math.exp(-0.25 * mean)) / 0.25
    loss, _, _ = run(simpo, simpo.Config(alpha=0.25), POLICY, ONE_ROW)
    margins = [reward(-5) - reward(-11), reward(-4) - reward(-4.5)]
    assert loss == pytest.approx(sum(nll(m - 0.5) for m in margins) / 2, rel=1e-5)
    near, _, _ = run(simpo, simpo.Config(alpha=1e-4), POLICY, ONE_ROW)
    assert near == pytest.approx(run(simpo, simpo.Config(), POLICY, ONE_ROW)[0], rel=1e-2)


def test_cpo_with_the_hinge():
    """Sums -10, -11 and -12, -9: 1 - 0.1 h of both, plus the NLL (5 + 4) / 2."""
    loss, _, _ = run(cpo, cpo.Config(loss="hinge"), POLICY, ONE_ROW)
    assert loss == pytest.approx((0.9 + 1.3) / 2 + 4.5, rel=1e-6)


def test_a_tie_counts_half_in_the_accuracy_of_pairs():
    """Scores 1, 1 and 0.3, 0.4: a tie and a pair in the wrong order. DPO's first step has ties alone."""
    settings = {"values": [1.0, 1.0, 0.3, 0.4], "labels": [0.5, 0.5, 0.2, 0.2]}
    _, metrics, _ = run(reward_model, reward_model.Config(), POLICY, ONE_ROW, **settings)
    assert metrics["accuracy"] == pytest.approx(0.25)
    assert run(dpo, dpo.Config(), POLICY, ONE_ROW, ref_logprobs=POLICY)[1]["accuracy"] == pytest.approx(0.5)


def test_dpo_metrics_and_gradient_by_hand():
    """h = 1.5 and -2; d/d log p(c) = -beta sigmoid(-beta h) / pairs, and the opposite for r."""
    _, metrics, gradient = run(dpo, dpo.Config(), POLICY, ONE_ROW, ref_logprobs=REFERENCE)
    assert metrics == {
        "chosen_reward": pytest.approx(0.1 * (0.5 - 1) / 2),
        "rejected_reward": pytest.approx(0.1 * (-1 + 1) / 2, abs=1e-7),
        "margin": pytest.approx(0.1 * (1.5 - 2) / 2),
        "accuracy": pytest.approx(0.5),
    }
    first, second = 0.05 * sigmoid(-0.15), 0.05 * sigmoid(0.2)
    for got, expected in zip(gradient, [-first, first, -second, second], strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_ipo_gradient_by_hand():
    """2 (h - 5) / pairs."""
    _, _, gradient = run(dpo, dpo.Config(loss="ipo"), POLICY, ONE_ROW, ref_logprobs=REFERENCE)
    for got, expected in zip(gradient, [-3.5, 3.5, -7.0, 7.0], strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_only_dpo_needs_a_reference():
    assert requirements(dpo.config).ref_logprobs and requirements(online_dpo.config).ref_logprobs
    assert not any(requirements(a.config).ref_logprobs for a in (simpo, cpo, orpo, reward_model))


@pytest.mark.parametrize(("smoothing", "expected"), [(0.0, 0.7493759), (0.2, 0.7293760)])
def test_cpo(smoothing, expected):
    """TRL 1.16 CPOTrainer.cpo_loss of these sums, beta 0.1; the NLL of the chosen is (5 + 4) / 2."""
    config = cpo.Config(label_smoothing=smoothing, nll_coef=0.3)
    loss, metrics, gradient = run(cpo, config, POLICY, ONE_ROW)
    assert loss == pytest.approx(expected + 0.3 * 4.5, abs=1e-6)
    assert metrics["chosen_nll"] == pytest.approx(4.5)
    if not smoothing:
        np.testing.assert_allclose(gradient[0], -0.05 * sigmoid(-0.1) - 0.3 / 2 / 2, rtol=1e-5)
        np.testing.assert_allclose(gradient[3], 0.05 * sigmoid(0.3), rtol=1e-5)


# Mean log-probs -.5, -.7 | -.9, -.6
MEANS = [[-0.2, -0.8], [-0.7], [-1.4, -0.4], [-0.1, -0.7, -1.0]]


def test_simpo():
    """Fixed numbers [.744397, 1.387335] of beta 2, gamma .5."""
    loss, metrics, gradient = run(simpo, simpo.Config(), MEANS, ONE_ROW)
    assert loss == pytest.approx((0.744397 + 1.387335) / 2, abs=1e-6)
    assert metrics["margin"] == pytest.approx(2 * (0.2 - 0.3) / 2, abs=1e-6)
    np.testing.assert_allclose(gradient[0], -2 * sigmoid(0.1) / 2 / 2, rtol=1e-5)
    np.testing.assert_allclose(gradient[3], 2 * sigmoid(1.1) / 3 / 2, rtol=1e-5)
    with_nll, _, _ = run(simpo, simpo.Config(nll_coef=1.0), MEANS, ONE_ROW)
    assert with_nll == pytest.approx(loss + 0.7, abs=1e-6)


def test_orpo():
    """beta log sigmoid of the odds ratio is [-.049465, -.102080] (TRL 1.16 too); the NLL (.5 + .9) / 2."""
    loss, metrics, gradient = run(orpo, orpo.Config(), MEANS, ONE_ROW)
    assert loss == pytest.approx(0.7 + (0.049465 + 0.102080) / 2, abs=1e-6)
    assert metrics["log_odds_ratio"] == pytest.approx(-0.0638118, abs=1e-6)
    assert metrics["chosen_reward"] == pytest.approx(-0.07, abs=1e-6)
    # d log odds / d log p = 1 / (1 - p); sigmoid(-ratio) = 1 - exp(log sigmoid(ratio))
    push = 0.1 * (1 - math.exp(-0.49465)) / (1 - math.exp(-0.5)) / 2
    np.testing.assert_allclose(gradient[0], -(push + 1 / 2) / 2, rtol=1e-4)


def test_orpo_is_finite_for_certain_responses():
    chex.assert_tree_all_finite(run(orpo, orpo.config, [[0.0], [0.0], [-1e-9], [-80.0]], ONE_ROW))


VALUES = [1.0, -0.5, 0.3, 0.4]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (nll(1.5 - 0.5) + nll(-0.1 - 0.2)) / 2),
        ({"margin": False}, (math.log(1 + math.exp(-1.5)) + math.log(1 + math.exp(0.1))) / 2),  # LogExp
        ({"margin": False, "label_smoothing": 0.1}, (nll(1.5) + 0.15 + nll(-0.1) - 0.01) / 2),
        ({"margin": False, "center_coef": 0.1}, (nll(1.5) + nll(-0.1) + 0.1 * (0.25 + 0.49)) / 2),
    ],
)
def test_reward_model(settings, expected):
    labels = [0.5, 0.5, 0.2, 0.2]
    config = reward_model.Config(**settings)
    loss, metrics, _ = run(reward_model, config, POLICY, ONE_ROW, values=VALUES, labels=labels)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert metrics["accuracy"] == pytest.approx(0.5)
    assert metrics["margin"] == pytest.approx(0.7, abs=1e-6)


def test_reward_model_without_margins_in_the_data():
    loss, _, _ = run(reward_model, reward_model.Config(), POLICY, ONE_ROW, values=VALUES)
    assert loss == pytest.approx((nll(1.5) + nll(-0.1)) / 2, abs=1e-6)
    assert requirements(reward_model.config) == Requirements(logprobs=False, values=True)


CASES = [
    (dpo, dpo.Config(nll_coef=0.1), {"ref_logprobs": REFERENCE}),
    (dpo, dpo.Config(loss="ipo", length_normalized=True), {"ref_logprobs": REFERENCE}),
    (simpo, simpo.Config(), {}),
    (cpo, cpo.Config(), {}),
    (orpo, orpo.Config(), {}),
    (reward_model, reward_model.Config(), {"values": VALUES, "labels": [0.5, 0.5, 0.2, 0.2]}),
]


@pytest.mark.parametrize(("algorithm", "config", "arrays"), CASES)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param([[[2, 3, 0, 1]]], marks=pytest.mark.slow),  # pairs in another order
        [[[0, 1], [2, 3], []]],  # a row each, and one of padding
        [[[0, 1]], [[2, 3]]],  # a micro-batch each
    ],
)
def test_layouts_change_nothing(algorithm, config, arrays, layout):
    one = run(algorithm, config, POLICY, ONE_ROW, **arrays)
    other = run(algorithm, config, POLICY, layout, **arrays)
    chex.assert_trees_all_close(other, one, rtol=1e-5, atol=1e-7)


def rollouts(rewards, group, valid=None):
    rewards = jnp.asarray(rewards, jnp.float32)
    valid = jnp.ones(len(rewards)) if valid is None else jnp.asarray(valid, jnp.float32)
    return Rollouts(rewards, jnp.asarray(group), jnp.ones((len(rewards), 2)), valid)


def test_online_dpo_pairs_the_best_with_the_worst_of_each_group():
    made = rollouts([0.2, 0.9, 0.1, 5.0, 5.0, 3.0, np.nan, 4.0], [0, 0, 0, 1, 1, 2, 2, 2], [1] * 6 + [0, 1])
    picked = online_dpo.select(made, online_dpo.Config(), np.random.default_rng(0))
    assert picked.tolist() == [1, 2, 7, 5]  # group 1 has no spread; the failed one takes no part
    assert not online_dpo.advantages(made, online_dpo.Config()).any()
    scored = replace(rollouts([0.0] * 3, [0] * 3), token_rewards=jnp.array([[1.0, 1], [3, -2], [0, 3]]))
    assert online_dpo.select(scored, online_dpo.Config(), np.random.default_rng(0)).tolist() == [2, 1]


def test_online_dpo_breaks_ties_at_random_and_may_select_nothing():
    tied = rollouts([1.0, 1.0, 0.0, 0.0], [0, 0, 0, 0])
    seen = {tuple(online_dpo.select(tied, online_dpo.Config(), np.random.default_rng(s))) for s in range(40)}
    assert seen == {(0, 2), (0, 3), (1, 2), (1, 3)}
    nothing = online_dpo.select(rollouts([1.0, 1.0], [0, 0]), online_dpo.Config(), np.random.default_rng(0))
    assert nothing.shape == (0,) and nothing.dtype == np.int64


def test_online_dpo_has_the_loss_of_dpo():
    settings = dpo.Config(beta=0.3, loss="ipo")
    wanted, _, _ = run(dpo, settings, POLICY, ONE_ROW, ref_logprobs=REFERENCE)
    got, _, _ = run(online_dpo, online_dpo.Config(dpo=settings), POLICY, ONE_ROW, ref_logprobs=REFERENCE)
    assert got == wanted


def test_gradients_survive_log_probs_far_apart():
    far = [[-1e4], [-1.0], [-1.0], [-1e4]]
    for algorithm, config, _ in CASES[:2]:
        chex.assert_tree_all_finite(run(algorithm, config, far, ONE_ROW, ref_logprobs=[[-1.0]] * 4))
