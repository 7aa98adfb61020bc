"""Families of 2025 and 2026 against transformers on torch: logits, gradients, text, export, adapters."""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from family_cases import BASE, CASES, DELTA, EXPERTS, GLM, GRANITE_HYBRID, MINIMAX, NEMOTRON, SPECIAL
from hf_oracle import TOLERANCE, agree_in_greedy_text, hf_logits, our_logits, soft_capped, state_dict
from hf_tensors import params_from_tensors, tensors_of
from lora_models import with_random_adapters, with_stored_adapters
from safetensors.torch import load_file, save_file
from slow_cases import with_slow

from jaxrl_llm.algos import reward_model
from jaxrl_llm.builders.models import config_with_heads
from jaxrl_llm.hf.config import read_config, to_hf_config
from jaxrl_llm.hf.export import export_config, save_model
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.peft import save_adapter, unread_by_peft
from jaxrl_llm.models import LoraConfig
from jaxrl_llm.models.attention import for_length
from jaxrl_llm.models.lora_config import TARGETS

# transformers 5.24 has the class, but not in this list.
transformers.AutoModelForCausalLM.register(
    transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
)
LENGTH = 37
TOWERS = "audio_tower embed_audio embed_vision vision_tower"
SELECTION_BIAS = ("e_score_correction_bias", "expert_bias")
CONSTANT = (*SELECTION_BIAS, "layer_scalar")
"""Ends of the names of weights without a gradient: buffers in transformers."""
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # transformers'
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),  # peft's own
]
QUICK = {"olmo3", "qwen3.5", "lfm2", "granite-4", "glm-5"}
"""A case for each kind of layer. Programs of the others are compiled with the slow tests."""
SMALL = QUICK - {"granite-4", "olmo3"}
"""Of these also programs of gradients and of decoding: each has another kind of layer, and they are small."""
EACH_FAMILY = (
    *("gemma3", "gemma4", "gemma4 small", "gemma4 moe", "olmo3", "olmo-hybrid", "smollm3, odd", "phi-4"),
    *("qwen3.5", "qwen3.5 moe", "qwen3-next", "lfm2", "lfm2 moe", "nemotron, latent", "granite", "granite-4"),
    *("ministral3", "mistral4", "glm-4.7", "minimax-m2", "deepseek-v3.2", "glm-5, shared", "seed-oss"),
    *("exaone4", "olmo2", "hunyuan"),
)
each_case = pytest.mark.parametrize("case", with_slow(CASES, CASES.keys() - QUICK))
each_small_case = pytest.mark.parametrize("case", with_slow(CASES, CASES.keys() - SMALL))


def oracle(case):
    """The eager float32 model of transformers: large weights, and no norm or bias at its initial value."""
    family, changes = CASES[case]
    config = transformers.AutoConfig.for_model(family, **copy.deepcopy({**BASE, **SPECIAL, **changes}))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        constants = [(name, x) for name, x in model.named_buffers() if name.endswith(CONSTANT)]
        for name, weight in (*model.named_parameters(), *constants):
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))
            shift = 0.1 if name.endswith(SELECTION_BIAS) else 0.3  # more leaves some expert unchosen
            weight.copy_(weight + shift * noise if weight.ndim == 1 else 0.2 * noise)
    return model


def raw_of(model):
    return json.loads(json.dumps(model.config.to_dict()))


def ours(model):
    """Our model with the same weights."""
    config = for_length(read_config(raw_of(model)), LENGTH)
    return params_from_tensors(config, on_disk(state_dict(model), config))


def on_disk(tensors, config):
    """Tensors as published files have them."""
    family = config.family
    return original_names(tensors, config.delta) if family == "olmo_hybrid" else unfused(tensors, family)


