"""The native engine's promises about text, log-probs, stopping, sharding and compilation."""

import contextlib
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import (
    EOS,
    KEY,
    LIMIT,
    MODEL,
    VERSION,
    assert_same,
    base,
    engine,
    expected_logprobs,
    ids,
    new_engine,
    params,
    requests,
)

from jaxrl_llm.builders.engines import make_engine
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig
from jaxrl_llm.rollout.engine import Request, text_of
from jaxrl_llm.sharding.config import ROLLOUT_ENGINE
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh


def test_trajectories_in_order_with_ids_masks_versions():
    names = [(t.prompt_index, t.response_index) for t in base()]
    assert names == [(p, g) for p in (10, 11, 12, 13, 14) for g in range(3)]
    for t in base():
        n = len(t.response_ids)
        assert 1 <= n <= LIMIT and len(t.logprobs) == n
        assert t.mask.tolist() == [1] * n and t.versions.tolist() == [VERSION] * n
    assert base()[3].prompt_ids.tolist() == requests()[1].prompt_ids.tolist()
    assert len({tuple(i) for i in ids(base())}) == 15  # no two share a key


def test_the_end_token_is_kept_and_named():
    """Stopping must get gradient: the token that ends a response is in ids, mask and log-probs."""
    assert {t.finish for t in base()} == {"stop", "length"}
    for t in base():
        assert t.finish == ("stop" if t.response_ids[-1] == EOS else "length")
        assert EOS not in t.response_ids[:-1].tolist()
        assert t.finish == "stop" or len(t.response_ids) == LIMIT


def test_logprobs_are_those_of_the_training_forward():
    for t in base():
        at = np.arange(len(t.response_ids))
        expected = expected_logprobs(t.prompt_ids, t.response_ids)[at, t.response_ids]
        np.testing.assert_allclose(t.logprobs, expected, atol=3e-5)


def test_logprobs_are_of_the_full_softmax_at_the_temperature():
    """Filters choose tokens and do not renormalise."""
    sampling = SamplingConfig(temperature=0.7, top_k=20, min_p=0.02)
    [t] = engine().generate([requests()[2]._replace(num_responses=1)], sampling, KEY)
    expected = expected_logprobs(t.prompt_ids, t.response_ids, 0.7)
    at = np.arange(len(t.response_ids))
    np.testing.assert_allclose(t.logprobs, expected[at, t.response_ids], atol=3e-5)
    ranks = (expected > expected[at, t.response_ids][:, None]).sum(axis=1)
    assert ranks.max() < 20


def test_text_depends_neither_on_slots_nor_on_chunks():
    alone = engine(slots=1, chunk=64, prefill_tokens=32)
    assert_same(alone.generate(requests(), SamplingConfig(), KEY), base())


def test_text_does_not_depend_on_the_batch_but_on_the_key():
    one = engine().generate([requests()[2]._replace(num_responses=2)], SamplingConfig(), KEY)
    assert ids(one) == ids(base())[6:8]
    other = engine().generate([requests()[2]], SamplingConfig(), jax.random.key(8))
    assert ids(other) != ids(base())[6:9]


def test_greedy_is_the_argmax_of_the_training_forward():
    for t in base(0.0)[::3]:
        expected = expected_logprobs(t.prompt_ids, t.response_ids).argmax(axis=1)
        assert t.response_ids.tolist() == expected.tolist()


def test_stop_tokens_and_ignore_eos():
    token = int(base()[0].response_ids[2])
    stopped = engine().generate(requests(), SamplingConfig(stop_tokens=(token,)), KEY)
    for t, free in zip(stopped, ids(base()), strict=True):
        end = free.index(token) + 1 if token in free else len(free)
        assert t.response_ids.tolist() == free[:end]
        assert t.finish == ("stop" if free[end - 1] in (token, EOS) else "length")
    full = engine().generate(requests(), SamplingConfig(ignore_eos=True, stop_tokens=(token,)), KEY)
    assert {len(t.response_ids) for t in full} == {LIMIT} and {t.finish for t in full} == {"length"}


def test_stop_strings_cut_ids_and_text():
    """Right after the token that completes the string; other responses are as without it."""
    stop, decode = base()[0].text[3:5], functools.partial(text_of, engine().tokenizer)
    cut = engine().generate(requests(), SamplingConfig(stop=(stop,)), KEY)
    assert cut[0].finish == "stop" and stop in cut[0].text  # its last token may go on
    for t, free in zip(cut, base(), strict=True):
        lengths = range(1, len(free.response_ids) + 1)
        end = next((n for n in lengths if stop in decode(free.response_ids[:n])), lengths[-1])
        assert t.response_ids.tolist() == free.response_ids[:end].tolist()
        assert len(t.logprobs) == len(t.mask) == end and t.text == decode(t.response_ids)


def test_limits_of_each_request_hold():
    limits = [1, 7, 24, 2, 9]
    limited = [r._replace(max_tokens=n) for r, n in zip(requests(), limits, strict=True)]
    out = engine().generate(limited, SamplingConfig(ignore_eos=True), KEY)
    assert [len(t.response_ids) for t in out] == [n for n in limits for _ in range(3)]


