"""Mixtures of experts against transformers on torch: files in and out, logits, gradients, greedy text."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_oracle import agree_in_greedy_text, hf_logits, our_logits, random_tokens, torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from slow_cases import with_slow
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.hf.config import read_config, to_hf_config
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.hf.folder import read_headers
from jaxrl_llm.hf.load import load_params, read_slice
from jaxrl_llm.hf.names import adapter_tensors, tensor_rows
from jaxrl_llm.models import LoraConfig, abstract, named_leaves, shardings
from jaxrl_llm.models.lora import split_params, with_lora
from jaxrl_llm.recipe.checks import check_models
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.sharding.config import POLICY
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN

COMMON = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=64, tie_word_embeddings=False, num_experts_per_tok=2,
)  # fmt: skip
QWEN = dict(num_experts=6, moe_intermediate_size=24, intermediate_size=48)
GROUPED = dict(
    n_routed_experts=6, moe_intermediate_size=24, intermediate_size=48, first_k_dense_replace=1,
    routed_scaling_factor=1.5, n_group=3, topk_group=2,
)  # fmt: skip
LATENTS = dict(
    **GROUPED, num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
    head_dim=4,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, mscale=1.0, mscale_all_dim=0.8,
    original_max_position_embeddings=16, beta_fast=32, beta_slow=1,
)  # fmt: skip
DIRECT = dict(q_lora_rank=None, rope_interleave=False, attention_bias=True)
FAMILIES = {
    "deepseek_v3": (
        DeepseekV3Config, DeepseekV3ForCausalLM, {**LATENTS, "q_lora_rank": 20, "rope_parameters": YARN}
    ),
    "deepseek_v3 without q_lora_rank": (DeepseekV3Config, DeepseekV3ForCausalLM, {**LATENTS, **DIRECT}),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM, {**GROUPED, "attention_bias": True, "use_qk_norm": True}),
    "gpt_oss": (
        GptOssConfig, GptOssForCausalLM,
        {"num_local_experts": 6, "intermediate_size": 24, "sliding_window": 5, "swiglu_limit": 1.5},
    ),
    "mixtral": (
        MixtralConfig, MixtralForCausalLM, {"num_local_experts": 6, "intermediate_size": 24}
    ),
    "olmoe": (
        OlmoeConfig, OlmoeForCausalLM,
        {"num_experts": 6, "intermediate_size": 24, "head_dim": 8, "rms_norm_eps": 1e-5},
    ),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, {**QWEN, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {**QWEN, "norm_topk_prob": True}),
}  # fmt: skip


@functools.cache
def theirs(family):
    """Random weights: norms near 1, all else with a standard deviation of 0.3."""
    config_class, model_class, settings = FAMILIES[family]
    config = config_class(**{**COMMON, **settings})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            noise = 0.3 * torch.randn(weight.shape)
            if not name.endswith("inv_freq"):
                weight.copy_(1 + noise if name.endswith("norm.weight") else noise)
    return model


SLOW = {"deepseek_v3", "deepseek_v3 without q_lora_rank", "glm4_moe"}
QUICK_LOGITS = {"qwen3_moe", "deepseek_v3"}
quick_files = pytest.mark.parametrize(
    "loaded", with_slow(FAMILIES, FAMILIES.keys() - {"qwen3_moe", "gpt_oss"}), indirect=True
)


@pytest.fixture(scope="module", params=with_slow(FAMILIES, SLOW))
def loaded(request, tmp_path_factory):
    """(transformers' model, the folder of several files that it wrote, ours)."""
    folder = tmp_path_factory.mktemp("model")
    model = theirs(request.param)
    model.save_pretrained(folder, max_shard_size=40_000)
    return model, folder, load_params(folder, read_config(folder))


@pytest.fixture(scope="module")
def computed(loaded):
    """(our logits, the gradients of the sum of their squares by name), in one program."""

    def squares(params):
        logits = our_logits.__wrapped__(params, jnp.asarray(random_tokens()))
        return jnp.sum(logits**2), logits

    gradients, logits = jax.jit(jax.grad(squares, has_aux=True))(loaded[2])
    return logits, dict(named_leaves(gradients))


@pytest.mark.parametrize("loaded", with_slow(FAMILIES, FAMILIES.keys() - QUICK_LOGITS), indirect=True)
def test_logits(loaded, computed):
    expected = hf_logits(loaded[0], random_tokens())
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(computed[0], expected, atol=2e-4, rtol=0)


def stored_tensors(folder):
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@quick_files
def test_files_come_back_byte_for_byte(loaded, tmp_path):
    _, folder, params = loaded
    config = read_config(folder)
    save_model(params, config, tmp_path / "out", dtype="float32", max_shard_bytes=40_000)
    stored, written = stored_tensors(folder), stored_tensors(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert stored.keys() == written.keys()
    assert any(".experts.5." in name or name.endswith("experts.gate_up_proj_bias") for name in stored)
    for name, tensor in stored.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    assert read_config(tmp_path / "out") == config
    if config.moe.selection_bias:  # which stays float32 in files of bfloat16
        save_model(params, config, tmp_path / "narrow", dtype="bfloat16")
        narrow = safe_open(tmp_path / "narrow" / "model.safetensors", "np")
        name = "model.layers.1.mlp.gate.e_score_correction_bias"
        assert narrow.get_slice(name.replace("e_score_correction_bias", "weight")).get_dtype() == "BF16"
        np.testing.assert_array_equal(narrow.get_tensor(name), stored[name])


@quick_files
def test_fused_experts_of_transformers_5_are_read(loaded, tmp_path):
    """Files in which all experts of a layer are one tensor: the same weights, also in shards of a mesh."""
    model, _, params = loaded
    model.save_pretrained(tmp_path, save_original_format=False)
    stored, config = load_file(tmp_path / "model.safetensors"), read_config(tmp_path)
    assert "model.layers.1.mlp.experts.gate_up_proj" in stored
    assert not any(".experts.0." in name for name in stored)
    layout = shardings(config, make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2)), TRAIN)
    got = named_leaves(load_params(tmp_path, config, layout))
    for (name, whole), (_, sharded) in zip(named_leaves(params), got, strict=True):
        np.testing.assert_array_equal(sharded, whole, err_msg=name)


