"""Adapters in PEFT's format: every byte of a round trip, and the refusal of what is not supported."""

import dataclasses
import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from lora_models import replace_weights, with_random_adapters, with_stored_adapters
from safetensors.numpy import load_file, save_file

from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.hf.export import check_export_folder
from jaxrl_llm.hf.names import tensor_layout
from jaxrl_llm.hf.peft import load_adapter, save_adapter
from jaxrl_llm.hf.peft_config import read_adapter_config
from jaxrl_llm.models import LoraConfig, TransformerConfig, init, named_leaves, shardings, with_heads
from jaxrl_llm.models.lora import split_params, with_lora
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN

TINY = TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)
LORA = LoraConfig(rank=4, alpha=6.0)


@functools.cache
def base():
    return init(TINY, jax.random.key(0))


@functools.cache
def adapted(seed: int = 0):
    """Our model with random A and B."""
    return with_random_adapters(base(), LORA, seed)


def test_a_round_trip_keeps_every_byte_under_any_sharding(tmp_path):
    params = adapted()
    save_adapter(params, tmp_path / "first", "base")
    again = with_stored_adapters(base(), tmp_path / "first")
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2, data=2))
    again = jax.device_put(again, shardings(again.config, mesh, TRAIN))
    save_adapter(adapted(seed=1), tmp_path / "second", "base")
    save_adapter(again, tmp_path / "second", "base")  # in the place of an earlier export
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
    assert len(list((tmp_path / "second").iterdir())) == 2 and len(list(tmp_path.iterdir())) == 2


def test_adapters_are_exported_without_the_base(tmp_path):
    """A checkpoint holds the trained weights alone."""
    for name, params in [("all", adapted()), ("trained", split_params(adapted())[0])]:
        save_adapter(params, tmp_path / name, "base")
    all_weights, trained = (tmp_path / x / "adapter_model.safetensors" for x in ("all", "trained"))
    assert trained.read_bytes() == all_weights.read_bytes()


def test_a_value_head_is_pefts_head_of_a_classifier(tmp_path):
    config = dataclasses.replace(adapted().config, value_head=True)
    params = replace_weights(with_heads(adapted(), config), {"value": np.arange(32, dtype=np.float32)[None]})
    save_adapter(params, tmp_path, "base")
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    assert raw["task_type"] == "SEQ_CLS" and raw["modules_to_save"] == ["score"]
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors["base_model.model.score.weight"].tolist() == [list(range(32))]
    assert load_adapter(tmp_path, config)["value"].tolist() == [list(range(32))]
    with pytest.raises(UserError, match=r"1 unexpected: base_model.model.score.weight \[1, 32\]"):
        load_adapter(tmp_path, adapted().config)


def test_layouts_follow_from_those_of_the_weights():
    assert tensor_layout("layers.q_lora_a") == "d r -> r (d)"
    assert tensor_layout("layers.q_lora_b") == "r h e -> (h e) r"
    assert tensor_layout("layers.o_lora_a") == "h e r -> r (h e)"
    assert tensor_layout("layers.o_lora_b") == "r d -> (d) r"
    assert tensor_layout("layers.o") == "h e d -> d (h e)"


def test_infinite_adapters_are_not_exported(tmp_path):
    save_adapter(adapted(), tmp_path / "adapter", "base")
    before = (tmp_path / "adapter/adapter_model.safetensors").read_bytes()
    bad = dict(named_leaves(adapted()))["layers.up_lora_b"].at[1, 0, 0].set(jnp.inf)
    with pytest.raises(RunError, match=r"1 of 28 tensors .*layers\.1\.mlp\.up_proj\.lora_B\.weight"):
        save_adapter(replace_weights(adapted(), {"layers.up_lora_b": bad}), tmp_path / "adapter", "base")
    assert (tmp_path / "adapter/adapter_model.safetensors").read_bytes() == before


