"""Rows by hand: alignment with targets, no leak between neighbours, the same answer for every layout."""

import numpy as np
import pytest

from jaxrl_llm.data.packing import PackItem, counts, empty_batch, first_fit, from_trajectory, pack, unpack
from jaxrl_llm.structs import Trajectory


def item(*tokens, context=1, **signals):
    mask = np.ones(len(tokens), np.float32)
    mask[:context] = 0
    return PackItem(
        np.array(tokens, np.int32), mask, {k: np.array(v, np.float32) for k, v in signals.items()}
    )


def test_rows_by_hand():
    a = item(11, 12, 13, context=2, rollout_logprobs=[0, 0, -0.3])
    b = item(21, 22, rollout_logprobs=[0, -0.2])
    (batch,) = pack([b, a], row_length=6, rows=1)
    np.testing.assert_array_equal(batch.tokens, [[11, 12, 13, 21, 22, 0]])
    np.testing.assert_array_equal(batch.targets, [[12, 13, 0, 22, 0, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 0, 1, 0]])
    np.testing.assert_array_equal(batch.segments, [[1, 1, 1, 2, 2, 0]])
    np.testing.assert_array_equal(batch.mask, [[0, 1, 0, 1, 0, 0]])
    np.testing.assert_allclose(batch.rollout_logprobs, [[0, -0.3, 0, -0.2, 0, 0]])
    np.testing.assert_array_equal(batch.lengths[0, :5], [1, 1, 1, 1, 1])
    assert batch.advantages is None


def test_the_end_token_is_trained_on():
    """Stopping must get gradient: the response ids hold the end token and its mask is 1."""
    eos = 9
    trajectory = Trajectory(
        prompt_ids=np.array([1, 2]), response_ids=np.array([5, eos]), logprobs=np.array([-0.1, -0.7]),
        mask=np.array([1, 1]), versions=np.zeros(2), prompt_index=0, response_index=0, finish="stop",
    )  # fmt: skip
    (batch,) = pack([from_trajectory(trajectory)], 8, 1)
    np.testing.assert_array_equal(batch.targets[0, :4], [2, 5, eos, 0])
    np.testing.assert_array_equal(batch.mask[0, :4], [0, 1, 1, 0])
    np.testing.assert_allclose(batch.rollout_logprobs[0, :4], [0, -0.1, -0.7, 0])


def test_a_response_that_stops_at_once_still_has_a_token():
    trajectory = Trajectory(
        np.array([1]),
        np.array([9]),
        np.array([-1.0]),
        np.array([1]),
        versions=np.zeros(1),
        prompt_index=0,
        response_index=0,
        finish="stop",
    )
    assert counts([from_trajectory(trajectory)]) == (1.0, 1.0)


def test_a_first_token_is_not_counted():
    """No position predicts it, also if all of a text is learned."""
    assert counts([item(1, 2, 3, 4, context=0), item(5, context=0)]) == (3.0, 1.0)


def test_a_pair_with_an_empty_side_is_not_counted():
    """Half a pair in the denominator made the loss of the others too small."""
    empty = PackItem(np.array([1, 2], np.int32), np.zeros(2))
    pairs = [item(1, 2, 3), item(1, 4), item(1, 2, 3), empty]
    assert counts(pairs) == (5.0, 3.0) and counts(pairs, group_size=2) == (5.0, 2.0)
    assert counts([item(1, 2), empty], group_size=2) == (1.0, 1.0)


def test_every_sequence_lands_once_whatever_the_shape():
    rng = np.random.default_rng(0)
    items = [item(*rng.integers(1, 99, n)) for n in rng.integers(2, 30, 40)]
    for row_length, rows in [(32, 1), (64, 4), (128, 3)]:
        batches = pack(items, row_length, rows)
        assert {b.tokens.shape for b in batches} == {(rows, row_length)}
        found = [
            tuple(b.tokens[r][b.segments[r] == s])
            for b in batches for r in range(rows) for s in range(1, b.segments[r].max() + 1)
        ]  # fmt: skip
        assert sorted(found) == sorted(tuple(i.tokens) for i in items)
        assert sum(b.mask.sum() for b in batches) == counts(items)[0]


def test_what_was_computed_from_rows_comes_back_to_its_sequence():
    """A number that depends on the target alone, read at each position, is that of the next token."""
    rng = np.random.default_rng(1)
    items = [item(*rng.integers(1, 99, n)) for n in rng.integers(2, 12, 10)]
    for size in (1, 2):
        batches = pack(items, 32, 2, size)
        found = unpack([b.targets * 10 for b in batches], items, 32, size)
        for got, sequence in zip(found, items, strict=True):
            np.testing.assert_array_equal(got, [0, *(10 * sequence.tokens[1:])])


def test_units_stay_side_by_side_in_one_row():
    items = [item(*[i] * n) for i, n in enumerate([3, 5, 2, 2, 6, 1, 1, 4], 1)]
    for batch in pack(items, 9, 1, group_size=2):
        segments = batch.segments[0]
        numbers = [int(batch.tokens[0][segments == s][0]) for s in range(1, segments.max() + 1)]
        assert all(a % 2 and b == a + 1 for a, b in zip(numbers[::2], numbers[1::2], strict=True))


def test_first_fit_fills_rows():
    assert first_fit([3, 8, 5, 2, 2], 10) == [[1, 3], [2, 0, 4]]


def test_too_long_says_what_to_do():
    with pytest.raises(ValueError, match=r"9 tokens does not fit a row of 8.*max_response_tokens"):
        pack([item(*range(9))], 8, 1)


def test_empty_batch_trains_nothing():
    batch = empty_batch(2, 4, ("advantages",))
    assert batch.mask.sum() == 0
    assert batch.lengths.min() == 1
