"""Folders and adapters of models that also see images, against transformers and peft."""

import copy
import json
import types

import jax
import numpy as np
import peft
import pytest
import torch
import transformers
from family_cases import BASE, CASES, SPECIAL
from hf_oracle import TOLERANCE, hf_logits, our_logits
from lora_models import with_stored_adapters
from safetensors.torch import load_file, save_file

from jaxrl_llm.builders.exports import export_models
from jaxrl_llm.config import ModelConfig, TrainConfig
from jaxrl_llm.hf.carried import PROCESSOR_FILES
from jaxrl_llm.hf.config import read_config, to_hf_config
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.hf.folder import read_carried
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.names import hf_tensors
from jaxrl_llm.models.attention import with_yarn

TOWER = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14, "head_dim": 8},
}
QWEN_TOWER = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
    "num_position_embeddings": 16,
}


AUDIO = {
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16},
    **{"subsampling_conv_channels": [4, 4], "conv_kernel_size": 3},
}
MROPE = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}  # positions of images
CHANGED = {"dtype", "torch_dtype", "tie_word_embeddings", "text_config"}
"""Outer keys of config.json that exports may change."""


def save_base(folder, kind, case, tower, **keys):
    """Save a tiny model of random weights that sees images, as transformers does; returns the folder."""
    family, changes = CASES[case]
    text = copy.deepcopy({**BASE, **SPECIAL, **changes, "model_type": family, "pad_token_id": 0})
    if family.startswith("qwen3_5"):
        text["rope_parameters"] = {**text.get("rope_parameters", {}), **MROPE}
    config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=dict(tower), **keys)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def export(params, base, folder, dtype="float32"):
    """Export a run on the base, as at its end; returns the model's folder."""
    config = TrainConfig(model=ModelConfig(path=str(base), dtype=dtype))
    export_models(config, None, types.SimpleNamespace(params=params, opt_state=()), folder)
    return folder / "hf"


def different_tensors(base, folder):
    """The names of tensors whose type, shape or bytes differ between two folders with the same names."""
    first, second = (
        {name: x for file in path.glob("*.safetensors") for name, x in load_file(file).items()}
        for path in (base, folder)
    )
    assert first.keys() == second.keys()
    return {n for n, x in first.items() if x.dtype != second[n].dtype or not torch.equal(x, second[n])}


