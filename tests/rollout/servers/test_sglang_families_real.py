"""More families on a real SGLang server on a CPU: text and log-probs."""

import numpy as np
import pytest
from random_weights import random_params
from real_sglang import NEEDED, engine_on, started
from servers_shared import KEY, native
from test_sglang_real import requests

from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.transports.http_weights import HttpTransport
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.servers.kinds import KINDS

pytestmark = NEEDED
SMALL = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256},
    **{"initializer_range": 0.3, "tie_word_embeddings": True},
}
FAMILIES = {
    "gemma3_text": {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "sliding_window_pattern": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_and_log_probs_are_those_of_the_native_engine(family, tmp_path):
    config = read_config({**SMALL, **FAMILIES[family], "model_type": family})
    params, greedy = random_params(config), SamplingConfig(temperature=0.0)
    with started(tmp_path, 1, model=config) as launched:
        transport = HttpTransport(WeightSource(config, "float32", 20_000), KINDS["sglang"])
        engine = engine_on(launched.urls, transport, config)
        try:
            assert engine.publish(params, 1)["bridge/probe_mean_abs"] < 1e-5
            got = engine.generate(requests(), greedy, KEY)
        finally:
            engine.pool.close()
    for a, b in zip(got, native(params, greedy, requests(), config), strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
