"""Real SGLang servers on a CPU, of the interpreter JAXRL_SGLANG_PYTHON (scripts/sglang_cpu/install.sh)."""

import contextlib
import os

import numpy as np
import pytest
from random_weights import random_params
from servers_shared import KEY, TOKENIZER, engine_for, native

from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.transports.http_weights import HttpTransport
from jaxrl_llm.hf.export import save_description
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig, ServersConfig
from jaxrl_llm.rollout.servers.kinds import KINDS
from jaxrl_llm.rollout.servers.launch import ServerProcesses

PYTHON = os.environ.get("JAXRL_SGLANG_PYTHON", "")
NEEDED = pytest.mark.skipif(not PYTHON, reason="JAXRL_SGLANG_PYTHON names no interpreter with SGLang")
FLAGS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --max-total-tokens 4096 "
    "--disable-overlap-schedule"
)
MODEL = TransformerConfig(
    vocab_size=128, hidden_size=64, mlp_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    initializer_range=0.3, max_position=256,
)  # fmt: skip
CONFIG = RolloutConfig(engine="sglang", launch=2, slots=8)


@contextlib.contextmanager
def started(folder, servers=2, flags=FLAGS, more_flags=(), *, model=MODEL, **settings):
    """Start servers that reply; they end with the block. `flags` override `more_flags`."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGLANG_USE_CPU_ENGINE", "1")
        shell = save_description(model, folder / "shell", TOKENIZER, "float32")
        config = RolloutConfig(engine="sglang", launch=servers, slots=CONFIG.slots)
        launched = ServerProcesses(
            config, ServersConfig(python=PYTHON, flags=flags, **settings), shell, folder, flags=more_flags
        )
        try:
            launched.wait()
            yield launched
        finally:
            launched.close()


def engine_on(urls, transport, model=MODEL, **settings):
    """An engine that uses these servers, with a pool of its own."""
    return engine_for(
        urls, transport, model, CONFIG.slots, rollout=CONFIG, python=PYTHON, flags=FLAGS, **settings
    )


def assert_like_native(config, folder, asked, *, routes=False):
    """Assert that a server gives the greedy text, the log-probs and the routes of the native engine."""
    params, greedy = random_params(config), SamplingConfig(temperature=0.0)
    flags = ("--enable-return-routed-experts",) if routes else ()
    with started(folder, 1, model=config, more_flags=flags) as launched:
        transport = HttpTransport(WeightSource(config, "float32", 20_000), KINDS["sglang"])
        engine = engine_on(launched.urls, transport, config, routes=routes)
        try:
            assert engine.publish(params, 1)["bridge/probe_mean_abs"] < 1e-5
            got = engine.generate(asked, greedy, KEY)
        finally:
            engine.pool.close()
    for a, b in zip(got, native(params, greedy, asked, config), strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        if routes:
            np.testing.assert_array_equal(a.routes, b.routes)
