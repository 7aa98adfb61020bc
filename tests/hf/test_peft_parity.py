"""Adapters against peft on torch: logits of exports and imports, gradients of A and B."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_oracle import (
    TOLERANCE,
    hf_logits,
    hf_model,
    our_logits,
    our_model,
    random_tokens,
    raw_config,
    state_dict,
)
from lora_models import replace_weights, with_random_adapters, with_stored_adapters
from safetensors.numpy import load_file
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from jaxrl_llm.hf.peft import load_adapter, save_adapter
from jaxrl_llm.hf.peft_config import read_adapter_config
from jaxrl_llm.models import LoraConfig, named_leaves, with_heads
from jaxrl_llm.models.lora_config import TARGETS

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # transformers'

LORA = LoraConfig(rank=4, alpha=6.0)
SOME = ("q_proj", "o_proj", "down_proj")


@functools.cache
def our_base(family: str = "qwen3"):
    """Our model with the weights of `torch_base`."""
    return our_model(raw_config(family), state_dict(hf_model(raw_config(family))))


def torch_base(family: str = "qwen3"):
    model = hf_model(raw_config(family))
    model.requires_grad_(False)
    return model


def peft_folder(folder, family: str = "qwen3", **settings):
    """An adapter that peft made and saved, with a B that is not zero; peft's model."""
    defaults = {"r": 4, "lora_alpha": 6, "target_modules": list(SOME), "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(torch_base(family), peft.LoraConfig(**{**defaults, **settings}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(
    "family, lora",
    [
        ("llama", LORA),
        ("qwen3", LoraConfig(rank=3, alpha=2.5, rank_stabilized=True, targets=("k_proj", *SOME))),
    ],
    ids=["llama", "qwen3 rslora"],
)
def test_our_export_loads_in_peft_and_gives_our_logits(tmp_path, family, lora):
    params, tokens = with_random_adapters(our_base(family), lora), random_tokens()
    save_adapter(params, tmp_path / "adapter", "org/base")
    model = peft.PeftModel.from_pretrained(torch_base(family), tmp_path / "adapter").eval()
    config = model.peft_config["default"]
    assert (config.base_model_name_or_path, config.task_type, config.r) == (
        "org/base",
        "CAUSAL_LM",
        lora.rank,
    )
    ours = np.asarray(our_logits(params, tokens))
    np.testing.assert_allclose(ours, hf_logits(model, tokens), atol=TOLERANCE, rtol=0)
    assert np.abs(ours - our_logits(our_base(family), tokens)).max() > 0.1  # or the adapter would say little


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, LoraConfig(4, 6.0, targets=SOME)),
        (
            {"target_modules": "all-linear", "use_rslora": True, "lora_dropout": 0.1},
            LoraConfig(4, 6.0, True, targets=tuple(TARGETS)),  # peft lists the layers
        ),
    ],
    ids=["some layers", "all-linear rslora"],
)
def test_an_adapter_of_peft_loads_here_and_gives_its_logits(tmp_path, settings, expected):
    model, tokens = peft_folder(tmp_path, **settings), random_tokens()
    assert read_adapter_config(tmp_path, our_base().config) == expected
    ours = np.asarray(our_logits(with_stored_adapters(our_base(), tmp_path), tokens))
    np.testing.assert_allclose(ours, hf_logits(model, tokens), atol=TOLERANCE, rtol=0)


def test_gradients_of_a_and_b_equal_pefts(tmp_path):
    """Of the sum of the log-probs of the tokens, each given the tokens before it."""
    params, tokens = with_random_adapters(our_base(), LORA), random_tokens()
    save_adapter(params, tmp_path / "adapter", "base")
    model = peft.PeftModel.from_pretrained(torch_base(), tmp_path / "adapter", is_trainable=True).eval()
    logits = model(torch.tensor(tokens), use_cache=False).logits.log_softmax(-1)
    logits[:, :-1].gather(-1, torch.tensor(tokens)[:, 1:, None]).sum().backward()
    theirs = {n.replace(".default", ""): w.grad for n, w in model.named_parameters() if w.grad is not None}

    def loss(values, tokens):
        logps = jax.nn.log_softmax(our_logits.__wrapped__(replace_weights(params, values), tokens))
        return jnp.take_along_axis(logps[:, :-1], tokens[:, 1:, None], -1).sum()

    adapters = {name: leaf for name, leaf in named_leaves(params) if "_lora_" in name}
    ours = jax.jit(jax.grad(loss))(adapters, tokens)
    save_adapter(replace_weights(params, ours), tmp_path / "gradients", "base")
    tensors = load_file(tmp_path / "gradients/adapter_model.safetensors")
    assert tensors.keys() == theirs.keys() and len(tensors) == 2 * 2 * 7
    for name, gradient in theirs.items():
        gradient = gradient.numpy()
        assert np.linalg.norm(tensors[name] - gradient) < 1e-5 * np.linalg.norm(gradient), name


def test_the_value_head_of_a_reward_model_is_read_by_peft_and_back(tmp_path):
    head = {"value": np.random.default_rng(0).standard_normal((1, 32), np.float32)}
    with_head = with_heads(our_base(), dataclasses.replace(our_base().config, value_head=True))
    params = replace_weights(with_random_adapters(with_head, LORA), head)
    save_adapter(params, tmp_path / "ours", "")  # or peft looks for files of the base
    raw = {key: value for key, value in raw_config("qwen3").items() if key != "model_type"}
    classifier = Qwen3ForSequenceClassification(Qwen3Config(**raw, num_labels=1))
    model = peft.PeftModel.from_pretrained(classifier, tmp_path / "ours")
    assert np.array_equal(model.base_model.model.score.modules_to_save.default.weight.detach(), head["value"])
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    chex.assert_trees_all_equal(ours, theirs)
    assert np.array_equal(load_adapter(tmp_path / "theirs", params.config)["value"], head["value"])