def original_names(tensors, delta):
    """The names of OLMo-hybrid, whose delta layers have other norms, and three convolutions."""
    names = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
    keys, out = delta.key_heads * delta.key_dim, {}
    for name, x in tensors.items():
        if f"{'.'.join(name.split('.')[:3])}.linear_attn.A_log" in tensors:
            for theirs, disk in names.items():
                name = name.replace(f".{theirs}.", f".{disk}.")
        if ".conv1d." in name:
            parts = np.split(x, [keys, 2 * keys])
            out |= {
                name.replace("conv1d", f"{one}_conv1d"): part for one, part in zip("qkv", parts, strict=True)
            }
        else:
            out[name] = x
    return out


GRANITE_NAMES = {
    ".router.weight": ".router.layer.weight",
    ".experts.gate_up_proj": ".input_linear.weight",
    ".experts.down_proj": ".output_linear.weight",
}


def unfused(tensors, family):
    """A tensor for each matrix of each expert."""
    names = dict(gate="w1", up="w3", down="w2") if family in ("minimax_m2", "lfm2_moe") else {}
    out = {}
    for name, x in tensors.items():
        name = name.replace("model.", "backbone.", 1) if family == "nemotron_h" else name
        name = name.replace(".mlp.", ".block_sparse_moe.") if family == "minimax_m2" else name
        if family == "granitemoehybrid":
            for theirs, disk in GRANITE_NAMES.items():
                name = name.replace(theirs, disk)
        if ".experts." not in name or family in ("gemma4_text", "mistral4"):
            out[name] = x
            continue
        prefix, _, last = name.rpartition(".")
        parts = ("gate", "up") if last.startswith("gate_up") else (last.removesuffix("_proj"),)
        for expert, matrices in enumerate(x):
            rows = np.split(matrices, len(parts))
            matrices = zip((names.get(of, f"{of}_proj") for of in parts), rows, strict=True)
            out |= {f"{prefix}.{expert}.{of}.weight": matrix for of, matrix in matrices}
    return out


def some_tokens(rows=2, length=LENGTH):
    """Ids above the special ones: transformers' generate hides padding from attention."""
    return np.random.default_rng(0).integers(3, BASE["vocab_size"], (rows, length))


@pytest.mark.parametrize("case", sorted(QUICK - SMALL))
def test_logits(case):
    model, tokens = oracle(case), some_tokens()
    assert_same_logits(our_logits(ours(model), tokens), hf_logits(model, tokens))


def assert_same_logits(logits, theirs):
    assert theirs.std() > 0.3
    np.testing.assert_allclose(logits, theirs, atol=TOLERANCE, rtol=0)


def test_step_sizes_of_mamba_have_a_lower_bound(monkeypatch):
    """For sequences; transformers 5.24 forgets it when it decodes."""
    bounds = [(0.001, "small"), (0.8, "large")]
    for bound, case in bounds:
        monkeypatch.setitem(CASES, case, ("nemotron_h", {**NEMOTRON, "time_step_min": bound}))
    small, large = (hf_logits(oracle(case), some_tokens()) for _, case in bounds)
    assert np.abs(large - small).max() > 0.01
    assert_same_logits(our_logits(ours(oracle("large")), some_tokens()), large)


def test_older_keys_of_mamba_count_before_the_newer_ones():
    old = {"mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_dt_min": 0.5}
    theirs = transformers.AutoConfig.for_model("nemotron_h", **BASE, **NEMOTRON, **old)
    mamba = read_config({"model_type": "nemotron_h", **BASE, **NEMOTRON, **old, "num_hidden_layers": 6}).mamba
    found = mamba.groups, mamba.conv_width, mamba.conv_bias, mamba.dt_min
    assert found == (theirs.n_groups, theirs.conv_kernel, theirs.use_conv_bias, theirs.time_step_min)
    assert found == (4, 3, False, 0.5)


def named_gradients(model, params, loss):
    """Return the logits of our (loss, logits), and by the names on disk our gradients of the loss and the
    gradients in transformers' weights. Our gradients of constants must be 0."""
    found, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
    gradients = tensors_of(params.config, found)
    theirs = {name: x.grad.numpy() for name, x in model.named_parameters() if ".indexer." not in name}
    theirs = on_disk(theirs, params.config)
    constant = {name for name in gradients if name.endswith(CONSTANT) or ".indexer." in name}
    assert not any(gradients.pop(name).any() for name in constant)
    assert gradients.keys() == theirs.keys()
    return logits, gradients, theirs


