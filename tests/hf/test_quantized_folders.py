"""Published folders with quantized weights: exact values, in any shard, and little memory."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from hf_tensors import params_from_tensors
from load_memory import run_measurement
from safetensors.numpy import load_file
from slow_cases import with_slow

from jaxrl_llm.errors import UserError
from jaxrl_llm.hf import load
from jaxrl_llm.hf.config import read_config, to_hf_config
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.names import hf_tensors
from jaxrl_llm.models import named_leaves, shardings
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402  NumPy has no type of 8 bits
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

TINY = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}


def fp8_tensors(config, block, scale_dtype=torch.float32, plain=("embed", "lm_head", "norm", "mlp.gate.")):
    """Tensors of a model of random fp8 weights and scales."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for tensor in hf_tensors(config):
        values = torch.randn(tensor.shape, generator=generator)
        if len(tensor.shape) == 1 or any(part in tensor.name for part in plain):
            tensors[tensor.name] = values.bfloat16()
            continue
        grid = (
            *tensor.shape[:-2],
            *(-(-n // size) for n, size in zip(tensor.shape[-2:], block, strict=True)),
        )
        tensors[tensor.name] = (100 * values).to(torch.float8_e4m3fn)
        if scale_dtype == torch.float32:
            scale = torch.rand(grid, generator=generator) / 300
        else:
            scale = torch.randint(110, 124, grid, generator=generator, dtype=torch.uint8).view(scale_dtype)
        tensors[f"{tensor.name}_scale_inv"] = scale
    return tensors


def write_quantized(folder, raw, tensors, quantization, *, files=2):
    """A folder whose weights and scales are not in the same file."""
    folder.mkdir(parents=True, exist_ok=True)
    config = to_hf_config(read_config(raw))
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    names, places = list(tensors), {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        save_file(
            {n: tensors[n].contiguous() for n in names[i::files]}, folder / file, metadata={"format": "pt"}
        )
        places |= dict.fromkeys(names[i::files], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


# --- fp8


@pytest.mark.parametrize(
    ("extra", "scale"), [({}, torch.float32), (EXPERTS, torch.uint8)], ids=["dense", "experts"]
)
def test_fp8_in_blocks_gives_the_bytes_of_transformers(tmp_path, extra, scale):
    """Import and export in bfloat16, beside transformers' own dequantization; one matrix is not converted."""
    raw = TINY | extra
    skipped = [
        "lm_head",
        "model.layers.1.self_attn.o_proj",
        *(f"model.layers.{i}.mlp.gate" for i in range(2)),
    ]
    config = read_config(raw)
    plain = ("embed", "lm_head", "norm", "mlp.gate.", "1.self_attn.o_proj")
    tensors = fp8_tensors(config, (16, 16), scale, plain)
    folder = write_quantized(tmp_path / "in", raw, tensors, FP8 | {"modules_to_not_convert": skipped})
    params = load_params(folder, config, dtype=jnp.bfloat16)
    written = load_file(save_model(params, config, tmp_path / "out") / "model.safetensors")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs/model.safetensors")
    assert written.keys() == theirs.keys() == {name for name in tensors if not name.endswith("_scale_inv")}
    for name, value in theirs.items():
        assert written[name].dtype == value.dtype == jnp.bfloat16, name
        np.testing.assert_array_equal(written[name], value, err_msg=name)


LATENTS = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1},
    **{"num_key_value_heads": 4, "first_k_dense_replace": 1, "topk_group": 1},
}
PUBLISHED = {
    "deepseek_v3": LATENTS,
    "deepseek_v32": {**LATENTS, "index_n_heads": 2, "index_head_dim": 16},
    "glm_moe_dsa": {**LATENTS, "index_n_heads": 2, "index_head_dim": 16, "indexer_types": ["full", "shared"]},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": EXPERTS | {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4},
}


@pytest.mark.parametrize("family", with_slow(PUBLISHED, PUBLISHED.keys() - {"minimax_m2"}))
def test_fp8_of_families_is_the_product_of_codes_and_scales(family, tmp_path):
    """Of every tensor by the names of the family; the last blocks are cut."""
    raw = TINY | PUBLISHED[family] | {"model_type": family}
    config = read_config(raw)
    tensors, exact = fp8_tensors(config, (20, 24)), {}
    for name, value in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            for dim, size in ((-2, 20), (-1, 24)):
                scale = scale.repeat_interleave(size, dim).narrow(dim, 0, value.shape[dim])
            exact[name] = (value.float() * scale).numpy()
        elif not name.endswith("_scale_inv"):
            exact[name] = value.float().numpy()
    folder = write_quantized(tmp_path, raw, tensors, FP8 | {"weight_block_size": [20, 24]})
    expected = params_from_tensors(config, exact)
    for (name, one), (_, other) in zip(
        named_leaves(load_params(folder, config)), named_leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(one, other, err_msg=name)


def test_blocks_at_the_edge_are_cut_and_scales_multiply(tmp_path):
    """By hand: 5 rows and 7 columns in blocks of 2 x 3; transformers refuses such sizes."""
    raw = TINY | {"num_hidden_layers": 1}
    tensors = fp8_tensors(read_config(raw), (13, 9))
    name = "model.layers.0.mlp.gate_proj.weight"  # [48, 32] in 4 x 4 blocks of 13 x 9
    scale = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]])
    tensors |= {name: torch.full((48, 32), 0.375).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    folder = write_quantized(tmp_path, raw, tensors, FP8 | {"weight_block_size": [13, 9]})
    gate = np.asarray(load_params(folder, read_config(raw)).layers.gate[...])[0].T
    assert gate[0, 0] == gate[12, 8] == 0.375
    assert gate[13, 0] == 1.875 and gate[0, 9] == 0.75 and gate[12, 26] == 1.125
    assert gate[38, 27] == 4.5 and gate[39, 27] == gate[47, 31] == 6.0
    # Other scales: a byte is a power of two, 2^(b - 127).
    powers = torch.tensor([[127, 128, 126, 0]] * 4, dtype=torch.uint8)
    for kind in (torch.uint8, torch.float8_e8m0fnu, torch.bfloat16):
        scale = powers.view(kind) if kind != torch.bfloat16 else torch.exp2(powers.float() - 127).bfloat16()
        write_quantized(
            tmp_path, raw, tensors | {f"{name}_scale_inv": scale}, FP8 | {"weight_block_size": [13, 9]}
        )
        gate = np.asarray(load_params(folder, read_config(raw)).layers.gate[...])[0].T
        assert gate[20, 8] == 0.375 and gate[20, 9] == 0.75 and gate[20, 26] == 0.1875
        assert gate[20, 27] == 0.375 * 2.0**-127


@pytest.mark.parametrize("extra", [{}, EXPERTS], ids=["dense", "experts in one tensor"])
def test_shards_and_pieces_of_fp8_are_parts_of_the_whole(tmp_path, monkeypatch, extra):
    """Borders of shards and pieces are not borders of blocks."""
    raw, block = TINY | extra, (11, 10)
    config = read_config(raw)
    tensors = fp8_tensors(config, block)
    if extra:  # as transformers 5 keeps experts: gate and up one below the other
        for layer in range(2):
            mlp, shapes = (
                f"model.layers.{layer}.mlp.experts",
                {"gate_up_proj": (32, 32), "down_proj": (32, 16)},
            )
            for name in [name for name in tensors if name.startswith(mlp)]:
                del tensors[name]
            for name, (rows, columns) in shapes.items():
                grid = (4, -(-rows // 11), -(-columns // 10))
                tensors[f"{mlp}.{name}"] = torch.randn(4, rows, columns).to(torch.float8_e4m3fn)
                tensors[f"{mlp}.{name}_scale_inv"] = torch.rand(grid)
    folder = write_quantized(tmp_path, raw, tensors, FP8 | {"weight_block_size": list(block)})
    whole = load_params(folder, config)
    if extra:  # rows 16 to 31 of gate_up_proj are up's; row 22 begins the third block
        mlp = "model.layers.1.mlp.experts.gate_up_proj"
        expected = tensors[mlp][3, 22, 9:11].float() * tensors[f"{mlp}_scale_inv"][3, 2, :2]
        np.testing.assert_array_equal(whole.layers.expert_up[...][1, 3, 9:11, 6], expected)
    monkeypatch.setattr(load, "_MIN_READ", 1)
    monkeypatch.setattr(load, "_MAX_READ", 300)
    layout = shardings(config, make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)), TRAIN)
    for (name, a), (_, b) in zip(
        named_leaves(whole), named_leaves(load_params(folder, config, layout)), strict=True
    ):
        assert np.ptp(a) > 0, name
        np.testing.assert_array_equal(a, b, err_msg=name)


def with_changes(folder, tensors, changes):
    return write_quantized(folder, TINY, {**tensors, **changes}, FP8)


def test_broken_fp8_folders_are_refused_by_tensor(tmp_path):
    config, name = read_config(TINY), "model.layers.0.mlp.up_proj.weight"
    tensors = fp8_tensors(config, (16, 16))
    nan = tensors[name].view(torch.uint8).clone()
    nan[40, 3] = 0x7F  # e4m3 has NaN, but no Inf
    scale = tensors[f"{name}_scale_inv"]
    for changes, message in (
        ({name: nan.view(torch.float8_e4m3fn)}, rf"{name} holds NaN or Inf"),
        ({f"{name}_scale_inv": scale * np.inf}, rf"{name} holds NaN or Inf"),
        (
            {f"{name}_scale_inv": scale[:2]},
            r"_inv is F32 \[2, 2\]; .*up_proj.* needs scales \[3, 2\] of type F32",
        ),
        ({f"{name}_scale_inv": scale.int()}, r"up_proj.weight_scale_inv is I32 \[3, 2\]; "),
        ({name: tensors[name].bfloat16()}, rf"1 unexpected: {name}_scale_inv"),
        ({name: tensors[name].to(torch.float8_e5m2)}, rf"of a type other than .*: {name} F8_E5M2"),
    ):
        with pytest.raises(UserError, match=message):
            load_params(with_changes(tmp_path, tensors, changes), config)
    # A weight without its scale, and scales without the size of their blocks.
    del tensors[f"{name}_scale_inv"]
    with pytest.raises(UserError, match=rf"of a type other than F32, F16, BF16: {name} F8_E4M3"):
        load_params(with_changes(tmp_path, tensors, {}), config)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(UserError, match=r"is fp8 with a scale, but config.json has no quantization_config"):
        load_params(tmp_path, config)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"weight_block_size": [128]}, r"weight_block_size=\[128\] must be two whole numbers"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\] must be two whole numbers"),
        ({"fmt": "e5m2"}, r"fmt='e5m2' is not supported; supported: e4m3"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            r"quant_algo='NVFP4' is not supported; supported: FP8. Take the folder of the model before",
        ),
        ({"quant_method": "torchao"}, r"quant_method='torchao' is not supported; "),
        (
            {"quant_method": "bitsandbytes"},
            r"quant_method='bitsandbytes' is .* model before its quantization",
        ),
        ({"quant_method": "gptq"}, r"quant_method='gptq' is not supported; .* model before its quantization"),
        ({"quant_method": "awq"}, r"quant_method='awq' is not supported; .* model before its quantization"),
        ({"quant_method": ["fp8"]}, r"quant_method=\['fp8'\] is not supported"),
    ],
)
def test_other_formats_are_refused_before_weights_are_read(quantization, message):
    with pytest.raises(UserError, match=rf"config.json: quantization_config\.{message}"):
        read_config({**TINY, "quantization_config": {**FP8, **quantization}})


