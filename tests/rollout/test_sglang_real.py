"""Real SGLang servers on a CPU, of the interpreter JAXRL_SGLANG_PYTHON (scripts/sglang_cpu/install.sh)."""

import os

import jax
import numpy as np
import pytest
from test_sglang import KEY, TOKENIZER, native
from test_turns import GREEDY, PROMPTS, Script, begun

from jaxrl_llm import models
from jaxrl_llm.bridge.disk import DiskTransport
from jaxrl_llm.checkpoint.hf_export import save_description
from jaxrl_llm.data.template import ChatConfig
from jaxrl_llm.envs.config import EnvConfig
from jaxrl_llm.envs.load import Conversations
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.scorer import make_scorer
from jaxrl_llm.rollout.config import RolloutConfig, SGLangConfig
from jaxrl_llm.rollout.engine import Request, SamplingConfig
from jaxrl_llm.rollout.launch import Launched
from jaxrl_llm.rollout.native import NativeEngine
from jaxrl_llm.rollout.servers import ServerPool
from jaxrl_llm.rollout.sglang import SGLangEngine
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh

PYTHON = os.environ.get("JAXRL_SGLANG_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="JAXRL_SGLANG_PYTHON names no interpreter with SGLang")
FLAGS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --max-total-tokens 4096 "
    "--disable-overlap-schedule"
)
MODEL = TransformerConfig(
    vocab_size=128, hidden_size=64, mlp_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    initializer_range=0.3, max_position=256,
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Two servers of SGLang's own, started by us."""
    folder = tmp_path_factory.mktemp("sglang")
    config = RolloutConfig(engine="sglang", launch=2, slots=8)
    sglang = SGLangConfig(python=PYTHON, flags=FLAGS)
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    launched = Launched(
        config, sglang, save_description(MODEL, folder / "shell", TOKENIZER, "float32"), folder
    )
    try:
        pool = ServerPool(launched.urls, sglang.timeout, sglang.retries, config.slots)
        scorer = make_scorer(MODEL, 1.0, "float32", make_mesh(MeshConfig(), jax.devices()[:1]))
        score = lambda params, ids: np.asarray(scorer(params, ids[None], np.array([len(ids)])))[0, :-1]
        transport = DiskTransport(folder / "weights", "float32", TOKENIZER)
        yield SGLangEngine(
            config, sglang, MODEL, pool, transport, score, lambda value: value, TOKENIZER, (), launched.wait
        )
        pool.close()
    finally:
        launched.close()


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
    scorer = make_scorer(MODEL, 0.7, "float32", make_mesh(MeshConfig(), jax.devices()[:1]))
    for t in made:
        ids = np.concatenate([t.prompt_ids, t.response_ids])
        said = np.asarray(scorer(params, ids[None], np.array([len(ids)])))[0]
        start = len(t.prompt_ids) - 1
        # float32 logits differ by up to 1e-5, which a temperature divides, too
        np.testing.assert_allclose(t.logprobs, said[start : start + len(t.response_ids)], atol=1e-5 / 0.7)
        assert (t.finish == "stop") == (t.response_ids[-1] == TOKENIZER.eos_token_id)


def test_conversations_are_those_of_the_native_engine_and_go_on_in_a_later_run(engine):
    params, mesh = models.init(MODEL, jax.random.key(3)), make_mesh(MeshConfig(), jax.devices()[:1])
    theirs = NativeEngine(RolloutConfig(slots=4, chunk=8), MODEL, mesh, TOKENIZER)
    asked = [Request(p.ids, i, 1, 120) for i, p in enumerate(PROMPTS)]
    with Conversations(Script(), EnvConfig(name="x"), TOKENIZER, ChatConfig()) as made:

        def talk(engine, written=()):
            engine.publish(params, 4)
            return engine.start(asked, GREEDY, KEY, made.dialogue(PROMPTS, KEY), written).result()

        mine = talk(engine)
        for a, b in zip(mine, talk(theirs), strict=True):
            assert a.response_ids.tolist() == b.response_ids.tolist() and a.mask.tolist() == b.mask.tolist()
            assert a.episode == b.episode and a.episode.turns == 3
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        for a, b in zip(mine, talk(engine, [begun(t) for t in mine]), strict=True):
            assert a.response_ids.tolist() == b.response_ids.tolist() and a.episode == b.episode
            assert b.versions[0] == 3 and b.versions[-1] == 4
