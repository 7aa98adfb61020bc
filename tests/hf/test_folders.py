"""Hugging Face folders: every byte survives, little memory is used, and nothing bad is believed."""

import dataclasses
import json
import shutil
import struct
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import transformers
from distributed import run_processes
from load_memory import run_measurement
from safetensors.numpy import load_file, save_file

from jaxrl_llm.checkpoint.config import CheckpointConfig
from jaxrl_llm.checkpoint.state import Checkpointer
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.hf import export as hf_export
from jaxrl_llm.hf import load
from jaxrl_llm.hf.config import read_config, to_hf_config
from jaxrl_llm.hf.export import check_export_folder, save_model
from jaxrl_llm.hf.folder import refuse_remote_code
from jaxrl_llm.hf.load import load_params, read_slice
from jaxrl_llm.hf.names import hf_tensors
from jaxrl_llm.hf.resolve import resolve_model
from jaxrl_llm.hf.tokenizer import load_tokenizer
from jaxrl_llm.models import init, named_leaves, shardings
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN
from jaxrl_llm.tools import export

TINY = {
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
BOTH = pytest.mark.parametrize("extra", [{}, EXPERTS], ids=["dense", "experts"])
SMALL_SHARD = 20_000


def tiny(**extra):
    return read_config({**TINY, **extra})


def write_folder(folder, config, dtype=np.float32, files=2):
    """A model folder written by the safetensors library, not by us. Returns its tensors."""
    rng = np.random.default_rng(0)
    tensors = {t.name: rng.standard_normal(t.shape, np.float32).astype(dtype) for t in hf_tensors(config)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hf_config(config)))
    names = list(tensors)
    weight_map = {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors" if files > 1 else "model.safetensors"
        save_file({n: tensors[n] for n in names[i::files]}, folder / file)
        weight_map |= dict.fromkeys(names[i::files], file)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def read_back(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def assert_same_bytes(theirs, ours):
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        assert (value.dtype, value.shape) == (ours[name].dtype, ours[name].shape), name
        assert value.tobytes() == ours[name].tobytes(), name


# --- round trips


@pytest.mark.parametrize(
    "extra, dtype, in_memory",
    [
        ({}, "bfloat16", "bfloat16"),
        pytest.param({}, "bfloat16", "float32", marks=pytest.mark.slow),
        ({"tie_word_embeddings": True, "attention_bias": True}, "float32", "float32"),
        ({"model_type": "qwen2"}, "float16", "float32"),
        pytest.param(
            {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
            *("bfloat16", "float32"),
            marks=pytest.mark.slow,
        ),
        pytest.param({"model_type": "mistral"}, "float16", "float16", marks=pytest.mark.slow),
    ],
)
def test_every_byte_survives_import_and_export(tmp_path, extra, dtype, in_memory):
    config = tiny(**extra)
    theirs = write_folder(tmp_path / "in", config, jnp.dtype(dtype))
    params = load_params(tmp_path / "in", config, dtype=jnp.dtype(in_memory))
    save_model(params, config, tmp_path / "out", dtype=dtype, max_shard_bytes=SMALL_SHARD)
    assert_same_bytes(theirs, read_back(tmp_path / "out"))
    assert read_config(tmp_path / "out") == config


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(dict(fsdp=8), id="fsdp8", marks=pytest.mark.slow),
        pytest.param(dict(data=2, fsdp=2, tensor=2), id="2x2x2", marks=pytest.mark.slow),
        pytest.param(dict(fsdp=1, tensor=8), id="tensor8"),  # divides neither the 4 heads nor the 2 kv heads
        pytest.param(dict(expert=2, fsdp=2, tensor=2), id="experts"),
    ],
)
def test_every_mesh_gets_the_same_weights_in_the_layout_asked_for(tmp_path, mesh):
    config = tiny(**(EXPERTS if "expert" in mesh else {}))
    theirs = write_folder(tmp_path / "in", config, ml_dtypes.bfloat16)
    whole = load_params(tmp_path / "in", config)
    layout = shardings(config, make_mesh(MeshConfig(**mesh)), TRAIN)
    params = load_params(tmp_path / "in", config, layout)
    for (name, one), (_, many), wanted in zip(
        named_leaves(whole), named_leaves(params), jax.tree.leaves(layout), strict=True
    ):
        assert many.sharding == wanted, name
        assert many.dtype == jnp.float32
        np.testing.assert_array_equal(one, many, err_msg=name)
    save_model(params, config, tmp_path / "out", dtype="bfloat16")
    assert_same_bytes(theirs, read_back(tmp_path / "out"))


@BOTH
def test_each_shard_reads_its_own_part_and_copies_share_one_reading(tmp_path, monkeypatch, extra):
    config = tiny(**extra)
    theirs = write_folder(tmp_path, config)
    read = {}

    def counting(stored, place, shape, bounds, *, dtype, original=read_slice):
        part = original(stored, place, shape, bounds, dtype=dtype)
        read[place.name] = read.get(place.name, 0) + part.size
        return part

    monkeypatch.setattr(load, "read_slice", counting)
    load_params(tmp_path, config, shardings(config, make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)), TRAIN))
    assert read == {name: value.size for name, value in theirs.items()}