def test_an_adapter_does_not_replace_a_model_nor_a_model_an_adapter(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds config\.json, which is not part of an export"):
        save_adapter(adapted(), tmp_path, "base")
    with pytest.raises(UserError, match=r"holds config\.json, which is not part of an export"):
        check_export_folder(tmp_path, "adapter_config.json")
    with pytest.raises(UserError, match=r"holds adapter_config\.json, which is not part of an export"):
        check_export_folder(tmp_path)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peft") / "adapter"
    save_adapter(adapted(), folder, "base")
    return folder


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("peft_type", "LOHA", "peft_type='LOHA' is not supported; supported: LORA"),
        ("peft_type", None, "peft_type='' is not supported; supported: LORA"),
        (
            "bias",
            "lora_only",
            "bias='lora_only' trains biases of the base, which are frozen; train the adapter",
        ),
        ("lora_bias", True, "lora_bias=True is not supported; train the adapter without it, or merge it"),
        ("use_dora", True, "use_dora=True is not supported; train the adapter without it, or merge it"),
        ("rank_pattern", {"q_proj": "8"}, "must have numbers above 0; that of q_proj is '8'"),
        ("alpha_pattern", {"q_proj": 0}, "must have numbers above 0; that of q_proj is 0"),
        ("alpha_pattern", {"(q_proj": 1}, "alpha_pattern='(.*\\\\.)?((q_proj)' is no regex of Python"),
        ("layers_to_transform", ["0"], "layers_to_transform=['0'] must be a list of numbers of layers"),
        ("layers_to_transform", [2], "adapts no layer of this qwen3 model, which has"),
        ("exclude_modules", 1, "exclude_modules=1 must be a list of names of modules, or a regex"),
        ("trainable_token_indices", [1], "trainable_token_indices=[1] is not supported"),
        ("fan_in_fan_out", True, "fan_in_fan_out=True is not supported"),
        ("variant_of_tomorrow", {"beta": 1}, "variant_of_tomorrow={'beta': 1} is not supported"),
        ("modules_to_save", ["norm"], "['norm'] is not supported; supported: embed_tokens, lm_head"),
        ("modules_to_save", "score", "modules_to_save='score' is not supported"),
        ("init_lora_weights", "pissa_niter_16", "init_lora_weights='pissa_niter_16' changes the base model"),
        ("init_lora_weights", "olora", "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "loftq", "init_lora_weights='loftq' changes the base model"),
        (
            "target_modules",
            "q_proj|v_proj",
            "target_modules='q_proj|v_proj' adapts no layer of this qwen3 model",
        ),
        ("target_modules", ["q_proj", "W_pack"], "target_modules='W_pack' is no layer that can be adapted"),
        ("target_modules", None, "target_modules=None is not supported; supported: a list of q_proj"),
        ("target_modules", [], "target_modules=[] is not supported"),
        ("r", 0, "r=0 must be a whole number from 1"),
        ("r", "8", "r='8' must be a whole number from 1"),
        ("r", 20_000, "rank is 20000: it must be at least 0 and at most 16384"),
        ("lora_alpha", 0, "alpha is 0.0: it must be above 0"),
        ("lora_alpha", float("nan"), "lora_alpha=nan must be a number"),
        ("use_rslora", "yes", "use_rslora='yes' must be true or false"),
    ],
    ids=str,
)
def test_a_config_that_would_compute_something_else_is_refused(stored, tmp_path, key, value, *, message):
    raw = json.loads((stored / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**raw, key: value}))
    with pytest.raises(UserError, match=re.escape(message)) as error:
        read_adapter_config(tmp_path, TINY)
    assert str(error.value).startswith(f"{tmp_path / 'adapter_config.json'}: ")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rank": 8}, r"rank=4, but the model's have rank=8; give the model rank=4, alpha=6,"),
        ({"alpha": 8.0}, r"scale=1.5, but the model's have scale=2.0; .* alpha=6,"),
        ({"rank_stabilized": True}, r"scale=1.5, but .* scale=3.0; .* rank_stabilized=False"),
        (
            {"targets": ("q_proj",)},
            r"but the model's have adapted=\('q',\); .* targets=q_proj k_proj .* up_proj down_proj$",
        ),
    ],
    ids=str,
)
def test_adapters_of_another_kind_than_the_models_are_refused(stored, change, message):
    other = dataclasses.replace(LORA, **change)
    with pytest.raises(UserError, match=message):
        load_adapter(stored, with_lora(TINY, other))


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(Q), rf"1 missing: {Q} \[4, 32\]\. Give the base model that the adapter"),
        (
            lambda t: t.update({Q: t[Q].T.copy()}),
            rf"of another shape: {Q} \[32, 4\] .*, the model says \[4, 32\]",
        ),
        (lambda t: t.update(more=t[Q]), r"1 unexpected: more \[4, 32\] in adapter_model\.safetensors"),
        (lambda t: t.update({Q: t[Q].astype(np.int8)}), rf"of a type other than F32, F16, BF16: {Q} I8"),
        (lambda t: t[Q].__setitem__((0, 0), np.nan), rf"{Q} holds NaN or Inf"),
    ],
    ids=["missing", "misshapen", "unexpected", "quantized", "not finite"],
)
def test_tensors_other_than_the_models_are_refused(stored, tmp_path, change, message):
    shutil.copy(stored / "adapter_config.json", tmp_path)
    tensors = load_file(stored / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=message) as error:
        load_adapter(tmp_path, adapted().config)
    assert str(error.value).startswith(f"{tmp_path / 'adapter_model.safetensors'}: ")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_as_float32(stored, tmp_path, dtype):
    shutil.copy(stored / "adapter_config.json", tmp_path)
    tensors = load_file(stored / "adapter_model.safetensors")
    save_file({name: x.astype(dtype) for name, x in tensors.items()}, tmp_path / "adapter_model.safetensors")
    adapter = load_adapter(tmp_path, adapted().config)
    for name, leaf in named_leaves(adapted()):
        if "_lora_" in name:
            assert adapter[name].dtype == np.float32
            assert np.array_equal(adapter[name], np.asarray(leaf).astype(dtype).astype(np.float32))
    assert len(adapter) == 14


