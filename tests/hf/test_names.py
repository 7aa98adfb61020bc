"""Names, layouts and config.json against transformers, and against numbers written out here."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from hf_tensors import params_from_tensors, tensors_of

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf import families
from jaxrl_llm.hf.config import read_config, to_hf_config
from jaxrl_llm.hf.expert_config import LATENT
from jaxrl_llm.hf.families import FAMILIES
from jaxrl_llm.hf.family_names import TABLE
from jaxrl_llm.hf.layouts import from_hf, to_hf
from jaxrl_llm.hf.names import adapter_tensors, hf_tensors, tensor_rows
from jaxrl_llm.models import LoraConfig, RopeConfig, TransformerConfig, abstract, init, named_leaves
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.flops import layer_weights
from jaxrl_llm.models.global_heads import GlobalHeads
from jaxrl_llm.models.lora import with_lora

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HF_CLASSES = {
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2_moe": transformers.Qwen2MoeConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "mixtral": transformers.MixtralConfig,
    "deepseek_v3": transformers.DeepseekV3Config,
    "glm4_moe": transformers.Glm4MoeConfig,
    "glm4_moe_lite": transformers.Glm4MoeLiteConfig,
    "minimax_m2": transformers.MiniMaxM2Config,
    "olmoe": transformers.OlmoeConfig,
    "gpt_oss": transformers.GptOssConfig,
    "gemma3_text": transformers.Gemma3TextConfig,
    "gemma4_text": transformers.Gemma4TextConfig,
    "olmo2": transformers.Olmo2Config,
    "olmo3": transformers.Olmo3Config,
    "seed_oss": transformers.SeedOssConfig,
    "exaone4": transformers.Exaone4Config,
    "hunyuan_v1_dense": transformers.HunYuanDenseV1Config,
    "smollm3": transformers.SmolLM3Config,
    "ministral3": transformers.Ministral3Config,
    "phi3": transformers.Phi3Config,
    "qwen3_5_text": transformers.Qwen3_5TextConfig,
    "qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig,
    "qwen3_next": transformers.Qwen3NextConfig,
    "olmo_hybrid": transformers.OlmoHybridConfig,
    "lfm2": transformers.Lfm2Config,
    "lfm2_moe": transformers.Lfm2MoeConfig,
    "mistral4": transformers.Mistral4Config,
    "deepseek_v32": transformers.DeepseekV32Config,
    "glm_moe_dsa": transformers.GlmMoeDsaConfig,
    "granite": transformers.GraniteConfig,
    "granitemoehybrid": transformers.GraniteMoeHybridConfig,
    "nemotron_h": transformers.NemotronHConfig,
}
LFM2 = ("lfm2", "lfm2_moe")
QWEN35 = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def tiny(family="qwen3", **extra):
    return {"model_type": family, **TINY, **extra}


# --- weights


@pytest.mark.parametrize(
    "family, extra",
    [
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"head_dim": 16}),
    ],
)
def test_names_and_shapes_are_those_of_transformers_and_bytes_survive(family, extra):
    torch = pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_config(HF_CLASSES[family](**TINY, **extra))
    for parameter in model.parameters():  # biases and norms too, or a swap would go unseen
        torch.nn.init.normal_(parameter)
    config = read_config(tiny(family, **extra))
    tensors = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    if config.tie_embeddings:
        del tensors["lm_head.weight"]
    assert {t.name: t.shape for t in hf_tensors(config)} == {n: v.shape for n, v in tensors.items()}
    back = tensors_of(config, params_from_tensors(config, tensors))
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)


def test_layouts_element_by_element():
    config = read_config(tiny())
    heads, kv, e, d = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
    params = init(config, jax.random.key(0))
    ours, theirs = dict(named_leaves(params)), tensors_of(config, params)
    q, k, o = (np.asarray(ours[f"layers.{name}"]) for name in "qko")
    layer = "model.layers.1."
    assert theirs[layer + "self_attn.q_proj.weight"].shape == (heads * e, d)
    assert theirs[layer + "self_attn.q_proj.weight"][2 * e + 5, 7] == q[1, 7, 2, 5]
    assert theirs[layer + "self_attn.k_proj.weight"].shape == (kv * e, d)
    assert theirs[layer + "self_attn.k_proj.weight"][1 * e + 5, 7] == k[1, 7, 1, 5]
    assert theirs[layer + "self_attn.o_proj.weight"][7, 2 * e + 5] == o[1, 2, 5, 7]
    assert theirs[layer + "mlp.down_proj.weight"][3, 40] == np.asarray(ours["layers.down"])[1, 40, 3]
    assert theirs["model.embed_tokens.weight"][63, 31] == np.asarray(ours["embed"])[63, 31]


@pytest.mark.parametrize("layout", sorted({layout for _, layout in TABLE.values()}))
def test_from_hf_undoes_to_hf(layout):
    shape = tuple(range(2, 2 + len(layout.split(" -> ")[0].split())))
    weight = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(from_hf(to_hf(weight, layout), layout, shape), weight)


def test_baichuan_packs_queries_keys_and_values_in_one_matrix():
    config = read_config(tiny("baichuan", max_position_embeddings=128))
    assert config.num_kv_heads == 4 and config.head_dim == 8
    params = init(config, jax.random.key(0))
    fused = tensors_of(config, params)
    plain = tensors_of(dataclasses.replace(config, family="llama"), params)
    packed = fused.pop("model.layers.1.self_attn.W_pack.weight")
    assert packed.shape == (96, 32)
    for i, name in enumerate("qkv"):
        part = plain.pop(f"model.layers.1.self_attn.{name}_proj.weight")
        np.testing.assert_array_equal(packed[32 * i : 32 * (i + 1)], part)
    assert [(p.start, p.rows) for p in tensor_rows(config)["layers.v"]] == [(64, 32), (64, 32)]
    fused["model.layers.1.self_attn.W_pack.weight"] = packed
    again = params_from_tensors(config, fused)
    for (name, a), (_, b) in zip(named_leaves(params), named_leaves(again), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize(
    ("types", "interval"), [("LLFLLF", 3), ("LFLFL", 2), ("FF", 1), ("FL", None), ("LLFLF", None)]
)
def test_files_of_qwen_have_the_interval_of_attention_that_sglang_reads(types, interval):
    """SGLang 0.5.23 has no default of it, and reads no `layer_types`."""
    names = {"L": "linear_attention", "F": "full_attention"}
    layers = {"num_hidden_layers": len(types), "layer_types": [names[letter] for letter in types]}
    config = read_config({"model_type": "qwen3_5_text", **TINY, **layers})
    assert to_hf_config(config).get("full_attention_interval") == interval


def test_leading_dense_layers_are_a_stack_of_their_own():
    """Layers 0 and 1 are dense_layers[0] and [1], layer 2 is layers[0]; adapters and FLOPs likewise."""
    moe = MoEConfig(4, 2, 8, dense_layers=2)
    c = TransformerConfig(vocab_size=64, hidden_size=32, mlp_size=48, num_layers=3, num_heads=4,
                          num_kv_heads=2, head_dim=8, moe=moe)  # fmt: skip
    parts = {tensor.name: tensor.parts for tensor in hf_tensors(c)}
    layer = "model.layers.{}."
    assert parts[layer.format(1) + "self_attn.q_proj.weight"] == (("dense_layers.q", (1,)),)
    assert parts[layer.format(2) + "self_attn.q_proj.weight"] == (("layers.q", (0,)),)
    assert parts[layer.format(1) + "mlp.up_proj.weight"] == (("dense_layers.up", (1,)),)
    assert parts[layer.format(2) + "mlp.experts.3.up_proj.weight"] == (("layers.expert_up", (0, 3)),)
    assert layer.format(2) + "mlp.up_proj.weight" not in parts
    shared = dataclasses.replace(c, family="glm4_moe", moe=dataclasses.replace(moe, shared_size=8))
    parts = {tensor.name: tensor.parts for tensor in hf_tensors(shared)}
    assert parts[layer.format(1) + "mlp.up_proj.weight"] == (("dense_layers.up", (1,)),)
    assert parts[layer.format(2) + "mlp.shared_experts.up_proj.weight"] == (("layers.up", (0,)),)
    adapted = adapter_tensors(with_lora(c, LoraConfig(rank=2, targets=("q_proj",))))
    assert [(tensor.name.split(".")[4], tensor.parts[0]) for tensor in adapted[::2]] == [
        ("0", ("dense_layers.q_lora_a", (0,))),
        ("1", ("dense_layers.q_lora_a", (1,))),
        ("2", ("layers.q_lora_a", (0,))),
    ]
    attention = 32 * 8 * (4 + 2 + 2 + 4)
    assert layer_weights(c) == 3 * attention + 2 * 32 * 3 * 48 + 32 * (3 * 2 * 8 + 4)


def test_deepseek_v3_has_671_billion_weights_of_which_a_token_passes_37():
    """The abstract of arXiv 2412.19437, which does not count the embedding among the latter."""
    c = read_config({"model_type": "deepseek_v3"})
    assert sum(math.prod(leaf.shape) for _, leaf in named_leaves(abstract(c))) == 671_026_419_200
    assert round((layer_weights(c) + c.vocab_size * c.hidden_size) / 1e9) == 37


def test_a_missing_tensor_is_named():
    config = read_config(tiny())
    tensors = tensors_of(config, init(config, jax.random.key(0)))
    del tensors["model.norm.weight"]
    with pytest.raises(KeyError, match=r"model\.norm\.weight"):
        params_from_tensors(config, tensors)


# --- config.json


@pytest.mark.parametrize("family", HF_CLASSES)
def test_absent_keys_mean_what_they_mean_to_transformers(family):
    extra = {"glm4_moe": {"head_dim": 128}}
    extra["granitemoehybrid"] = {"layer_types": ["mamba", "attention"] * 16}
    extra = extra.get(family, {})  # defaults that are odd or not supported
    config, theirs = read_config({"model_type": family, **extra}), HF_CLASSES[family](**extra)
    assert config == read_config(json.loads(json.dumps({"model_type": family, **theirs.to_dict()})))
    assert config.vocab_size == theirs.vocab_size
    assert config.hidden_size == theirs.hidden_size
    if family != "qwen3_5_moe_text":  # all its layers have experts
        own = {"lfm2": 8192, "granitemoehybrid": theirs.to_dict().get("shared_intermediate_size")}
        assert config.mlp_size == own.get(family, theirs.intermediate_size)  # of LFM2 2/3 of 12,288
    assert config.num_layers == theirs.num_hidden_layers
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.max_position == theirs.max_position_embeddings
    assert config.norm_eps == getattr(theirs, FAMILIES[family].norm_eps)
    own = {
        "mixtral": RopeConfig(1e6),
        "minimax_m2": RopeConfig(5e6),
        "glm4_moe": RopeConfig(partial_rotary=0.5),
        "gpt_oss": RopeConfig(150_000.0, "yarn", 32.0, original_max_position=4096, truncate=False),
        **dict.fromkeys(("gemma3_text", *LFM2), RopeConfig(1e6)),
        "gemma4_text": RopeConfig(1e6, "proportional", partial_rotary=0.25),
        **dict.fromkeys(QWEN35, RopeConfig(partial_rotary=0.25)),
        "olmo3": RopeConfig(5e5),
        "smollm3": RopeConfig(2e6),
        "ministral3": RopeConfig(
            1e6, "yarn", 16.0, original_max_position=16_384, mscale=1.0, mscale_all_dim=1.0, query_growth=0.1
        ),
    }
    own["mistral4"] = dataclasses.replace(
        own["ministral3"], theta=1e4, factor=128.0, original_max_position=8192
    )
    assert config.rope == own.get(family, RopeConfig())
    own = {"gemma3_text": RopeConfig(1e4), "gemma4_text": RopeConfig(1e4), "olmo3": RopeConfig(5e5)}
    assert config.local_rope == own.get(family)
    own = dict.fromkeys(("qwen3", "glm4_moe", "minimax_m2", "nemotron_h", "seed_oss"), 128)
    own |= {"gpt_oss": 64, "deepseek_v3": 192, "deepseek_v32": 192}
    own |= dict.fromkeys(("gemma3_text", "gemma4_text", "glm4_moe_lite", "glm_moe_dsa", *QWEN35), 256)
    assert config.head_dim == own.get(family, theirs.hidden_size // theirs.num_attention_heads)
    own = dict(mistral=4096, gpt_oss=128, gemma3_text=4096, gemma4_text=512, olmo3=4096, exaone4=4096)
    assert config.sliding_window == own.get(family)
    assert config.global_heads == {"gemma4_text": GlobalHeads(4, 512)}.get(family)
    assert config.tie_embeddings == (family in ("gemma3_text", "gemma4_text", "smollm3", *LFM2))


def test_every_family_of_transformers_is_compared_with_its_class_and_counted():
    assert HF_CLASSES.keys() == FAMILIES.keys() - {"baichuan", "qwen"}
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"float32 logits of {len(HF_CLASSES)} families beside transformers" in readme


def test_an_absent_key_is_named_if_transformers_lacks_the_class(monkeypatch):
    """A transformers older than the family; files with all keys are read without any class."""
    monkeypatch.setattr(families, "_class_defaults", lambda family: {})
    with pytest.raises(UserError, match="vocab_size=None must be a whole number"):
        read_config({"model_type": "qwen3"})
    whole = to_hf_config(TransformerConfig())
    assert read_config(whole) == TransformerConfig()


@pytest.mark.parametrize(
    "family, extra, expected",
    [
        ("qwen2", {}, (True, False, False, False)),
        ("qwen2", {"attention_bias": False}, (True, False, False, False)),
        ("qwen3", {}, (False, False, False, True)),
        ("qwen3", {"attention_bias": True}, (True, True, False, True)),
        ("llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("mistral", {"attention_bias": True, "mlp_bias": True}, (False, False, False, False)),
        ("seed_oss", {}, (True, False, False, False)),
        ("seed_oss", {"attention_bias": False, "attention_out_bias": True}, (False, True, False, False)),
    ],
)
def test_biases_and_qk_norm_of_each_family(family, extra, expected):
    config = read_config(tiny(family, **extra))
    assert (config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm) == expected


@pytest.mark.parametrize(
    "old, new, rope",
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}, RopeConfig(5e5)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            RopeConfig(1e4, "linear", 2.0),
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
            {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e6},
            RopeConfig(1e6, "dynamic", 3.0),
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": YARN},
            {**YARN, "rope_theta": 1e6},
            RopeConfig(1e6, "yarn", 4.0, original_max_position=512, beta_fast=16.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {**LLAMA3, "rope_theta": 5e5},
            RopeConfig(5e5, "llama3", 8.0, original_max_position=512),
        ),
    ],
)
def test_both_spellings_of_rope_say_the_same(old, new, rope):
    assert read_config(tiny("llama", **old)).rope == rope
    assert read_config(tiny("llama", rope_parameters=new)).rope == rope
    # transformers reads what we write as it reads the original
    written = to_hf_config(read_config(tiny("llama", **old)))
    assert transformers.LlamaConfig(**written).rope_parameters["rope_theta"] == rope.theta
    theirs = transformers.LlamaConfig(**TINY, max_position_embeddings=2048, rope_parameters=dict(new))
    spoken = transformers.LlamaConfig(**written).rope_parameters
    assert {key: spoken[key] for key in theirs.rope_parameters} == theirs.rope_parameters
    # and a reader of transformers 4 finds its own spelling
    assert written["rope_theta"] == rope.theta
    assert (written["rope_scaling"] or {}).get("type", "default") == rope.scaling
    assert (written["rope_scaling"] or {}).get("rope_type", "default") == rope.scaling


def test_alpha_of_hunyuan_stretches_the_base():
    """By alpha to the power of head_dim / (head_dim - 2), here 2."""
    scaling = {"type": "dynamic", "alpha": 10.0, "factor": 1.0}
    config = read_config(tiny("hunyuan_v1_dense", head_dim=4, rope_theta=1e4, rope_scaling=scaling))
    assert config.rope == RopeConfig(1e6)
    config = read_config(tiny("hunyuan_v1_dense", rope_scaling={"type": "dynamic", "factor": 2.0}))
    assert config.rope == RopeConfig(1e4, "dynamic", 2.0)


def test_yarn_and_llama3_fall_back_to_the_length_of_the_model():
    rope = {"rope_type": "yarn", "factor": 2.0}
    assert read_config(tiny(max_position_embeddings=300, rope_scaling=rope)).rope.original_max_position == 300
    top = {"original_max_position_embeddings": 200}
    assert read_config(tiny(rope_scaling=YARN, **top)).rope.original_max_position == 200


def test_one_base_of_olmo3_is_that_of_all_layers():
    """As in transformers 4; transformers 5.24 gives it to the layers without a window alone."""
    config = read_config({"model_type": "olmo3", "rope_theta": 1e6})
    assert (config.rope.theta, config.local_rope.theta) == (1e6, 1e6)


CASES = [
    *[
        (family, {})
        for family in FAMILIES
        if family
        not in (
            *("baichuan", "qwen", "gemma4_text", "lfm2_moe", "nemotron_h", "granitemoehybrid", *LATENT),
            *QWEN35,
        )
    ],
    *[(family, {"num_hidden_layers": 4}) for family in QWEN35],
    ("lfm2", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 4, "conv_bias": True}),
    ("nemotron_h", {"layers_block_type": ["mamba", "attention", "moe", "mlp"], "num_hidden_layers": 4}),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4}),
    ("granitemoehybrid", {"layer_types": ["attention"] * 2, "num_local_experts": 0}),
    (
        "phi3",
        {
            **{"partial_rotary_factor": 0.5, "original_max_position_embeddings": 512},
            "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 9.0]},
        },
    ),
    ("mistral4", {"num_key_value_heads": 4}),
    ("lfm2_moe", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    ("gemma4_text", {"hidden_size_per_layer_input": 0}),
    ("glm4_moe_lite", {"num_key_value_heads": 4}),
    ("deepseek_v32", {"num_key_value_heads": 4, "first_k_dense_replace": 1, "index_topk": 5}),
    (
        "glm_moe_dsa",
        {"num_key_value_heads": 4, "first_k_dense_replace": 1, "indexer_types": ["full", "shared"]},
    ),
    ("deepseek_v3", {"num_key_value_heads": 4, "first_k_dense_replace": 1}),
    (
        "deepseek_v3",
        {
            **{"num_key_value_heads": 4, "first_k_dense_replace": 0, "q_lora_rank": None},
            **{"rope_interleave": False, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5}},
        },
    ),
    ("baichuan", {"max_position_embeddings": 4096, "num_key_value_heads": 4}),
    ("baichuan", {"max_position_embeddings": 4096, "vocab_size": 125_696}),
    ("baichuan", {"model_max_length": 4096, "z_loss_weight": 0}),
    ("qwen", {"seq_length": 2048, "kv_channels": 8, "rotary_emb_base": 5e4, "no_bias": True}),
    ("qwen3", {"attention_bias": True, "rope_scaling": YARN, "rope_theta": 1e6, "hidden_act": "gelu"}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("llama", {"rope_scaling": LLAMA3, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    ("mistral", {"sliding_window": None, "head_dim": 16, "initializer_range": 0.01}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("exaone4", {"sliding_window": None}),
    ("exaone4", {"layer_types": ["full_attention"] * 2}),
    ("exaone4", {"layer_types": ["full_attention", "sliding_attention"], "rope_scaling": LLAMA3}),
    ("llama", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
]


@pytest.mark.parametrize("family, extra", CASES)
def test_what_is_written_reads_back_here_and_in_transformers(family, extra, caplog):
    config = read_config(tiny(family, **extra))
    raw = json.loads(json.dumps(to_hf_config(config, "float16")))
    assert read_config(raw) == config
    assert raw["dtype"] == raw["torch_dtype"] == "float16"
    spellings = {4: ("rope_theta", "rope_scaling", "torch_dtype"), 5: ("rope_parameters", "dtype")}
    for version, keys in spellings.items():  # each alone says all that the other does
        other = {key for keys_of in (spellings.keys() - {version}) for key in spellings[keys_of]}
        assert keys and read_config({k: v for k, v in raw.items() if k not in other}) == config
    if family in ("baichuan", "qwen"):
        return
    theirs = HF_CLASSES[family](**{key: value for key, value in raw.items() if key != "model_type"})
    assert read_config(json.loads(json.dumps(theirs.to_dict() | {"model_type": family}))) == config
    assert theirs.architectures == [FAMILIES[family].architecture]
    assert hasattr(transformers, theirs.architectures[0])
    assert not caplog.records  # transformers found nothing to warn about


@pytest.mark.parametrize(
    "raw, message",
    [
        ({}, r"model_type=None is not supported; supported: qwen2, qwen3, qwen2_moe, "),
        (tiny("gpt2"), r"model_type='gpt2' is not supported"),
        (tiny("!"), r"model_type='!' is not .*lfm2_moe. To add one: \"A model family\" in CONTRIBUTING.md"),
        (
            tiny("exaone5", mlp_scale=2.0),
            r"exaone5' .* The nearest is exaone4, which does not read mlp_scale. To add one: \"A model fam",
        ),
        (
            tiny("qwen4", clip_qkv=None, n_gram_size=3, use_cache=True),
            r"qwen4' .* The nearest is qwen\d, which does not read n_gram_size. To add one: \"A model fam",
        ),
        (
            tiny("olmo31", clip_qkv=8.0),
            r"The nearest is olmo3, which refuses this file: clip_qkv=8.0 is not s",
        ),
        (tiny(hidden_act="relu"), r"hidden_act='relu' is not supported; supported: silu, swish, gelu"),
        (
            tiny(rope_scaling={"type": "ntk", "factor": 2.0}),
            r"config.json: type='ntk' .*: default, linear",
        ),
        (tiny(rope_scaling={"type": "linear"}), r"rope_type='linear' needs 'factor'"),
        (tiny(rope_scaling={"type": "llama3", "factor": 2.0}), r"needs 'low_freq_factor'"),
        (tiny(rope_parameters={"full_attention": {"rope_type": "default"}}), r"not one a layer type"),
        (tiny(partial_rotary_factor=0.5), r"partial_rotary_factor=0.5 is not supported"),
        (tiny(quantization_config={"bits": 4}), r"quantization_config.quant_method=None is not supported"),
        (tiny(is_causal=False), r"is_causal=False is not supported; supported: true"),
        (tiny(per_layer_config={"0": {"hidden_act": "gelu"}}), r"per_layer_config=.* is not supported"),
        (
            tiny(sliding_window=8, layer_types=["full_attention", "sliding_attention"]),
            r"layer_types=.* need use_sliding_window: true",
        ),
        (
            tiny("mistral", sliding_window=None, layer_types=["full_attention", "sliding_attention"]),
            r"layer_types=.* need sliding_window, their size",
        ),
        (tiny(hidden_size="32"), r"hidden_size='32' must be a whole number from 1 to 1,000,000"),
        (tiny(num_hidden_layers=0), r"num_hidden_layers=0 must be"),
        (tiny(num_key_value_heads=3), r"config.json: .*num_kv_heads is 3: it must divide num_heads, 4"),
        (tiny(use_sliding_window=True, layer_types=["full_attention"]), r"layer_types has 1 entries for 2"),
        (
            tiny(use_sliding_window=True, layer_types=["chunked_attention"] * 2),
            r"layer_types=\['chunked_attention', .* must be a list of full_att",
        ),
        (tiny("baichuan"), r"model_max_length=None must be a whole number"),
        (tiny("qwen", max_position_embeddings=64), r"seq_length=None must be a whole number"),
        (tiny("qwen", seq_length=64, no_bias=False), r"no_bias=False is not supported; supported: true"),
        (
            tiny("qwen", seq_length=64, kv_channels=16),
            r"kv_channels=16 must be hidden_size / num_att",
        ),
        (tiny("qwen", seq_length=64, intermediate_size=47), r"intermediate_size=47 must be even"),
        (tiny("granitemoehybrid", num_hidden_layers=10**10), r"num_hidden_layers=10000000000 must be"),
        (tiny("phi3", rope_scaling=LONG | {"long_factor": [10**400] * 4}), r"long_factor=.* at most 1e6"),
        (
            tiny("phi3", rope_scaling=LONG, original_max_position_embeddings=1),
            r"original_max_position_embeddings=1 must be at least 2",
        ),
    ],
)
def test_what_the_decoder_lacks_is_refused_by_name(raw, message):
    with pytest.raises(ValueError, match=message):
        read_config(raw)


def test_config_files_that_are_missing_or_broken(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"must hold a JSON object, not list"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny()))
    assert read_config(tmp_path).num_layers == 2


@pytest.mark.parametrize(
    "family, change, message",
    [
        ("mistral", {"qkv_bias": True}, r"a mistral config.json cannot express qkv_bias=True \(would read"),
        ("llama", {"qkv_bias": True, "out_bias": False}, r"cannot express out_bias=False"),
        ("llama", {"sliding_window": 8}, r"cannot express sliding_window=8"),
        ("qwen2", {"qk_norm": True}, r"cannot express qk_norm=True"),
    ],
)  # fmt: skip
def test_what_a_family_cannot_express_is_not_dropped_silently(family, change, message):
    config = dataclasses.replace(read_config(tiny(family)), **change)
    with pytest.raises(ValueError, match=message):
        to_hf_config(config)


def test_settings_without_effect_do_not_stop_an_export():
    config = TransformerConfig(
        num_layers=2, sliding_window=8, window_layers=(True, True), rope=RopeConfig(1e6, factor=3.0)
    )
    assert read_config(to_hf_config(config)) == dataclasses.replace(
        config, window_layers=None, rope=RopeConfig(1e6)
    )