@BOTH
def test_rows_are_read_in_pieces(tmp_path, monkeypatch, extra):
    config = tiny(**extra)
    write_folder(tmp_path, config)
    whole = load_params(tmp_path, config)
    monkeypatch.setattr(load, "_MIN_READ", 1)
    monkeypatch.setattr(load, "_MAX_READ", 300)  # two rows of 32 floats
    pieces = load_params(tmp_path, config)
    for (name, a), (_, b) in zip(named_leaves(whole), named_leaves(pieces), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


MEMORY = """
import sys
import jax, numpy as np
from load_memory import peak_beyond_weights
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.hf.names import hf_tensors
from jaxrl_llm.models import TransformerConfig, init
folder = sys.argv[1]
config = TransformerConfig(vocab_size=256, hidden_size=1024, mlp_size=4096, num_layers=5, num_heads=8,
                           num_kv_heads=2, head_dim=64)
save_model(jax.jit(init, static_argnums=0)(config, jax.random.key(0)), config, folder, dtype="float32",
           max_shard_bytes=60 * 2**20)
print(peak_beyond_weights(folder, config) / max(4 * np.prod(t.shape) for t in hf_tensors(config)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_loading_needs_little_more_than_the_weights(tmp_path):
    """245 MB in 5 layers: peak beyond the weights under 1.5 x the largest tensor (a whole stack is 5 x).

    One tensor of 17 MB is in memory beside the weights, and a few MB of the allocator.
    """
    assert run_measurement(MEMORY, tmp_path / "big") < 1.5


TWO_PROCESSES = """
import sys
from jaxrl_llm.hf import load
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.export import check_export_folder, save_model
from jaxrl_llm.models import shardings
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN
(source, target, axis), read, original = sys.argv[1:], [], load.read_slice
def counting(*args, **settings):
    read.append(original(*args, **settings))
    return read[-1]
load.read_slice = counting
config = read_config(source)
layouts = shardings(config, make_mesh(MeshConfig(**{"fsdp": 1, axis: 2})), TRAIN)
params = load.load_params(source, config, layouts)
mine = sum(shard.data.size for x in jax.tree.leaves(params) for shard in x.addressable_shards)
assert sum(x.size for x in read) == mine < 0.6 * sum(x.size for x in jax.tree.leaves(params))
save_model(params, config, target, dtype="bfloat16", max_shard_bytes=20_000)
"""


@pytest.mark.parametrize(("extra", "axis"), [({}, "fsdp"), (EXPERTS, "fsdp"), (EXPERTS, "expert")])
@pytest.mark.slow
def test_two_processes_each_read_their_half_and_write_one_folder(tmp_path, extra, axis):
    theirs = write_folder(tmp_path / "in", tiny(**extra), ml_dtypes.bfloat16)
    run_processes(TWO_PROCESSES, 2, [str(tmp_path / "in"), str(tmp_path / "out"), axis], devices=1)
    assert_same_bytes(theirs, read_back(tmp_path / "out"))


# --- what is written


@pytest.mark.parametrize(
    "family, tied",
    [("qwen2", True), ("qwen3", True), ("llama", False), ("mistral", False), ("baichuan", False)],
)
def test_transformers_loads_the_export_and_computes_the_same(tmp_path, family, tied):
    torch = pytest.importorskip("torch")
    config = tiny(model_type=family, tie_word_embeddings=tied, initializer_range=0.2)
    params = init(config, jax.random.key(1))
    tokenizer = make_tokenizer()
    save_model(params, config, tmp_path / "out", tokenizer, dtype="float32", max_shard_bytes=SMALL_SHARD)
    assert ("lm_head.weight" in read_back(tmp_path / "out")) != tied
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    ids = np.random.default_rng(0).integers(0, 128, (2, 9))
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits.numpy()
    hidden = params(jnp.asarray(ids), jnp.broadcast_to(jnp.arange(9), (2, 9)))
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(hidden @ params.head.T, expected, atol=2e-4)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert model.dtype == torch.float32


def test_baichuan_is_written_as_the_llama_that_it_is(tmp_path):
    """Its own type would need remote code; the bytes of its weights survive, W_pack in three pieces."""
    config = tiny(model_type="baichuan")
    theirs = write_folder(tmp_path / "in", config, ml_dtypes.bfloat16)
    params = load_params(tmp_path / "in", config)
    save_model(params, config, tmp_path / "out", dtype="bfloat16")
    ours = read_back(tmp_path / "out")
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn."
        ours[f"{at}W_pack.weight"] = np.concatenate([ours.pop(f"{at}{name}_proj.weight") for name in "qkv"])
    assert_same_bytes(theirs, ours)
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw["model_type"] == "llama" and raw["architectures"] == ["LlamaForCausalLM"]
    assert "auto_map" not in raw
    again = read_config(tmp_path / "out")
    assert again == dataclasses.replace(config, family="llama")
    for one, other in zip(
        jax.tree.leaves(params), jax.tree.leaves(load_params(tmp_path / "out", again)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_files_of_an_export(tmp_path):
    config = tiny()
    save_model(
        init(config, jax.random.key(0)),
        config,
        tmp_path / "out",
        make_tokenizer(),
        dtype="float32",
        max_shard_bytes=SMALL_SHARD,
    )
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    names = {tensor.name for tensor in hf_tensors(config)}
    assert index["weight_map"].keys() == names
    assert index["metadata"]["total_size"] == sum(4 * np.prod(t.shape) for t in hf_tensors(config))
    for file in sorted(set(index["weight_map"].values())):
        held = load_file(tmp_path / "out" / file)
        assert held.keys() == {name for name, place in index["weight_map"].items() if place == file}
        assert sum(value.nbytes for value in held.values()) <= SMALL_SHARD
        raw = (tmp_path / "out" / file).read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        assert length % 8 == 0 and json.loads(raw[8 : 8 + length])["__metadata__"] == {"format": "pt"}
    assert not list(tmp_path.glob(".*"))  # no partial export is left beside it


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_tokenizer_and_chat_template_survive_for_transformers_4_and_5(family, tmp_path):
    """In a qwen2 folder transformers 5 itself would split the text as Qwen's tokenizer does."""
    config, tokenizer = tiny(model_type=family), make_tokenizer()
    save_model(init(config, jax.random.key(0)), config, tmp_path / "out", tokenizer)
    again = load_tokenizer(tmp_path / "out", config)
    text = "<|im_start|>user\n2 + 3 = ?<|im_end|>"
    assert again.encode(text) == tokenizer.encode(text)
    assert again.all_special_ids == tokenizer.all_special_ids
    assert again.chat_template == tokenizer.chat_template
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # 5's own name is unknown to 4
    assert settings["chat_template"] == (tmp_path / "out/chat_template.jinja").read_text()
    assert "<|im_start|>" in settings["additional_special_tokens"]
    assert "extra_special_tokens" not in settings  # 4 needs a mapping there


def test_generation_config_of_the_base_model_is_kept(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "base")
    settings = {"eos_token_id": [1, 0], "temperature": 0.6, "top_k": 20}
    (tmp_path / "base/generation_config.json").write_text(json.dumps(settings))
    config = tiny()
    save_model(init(config, jax.random.key(0)), config, tmp_path / "out", load_tokenizer(tmp_path / "base"))
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == settings


def test_an_earlier_export_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    config = tiny()
    old, new = init(config, jax.random.key(0)), init(config, jax.random.key(1))
    save_model(old, config, tmp_path / "out", make_tokenizer(), dtype="float32", max_shard_bytes=SMALL_SHARD)
    before = read_back(tmp_path / "out")

    def full(path, value):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hf_export, "write_json", full)
        with pytest.raises(OSError, match="No space left"):
            save_model(new, config, tmp_path / "out", dtype="float32")
    assert_same_bytes(before, read_back(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    save_model(new, config, tmp_path / "out", dtype="float32")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert (read_back(tmp_path / "out")["model.embed_tokens.weight"] == np.asarray(new.embed[...])).all()


def test_exports_that_cannot_be(tmp_path, monkeypatch):
    config = tiny()
    params = init(config, jax.random.key(0))
    with pytest.raises(ValueError, match=r"dtype='int8' is not supported; supported: float32, float16, bfl"):
        save_model(params, config, tmp_path / "out", dtype="int8")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"mine: holds thesis\.tex, which is not part of an export"):
        save_model(params, config, tmp_path / "mine")
    with pytest.raises(ValueError, match=r"mine: holds thesis\.tex, which is not part of an export"):
        check_export_folder(tmp_path / "mine")  # before a run
    check_export_folder(tmp_path / "out")
    with pytest.raises(ValueError, match=r"thesis\.tex: a file; the export needs a folder"):
        save_model(params, config, tmp_path / "mine/thesis.tex")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"out: the export needs [\d,]+ bytes, but 1,000 are free"):
        save_model(params, config, tmp_path / "out")
    weights = sum(2 * leaf.size for leaf in jax.tree.leaves(params))  # in bfloat16
    usage = usage._replace(free=weights + 1)
    with pytest.raises(ValueError, match=rf"needs {weights + 2**20:,} bytes, but {weights + 1:,} are free"):
        save_model(params, config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_command(tmp_path, capsys):
    config = tiny(model_type="baichuan")
    run = tmp_path / "run"
    checkpoints = Checkpointer(CheckpointConfig(async_save=False), run)
    for step in (1, 2):
        params = init(config, jax.random.key(step))
        meta = {"config": {}, "model": dataclasses.asdict(config)}
        checkpoints.save(step, {"params": params}, meta, {})
    checkpoints.wait()
    (run / "config.json").write_text(json.dumps({"config": {"model": {"path": "", "tokenizer": "tiny"}}}))
    arguments = ["--checkpoint", str(run), "--out", str(tmp_path / "out"), "--dtype", "float32"]
    assert export.main([*arguments, "--step", "1"]) == 0
    assert "step 1 of" in capsys.readouterr().out
    assert export.main([*arguments, "--overwrite", "True"]) == 0
    assert "step 2 of" in capsys.readouterr().out
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw["model_type"] == "llama"
    written = read_back(tmp_path / "out")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(written, params.embed[...])
    assert load_tokenizer(tmp_path / "out").eos_token_id == 1
    with pytest.raises(ValueError, match=r"no checkpoint of step 7; there are \[1, 2\]"):
        export.main([*arguments, "--overwrite", "True", "--step", "7"])


# --- what is refused


def test_missing_unexpected_and_misshapen_tensors_in_one_message(tmp_path):
    config = tiny()
    tensors = write_folder(tmp_path, config, files=1)
    del tensors["model.norm.weight"]
    tensors["score.weight"] = np.zeros((1, 32), np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((32, 48), np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((48, 32), np.int8)
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)  # of old checkpoints
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        load_params(tmp_path, config)
    message = str(error.value)
    assert "1 missing: model.norm.weight [32];" in message
    assert "1 unexpected: score.weight [1, 32] in model.safetensors;" in message
    assert (
        "1 of another shape: model.layers.0.mlp.up_proj.weight [32, 48] in model.safetensors, "
        "config.json says [48, 32];" in message
    )
    assert "1 of a type other than F32, F16, BF16: model.layers.1.mlp.up_proj.weight I8" in message
    assert "inv_freq" not in message


def _with_header(raw, change):
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header["model.norm.weight"])
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-100],
        lambda raw: raw[:50],
        lambda raw: b"",
        lambda raw: struct.pack("<Q", 2**60) + raw[8:],
        lambda raw: _with_header(raw, lambda entry: entry.update(data_offsets=[0, 2**40])),
        lambda raw: _with_header(raw, lambda entry: entry.update(data_offsets=[-128, 0])),
        lambda raw: _with_header(raw, lambda entry: entry.update(shape=[64])),
    ],
    ids=["tail", "header", "empty", "huge header", "beyond the file", "negative", "shape"],
)
def test_damaged_files_are_named(tmp_path, damage):
    config = tiny()
    write_folder(tmp_path, config)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(
        ValueError, match=r"model-00002-of-00002\.safetensors: truncated or damaged \(.*again"
    ):
        load_params(tmp_path, config)


