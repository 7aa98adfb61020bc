"""A critic of its own folder: read late, checked early, with a new score head where its files have none."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_models import random_params

from jaxrl_llm.algos import grpo, ppo
from jaxrl_llm.builders.models import config_with_heads
from jaxrl_llm.builders.weights import check_critic_files, load_with_heads
from jaxrl_llm.config import CriticConfig, TrainConfig
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

MODEL = TransformerConfig(
    vocab_size=160, hidden_size=16, mlp_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    tie_embeddings=False,
)  # fmt: skip
CRITIC = config_with_heads(MODEL, CriticConfig().loss)


@pytest.mark.parametrize("model", [MODEL, CRITIC], ids=["language model", "reward model"])
def test_a_critic_keeps_its_score_head_or_gets_one_of_zeros(tmp_path, model):
    params = random_params(model)
    folder = save_model(params, model, tmp_path / "model", make_tokenizer(), dtype="float32")
    mesh = make_mesh(MeshConfig(fsdp=2), jax.devices()[:2])
    loaded = load_with_heads(folder, CRITIC, mesh)
    assert loaded.config == CRITIC
    np.testing.assert_array_equal(loaded.layers.q[...], params.layers.q[...])
    expected = params.value[...] if model.value_head else np.zeros_like(loaded.value[...])
    np.testing.assert_array_equal(loaded.value[...], expected)


def test_damaged_files_of_a_critic_are_named_before_its_weights_are_read(tmp_path):
    folder = save_model(random_params(MODEL), MODEL, tmp_path / "model", make_tokenizer(), dtype="float32")
    config = TrainConfig(algo=ppo.Config(), critic=CriticConfig(path=str(folder)))
    check_critic_files(config)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"model\.safetensors: truncated or damaged"):
        check_critic_files(config)
    check_critic_files(replace(config, algo=grpo.Config()))  # which has no critic