def assert_same_gradients(gradients, theirs):
    for name, expected in theirs.items():
        scale = np.abs(expected).max()
        is_zero = name.endswith("k_proj.bias")  # without RoPE: it shifts all scores alike
        assert scale > 1e-5 or is_zero, name
        atol = 1e-3 * max(scale, 1e-4)
        np.testing.assert_allclose(gradients[name], expected, atol=atol, rtol=0, err_msg=name)


@each_small_case
def test_logits_and_gradients_of_all_weights(case):
    model, tokens = oracle(case), some_tokens()
    theirs, targets = model(torch.tensor(tokens), use_cache=False).logits, torch.tensor(tokens[:, 1:])
    torch.nn.functional.cross_entropy(theirs[:, :-1].flatten(0, 1), targets.flatten()).backward()

    def loss(params):
        positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
        logits = soft_capped(params, params(jnp.asarray(tokens), positions) @ params.head.T)
        logprobs = jax.nn.log_softmax(logits)[:, :-1]
        return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean(), logits

    logits, *gradients = named_gradients(model, ours(model), loss)
    assert_same_logits(logits, theirs.detach().numpy())
    assert_same_gradients(*gradients)


@each_small_case
def test_greedy_text(case):
    model = oracle(case)
    agree_in_greedy_text(model, ours(model), some_tokens(rows=8, length=12), new=24)


@pytest.mark.parametrize("case", with_slow(EACH_FAMILY, set(EACH_FAMILY) - SMALL))
def test_adapters_are_read_by_peft(case, tmp_path):
    model, tokens = oracle(case), some_tokens()
    params = with_random_adapters(ours(model), LoraConfig(rank=4, alpha=3.0))
    save_adapter(params, tmp_path / "adapter", "org/base")
    assert not unread_by_peft(params.config)
    expected, without = np.asarray(our_logits(params, tokens)), hf_logits(model, tokens)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    np.testing.assert_allclose(expected, hf_logits(adapted, tokens), atol=3 * TOLERANCE, rtol=0)
    assert np.abs(expected - without).max() > 0.1


PHI4 = {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}
GEMMA4 = {
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "target_parameters": [
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        *("experts.gate_up_proj", "experts.down_proj"),
    ],
}
JOINED_EXPERTS = {
    "target_modules": ["o_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}


@pytest.mark.parametrize(
    ("case", "lora"),
    [
        ("phi-4", PHI4),
        ("phi-4", {**PHI4, "use_rslora": True}),
        pytest.param("gemma4 moe", GEMMA4, marks=pytest.mark.slow),
        pytest.param("gemma4 moe", JOINED_EXPERTS, marks=pytest.mark.slow),
        pytest.param("mistral4", JOINED_EXPERTS, marks=pytest.mark.slow),
        pytest.param("granite-4", JOINED_EXPERTS, marks=pytest.mark.slow),
    ],
    ids=["phi-4", "phi-4, rank stabilized", "gemma4 moe", "gemma4 moe, experts", "mistral4", "granite-4"],
)
def test_adapters_of_joined_layers_are_read(case, lora, tmp_path):
    """PEFT's adapter of Phi-3's qkv_proj has one A for q, k and v; ours has one for each."""
    model, tokens = oracle(case), some_tokens()
    base = ours(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **lora)).eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    adapted.save_pretrained(tmp_path / "theirs")
    params = with_stored_adapters(base, tmp_path / "theirs")
    expected = hf_logits(adapted, tokens)
    np.testing.assert_allclose(our_logits(params, tokens), expected, atol=TOLERANCE, rtol=0)
    save_adapter(params, tmp_path / "ours", "org/base")
    again = with_stored_adapters(base, tmp_path / "ours")
    np.testing.assert_allclose(our_logits(again, tokens), expected, atol=TOLERANCE, rtol=0)
    theirs = peft.PeftModel.from_pretrained(oracle(case), tmp_path / "ours").eval()
    np.testing.assert_allclose(hf_logits(theirs, tokens), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "targets"),
    [("olmo-hybrid", list(TARGETS)), ("nemotron, odd", ["in_proj", "o_proj", "up_proj", "down_proj"])],
)
def test_adapters_of_some_layers_of_recurrent_models_are_read(case, targets, tmp_path):
    """q_proj of OLMo-hybrid is a layer of both kinds; a_proj, b_proj and g_proj have no adapters here. The
    decoder of Nemotron-H has another name in transformers than in its files."""
    model, tokens = oracle(case), some_tokens()
    base, without = ours(model), hf_logits(model, tokens)
    lora = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, rank_pattern={"o_proj": 2})
    adapted = peft.get_peft_model(model, lora).eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    adapted.save_pretrained(tmp_path)
    params = with_stored_adapters(base, tmp_path)
    expected = hf_logits(adapted, tokens)
    np.testing.assert_allclose(our_logits(params, tokens), expected, atol=TOLERANCE, rtol=0)
    assert np.abs(expected - without).max() > 0.1


