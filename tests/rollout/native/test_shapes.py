"""Ladders worked by hand."""

import pytest

from jaxrl_llm.rollout.native.shapes import at_least, bucket, ladder, make_sizes, row_counts


def test_sizes_of_a_run():
    sizes = make_sizes(512, 2048, slots=60, ways=4, prefill_tokens=4096)
    assert sizes.slots == (8, 16, 32, 60)
    assert sizes.lengths == (512, 768, 1152, 1728, 2560)
    assert sizes.prompts == ((32, (2, 8, 32, 128)), (128, (2, 8, 32)), (512, (2, 8)))
    assert sizes.width == 512


def test_sizes_of_a_small_run():
    sizes = make_sizes(1, 1, slots=1, ways=1, prefill_tokens=8)
    assert sizes.slots == (1,) and sizes.lengths == (32,) and sizes.prompts == ((32, (1,)),)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ((192, 64, 1.5), (96, 128, 192)),
        ((320, 64, 2), (96, 160, 320)),
        ((511, 32, 4), (32, 128, 512)),
        ((0, 32, 4), (32,)),
    ],
)
def test_ladder(arguments, expected):
    assert ladder(*arguments) == expected


def test_row_counts_and_at_least():
    assert row_counts(64) == (1, 4, 16, 64) and row_counts(3) == (3,) and row_counts(0) == (1,)
    assert [at_least((2, 8), n) for n in (0, 2, 3, 8)] == [2, 2, 8, 8]


def test_buckets():
    assert [bucket(n, 64) for n in (1, 64, 65, 96, 97, 128, 129, 193, 400)] == [
        64, 64, 96, 96, 128, 128, 192, 256, 512,
    ]  # fmt: skip
