"""Adapters of experts: peft on transformers' tiny Qwen3-MoE, files of every family, merged weights."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_oracle import hf_logits, our_logits, random_tokens, torch
from lora_models import merged, replace_weights, with_random_adapters, with_stored_adapters
from safetensors.numpy import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.names import adapter_tensors
from jaxrl_llm.hf.peft import load_adapter, peft_config, read_adapter_config, save_adapter
from jaxrl_llm.models import LoraConfig, TransformerConfig, init, named_leaves
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.lora import with_lora

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # transformers'
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),  # peft's own
]

LORA = LoraConfig(rank=4, alpha=6.0)  # of experts: 4 / 2


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(folder, our model) of a random Qwen3-MoE of two layers, six experts, two of each token."""
    folder = tmp_path_factory.mktemp("base")
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=64, tie_word_embeddings=False, num_experts_per_tok=2,
        num_experts=6, moe_intermediate_size=24, intermediate_size=48, norm_topk_prob=True,
        attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.ones_like(weight) if "norm" in name else 0.3 * torch.randn(weight.shape))
    model.save_pretrained(folder)
    return folder, load_params(folder, read_config(folder))


def in_peft(base, adapter):
    model = Qwen3MoeForCausalLM.from_pretrained(base, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()


@pytest.mark.slow
def test_logits_and_gradients_are_pefts(base, tmp_path):
    """peft fuses the files' experts: A of down_proj is [experts * R, inputs], B [outputs, R * experts]."""
    folder, params = base
    params, tokens = with_random_adapters(params, LORA), random_tokens(1, 12)
    save_adapter(params, tmp_path, str(folder))
    model = in_peft(folder, tmp_path)
    ours = np.asarray(our_logits(params, tokens))
    np.testing.assert_allclose(ours, hf_logits(model, tokens), atol=1e-4, rtol=0)
    assert np.abs(ours - our_logits(base[1], tokens)).max() > 0.1

    model(torch.tensor(tokens), use_cache=False).logits.square().sum().backward()
    theirs = {name: w.grad.numpy() for name, w in model.named_parameters() if w.grad is not None}
    names = [name for name, _ in named_leaves(params) if "_lora_" in name]

    def loss(values):
        return jnp.sum(our_logits.__wrapped__(replace_weights(params, values), jnp.asarray(tokens)) ** 2)

    grads = jax.jit(jax.grad(loss))({name: dict(named_leaves(params))[name] for name in names})
    layer, q = "base_model.model.model.layers.1", "self_attn.q_proj"
    scale = LORA.scale_at(2) / LORA.scale  # the file's B of attention is ours divided by it
    for ours, expected in {
        "q_lora_a": theirs[f"{layer}.{q}.lora_A.default.weight"].T,
        "q_lora_b": theirs[f"{layer}.{q}.lora_B.default.weight"].T.reshape(4, 4, 16) / scale,
        "expert_down_lora_a": theirs[f"{layer}.mlp.experts.lora_A.default.weight"]
        .reshape(6, 2, 24)
        .transpose(0, 2, 1),
        "expert_down_lora_b": theirs[f"{layer}.mlp.experts.lora_B.default.weight"]
        .reshape(32, 2, 6)
        .transpose(2, 1, 0),
    }.items():
        got = np.asarray(grads[f"layers.{ours}"][1])
        np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max(), err_msg=ours)


@pytest.mark.slow
def test_the_merged_export_has_the_outputs_of_the_adapters(base, tmp_path):
    folder, params = base
    params, tokens = with_random_adapters(params, LORA), random_tokens()
    save_model(params, read_config(folder), tmp_path, dtype="float32")
    again = load_params(tmp_path, read_config(folder))
    expected = our_logits(params, tokens)
    np.testing.assert_allclose(our_logits(again, tokens), expected, atol=2e-4, rtol=0)
    for (name, x), (_, y) in zip(named_leaves(again), named_leaves(merged(params)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6, err_msg=name)


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
    assert peft_config(shared, "")["rank_pattern"] == {"shared_expert.up_proj": 8}
    glm = with_lora(tiny("glm4_moe", shared=20), LoraConfig(rank=8, targets=("up_proj",)))
    assert list(peft_config(glm, "")["rank_pattern"]) == ["shared_experts.up_proj"]


@pytest.mark.parametrize(
    ("config", "lora"),
    [
        (tiny("mixtral"), LoraConfig(rank=6, alpha=5.0, rank_stabilized=True)),
        (tiny("qwen2_moe", shared=20), LoraConfig(rank=4, expert_rank=3, targets=("gate_proj", "up_proj"))),
        (tiny("qwen3_moe"), LoraConfig(rank=4, targets=("gate_proj", "up_proj", "down_proj"))),
    ],
    ids=["mixtral", "qwen2_moe", "experts alone"],
)
@pytest.mark.slow
def test_a_round_trip(config, lora, tmp_path):
    base = random_base(config)
    params = with_random_adapters(base, lora)
    save_adapter(params, tmp_path, "base")
    again = with_stored_adapters(base, tmp_path)
    assert again.config.adapters == params.config.adapters
    for (name, x), (_, y) in zip(named_leaves(again), named_leaves(params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, err_msg=name)


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
    with pytest.raises(UserError, match=r"rank_pattern=.* is not supported; train the adapter without it"):
        read_adapter_config(tmp_path, has_experts=True)
    file.write_text(json.dumps({**raw, "rank_pattern": {"q_proj": 8}}))
    with pytest.raises(UserError, match=r"supported: patterns of q_proj, k_proj, v_proj, o_proj"):
        load_adapter(tmp_path, config)
    assert load_file(tmp_path / "adapter_model.safetensors")