def test_fused_experts_of_another_shape_or_beside_single_ones_are_refused(tmp_path):
    model, file = theirs("qwen3_moe"), tmp_path / "model.safetensors"
    model.save_pretrained(tmp_path, save_original_format=False)
    config, name, stored = read_config(tmp_path), "model.layers.1.mlp.experts.down_proj", load_file(file)
    save_file(stored | {name: stored[name][:, :, :23].copy()}, file)
    with pytest.raises(UserError, match=r"6 missing.* 1 unexpected: .*experts\.down_proj \[6, 32, 23\]"):
        read_headers(tmp_path, config)
    save_file(stored | {"model.layers.1.mlp.experts.0.down_proj.weight": stored[name][0].copy()}, file)
    with pytest.raises(UserError, match=r"35 missing: .*; 4 unexpected: .*experts\.down_proj \[6, 32, 24\]"):
        read_headers(tmp_path, config)


def gradients_of(model, layer):
    """Our name -> gradient of transformers' model. Experts are fused; gpt-oss's alternate gate and up."""
    mlp = model.model.layers[layer].mlp
    down, both = mlp.experts.down_proj.grad.numpy(), mlp.experts.gate_up_proj.grad.numpy()
    if not hasattr(mlp, "router"):
        parts = {"expert_down": down, "expert_gate": both[:, :24], "expert_up": both[:, 24:]}
        experts = {name: part.transpose(0, 2, 1) for name, part in parts.items()}
        return {"router": mlp.gate.weight.grad.numpy().T, **experts, **latent_gradients(model, layer)}
    bias = mlp.experts.gate_up_proj_bias.grad.numpy()
    return {
        "router": mlp.router.weight.grad.numpy().T,
        "router_logit_bias": mlp.router.bias.grad.numpy(),
        "expert_down": down,
        "expert_down_bias": mlp.experts.down_proj_bias.grad.numpy(),
        "expert_gate": both[..., ::2],
        "expert_up": both[..., 1::2],
        "expert_gate_bias": bias[:, ::2],
        "expert_up_bias": bias[:, 1::2],
        "sinks": model.model.layers[layer].self_attn.sinks.grad.numpy(),
    }


def latent_gradients(model, layer):
    attention = model.model.layers[layer].self_attn
    if not hasattr(attention, "kv_b_proj"):
        return {}
    kv_b = attention.kv_b_proj.weight.grad.numpy().reshape(4, 14, 16).transpose(2, 0, 1)
    return {"kv_a": attention.kv_a_proj_with_mqa.weight.grad.numpy().T, "kv_b": kv_b}


@pytest.mark.parametrize(
    "loaded", with_slow(FAMILIES, FAMILIES.keys() - {"qwen2_moe", "gpt_oss"}), indirect=True
)
def test_gradients_of_router_and_experts(loaded, computed):
    """Of the sum of squared logits, through the router's weights and each expert; of sinks, too."""
    model = loaded[0]
    model.zero_grad()
    model(torch.tensor(random_tokens()), use_cache=False).logits.square().sum().backward()
    layer = 1 - loaded[2].config.moe.dense_layers
    for name, expected in gradients_of(model, 1).items():
        ours = np.asarray(computed[1][f"layers.{name}"][layer])
        np.testing.assert_allclose(ours, expected, atol=1e-3 * np.abs(expected).max(), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["ring", "paged"])
def test_greedy_text(loaded, cache):
    model, _, params = loaded
    agree_in_greedy_text(model, params, random_tokens(length=6), 10, cache=cache, page=8)


