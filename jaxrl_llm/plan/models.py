"""Abstract models: known architectures, and shapes of weights without download or allocation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_llm import models
from jaxrl_llm.builders.models import make_stages, trained_config
from jaxrl_llm.config import ModelConfig, TrainConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.gguf import read_gguf_config
from jaxrl_llm.hf.hub import SUFFIX, parse_hub_name
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.models.attention import with_yarn
from jaxrl_llm.models.config import MoEConfig, RopeConfig, TransformerConfig
from jaxrl_llm.models.global_heads import GlobalHeads
from jaxrl_llm.models.mixer_config import DeltaConfig, IndexConfig, MLAConfig
from jaxrl_llm.sharding.rules import with_shardings
from jaxrl_llm.structs import Params
from jaxrl_llm.user_file import expand_home


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, *, tied: bool) -> TransformerConfig:
    return TransformerConfig(
        hidden_size=hidden, mlp_size=mlp, num_layers=layers, num_heads=heads, tie_embeddings=tied
    )


def _qwen3_moe(hidden: int, layers: int, heads: int, expert: int) -> TransformerConfig:
    dense = replace(_qwen3(hidden, 3 * hidden, layers, heads, tied=False), family="qwen3_moe", num_kv_heads=4)
    return replace(dense, moe=MoEConfig(num_experts=128, experts_per_token=8, expert_size=expert))


def _llama3(hidden: int, mlp: int, layers: int, heads: int) -> TransformerConfig:
    return TransformerConfig(
        family="llama",
        vocab_size=128_256,
        hidden_size=hidden,
        mlp_size=mlp,
        num_layers=layers,
        num_heads=heads,
        qk_norm=False,
        norm_eps=1e-5,
        tie_embeddings=False,
        rope=RopeConfig(theta=500_000.0),
        max_position=8192,
    )


_SMOLLM2_135M = TransformerConfig(
    family="llama",
    vocab_size=49_152,
    hidden_size=576,
    mlp_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    qk_norm=False,
    norm_eps=1e-5,
    rope=RopeConfig(theta=100_000.0),
    max_position=8192,
)
_DEEPSEEK_V3 = TransformerConfig(
    family="deepseek_v3",
    vocab_size=129_280,
    hidden_size=7168,
    mlp_size=18_432,
    moe=MoEConfig(
        num_experts=256,
        experts_per_token=8,
        expert_size=2048,
        shared_size=2048,
        shared_gate=False,
        score="sigmoid",
        scale=2.5,
        groups=8,
        groups_kept=4,
        selection_bias=True,
        dense_layers=3,
    ),
    num_layers=61,
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,
    mla=MLAConfig(),
    qk_norm=False,
    tie_embeddings=False,
    rope=RopeConfig(10_000.0, "yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
    max_position=163_840,
)
_DEEPSEEK_V32 = replace(_DEEPSEEK_V3, family="deepseek_v32", index=IndexConfig())
_GLM5 = replace(
    _DEEPSEEK_V3,
    family="glm_moe_dsa",
    vocab_size=154_880,
    hidden_size=6144,
    mlp_size=12_288,
    moe=replace(_DEEPSEEK_V3.moe, groups=1, groups_kept=1),
    num_layers=78,
    num_heads=64,
    num_kv_heads=64,
    head_dim=256,
    mla=MLAConfig(q_rank=2048, nope_dim=192, value_dim=256),
    index=IndexConfig(heads=32, interleaved=True),
    norm_eps=1e-5,
    rope=RopeConfig(1_000_000.0),
    max_position=202_752,
)
_QWEN3_NEXT = TransformerConfig(
    family="qwen3_next",
    hidden_size=2048,
    mlp_size=5120,
    moe=MoEConfig(num_experts=512, experts_per_token=10, expert_size=512, shared_size=512),
    num_layers=48,
    num_heads=16,
    num_kv_heads=2,
    head_dim=256,
    delta=DeltaConfig(projections="qkvz"),
    layer_kinds=("delta", "delta", "delta", "attention") * 12,
    attention_gate=True,
    norm_offset=1.0,
    tie_embeddings=False,
    rope=RopeConfig(theta=10_000_000.0, partial_rotary=0.25),
    max_position=262_144,
)
_QWEN35_35B = replace(
    _QWEN3_NEXT,
    family="qwen3_5_moe_text",
    vocab_size=248_320,
    mlp_size=12_288,  # of no layer
    moe=MoEConfig(num_experts=256, experts_per_token=8, expert_size=512, shared_size=512, added_to_sum=1e-20),
    num_layers=40,
    delta=DeltaConfig(),
    layer_kinds=("delta", "delta", "delta", "attention") * 10,
)
_QWEN35_9B = replace(
    _QWEN35_35B,
    family="qwen3_5_text",
    hidden_size=4096,
    moe=None,
    num_layers=32,
    num_kv_heads=4,
    layer_kinds=("delta", "delta", "delta", "attention") * 8,
)
_GEMMA4_31B = TransformerConfig(
    family="gemma4_text",
    vocab_size=262_144,
    hidden_size=5376,
    mlp_size=21_504,
    num_layers=60,
    num_heads=32,
    num_kv_heads=16,
    head_dim=256,
    global_heads=GlobalHeads(num_kv_heads=4, head_dim=512, keys_as_values=True),
    value_norm=True,
    activation="gelu_tanh",
    norms="both",
    embedding_multiplier=5376**0.5,
    layer_scalar=True,
    rope=RopeConfig(1_000_000.0, "proportional", partial_rotary=0.25),
    local_rope=RopeConfig(10_000.0),
    max_position=262_144,
    sliding_window=1024,
    window_layers=(True, True, True, True, True, False) * 10,
    attention_multiplier=1.0,
    logit_softcap=30.0,
)
_GEMMA4_26B = replace(
    _GEMMA4_31B,
    hidden_size=2816,
    mlp_size=2112,
    moe=MoEConfig(128, 8, 704, shared_size=2112, shared_gate=False, branches=True, added_to_sum=0.0),
    num_layers=30,
    num_heads=16,
    num_kv_heads=8,
    global_heads=GlobalHeads(num_kv_heads=2, head_dim=512, keys_as_values=True),
    embedding_multiplier=2816**0.5,
    window_layers=(True, True, True, True, True, False) * 5,
)
_OLMO_HYBRID = TransformerConfig(
    family="olmo_hybrid",
    vocab_size=100_352,
    hidden_size=3840,
    mlp_size=11_008,
    num_layers=32,
    num_heads=30,
    num_kv_heads=30,
    head_dim=128,
    delta=DeltaConfig(
        key_heads=30,
        value_heads=30,
        key_dim=96,
        value_dim=192,
        projections="separate",
        norm_eps=1e-5,
        negative_eigenvalues=True,
    ),
    layer_kinds=("delta", "delta", "delta", "attention") * 8,
    qk_norm_over_heads=True,
    norms="after",
    tie_embeddings=False,
    rope=RopeConfig(),
    rope_layers=(False,) * 32,
    max_position=65_536,
)
_QWEN_7B = replace(
    _qwen3(4096, 11_008, 32, 32, tied=False), family="qwen", num_kv_heads=32, qkv_bias=True, qk_norm=False,
    rope=RopeConfig(), max_position=8192,
)  # fmt: skip
_BAICHUAN2_7B = replace(
    _QWEN_7B, family="baichuan", qkv_bias=False, vocab_size=125_696, normalize_head=True, max_position=4096
)
_BAICHUAN2_13B = replace(
    _BAICHUAN2_7B, hidden_size=5120, mlp_size=13_696, num_layers=40, num_heads=40, num_kv_heads=40, alibi=True
)
_LLAMA_8B, _LLAMA_70B = _llama3(4096, 14_336, 32, 32), _llama3(8192, 28_672, 80, 64)
_LONG = {
    "rope": RopeConfig(500_000.0, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    "max_position": 131_072,
}
PRESETS: dict[str, TransformerConfig] = {
    "HuggingFaceTB/SmolLM2-135M": _SMOLLM2_135M,
    "Qwen/Qwen-7B": _QWEN_7B,
    "baichuan-inc/Baichuan2-7B": _BAICHUAN2_7B,
    "baichuan-inc/Baichuan2-13B": _BAICHUAN2_13B,
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12_288, 36, 32, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17_408, 40, 40, tied=False),
    "Qwen/Qwen3-32B": _qwen3(5120, 25_600, 64, 64, tied=False),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 48, 32, 768),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 94, 64, 1536),
    "Qwen/Qwen3.5-9B": _QWEN35_9B,
    "Qwen/Qwen3.5-35B-A3B": _QWEN35_35B,
    "google/gemma-4-31B": _GEMMA4_31B,
    "google/gemma-4-26B-A4B": _GEMMA4_26B,
    "Qwen/Qwen3-Next-80B-A3B": _QWEN3_NEXT,
    "Qwen/Qwen3-Next-80B-A3B-Thinking": _QWEN3_NEXT,
    "allenai/Olmo-Hybrid-7B": _OLMO_HYBRID,
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-R1": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-V3.2": _DEEPSEEK_V32,
    "deepseek-ai/DeepSeek-V3.2-Exp": _DEEPSEEK_V32,
    "zai-org/GLM-5": _GLM5,
    "meta-llama/Meta-Llama-3-8B": _LLAMA_8B,
    "meta-llama/Meta-Llama-3-70B": _LLAMA_70B,
    "meta-llama/Llama-3.1-8B": replace(_LLAMA_8B, **_LONG),
    "meta-llama/Llama-3.1-70B": replace(_LLAMA_70B, **_LONG),
}
"""Hub name -> architecture, from config.json. A suffix such as -Instruct or -Base does not matter, except for
QWEN3_BASE."""
QWEN3_BASE = 32_768
"""`max_position` of Qwen3's base models: with the others' value `plan` would accept rows that `train`
refuses."""


def preset(name: str) -> TransformerConfig | None:
    """Return the architecture of a known model, or None."""
    known = PRESETS.get(re.sub("-(Instruct|Base|Chat|it)$", "", name))
    if known and known.family in ("qwen3", "qwen3_moe") and name.endswith("-Base"):
        return replace(known, max_position=QWEN3_BASE)
    return known


class UnknownModelError(ConfigError):
    """A model whose architecture is neither in a local folder nor in `plan.models`."""

    def __init__(self, name: str):
        super().__init__(
            f"--model.path {name}: no such folder, and no architecture of that name is known. Give a "
            f"folder with its config.json (weights are not needed), or one of {', '.join(PRESETS)}."
        )
        self.name = name


class AbstractModels:
    """`hf.load.PretrainedModels` with abstract weights; reads only config.json of a folder."""

    def config(self, path: str) -> TransformerConfig:
        """Return the architecture of a local folder's model, or of one in `plan.models`.

        Raises:
            UnknownModelError: neither a folder nor a preset has this name.
        """
        folder = expand_home(path)
        if folder.is_dir():
            return read_config(folder)
        if folder.suffix == SUFFIX and folder.is_file():
            return read_gguf_config(folder)
        hub = parse_hub_name(path)
        if (known := preset(hub.repo if hub and not hub.file else path)) is None:
            raise UnknownModelError(path)
        return known

    def params(self, path: str, config: TransformerConfig, shardings: Params, dtype: DTypeLike) -> Params:
        """Return abstract weights with shardings."""
        shapes = jax.eval_shape(lambda weights: models.cast_weights(weights, dtype), models.abstract(config))
        return with_shardings(shapes, shardings)


ABSTRACT_MODELS = AbstractModels()


def read_known(path: str) -> TransformerConfig | None:
    """Return the architecture of a model; None = it is not known without a download."""
    try:
        return ABSTRACT_MODELS.config(path)
    except UnknownModelError:
        return None


def planned_model(config: ModelConfig) -> TransformerConfig:
    """Return the architecture of the model that a recipe trains."""
    model = ABSTRACT_MODELS.config(config.path) if config.path else config.architecture
    return with_yarn(model, config.yarn_factor, config.yarn_original)


def planned_stage(config: TrainConfig, meshes: Mapping[str, Mesh]) -> Stage:
    """Return the last stage of a run, the run itself, with abstract models.

    Raises:
        UnknownModelError: the architecture of a model is not known.
    """
    model = trained_config(planned_model(config.model), config)
    return make_stages(config, model, meshes, ABSTRACT_MODELS)[-1]
