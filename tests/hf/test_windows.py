"""Sliding windows and layers without RoPE in config.json, against transformers."""

import dataclasses
import json

import pytest
import transformers
from family_cases import BASE

from jaxrl_llm.hf.config import read_config, to_hf_config

TINY = {**BASE, "num_hidden_layers": 2}
HF_CLASSES = {
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "qwen2_moe": transformers.Qwen2MoeConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
}


def tiny(family, **extra):
    return {"model_type": family, **TINY, **extra}


@pytest.mark.parametrize(
    "extra, window, layers",
    [
        ({"sliding_window": 8}, None, None),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, None, None),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, 8, (False, True)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, 8, None),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            8,
            (True, False),
        ),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_sliding_windows_of_qwen(family, extra, window, layers):
    config = read_config(tiny(family, **extra))
    assert (config.sliding_window, config.window_layers) == (window, layers)
    theirs = HF_CLASSES[family](**TINY, **extra)
    kinds = ["sliding_attention" if on else "full_attention" for on in layers or (window is not None,) * 2]
    assert theirs.layer_types == kinds


WINDOW = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    "extra, window, layers",
    [
        ({**WINDOW, "max_window_layers": 0}, None, None),
        ({**WINDOW, "max_window_layers": 1}, 8, (True, False)),
        (WINDOW, 8, (True, False)),
        ({**WINDOW, "layer_types": ["full_attention", "sliding_attention"]}, 8, (False, True)),
    ],
)
def test_sliding_windows_of_qwen2_moe_are_in_the_first_layers_but_every_other(extra, window, layers):
    config = read_config(tiny("qwen2_moe", **extra))
    assert (config.sliding_window, config.window_layers) == (window, layers)
    kinds = ["sliding_attention" if on else "full_attention" for on in layers or (False, False)]
    assert HF_CLASSES["qwen2_moe"](**TINY, **extra).layer_types == kinds
    assert read_config(to_hf_config(config)) == config
    with pytest.raises(ValueError, match=r"layer_types.*need use_sliding_window: true"):
        read_config(tiny("qwen2_moe", layer_types=["full_attention", "sliding_attention"]))


@pytest.mark.parametrize(
    "extra", [{}, {"max_window_layers": 1}, {"layer_types": ["full_attention", "sliding_attention"]}]
)
def test_sliding_windows_of_qwen3_moe_are_in_every_layer(extra):
    """transformers' attention of it reads `sliding_window` alone."""
    config = read_config(tiny("qwen3_moe", **WINDOW, **extra))
    assert (config.sliding_window, config.window_layers) == (8, None)
    assert HF_CLASSES["qwen3_moe"](**TINY, **WINDOW, **extra).sliding_window == 8
    assert read_config(to_hf_config(config)) == config
    with pytest.raises(ValueError, match=r"a qwen3_moe config.json cannot express window_layers"):
        to_hf_config(dataclasses.replace(config, window_layers=(True, False)))


@pytest.mark.parametrize(
    "kinds, window, layers",
    [
        (["sliding_attention", "full_attention"], 8, (True, False)),
        (["sliding_attention"] * 2, 8, None),
        (["full_attention"] * 2, None, None),
    ],
)
def test_mistral_with_layer_types_is_ministral(kinds, window, layers, tmp_path):
    """transformers' AutoConfig takes one for the other, too."""
    config = read_config(tiny("mistral", sliding_window=8, layer_types=kinds))
    assert (config.sliding_window, config.window_layers) == (window, layers)
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(config)))
    assert read_config(tmp_path) == config
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.sliding_window == window
    assert getattr(theirs, "layer_types", None) == (kinds if layers else None)


@pytest.mark.parametrize(
    ("changes", "windows", "rotates"),
    [
        ({}, (True, True, True, False), (True, True, True, False)),
        ({"sliding_window_pattern": 2}, (True, False) * 2, (True, False) * 2),
        ({"layer_types": ["sliding_attention"] * 4}, None, None),
        ({"layer_types": ["full_attention"] * 4}, None, (False,) * 4),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 4}, None, None),
    ],
)
def test_layers_of_exaone4_without_a_window_have_no_rope_if_the_model_has_windows(changes, windows, rotates):
    config = read_config(tiny("exaone4", **{"num_hidden_layers": 4, **changes}))
    assert (config.window_layers, config.rope_layers) == (windows, rotates)
    assert read_config(to_hf_config(config)) == config
    theirs = transformers.Exaone4Config(**{**TINY, "num_hidden_layers": 4, **changes})
    attention = [transformers.models.exaone4.modeling_exaone4.Exaone4Attention(theirs, i) for i in range(4)]
    assert [one.sliding_window is None or one.is_sliding for one in attention] == list(rotates or (True,) * 4)
    assert [one.is_sliding for one in attention] == list(windows or (config.sliding_window is not None,) * 4)
