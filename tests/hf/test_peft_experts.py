"""Adapters of experts: peft on transformers' Qwen3-MoE, DeepSeek-V3 and gpt-oss, files of every family."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_oracle import agree_in_greedy_text, hf_logits, our_logits, random_tokens, torch
from lora_models import merged, replace_weights, with_random_adapters, with_stored_adapters
from safetensors.numpy import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.names import adapter_tensors, hf_tensors
from jaxrl_llm.hf.peft import load_adapter, save_adapter, unread_by_peft
from jaxrl_llm.hf.peft_config import peft_config, read_adapter_config
from jaxrl_llm.models import LoraConfig, TransformerConfig, init, named_leaves
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.lora import with_lora
from jaxrl_llm.models.lora_config import MLP, linear_layers
from jaxrl_llm.models.mixer_config import MLAConfig

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # transformers'
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),  # peft's own
]

MLP_NAMES = ("gate_proj", "up_proj", "down_proj")
LORA = LoraConfig(rank=4, alpha=6.0)  # of experts: 4 / 2
COMMON = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
    tie_word_embeddings=False, num_experts_per_tok=2, moe_intermediate_size=24, intermediate_size=48,
    attn_implementation="eager", experts_implementation="eager",
)  # fmt: skip
LATENT = dict(
    num_key_value_heads=4, n_routed_experts=6, first_k_dense_replace=1, routed_scaling_factor=1.5, n_group=3,
    topk_group=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, head_dim=4,
)  # fmt: skip
MODELS = {
    "qwen3_moe": Qwen3MoeConfig(
        **COMMON, num_key_value_heads=2, head_dim=16, num_experts=6, norm_topk_prob=True
    ),
    "deepseek_v3": DeepseekV3Config(**COMMON, **LATENT, q_lora_rank=20),
    "deepseek_v3 without q_lora_rank": DeepseekV3Config(
        **COMMON, **LATENT, q_lora_rank=None, rope_interleave=False, attention_bias=True
    ),
    "gpt_oss": GptOssConfig(
        **COMMON | {"intermediate_size": 24}, num_key_value_heads=2, head_dim=16, num_local_experts=6,
        sliding_window=5, swiglu_limit=1.5, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def base(request, tmp_path_factory):
    """(folder, our model) of random weights: two layers, six experts, two of each token.

    The first layer of DeepSeek-V3 is dense, the second one has a shared expert.
    """
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[request.param])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.ones_like(weight) if "norm" in name else 0.3 * torch.randn(weight.shape))
    model.save_pretrained(folder)
    return folder, load_params(folder, read_config(folder))


def torch_base(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def in_peft(base, adapter):
    return peft.PeftModel.from_pretrained(torch_base(base), adapter, is_trainable=True).eval()


def per_expert(tensors, interleaved=False, experts=6):
    """Return peft's tensors by their names in files. It fuses a layer's experts: A of down_proj is
    [experts * R, inputs], B [outputs, R * experts]; gate_up_proj has 2 R, of which B of gate reads the first
    R and B of up the others. Their outputs alternate in gpt-oss."""
    found = {}

    def split(x, parts, is_a):
        alternate = interleaved and not is_a
        return [x[..., i::parts, :] for i in range(parts)] if alternate else np.split(x, parts, axis=-2)

    for name, x in tensors.items():
        name, matrix, _ = name.replace(".default", "").rsplit(".", 2)
        layer, is_expert, inner = name.partition(".experts")
        if not is_expert:
            found[f"{name}.{matrix}.weight"] = x
            continue
        is_a, parts = matrix == "lora_A", {"down_proj": 0} if not inner else {"gate_proj": 0, "up_proj": 1}
        if is_a:
            stack = x.reshape(experts, -1, x.shape[1])
        else:
            stack = x.reshape(x.shape[0], -1, experts).transpose(2, 0, 1)
        for part, i in parts.items():
            one = split(stack, len(parts), is_a)[i]
            one = one if is_a else np.split(one, len(parts), axis=-1)[i]
            found |= {f"{layer}.experts.{e}.{part}.{matrix}.weight": one[e] for e in range(experts)}
    return found


@pytest.mark.slow
def test_logits_and_gradients_are_pefts(base, tmp_path):
    """Gradients of every A and B, of the sum of the log-probs of the tokens."""
    folder, params = base
    params, tokens = with_random_adapters(params, LORA), random_tokens(1, 12)
    save_adapter(params, tmp_path / "adapter", str(folder))
    model = in_peft(folder, tmp_path / "adapter")
    ours = np.asarray(our_logits(params, tokens))
    np.testing.assert_allclose(ours, hf_logits(model, tokens), atol=1e-4, rtol=0)
    assert np.abs(ours - our_logits(base[1], tokens)).max() > 0.1

    logits = model(torch.tensor(tokens), use_cache=False).logits.log_softmax(-1)
    logits[:, :-1].gather(-1, torch.tensor(tokens)[:, 1:, None]).sum().backward()
    theirs = {name: w.grad.numpy() for name, w in model.named_parameters() if w.grad is not None}

    def loss(values, tokens):
        logps = jax.nn.log_softmax(our_logits.__wrapped__(replace_weights(params, values), tokens))
        return jnp.take_along_axis(logps[:, :-1], tokens[:, 1:, None], -1).sum()

    adapters = {name: leaf for name, leaf in named_leaves(params) if "_lora_" in name}
    grads = jax.jit(jax.grad(loss))(adapters, jnp.asarray(tokens))
    save_adapter(replace_weights(params, grads), tmp_path / "gradients", str(folder))
    written = load_file(tmp_path / "gradients/adapter_model.safetensors")
    is_stacked = params.config.family == "gpt_oss"
    theirs = per_expert(theirs, is_stacked)
    written = per_expert(written, is_stacked) if is_stacked else written
    assert theirs.keys() == written.keys()
    factor = LORA.scale / LORA.scale_at(2)  # of B in the file, where they are no experts'
    for name, expected in theirs.items():
        in_file = ".lora_B." in name and ".experts." not in name
        expected = expected * factor**2 if in_file else expected
        assert np.linalg.norm(written[name] - expected) <= 3e-5 * np.linalg.norm(expected), name


@pytest.mark.slow
def test_rank_stabilized_adapters_have_our_logits(base, tmp_path):
    """Alpha / sqrt(R) of each matrix; of gate and up together, of rank 2 R, peft makes it sqrt(2) of that."""
    folder, params = base
    lora, tokens = dataclasses.replace(LORA, rank_stabilized=True), random_tokens(1, 12)
    params = with_random_adapters(params, lora)
    save_adapter(params, tmp_path, str(folder))
    ours = np.asarray(our_logits(params, tokens))
    np.testing.assert_allclose(ours, hf_logits(in_peft(folder, tmp_path), tokens), atol=1e-4, rtol=0)
    again = our_logits(with_stored_adapters(base[1], tmp_path), tokens)
    np.testing.assert_allclose(again, ours, atol=1e-5 * np.abs(ours).max())
    chosen = load_adapter(tmp_path, params.config)  # for a model with the settings of the run
    for name, x in named_leaves(params):
        np.testing.assert_allclose(chosen.get(name, x), x, rtol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"target_modules": []}], ids=str)
def test_adapters_of_parameters_from_peft_have_its_logits(tmp_path, settings):
    """In gpt-oss gate and up have one A; the copies of it that are trained here are written as two."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(MODELS["gpt_oss"])
    base.save_pretrained(tmp_path / "base")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    defaults = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear", "target_parameters": parameters}
    model = peft.get_peft_model(base, peft.LoraConfig(**defaults | settings))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.copy_(0.2 * torch.randn(weight.shape))
    model.eval().save_pretrained(tmp_path / "theirs")
    plain, tokens = load_params(tmp_path / "base", read_config(tmp_path / "base")), random_tokens()
    read = read_adapter_config(tmp_path / "theirs", plain.config)
    assert (read.rank, read.expert_rank) == (3, 3) and {f"{name}_proj" for name in MLP} <= {*read.adapted}
    ours = with_stored_adapters(plain, tmp_path / "theirs")
    expected = hf_logits(model, tokens)
    np.testing.assert_allclose(our_logits(ours, tokens), expected, atol=1e-4, rtol=0)
    save_adapter(ours, tmp_path / "ours", str(tmp_path / "base"))
    again = in_peft(tmp_path / "base", tmp_path / "ours")
    np.testing.assert_allclose(hf_logits(again, tokens), expected, atol=1e-4, rtol=0)


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MIXTRAL = MixtralConfig(**COMMON, num_key_value_heads=2, num_local_experts=6)