def compressed(strategy="channel", key="quantization_config", *, inner=(), **changes):
    """Config of compressed-tensors, as llm-compressor writes it."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights | dict(inner), "input_activations": inputs}
    found = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }
    return {key: found | {"ignore": ["lm_head"], "kv_cache_scheme": None} | changes}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            compressed(format="pack-quantized"),
            r"format='pack-quantized' is not supported; supported: float-q",
        ),
        (compressed(format="nvfp4-pack-quantized"), r"format='nvfp4-pack-quantized' is not .* before its"),
        (compressed(inner={"type": "int"}), r"config_groups.group_0.weights.type='int' is not supported; s"),
        (compressed(inner={"num_bits": 4}), r"weights.num_bits=4 is not supported; supported: 8\. Take the"),
        (compressed("tensor_group"), r"weights.strategy='tensor_group' is not supported; supported: tensor"),
        (compressed("block"), r"weights.block_structure=None must be two whole numbers"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), r"sparsity_config.format='sparse-24"),
        (compressed(transform_config={"config_groups": {"R1": {}}}), r"transform_config=.* is not supported"),
        (
            compressed(config_groups={}),
            r"config_groups=\{\} is not supported: must have groups with one size",
        ),
        (compressed(key="compression_config", format="int-quantized"), r"format='int-quantized' is not supp"),
    ],
)
def test_compressed_tensors_other_than_fp8_are_refused(raw, message):
    key = "quantization_config" if "quantization_config" in raw else "compression_config"
    with pytest.raises(UserError, match=rf"config.json: {key}\..*{message}"):
        read_config({**TINY, **raw})


@pytest.mark.parametrize(
    ("quantization", "end", "scale_shape", "others"),
    [
        (FP8 | {"weight_block_size": None, "activation_scheme": "static"}, "_scale", (), "input_scale"),
        (
            FP8 | {"weight_block_size": None, "activation_scheme": "static"},
            "_scale_inv",
            (),
            "activation_scale",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", (1,), "input_scale"),
        (compressed("tensor")["quantization_config"], "_scale", (1,), "input_scale"),
        (compressed("channel")["quantization_config"], "_scale", (None, 1), "k_scale"),
        (compressed("group", inner={"group_size": 8})["quantization_config"], "_scale", (None, 8), None),
        (
            compressed("block", inner={"block_structure": [16, 8]})["quantization_config"],
            "_scale",
            (16, 8),
            None,
        ),
    ],
    ids=["fp8", "fp8 of transformers", "modelopt", "tensor", "channel", "group", "block"],
)
def test_fp8_with_scales_of_tensors_and_rows_is_the_product(
    tmp_path, *, quantization, end, scale_shape, others
):
    """torch's product in float32, rounded once; scales of activations and caches are left out."""
    config, generator, expected = read_config(TINY), torch.Generator().manual_seed(1), {}
    tensors = fp8_tensors(config, (16, 16))
    for name, x in [(n, x) for n, x in tensors.items() if x.dtype == torch.float8_e4m3fn]:
        del tensors[f"{name}_scale_inv"]
        (rows, columns), sizes = x.shape, [n or 1 for n in scale_shape]
        is_blocks = len(sizes) == 2 and sizes[1] > 1
        grid = (
            [rows // sizes[0], columns // sizes[1]]
            if is_blocks
            else [rows if n is None else n for n in scale_shape]
        )
        scale = (torch.rand(grid, generator=generator) / 300).bfloat16()
        whole = (
            scale.float().repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)
            if is_blocks
            else scale
        )
        expected[name] = x.float() * whole.float()
        tensors[name + end] = scale
        if others:
            tensors[name.replace("weight", others)] = torch.tensor(3.0)
    folder = write_quantized(tmp_path / "in", TINY, tensors, quantization)
    for dtype in (jnp.float32, jnp.bfloat16):
        params = load_params(folder, config, dtype=dtype)
        written = load_file(
            save_model(params, config, tmp_path / "out", dtype=dtype.__name__) / "model.safetensors"
        )
        assert len(expected) == 14 and expected.keys() < written.keys()
        for name, value in expected.items():
            value = value.bfloat16().float() if dtype == jnp.bfloat16 else value
            np.testing.assert_array_equal(written[name].astype(np.float32), value, err_msg=name)


