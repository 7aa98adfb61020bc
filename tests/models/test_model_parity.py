"""Logits against transformers on torch, float32, for every family and every field of the config."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_oracle import (
    TOLERANCE,
    agree,
    hf_logits,
    hf_model,
    our_logits,
    our_model,
    random_tokens,
    raw_config,
    state_dict,
    torch,
)
from transformers import LlamaConfig, MinistralConfig, MinistralForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from jaxrl_kernels.linear_logprob.api import linear_logprob
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.models.attention import rope_tables

SCALED = {"rope_theta": 100.0, "max_position_embeddings": 32}
LONG = 48  # three times the original length of the scaled RoPEs below
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@functools.cache
def base_logits(family: str) -> np.ndarray:
    return agree(raw_config(family), random_tokens())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_family(family):
    assert np.abs(base_logits(family)).max() > 1  # else agreement would say little


def test_families_differ():
    """Biases and QK-norm come with the family."""
    for one, other in [("llama", "qwen2"), ("llama", "qwen3"), ("qwen2", "qwen3")]:
        assert np.abs(base_logits(one) - base_logits(other)).max() > 0.05


COMBINED = {
    "qwen3": (
        {"rope_theta": 100.0}, {"rms_norm_eps": 0.1}, {"hidden_act": "gelu"}, {"tie_word_embeddings": True},
        {"attention_bias": True}, {"head_dim": 8}, {"num_key_value_heads": 1}, {"num_attention_heads": 6},
        {"num_hidden_layers": 3},
    ),
    "llama": (
        {"rope_theta": 500_000.0}, {"hidden_act": "gelu_pytorch_tanh"}, {"attention_bias": True},
        {"mlp_bias": True}, {"head_dim": 24}, {"intermediate_size": 40},
    ),
    "mistral": ({"sliding_window": 1},),
    "mistral, 5": ({"sliding_window": 5},),
    "qwen2": (
        {"num_key_value_heads": 4}, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3, all windows": ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},),
    "qwen3, layer types": (
        {
            "use_sliding_window": True, "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}  # fmt: skip
"""Family -> changes of its config.json."""


@pytest.mark.parametrize("name", COMBINED)
def test_all_fields_together_agree_and_each_matters(name):
    """Each change alone changes transformers' logits: agreement under all of them shows that none is lost."""
    family = name.split(",")[0]
    base = hf_logits(hf_model(raw_config(family)), random_tokens())
    for change in COMBINED[name]:
        alone = hf_logits(hf_model(raw_config(family, **change)), random_tokens())
        assert np.abs(alone - base).max() > 10 * TOLERANCE, change
    agree(raw_config(family, **functools.reduce(lambda a, b: a | b, COMBINED[name])), random_tokens())


def test_windows_of_some_layers_of_mistral():
    """transformers' AutoModel takes a Mistral folder with `layer_types` for Ministral."""
    changes = {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
    raw = raw_config("mistral", **changes)
    windowed = hf_model(raw_config("mistral", sliding_window=5))
    model = MinistralForCausalLM(MinistralConfig(**raw, attn_implementation="eager")).eval()
    model.load_state_dict(windowed.state_dict())
    theirs = hf_logits(model, random_tokens())
    ours = np.asarray(our_logits(our_model(raw, state_dict(model)), random_tokens()))
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)
    assert np.abs(theirs - hf_logits(windowed, random_tokens())).max() > 1


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ({}, {"type": "linear", "factor": 2.0}),
        ({"rope_type": "linear", "factor": 2.0}, {"factor": 3.0}),
        ({}, {"rope_type": "dynamic", "factor": 2.0}),
        ({"rope_type": "dynamic", "factor": 2.0}, {"factor": 4.0}),
        ({}, YARN),
        (YARN, {"factor": 2.0}),
        (YARN, {"original_max_position_embeddings": 24}),
        (YARN, {"attention_factor": 1.5}),
        (YARN, {"beta_fast": 1.0}),
        (YARN, {"beta_slow": 0.5}),
        (YARN, {"mscale": 2.0, "mscale_all_dim": 0.7}),
        ({**YARN, "mscale": 2.0, "mscale_all_dim": 0.7}, {"mscale": 1.0}),
        ({**YARN, "mscale": 2.0, "mscale_all_dim": 0.7}, {"mscale_all_dim": 1.0}),
        (YARN, {"truncate": False}),
        ({}, LLAMA3),
        (LLAMA3, {"factor": 2.0}),
        (LLAMA3, {"low_freq_factor": 0.5}),
        (LLAMA3, {"high_freq_factor": 8.0}),
        (LLAMA3, {"original_max_position_embeddings": 32}),
    ],
    ids=lambda part: "-".join(f"{k}={v}" for k, v in part.items()) or "default",
)
def test_rope_scaling_in_both_spellings(base, change):
    """cos and sin of every position are those of transformers, and the change matters."""
    scaling = {**base, **change}
    old = raw_config("llama", rope_scaling=scaling, **SCALED)
    new = raw_config("llama", rope_parameters={"rope_theta": 100.0, **scaling}, **SCALED)
    del new["rope_theta"]
    assert read_config(new) == read_config(old)
    after = our_tables(scaling)
    config = LlamaConfig(**{key: value for key, value in new.items() if key != "model_type"})
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(LONG)[None])
    for table, expected in zip(after, theirs, strict=True):  # theirs repeats each half
        np.testing.assert_allclose(table, expected[0, :, : table.shape[1]].numpy(), atol=1e-5)
    assert np.abs(after - our_tables(base)).max() > 0.01