PARTS = (9, 7, 8, 13)
"""Tokens of a prompt, of two responses that share it, and of another sequence of the same row."""
PATHS = (np.r_[:16], np.r_[:9, 16:24], np.r_[24:37])


def packed_row():
    """(tokens, positions, segments, last) of one row."""
    numbers, last = (np.repeat(ids, PARTS) for ids in ([1, 2, 3, 4], [3, 2, 3, 4]))
    return np.stack([some_tokens(rows=1)[0], np.r_[:16, 9:17, :13], numbers, last])[:, None]


def packed_logits(params, row):
    *arrays, last = map(jnp.asarray, row)
    return soft_capped(params, params(*arrays, last=last) @ params.head.T)[0]


def assert_logits_of_single_rows(logits, model, row):
    for path in PATHS:
        np.testing.assert_allclose(logits[path], hf_logits(model, row[0][:, path])[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", ["olmo-hybrid", "gemma4 small", "deepseek-v3.2"])
def test_a_packed_row_has_the_logits_of_single_rows(case):
    """States begin anew at each border, or continue from the end of the shared prompt; betas up to 2 turn
    them round. transformers itself would leak over the borders."""
    model, row = oracle(case), packed_row()
    assert_logits_of_single_rows(jax.jit(packed_logits)(ours(model), row), model, row)


@pytest.mark.slow
@pytest.mark.parametrize("case", EACH_FAMILY)
def test_a_packed_row_has_the_logits_and_gradients_of_single_rows(case):
    """Gradients of all weights, for random gradients of the logits."""
    model, row = oracle(case), packed_row()
    seeds = np.random.default_rng(1).normal(0, 1 / 300, (LENGTH, BASE["vocab_size"])).astype(np.float32)
    for i, path in enumerate(PATHS):
        own = np.where((path < PARTS[0]) & (i > 0), 0, seeds[path].T).T  # a prompt's tokens count once
        (model(torch.tensor(row[0][:, path]), use_cache=False).logits[0] * torch.tensor(own)).sum().backward()
    loss = lambda p: (((logits := packed_logits(p, row)) * seeds).sum(), logits)
    logits, *gradients = named_gradients(model, ours(model), loss)
    assert_logits_of_single_rows(logits, model, row)
    assert_same_gradients(*gradients)


@pytest.mark.parametrize("case", CASES)
def test_absent_keys_are_the_defaults_of_transformers(case):
    family, changes = CASES[case]
    raw = {**BASE, **SPECIAL, **changes}
    theirs = transformers.AutoConfig.for_model(family, **copy.deepcopy(raw)).to_dict()
    if family == "nemotron_h":
        del raw["num_hidden_layers"]  # the length of its list
    assert read_config({"model_type": family, **raw}) == read_config(json.loads(json.dumps(theirs)))


@pytest.mark.parametrize("case", CASES)
def test_config_of_a_reward_model_is_expressed_if_the_policys_is(case):
    """The rule that asks before a run reads the policy's architecture without the heads of the algorithm."""
    family, changes = CASES[case]
    raw = transformers.AutoConfig.for_model(family, **copy.deepcopy({**BASE, **SPECIAL, **changes})).to_dict()
    model = config_with_heads(read_config(json.loads(json.dumps(raw))), reward_model.Config())
    read = read_config(to_hf_config(export_config(model)))
    assert model.value_head and read.value_head and read.tie_embeddings == model.tie_embeddings


@each_case
def test_config_reads_back_in_transformers(case):
    model = oracle(case)
    config = read_config(raw_of(model))
    written = json.loads(json.dumps(to_hf_config(config, "float32")))
    assert read_config(written) == config
    theirs = transformers.AutoConfig.for_model(**written, **SPECIAL)
    theirs._attn_implementation = "eager"
    again = transformers.AutoModelForCausalLM.from_config(theirs).eval()
    again.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(hf_logits(again, some_tokens()), hf_logits(model, some_tokens()))


MTP = {"qwen3.5": "mtp.fc", "qwen3.5 moe": "mtp.fc", "qwen3-next": "mtp.fc", "nemotron": "mtp.fc"}
MTP |= {"glm-4.7": "model.layers.3.eh_proj", "minimax-m2": "model.layers.4.eh_proj"}
MTP |= {"deepseek-v3.2": "model.layers.4.eh_proj", "glm-5, shared": "model.layers.5.eh_proj"}
"""A weight of multi-token prediction, which the models have no use for."""
WRITTEN = [case for case in EACH_FAMILY if case != "olmo-hybrid"]  # its own test is below


@pytest.mark.parametrize("case", with_slow(WRITTEN, set(WRITTEN) - {"granite-4"}))
def test_files_come_back_byte_for_byte(case, tmp_path, capsys):
    """Weights of a layer after the last one are skipped; transformers reads what is written."""
    model, tokens = oracle(case), some_tokens()
    folder, first, second = (tmp_path / name for name in ("theirs", "first", "second"))
    model.save_pretrained(folder)
    stored, file = load_file(folder / "model.safetensors"), "model.safetensors"
    predictor = {f"{MTP[case]}.weight": torch.ones(2, 2)} if case in MTP else {}
    save_file({**stored, **predictor}, folder / file)
    for source, target in ((folder, first), (first, second)):
        params = load_params(source, read_config(source))
        save_model(params, params.config, target, dtype="float32")
    line = "1 weights of multi-token prediction are not used"
    assert (line in capsys.readouterr().err) == bool(predictor)
    assert (first / file).read_bytes() == (second / file).read_bytes()
    written = load_file(first / file)
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], x) for name, x in stored.items())
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        first, output_loading_info=True, attn_implementation="eager", pad_token_id=0
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    np.testing.assert_allclose(hf_logits(again, tokens), hf_logits(model, tokens), atol=2e-6, rtol=0)


