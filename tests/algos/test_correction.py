"""Off-policy corrections: numbers of veRL and OpenRLHF, and what leaves no trace in the gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import ADVANTAGES, MASK, OLD, POLICY, ROLLOUT, SEGMENTS, loss_inputs

from jaxrl_llm import ranges
from jaxrl_llm.algos import grpo, reinforce
from jaxrl_llm.algos.config import Correction
from jaxrl_llm.algos.correction import accepted, correct, importance_weights

GAP = OLD - ROLLOUT


def weights(**kwargs):
    return importance_weights(GAP, MASK, SEGMENTS, Correction(**kwargs))


def mask(rule, above, below=None):
    if below is None:
        below = 1 / above if rule.endswith("k1") else 0.0
    config = Correction(reject=((rule, below, above),))
    return np.asarray(accepted(OLD, ROLLOUT, MASK, SEGMENTS, config=config) & (MASK > 0)).astype(int).tolist()


def test_truncated_importance_sampling_equals_veRL():
    np.testing.assert_allclose(weights(weight="token", cap=1.05)[0], [0.904837, 1.05, 0.740818, 0], atol=1e-6)
    sequence = Correction(weight="sequence", cap=1.05)
    got = importance_weights(GAP, MASK, SEGMENTS, sequence)[:, 0]
    np.testing.assert_allclose(got / got.mean(), [0.975005, 1.024995], atol=1e-6)


def test_icepop_zeroes_what_is_outside():
    got = weights(weight="token", floor=0.9, cap=1.1, outside="zero")
    np.testing.assert_allclose(got, [[0.9048, 0, 0, 0], [0, 0.9512, 0, 0.9048]], atol=1e-4)


def test_rejection_equals_veRL():
    assert mask("token_k1", 1.2, 0.8) == [[1, 1, 0, 0], [1, 1, 0, 1]]
    assert mask("seq_mean_k3", 0.02) == [[0, 0, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("rule", "above", "expected"),
    [  # old_logprobs - rollout_logprobs: -.1, .2, -.3 | .2, -.05, -.2, -.1
        ("token_k2", 0.021, [[1, 1, 0, 0], [1, 1, 1, 1]]),
        ("token_k3", 0.02, [[1, 0, 0, 0], [0, 1, 1, 1]]),
        ("token_tv", 0.05, [[0, 0, 1, 0], [0, 1, 0, 1]]),
        ("token_binary_kl", 0.006, [[1, 0, 1, 0], [0, 1, 0, 1]]),
        ("seq_sum_k1", 1.2, [[0, 0, 0, 0], [1, 1, 1, 1]]),  # sums .2 and .15 against log 1.2 = .182
        ("seq_mean_k1", 1.06, [[0, 0, 0, 0], [1, 1, 1, 1]]),  # means .0667, .0375 against .0583
        ("seq_sum_k2", 0.06, [[0, 0, 0, 0], [1, 1, 1, 1]]),  # .07, .04625
        ("seq_mean_k2", 0.02, [[0, 0, 0, 0], [1, 1, 1, 1]]),
        ("seq_max_k2", 0.03, [[0, 0, 0, 0], [1, 1, 1, 1]]),  # .045, .02
        ("seq_max_k3", 0.0215, [[0, 0, 0, 0], [1, 1, 1, 1]]),
        ("seq_sum_k3", 0.04, [[0, 0, 0, 0], [0, 0, 0, 0]]),
        ("seq_mean_tv", 0.06, [[1, 1, 1, 0], [1, 1, 1, 1]]),
        ("seq_mean_binary_kl", 1e-6, [[0, 0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_rejection_rules_by_hand(rule, above, expected):
    assert mask(rule, above) == expected


@pytest.mark.parametrize("rule", ["seq_sum_k2", "seq_mean_k2", "seq_max_k2"])
def test_untrained_tokens_reject_no_sequence(rule):
    """A gap of 9 nats under the mask; of the trained tokens the largest k2 is 0.045, the largest sum 0.07."""
    spoilt, config = jnp.where(MASK > 0, OLD, ROLLOUT + 9.0), Correction(reject=((rule, 0.0, 0.1),))
    assert accepted(spoilt, ROLLOUT, MASK, SEGMENTS, config=config)[MASK > 0].all()


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Correction("token", floor=0.9, cap=1.05), 0.269992),  # clip
        (Correction("token", floor=0.9, cap=1.05, outside="zero"), 0.238311),  # mask
        (  # sequence mask: exp(mean log-ratio) within [.9, 1.05]
            Correction("token", cap=float("inf"), reject=(("seq_mean_k1", 1 / 1.05, 1 / 0.9),)),
            0.277391,
        ),
        (  # total variation of at most .05
            Correction("token", cap=float("inf"), reject=(("token_tv", 0.0, 0.05),)),
            0.260729,
        ),
    ],
    ids=["clip", "mask", "sequence mask", "tv mask"],
)
def test_corrected_ppo_loss_equals_openrlhf(correction, expected):
    config = grpo.Config(
        clip_high=0.28, dual_clip=3.0, aggregation="token", kl_coef=0.0, correction=correction
    )
    loss, metrics = grpo.loss(loss_inputs(rollout_logprobs=ROLLOUT), config)
    assert float(loss) == pytest.approx(expected, abs=1e-6)
    assert float(metrics["mismatch/kl"]) == pytest.approx(0.05, abs=1e-6)


def test_diagnostics_equal_veRL():
    _, metrics = grpo.loss(loss_inputs(rollout_logprobs=ROLLOUT), grpo.Config())
    expected = {
        "mismatch/kl": 0.05,
        "mismatch/k3_kl": 0.01618,
        "mismatch/ppl_ratio": 1.053576,
        "mismatch/chi2_token": -0.036417,
        "mismatch/chi2_sequence": -0.294431,
    }
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value, abs=2e-6), name


def test_metrics_of_the_weights():
    correction = Correction("token", cap=1.1, floor=0.8, reject=(("token_k1", 1 / 1.2, 1.2),))
    _, metrics = correct(loss_inputs(rollout_logprobs=ROLLOUT), correction)
    ratio = np.exp(np.array(GAP))[np.array(MASK) > 0]
    bounded = np.clip(ratio, 0.8, 1.1)
    assert float(metrics["is/weight"]) == pytest.approx(bounded.mean(), abs=1e-6)
    assert float(metrics["is/weight_square"]) == pytest.approx((bounded**2).mean(), abs=1e-6)
    assert float(metrics["is/high_fraction"]) == pytest.approx(2 / 7, abs=1e-6)
    assert float(metrics["is/low_fraction"]) == pytest.approx(1 / 7, abs=1e-6)
    outside = (ratio < 1 / 1.2) | (ratio > 1.2)
    assert float(metrics["is/rejected_fraction"]) == pytest.approx(outside.mean(), abs=1e-6)


def test_weights_are_constants_to_the_gradient():
    """Also where their numerator is the present policy (RL2): the gradient is -w A."""
    config = reinforce.Config(correction=Correction("token", cap=1.05, of="policy"))
    ratio = np.minimum(np.exp(np.array(POLICY - ROLLOUT)), 1.05)
    gradient = jax.grad(lambda p: reinforce.loss(loss_inputs(p, rollout_logprobs=ROLLOUT), config)[0])(POLICY)
    np.testing.assert_allclose(gradient, -ratio * ADVANTAGES * MASK / 2, atol=1e-6)


def test_equal_log_probs_pass_every_rule():
    """Rounding must not make a divergence that cannot be negative fall below a bound of 0."""
    near = OLD + 1e-4 * jnp.array([[1.0, -1, 2, 3], [-2, 1, 0, 4]])
    for name in ("k2", "k3", "tv", "binary_kl"):
        config = Correction(reject=((f"token_{name}", 0.0, 0.1),))
        assert bool(accepted(near, OLD, MASK, SEGMENTS, config=config).all()), name


def test_absurd_ratios_stay_finite():
    far = jnp.array([[1e4, -1e4, 0, 0]])
    for level in ("token", "sequence"):
        got = importance_weights(far, jnp.ones((1, 4)), SEGMENTS[:1], Correction(level, cap=float("inf")))
        assert np.isfinite(np.asarray(got)).all()
    for gap in (500.0, -500.0):  # nats a token: the perplexity of one is e^500 times the other's
        _, metrics = grpo.loss(loss_inputs(rollout_logprobs=OLD + gap), grpo.Config())
        assert all(np.isfinite(float(x)) for x in metrics.values()), metrics


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        (dict(floor=3.0), ("floor", "is 3: it must be below cap, 2.")),
        (dict(floor=-1.0), ("floor", "is -1.0: it must be at least 0 and at most 1,000,000.")),
        (dict(cap=float("nan")), ("cap", "is nan: it must be above 0.")),
        (
            dict(reject=(("token_k1", 0.0, 1.2),)),
            ("reject", "has token_k1 0 1.2: it must have the lower bound first; above 0 for k1."),
        ),
        (
            dict(reject=(("seq_sum_k2", 0.5, 0.5),)),
            ("reject", "has seq_sum_k2 0.5 0.5: it must have the lower bound first; above 0 for k1."),
        ),
        (dict(reject=(("seq_sum_k2", 0.5, float("nan")),)), ("reject", "is nan: it must be finite.")),
    ],
)
def test_wrong_bounds_are_refused(kwargs, expected):
    assert list(ranges.problems(Correction(**kwargs))) == [expected]


def test_no_bound_is_infinity():
    assert not list(ranges.problems(Correction("token", cap=float("inf"))))
    assert not list(ranges.problems(Correction(reject=(("token_k1", 0.8, 1.25),))))