def checked_against_peft(tmp_path, config, settings):
    """Compare an adapter that peft made with what is read of it and exported again; return the config of the
    base and of the adapter."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in base.named_parameters():
            weight.copy_(torch.ones_like(weight) if "norm" in name else 0.3 * torch.randn(weight.shape))
    base.save_pretrained(tmp_path / "base")
    plain = load_params(tmp_path / "base", read_config(tmp_path / "base"))
    model = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.copy_(0.2 * torch.randn(weight.shape))
    model.eval().save_pretrained(tmp_path / "theirs")
    ours, tokens = with_stored_adapters(plain, tmp_path / "theirs"), random_tokens()
    got = np.asarray(our_logits(ours, tokens))
    np.testing.assert_allclose(got, hf_logits(model, tokens), atol=2e-4, rtol=0)
    assert np.abs(got - our_logits(plain, tokens)).max() > 0.05
    save_adapter(ours, tmp_path / "ours", str(tmp_path / "base"))
    again = our_logits(with_stored_adapters(plain, tmp_path / "ours"), tokens)
    np.testing.assert_allclose(again, got, atol=1e-4)
    return plain.config, read_adapter_config(tmp_path / "theirs", plain.config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        (MODELS["qwen3_moe"], {"target_modules": ["q_proj"], "target_parameters": EXPERTS}, (3, 3)),
        (MODELS["qwen3_moe"], {"target_modules": [], "target_parameters": ["gate_up_proj"]}, (3, 3)),
        (MODELS["qwen3_moe"], {"target_modules": [*MLP_NAMES, "q_proj"]}, (3, 6)),
        (MIXTRAL, {"target_modules": ["w1", "w2", "w3"], "use_rslora": True}, (3, 6)),
        (MIXTRAL, {"target_modules": ["o_proj"], "target_parameters": EXPERTS, "use_rslora": True}, (3, 3)),
        (MODELS["deepseek_v3"], {"target_modules": [*MLP_NAMES, "o_proj"]}, (3, 6)),
    ],
    ids=["parameters", "gate and up", "modules", "modules of mixtral", "rslora", "deepseek_v3"],
)
def test_adapters_of_experts_from_peft_with_transformers_5_have_its_logits(
    tmp_path, config, settings, expected
):
    """Its experts are parameters; it makes them the targets where the names of modules mean experts."""
    _, read = checked_against_peft(tmp_path, config, settings)
    assert (read.rank, read.expert_rank) == expected


@pytest.mark.slow
def test_adapters_of_qwen2_moes_experts_that_peft_ignores_are_told(tmp_path):
    """Its logits are those of all other adapters: once they are not, `unread_by_peft` has served."""
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 2, "num_experts": 6, "shared_expert_intermediate_size": 20}
    AutoModelForCausalLM.from_config(Qwen2MoeConfig(**COMMON, **sizes)).save_pretrained(tmp_path / "base")
    plain = load_params(tmp_path / "base", read_config(tmp_path / "base"))
    params, tokens = with_random_adapters(plain, LORA), random_tokens(1, 12)
    save_adapter(params, tmp_path / "adapter", str(tmp_path / "base"))
    no_experts = {
        name: jnp.zeros_like(x) for name, x in named_leaves(params) if "_lora_" in name and ".expert_" in name
    }
    assert "qwen2_moe" in unread_by_peft(params.config)
    theirs = hf_logits(in_peft(tmp_path / "base", tmp_path / "adapter"), tokens)
    others = np.asarray(our_logits(replace_weights(params, no_experts), tokens))
    np.testing.assert_allclose(others, theirs, atol=1e-4, rtol=0)
    assert np.abs(our_logits(params, tokens) - theirs).max() > 0.01
    attention = dataclasses.replace(LORA, targets=("q_proj",))
    assert not unread_by_peft(with_lora(plain.config, attention))
    assert not unread_by_peft(with_lora(dataclasses.replace(plain.config, family="qwen3_moe"), LORA))


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["ring", "paged"])
def test_greedy_text_is_pefts(base, tmp_path, cache):
    """Of both caches; those of DeepSeek-V3 hold latents."""
    folder, params = base
    params = with_random_adapters(params, LORA)
    save_adapter(params, tmp_path, str(folder))
    agree_in_greedy_text(in_peft(folder, tmp_path), params, random_tokens(length=6), 10, cache=cache, page=8)


@pytest.mark.slow
def test_adapters_of_attention_from_peft_have_its_logits(base, tmp_path):
    folder, params = base
    names = [name for ours, name in linear_layers(params.config).items() if ours not in MLP]
    model = peft.get_peft_model(torch_base(folder), peft.LoraConfig(r=4, lora_alpha=6, target_modules=names))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.copy_(0.2 * torch.randn(weight.shape))
    model.eval().save_pretrained(tmp_path)
    read, tokens = read_adapter_config(tmp_path, params.config), random_tokens()
    assert {*read.targets} == {*names} and (read.rank, read.alpha) == (4, 6.0)
    ours = our_logits(with_stored_adapters(params, tmp_path), tokens)
    np.testing.assert_allclose(ours, hf_logits(model, tokens), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_the_merged_export_has_the_outputs_of_the_adapters(base, tmp_path):
    folder, params = base
    params, tokens = with_random_adapters(params, LORA), random_tokens()
    save_model(params, read_config(folder), tmp_path, dtype="float32")
    again = load_params(tmp_path, read_config(folder))
    expected = our_logits(params, tokens)
    np.testing.assert_allclose(our_logits(again, tokens), expected, atol=1e-5 * np.abs(expected).max())
    for (name, x), (_, y) in zip(named_leaves(again), named_leaves(merged(params)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_transformers_4_takes_the_same_folder(tmp_path):
    """There experts are modules of their own: all of them, the shared expert and the dense layer get the
    tensors and factors of the folder."""
    config = with_lora(DEEPSEEK, LORA)
    save_adapter(with_random_adapters(random_base(DEEPSEEK), LORA), tmp_path, "base")
    model = torch.nn.Module()
    for tensor in hf_tensors(DEEPSEEK):
        *path, leaf, kind = tensor.name.split(".")
        if leaf.endswith(("_proj", "_mqa")) and kind == "weight":
            parent = model
            for name in path:
                if not hasattr(parent, name):
                    parent.add_module(name, torch.nn.Module())
                parent = getattr(parent, name)
            parent.add_module(leaf, torch.nn.Linear(*tensor.shape[::-1], bias=False))
    model = peft.inject_adapter_in_model(peft.LoraConfig.from_pretrained(tmp_path), model)
    shapes = {
        f"base_model.model.{name.replace('.default', '')}": tuple(x.shape)
        for name, x in model.named_parameters()
        if ".lora_" in name
    }
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert shapes == {name: x.shape for name, x in stored.items()}
    layers = [module for module in model.modules() if hasattr(module, "scaling")]
    assert len(layers) == len(stored) / 2
    assert {module.scaling["default"] for module in layers} == {LORA.scale_at(2)}
    assert {name: module.r["default"] for name, module in model.named_modules() if hasattr(module, "r")} == {
        name: 2 if ".experts." in name else 4
        for name, module in model.named_modules()
        if hasattr(module, "r")
    }
    assert config.adapters["expert_up"] == (2, LORA.scale_at(2))


def tiny(family, experts=2, shared=0):
    moe = MoEConfig(3, experts, expert_size=12, shared_size=shared)
    return TransformerConfig(family, 32, 16, moe=moe, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)


def test_config_and_names_by_hand():
    """Rank 8 over 2 experts of a token: 4. Alpha / R = 16 / 4 of experts, in the file of all layers, which is
    16 / 8 elsewhere: there the file's B is half of ours."""
    config = with_lora(tiny("mixtral"), LoraConfig(rank=8, alpha=16.0))
    assert config.adapters == {
        **dict.fromkeys("qkvo", (8, 2.0)),
        **dict.fromkeys(("expert_gate", "expert_up", "expert_down"), (4, 4.0)),
    }
    raw = peft_config(config, "base")
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert (raw["r"], raw["lora_alpha"], raw["target_modules"]) == (4, 16, [*attention, "w1", "w3", "w2"])
    assert raw["rank_pattern"] == dict.fromkeys(attention, 8)
    assert raw["alpha_pattern"] == dict.fromkeys(attention, 32.0)
    shapes = {tensor.name: tensor.shape for tensor in adapter_tensors(config)}
    expert = "base_model.model.model.layers.0.block_sparse_moe.experts.2"
    assert shapes[f"{expert}.w1.lora_A.weight"] == (4, 16) and shapes[f"{expert}.w2.lora_B.weight"] == (16, 4)
    assert len(shapes) == 2 * (4 + 3 * 3)
    assert with_lora(tiny("mixtral"), LoraConfig(rank=1)).adapters["expert_up"][0] == 1
    shared = with_lora(tiny("qwen2_moe", shared=20), LoraConfig(rank=8, targets=("up_proj",)))
    assert peft_config(shared, "")["rank_pattern"] == {"shared_expert.up_proj.weight": 8}
    glm = with_lora(tiny("glm4_moe", shared=20), LoraConfig(rank=8, targets=("up_proj",)))
    assert list(peft_config(glm, "")["rank_pattern"]) == ["shared_experts.up_proj.weight"]