def test_convolutions_of_olmo_hybrid_have_the_channels_of_queries_keys_and_values(tmp_path):
    """transformers writes equal parts, which are read; exports are right, and it reads them, too."""
    model, tokens = oracle("olmo-hybrid"), some_tokens()
    name = "model.layers.0.linear_attn.{}_conv1d.weight"
    shapes = lambda file: [load_file(file)[name.format(one)].shape[0] for one in "qkv"]
    expected = on_disk(state_dict(model), read_config(raw_of(model)))
    for original in (True, False):
        model.save_pretrained(theirs := tmp_path / f"theirs{original}", save_original_format=original)
        params = load_params(theirs, read_config(theirs))
        save_model(params, params.config, tmp_path / "ours", dtype="float32")
        written = load_file(file := tmp_path / "ours" / "model.safetensors")
        assert written.keys() == expected.keys()
        assert all(np.array_equal(written[name], x) for name, x in expected.items())
        assert shapes(file) == [24, 24, 48]
    assert shapes(tmp_path / "theirsTrue" / "model.safetensors") == [32, 32, 32]
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager", pad_token_id=0
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    np.testing.assert_array_equal(hf_logits(again, tokens), hf_logits(model, tokens))
    save_file({**written, name.format("q"): torch.ones(25, 1, 4)}, file)
    with pytest.raises(
        ValueError, match=r"1 of another shape: .*q_conv1d.weight \[25, 1, 4\].* says \[24, 1, 4\]"
    ):
        load_params(file.parent, params.config)


