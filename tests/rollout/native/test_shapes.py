"""The ladders of compiled shapes, by hand."""

import pytest

from jaxrl_llm.rollout.native.shapes import (
    ladder,
    make_shapes,
    max_pages_for,
    pages_for,
    round_up,
    row_counts,
)
from jaxrl_llm.sharding.compile import bucket


def test_shapes_of_a_run():
    shapes = make_shapes(512, 2048, slots=60, num_shards=4, prefill_tokens=4096)
    assert shapes.slot_counts == (8, 16, 32, 60)
    assert shapes.cache_lengths == (512, 768, 1152, 1728, 2560)
    assert shapes.prefill == ((32, (2, 8, 32, 128)), (128, (2, 8, 32)), (512, (2, 8)))
    assert shapes.max_prefill_length == 512


def test_shapes_of_a_small_run():
    shapes = make_shapes(1, 1, slots=1, num_shards=1, prefill_tokens=8)
    assert shapes.slot_counts == (1,) and shapes.cache_lengths == (16,) and shapes.prefill == ((16, (1,)),)


def test_short_prompts_use_a_short_cache_beside_a_long_limit():
    """Rungs of 1.5 down to a fifth of the response, 51 tokens, but not below 64."""
    lengths = make_shapes(4096, 256, slots=8, num_shards=1, prefill_tokens=4096).cache_lengths
    assert lengths == (80, 128, 192, 256, 384, 576, 864, 1312, 1952, 2912, 4352)


def test_slots_are_rounded_up_to_the_shards():
    assert make_shapes(8, 8, slots=5, num_shards=2, prefill_tokens=64).slot_counts == (2, 4, 6)


def test_slots_with_drafts_are_a_rung():
    """Of two shards, rounded up; but not with turns, which come back to all slots."""
    shapes = make_shapes(512, 2048, 60, 4, prefill_tokens=4096, draft_tokens=7, draft_slots=13)
    assert shapes.slot_counts == (8, 16, 32, 60) and shapes.max_draft_texts == 8 * 2560
    assert [shapes.has_drafts(count) for count in shapes.slot_counts] == [True, True, False, False]
    assert make_shapes(512, 2048, 60, 1, prefill_tokens=4096, draft_tokens=7, draft_slots=3).slot_counts == (
        3,
        8,
        15,
        30,
        60,
    )
    shapes = make_shapes(512, 2048, 60, 1, prefill_tokens=4096, turns=True, draft_tokens=7, draft_slots=3)
    assert shapes.slot_counts == (60,) and not shapes.has_drafts(60)
    assert not make_shapes(512, 2048, 60, 1, prefill_tokens=4096, draft_slots=60).has_drafts(60)


def test_turns_prefill_whole_conversations():
    assert make_shapes(100, 300, 16, 2, prefill_tokens=400, turns=True).slot_counts == (
        16,
    )  # turns come back to them
    assert make_shapes(100, 300, 16, 2, prefill_tokens=400).slot_counts == (2, 4, 8, 16)
    shapes = make_shapes(100, 300, slots=1, num_shards=1, prefill_tokens=400, turns=True)
    assert shapes.prefill == ((64, (1, 6)), (112, (3,)), (224, (1,)), (416, (1,)))


def test_pages_by_hand():
    """A prompt of 10 and 6 new tokens: 15 in the cache, and the prompt's last page twice."""
    assert [pages_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert max_pages_for(16, 4) == 5


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ((192, 64, 1.5), (96, 128, 192)),
        ((320, 64, 2), (80, 160, 320)),
        ((511, 32, 4), (32, 128, 512)),
        ((0, 32, 4), (16,)),
        ((37, 32, 4), (48,)),
        ((129, 32, 4), (48, 160)),
    ],
)
def test_ladder(arguments, expected):
    assert ladder(*arguments) == expected


def test_row_counts_and_rungs():
    assert row_counts(64) == (1, 4, 16, 64) and row_counts(85) == (1, 4, 16, 85)
    assert row_counts(8) == (2, 8) and row_counts(3) == (3,) and row_counts(0) == (1,)
    assert [round_up((2, 8), n) for n in (0, 2, 3, 8)] == [2, 2, 8, 8]


def test_buckets():
    assert [bucket(n, 64) for n in (1, 64, 65, 96, 97, 128, 129, 193, 400)] == [
        64, 64, 96, 96, 128, 128, 192, 256, 512,
    ]  # fmt: skip
