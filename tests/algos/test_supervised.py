"""Supervised losses: likelihood, process rewards, distillation."""

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from sequences import run

from jaxrl_llm.algos import Requirements, distill, gkd, prm, requirements, sft
from jaxrl_llm.algos.contract import Divergence
from jaxrl_llm.structs import LossInputs, Rollouts

POLICY = [[-0.5, -1.0, -2.0], [-1.5]]
TOGETHER, APART = [[[0, 1]]], [[[1]], [[0]]]


@pytest.mark.parametrize(
    ("aggregation", "expected", "slope"),
    [("token", 5 / 4, -1 / 4), ("sequence", (3.5 / 3 + 1.5) / 2, -1 / 6)],
)
def test_sft_counts_tokens_or_rows(aggregation, expected, slope):
    for layout in (TOGETHER, APART):
        loss, _, gradient = run(sft, sft.Config(aggregation=aggregation), POLICY, layout)
        assert loss == pytest.approx(expected)
        np.testing.assert_allclose(gradient[0], slope, rtol=1e-6)


def test_dft_weighs_a_token_by_its_probability():
    """-p log p, mean over tokens, and the gradient of log p alone: -p / 4 (arXiv 2508.05629; TRL 1.16)."""
    loss, _, gradient = run(sft, sft.Config(loss="dft"), POLICY, TOGETHER)
    logps = np.asarray([-0.5, -1.0, -2.0, -1.5])
    assert loss == pytest.approx(-(np.exp(logps) * logps).mean())
    np.testing.assert_allclose(np.concatenate(gradient), -np.exp(logps) / 4, rtol=1e-6)


def steps(values, labels):
    """LossInputs of one row with a step at each place, and NaN in the padding after."""
    padded = lambda x: jnp.asarray([[*x, math.nan]], jnp.float32)
    ones = jnp.ones((1, len(values) + 1))
    return LossInputs(
        logprobs=0 * ones, mask=ones.at[0, -1].set(0), segments=ones.astype(int).at[0, -1].set(0),
        lengths=len(values) * ones, num_tokens=jnp.float32(len(values)), num_sequences=jnp.float32(1),
        values=padded(values), labels=padded(labels),
    )  # fmt: skip


def test_prm_is_binary_cross_entropy_with_hard_and_soft_labels():
    """sigmoid(ln 3) = 3/4."""
    made = steps([math.log(3), math.log(3), -math.log(3), 0.0], [1, 0, 0.25, 0.5])
    loss, metrics = prm.loss(made, prm.Config())
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert float(loss) == pytest.approx((math.log(4 / 3) + math.log(4) + entropy + math.log(2)) / 4, rel=1e-6)
    assert float(metrics["accuracy"]) == pytest.approx(3 / 4)
    assert float(metrics["right_fraction"]) == pytest.approx(1.75 / 4)
    assert requirements(prm.config) == Requirements(logprobs=False, values=True)


def test_prm_equals_cross_entropy_over_two_classes():
    logits = np.array([[0.3, -1.0], [2.0, 0.5]])  # of "+" and "-"
    loss, _ = prm.loss(steps(logits[:, 0] - logits[:, 1], [1, 0]), prm.Config())
    each = np.log(np.exp(logits).sum(1)) - logits[[0, 1], [0, 1]]
    assert float(loss) == pytest.approx(each.mean(), rel=1e-6)


DIVERGENCE = [[0.1, 0.2, 0.6], [0.5]]


def test_distillation_averages_the_divergence():
    config = distill.Config(nll_coef=0.1)
    for layout in (TOGETHER, APART):
        loss, metrics, gradient = run(distill, config, POLICY, layout, divergence=DIVERGENCE)
        assert loss == pytest.approx(0.35 + 0.1 * 1.25)
        assert metrics == {"divergence": pytest.approx(0.35), "nll": pytest.approx(1.25)}
        np.testing.assert_allclose(gradient[1], -0.1 / 4, rtol=1e-6)
    by_row, _, _ = run(
        distill, distill.Config(aggregation="sequence"), POLICY, TOGETHER, divergence=DIVERGENCE
    )
    assert by_row == pytest.approx(0.4)
    assert requirements(config).divergence == Divergence(0.0, 1.0, 0)


def test_gkd_takes_the_mean_divergence():
    loss, metrics, _ = run(gkd, gkd.Config(), POLICY, APART, divergence=DIVERGENCE)
    assert loss == pytest.approx(0.35) and metrics == {"divergence": pytest.approx(0.35)}
    assert not requirements(gkd.config).ref_logprobs


def test_gkd_as_policy_gradient():
    """The advantage of a token is log teacher - log old; at ratio 1 the gradient is minus a token's share."""
    config = gkd.Config(form="policy_gradient")
    reference = [[-0.4, -2.0, -2.0], [-0.5]]
    mask = jnp.array([[1.0, 1, 1], [1, 0, 0]])
    old = jnp.array([[-0.5, -1.0, -2.0], [-1.5, 0, 0]])
    teacher = jnp.array([[-0.4, -2.0, -2.0], [-0.5, math.nan, 0]])
    rollouts = Rollouts(
        jnp.array([1.0, 0.0]), jnp.array([0, 0]), mask, jnp.ones(2), old_logprobs=old, ref_logprobs=teacher
    )
    advantages = gkd.advantages(rollouts, config)
    np.testing.assert_allclose(advantages, [[0.1, -1.0, 0.0], [1.0, 0, 0]], atol=1e-6)
    loss, metrics, gradient = run(
        gkd,
        config,
        POLICY,
        TOGETHER,
        old_logprobs=POLICY,
        ref_logprobs=reference,
        advantages=[[0.1, -1.0, 0.0], [1.0]],
    )
    assert loss == pytest.approx(-0.1 / 4)
    assert metrics["reverse_kl"] == pytest.approx(-0.1 / 4)
    np.testing.assert_allclose(gradient[0], [-0.1 / 4, 1 / 4, 0], atol=1e-6)
    assert requirements(config) == Requirements(old_logprobs=True, ref_logprobs=True, rewards=False)


def test_gkd_adds_the_reward_of_the_task():
    """Rewards 1 and 0 in a group: +-.5 / .70711 by GRPO."""
    mask = jnp.array([[1.0, 1], [1, 0]])
    rollouts = Rollouts(jnp.array([1.0, 0.0]), jnp.array([0, 0]), mask, jnp.ones(2))
    a = 2 * 0.5 / (math.sqrt(0.5) + 1e-6)
    config = gkd.Config(reward_coef=2.0)
    np.testing.assert_allclose(gkd.advantages(rollouts, config), [[a, a], [-a, 0]], rtol=1e-6)
    assert not gkd.advantages(rollouts, gkd.Config()).any()
    process = replace(rollouts, rewards=jnp.zeros(2), token_rewards=jnp.array([[0.5, 0.5], [0, 9.0]]))
    np.testing.assert_allclose(gkd.advantages(process, config), [[a, a], [-a, 0]], rtol=1e-6)
    advantages = [[1.0, 1.0, 1.0], [-1.0]]
    loss, _, _ = run(
        gkd, config, POLICY, TOGETHER, old_logprobs=POLICY, divergence=DIVERGENCE, advantages=advantages
    )
    assert loss == pytest.approx(0.35 - 2 / 4)