def test_no_rope_of_olmo_hybrid_is_a_theta_of_null():
    """An absent theta is 10,000, as in transformers."""
    raw = {"model_type": "olmo_hybrid", **BASE}
    for changes, rotates in (
        ({}, True),
        ({"rope_parameters": None}, True),
        ({"rope_theta": None}, False),
        ({"rope_parameters": {"rope_theta": None}}, False),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, True),
    ):
        config = read_config({**raw, **changes})
        assert (config.rope_layers is None) == rotates, changes
        theirs = transformers.AutoConfig.for_model(**copy.deepcopy({**raw, **changes}))
        assert (theirs.rope_parameters["rope_theta"] is not None) == rotates
        assert read_config(to_hf_config(config)) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported; supported: 1"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported; supported: \[\]"),
        ({"hidden_act": "gelu"}, "activation is gelu: with delta it must be silu"),
    ],
)
def test_what_qwen3_next_lacks_is_refused_by_name(changes, message):
    raw = {"model_type": "qwen3_next", **BASE, **DELTA, **EXPERTS}
    assert read_config(raw).moe.normalize and read_config(raw).delta.projections == "qkvz"
    with pytest.raises(ValueError, match=message):
        read_config({**raw, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "MX*"}, "layer_types=.*'X'.* must be a list of linear_attention"),
        ({"hybrid_override_pattern": 5}, "layer_types=5 must be a list of linear_attention"),
        ({"layers_block_type": ["mamba", "attention"]}, "layer_kinds names the feed-forwards"),
        ({"layers_block_type": ["mamba", "mlp"]}, "layer_kinds has no attention"),
        ({"moe_latent_size": -8}, "moe_latent_size=-8 must be"),
    ],
)
def test_what_nemotron_lacks_is_refused_by_name(changes, message):
    raw = {"model_type": "nemotron_h", **BASE, **NEMOTRON}
    del raw["num_hidden_layers"]
    assert read_config(raw).layer_kinds == ("mamba", "experts", "mamba", "attention", "mlp", "experts")
    raw["layers_block_type"] = None if "hybrid_override_pattern" in changes else raw["layers_block_type"]
    with pytest.raises(ValueError, match=message):
        read_config({**raw, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["mamba"] * 4}, "layer_kinds has no attention"),
        (
            {"layer_types": ["mamba", "attention", "moe", "mamba"]},
            "layer_types=.*'moe'.* must be a list of mamba",
        ),
        (
            {"mamba_d_head": 9},
            "mamba_d_head=9 times mamba_n_heads must be 64, mamba_expand times hidden_size",
        ),
        ({"time_step_limit": [0.01, 0.1]}, r"time_step_limit=\[0.01, 0.1\] is not supported"),
        ({"hidden_act": "gelu"}, 'hidden_act=.gelu. is not supported; supported: "silu"'),
    ],
)
def test_what_granite_4_lacks_is_refused_by_name(changes, message):
    raw = {"model_type": "granitemoehybrid", **BASE, **GRANITE_HYBRID}
    assert read_config({**raw, "time_step_limit": [0.0, {"__float__": "Infinity"}]}) == read_config(raw)
    with pytest.raises(ValueError, match=message):
        read_config({**raw, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, 'scoring_func=.softmax. is not supported; supported: "sigmoid"'),
        ({"qk_norm_type": "per_head"}, 'qk_norm_type=.* is not supported; supported: "per_layer"'),
        ({"use_qk_norm": False}, "use_qk_norm=False is not supported; supported: true"),
        ({"use_routing_bias": False}, "use_routing_bias=False is not supported; supported: true"),
        ({"shared_intermediate_size": 8}, "shared_intermediate_size=8 is not supported; supported: 0"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported"),
        ({"rotary_dim": 17}, "rotary_dim=17 must be a whole number from 1 to 16"),
    ],
)
def test_what_minimax_m2_lacks_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config({"model_type": "minimax_m2", **BASE, **MINIMAX, **changes})


