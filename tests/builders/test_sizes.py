"""Shared prefixes by model: dynamic RoPE gives each response a row."""

import dataclasses

import jax
import pytest

from jaxrl_llm.algos import grpo
from jaxrl_llm.builders.sizes import with_prefixes
from jaxrl_llm.config import ReferenceConfig, TrainConfig
from jaxrl_llm.models import RopeConfig, TransformerConfig
from jaxrl_llm.plan.models import ABSTRACT_MODELS, UnknownModelError
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

CONFIG = TrainConfig(max_prompt_tokens=16, max_response_tokens=16, responses_per_prompt=4)
MODEL = TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({}, True),
        ({"sliding_window": 8}, True),
        ({"rope": RopeConfig(scaling="dynamic", factor=2.0)}, False),
    ],
)
def test_dynamic_rope_gives_each_response_a_row(changes, shares):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    got = with_prefixes(CONFIG, dataclasses.replace(MODEL, **changes), mesh)
    assert got.row_tokens == (CONFIG.row_tokens if shares else 32)


def test_a_reference_that_no_loss_needs_is_not_read():
    """`plan` refused the recipe of an unknown model that the run would not load."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    recipe = lambda kl_coef: dataclasses.replace(
        CONFIG, reference=ReferenceConfig(path="org/unknown"), algo=grpo.Config(kl_coef=kl_coef)
    )
    assert with_prefixes(recipe(0.0), MODEL, mesh, ABSTRACT_MODELS) == recipe(0.0)
    with pytest.raises(UnknownModelError, match="org/unknown"):
        with_prefixes(recipe(0.1), MODEL, mesh, ABSTRACT_MODELS)