@pytest.mark.parametrize(
    "name",
    [
        *("../a.safetensors", "/tmp/a.safetensors", "sub/a.safetensors", "a.bin", ".."),
        *("x" * 300 + ".safetensors", "\u00e9" * 150 + ".safetensors"),
    ],
)
def test_an_index_may_not_lead_elsewhere(tmp_path, name):
    config = tiny()
    write_folder(tmp_path / "model", config)
    shutil.copy(tmp_path / "model/model-00001-of-00002.safetensors", tmp_path / "a.safetensors")
    index = {"weight_map": {tensor.name: name for tensor in hf_tensors(config)}}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model/model.safetensors").touch()
    with pytest.raises(ValueError, match="is not a safetensors file of this folder"):
        load_params(tmp_path / "model", config)


def test_links_may_not_lead_elsewhere_but_the_hub_cache_may_be_made_of_them(tmp_path):
    config = tiny()
    snapshot = tmp_path / "models--org--name/snapshots/abc"
    theirs = write_folder(snapshot, config, files=1)
    file = snapshot / "model.safetensors"
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    file.rename(blobs / "1f00")
    file.symlink_to("../../blobs/1f00")
    np.testing.assert_array_equal(load_params(snapshot, config).norm[...], theirs["model.norm.weight"])
    (blobs / "1f00").rename(tmp_path / "secret")
    file.unlink()
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"model\.safetensors: a link out of the folder, to .*secret; copy"):
        load_params(snapshot, config)


