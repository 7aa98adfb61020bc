"""Greedy generation through the cache, token for token what transformers generates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_oracle import hf_model, our_model, random_tokens, raw_config, state_dict, torch

from jaxrl_llm import models

PROMPT, NEW = 10, 24


@pytest.mark.parametrize(
    "raw",
    [
        raw_config("qwen3"),
        raw_config("qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1),
        raw_config("mistral", sliding_window=4),
        raw_config("llama", rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 16}),
        raw_config("llama", rope_scaling={"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=16),
    ],
    ids=["qwen3", "qwen2 window in one layer", "mistral window", "llama3 rope", "dynamic rope"],
)  # fmt: skip
def test_greedy_generation(raw):
    model, prompt = hf_model(raw), random_tokens(length=PROMPT)
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        theirs = model.generate(torch.tensor(prompt), **settings).numpy()
    ours = generate(our_model(raw, state_dict(model)), prompt)
    np.testing.assert_array_equal(ours, theirs)
    assert len(np.unique(theirs[:, PROMPT:])) > 5  # not one token over and over


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def generate(params, prompt):
    """[B, PROMPT] -> [B, PROMPT + NEW]: the prompt in one call, then a token a call."""

    def step(carry, position):
        tokens, cache = carry
        hidden, cache = params(tokens, jnp.full((2, 1), position), cache=cache)
        tokens = jnp.argmax(hidden[:, -1:] @ params.head.T, axis=-1)
        return (tokens, cache), tokens[:, 0]

    cache = models.empty_cache(params.config, 2, PROMPT + NEW)
    hidden, cache = params(prompt, jnp.broadcast_to(jnp.arange(PROMPT), (2, PROMPT)), cache=cache)
    first = jnp.argmax(hidden[:, -1:] @ params.head.T, axis=-1)
    _, rest = jax.lax.scan(step, (first, cache), jnp.arange(PROMPT, PROMPT + NEW - 1))
    return jnp.concatenate([prompt, first, rest.T], axis=1)
