"""Adapters of families whose experts peft adapts as parameters alone, against peft with transformers 5."""

import dataclasses
import json

import numpy as np
import pytest
from family_cases import BASE, CASES, SPECIAL
from lora_models import with_random_adapters
from random_weights import random_params
from test_peft_experts import MLP_NAMES, checked_against_peft, pytestmark  # noqa: F401  of warnings
from transformers import AutoConfig

from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.peft import load_adapter, read_adapter_config, save_adapter
from jaxrl_llm.models import LoraConfig, named_leaves
from jaxrl_llm.models.lora import MARK, named_adapters

PARAMETERS = ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"]


@pytest.mark.parametrize(
    ("case", "settings", "expected"),
    [
        pytest.param("lfm2 moe", {"target_parameters": PARAMETERS[::2]}, (3, 3), marks=pytest.mark.slow),
        ("nemotron", {"target_parameters": PARAMETERS[1:]}, (3, 3)),
        ("lfm2 moe", {"target_modules": ["q_proj", "w1", "w2", "w3"]}, (3, None)),
        pytest.param(
            "nemotron", {"target_modules": ["q_proj", *MLP_NAMES[1:]]}, (3, None), marks=pytest.mark.slow
        ),
    ],
    ids=["parameters of LFM2", "parameters of Nemotron-H", "modules of LFM2", "modules of Nemotron-H"],
)
def test_peft_adapts_experts_of_families_as_parameters_alone(tmp_path, case, *, settings, expected, capfd):
    """Names of modules mean no experts: a file that has none is read for the other layers, with a line."""
    family, changes = CASES[case]
    sizes = {**BASE, **SPECIAL, **changes, "attn_implementation": "eager"}
    settings = {"target_modules": ["q_proj"], **settings}
    _, read = checked_against_peft(tmp_path, AutoConfig.for_model(family, **sizes), settings)
    assert (read.rank, read.expert_rank) == expected
    line = "theirs: no adapters of experts, which peft with transformers 5 adapts as target_parameters alone"
    assert (line in capfd.readouterr().err) == (expected[1] is None)


@pytest.mark.parametrize("case", ["qwen3.5 moe", "lfm2 moe", "nemotron, latent"])
def test_exports_of_these_families_adapt_parameters(case, tmp_path):
    """A layer's experts have one A and one B, for gate and up together; they are read back as they were."""
    family, changes = CASES[case]
    layers = {"num_hidden_layers": len(changes.get("layers_block_type", range(4)))}
    base = random_params(read_config({"model_type": family, **BASE, **SPECIAL, **layers, **changes}))
    lora = LoraConfig(rank=4, alpha=6.0, rank_stabilized=True, expert_rank=3)
    params = with_random_adapters(base, lora)
    save_adapter(params, tmp_path / "adapter", "org/base")
    raw = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    first = "up_proj" if family == "nemotron_h" else "gate_up_proj"
    names = [name.rpartition("experts.")[2] for name in raw["target_parameters"] if "shared" not in name]
    assert {first, "down_proj"} <= {*names}
    # Read again: factors of B are applied in float32.
    read = read_adapter_config(tmp_path / "adapter", base.config)
    assert (read.rank, read.expert_rank) == (4, 3)
    config = dataclasses.replace(params.config, lora=read)
    again = load_adapter(tmp_path / "adapter", config)
    scales, others = (
        {name: scale for name, (_, scale) in named_adapters(c).items()} for c in (config, params.config)
    )
    ours = {name: np.asarray(x) for name, x in named_leaves(params) if "_lora_" in name}
    assert again.keys() == ours.keys()
    for name, x in again.items():
        weight, _, matrix = name.partition(MARK)
        factor = scales[weight] / others[weight] if matrix == "b" else 1.0
        np.testing.assert_allclose(x * factor, ours[name], rtol=1e-6)
