"""Models with recurrent layers in the native engine: neither caches nor drafts change the text."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import random_params
from small_engine import KEY, MODEL, VERSION, assert_same, requests
from test_paged_cache import Echo

from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.models import decode
from jaxrl_llm.models.mixer_config import ConvConfig, DeltaConfig, MambaConfig
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig
from jaxrl_llm.rollout.native import kept
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

MODELS = {
    "delta": dataclasses.replace(MODEL, layer_kinds=("delta", "attention"), delta=DeltaConfig(2, 4, 8, 8)),
    "conv": dataclasses.replace(MODEL, layer_kinds=("conv", "attention"), conv=ConvConfig()),
    "mamba": dataclasses.replace(
        MODEL, num_layers=4, layer_kinds=("mamba", "mlp", "attention", "mamba"), one_branch=True,
        mamba=MambaConfig(4, 8, 6, 2), activation="relu2", mlp_gate=False,
    ),
}  # fmt: skip
ROOMY = {"page": 8, "slots": 8, "chunk": 5, "pages": 15 * 13}
"""Slots are refilled; pages suffice for all conversations, states for all but prompts."""


@pytest.fixture(autouse=True)
def keep_all(monkeypatch):
    """However short the conversations."""
    monkeypatch.setattr(kept, "MIN_PREFILL_FLOPS", 0)


@functools.cache
def engine(kind, mesh=(1, 1, 1), **settings):
    data, fsdp, tensor = mesh
    mesh = make_mesh(MeshConfig(data, fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor])
    built = NativeEngine(RolloutConfig(**settings), MODELS[kind], mesh, make_tokenizer())
    built.publish(random_params(MODELS[kind]), VERSION)
    return built


ENDS = {"stop_tokens": tuple(range(1, 128, 4))}


def talk(reader, observation=(5, 6, 7), **ends):
    """(trajectories, tokens of earlier turns that were not read again, tokens of all earlier turns)"""
    turned = reader.generate(requests(), SamplingConfig(**(ends or ENDS)), KEY, Echo(observation))
    turns = [(t, end) for t in turned for end in np.flatnonzero(np.diff(t.mask) < 0) + 1]
    earlier = sum(len(t.prompt_ids) + end - 1 for t, end in turns)  # the last one was not read in its turn
    return turned, reader.metrics["rollout/reused_tokens"], earlier


def read_again(kind, observation=(5, 6, 7), **ends):
    """Conversations of which each turn is prefilled from its start, by the programs that could keep them."""
    reader = engine(kind, cache="auto", **ROOMY)
    again = NativeEngine(reader.config, reader.model, reader.mesh, reader.tokenizer)
    again.programs, again._published = reader.programs, reader.published
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "MIN_PREFILL_FLOPS", np.inf)
        turned, reused, _ = talk(again, observation, **ends)
    assert reused == 0
    return turned


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["delta", "conv", "mamba"])
def test_kept_turns_and_pages_have_the_text_of_the_ring(kind):
    """Beside a ring each token is read once. Beside pages prompts have states, too: fewer turns are kept."""
    turned, reused, earlier = talk(engine(kind, cache="auto", **ROOMY))
    assert_same(turned, read_again(kind), atol=3e-5)
    assert reused == earlier
    paged, reused, _ = talk(engine(kind, cache="paged", **ROOMY))
    assert_same(paged, turned, atol=3e-5)
    assert 0 < reused < earlier


@pytest.mark.slow
def test_a_state_that_has_read_tokens_after_its_turn_is_not_kept():
    """Strings end turns, and slots have read up to four more tokens."""
    ends = {"stop": ("e", "a")}
    turned, reused, earlier = talk(engine("conv", cache="auto", **ROOMY), **ends)
    assert_same(turned, read_again("conv", **ends), atol=3e-5)
    assert 0 < reused < earlier


@pytest.mark.slow
def test_a_state_reads_no_token_twice_after_an_empty_observation():
    """Strings end turns at tokens that the slot has read, and the next turn begins with that token."""
    ends = {"stop": ("e", "a")}
    turned, reused, _ = talk(engine("delta", cache="auto", **ROOMY), (), **ends)
    assert_same(turned, read_again("delta", (), **ends), atol=3e-5)
    assert reused > 0


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["auto", "paged"])
def test_eight_devices_have_the_same_text_and_compile_nothing_after_warm_up(cache):
    """Slots over data and fsdp, each shard with its own rows of states; heads over tensor."""
    sharded = engine("delta", (2, 2, 2), cache=cache, page=8, slots=4, chunk=16, prefill_tokens=64)
    sharded.warm_up(40, 40, [SamplingConfig(**ENDS)], turns=True)
    before = sharded.compile_count()
    turned, reused, _ = talk(sharded)
    assert_same(turned, read_again("delta"), atol=3e-5)
    assert reused > 0 and sharded.compile_count() == before


@pytest.mark.slow
def test_drafts_of_scanned_layers_change_no_text(monkeypatch):
    expected = engine("mamba", cache="paged", **ROOMY).generate(requests(), SamplingConfig(), KEY)
    monkeypatch.setattr(decode, "MAX_UNROLLED_LAYERS", 1)
    reader = engine("mamba", cache="paged", page=8, slots=2, draft_tokens=4)
    for least in (0.0, 0.5):  # accepted in the first call, and in the second, which knows these responses
        assert_same(reader.generate(requests(), SamplingConfig(), KEY), expected)
        assert reader.metrics["rollout/draft_accepted"] >= least


@pytest.mark.slow
def test_8_bit_pages_have_states_in_full():
    """The first log-prob reads the prompt from pages."""
    one = [requests()[0]._replace(num_responses=1, max_tokens=8)]
    narrow = engine("delta", cache="paged", page=8, slots=1, cache_dtype="int8")
    full = engine("delta", cache="paged", **ROOMY)
    [got], [expected] = (e.generate(one, SamplingConfig(temperature=0.0), KEY) for e in (narrow, full))
    assert 0 < abs(got.logprobs[0] - expected.logprobs[0]) < 0.05
    pages = jax.eval_shape(lambda: narrow.programs._empty_cache(4, 8, 3))
    assert pages.k.dtype == jnp.int8
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(pages.states))
