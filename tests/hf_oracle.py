"""Tiny Hugging Face models with fixed random weights, and ours with the same weights."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hf_tensors import params_from_tensors  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from jaxrl_llm import models  # noqa: E402
from jaxrl_llm.hf.config import read_config  # noqa: E402
from jaxrl_llm.rollout.config import SamplingConfig  # noqa: E402
from jaxrl_llm.rollout.engine import Request  # noqa: E402
from jaxrl_llm.rollout.native.engine import NativeEngine, RolloutConfig  # noqa: E402
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh  # noqa: E402

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
TOLERANCE = 2e-4


def raw_config(family: str, **changes) -> dict:
    """The config.json of a tiny model, in transformers 4 spelling, with some keys changed."""
    raw = {
        "model_type": family,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "sliding_window": None,
    }
    return {**raw, **changes}


def hf_model(raw: dict):
    """Eager float32 model. Each weight depends on its name and shape only, so two models differ by config."""
    config_class, model_class = FAMILIES[raw["model_type"]]
    config = config_class(**copy.deepcopy({k: v for k, v in raw.items() if k != "model_type"}))
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            noise = torch.randn(weight.shape, generator=generator)
            is_norm = name.endswith("norm.weight")
            weight.copy_(1 + 0.3 * noise if is_norm else 0.3 * noise)
    return model


def state_dict(model) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def our_model(raw: dict, tensors: dict[str, np.ndarray]) -> models.Transformer:
    return params_from_tensors(read_config(raw), tensors)


def hf_logits(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens), use_cache=False).logits.numpy()


@functools.partial(jax.jit, static_argnames="dtype", compiler_options={"xla_backend_optimization_level": 0})
def our_logits(params: models.Transformer, tokens: np.ndarray, dtype=jnp.float32) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = params(tokens, positions, dtype=dtype)
    return soft_capped(params, (hidden @ params.head.astype(dtype).T).astype(jnp.float32))


def soft_capped(params: models.Transformer, logits: jax.Array) -> jax.Array:
    cap = params.config.logit_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def agree_in_greedy_text(model, params: models.Transformer, prompts: np.ndarray, new: int, **rollout) -> None:
    """Assert that our engine generates the tokens that transformers does."""
    settings = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        theirs = model.generate(torch.tensor(prompts), **settings).numpy()[:, prompts.shape[1] :]
    rollout = RolloutConfig(slots=len(prompts), chunk=new // 2, **rollout)
    engine = NativeEngine(rollout, params.config, make_mesh(MeshConfig(), jax.devices()[:1]))
    engine.publish(params, version=0)
    requests = [Request(ids, i, 1, new) for i, ids in enumerate(prompts.astype(np.int32))]
    trajectories = engine.generate(requests, SamplingConfig(temperature=0.0), jax.random.key(0))
    np.testing.assert_array_equal([t.response_ids for t in trajectories], theirs)
    assert len(np.unique(theirs)) > 5  # not one token over and over


def random_tokens(rows: int = 2, length: int = 24, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, (rows, length))


def agree(raw: dict, tokens: np.ndarray) -> np.ndarray:
    """Assert that both models give the same logits; returns ours."""
    model = hf_model(raw)
    theirs = hf_logits(model, tokens)
    ours = np.asarray(our_logits(our_model(raw, state_dict(model)), tokens))
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)
    return ours