def test_folders_without_usable_weights(tmp_path):
    config = tiny()
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(
        ValueError, match=r"no weights; looked for model\.safetensors and model\.safetensors\.in"
    ):
        load_params(tmp_path, config)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"only pickle weights \(pytorch_model\.bin\), .* refused\. Convert"):
        load_params(tmp_path, config)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-1.safetensors"}}))
    with pytest.raises(
        ValueError, match=r"model-1\.safetensors: missing; model\.safetensors\.index\.json names"
    ):
        load_params(tmp_path, config)
    index.write_text(json.dumps({"weight_map": ["model-1.safetensors"]}))
    with pytest.raises(ValueError, match=r"weight_map must map tensor names to file names"):
        load_params(tmp_path, config)


def test_one_tensor_in_two_files(tmp_path):
    config = tiny()
    write_folder(tmp_path, config)
    shutil.copy(tmp_path / "model-00001-of-00002.safetensors", tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(
        ValueError, match=r"is also in model-00001-of-00002\.safetensors; one of the files is"
    ):
        load_params(tmp_path, config)


def test_code_of_a_folder_is_never_run(tmp_path):
    auto_map = {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}
    config = tiny()
    write_folder(tmp_path / "a", config)
    (tmp_path / "a/config.json").write_text(json.dumps(TINY | auto_map))
    with pytest.raises(ValueError, match=r"auto_map=.*modeling_evil\.Evil.* is never run.* plain qwen3"):
        load_params(tmp_path / "a", config)
    baichuan = tiny(model_type="baichuan")  # its decoder is built in, so nothing of the folder is needed
    write_folder(tmp_path / "b", baichuan)
    raw = json.loads((tmp_path / "b/config.json").read_text())
    (tmp_path / "b/config.json").write_text(json.dumps(raw | auto_map))
    assert load_params(tmp_path / "b", baichuan).layers.q[...].shape == (2, 32, 4, 8)
    (tmp_path / "b/config.json").write_text(json.dumps({"model_type": "phi3"} | auto_map))
    refuse_remote_code(tmp_path / "b")  # Phi-3.5's, too


# --- resolve, tokenizer


def test_resolve(tmp_path, monkeypatch):
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(ValueError, match=r"model\.bin: a file, but a model is a folder .* or a GGUF file"):
        resolve_model(tmp_path / "model.bin")
    with pytest.raises(
        ValueError, match=r"/nowhere/qwen/3: no such folder; give a model folder, a GGUF file or a hub name"
    ):
        resolve_model("/nowhere/qwen/3")
    with pytest.raises(ValueError, match=r"/models/qwen3/a: no such folder"):
        resolve_model("./models/qwen3/a")
    with pytest.raises(ValueError, match=r"/nowhere/qwen\.gguf: no such file"):
        resolve_model("/nowhere/qwen.gguf")
    with pytest.raises(ValueError, match=r"org/m:Q8_0: a model of the hub is written org/m/FILE\.gguf"):
        resolve_model("hf.co/org/m:Q8_0")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"org/name: no folder .*/org/name, and the hub has not delivered it .*copy"
    ):
        resolve_model("org/name")  # tests run with HF_HUB_OFFLINE=1
    asked = {}

    def download(name, **patterns):
        asked[name] = patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name") == tmp_path
    kept = huggingface_hub.utils.filter_repo_objects(
        [
            *("config.json", "model.safetensors", "pytorch_model.bin", "modeling.py", "chat_template.jinja"),
            *("tokenizer.model", "merges.txt", "original/model.safetensors", "consolidated.safetensors"),
        ],
        **asked["org/name"],
    )
    assert list(kept) == [
        *("config.json", "model.safetensors", "chat_template.jinja", "tokenizer.model", "merges.txt")
    ]


def test_tokenizers_that_do_not_fit(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer; looked for tokenizer\.json, tokenizer\.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "qwen.tiktoken").write_text("IQ== 0")
    with pytest.raises(ValueError, match=r"qwen\.tiktoken: only the folder's own code.* Convert it to tok"):
        load_tokenizer(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path, tiny()).get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ValueError, match=r"ids up to 127, but the model's vocab_size is 127"):
        load_tokenizer(tmp_path, tiny(vocab_size=127))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: no eos_token"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(settings | {"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}})
    )
    assert load_tokenizer(tmp_path).eos_token_id == 1  # tokenizer.json needs no code
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.model")
    with pytest.raises(ValueError, match=r"auto_map asks for the folder's own code, which is never run"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"its tokenizer cannot be read"):
        load_tokenizer(tmp_path)
