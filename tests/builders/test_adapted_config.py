"""Adapters of a mixture of experts, of the policy or a critic: ranks, and what is refused."""

import re
from dataclasses import replace

import pytest

from jaxrl_llm.builders.models import trained_config
from jaxrl_llm.config import RolloutConfig, TrainConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models import LoraConfig, TransformerConfig
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.lora import with_lora
from jaxrl_llm.models.mixer_config import DeltaConfig, MLAConfig
from jaxrl_llm.recipe.checks import check_models
from jaxrl_llm.sharding.config import CRITIC, POLICY

MODEL = TransformerConfig(
    family="qwen3_moe", hidden_size=64, head_dim=16, tie_embeddings=False, moe=MoEConfig(8, 4, expert_size=12)
)
HYBRID = TransformerConfig(
    family="qwen3_5_text",
    num_layers=4,
    hidden_size=64,
    layer_kinds=("delta", "attention") * 2,
    delta=DeltaConfig(2, 4, 8, 8, 4),
    attention_gate=True,
    norm_offset=1.0,
)


def test_ranks():
    """32 over 4 experts of a token; alpha / R is 1 of attention, 4 of experts. mlp_size does not count."""
    adapters = with_lora(MODEL, LoraConfig(rank=32)).adapters
    assert adapters["q"] == (32, 1.0) and adapters["expert_down"] == (8, 4.0) and "down" not in adapters
    assert with_lora(MODEL, LoraConfig()) is MODEL


def test_servers_get_no_adapters_of_experts():
    run = TrainConfig(rollout=RolloutConfig(engine="sglang"), lora=LoraConfig(8))
    with pytest.raises(ConfigError, match="adapters of experts are not sent to servers"):
        check_models(run, {POLICY: MODEL})
    attention = replace(run, lora=LoraConfig(8, targets=("q_proj",)))
    check_models(attention, {POLICY: MODEL})
    assert list(trained_config(MODEL, attention).adapters) == ["q"]


def test_servers_get_no_latent_attention():
    """Before a server is started; gpt-oss is in `test_moe_parity.py`."""
    sizes = dict(
        num_heads=4, num_kv_heads=4, head_dim=12, qk_norm=False, mla=MLAConfig(16, 20, 8, 4, value_dim=6)
    )
    run = TrainConfig(rollout=RolloutConfig(engine="sglang"))
    with pytest.raises(ConfigError, match=r"latent attention \(DeepSeek-V3\) are not .* Set it to native"):
        check_models(run, {POLICY: replace(MODEL, **sizes)})


@pytest.mark.parametrize(
    ("engine", "changed", "rank"),
    [
        ("vllm", {}, 0),
        ("sglang", {}, 4),
        ("sglang", {"qkv_bias": True}, 0),
        ("sglang", {"layer_kinds": ("attention", "delta", "delta", "attention")}, 0),
    ],
)
def test_of_recurrent_layers_servers_get_what_sglang_computes(engine, changed, rank):
    run = TrainConfig(rollout=RolloutConfig(engine=engine), lora=LoraConfig(rank))
    with pytest.raises(
        ConfigError, match=rf"{engine}: .*, are not sent|fp8 weights of models with recurrent"
    ):
        check_models(run, {POLICY: replace(HYBRID, **changed)})
    check_models(TrainConfig(rollout=RolloutConfig(engine="sglang")), {POLICY: HYBRID})


def test_servers_get_no_experts_with_tied_embeddings():
    """SGLang's mixtures of experts have an LM head of their own, whatever `tie_word_embeddings` says."""
    run = TrainConfig(rollout=RolloutConfig(engine="sglang"))
    with pytest.raises(ConfigError, match=r"tied embeddings are not sent to servers. Set --model.*false"):
        check_models(run, {POLICY: replace(MODEL, tie_embeddings=True)})


def test_adapters_of_a_part_of_a_joined_layer_are_refused():
    model = replace(MODEL, family="phi3", moe=None, qk_norm=False, tie_embeddings=False)
    message = "--lora.targets has q_proj: files of phi3 have one layer for q_proj k_proj v_proj, qkv_proj"
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_models(TrainConfig(lora=LoraConfig(4, targets=("q_proj",))), {POLICY: model})
    run = TrainConfig(lora=LoraConfig(4), rollout=RolloutConfig(engine="sglang"))
    with pytest.raises(ConfigError, match=re.escape("adapters of layers that are stored as one (Phi-3)")):
        check_models(run, {POLICY: model})
    check_models(TrainConfig(lora=LoraConfig(4)), {POLICY: model})


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(4, targets=("q_proj", "up_proj")), "--lora.targets has one of gate_proj and up_proj"),
        (LoraConfig(64), "--lora.expert_rank is 16: the model's experts have 12 inputs or outputs."),
        (LoraConfig(65), "--lora.rank is 65: the model's hidden_size is 64."),
    ],
    ids=["targets", "expert_rank", "rank"],
)
def test_what_experts_do_not_have_is_refused(lora, message):
    config = TrainConfig(lora=lora)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_models(config, {POLICY: MODEL})
    dense = replace(
        MODEL, family="qwen3", moe=None, hidden_size=128, mlp_size=128, num_heads=8, num_kv_heads=8
    )
    check_models(config, {POLICY: dense})
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_models(config, {POLICY: dense, CRITIC: MODEL})
