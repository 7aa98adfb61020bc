"""Fixed numbers from three independent systems on one small case, and properties any split must keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algos import grpo, sft
from jaxrl_llm.algos.clipped import clip
from jaxrl_llm.algos.kl import kl
from jaxrl_llm.algos.reduce import aggregate, masked_sum
from jaxrl_llm.structs import LossInputs

POLICY = jnp.array([[-0.5, -1, -2, -0.1], [-1.5, -0.3, -0.7, -0.2]])
OLD = jnp.array([[-0.7, -0.9, -2.5, -0.1], [-1, -0.3, -1.2, -0.9]])
MASK = jnp.array([[1.0, 1, 1, 0], [1, 1, 1, 1]])
ADVANTAGES = jnp.array([[1.0] * 4, [-1.0] * 4])
LENGTHS = jnp.array([[3.0] * 4, [4.0] * 4])


def loss_inputs(logprobs=POLICY, **kwargs):
    fields = dict(
        mask=MASK,
        segments=jnp.ones((2, 4), jnp.int32),
        lengths=LENGTHS,
        num_tokens=jnp.float32(7),
        num_sequences=jnp.float32(2),
        old_logprobs=OLD,
        advantages=ADVANTAGES,
        ref_logprobs=OLD,
        entropy=jnp.ones((2, 4)),
    )
    return LossInputs(logprobs=logprobs, **{**fields, **kwargs})


@pytest.mark.parametrize(
    ("aggregation", "constant", "expected"),
    [
        ("token", 1.0, 0.293748),
        ("sequence", 1.0, 0.115103),
        ("sequence_sum", 1.0, 1.028117),
        ("constant", 4.0, 0.257029),
    ],
)
def test_clipped_loss_equals_other_systems(aggregation, constant, expected):
    config = grpo.Config(
        clip_high=0.28, dual_clip=3.0, aggregation=aggregation, constant=constant, kl_coef=0.0
    )
    loss, metrics = grpo.loss(loss_inputs(), config)
    assert float(loss) == pytest.approx(expected, abs=1e-6)
    assert float(metrics["clip_fraction"]) == pytest.approx(2 / 7, abs=1e-6)
    assert float(metrics["policy_kl"]) == pytest.approx(-0.185714, abs=1e-6)


def test_kl_estimators():
    rows = {"k1": [0.2, -0.1, 0.5], "k2": [0.02, 0.005, 0.125], "k3": [0.018731, 0.005171, 0.106531]}
    for how, expected in rows.items():
        np.testing.assert_allclose(kl(POLICY, OLD, how)[0, :3], expected, atol=1e-6)
    np.testing.assert_allclose(kl(POLICY, OLD, "abs")[0, :3], [0.2, 0.1, 0.5], atol=1e-6)


def test_the_absolute_value_has_no_gradient_where_policy_and_reference_are_equal():
    """jnp.abs has 1 there, which pushed all tokens down at the first update."""
    slope = jax.grad(lambda p: kl(p, OLD, "abs").sum())
    np.testing.assert_array_equal(slope(OLD), np.zeros((2, 4)))
    np.testing.assert_array_equal(slope(POLICY), [[1, -1, 1, 0], [-1, 0, 1, 1]])


def test_kl_is_finite_for_absurd_log_ratios():
    far = jnp.array([[1e4, -1e4]])
    for how in ("k1", "k2", "k3", "abs"):
        assert jnp.isfinite(kl(far, jnp.zeros((1, 2)), how)).all()


def test_kl_penalty_and_entropy_bonus_enter_the_loss():
    plain, _ = grpo.loss(loss_inputs(), grpo.Config(kl_coef=0.0, aggregation="token"))
    config = grpo.Config(kl_coef=0.5, kl="k2", entropy_coef=0.1, aggregation="token")
    loss, metrics = grpo.loss(loss_inputs(), config)
    k2 = (0.02 + 0.005 + 0.125 + 0.125 + 0 + 0.125 + 0.245) / 7
    assert float(metrics["kl"]) == pytest.approx(k2, abs=1e-6)
    assert float(loss) == pytest.approx(float(plain) + 0.5 * k2 - 0.1, abs=1e-6)


def test_gradient_by_hand():
    """Unclipped: -A ratio / tokens. Clipped on the side that the advantage pushes to: 0."""
    gradient = jax.grad(
        lambda p: grpo.loss(loss_inputs(p), grpo.Config(clip_high=0.28, kl_coef=0.0, aggregation="token"))[0]
    )(POLICY)
    ratio = np.exp(np.array(POLICY - OLD))
    expected = -np.array(ADVANTAGES) * ratio / 7
    expected[0, 2] = 0  # ratio 1.65 > 1.28 with a positive advantage
    expected[0, 3] = 0  # masked
    expected[1, 0] = 0  # ratio 0.61 < 0.8 with a negative advantage
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    loss, clipped = clip(jnp.exp(jnp.array([[3.0]])), jnp.array([[-1.0]]), grpo.Config(dual_clip=3.0))
    assert float(loss[0, 0]) == 3.0
    assert bool(clipped[0, 0])


def test_first_update_has_ratio_one_and_still_a_gradient():
    """Old = policy: the loss is -mean advantage, the gradient that of REINFORCE."""
    config = grpo.Config(kl_coef=0.0, aggregation="token")
    fn = lambda p: grpo.loss(loss_inputs(p, old_logprobs=jax.lax.stop_gradient(p)), config)[0]
    loss, gradient = jax.value_and_grad(fn)(POLICY)
    assert float(loss) == pytest.approx(1 / 7, abs=1e-6)
    np.testing.assert_allclose(gradient, -ADVANTAGES * MASK / 7, atol=1e-7)


def test_sft_is_mean_nll_of_trained_tokens():
    loss, _ = sft.loss(loss_inputs(), sft.Config())
    assert float(loss) == pytest.approx((0.5 + 1 + 2 + 1.5 + 0.3 + 0.7 + 0.2) / 7, abs=1e-6)
    loss, _ = sft.loss(loss_inputs(), sft.Config(aggregation="sequence"))
    assert float(loss) == pytest.approx((3.5 / 3 + 2.7 / 4) / 2, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "sequence_sum", "constant"])
def test_rows_apart_sum_to_rows_together(aggregation):
    """Micro-batches with global denominators add up to the whole, in any split."""
    whole = loss_inputs()
    total = aggregate(POLICY, whole, aggregation, 4.0)
    parts = [jax.tree.map(lambda x, i=i: x[i : i + 1] if x.ndim else x, whole) for i in range(2)]
    assert float(sum(aggregate(p.logprobs, p, aggregation, 4.0) for p in parts)) == pytest.approx(
        float(total), rel=1e-6
    )


def test_doubling_the_padding_changes_nothing():
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 4)), constant_values=1) if x.ndim else x
    padded = jax.tree.map(pad, loss_inputs())
    padded = LossInputs(**{**padded.__dict__, "mask": jnp.pad(MASK, ((0, 0), (0, 4)))})
    for aggregation in ("token", "sequence", "sequence_sum", "constant"):
        config = grpo.Config(aggregation=aggregation)
        assert float(grpo.loss(padded, config)[0]) == pytest.approx(
            float(grpo.loss(loss_inputs(), config)[0]), rel=1e-6
        )


def test_garbage_under_the_mask_does_not_reach_the_sum():
    """0 * NaN is NaN: masked places are selected away."""
    x = jnp.array([1.0, jnp.nan, jnp.inf])
    assert float(masked_sum(x, jnp.array([2.0, 0.0, 0.0]))) == 2.0
