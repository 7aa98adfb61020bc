"""The cached keys and values of prompts, and of the ring that decoding reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import KEY, assert_same, base, engine, new_engine, params, requests

from jaxrl_llm.models import decode
from jaxrl_llm.models.cache_copies import roll
from jaxrl_llm.models.decode import RingCache
from jaxrl_llm.models.delta import DeltaState
from jaxrl_llm.rollout.config import SamplingConfig


@pytest.mark.slow
def test_a_stack_of_layers_generates_what_separate_layers_do(monkeypatch):
    separate = base()  # before the change, which the shared engine must not see
    monkeypatch.setattr(decode, "MAX_UNROLLED_LAYERS", 1)
    scanned = new_engine(slots=2, chunk=8)
    scanned.publish(params(), 7)
    assert_same(scanned.generate(requests(), SamplingConfig(), KEY), separate)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shift", [0, 1, 4, 5])
def test_roll_is_that_of_numpy(axis, shift):
    x = np.arange(2 * 5 * 5).reshape(2, 5, 5)
    np.testing.assert_array_equal(roll(x, jnp.int32(shift), axis), np.roll(x, shift, axis))


@pytest.mark.parametrize("depth", [(), (3,)], ids=["a layer", "a stack"])
def test_prompts_enter_their_slots_before_the_cursor(depth):
    """Two prompts of four columns, three slots of six; slot 1 keeps what it has. The cursor is at 2, so the
    prompts are in columns 4, 5, 0, 1."""
    programs, rng = engine().programs, np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=(*depth, *shape)).astype(np.float32)
    state = lambda rows: DeltaState(draw(rows, 4, 3, 5), draw(rows, 1, 3, 7))
    prompts = ((draw(2, 2, 8, 4),), (draw(2, 2, 4, 8),), (state(2),))
    old = RingCache((draw(3, 2, 8, 6),), (draw(3, 2, 6, 8),), jnp.int32(2), (state(3),))
    rows = np.array([1, -1, 0], np.int32)
    new = programs._insert(old, programs._gather(prompts, rows, length=4), rows >= 0)
    for got, before, prompt in zip(*map(jax.tree.leaves, (new.states, old.states, prompts[2])), strict=True):
        for slot, (source, row) in enumerate(((prompt, 1), (before, 1), (prompt, 0))):
            np.testing.assert_array_equal(got[..., slot, :, :, :], source[..., row, :, :, :])
    columns = [4, 5, 0, 1]
    for got, before, prompt, axis in ((new.k, old.k, prompts[0], -1), (new.v, old.v, prompts[1], -2)):
        got = np.take(got[0], columns, axis)
        for slot, row in ((0, 1), (2, 0)):
            np.testing.assert_array_equal(got[..., slot, :, :, :], prompt[0][..., row, :, :, :])
        kept = np.take(before[0], columns, axis)[..., 1, :, :, :]
        np.testing.assert_array_equal(got[..., 1, :, :, :], kept)
