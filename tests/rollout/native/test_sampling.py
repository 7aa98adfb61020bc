import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollout.native.sampling import Draw, inverse_cdf, keep, sample, uniforms

PROBS = np.array([0.1, 0.4, 0.2, 0.05, 0.25], np.float32)  # order of likelihood: 1, 4, 2, 0, 3


def make_draw(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return Draw(jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p))


def kept(**settings):
    weights = jnp.asarray(PROBS / PROBS.max())[None]
    return np.flatnonzero(np.asarray(keep(weights, make_draw(**settings)))[0]).tolist()


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 2, 4]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 4]),
        ({"top_p": 0.86}, [0, 1, 2, 4]),
        ({"min_p": 0.3}, [1, 2, 4]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.6}, [1]),  # 0.4 / 0.65 > 0.6: top-p sees what top-k left
        ({"top_k": 3, "top_p": 0.7, "min_p": 0.7}, [1]),
        ({}, [0, 1, 2, 3, 4]),
    ],
)
def test_filters_by_hand(settings, expected):
    assert kept(**settings) == expected


def test_equally_likely_tokens_are_kept_together():
    weights = jnp.array([[1.0, 0.5, 0.5, 0.1]])
    assert np.asarray(keep(weights, make_draw(top_k=2)))[0].tolist() == [1.0, 0.5, 0.5, 0.0]


def test_inverse_cdf_by_hand():
    weights = jnp.array([[1.0, 0.0, 2.0, 1.0, 0.0]] * 6)
    uniform = jnp.array([0.0, 0.24, 0.25, 0.74, 0.75, 1 - 2**-24])
    assert np.asarray(inverse_cdf(weights, uniform)).tolist() == [0, 0, 2, 2, 3, 3]


def test_inverse_cdf_never_draws_weight_zero():
    """Also where the vocabulary spans blocks, some of them empty, and the sums round."""
    weights = np.zeros((64, 1000), np.float32)
    rng = np.random.default_rng(0)
    for row in weights:
        row[rng.choice(1000, 7)] = rng.random(7) * 10.0 ** rng.integers(-6, 1, 7)
    for u in (0.0, 0.3, 0.999, 1 - 2**-24):
        drawn = np.asarray(inverse_cdf(jnp.asarray(weights), jnp.full(64, u, jnp.float32)))
        assert (weights[np.arange(64), drawn] > 0).all()


def test_frequencies_are_the_probabilities():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=200) * 2, jnp.float32)
    count = 40_000
    grid = (np.arange(count, dtype=np.float32) + 0.5) / count
    drawn = np.asarray(inverse_cdf(jnp.broadcast_to(jnp.exp(logits), (count, 200)), jnp.asarray(grid)))
    frequency = np.bincount(drawn, minlength=200) / count
    np.testing.assert_allclose(frequency, np.asarray(jax.nn.softmax(logits)), atol=1.1 / count + 1e-6)


def test_uniforms_of_keys_pass_a_statistical_test():
    keys = jax.random.split(jax.random.key(3), 500)
    u = np.concatenate([np.asarray(uniforms(keys, jnp.full(500, i))) for i in range(20)])
    assert abs(u.mean() - 0.5) < 4 / np.sqrt(12 * len(u))
    assert np.abs(np.histogram(u, 10, (0, 1))[0] - 1000).max() < 150


def test_uniform_depends_on_key_and_index_alone():
    keys = jax.random.split(jax.random.key(0), 3)
    alone = jax.random.uniform(jax.random.fold_in(keys[2], 7))
    assert uniforms(keys, jnp.array([1, 2, 7]))[2] == alone


def test_logprob_is_of_the_full_softmax_at_temperature():
    logits = jnp.log(jnp.asarray(PROBS))[None]
    for uniform in (0.1, 0.9):
        token, logprob = sample(logits, jnp.array([uniform]), make_draw(0.5, top_k=2), True)
        squares = PROBS**2 / (PROBS**2).sum()  # temperature 0.5
        assert int(token[0]) in (1, 4)
        np.testing.assert_allclose(logprob[0], np.log(squares[int(token[0])]), rtol=1e-6)


def test_temperature_zero_is_greedy_with_logprobs_of_temperature_one():
    logits = jnp.log(jnp.asarray(PROBS))[None]
    token, logprob = sample(logits, jnp.array([0.99]), make_draw(0.0), False)
    assert int(token[0]) == 1
    np.testing.assert_allclose(logprob[0], np.log(0.4), rtol=1e-6)