@pytest.mark.parametrize(
    ("kind", "case", "tower", "keys"),
    [
        ("gemma3", "gemma3", TOWER, {}),
        ("gemma4", "gemma4 small", {**TOWER, "use_clipped_linears": True}, {"audio_config": AUDIO}),
        pytest.param("gemma4", "gemma4 moe", TOWER, {}, marks=pytest.mark.slow),
        ("mistral3", "ministral3", TOWER, {}),
        ("qwen3_5", "qwen3.5, odd", QWEN_TOWER, {}),
        ("qwen3_5_moe", "qwen3.5 moe", QWEN_TOWER, {}),
    ],
)
def test_an_export_keeps_all_of_a_model_that_sees_images(kind, case, *, tower, keys, tmp_path, capfd):
    base = save_base(tmp_path / "base", kind, case, tower, **keys)
    for name in PROCESSOR_FILES:
        (base / name).write_text(json.dumps({"of": name}))
    params = load_params(base, read_config(base))
    assert "weights) are not used; exports copy them" in capfd.readouterr().err
    first = export(params, base, tmp_path / "first")
    assert different_tensors(base, first) == set()
    for name in PROCESSOR_FILES:
        assert (first / name).read_bytes() == (base / name).read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (base, first))
    assert {key for key in before | after if before.get(key) != after.get(key)} <= CHANGED
    assert before["text_config"].keys() <= after["text_config"].keys()
    if kind.startswith("qwen3_5"):
        assert MROPE.items() <= after["text_config"]["rope_parameters"].items()
    # A trained model, in another export of the first one.
    trained = jax.tree.map(lambda x: x * 1.25, params)
    second = export(trained, first, tmp_path / "second")
    changed = different_tensors(base, second)
    assert all("language_model" in name or name == "lm_head.weight" for name in changed) and len(changed) > 20
    model, info = transformers.AutoModelForImageTextToText.from_pretrained(
        second, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    tokens = np.random.default_rng(0).integers(3, 96, (2, 20))
    theirs = hf_logits(model.eval(), tokens)
    np.testing.assert_allclose(our_logits(trained, tokens), theirs, atol=TOLERANCE, rtol=0)
    assert np.abs(theirs - our_logits(params, tokens)).max() > 0.01


def test_an_export_has_the_keys_of_the_trained_model(tmp_path):
    """YaRN of a recipe, beside keys of the base that only images need."""
    base = save_base(tmp_path / "base", "qwen3_5", "qwen3.5", QWEN_TOWER)
    carried = read_carried(base, config := read_config(base))
    stretched = with_yarn(config, 4.0, 64)
    assert stretched != config
    raw = carried.complete(to_hf_config(stretched, "float16"))
    assert read_config(raw) == stretched
    assert (raw["dtype"], raw["text_config"]["dtype"]) == ("float16", "float16")
    assert MROPE.items() <= raw["text_config"]["rope_parameters"].items()


@pytest.mark.parametrize("in_model", [False, True])
def test_an_export_has_the_names_of_its_base(in_model, tmp_path):
    """transformers 4 and 5 have named the tensors of Gemma 3 in two ways."""
    base = save_base(tmp_path / "base", "gemma3", "gemma3, odd", TOWER, tie_word_embeddings=False)
    tensors = load_file(base / "model.safetensors")
    assert "language_model.lm_head.weight" in tensors and "vision_tower.head.probe" in tensors
    if in_model:
        prefixes = {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"}
        prefixes |= {name: f"model.{name}" for name in ("vision_tower.", "multi_modal_projector.")}
        new = lambda name: next(name.replace(p, q) for p, q in prefixes.items() if name.startswith(p))
        tensors = {new(name): tensor for name, tensor in tensors.items()}
        assert "lm_head.weight" in tensors and "model.vision_tower.head.probe" in tensors
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    params = load_params(base, read_config(base))
    assert different_tensors(base, export(params, base, tmp_path / "run")) == set()
    # Servers get the language model alone.
    alone = save_model(params, params.config, tmp_path / "alone")
    names = load_file(alone / "model.safetensors").keys()
    assert names == {tensor.name for tensor in hf_tensors(params.config)}
    assert json.loads((alone / "config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]


@pytest.mark.parametrize(
    ("kind", "case", "tower"),
    [
        ("gemma3", "gemma3", TOWER),
        ("mistral3", "ministral3", TOWER),
        ("qwen3_5", "qwen3.5, odd", QWEN_TOWER),
    ],
)
@pytest.mark.parametrize(("outside", "inside"), [(None, None), (None, True), (True, False), (False, True)])
def test_a_model_that_sees_images_is_tied_as_its_outer_keys_say(kind, case, *, tower, outside, inside):
    """transformers does not ask `text_config`, which many folders have otherwise."""
    family, changes = CASES[case]
    outside, inside = ({} if tied is None else {"tie_word_embeddings": tied} for tied in (outside, inside))
    text = copy.deepcopy({**BASE, **SPECIAL, **changes, **inside, "model_type": family})
    config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=dict(tower), **outside)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert read_config(json.loads(config.to_json_string(use_diff=False))).tie_embeddings == is_tied


def test_a_model_that_sees_images_is_tied_as_its_language_model_if_no_key_says_it():
    """Mistral Small 3.1 has a head, and none of the keys; Gemma 3 has neither."""
    raw = {"model_type": "mistral3", "text_config": {"model_type": "mistral", **BASE}}
    assert not read_config(raw).tie_embeddings
    raw = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **BASE}}
    assert read_config(raw).tie_embeddings


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning")  # the tower's, which stay 0
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_adapters_of_models_that_see_images(kind, tmp_path, capsys):
    """PEFT's adapter of the model that transformers loads is read, and PEFT reads an exported one."""
    case, tower = ("gemma3", TOWER) if kind == "gemma3" else ("qwen3.5, odd", QWEN_TOWER)
    save_base(tmp_path / "base", kind, case, tower)
    load = lambda: transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    )
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"])
    adapted = peft.get_peft_model(load(), lora).eval()
    with torch.no_grad():
        for weight in (x for name, x in adapted.named_parameters() if "lora_B" in name):
            weight.normal_(0, 0.3)
    adapted.save_pretrained(tmp_path / "theirs")
    tokens = np.random.default_rng(0).integers(3, 96, (2, 20))
    expected = hf_logits(adapted, tokens)
    base = load_params(tmp_path / "base", read_config(tmp_path / "base"))
    params = with_stored_adapters(base, tmp_path / "theirs")
    np.testing.assert_allclose(our_logits(params, tokens), expected, atol=TOLERANCE, rtol=0)
    assert np.abs(expected - our_logits(base, tokens)).max() > 0.1
    line = "adapter_model.safetensors: left out of the model and of exports: vision_tower"
    assert (line in capsys.readouterr().err) == (kind == "gemma3")
    export(params, tmp_path / "base", tmp_path / "run")
    again = peft.PeftModel.from_pretrained(load(), tmp_path / "run" / "adapter").eval()
    np.testing.assert_allclose(hf_logits(again, tokens), expected, atol=TOLERANCE, rtol=0)
    params = with_stored_adapters(base, tmp_path / "run" / "adapter")
    np.testing.assert_allclose(our_logits(params, tokens), expected, atol=TOLERANCE, rtol=0)
