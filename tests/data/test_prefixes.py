"""Shared prefixes: rows by hand, and the same tokens, contexts and outputs as without sharing."""

import numpy as np
import pytest

from jaxrl_llm.data.packing import PackItem, arrange, counts, pack, shared_tokens, unpack


def item(context, trained, **fields):
    tokens = np.array([*context, *trained], np.int32)
    return PackItem(tokens, (np.arange(len(tokens)) >= len(context)).astype(np.float32), **fields)


def test_rows_by_hand():
    """The second response begins with a copy of the prompt's last token, whose target is its own first."""
    (batch,) = pack([item([1, 2, 3], [4, 5]), item([1, 2, 3], [6])], 9, 1, share=True)
    np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 4, 5, 3, 6, 0, 0]])
    np.testing.assert_array_equal(batch.targets, [[2, 3, 4, 5, 0, 6, 0, 0, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 4, 2, 3, 0, 0]])
    np.testing.assert_array_equal(batch.segments, [[1, 1, 1, 1, 1, 2, 2, 0, 0]])
    np.testing.assert_array_equal(batch.last, [[2, 2, 1, 1, 1, 2, 2, 0, 0]])
    np.testing.assert_array_equal(batch.mask, [[0, 0, 1, 1, 0, 1, 0, 0, 0]])
    np.testing.assert_array_equal(batch.lengths[0, :7], [2, 2, 2, 2, 2, 1, 1])


def test_a_branch_of_a_branch():
    """The last sequence continues the first one's response, which is trained on in the first alone."""
    turn, other, after = item([1, 2], [3, 4]), item([1, 2], [9, 9]), item([1, 2, 3, 4, 5], [6])
    (batch,) = pack([after, other, turn], 16, 1, share=True)
    np.testing.assert_array_equal(batch.tokens[0, :10], [1, 2, 3, 4, 4, 5, 6, 2, 9, 9])
    np.testing.assert_array_equal(batch.segments[0, :10], [1, 1, 1, 1, 2, 2, 2, 3, 3, 3])
    np.testing.assert_array_equal(batch.last[0, :10], [3, 2, 2, 1, 2, 2, 2, 3, 3, 3])
    assert batch.mask.sum() == 5


def random_trees(rng, prompts, responses, group_size=1):
    """Return items of prompts that begin alike, in a random order of the groups."""
    system = rng.integers(1, 9, 4)
    items = []
    for _ in range(prompts):
        prompt = [*system[: rng.integers(1, 5)], *rng.integers(1, 9, rng.integers(1, 6))]
        items += [[item(prompt, rng.integers(1, 9, rng.integers(1, 7))) for _ in range(group_size)]
                  for _ in range(responses)]  # fmt: skip
    return [items[i][k] for i in rng.permutation(len(items)) for k in range(group_size)]


@pytest.mark.parametrize("share", [True, "flat"])
@pytest.mark.parametrize(("row_length", "group_size"), [(16, 1), (40, 1), (64, 1), (48, 2)])
def test_every_token_reads_the_tokens_before_it_and_no_other(row_length, group_size, share):
    """By the rule of attention: column j if j <= i and segment_j <= segment_i <= last_j. In flat rows these
    columns have two values of `last` at most: those of the prefix and of what continues it."""
    rng = np.random.default_rng(row_length)
    items = random_trees(rng, prompts=5, responses=4, group_size=group_size)
    settings = {"row_length": row_length, "group_size": group_size, "share": share}
    batches = pack(items, rows=2, **settings)
    read = []
    for batch in batches:
        texts = np.empty(batch.tokens.shape, object)
        for row, (tokens, positions, segments, last) in enumerate(
            zip(batch.tokens, batch.positions, batch.segments, batch.last, strict=True)
        ):
            for i in np.flatnonzero(segments):
                seen = [j for j in range(i + 1) if segments[j] and segments[j] <= segments[i] <= last[j]]
                assert [int(positions[j]) for j in seen] == list(range(positions[i] + 1))
                assert share is True or len({last[j] for j in seen}) <= 2
                texts[row, i] = tuple(int(tokens[j]) for j in seen)
        read.append(texts)
    for found, sequence in zip(unpack(read, items, on_targets=False, **settings), items, strict=True):
        tokens = tuple(int(token) for token in sequence.tokens)
        assert [*found] == [tokens[: i + 1] for i in range(len(tokens))]
    for targets, sequence in zip(unpack([b.targets for b in batches], items, **settings), items, strict=True):
        np.testing.assert_array_equal(targets, [0, *sequence.tokens[1:]])
    assert sum(b.mask.sum() for b in batches) == counts(items)[0]
    unshared = pack(items, row_length, 2, group_size)
    assert sum((b.segments > 0).sum() for b in batches) < sum((b.segments > 0).sum() for b in unshared)


