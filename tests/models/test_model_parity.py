"""Logits against transformers on torch, float32, for every family and every field of the config."""

import dataclasses
import functools
import json

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

from jaxrl_kernels.linear_logprob.api import linear_logprob
from jaxrl_llm.hf.config import read_config

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


@functools.cache
def scaled_logits(scaling: str) -> np.ndarray:
    """Of a Llama with this `rope_scaling` (as JSON), on rows longer than its original length."""
    return agree(raw_config("llama", rope_scaling=json.loads(scaling), **SCALED), random_tokens(length=LONG))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_family(family):
    assert np.abs(base_logits(family)).max() > 1  # else agreement would say little


def test_families_differ():
    """Biases and QK-norm come with the family."""
    for one, other in [("llama", "qwen2"), ("llama", "qwen3"), ("qwen2", "qwen3")]:
        assert np.abs(base_logits(one) - base_logits(other)).max() > 0.05


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3", {"rope_theta": 100.0}),
        ("llama", {"rope_theta": 500_000.0}),
        ("qwen3", {"rms_norm_eps": 0.1}),
        ("qwen3", {"hidden_act": "gelu"}),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("qwen3", {"head_dim": 8}),
        ("llama", {"head_dim": 24}),
        ("qwen3", {"num_key_value_heads": 1}),
        ("qwen2", {"num_key_value_heads": 4}),
        ("qwen3", {"num_attention_heads": 6}),
        ("qwen3", {"num_hidden_layers": 3}),
        ("llama", {"intermediate_size": 40}),
        ("mistral", {"sliding_window": 1}),
        ("mistral", {"sliding_window": 5}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
    ],
    ids=str,
)
def test_changing_a_field_changes_both_alike(family, change):
    changed = agree(raw_config(family, **change), random_tokens())
    assert np.abs(changed - base_logits(family)).max() > 10 * TOLERANCE


def test_theta_is_not_ignored():
    """A peer's logits were the same for both."""
    small, large = (
        agree(raw_config("qwen3", rope_theta=t), random_tokens(length=LONG)) for t in (100.0, 1e6)
    )
    assert np.abs(small - large).max() > 0.1


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
    scaling = {**base, **change}
    before, after = scaled_logits(json.dumps(base or None)), scaled_logits(json.dumps(scaling))
    assert np.abs(after - before).max() > 10 * TOLERANCE

    new = raw_config("llama", rope_parameters={"rope_theta": 100.0, **scaling}, **SCALED)
    old = raw_config("llama", rope_scaling=scaling, **SCALED)
    del new["rope_theta"]
    assert read_config(new) == read_config(old)
    theirs = hf_logits(hf_model(new), random_tokens(length=LONG))
    np.testing.assert_allclose(after, theirs, atol=TOLERANCE, rtol=0)


def test_mscale_alone_counts_for_nothing():
    alone = scaled_logits(json.dumps({**YARN, "mscale": 2.0}))
    np.testing.assert_array_equal(alone, scaled_logits(json.dumps(YARN)))


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

    capped = functools.partial(eager_attention_forward, softcap=0.8)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", capped)
    raw = raw_config("llama", attn_logit_softcapping=0.8)
    logits = agree(raw, random_tokens())
    assert np.abs(logits - base_logits("llama")).max() > 10 * TOLERANCE


def test_logit_softcap_is_gemma2s():
    model = hf_model(raw_config("llama"))
    params = our_model(raw_config("llama", final_logit_softcapping=1.5), state_dict(model))
    assert params.config.logit_softcap == 1.5
    tokens = random_tokens()
    logits = torch.tensor(hf_logits(model, tokens))
    wanted = torch.log_softmax(1.5 * torch.tanh(logits / 1.5), -1)[..., 7].numpy()
    hidden = params(jnp.asarray(tokens), jnp.broadcast_to(jnp.arange(24), (2, 24)))
    targets = jnp.full(tokens.shape, 7)
    capped, _ = linear_logprob(hidden, params.head, targets, softcap=params.config.logit_softcap)
    np.testing.assert_allclose(capped, wanted, atol=TOLERANCE, rtol=0)
    plain, _ = linear_logprob(hidden, params.head, targets)
    assert np.abs(plain - wanted).max() > 0.1


def test_bfloat16_stays_near_float32():
    raw = raw_config("qwen3")
    params = our_model(raw, state_dict(hf_model(raw)))
    exact, rough = (our_logits(params, random_tokens(), dtype) for dtype in (jnp.float32, jnp.bfloat16))
    assert np.isfinite(rough).all()
    error = np.abs(rough - exact)
    assert 0 < error.mean() < 0.02 * exact.std()
    assert error.max() < 0.15 * exact.std()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads=4 is no multiple of num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 is odd, but RoPE rotates pairs"),
        ({"window_layers": (True,)}, "window_layers has 1 entries for num_layers=2"),
    ],
)
def test_impossible_config(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(read_config(raw_config("llama")), **change)