def test_adapters_of_parameters_by_hand(tmp_path):
    """Expert 1 of 3, R = 2: gate has rows 4 and 5 of A, up rows 6 and 7. B of hidden state 1 of gate is row
    2, of up row 3; their columns are R numbers of 3 experts each."""
    lora = LoraConfig(rank=4, alpha=10.0, rank_stabilized=True)
    config, params = with_lora(GPT_OSS, lora), with_random_adapters(random_base(GPT_OSS), lora)
    raw = peft_config(config, "base")
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert raw["target_modules"] == attention and "exclude_modules" not in raw
    gate_up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    assert sorted(raw["target_parameters"]) == [down, gate_up]
    assert (raw["r"], raw["use_rslora"]) == (2, False)
    assert raw["lora_alpha"] == pytest.approx(10 * 2**0.5) and config.adapters["expert_up"][0] == 2
    assert raw["rank_pattern"] == {**dict.fromkeys(attention, 4), gate_up: 4}
    assert raw["alpha_pattern"] == dict.fromkeys([*attention, gate_up], pytest.approx(20 * 2**0.5))
    save_adapter(params, tmp_path, "base")
    stored = load_file(tmp_path / "adapter_model.safetensors")
    weights = {name: np.asarray(x)[0] for name, x in named_leaves(params) if ".expert_" in name}
    name = "base_model.model.model.layers.0.mlp.experts.{}lora_{}.weight".format
    a, b = stored[name("base_layer.", "A")], stored[name("base_layer.", "B")]
    assert a.shape == (3 * 4, 16) and b.shape == (2 * 12, 4 * 3)
    np.testing.assert_array_equal(a[4:6], weights["layers.expert_gate_lora_a"][1].T)
    np.testing.assert_array_equal(a[6:8], weights["layers.expert_up_lora_a"][1].T)
    np.testing.assert_array_equal(b[2, 1:6:3], weights["layers.expert_gate_lora_b"][1][:, 1])
    np.testing.assert_array_equal(b[3, 7::3], weights["layers.expert_up_lora_b"][1][:, 1])
    assert not b[::2, 6:].any() and not b[1::2, :6].any()
    a, b = stored[name("", "A")], stored[name("", "B")]
    np.testing.assert_array_equal(a[2:4], weights["layers.expert_down_lora_a"][1].T)
    np.testing.assert_array_equal(b[:, 1::3], weights["layers.expert_down_lora_b"][1].T)

    stored[name("base_layer.", "B")][0, 7] = 1.0
    save_file(stored, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"its parts read each other's A, as PEFT trains .* merge_and_unl"):
        load_adapter(tmp_path, config)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**raw, "rank_pattern": {**raw["rank_pattern"], gate_up: 6}}))
    assert read_adapter_config(tmp_path, config).expert_rank == 3
    with pytest.raises(UserError, match=r"not the adapters of this gpt_oss model; .*shape"):
        load_adapter(tmp_path, with_lora(GPT_OSS, read_adapter_config(tmp_path, config)))
    file.write_text(json.dumps({**raw, "target_parameters": [gate_up, "mlp.router.weight"]}))
    with pytest.raises(UserError, match=r"target_parameters='mlp.router.weight' is not supported for this m"):
        read_adapter_config(tmp_path, config)


