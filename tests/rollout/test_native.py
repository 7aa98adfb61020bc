"""The engine: what it promises about text, log-probs, stopping, layouts and compilation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import models
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.rollout.engine import Request, SamplingConfig
from jaxrl_llm.rollout.native.engine import NativeEngine, RolloutConfig
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh

TINY = TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.3, max_position=128,
)  # fmt: skip
EOS = 1
KEY = jax.random.key(7)
WIDTH = 64


@functools.cache
def params():
    return models.init(TINY, jax.random.key(0))


def new_engine(tokenizer=None, mesh=(1, 1, 1), **settings):
    devices = jax.devices()[: int(np.prod(mesh))]
    return NativeEngine(RolloutConfig(**settings), TINY, make_mesh(MeshConfig(*mesh), devices), tokenizer)


@functools.cache
def engine(mesh=(1, 1, 1), **settings):
    built = new_engine(make_tokenizer(), mesh, **settings)
    built.publish(params(), version=3)
    return built


@functools.cache
def requests():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 64, n).astype(np.int32) for n in (5, 1, 9, 40)]
    return [Request(prompt, 10 + i, 3, 24) for i, prompt in enumerate(prompts)]


@functools.cache
def forward():
    def logprobs(tokens, temperature):
        hidden = params()(tokens[None], jnp.arange(WIDTH)[None])
        return jax.nn.log_softmax(hidden[0] @ params().head.T / temperature)

    return jax.jit(logprobs)


def expected_logprobs(prompt, response, temperature=1.0):
    """[R, V] of the training forward, at the places that predict the response."""
    tokens = np.zeros(WIDTH, np.int32)
    tokens[: len(prompt)] = prompt
    tokens[len(prompt) : len(prompt) + len(response)] = response
    return np.asarray(forward()(tokens, temperature))[len(prompt) - 1 :][: len(response)]


@functools.cache
def base():
    return engine().generate(requests(), SamplingConfig(), KEY)


def ids(trajectories):
    return [t.response_ids.tolist() for t in trajectories]


def test_trajectories_in_order_with_ids_masks_versions():
    names = [(t.prompt_index, t.response_index) for t in base()]
    assert names == [(p, g) for p in (10, 11, 12, 13) for g in range(3)]
    for t in base():
        n = len(t.response_ids)
        assert 1 <= n <= 24 and len(t.logprobs) == n
        assert t.mask.tolist() == [1] * n and t.versions.tolist() == [3] * n
    assert base()[3].prompt_ids.tolist() == requests()[1].prompt_ids.tolist()
    assert len({tuple(i) for i in ids(base())}) == 12  # nobody shares a key


def test_the_end_token_is_kept_and_named():
    """Stopping must get gradient: the token that ends a response is in ids, mask and log-probs."""
    ended = [t for t in base() if EOS in t.response_ids]
    assert ended
    for t in base():
        assert t.finish == ("stop" if t.response_ids[-1] == EOS else "length")
        assert EOS not in t.response_ids[:-1].tolist()
        assert t.finish == "stop" or len(t.response_ids) == 24


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_training_forward(temperature):
    sampling = SamplingConfig(temperature=temperature, top_k=20, min_p=0.02)
    for t in engine().generate(requests(), sampling, KEY):
        expected = expected_logprobs(t.prompt_ids, t.response_ids, temperature)
        at = np.arange(len(t.response_ids))
        np.testing.assert_allclose(t.logprobs, expected[at, t.response_ids], atol=3e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": 1, "chunk": 64},
        {"slots": 3, "chunk": 5, "prefill_tokens": 32},
        {"mesh": (2, 2, 2), "slots": 8},
        {"mesh": (2, 1, 4), "slots": 5},
    ],
    ids=str,
)
def test_text_depends_neither_on_slots_nor_chunks_nor_devices(settings):
    assert ids(engine(**settings).generate(requests(), SamplingConfig(), KEY)) == ids(base())


def test_text_does_not_depend_on_the_batch_but_on_the_key():
    one = engine().generate([requests()[2]._replace(num_responses=2)], SamplingConfig(), KEY)
    assert ids(one) == ids(base())[6:8]
    other = engine().generate([requests()[2]], SamplingConfig(), jax.random.key(8))
    assert ids(other) != ids(base())[6:9]


def test_greedy_is_the_argmax_of_the_training_forward():
    [t] = engine().generate(
        [Request(requests()[0].prompt_ids, 0, 1, 8)], SamplingConfig(temperature=0.0), KEY
    )
    assert t.response_ids.tolist() == expected_logprobs(t.prompt_ids, t.response_ids).argmax(1).tolist()


def test_stop_tokens_and_ignore_eos():
    token = int(base()[0].response_ids[2])
    stopped = engine().generate(requests(), SamplingConfig(stop_tokens=(token,)), KEY)
    for t, free in zip(stopped, ids(base()), strict=True):
        end = free.index(token) + 1 if token in free else len(free)
        assert t.response_ids.tolist() == free[:end]
        assert t.finish == ("stop" if free[end - 1] in (token, EOS) else "length")
    full = engine().generate(requests(), SamplingConfig(ignore_eos=True, stop_tokens=(token,)), KEY)
    assert {len(t.response_ids) for t in full} == {24} and {t.finish for t in full} == {"length"}


def test_stop_strings_cut_ids_and_text():
    reader = engine(slots=3, chunk=5, prefill_tokens=32)
    free = reader.generate(requests(), SamplingConfig(ignore_eos=True), KEY)
    stop = free[0].text[3:5]
    cut = reader.generate(requests(), SamplingConfig(stop=(stop,)), KEY)
    assert cut[0].text == free[0].text[: free[0].text.index(stop) + 2] and cut[0].finish == "stop"
    assert len(cut[0].response_ids) == len(cut[0].logprobs) == len(cut[0].mask) <= 5
    for t in cut:
        assert stop not in t.text[:-1]
        assert t.text == reader.tokenizer.decode(t.response_ids, skip_special_tokens=True)


def test_limits_of_each_request_hold():
    wanted = [1, 7, 24, 2]
    limited = [r._replace(max_tokens=n) for r, n in zip(requests(), wanted, strict=True)]
    out = engine().generate(limited, SamplingConfig(ignore_eos=True), KEY)
    assert [len(t.response_ids) for t in out] == [n for n in wanted for _ in range(3)]


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_nothing_compiles_after_warm_up(mesh):
    """Whatever the lengths and numbers of the prompts; counted by us and by jax."""
    busy = new_engine(make_tokenizer(), mesh, slots=mesh[0] * mesh[1] * 2, chunk=8, prefill_tokens=256)
    filtered = SamplingConfig(top_p=0.9, ignore_eos=True)
    busy.warm_up(40, 80, [SamplingConfig(), filtered])
    busy.publish(params(), 4)
    before, compiled = busy.compile_count(), []
    listener = lambda name, seconds, **_: compiled.append(name) if "backend_compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(listener)
    rng = np.random.default_rng(1)
    for prompts, longest, tokens, sampling in [
        (1, 1, 1, SamplingConfig()),
        (5, 40, 80, SamplingConfig(temperature=0.5)),
        (11, 33, 20, filtered),
        (3, 9, 80, SamplingConfig(ignore_eos=True)),
    ]:
        lengths = rng.integers(1, longest + 1, prompts)
        requests = [
            Request(rng.integers(2, 64, n, np.int32), i, 1 + i % 3, tokens) for i, n in enumerate(lengths)
        ]
        busy.generate(requests, sampling, jax.random.key(prompts))
    jax.monitoring.unregister_event_duration_listener(listener)
    assert busy.compile_count() == before and compiled == []


def test_publish_copies_so_that_the_trainer_may_donate():
    own = models.init(TINY, jax.random.key(0))
    donated = new_engine(make_tokenizer())
    metrics = donated.publish(own, 9)
    assert metrics["rollout/publish_bytes"] == sum(w.nbytes for w in jax.tree.leaves(own))
    jax.tree.map(lambda w: w.delete(), own)
    out = donated.generate(requests(), SamplingConfig(), KEY)
    assert ids(out) == ids(base()) and out[0].versions[0] == 9


def test_metrics_count_what_was_written():
    reader = engine()
    out = reader.generate(requests(), SamplingConfig(), KEY)
    assert reader.metrics["rollout/tokens"] == sum(len(t.response_ids) for t in out)
    assert 0.3 < reader.metrics["rollout/slot_occupancy"] <= 1
    assert 0 < reader.metrics["rollout/prefill_share"] < 1


def test_bfloat16_stays_near_float32():
    [low] = engine(dtype="bfloat16").generate(
        [requests()[0]._replace(num_responses=1)], SamplingConfig(), KEY
    )
    exact = expected_logprobs(low.prompt_ids, low.response_ids)
    at = np.arange(len(low.response_ids))
    assert np.abs(low.logprobs - exact[at, low.response_ids]).mean() < 0.15


def test_dynamic_rope_gives_the_trainers_logprobs_or_refuses():
    """Up to max_position both use the plain frequencies; beyond it every token would change all keys."""
    dynamic = dataclasses.replace(
        TINY, max_position=32, rope=models.RopeConfig(theta=100.0, scaling="dynamic", factor=4.0)
    )
    weights = models.init(dynamic, jax.random.key(0))
    reader = NativeEngine(RolloutConfig(slots=2), dynamic, make_mesh(MeshConfig(), jax.devices()[:1]))
    reader.publish(weights, 0)
    prompt = requests()[2].prompt_ids
    [t] = reader.generate([Request(prompt, 0, 1, 32 - len(prompt))], SamplingConfig(), KEY)
    tokens = np.concatenate([t.prompt_ids, t.response_ids])
    hidden = weights(jnp.asarray(tokens[None]), jnp.arange(32)[None])
    expected = jax.nn.log_softmax(hidden[0] @ weights.head.T)[len(prompt) - 1 : -1]
    np.testing.assert_allclose(t.logprobs, expected[np.arange(len(t.logprobs)), t.response_ids], atol=3e-5)
    with pytest.raises(ValueError, match=r"model's 32 positions; shorten .*set rope scaling to .yarn."):
        reader.generate([Request(prompt, 0, 1, 33 - len(prompt))], SamplingConfig(), KEY)


@pytest.mark.parametrize(
    "change, sampling, message",
    [
        ({"prompt_ids": np.zeros(0, np.int32)}, {}, "request 0: a prompt of 0 tokens"),
        ({"max_tokens": 0}, {}, "max_tokens=0; both must be at least 1"),
        ({"max_tokens": 124}, {}, "5 prompt tokens . max_tokens=124 exceed the model's 128 positions"),
        ({}, {"temperature": -1.0}, "sampling.temperature must be 0 .greedy. or more, not -1.0"),
        ({}, {"top_p": 0.0}, "sampling.top_p must be above 0"),
        ({}, {"top_k": -1}, "sampling.top_k"),
        ({}, {"min_p": 1.5}, "sampling.min_p"),
    ],
)
def test_impossible_requests_are_refused(change, sampling, message):
    with pytest.raises(ValueError, match=message):
        engine().generate([requests()[0]._replace(**change)], SamplingConfig(**sampling), KEY)


def test_what_an_engine_lacks_is_named():
    with pytest.raises(ValueError, match=r"no weights; call publish"):
        new_engine().generate(requests(), SamplingConfig(), KEY)
    with pytest.raises(ValueError, match=r"sampling.stop needs a tokenizer"):
        new_engine().generate(requests(), SamplingConfig(stop=("x",)), KEY)


def test_no_requests_no_trajectories():
    assert engine().generate([], SamplingConfig(), KEY) == []


def test_an_engine_at_rest_gives_its_copy_of_the_weights_back():
    held = lambda: sum(x.nbytes for x in jax.live_arrays())
    resting, size = new_engine(), 4 * sum(w.size for w in jax.tree.leaves(params()))
    before = held()
    assert resting.publish(params(), 1)["rollout/publish_bytes"] == held() - before == size
    resting.release_memory()
    assert held() == before
    with pytest.raises(ValueError, match=r"no weights; call publish"):
        resting.generate(requests(), SamplingConfig(), KEY)