def our_tables(scaling: dict) -> np.ndarray:
    """cos and sin [2, LONG, head_dim / 2] of a Llama with this `rope_scaling`."""
    config = read_config(raw_config("llama", rope_scaling=scaling or None, **SCALED))
    positions, lengths = jnp.arange(LONG)[None], jnp.full((1, LONG), LONG)
    return np.concatenate(rope_tables(config, positions, lengths)[:2])


@pytest.mark.parametrize(
    "scaling",
    [{**YARN, "mscale": 2.0, "mscale_all_dim": 0.7}, LLAMA3, {"rope_type": "dynamic", "factor": 2.0}],
    ids=lambda scaling: scaling["rope_type"],
)
def test_models_with_scaled_rope_agree(scaling):
    """On rows longer than the original length; theta counts too, which a peer ignored."""
    logits = [
        agree(raw_config("llama", rope_scaling=scaling, **SCALED | change), random_tokens(length=LONG))
        for change in ({}, {"rope_theta": 1e6})[: 2 if scaling is LLAMA3 else 1]
    ]
    assert scaling is not LLAMA3 or np.abs(logits[0] - logits[1]).max() > 0.1


def test_mscale_alone_counts_for_nothing():
    np.testing.assert_array_equal(our_tables({**YARN, "mscale": 2.0}), our_tables(YARN))


def test_baichuan_is_a_llama_with_one_matrix_for_q_k_v():
    raw = raw_config("llama", num_key_value_heads=4, head_dim=8)
    model = hf_model(raw)
    tensors = state_dict(model)
    for i in range(2):
        at = f"model.layers.{i}.self_attn."
        rows = [tensors.pop(f"{at}{name}_proj.weight") for name in "qkv"]
        tensors[f"{at}W_pack.weight"] = np.concatenate(rows)
    ours = our_logits(our_model({**raw, "model_type": "baichuan"}, tensors), random_tokens())
    np.testing.assert_allclose(ours, hf_logits(model, random_tokens()), atol=TOLERANCE, rtol=0)


def test_attention_softcap_is_gemma2s(monkeypatch):
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
    from transformers.models.llama import modeling_llama

    uncapped = base_logits("llama")  # before the change below
    capped = functools.partial(eager_attention_forward, softcap=0.8)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", capped)
    raw = raw_config("llama", attn_logit_softcapping=0.8)
    logits = agree(raw, random_tokens())
    assert np.abs(logits - uncapped).max() > 10 * TOLERANCE


def test_logit_softcap_is_gemma2s():
    model, tokens = hf_model(raw_config("llama")), random_tokens()
    params = our_model(raw_config("llama", final_logit_softcapping=1.5), state_dict(model))
    assert params.config.logit_softcap == 1.5
    logits = torch.tensor(hf_logits(model, tokens))
    log_softmax = lambda logits: torch.log_softmax(logits, -1)[..., 7].numpy()
    capped = log_softmax(1.5 * torch.tanh(logits / 1.5))

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def ours(params, tokens):
        hidden = params(tokens, jnp.broadcast_to(jnp.arange(24), (2, 24)))
        targets = jnp.full(tokens.shape, 7)
        return linear_logprob(hidden, params.head, targets, softcap=params.config.logit_softcap)[0]

    np.testing.assert_allclose(ours(params, tokens), capped, atol=TOLERANCE, rtol=0)
    assert np.abs(log_softmax(logits) - capped).max() > 0.1


def test_bfloat16_stays_near_float32():
    raw = raw_config("qwen3")
    params = our_model(raw, state_dict(hf_model(raw)))
    exact, rough = (our_logits(params, random_tokens(), dtype) for dtype in (jnp.float32, jnp.bfloat16))
    assert np.isfinite(rough).all()
    error = np.abs(rough - exact)
    assert 0 < error.mean() < 0.02 * exact.std()
    assert error.max() < 0.15 * exact.std()


def test_an_impossible_config_json_is_refused():
    with pytest.raises(UserError, match=r"config.json: .*head_dim is 7: it must be even"):
        read_config(raw_config("llama", head_dim=7))