def test_the_tokens_of_a_group_are_those_of_its_prompt_and_responses():
    """P + G R, and a copy of the prompt's last token for each response after the first."""
    prompt = np.arange(1, 11)
    items = [item(prompt, [20 + i] * 3) for i in range(4)]
    rows = arrange(items, 64, share=True)
    assert [row[-1].end for row in rows] == [10 + 4 * 3 + 3]


def test_a_tree_that_does_not_fit_a_row_is_cut():
    items = [item(range(1, 9), [20 + i] * 3) for i in range(5)]
    rows = arrange(items, 8 + 3 + 2 * 4, share=True)
    assert sorted(len(row) for row in rows) == [2, 3]
    assert [place.shared for row in rows for place in row] == [0, 7, 7, 0, 7]


def test_a_group_that_fits_a_row_is_not_split_by_a_prompt_that_continues_its_own():
    """10 + 4 x 3 + 3 tokens of the short prompt, 31 + 4 x 3 + 3 of the long one: a row of 64 each."""
    short = [*range(1, 11)]
    long = [*short, 50, *range(60, 80)]  # between the responses 40 and 60 to the short one
    items = [item(short, [first, 5, 5]) for first in (40, 60, 80, 100)]
    items += [item(long, [first, 8, 8]) for first in (7, 8, 9, 10)]
    rows = arrange(items, 64, share=True)
    assert [[place.branch.index for place in row] for row in rows] == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert [row[-1].end for row in rows] == [46, 25]
    close = [item([*short, 50], [first, 8, 8]) for first in (7, 8, 9, 10)]
    (row,) = arrange(items[:4] + close, 64, share=True)  # one tree, in the order of the tokens
    assert [place.branch.index for place in row] == [0, 4, 5, 6, 7, 1, 2, 3]
    assert row[-1].end == 25 + (11 + 4 * 3 + 3) - 9


def test_a_flat_tree_shares_nothing_with_the_tree_before_it_in_its_row():
    """A row of 13 + 12 tokens and of 13 + 1 + 1 + 1. Both prompts begin alike: to share that with the one
    response before would leave 2 tokens for the two others to share, and 49 in the row."""
    system = [1, 2, 3]
    items = [item([*system, *[4] * 10], [7] * 12)]
    items += [item([*system, *[5] * 10], [last]) for last in (8, 9)]
    (row,) = arrange(items, 41, share="flat")
    assert [(place.branch.index, place.shared) for place in row] == [(0, 0), (1, 0), (2, 12)]
    assert row[-1].end == 41
    (batch,) = pack(items, 41, 1, share="flat")
    assert batch.segments[0].all() and batch.mask.sum() == 12 + 2


@pytest.mark.parametrize("share", [True, "flat"])
def test_no_row_is_longer_than_its_length(share):
    for seed in range(200):
        rng = np.random.default_rng(seed)
        items = random_trees(rng, prompts=3, responses=int(rng.integers(1, 4)))
        items = items[: rng.integers(1, len(items) + 1)]  # some prompts have one response left
        length = int(rng.integers(max(len(i.tokens) for i in items), 48))
        assert max(row[-1].end for row in arrange(items, length, share=share)) <= length


def test_pairs_stay_side_by_side_and_share_their_prompt():
    items = [item([7, 8, 9 + i // 2], [1 + i, 2]) for i in range(6)]
    for batch in pack(items, 18, 1, group_size=2, share=True):
        segments = batch.segments[0]
        firsts = [batch.tokens[0][segments == s][-2] for s in range(1, segments.max() + 1)]
        assert all(a % 2 and b == a + 1 for a, b in zip(firsts[::2], firsts[1::2], strict=True))


def test_what_is_not_shared():
    a = item([1, 2, 3], [4, 5])
    assert shared_tokens(a, item([1, 2, 3], [4, 6])) == 2
    assert shared_tokens(a, item([1, 2], [3, 4])) == 1  # it learns the 3
    assert shared_tokens(a, item([], [1, 2])) == 0
    assert shared_tokens(a, a) == 2
    routed = [item([1, 2, 3], [4], routes=np.full((4, 1, 1), 0, np.uint8)) for _ in range(2)]
    assert shared_tokens(*routed) == 2
    routed[1].routes[1] = 1
    assert shared_tokens(*routed) == 0  # the target of the first token is the second
