"""Filters, the inverse CDF and log-probs, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.native import sampling
from jaxrl_llm.rollout.native.sampling import make_params

FILTERED = sampling.Filters(True, 0)
PROBS = np.array([0.1, 0.4, 0.2, 0.05, 0.25], np.float32)  # order of likelihood: 1, 4, 2, 0, 3
apply_filters = jax.jit(sampling.apply_filters)
inverse_cdf = jax.jit(sampling.inverse_cdf)
sample_tokens = jax.jit(sampling.sample_tokens, static_argnums=3)
uniforms = jax.jit(sampling.uniforms)


def kept(**settings):
    weights = (PROBS / PROBS.max())[None]
    return np.flatnonzero(apply_filters(weights, make_params(SamplingConfig(**settings)))[0]).tolist()


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
        ({"top_k": 2, "top_p": 0.6}, [1]),  # 0.4 / 0.65 > 0.6: top-p is applied after top-k
        ({"top_k": 3, "top_p": 0.7, "min_p": 0.7}, [1]),
        ({}, [0, 1, 2, 3, 4]),
    ],
)
def test_filters_by_hand(settings, expected):
    assert kept(**settings) == expected


def test_equally_likely_tokens_are_kept_together():
    weights = np.array([[1.0, 0.5, 0.5, 0.1, 0.0]], np.float32)
    filtered = apply_filters(weights, make_params(SamplingConfig(top_k=2)))
    assert filtered[0].tolist() == [1.0, 0.5, 0.5, 0.0, 0.0]


def test_inverse_cdf_by_hand():
    weights = np.array([[1.0, 0.0, 2.0, 1.0, 0.0]] * 6, np.float32)
    uniform = np.array([0.0, 0.24, 0.25, 0.74, 0.75, 1 - 2**-24], np.float32)
    assert inverse_cdf(weights, uniform).tolist() == [0, 0, 2, 2, 3, 3]


def beside_ends(weights):
    """Uniforms at the end of every block and token, as sums in float32 and in float64 have them, and their
    neighbours."""
    blocks = np.pad(weights, (0, -len(weights) % sampling.BLOCK)).reshape(-1, sampling.BLOCK)
    ends = []
    for dtype in (np.float32, np.float64):
        sums = np.cumsum(weights, dtype=dtype), np.cumsum(blocks.sum(axis=1), dtype=dtype)
        ends += [np.unique(x) / x[-1] for x in sums]
    ends = np.unique(np.float32(np.concatenate(ends)))
    near = [np.zeros(1, np.float32), ends]
    for towards in (0, 1):
        step = ends
        for _ in range(3):
            near.append(step := np.nextafter(step, np.float32(towards)))
    return np.minimum(np.unique(np.concatenate(near)), np.float32(1 - 2**-24))


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(inverse_cdf, id="jitted"),
        pytest.param(sampling.inverse_cdf, id="not jitted", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kept", [7, 50, 2000])
def test_inverse_cdf_never_returns_weight_zero(draw, kept):
    """With uniforms beside every end, where rounded sums decrease and exceed their total."""
    rng = np.random.default_rng(kept)
    for size in (1000, 30_000):
        weights = np.zeros(size, np.float32)
        largest = rng.choice(size, min(kept, size // 2), replace=False)
        weights[largest] = rng.random(len(largest)) * 10.0 ** rng.integers(-6, 1, len(largest))
        uniform = rng.permutation(beside_ends(weights))[: 6_000_000 // size]
        drawn = np.asarray(draw(np.broadcast_to(weights, (len(uniform), size)), uniform))
        assert (weights[drawn] > 0).all()
        p = np.float64(weights) / weights.sum(dtype=np.float64)
        ends = np.cumsum(p)[drawn]
        assert (ends > uniform - 1e-5).all() and (ends - p[drawn] < uniform + 1e-5).all()


def test_frequencies_are_the_probabilities():
    rng = np.random.default_rng(1)
    weights = np.exp(rng.normal(size=200) * 2).astype(np.float32)
    count = 40_000
    grid = (np.arange(count, dtype=np.float32) + 0.5) / count
    drawn = inverse_cdf(np.broadcast_to(weights, (count, 200)), grid)
    frequency = np.bincount(drawn, minlength=200) / count
    np.testing.assert_allclose(frequency, weights / weights.sum(), atol=1.1 / count + 1e-6)


def test_uniforms_of_keys_pass_a_statistical_test():
    keys = jax.random.split(jax.random.key(3), 500)
    u = np.concatenate([uniforms(keys, np.full(500, i)) for i in range(20)])
    assert abs(u.mean() - 0.5) < 4 / np.sqrt(12 * len(u))
    assert np.abs(np.histogram(u, 10, (0, 1))[0] - 1000).max() < 150


def test_a_uniform_depends_on_key_and_index_alone():
    keys = jax.random.split(jax.random.key(3), 500)
    index = np.arange(500) + 5
    alone = jax.random.uniform(jax.random.fold_in(keys[2], 7))
    assert uniforms(keys, index)[2] == alone


def test_logprob_is_of_the_full_softmax_at_temperature():
    params, rows = make_params(SamplingConfig(temperature=0.5, top_k=2)), np.stack([PROBS, PROBS[::-1]])
    squares = rows**2 / (PROBS**2).sum()  # temperature 0.5
    for uniform in (0.1, 0.9):
        uniform = np.full(2, uniform, np.float32)
        token, logprob = sample_tokens(np.log(rows), uniform, params, FILTERED)[:2]
        assert int(token[0]) in (1, 4) and int(token[1]) in (0, 3)
        np.testing.assert_allclose(logprob, np.log(squares[[0, 1], token]), rtol=1e-6)


def test_kept_sets_and_log_probs_over_them_by_hand():
    """Of 0.4, 0.25 and 0.2 min-p 0.55 drops the last, of two as likely as the second the first is kept."""
    filters = sampling.filters_of(SamplingConfig(top_k=3, kept_sets=True))
    for settings, ids in (({}, [1, 4, 2]), ({"min_p": 0.55}, [1, 4, -1])):
        params = make_params(SamplingConfig(top_k=3, **settings))
        total = PROBS[[i for i in ids if i >= 0]].sum()
        for uniform in (0.0, 0.5, 0.99):
            token, logprob, kept = sample_tokens(np.log(PROBS)[None], np.float32([uniform]), params, filters)
            assert kept[0].tolist() == ids and int(token[0]) in ids
            np.testing.assert_allclose(logprob[0], np.log(PROBS[int(token[0])] / total), rtol=1e-6)
    tied = np.log(np.float32([[0.2, 0.4, 0.2, 0.2]]))
    params, filters = make_params(SamplingConfig(top_k=2)), sampling.Filters(True, 2)
    token, logprob, kept = sample_tokens(tied, np.float32([0.9]), params, filters)
    assert (kept[0].tolist(), int(token[0])) == ([1, 0], 0)
    np.testing.assert_allclose(logprob[0], np.log(1 / 3), rtol=1e-6)


def test_temperature_zero_is_greedy_with_logprobs_of_temperature_one():
    params = make_params(SamplingConfig(temperature=0.0))
    token, logprob = sample_tokens(np.log(PROBS)[None], np.float32([0.99]), params, FILTERED)[:2]
    assert int(token[0]) == 1
    np.testing.assert_allclose(logprob[0], np.log(0.4), rtol=1e-6)


def test_the_lowest_temperature_allowed_stays_finite():
    params = make_params(SamplingConfig(temperature=0.01))
    token, logprob = sample_tokens(
        np.float32([[80, -1e3, 70, 79.9, 1e3]]), np.float32([0.5]), params, FILTERED
    )[:2]
    assert int(token[0]) == 4 and jnp.isfinite(logprob[0])
