"""The config.json of Gemma 4: heads of global layers, shared keys, per-layer inputs, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.hf.config import read_config, to_hf_config
from jaxrl_llm.models.decode import init_ring_cache
from jaxrl_llm.models.global_heads import GlobalHeads
from jaxrl_llm.models.shared_kv import kv_sources
from jaxrl_llm.models.stacks import layer_stacks

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
        ({"hidden_size_per_layer_input": 8}, "vocab_size_per_layer_input=262144 is not supported; .* 96"),
        ({"num_kv_shared_layers": 3}, "shared_kv_layers is 3: it must be below num_layers, 3"),
        ({"num_kv_shared_layers": 1}, "no earlier layer with no window has keys for the last layers"),
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


def test_layers_read_keys_of_the_last_one_of_their_kind():
    """The last 3 of 6 layers; caches hold keys of the others."""
    types = ["full_attention", "sliding_attention"] * 2 + ["sliding_attention", "full_attention"]
    own = {"num_hidden_layers": 6, "layer_types": types, "num_kv_shared_layers": 3}
    config = read_config({**RAW, **own, "use_double_wide_mlp": True})
    assert kv_sources(config) == [0, 1, 2, 1, 1, 2]
    stacks = layer_stacks(config)
    assert [*stacks] == ["global_layers", "layers", "shared_layers", "shared_global_layers"]
    assert [stack.mlp_size for stack in stacks.values()] == [48, 48, 96, 96]
    cache = jax.eval_shape(lambda: init_ring_cache(config, 5, 7, jnp.bfloat16))
    heads = [x.shape[1:3] for x in cache.k]
    assert heads == [(1, 32), (2, 16), (1, 32)]
    alone = dataclasses.replace(config, shared_kv_layers=0, wide_shared_mlp=False)
    size = lambda c: sum(
        x.size for x in jax.tree.leaves(jax.eval_shape(lambda: init_ring_cache(c, 5, 7, "f4")))
    )
    assert size(alone) == 2 * size(config) - 1  # and the cursor


def test_layers_with_a_window_have_rings_as_short_as_it():
    """The window is 8 tokens; strict mode reads all of them in the order of scoring."""
    config = read_config(RAW)
    columns = lambda length, **strict: [
        (k.shape[-1], v.shape[-2])
        for cache in [jax.eval_shape(lambda: init_ring_cache(config, 5, length, jnp.bfloat16, **strict))]
        for k, v in zip(cache.k, cache.v, strict=True)
    ]
    assert columns(20) == [(8, 8), (8, 8), (20, 20)]
    assert columns(7) == [(7, 7)] * 3
    assert columns(20, strict=True) == [(20, 20)] * 3
    assert jax.eval_shape(lambda: init_ring_cache(config, 5, 20, jnp.bfloat16)).length == 20


def test_both_spellings_of_the_global_heads_of_gemma4():
    raw = RAW
    by_layer = {"per_layer_config": {"02": {"head_dim": 32, "num_key_value_heads": 1}}}
    assert read_config(raw).global_heads == GlobalHeads(1, 32, keys_as_values=True)
    assert read_config({**raw, "global_head_dim": 64, **by_layer}) == read_config(raw)  # as in transformers
    whole = read_config({**raw, "layer_types": ["full_attention"] * 3})
    assert (whole.head_dim, whole.num_kv_heads, whole.keys_as_values) == (32, 1, True)
    assert whole.global_heads is None
    assert to_hf_config(whole)["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 0.25
