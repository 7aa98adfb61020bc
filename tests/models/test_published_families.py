"""Qwen 1 and Baichuan, whose code transformers lacks, against their published formulas on torch."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from hf_oracle import TOLERANCE, agree_in_greedy_text, our_logits
from hf_tensors import params_from_tensors, tensors_of
from lora_models import with_random_adapters, with_stored_adapters
from random_weights import random_params
from safetensors.numpy import load_file
from slow_cases import with_slow
from torch import nn

from jaxrl_llm.algos import reward_model
from jaxrl_llm.builders.models import config_with_heads
from jaxrl_llm.hf.config import read_config, to_hf_config
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.peft import save_adapter
from jaxrl_llm.models import LoraConfig, named_leaves
from jaxrl_llm.models.attention import alibi_slopes
from jaxrl_llm.rollout.checks import ring_problem
from jaxrl_llm.rollout.config import RolloutConfig

LENGTH = 37
BAICHUAN = {
    **{"model_type": "baichuan", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
    **{"max_position_embeddings": 64, "tie_word_embeddings": False, "auto_map": {}},
}
B13 = {"max_position_embeddings": None, "model_max_length": 64, "hidden_size": 48, "num_attention_heads": 6}
CASES = {
    "qwen": {
        **{"model_type": "qwen", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 88},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "kv_channels": 8, "rotary_emb_base": 1e3},
        **{"layer_norm_epsilon": 1e-3, "seq_length": 64, "max_position_embeddings": 128, "no_bias": True},
        **{"use_dynamic_ntk": True, "use_logn_attn": True, "tie_word_embeddings": False},
        **{"rotary_pct": 1.0, "scale_attn_weights": True, "use_flash_attn": "auto", "fp16": False},
    },
    "baichuan2 13b": {**BAICHUAN, **B13, "z_loss_weight": 0},
    "baichuan2 7b": {**BAICHUAN, "z_loss_weight": 0},
    "baichuan 13b": {**BAICHUAN, **B13},
}
each_case = pytest.mark.parametrize("case", with_slow(CASES, {"baichuan2 7b", "baichuan 13b"}))


class Oracle(nn.Module):
    """A decoder with the published names, and formulas in float32, each layer with whole attention matrices.

    Qwen 1: QWenLMHeadModel of Qwen/Qwen-7B. Baichuan: BaichuanForCausalLM of baichuan-inc/Baichuan-13B-Base,
    Baichuan2-7B-Base and Baichuan2-13B-Base.
    """

    def __init__(self, raw):
        super().__init__()
        self.raw, self.is_qwen = raw, raw["model_type"] == "qwen"
        d, f, vocab = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"]
        linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False)
        norm = lambda: nn.RMSNorm(d, eps=raw["layer_norm_epsilon" if self.is_qwen else "rms_norm_eps"])
        tree, depth = nn.ModuleDict, range(raw["num_hidden_layers"])
        if self.is_qwen:
            f //= 2
            layer = lambda: {
                **{"ln_1": norm(), "attn": tree({"c_attn": nn.Linear(d, 3 * d), "c_proj": linear(d, d)})},
                **{"ln_2": norm(), "mlp": tree({"w1": linear(d, f), "w2": linear(d, f)})},
            }
            layers = nn.ModuleList(tree(layer()) for _ in depth)
            for layer in layers:
                layer["mlp"]["c_proj"] = linear(f, d)
            self.transformer = tree({"wte": nn.Embedding(vocab, d), "h": layers, "ln_f": norm()})
        else:
            mlp = lambda: {"gate_proj": linear(d, f), "up_proj": linear(d, f), "down_proj": linear(f, d)}
            layer = lambda: {
                **{"input_layernorm": norm(), "post_attention_layernorm": norm(), "mlp": tree(mlp())},
                "self_attn": tree({"W_pack": linear(d, 3 * d), "o_proj": linear(d, d)}),
            }
            layers = nn.ModuleList(tree(layer()) for _ in depth)
            self.model = tree({"embed_tokens": nn.Embedding(vocab, d), "layers": layers, "norm": norm()})
        self.lm_head = linear(d, vocab)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                generator = torch.Generator().manual_seed(sum(map(ord, name)))
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(1 + 0.3 * noise if weight.ndim == 1 and "c_attn" not in name else 0.25 * noise)

    def forward(self, tokens):
        silu = nn.functional.silu
        if self.is_qwen:
            x = self.transformer["wte"](tokens)
            for layer in self.transformer["h"]:
                mlp, attn = layer["mlp"], layer["attn"]
                x = x + attn["c_proj"](self.attend(attn["c_attn"](layer["ln_1"](x))))
                h = layer["ln_2"](x)
                x = x + mlp["c_proj"](mlp["w1"](h) * silu(mlp["w2"](h)))
            return self.lm_head(self.transformer["ln_f"](x))
        x = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:
            mlp, attn = layer["mlp"], layer["self_attn"]
            x = x + attn["o_proj"](self.attend(attn["W_pack"](layer["input_layernorm"](x))))
            h = layer["post_attention_layernorm"](x)
            x = x + mlp["down_proj"](silu(mlp["gate_proj"](h)) * mlp["up_proj"](h))
        head = self.lm_head.weight
        head = nn.functional.normalize(head) if "z_loss_weight" in self.raw else head
        return nn.functional.linear(self.model["norm"](x), head)

    def attend(self, qkv):
        rows, length, width = qkv.shape
        heads = self.raw["num_attention_heads"]
        size = width // 3 // heads
        q, k, v = (part.reshape(rows, length, heads, size).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        bias = torch.full((length, length), -torch.inf).triu(1)
        if "model_max_length" in self.raw:
            slopes = torch.tensor(published_slopes(heads))
            bias = bias + slopes[:, None, None] * (torch.arange(length) - length + 1)
        else:
            base = self.raw.get("rotary_emb_base", 1e4)
            frequencies = base ** -(torch.arange(0, size, 2) / size)
            angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
            turn = lambda x: torch.cat([-x[..., size // 2 :], x[..., : size // 2]], dim=-1)
            q, k = (x * angles.cos() + turn(x) * angles.sin() for x in (q, k))
        weights = (q @ k.transpose(2, 3) / math.sqrt(size) + bias).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(rows, length, -1)

    def generate(self, tokens, max_new_tokens, **_):
        for _ in range(max_new_tokens):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


def published_slopes(heads):
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return published_slopes(closest) + published_slopes(2 * closest)[0::2][: heads - closest]


def both(case):
    """The oracle, and our model with its weights."""
    model, config = Oracle(CASES[case]), read_config(CASES[case])
    tensors = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    return model, params_from_tensors(config, tensors), tensors


def some_tokens(rows=2, length=LENGTH):
    return np.random.default_rng(0).integers(3, 96, (rows, length))


@pytest.mark.parametrize("case", with_slow(CASES, CASES.keys() - {"baichuan2 13b"}))
def test_logits_gradients_and_files(case, tmp_path):
    """The gradients of all weights; the export has the published names, and its bytes are read back."""
    (model, params, tensors), tokens = both(case), some_tokens()
    logits = model(torch.tensor(tokens))
    assert logits.std() > 0.3
    np.testing.assert_allclose(our_logits(params, tokens), logits.detach(), atol=TOLERANCE, rtol=0)
    # Gradients.
    targets = torch.tensor(tokens[:, 1:]).flatten()
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets).backward()

    def loss(params):
        logprobs = jax.nn.log_softmax(our_logits.__wrapped__(params, jnp.asarray(tokens)))[:, :-1]
        return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()

    gradients = tensors_of(params.config, jax.jit(jax.grad(loss))(params))
    assert gradients.keys() == tensors.keys()
    for name, weight in model.named_parameters():
        scale = weight.grad.abs().max()
        assert scale > 1e-5, name
        np.testing.assert_allclose(gradients[name], weight.grad, atol=1e-3 * scale, rtol=0, err_msg=name)
    # Files.
    save_model(params, params.config, tmp_path, dtype="float32")
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == tensors.keys() and read_config(tmp_path) == params.config
    assert all(np.array_equal(stored[name], x) for name, x in tensors.items())
    again = load_params(tmp_path, params.config)
    for (name, x), (_, y) in zip(named_leaves(again), named_leaves(params), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.mark.parametrize(
    ("case", "cache"),
    [
        pytest.param("qwen", "ring", marks=pytest.mark.slow),
        ("baichuan2 13b", "paged"),
        pytest.param("baichuan2 13b", "ring", marks=pytest.mark.slow),
        pytest.param("baichuan2 7b", "paged", marks=pytest.mark.slow),
    ],
)
def test_greedy_text(case, cache):
    model, params, _ = both(case)
    agree_in_greedy_text(model, params, some_tokens(rows=8, length=12), new=24, cache=cache, page=8)


def test_packed_rows_with_alibi_equal_separate_ones():
    """Of distances within a sequence; a long one, whose positions are no number of bfloat16."""
    _, params, _ = both("baichuan2 13b")
    tokens = jnp.asarray(some_tokens(1, 24))
    call = jax.jit(lambda tokens, positions, segments: params(tokens, positions, segments))
    positions = jnp.concatenate([jnp.arange(10), 300 + jnp.arange(14)])[None]
    packed = call(tokens, positions, jnp.asarray([[1] * 10 + [2] * 14]))
    alone = params(tokens[:, 10:], jnp.arange(14)[None])
    np.testing.assert_allclose(packed[:, 10:], alone, atol=1e-4)


def test_slopes_by_hand():
    """Press et al.: of 8 heads 1/2, 1/4 ... 1/256. Of 12 the further ones are of 16: 2^-0.5, 2^-1.5 ..."""
    np.testing.assert_allclose(alibi_slopes(8), [0.5**i for i in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(12)[8:], [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
    np.testing.assert_allclose(alibi_slopes(40), published_slopes(40))


@pytest.mark.parametrize(
    "targets", [("o_proj",), ("q_proj", "k_proj", "v_proj", "up_proj", "down_proj")], ids=str
)
def test_adapters_of_qwen_are_pefts(targets, tmp_path):
    """Two layers are called c_proj. peft knows them by the names of their parents."""
    (model, base, _), tokens = both("qwen"), some_tokens()
    params = with_random_adapters(base, LoraConfig(rank=4, alpha=6.0, targets=targets))
    save_adapter(params, tmp_path, "base")
    adapted = peft.PeftModel(model, peft.LoraConfig.from_pretrained(tmp_path))
    weights = peft.utils.load_peft_weights(tmp_path)
    assert not peft.set_peft_model_state_dict(adapted, weights).unexpected_keys
    with torch.no_grad():
        expected = adapted(torch.tensor(tokens)).numpy()
    np.testing.assert_allclose(our_logits(params, tokens), expected, atol=TOLERANCE, rtol=0)
    again = with_stored_adapters(base, tmp_path)
    np.testing.assert_allclose(our_logits(again, tokens), expected, atol=TOLERANCE, rtol=0)


def test_eight_bits_do_not_hold_the_positions_of_alibi():
    rollout = RolloutConfig(cache="paged", cache_dtype="int8")
    assert "rounds the positions that ALiBi" in ring_problem(rollout, read_config(CASES["baichuan 13b"]))
    assert not ring_problem(rollout, read_config(CASES["baichuan2 7b"]))


@pytest.mark.parametrize("case", ["qwen", "baichuan2 7b"])
def test_a_reward_model_can_be_exported(case):
    """It has another head, whose rows are not normalised, and no code in the published folder."""
    model = config_with_heads(read_config(CASES[case]), reward_model.Config())
    raw = to_hf_config(model)
    assert model.value_head and read_config(raw) == model
    assert raw["architectures"][0].endswith("ForSequenceClassification")
    assert "AutoModelForCausalLM" not in raw["auto_map"]


def test_adapters_of_baichuan_1_come_back(tmp_path):
    """The folder packs queries, keys and values; the model is exported as Llama, and so are its adapters."""
    base = random_params(read_config(BAICHUAN))
    adapted = with_random_adapters(base, LoraConfig(rank=2))
    save_adapter(adapted, tmp_path, "org/base")
    again = with_stored_adapters(base, tmp_path)
    for (name, one), (_, other) in zip(named_leaves(adapted), named_leaves(again), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=name)