def test_weights_of_multi_token_prediction_are_skipped(tmp_path, capfd):
    """The layer after the last one, which config.json counts; a second one is unexpected."""
    raw = theirs("glm4_moe").config.to_dict()
    theirs("glm4_moe").save_pretrained(tmp_path)
    config, extra = read_config(tmp_path), {"model.layers.2.eh_proj.weight": np.ones((4, 4), np.float32)}
    save_file(extra, tmp_path / "model-2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {
        **dict.fromkeys(load_file(tmp_path / "model.safetensors"), "model.safetensors"),
        **dict.fromkeys(extra, "model-2.safetensors"),
    }}))  # fmt: skip
    assert raw["num_nextn_predict_layers"] == 1
    assert len(read_headers(tmp_path, config)) == len(load_file(tmp_path / "model.safetensors"))
    assert "1 weights of multi-token prediction are not used" in capfd.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_nextn_predict_layers": 0}))
    with pytest.raises(UserError, match=r"1 unexpected: model\.layers\.2\.eh_proj"):
        read_headers(tmp_path, config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported; supported: \"sigmoid\""),
        ({"topk_method": "greedy"}, "topk_method='greedy' is not supported; supported: \"noaux_tc\""),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported; supported: 1"),
        ({"n_group": 4}, "moe.groups is 4: it must divide 6 experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method='gptq' is not supported"),
        ({"first_k_dense_replace": 2}, "num_layers is 2: it must be above moe.dense_layers, 2"),
        ({"n_shared_experts": 0}, "n_shared_experts=0 must be"),
        ({"partial_rotary_factor": 0.2, "rope_parameters": None}, "16, of which partial_rotary 0.2 is 3: it"),
    ],
)
def test_what_grouped_routers_lack_is_refused_by_name(changes, message):
    raw = to_hf_config(read_config(theirs("glm4_moe").config.to_dict()))
    with pytest.raises(UserError, match=message):
        read_config({**raw, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported; supported: .*, 4"),
        ({"v_head_dim": 16}, "head_dim is 12: it must be at least mla.value_dim, 16"),
        ({"qk_rope_head_dim": 3}, "head_dim is 11: it must be even"),
        ({"kv_lora_rank": None}, "kv_lora_rank=None must be"),
    ],
)
def test_what_latent_attention_lacks_is_refused_by_name(changes, message):
    raw = to_hf_config(read_config(theirs("deepseek_v3").config.to_dict()))
    with pytest.raises(UserError, match=message):
        read_config({**raw, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported; supported: 1"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers=.0. is not supported"),
        ({"num_experts_per_tok": 7}, "moe.experts_per_token is 7: there are 6 experts"),
    ],
)
def test_what_the_decoder_lacks_is_refused_by_name(changes, message):
    raw = to_hf_config(read_config(theirs("qwen3_moe").config.to_dict()))
    with pytest.raises(UserError, match=message):
        read_config({**raw, **changes})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "olmoe", "clip_qkv": 8.0}, r"clip_qkv=8.0 is not supported; supported: null"),
        ({"model_type": "gpt_oss", "swiglu_limit": "7"}, r"swiglu_limit='7' must be a number"),
        (
            {"model_type": "mixtral", "router_jitter_noise": 0.01},
            r"router_jitter_noise=0.01 is not .*to 0\.0",
        ),
    ],
)
def test_families_refuse_what_they_lack(raw, message):
    with pytest.raises(UserError, match=message):
        read_config(raw)


def test_a_shard_of_interleaved_experts_is_read_alone(tmp_path):
    """Experts 2 and 3, inputs 8 to 19, hidden states 6 to 11 of gate and up, which alternate in the file."""
    model = theirs("gpt_oss")
    model.save_pretrained(tmp_path)
    stored = model.model.layers[1].mlp.experts.gate_up_proj.detach().numpy()
    config = read_config(tmp_path)
    for column, name in enumerate(("layers.expert_gate", "layers.expert_up")):
        (part,) = (part for part in tensor_rows(config)[name] if part.index == (1,))
        tensor = read_headers(tmp_path, config)[part.name]
        bounds = (2, 4), (8, 20), (6, 12)
        shard = read_slice(tensor, part, (6, 32, 24), bounds, dtype=np.dtype(np.float32))
        np.testing.assert_array_equal(shard, stored[2:4, 8:20, 12 + column : 24 : 2])


def test_gpt_oss_is_not_sent_to_servers():
    config = read_config(theirs("gpt_oss").config.to_dict())
    with pytest.raises(ConfigError, match=r"sinks \(gpt-oss\) are not sent to servers. Set it to native"):
        check_models(TrainConfig(rollout=RolloutConfig(engine="sglang")), {POLICY: config})


def test_adapters_of_gpt_oss_leave_sinks_and_experts_alone():
    config = with_lora(read_config(theirs("gpt_oss").config.to_dict()), LoraConfig(2, targets=("q_proj",)))
    trained = {name for name, x in named_leaves(split_params(abstract(config))[0]) if x is not None}
    assert trained == {"layers.q_lora_a", "layers.q_lora_b"}
    names = {tensor.name for tensor in adapter_tensors(config)}
    assert "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight" in names and len(names) == 4
