"""Copies between the ring cache and pages hold the bits of each token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_decode import LATENTS, TINY, WINDOWED

from jaxrl_llm.models import cache_copies, decode, paged

SLOTS, LENGTH, PAGE, PAGES = 3, 16, 4, 9


def random_ring(config, cursor):
    rng = np.random.default_rng(0)
    filled = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype) if x.ndim else jnp.int32(cursor)
    return jax.tree.map(filled, decode.init_ring_cache(config, SLOTS, LENGTH, jnp.float32))


def tokens_of(ring, slot, length):
    """[arrays, L, K, tokens, E] of the slot's newest tokens, in order."""
    columns = (int(ring.cursor) - length + np.arange(length)) % LENGTH
    keys = [np.moveaxis(np.asarray(x)[..., slot, :, :, :][..., columns], -1, -2) for x in ring.k]
    values = [np.asarray(x)[..., slot, :, :, :][..., columns, :] for x in ring.v]
    return [np.reshape(x, (-1, *x[0].shape[-3:])) for x in (keys, values) if x]


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize(("config", "lanes"), [(TINY, 1), (LATENTS, 1), (WINDOWED, 128)])
def test_tokens_survive_the_way_through_pages(config, lanes, scanned, monkeypatch):
    """Slot 2 had 7 tokens before a chunk of 3; it comes back as slot 1, to another place of the ring."""
    monkeypatch.setattr(decode, "MAX_UNROLLED_LAYERS", 1 if scanned else 12)
    monkeypatch.setattr(paged, "device", lambda: ("tpu" if lanes > 1 else "cpu", ""))
    pages = paged.init_paged_cache(config, PAGES, PAGE, jnp.float32)
    ring, numbers = random_ring(config, cursor=5), [4, 2, 6]
    copies = np.array([[2, page, PAGE * i - 7] for i, page in enumerate(numbers)] + [[0, 0, 0]], np.int32)
    write = jax.jit(lambda *args: cache_copies.write_pages(config, *args))
    pages = write(ring, pages, np.int32(5 - 3), copies, np.array([3], np.int32))
    table = np.zeros((SLOTS, 4), np.int32)
    table[1, :3] = numbers
    read = jax.jit(lambda *args: cache_copies.read_pages(config, *args))
    other = random_ring(config, cursor=13)
    found = read(other, pages, table, np.full(SLOTS, 10, np.int32), np.arange(SLOTS) == 1)
    for one, expected in zip(tokens_of(found, 1, 10), tokens_of(ring, 2, 10), strict=True):
        np.testing.assert_array_equal(one, expected)
    for slot in (0, 2):
        for one, expected in zip(tokens_of(found, slot, LENGTH), tokens_of(other, slot, LENGTH), strict=True):
            np.testing.assert_array_equal(one, expected)
