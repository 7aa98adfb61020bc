"""Greedy generation by the rollout engine, token for token what transformers generates."""

import pytest
from hf_oracle import agree_in_greedy_text, hf_model, our_model, random_tokens, raw_config, state_dict

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    "raw",
    [
        raw_config("qwen3"),
        pytest.param(
            raw_config("qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1),
            marks=pytest.mark.slow,
        ),
        pytest.param(raw_config("mistral", sliding_window=4), marks=pytest.mark.slow),
        pytest.param(raw_config("llama", rope_scaling=LLAMA3), marks=pytest.mark.slow),
        pytest.param(
            raw_config("llama", rope_scaling={"rope_type": "dynamic", "factor": 4.0}), marks=pytest.mark.slow
        ),
    ],
    ids=["qwen3", "qwen2 window in one layer", "mistral window", "llama3 rope", "dynamic rope"],
)
def test_greedy_generation(raw):
    model = hf_model(raw)
    agree_in_greedy_text(model, our_model(raw, state_dict(model)), random_tokens(length=10), new=24)
