"""Greedy generation by the rollout engine, token for token what transformers generates."""

import jax
import numpy as np
import pytest
from hf_oracle import hf_model, our_model, random_tokens, raw_config, state_dict, torch

from jaxrl_llm.rollout.engine import Request, SamplingConfig
from jaxrl_llm.rollout.native.engine import NativeEngine, RolloutConfig
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh

PROMPT, NEW = 10, 24
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
        raw_config("llama", rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
    ],
    ids=["qwen3", "qwen2 window in one layer", "mistral window", "llama3 rope", "dynamic rope"],
)
def test_greedy_generation(raw):
    model, prompts = hf_model(raw), random_tokens(length=PROMPT).astype(np.int32)
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        theirs = model.generate(torch.tensor(prompts, dtype=torch.long), **settings).numpy()[:, PROMPT:]
    params = our_model(raw, state_dict(model))
    engine = NativeEngine(
        RolloutConfig(slots=2, chunk=10), params.config, make_mesh(MeshConfig(), jax.devices()[:1])
    )
    engine.publish(params, version=0)
    requests = [Request(ids, i, 1, NEW) for i, ids in enumerate(prompts)]
    trajectories = engine.generate(requests, SamplingConfig(temperature=0.0), jax.random.key(0))
    np.testing.assert_array_equal([t.response_ids for t in trajectories], theirs)
    assert len(np.unique(theirs)) > 5  # not one token over and over