def test_a_base_of_another_shape_is_refused(stored):
    config = with_lora(dataclasses.replace(TINY, num_layers=1, mlp_size=40), LORA)
    message = r"14 unexpected: .*; 3 of another shape: .* \[40, 4\]"
    with pytest.raises(UserError, match=message):
        load_adapter(stored, config)


def test_absent_damaged_and_pickled_files_are_refused(stored, tmp_path):
    config = adapted().config
    with pytest.raises(UserError, match=r"adapter_config\.json: no such file; a PEFT adapter has one"):
        read_adapter_config(tmp_path, TINY)
    shutil.copy(stored / "adapter_config.json", tmp_path)
    with pytest.raises(UserError, match=r"adapter_model\.safetensors: no such file"):
        load_adapter(tmp_path, config)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"adapter_model\.bin: a pickle, which can run code"):
        load_adapter(tmp_path, config)
    weights = (stored / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(weights[:-1])
    with pytest.raises(UserError, match=r"adapter_model\.safetensors: truncated or damaged"):
        load_adapter(tmp_path, config)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9000\n"
    (tmp_path / "adapter_model.safetensors").write_text(pointer)
    with pytest.raises(UserError, match=rf"a pointer of git-lfs.* Run: git -C {tmp_path} lfs pull$"):
        load_adapter(tmp_path, config)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.safetensors").symlink_to(stored / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"a link out of the folder"):
        load_adapter(tmp_path, config)


def test_parts_of_a_joined_layer_share_an_a_of_an_unequal_rank(tmp_path):
    """qkv_proj of Phi-3 has rank 12 for 3 parts; of rank 10 it can only have one A, which each part reads."""
    ranks = {r"layers\.0\.self_attn\.qkv_proj": 10, "qkv_proj": 12}
    lora = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["qkv_proj"],
        "rank_pattern": ranks,
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(lora | {"alpha_pattern": {"qkv_proj": 12}}))
    model = dataclasses.replace(TINY, family="phi3", qk_norm=False, qkv_bias=False)
    assert read_adapter_config(tmp_path, model).rank == 10
    ranks[r"layers\.0\.self_attn\.qkv_proj"] = 9
    (tmp_path / "adapter_config.json").write_text(json.dumps(lora | {"alpha_pattern": {"qkv_proj": 12}}))
    assert read_adapter_config(tmp_path, model).rank == 4
