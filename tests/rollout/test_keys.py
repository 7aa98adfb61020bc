"""The tree of random keys."""

import jax
import numpy as np

from jaxrl_llm.rollout.keys import Purpose, run_key, sample_keys, turn_keys, weight_noise_key

data = lambda key: tuple(np.asarray(jax.random.key_data(key)).tolist())
fold = jax.random.fold_in


def test_a_response_has_the_key_of_its_prompt_and_index():
    """Also beyond one block of 256; the numbers of a run do not change with a release."""
    key = jax.random.key(7)
    names = np.array([[10, 0], [10, 1], [3, 2]] * 100)
    keys = sample_keys(key, names)
    assert keys.shape == (512, 2) and keys.dtype == np.uint32
    for row in (0, 1, 2, 299):
        p, g = names[row].tolist()
        assert tuple(keys[row].tolist()) == data(fold(fold(key, p), g))
    assert keys[0].tolist() == [69474017, 155331136]


def test_turns_count_down_from_the_largest_number():
    keys = sample_keys(jax.random.key(7), np.array([[10, 0], [10, 1]]))[:2]
    first, second = (jax.random.wrap_key_data(key) for key in keys)
    expected = [data(fold(first, 2**32 - 2)), data(fold(second, 2**32 - 4))]
    assert [tuple(key) for key in turn_keys(keys, [1, 3]).tolist()] == expected
    assert turn_keys(keys[:0], []).shape == (0, 2)


def test_no_two_purposes_share_a_key():
    """Weights, evaluation, and of two steps: the batch, its responses, their later turns, the noise."""
    rollout = run_key(0, Purpose.ROLLOUT)
    keys = [data(run_key(0, purpose)) for purpose in (Purpose.WEIGHTS, Purpose.EVALUATION)]
    for step in range(2):
        batch = fold(rollout, step)
        responses = sample_keys(batch, np.array([[0, 0], [0, 1], [1, 0]]))[:3]
        keys += [data(batch), data(weight_noise_key(rollout, step))]
        keys += [tuple(key) for key in [*responses.tolist(), *turn_keys(responses, [1, 1, 2]).tolist()]]
    assert len(keys) == 2 + 2 * 8 == len(set(keys))
