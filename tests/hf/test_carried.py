"""Layers of multi-token prediction, and modules beside a language model, pass from the base folder to
exports, byte for byte."""

import dataclasses
import json
import shutil
import types

import jax.numpy as jnp
import pytest
import transformers
from distributed import run_processes

from jaxrl_llm.builders.exports import export_models
from jaxrl_llm.checkpoint.config import CheckpointConfig
from jaxrl_llm.checkpoint.state import Checkpointer
from jaxrl_llm.config import ModelConfig, TrainConfig
from jaxrl_llm.hf import stored
from jaxrl_llm.hf.config import read_config, to_hf_config
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.names import hf_tensors
from jaxrl_llm.tools import export

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
QWEN = {
    **SIZES,
    "model_type": "qwen3_5_text",
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "tie_word_embeddings": True,
}
GLM = {
    **SIZES,
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 24]}


def write_base(folder, raw, keys, predictors, *, rename=lambda name: name):
    """A published folder: random bfloat16 weights and layers of multi-token prediction."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        rename(t.name): torch.randn(t.shape, generator=generator) for t in hf_tensors(read_config(raw))
    }
    tensors = {name: value.bfloat16() for name, value in tensors.items()}
    save_file({**tensors, **predictors}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**to_hf_config(read_config(raw)), **keys}))
    return folder


def write_qwen(folder):
    """As Qwen3.5 is published, with vision tower; the names of its predictor have no prefix."""
    mtp = {
        "mtp.fc.weight": torch.randn(32, 64).bfloat16(),
        "mtp.layers.0.input_layernorm.weight": torch.randn(32),
        "mtp.norm.weight": torch.randn(32).half(),
    }
    keys = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    # In an order in which types of odd sizes would displace others.
    tower = {
        "model.visual.blocks.0.a": torch.tensor([True, False, True]),
        "model.visual.blocks.0.b": torch.tensor(3, dtype=torch.int64),
        "model.visual.blocks.0.c": torch.tensor(2.5),
        "model.visual.blocks.0.d": torch.rand(3, 5).to(torch.float8_e5m2),
        "model.visual.blocks.0.e": torch.rand(7, 3).bfloat16(),
        "model.visual.blocks.0.f": torch.full((8,), torch.nan),
    }
    write_base(folder, QWEN, keys, {**mtp, **tower}, rename=in_outer)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": text, "quantization_config": FP8})
    )
    return {**mtp, **tower}, keys


def in_outer(name):
    """The name of a tensor of the language model in a Qwen3.5 that sees images."""
    return name.replace("model.", "model.language_model.", 1)


def write_glm(folder):
    """As GLM-4.5 is published in fp8; the layer after the last one is quantized, too."""
    layer = {
        "model.layers.2.eh_proj.weight": (100 * torch.randn(32, 64)).to(torch.float8_e4m3fn),
        "model.layers.2.eh_proj.weight_scale_inv": torch.rand(2, 3) / 300,
        "model.layers.2.enorm.weight": torch.randn(32),
        "model.layers.2.embed_tokens.weight": torch.randn(128, 32).bfloat16(),
    }
    write_base(folder, GLM, {"num_nextn_predict_layers": 1, "quantization_config": FP8}, layer)
    codes, scale = (
        layer["model.layers.2.eh_proj.weight"],
        layer.pop("model.layers.2.eh_proj.weight_scale_inv"),
    )
    scale = scale.repeat_interleave(16, 0).repeat_interleave(24, 1)[:, :64]
    layer["model.layers.2.eh_proj.weight"] = (codes.float() * scale).bfloat16()
    return layer, {"num_nextn_predict_layers": 1}


def export_run(base, folder):
    """Export a run on the base, as at its end."""
    params = load_params(base, read_config(base), dtype=jnp.bfloat16)
    config = TrainConfig(model=ModelConfig(path=str(base), dtype="bfloat16"))
    export_models(config, None, types.SimpleNamespace(params=params, opt_state=()), folder)
    return folder / "hf"


def itemsize(tensor):
    return jnp.dtype(stored.COPIED[tensor.dtype]).itemsize


def read_folder(folder):
    """(config.json, its tensors)."""
    tensors = {
        name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()
    }
    return json.loads((folder / "config.json").read_text()), tensors


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(write_qwen, id="qwen3.5"),
        pytest.param(write_glm, id="glm-4.5 in fp8", marks=pytest.mark.slow),
    ],
)
def test_an_export_has_the_predictors_of_its_base(tmp_path, monkeypatch, capfd, write):
    expected, keys = write(tmp_path / "base")
    monkeypatch.setattr(stored, "_MAX_READ", 300)
    first = export_run(tmp_path / "base", tmp_path / "first")
    printed = capfd.readouterr().err
    assert "3 weights of multi-token prediction are not used; exports copy them" in printed
    is_outer = write is write_qwen
    assert ("base: visual (6 weights) are not used; exports copy them" in printed) == is_outer
    # The export is a base, too.
    second = export_run(first, tmp_path / "second")
    model = hf_tensors(read_config(first))
    for folder in (first, second):
        raw, written = read_folder(folder)
        names = {in_outer(tensor.name) if is_outer else tensor.name for tensor in model}
        assert written.keys() == names | expected.keys()
        assert "quantization_config" not in raw
        raw = raw["text_config"] if is_outer else raw
        assert {key: raw[key] for key in keys} == keys and "quantization_config" not in raw
        for name, value in expected.items():
            assert value.dtype == written[name].dtype and value.shape == written[name].shape, name
            assert written[name].untyped_storage().tolist() == value.untyped_storage().tolist(), name
    for file in first.glob("*.safetensors"):
        assert all(tensor.offset % itemsize(tensor) == 0 for tensor in stored.read_header(file).values())
    index = json.loads((first / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in written.values())
    if is_outer:
        _, info = transformers.AutoModelForCausalLM.from_pretrained(first, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.slow
def test_without_its_base_an_export_counts_no_predictors(tmp_path, capfd):
    """Also by the command, which finds the base in the run's config.json."""
    base, run = tmp_path / "base", tmp_path / "run"
    expected, _ = write_glm(base)
    params = load_params(base, read_config(base))
    meta = {"config": {}, "model": dataclasses.asdict(params.config)}
    checkpoints = Checkpointer(CheckpointConfig(async_save=False), run)
    checkpoints.save(1, {"params": params}, meta, {})
    checkpoints.wait()
    (run / "config.json").write_text(
        json.dumps({"config": {"model": {"path": str(base), "tokenizer": "tiny"}}})
    )
    command = ["--checkpoint", str(run), "--overwrite", "True", "--out"]
    assert export.main([*command, str(tmp_path / "with")]) == 0
    raw, written = read_folder(tmp_path / "with")
    assert raw["num_nextn_predict_layers"] == 1 and expected.keys() <= written.keys()
    assert export.main([*command, str(tmp_path / "alone"), "--carry", "False"]) == 0
    assert not expected.keys() & read_folder(tmp_path / "alone")[1].keys()
    shutil.rmtree(base)
    capfd.readouterr()
    assert export.main([*command, str(tmp_path / "without")]) == 0
    line = (
        "a vision tower and layers of multi-token prediction, if the base has any, are left out of exports: "
    )
    assert f"{line}{base}: no such folder" in capfd.readouterr().err
    raw, written = read_folder(tmp_path / "without")
    assert raw["num_nextn_predict_layers"] == 0 and not expected.keys() & written.keys()


TWO_PROCESSES = """
import sys
import jax
from jaxrl_llm.builders.exports import carried_parts
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.models import shardings
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN
base, target = sys.argv[1:]
config = read_config(base)
params = load_params(base, config, shardings(config, make_mesh(MeshConfig(fsdp=2)), TRAIN))
path = base if jax.process_index() == 0 else base + " of another host"  # only process 0 has it still
save_model(params, config, target, dtype="bfloat16", carried=carried_parts(path, config))
"""


@pytest.mark.slow
def test_process_0_copies_the_predictors(tmp_path):
    expected, _ = write_glm(tmp_path / "base")
    run_processes(TWO_PROCESSES, 2, [str(tmp_path / "base"), str(tmp_path / "out")], devices=1)
    written = read_folder(tmp_path / "out")[1]
    for name, value in expected.items():
        assert torch.equal(written[name], value), name
