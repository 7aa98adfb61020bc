"""Folders and adapters of models that also see images, against transformers and peft."""

import copy
import json
import types

import numpy as np
import peft
import pytest
import torch
import transformers
from family_cases import BASE, CASES, SPECIAL
from hf_oracle import TOLERANCE, hf_logits, our_logits
from lora_models import with_stored_adapters

from jaxrl_llm.builders.exports import export_models
from jaxrl_llm.config import ModelConfig, TrainConfig
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.load import load_params

TOWER = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14, "head_dim": 8},
}
QWEN_TOWER = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
    "num_position_embeddings": 16,
}


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
    family, changes = CASES[case]
    text = copy.deepcopy({**BASE, **SPECIAL, **changes, "model_type": family})
    config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=dict(tower))
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "base")
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
    run = TrainConfig(model=ModelConfig(path=str(tmp_path / "base")))
    export_models(run, None, types.SimpleNamespace(params=params, opt_state=()), tmp_path / "run")
    again = peft.PeftModel.from_pretrained(load(), tmp_path / "run" / "adapter").eval()
    np.testing.assert_allclose(hf_logits(again, tokens), expected, atol=TOLERANCE, rtol=0)
    params = with_stored_adapters(base, tmp_path / "run" / "adapter")
    np.testing.assert_allclose(our_logits(params, tokens), expected, atol=TOLERANCE, rtol=0)
