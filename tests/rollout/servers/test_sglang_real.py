"""The SGLang engine on real servers: what it writes, with which log-probs."""

import jax
import numpy as np
import pytest
from real_sglang import MODEL, NEEDED, engine_on, started
from servers_shared import KEY, TOKENIZER, native
from test_turns import GREEDY, PROMPTS, Script, begun

from jaxrl_llm import models
from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.data.template import ChatConfig
from jaxrl_llm.envs.config import EnvConfig
from jaxrl_llm.envs.dialogue import Conversations
from jaxrl_llm.learn.scoring import sequence_scorer
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig
from jaxrl_llm.rollout.engine import GenerationCall, Request
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

pytestmark = NEEDED


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """On two servers of SGLang's own, started by us."""
    folder = tmp_path_factory.mktemp("sglang")
    with started(folder) as launched:
        made = engine_on(launched.urls, DiskTransport(folder / "weights", "float32", TOKENIZER))
        yield made
        made.pool.close()


def requests(tokens=24):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 120, n).astype(np.int32) for n in (3, 9, 20)]
    return [Request(prompt, i, 2, tokens) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_text_and_log_probs_are_those_of_the_native_engine(engine, seed):
    """The second push replaces the first: its text is of the new weights."""
    params = models.init(MODEL, jax.random.key(seed))
    assert engine.publish(params, seed)["bridge/probe_mean_abs"] < 1e-5
    assert len(engine.pool.usable) == 2
    greedy = SamplingConfig(temperature=0.0)
    mine, theirs = engine.generate(requests(), greedy, KEY), native(params, greedy, requests(), MODEL)
    for a, b in zip(mine, theirs, strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist() and a.finish == b.finish
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        assert set(a.versions) == {seed}


def test_sampled_log_probs_are_of_the_softmax_at_that_temperature(engine):
    params = models.init(MODEL, jax.random.key(2))
    engine.publish(params, 2)
    made = engine.generate(requests(), SamplingConfig(temperature=0.7), KEY)
    assert len({tuple(t.response_ids.tolist()) for t in made}) == len(made)
    score = sequence_scorer("float32", make_mesh(MeshConfig(), jax.devices()[:1]))
    for t in made:
        ids = np.concatenate([t.prompt_ids, t.response_ids])
        said = score(params, ids, 0.7)
        start = len(t.prompt_ids) - 1
        # float32 logits differ by up to 1e-5, which a temperature divides, too
        np.testing.assert_allclose(t.logprobs, said[start : start + len(t.response_ids)], atol=1e-5 / 0.7)
        assert (t.finish == "stop") == (t.response_ids[-1] == TOKENIZER.eos_token_id)


def test_conversations_are_those_of_the_native_engine_and_go_on_in_a_later_run(engine):
    params, mesh = models.init(MODEL, jax.random.key(3)), make_mesh(MeshConfig(), jax.devices()[:1])
    theirs = NativeEngine(RolloutConfig(slots=4, chunk=8), MODEL, mesh, TOKENIZER)
    asked = [Request(p.ids, i, 1, 120) for i, p in enumerate(PROMPTS)]
    with Conversations(Script(), EnvConfig(name="x"), TOKENIZER, ChatConfig()) as made:

        def talk(engine, partial=()):
            engine.publish(params, 4)
            return engine.start(
                GenerationCall(asked, GREEDY, KEY, made.dialogue(PROMPTS, KEY), partial=partial)
            ).result()

        mine = talk(engine)
        for a, b in zip(mine, talk(theirs), strict=True):
            assert a.response_ids.tolist() == b.response_ids.tolist() and a.mask.tolist() == b.mask.tolist()
            assert a.episode == b.episode and a.episode.turns == 3
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        for a, b in zip(mine, talk(engine, [begun(t) for t in mine]), strict=True):
            assert a.response_ids.tolist() == b.response_ids.tolist() and a.episode == b.episode
            assert b.versions[0] == 3 and b.versions[-1] == 4