@pytest.mark.slow
def test_on_eight_devices_the_same_text_and_nothing_compiles_after_warm_up():
    """Slots over data and fsdp, heads and vocabulary over tensor; counted by us and by jax."""
    sharded = new_engine((2, 2, 2), slots=7, chunk=8, prefill_tokens=64)  # 7 becomes 8
    sharded.warm_up(40, 24)
    sharded.publish(params(), 4)
    before, compiled = sharded.compile_count(), []
    listener = lambda name, seconds, **_: compiled.append(name) if "backend_compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(listener)
    again = sharded.generate([r._replace(max_tokens=24) for r in requests()], SamplingConfig(), KEY)
    sharded.generate(requests()[1:2], SamplingConfig(temperature=0.5, ignore_eos=True), jax.random.key(1))
    jax.monitoring.unregister_event_duration_listener(listener)
    assert sharded.compile_count() == before and compiled == []
    for t, whole in zip(again, base(), strict=True):
        assert t.response_ids.tolist() == whole.response_ids[:24].tolist()
        np.testing.assert_allclose(t.logprobs, whole.logprobs[:24], atol=2e-5)


def test_no_bit_of_a_run_depends_on_earlier_calls(tmp_path):
    """A resumed run has not seen the longest prompt, of 40 tokens; the short one has 5."""
    lengths = {"max_prompt_tokens": 40, "max_response_tokens": LIMIT}
    config = TrainConfig(run_dir=str(tmp_path), rollout=RolloutConfig(slots=2, chunk=8), **lengths)
    meshes = {ROLLOUT_ENGINE: make_mesh(MeshConfig(), jax.devices()[:1])}
    with contextlib.ExitStack() as closing:
        of_run = make_engine(config, MODEL, meshes, make_tokenizer(), eos_ids=(), closing=closing)
    of_run.publish(params(), VERSION)
    short = lambda: of_run.generate(requests()[:1], SamplingConfig(), KEY)
    before, _, after = short(), of_run.generate(requests(), SamplingConfig(), KEY), short()
    assert ids(before) == ids(after)
    assert all(np.array_equal(t.logprobs, u.logprobs) for t, u in zip(before, after, strict=True))


def test_publish_copies_so_that_the_trainer_may_donate():
    own = jax.tree.map(jnp.copy, params())
    began = time.perf_counter()
    metrics = engine().publish(own, 9)
    assert 0 <= metrics["rollout/publish_seconds"] <= time.perf_counter() - began
    assert metrics["rollout/publish_bytes"] == sum(w.nbytes for w in jax.tree.leaves(own))
    jax.tree.map(lambda w: w.delete(), own)
    out = engine().generate(requests(), SamplingConfig(), KEY)
    engine().publish(params(), VERSION)
    assert ids(out) == ids(base()) and out[0].versions[0] == 9


def test_metrics_count_tokens():
    reader = engine()
    out = reader.generate(requests(), SamplingConfig(), KEY)
    assert reader.usage()["rollout/tokens"] == sum(len(t.response_ids) for t in out)
    assert 0.3 < reader.metrics["rollout/slot_occupancy"] <= 1
    assert 0 < reader.metrics["rollout/prefill_share"] < 1


def test_bfloat16_stays_near_float32():
    request = Request(requests()[0].prompt_ids, 0, 1, 8)
    [low] = engine(slots=1, dtype="bfloat16").generate([request], SamplingConfig(), KEY)
    exact = expected_logprobs(low.prompt_ids, low.response_ids)
    at = np.arange(len(low.response_ids))
    assert 0 < np.abs(low.logprobs - exact[at, low.response_ids]).mean() < 0.15


def test_impossible_requests_and_settings_are_refused_before_any_work():
    with pytest.raises(UserError, match="prompt 10: token id 128 is outside the model's vocabulary of 128"):
        engine().generate([requests()[0]._replace(prompt_ids=np.array([128]))], SamplingConfig(), KEY)
    with pytest.raises(ConfigError, match=r"sampling.top_p is 0.0"):
        engine().generate(requests(), SamplingConfig(top_p=0.0), KEY)
    with pytest.raises(ConfigError, match=r"rollout.slots is 0: it must be at least 1"):
        new_engine(slots=0)


def test_no_requests_no_trajectories():
    assert engine().generate([], SamplingConfig(), KEY) == []


def test_released_memory_holds_no_copy_of_the_weights():
    held = lambda: sum(x.nbytes for x in jax.live_arrays())
    released, size = new_engine(slots=2, chunk=8), 4 * sum(w.size for w in jax.tree.leaves(params()))
    before = held()
    assert released.publish(params(), 1)["rollout/publish_bytes"] == held() - before == size
    released.release_memory()
    assert held() == before
    with pytest.raises(ValueError, match=r"no weights; call publish"):
        released.generate(requests(), SamplingConfig(), KEY)