def test_both_spellings_of_rotary_dims_of_minimax_m2():
    raw = {"model_type": "minimax_m2", **BASE, **MINIMAX}
    assert read_config(raw).rotary_dim == 8
    written = to_hf_config(read_config(raw))
    assert written["rotary_dim"] == 8 and written["partial_rotary_factor"] == 0.5
    assert read_config({**raw, "partial_rotary_factor": 0.25}).rotary_dim == 4  # as in transformers
    theirs = transformers.MiniMaxM2Config(**BASE, **MINIMAX, partial_rotary_factor=0.25)
    assert theirs.rope_parameters["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize(
    ("types", "found"),
    [
        (["dense", "sparse", "dense"], "'sparse', 'dense'"),
        (["dense", "sparse"], "'sparse'"),
        (["dense", "sparse", "moe"], "'moe'"),
        ("sparse", "'sparse'"),
    ],
)
def test_dense_layers_after_sparse_ones_are_refused(types, found):
    raw = {"model_type": "glm4_moe_lite", **BASE, **GLM, "mlp_layer_types": types}
    needed = (
        f"mlp_layer_types=.*{found}.* is not supported; supported: a list of 3 entries, dense ones before"
    )
    with pytest.raises(ValueError, match=needed):
        read_config(raw)


@pytest.mark.parametrize(
    ("kind", "case", "modules"),
    [
        pytest.param("gemma3", "gemma3", "multi_modal_projector vision_tower", marks=pytest.mark.slow),
        *(pytest.param("gemma4", x, TOWERS, marks=pytest.mark.slow) for x in ("gemma4", "gemma4 small")),
        ("mistral3", "ministral3", "multi_modal_projector vision_tower"),
        ("qwen3_5", "qwen3.5", "visual"),
    ],
)
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_one_that_sees_images(kind, case, *, modules, prefix, tmp_path, capsys):
    """Both layouts of the folder; without its folder an export is a language model of its own."""
    model = oracle(case)
    tensors = {name.replace("model.", prefix, 1): x.contiguous() for name, x in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    elif prefix == "language_model.model.":
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    if unread := model.config.to_dict().get("num_kv_shared_layers"):
        tensors[f"{prefix}layers.7.self_attn.v_proj.weight"] = torch.ones(2, 2)
    outer = "" if prefix == "language_model.model." else "model."
    towers = {f"{outer}{module}.x.weight": torch.ones(2, 2) for module in modules.split()}
    save_file(tensors | towers, tmp_path / "model.safetensors")
    text = raw_of(model)
    raw = {"model_type": kind, "text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    params = load_params(tmp_path, read_config(tmp_path))
    found = f"{modules.replace(' ', ' and ')} ({len(towers)} weights)"
    lines = capsys.readouterr().err
    assert f"{found} are not used; exports copy them" in lines
    assert ("left out: 1 weights of keys and values" in lines) == bool(unread)
    tokens = some_tokens()
    np.testing.assert_array_equal(our_logits(params, tokens), our_logits(ours(model), tokens))
    save_model(params, params.config, tmp_path / "out", dtype="float32")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    np.testing.assert_allclose(hf_logits(again, tokens), hf_logits(model, tokens), atol=1e-6)