def test_scales_of_another_shape_than_rows_are_refused(tmp_path):
    config, name = read_config(TINY), "model.layers.0.mlp.up_proj.weight"  # [48, 32]
    tensors = fp8_tensors(config, (48, 32))
    tensors = {n.replace("_scale_inv", "_scale"): x for n, x in tensors.items()}
    quantization = compressed("tensor")["quantization_config"]
    with pytest.raises(UserError, match=r"_scale is F32 \[\d, \d\]; .* needs scales \[1, 1\] of type F32"):
        load_params(
            write_quantized(tmp_path, TINY, tensors | {f"{name}_scale": torch.ones(1, 2)}, quantization),
            config,
        )


# --- MXFP4

OSS = TINY | {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
}


def mxfp4_tensors(config):
    """Tensors of a gpt-oss: random bytes as experts, floats as all else."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for tensor in hf_tensors(config):
        if tensor.name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(110, 130, shape, generator=generator, dtype=torch.uint8)
            tensors |= {f"{tensor.name}_blocks": blocks, f"{tensor.name}_scales": scales}
        else:
            tensors[tensor.name] = torch.randn(tensor.shape, generator=generator).bfloat16()
    return tensors


@pytest.mark.slow
def test_mxfp4_gives_the_bytes_of_transformers_on_every_mesh(tmp_path):
    """Lossless in bfloat16; each device decodes its part, whose borders are not borders of blocks."""
    config, tensors = read_config(OSS), mxfp4_tensors(read_config(OSS))
    mlp = "model.layers.1.mlp.experts"
    # By hand: 0x71 is 0.5 (low half), then 6; 0xF2 is 1, then -6; scale 129 is 4.
    tensors[f"{mlp}.down_proj_blocks"][2, 5, 0, :2] = torch.tensor([0x71, 0xF2], dtype=torch.uint8)
    tensors[f"{mlp}.down_proj_scales"][2, 5, 0] = 129
    folder = write_quantized(tmp_path / "in", OSS, tensors, {"quant_method": "mxfp4"})
    layout = shardings(config, make_mesh(MeshConfig(fsdp=2, tensor=2, expert=2)), TRAIN)
    params = load_params(folder, config, layout, jnp.bfloat16)
    np.testing.assert_array_equal(params.layers.expert_down[...][1, 2, :4, 5], [2, 24, 4, -24])
    written = load_file(save_model(params, config, tmp_path / "out") / "model.safetensors")
    for name, value in written.items():
        if f"{name}_blocks" in tensors:
            theirs = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        else:
            theirs = tensors[name]
        assert value.dtype == jnp.bfloat16 and len(np.unique(value)) > 3
        np.testing.assert_array_equal(value, theirs.float().numpy(), err_msg=name)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    for (name, a), (_, b) in zip(
        named_leaves(params), named_leaves(load_params(folder, config)), strict=True
    ):
        np.testing.assert_array_equal(a.astype(np.float32), b, err_msg=name)


def test_broken_mxfp4_folders_are_refused_by_tensor(tmp_path):
    config, tensors = read_config(OSS), mxfp4_tensors(read_config(OSS))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    scales = tensors[f"{name}_scales"].clone()
    scales[3, 63, 1] = 255  # NaN
    for changes, message in (
        ({f"{name}_scales": scales}, rf"{name} holds NaN or Inf"),
        (
            {f"{name}_scales": scales[:, :, :1]},
            r"_scales is U8 \[4, 64, 1\]; .* needs scales \[4, 64, 2\] of",
        ),
        (
            {f"{name}_blocks": tensors[f"{name}_blocks"][:, :, :, :8]},
            rf"missing: {name} \[4, 64, 64\]; 2 unexp",
        ),
    ):
        folder = write_quantized(tmp_path, OSS, tensors | changes, {"quant_method": "mxfp4"})
        with pytest.raises(UserError, match=message):
            load_params(folder, config)


# --- memory

MEMORY = """
import sys
from pathlib import Path
from load_memory import peak_beyond_weights
from test_quantized_folders import FP8, TINY, fp8_tensors, write_quantized
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.names import hf_tensors
raw = TINY | dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=5, vocab_size=256, head_dim=64)
quantization, config = FP8 | {"weight_block_size": [128, 128]}, read_config(raw)
folder = write_quantized(Path(sys.argv[1]), raw, fp8_tensors(config, (128, 128)), quantization)
largest = max(4 * t.shape[0] * t.shape[-1] for t in hf_tensors(config))
print(peak_beyond_weights(folder, config) / largest)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_loading_fp8_needs_little_more_than_the_weights(tmp_path):
    """260 MB in 5 layers: as of floats, one tensor of 17 MB in float32 is in memory beside the weights."""
    assert run_measurement(MEMORY, tmp_path / "big") < 1.5
