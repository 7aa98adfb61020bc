"""A model with a sparse indexer in the native engine: neither caches, devices nor drafts change the text."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from random_weights import random_params
from small_engine import KEY, MODEL, VERSION, assert_same, requests
from test_paged_cache import Echo

from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.models import decode
from jaxrl_llm.models.mixer_config import IndexConfig, MLAConfig
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig
from jaxrl_llm.rollout.native import kept
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

INDEXED = dataclasses.replace(
    MODEL, num_layers=4, num_kv_heads=4, head_dim=12, qk_norm=False, mla=MLAConfig(16, 20, 8, 4, 6),
    index=IndexConfig(9, 2, 6), index_layers=(True, False) * 2,
)  # fmt: skip
PAGED = {"cache": "paged", "page": 8}
pytestmark = pytest.mark.slow


@functools.cache
def engine(mesh=(1, 1, 1), model=INDEXED, **settings):
    data, fsdp, tensor = mesh
    mesh = make_mesh(MeshConfig(data, fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor])
    built = NativeEngine(RolloutConfig(**{"slots": 4, "chunk": 8, **settings}), model, mesh, make_tokenizer())
    built.publish(random_params(model), VERSION)
    return built


@functools.cache
def expected():
    return engine(cache="ring").generate(requests(), SamplingConfig(), KEY)


def test_log_probs_are_those_of_the_forward_and_of_other_keys_than_all():
    first = expected()[0]
    tokens = np.concatenate([first.prompt_ids, first.response_ids])[None]
    logprobs = []
    wide = dataclasses.replace(INDEXED, index=dataclasses.replace(INDEXED.index, topk=100))
    for model in (INDEXED, wide):
        params = random_params(model)
        hidden = jax.jit(lambda p, *row: p(*row))(params, tokens, np.arange(tokens.shape[1])[None])
        every = jax.nn.log_softmax(hidden[0] @ params.head.T)
        logprobs.append(
            np.take_along_axis(every[:-1], tokens[0, 1:, None], axis=1)[-len(first.logprobs) :, 0]
        )
    np.testing.assert_allclose(first.logprobs, logprobs[0], atol=3e-5)
    assert np.abs(first.logprobs - logprobs[1]).max() > 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {"cache": "ring", "slots": 12, "chunk": 5},
        {**PAGED, "slots": 2},
        {**PAGED, "mesh": (2, 2, 2)},
        {"cache": "ring", "mesh": (2, 2, 2)},
        {**PAGED, "draft_tokens": 4},
    ],
    ids=["other slots", "pages", "pages, eight devices", "ring, eight devices", "drafts"],
)
def test_the_text_is_that_of_four_slots_of_a_ring(settings):
    reader = engine(**settings)
    for least in (0.0, 0.5) if "draft_tokens" in settings else (0.0,):
        assert_same(reader.generate(requests(), SamplingConfig(), KEY), expected(), atol=3e-5)
        assert reader.metrics.get("rollout/draft_accepted", 1.0) >= least


@pytest.mark.parametrize("settings", [PAGED, {"cache": "ring"}], ids=["pages", "ring"])
def test_scanned_layers_have_the_same_text(settings, monkeypatch):
    separate = expected()  # before the change, which its engine must not see
    monkeypatch.setattr(decode, "MAX_UNROLLED_LAYERS", 1)
    reader = engine(**settings, slots=3)
    assert_same(reader.generate(requests(), SamplingConfig(), KEY), separate, atol=3e-5)


def test_kept_turns_have_the_text_of_turns_that_are_read_again(monkeypatch):
    monkeypatch.setattr(kept, "MIN_PREFILL_FLOPS", 0)
    ends = SamplingConfig(stop_tokens=tuple(range(1, 128, 4)))
    talk = lambda reader: reader.generate(requests(), ends, KEY, Echo((5, 6, 7)))
    again = talk(engine(cache="ring", chunk=5))
    for settings in (PAGED, {"cache": "auto", "page": 8, "pages": 15 * 13}):
        reader = engine(**settings, chunk=5)
        assert_same(talk(reader), again, atol=3e-5)
        assert reader.metrics["rollout/reused_tokens"] > 0
