"""The bias that chooses experts in copies of other types: float32, and bit for bit the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from random_weights import random_params

from jaxrl_llm import models
from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.learn.optim_states import store_remainders, stored_weights
from jaxrl_llm.learn.reference import freeze
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.config import MoEConfig

CONFIG = TransformerConfig(
    vocab_size=32, hidden_size=16, mlp_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    family="glm4_moe", tie_embeddings=False, qk_norm=False,
    moe=MoEConfig(4, 2, 8, 8, score="sigmoid", shared_gate=False, selection_bias=True, dense_layers=1),
)  # fmt: skip
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def params():
    """The biases are no numbers of bfloat16."""
    params = random_params(CONFIG)
    params.layers.router_bias[...] = jnp.array([[0.1, 0.2, 0.3, 1 / 3]], jnp.float32)
    return params


def through_a_folder(params, folder):
    save_model(params, CONFIG, folder, dtype="bfloat16")
    return load_params(folder, CONFIG, dtype=jnp.bfloat16)


def with_remainders(params):
    return stored_weights(params, store_remainders(optax.identity()).init(params))


@pytest.mark.parametrize(
    "copy", ["folder", "cast", "freeze", pytest.param("remainders", marks=pytest.mark.slow)]
)
def test_copies_of_bfloat16(copy, params, tmp_path):
    made = {
        "folder": lambda: through_a_folder(params, tmp_path),
        "cast": lambda: models.cast_weights(params, "bfloat16"),
        "freeze": lambda: freeze(params, "bfloat16"),
        "remainders": lambda: with_remainders(params),
    }[copy]()
    assert made.layers.router_bias[...].dtype == jnp.float32 and made.layers.router[...].dtype == jnp.bfloat16
    np.testing.assert_array_equal(made.layers.router_bias[...], params.layers.router_bias[...])


def test_pushes_of_bfloat16(params):
    """Four numbers are float32, in a bucket of their own: 2 bytes more each."""
    source = WeightSource(CONFIG, "bfloat16", 2**20)
    parts = list(source.parts(params))
    sent = {
        tensor.name: (array, part.content.dtype)
        for part in parts
        for tensor, array in zip(part.content.tensors, part.content.arrays, strict=True)
    }
    assert {name for name, (array, dtype) in sent.items() if dtype == "float32"} == {BIAS}
    np.testing.assert_array_equal(sent[BIAS][0], params.layers.router_bias[0])
    assert all(array.dtype == dtype for array, dtype in sent.values())
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert source.num_bytes == sum(part.num_bytes for part in parts) == 2 * size + 2 * 4