def test_dense_layers_and_shared_experts_are_parameters_by_hand():
    """Their names end like those of experts, which have another rank."""
    raw = peft_config(with_lora(DEEPSEEK, LoraConfig(rank=8)), "base")
    attention = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    mlp = ["gate_proj", "up_proj", "down_proj"]
    modules = [f"{where}.{name}" for where in ("mlp", "mlp.shared_experts") for name in mlp]
    modules = [name.removeprefix("mlp.") if "shared" in name else name for name in modules]
    assert sorted(raw["target_modules"]) == sorted(attention + mlp) and raw["r"] == 4
    assert sorted(raw["exclude_modules"]) == sorted(modules)
    assert sorted(raw["target_parameters"]) == sorted(f"{name}.weight" for name in modules)
    assert raw["rank_pattern"] == dict.fromkeys([*attention, *raw["target_parameters"]], 8)
    targets = ("q_a_proj", "kv_b_proj")
    some = peft_config(with_lora(DEEPSEEK, LoraConfig(rank=8, targets=targets)), "base")
    assert some["target_modules"] == [*targets] and some["r"] == 8 and not some["rank_pattern"]
    assert "target_parameters" not in some and "exclude_modules" not in some


GPT_OSS = dataclasses.replace(tiny("gpt_oss"), moe=MoEConfig(3, 2, 12, bias=True), tie_embeddings=False)
DEEPSEEK = dataclasses.replace(
    tiny("deepseek_v3"), mlp_size=24, num_layers=2, num_kv_heads=2, head_dim=12, qk_norm=False,
    mla=MLAConfig(kv_rank=16, q_rank=10, nope_dim=8, rope_dim=4, value_dim=6),
    moe=MoEConfig(3, 2, 12, shared_size=20, shared_gate=False, score="sigmoid", dense_layers=1),
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "lora"),
    [
        (tiny("mixtral"), LoraConfig(rank=6, alpha=5.0, rank_stabilized=True)),
        (tiny("qwen2_moe", shared=20), LoraConfig(rank=4, expert_rank=3, targets=("gate_proj", "up_proj"))),
        (tiny("qwen3_moe"), LoraConfig(rank=4, targets=("gate_proj", "up_proj", "down_proj"))),
        (DEEPSEEK, LORA),
        (DEEPSEEK, LoraConfig(rank=4, targets=("kv_b_proj", "q_a_proj"))),
        (GPT_OSS, LORA),
        (GPT_OSS, LoraConfig(rank=4, expert_rank=3, targets=("gate_proj", "up_proj"))),
        (GPT_OSS, LoraConfig(rank=4, targets=("down_proj", "q_proj"))),
    ],
    ids=[
        *("mixtral", "qwen2_moe", "experts alone", "deepseek_v3", "latents alone"),
        *("gpt_oss", "gate and up of gpt_oss", "down of gpt_oss"),
    ],
)
@pytest.mark.slow
def test_a_round_trip(config, lora, tmp_path):
    base = random_base(config)
    params = with_random_adapters(base, lora)
    save_adapter(params, tmp_path, "base")
    again = with_stored_adapters(base, tmp_path)
    for (name, x), (_, y) in zip(named_leaves(merged(again)), named_leaves(merged(params)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6, err_msg=name)
    chosen = load_adapter(tmp_path, params.config)
    for name, x in named_leaves(params):
        np.testing.assert_allclose(chosen.get(name, x), x, rtol=1e-6, err_msg=name)


@functools.cache
def random_base(config):
    return init(config, jax.random.key(0))


def test_other_ranks_and_patterns_are_refused(tmp_path):
    config = with_lora(tiny("qwen3_moe"), LoraConfig(rank=8))
    save_adapter(with_random_adapters(random_base(tiny("qwen3_moe")), config.lora), tmp_path, "base")
    other = with_lora(tiny("qwen3_moe"), LoraConfig(rank=8, expert_rank=2))
    with pytest.raises(UserError, match=r"rank=\(8, 4\), but the model's have rank=\(8, 2\).*expert_rank=4"):
        load_adapter(tmp_path, other)
    file = tmp_path / "adapter_config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, "rank_pattern": {"q_proj": 8, "k_proj": 4}}))
    with pytest.raises(UserError, match=r"not the adapters of this qwen3_moe model; .*shape"):
        load_adapter(tmp_path, with_lora(tiny("qwen3_moe"), read_adapter_config(tmp_path, config)))
    assert load_file(tmp_path / "adapter_model.safetensors")


PATTERNS = {
    # settings of peft; rank and rank of experts; whether training from it is peft's
    "parameters": (
        {
            "target_modules": r".*\.[01]\.self_attn\.(q|v)_proj",
            "target_parameters": EXPERTS,
            "rank_pattern": {r"1\.mlp\.experts\.down_proj": 5, "0.mlp.experts.gate_up_proj": 2},
            "alpha_pattern": {
                r"1\.mlp\.experts\.down_proj": 10,
                "0.mlp.experts.gate_up_proj": 4,
                "1.*q_proj": 9,
            },
        },
        (3, 5),
        "alpha_pattern",
    ),
    "layers": (
        {
            "target_modules": ["o_proj", "k_proj"],
            "target_parameters": ["experts.down_proj"],
            "layers_to_transform": [1],
            "rank_pattern": {"o_proj": 4},
            "alpha_pattern": {"o_proj": 8},
        },
        (4, 3),
        "",
    ),
    "attention": (
        {"target_modules": r".*\.self_attn\.\w*proj(_with_mqa)?", "exclude_modules": ["0.self_attn.o_proj"]},
        (3, None),
        "",
    ),
    "one parameter": (
        {"target_modules": ["v_proj"], "target_parameters": ["model.layers.1.mlp.experts.gate_up_proj"]},
        (3, 3),
        "",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "ranks", "fault"), PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_patterns_layers_and_regexes_of_experts_from_peft_have_its_logits(
    tmp_path, family, *, settings, ranks, fault
):
    """`layers_to_transform` and `exclude_modules` concern modules alone; patterns match full names."""
    if family == "deepseek_v3":
        names = {"q_proj": "q_b_proj", "k_proj": "kv_a_proj_with_mqa", "v_proj": "kv_b_proj"}
        settings = json.loads(_renamed(json.dumps(settings), names).replace("(q|v)_proj", "(q_b|kv_b)_proj"))
    plain, read = checked_against_peft(tmp_path, MODELS[family], settings)
    assert (read.rank, read.expert_rank) == ranks
    # A run trains what peft would, or is refused.
    config = with_lora(plain, read)
    if fault:
        with pytest.raises(UserError, match=rf"{fault}=.* alpha / rank.*merge it"):
            load_adapter(tmp_path / "theirs", config, trains=True)
    else:
        load_adapter(tmp_path / "theirs", config, trains=True)


def _renamed(text, names):
    for old, new in names.items():
        text = text.replace(old, new)
    return text


def test_each_expert_may_have_another_rank(tmp_path):
    """Files of transformers 4, where experts are modules: of expert 1 rank 2, of layer 1 no up_proj."""
    config = dataclasses.replace(tiny("qwen3_moe"), num_layers=2)
    lora = LoraConfig(rank=3, alpha=6.0, expert_rank=3)
    params = with_random_adapters(random_base(config), lora)
    save_adapter(params, tmp_path, "base")
    file, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    raw, stored = json.loads(file.read_text()), load_file(weights)
    stored = {name: x for name, x in stored.items() if not (".layers.1." in name and ".up_proj" in name)}
    for name, x in stored.items():
        if ".experts.1." in name:
            stored[name] = np.ascontiguousarray(x[:2] if ".lora_A." in name else x[:, :2])
    save_file(stored, weights)
    pattern = {r"experts\.1\..*": 2}
    raw |= {"exclude_modules": r".*layers\.1\..*up_proj", "rank_pattern": pattern, "alpha_pattern": {}}
    file.write_text(json.dumps(raw))
    read = read_adapter_config(tmp_path, config)
    assert read == dataclasses.replace(lora, targets=read.targets)
    got, old = load_adapter(tmp_path, with_lora(config, read)), dict(named_leaves(params))
    for name in ("layers.expert_up", "layers.expert_down"):
        a, b = (np.array(old[f"{name}_lora_{matrix}"]) for matrix in "ab")
        a[:, 1, :, 2], b[:, 1, 2] = 0, 0
        b[:, 1] *= 3 / 2  # alpha / rank is 3 in the file, 2 in the model
        if name.endswith("up"):
            a[1], b[1] = 0, 0
        np.testing.assert_allclose(got[f"{name}_lora_a"], a)
        np.testing.assert_allclose(got[f"{name}_lora_b"], b, rtol=1e-6)
    with pytest.raises(UserError, match=r"rank_pattern=.* gives model.layers.0.mlp.experts.1.*alpha / rank"):
        load_adapter(tmp_path, with_lora(config, read), trains=True)
