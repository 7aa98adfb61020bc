"""More families on a real SGLang server on a CPU: text and log-probs."""

import pytest
from real_sglang import NEEDED, assert_like_native
from test_sglang_real import requests

from jaxrl_llm.hf.config import read_config

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
    assert_like_native(config, tmp_path, requests())
