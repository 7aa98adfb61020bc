"""Ranges and rules of TransformerConfig, and the names of rematerialisation in every table that has them."""

import dataclasses
import math
import re
import typing

import pytest

from jaxrl_llm import models
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.models import flops
from jaxrl_llm.models.config import MoEConfig, check_model_config
from jaxrl_llm.models.mixer_config import IndexConfig, MLAConfig
from jaxrl_llm.models.remat import REMAT
from jaxrl_llm.plan.models import PRESETS, preset

IMPOSSIBLE = {
    "num_kv_heads is 3: it must divide num_heads, 16.": {"num_kv_heads": 3},
    "head_dim is 7: it must be even, since RoPE rotates pairs.": {"head_dim": 7},
    "window_layers has 1 entries: it must have one a layer, 2.": {"window_layers": (True,)},
    "head_dim is 2: dynamic RoPE scaling needs at least 4.": {
        "head_dim": 2,
        "rope": models.RopeConfig(scaling="dynamic"),
    },
    "qk_norm_after_rope is True: it says which norm qk_norm is": {
        "qk_norm_after_rope": True,
        "qk_norm": False,
    },
    "num_layers is 0: it must be at least 1 and at most 10000.": {"num_layers": 0},
    "norm_eps is nan: it must be at least 0 and at most 1; 1e-6 is usual.": {"norm_eps": math.nan},
    "rope.theta is 1.0: it must be above 1": {"rope": models.RopeConfig(theta=1.0)},
    "moe.groups is 3: it must divide 8 experts into groups of": {"moe": MoEConfig(8, groups=3)},
    "moe.groups_kept is 3: there are 2 groups": {"moe": MoEConfig(8, groups=2, groups_kept=3)},
    "moe.experts_per_token is 3: the groups kept have 2 experts": {"moe": MoEConfig(8, 3, groups=4)},
    "num_layers is 2: it must be above moe.dense_layers, 2.": {"moe": MoEConfig(dense_layers=2)},
    "moe.score is softmax_of_chosen: groups and selection_bias need": {
        "moe": MoEConfig(score="softmax_of_chosen", selection_bias=True)
    },
    "mla.kv_rank is 0: it must be at least 1": {
        "mla": MLAConfig(kv_rank=0, nope_dim=64, rope_dim=64),
        "num_kv_heads": 16,
        "qk_norm": False,
    },
    "index is set: it needs mla with a q_rank": {"index": IndexConfig()},
    "index has head_dim 8: it must be at least mla.rope_dim, 64.": {
        **{"mla": MLAConfig(nope_dim=64, rope_dim=64), "num_kv_heads": 16, "qk_norm": False},
        "index": IndexConfig(head_dim=8),
    },
    "index_layers is set: it needs index, and an indexer in the first layer.": {
        **{"mla": MLAConfig(nope_dim=64, rope_dim=64), "num_kv_heads": 16, "qk_norm": False},
        **{"index": IndexConfig(), "index_layers": (False, True)},
    },
    "index.topk is 0: it must be at least 1": {"index": IndexConfig(topk=0)},
    "mlp_bias is true: with moe it must be false": {"mlp_bias": True, "moe": MoEConfig()},
    "rope.high_freq_factor is 1.0: it must be above low_freq_factor, 1.0.": {
        "rope": models.RopeConfig(scaling="llama3", high_freq_factor=1.0)
    },
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_impossible_architectures_are_refused(message):
    """By the config's own `problems`, which a recipe and a config.json are both held to."""
    config = models.TransformerConfig(num_layers=2)
    check_model_config(config, "here")
    with pytest.raises(UserError, match=f"^here: .*{re.escape(message)}"):
        check_model_config(dataclasses.replace(config, **IMPOSSIBLE[message]), "here")


@pytest.mark.parametrize("name", PRESETS)
def test_known_models_pass(name):
    check_model_config(PRESETS[name], name)


def test_qwen3_base_models_have_fewer_positions():
    """Their config.json says 32,768, those of the models after it 40,960; all else is the same."""
    base, chat = preset("Qwen/Qwen3-8B-Base"), preset("Qwen/Qwen3-8B")
    assert (base.max_position, chat.max_position) == (32_768, 40_960)
    assert dataclasses.replace(base, max_position=40_960) == chat
    assert preset("meta-llama/Llama-3.1-8B-Instruct") == preset("meta-llama/Llama-3.1-8B")


def test_deepseek_v3_is_that_of_its_config_json():
    """The keys of deepseek-ai/DeepSeek-V3's file that differ from transformers' defaults."""
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    rope = {**yarn, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    raw = {"model_type": "deepseek_v3", "max_position_embeddings": 163_840, "rope_scaling": rope}
    assert PRESETS["deepseek-ai/DeepSeek-V3"] == read_config(raw)
    assert PRESETS["deepseek-ai/DeepSeek-V3.2"] == read_config({**raw, "model_type": "deepseek_v32"})


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("ByteDance-Seed/Seed-OSS-36B", "36.15"),
        ("LGAI-EXAONE/EXAONE-4.0-32B", "32.00"),
        ("LGAI-EXAONE/EXAONE-4.0-1.2B", "1.28"),
        ("allenai/OLMo-2-1124-7B", "7.30"),
        ("allenai/OLMo-2-0425-1B", "1.48"),
    ],
)
def test_known_models_have_the_billions_of_their_cards(name, weights):
    shapes = [leaf.shape for _, leaf in models.named_leaves(models.abstract(PRESETS[name]))]
    assert f"{sum(map(math.prod, shapes)) / 1e9:.2f}" == weights


def test_glm_5_is_that_of_its_config_json():
    """The keys of zai-org/GLM-5's file that differ from transformers' defaults."""
    raw = {"model_type": "glm_moe_dsa", "indexer_rope_interleave": True, "rope_interleave": True}
    assert PRESETS["zai-org/GLM-5"] == read_config({**raw, "rope_parameters": {"rope_theta": 1e6}})


def test_every_remat_of_the_config_is_in_every_table():
    names = typing.get_args(typing.get_type_hints(ModelConfig)["remat"])
    assert set(names) == set(REMAT) == set(flops.RECOMPUTED)
