"""The config.json of Gemma 4: heads of global layers in both spellings, and what is refused."""

import pytest

from jaxrl_llm.hf.config import read_config, to_hf_config
from jaxrl_llm.models.global_heads import GlobalHeads

RAW = {
    **{"model_type": "gemma4_text", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    **{"sliding_window": 8, "hidden_size_per_layer_input": 0},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input=8 is not supported; supported: 0"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input=256 is not supported"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers=1 is not supported; supported: 0"),
        ({"enable_moe_block": True}, "num_experts=None must be a whole number"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling=.* supported: rope_parameters"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, "must have no layer with sliding_attention"),
        ({"per_layer_config": {"2": {"hidden_size": 8}}}, "must have the same head_dim and num_key_value"),
        ({"per_layer_config": {"3": {"head_dim": 8}}}, "per_layer_config has layer '3' of 3 layers"),
        ({"num_global_key_value_heads": 3}, "global_heads has num_kv_heads 3: it must divide num_heads, 4"),
    ],
)
def test_what_gemma4_lacks_is_refused_by_name(changes, message):
    raw = {**RAW, **changes}
    with pytest.raises(ValueError, match=message):
        read_config({key: value for key, value in raw.items() if value is not None})


def test_both_spellings_of_the_global_heads_of_gemma4():
    raw = RAW
    by_layer = {"per_layer_config": {"02": {"head_dim": 32, "num_key_value_heads": 1}}}
    assert read_config(raw).global_heads == GlobalHeads(1, 32, keys_as_values=True)
    assert read_config({**raw, "global_head_dim": 64, **by_layer}) == read_config(raw)  # as in transformers
    whole = read_config({**raw, "layer_types": ["full_attention"] * 3})
    assert (whole.head_dim, whole.num_kv_heads, whole.keys_as_values) == (32, 1, True)
    assert whole.global_heads is None
    assert to_hf_config(whole)["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 0.25
