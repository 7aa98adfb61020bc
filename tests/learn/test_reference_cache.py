"""The cache of reference log-probs: its key and its bound."""

import numpy as np

from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.learn.reference import LogprobCache


def row(token: int, mask: tuple[int, ...] = (0, 1, 1, 1)) -> PackItem:
    return PackItem(np.full(4, token, np.int32), np.array(mask, np.float32), {})


def values(number: float) -> np.ndarray:
    """Return 16 bytes."""
    return np.full(4, number, np.float32)


def test_rows_of_the_same_tokens_and_another_mask_are_two_rows():
    cache = LogprobCache()
    cache.put(row(1), values(-1.0))
    assert cache.get(row(1, mask=(0, 0, 1, 1))) is None
    cache.put(row(1, mask=(0, 0, 1, 1)), values(-2.0))
    assert cache.get(row(1))[0] == -1.0
    assert cache.get(row(1, mask=(0, 0, 1, 1)))[0] == -2.0


def test_the_row_that_was_used_longest_ago_makes_room():
    cache = LogprobCache(max_bytes=40)  # two rows of 16 bytes
    cache.put(row(1), values(-1.0))
    cache.put(row(2), values(-2.0))
    assert cache.get(row(1)) is not None
    cache.put(row(3), values(-3.0))
    cache.put(row(3), values(-3.0))
    assert [cache.get(row(token)) is not None for token in (1, 2, 3)] == [True, False, True]
    assert cache.size == 32


def test_a_cache_that_is_restored_has_the_same_rows_in_the_same_order():
    cache, restored = LogprobCache(max_bytes=32), LogprobCache(max_bytes=32)
    assert cache.pack() == b""
    cache.put(row(1), np.array([0, -1.1, -1.2, -1.3], np.float32))
    cache.put(row(2), values(-2.0))
    cache.get(row(1))
    restored.unpack(cache.pack())
    restored.unpack(b"")  # of a checkpoint without the file
    np.testing.assert_array_equal(restored.get(row(1)), cache.get(row(1)))
    assert restored.size == 32 and restored.get(row(1)).dtype == np.float32
    restored = LogprobCache(max_bytes=32)
    restored.unpack(cache.pack())
    restored.put(row(3), values(-3.0))  # row 2 was used longest ago
    assert [restored.get(row(token)) is not None for token in (1, 2, 3)] == [True, False, True]
