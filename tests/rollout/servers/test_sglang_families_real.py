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
# With larger weights the rounding of float32 changes log-probs by more than 1e-5, in transformers too.
DELTA = {
    **{"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "initializer_range": 0.05},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
FAMILIES = {
    "gemma 3": {
        **{"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]},
        **{"sliding_window": 8, "sliding_window_pattern": 2},
    },
    "qwen3.5": DELTA,
    "qwen3.5, odd": {
        **{**DELTA, "linear_num_value_heads": 6, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3},
        **{"num_hidden_layers": 5, "full_attention_interval": 2, "tie_word_embeddings": False},
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_and_log_probs_are_those_of_the_native_engine(family, tmp_path):
    config = read_config({**SMALL, **FAMILIES[family]})
    assert_like_native(config, tmp_path, requests())
