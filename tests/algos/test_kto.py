"""KTO: another system's number, the gradient by hand, and layouts that must change nothing."""

import math

import chex
import numpy as np
import pytest
from sequences import run

from jaxrl_llm.algos import kto


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# Responses and mismatched sequences alternate: ratios .5, -1, 1 and 1, 1, -.5, so z = .5
KTO_POLICY = [[-6.0, -4.0], [-20.0], [-12.0], [-10.0, -7.0], [-4.0, -5.0], [-19.0]]
KTO_REFERENCE = [[-5.5, -5.0], [-21.0], [-11.0], [-9.0, -9.0], [-5.0, -5.0], [-18.5]]
KTO = {"ref_logprobs": KTO_REFERENCE, "old_logprobs": KTO_POLICY, "labels": [1, 1, 0, 0, 1, 1]}


def test_kto():
    """TRL 1.16 KTOTrainer._compute_loss of the same sums: 0.5605, kl 0.5."""
    config = kto.Config(undesirable_weight=1.5)
    loss, metrics, gradient = run(kto, config, KTO_POLICY, [[[0, 1, 2, 3, 4, 5]]], **KTO)
    assert loss == pytest.approx((0.5 + 1.5 * sigmoid(-0.15) + sigmoid(-0.05)) / 3, abs=1e-6)
    assert loss == pytest.approx(0.5605, abs=5e-5)
    assert metrics == {
        "reward_mean": pytest.approx(0.1 * 0.5 / 3),
        "margin": pytest.approx(2 * 0.1 * (0.5 + 1 + 1) / 3),
        "accuracy": pytest.approx(2.5 / 3),  # the first is exactly at z: half
        "desirable_fraction": pytest.approx(2 / 3),
        "mismatched_kl": pytest.approx(0.5),
    }
    slope = lambda x: sigmoid(x) * sigmoid(-x)
    hand = [-0.1 * slope(0) / 3, 0, 1.5 * 0.1 * slope(0.15) / 3, 0, -0.1 * slope(0.05) / 3, 0]
    for got, expected in zip(gradient, hand, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-9)


def test_kto_of_pairs_takes_its_baseline_from_the_other_label():
    """OpenRLHF's VanillaKTO: z of a label is the mean log ratio of the other, not below 0."""
    loss, _, _ = run(kto, kto.Config(baseline="other_label"), KTO_POLICY, [[[0, 1, 2, 3, 4, 5]]], **KTO)
    desirable, undesirable = (0.5 + 1.0) / 2, max(-1.0, 0)
    by_hand = [
        sigmoid(-0.1 * (0.5 - undesirable)),
        sigmoid(-0.1 * (desirable + 1)),
        sigmoid(-0.1 * (1.0 - 0)),
    ]
    assert loss == pytest.approx(sum(by_hand) / 3, abs=1e-6)


def test_kto_baseline_is_not_below_zero():
    arrays = {**KTO, "ref_logprobs": [[0.0] * len(p) for p in KTO_POLICY]}
    _, metrics, _ = run(kto, kto.Config(), KTO_POLICY, [[[0, 1, 2, 3, 4, 5]]], **arrays)
    assert metrics["mismatched_kl"] == pytest.approx(-56 / 3)
    # with z = 0 the third response, a log ratio of -9, is far on the wrong side
    assert metrics["accuracy"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "layout", [[[[4, 5, 0, 1, 2, 3]]], [[[0, 1], [2, 3, 4, 5], []]], [[[2, 3]], [[0, 1], [4, 5]]]]
)
@pytest.mark.parametrize("baseline", ["mismatched", "other_label"])
def test_layouts_change_nothing(layout, baseline):
    config = kto.Config(baseline=baseline)
    one = run(kto, config, KTO_POLICY, [[[0, 1, 2, 3, 4, 5]]], **KTO)
    other = run(kto, config, KTO_POLICY, layout, **KTO)
    chex.assert_trees_all_close(other, one, rtol=1e-5, atol=1e-7)
