"""Quantized frozen weights: their numbers, what models compute with them, their memory and layouts."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from lora_models import merged, with_quantized_base, with_random_adapters
from slow_cases import with_slow
from tiny_models import random_params

from jaxrl_llm import models
from jaxrl_llm.algos import grpo
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import LoraConfig, RopeConfig, TransformerConfig, decode, lora
from jaxrl_llm.models.config import GlobalHeads, MoEConfig
from jaxrl_llm.models.mixer_config import ConvConfig, DeltaConfig, MambaConfig, MLAConfig
from jaxrl_llm.models.quantize import dequantize_weight, quantize_weight, tile_size
from jaxrl_llm.models.stacks import layer_stacks
from jaxrl_llm.ranges import problems
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import ROLLOUT, TRAIN, bytes_per_device

LEVELS = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
]
"""Appendix E of the paper."""
BASE = TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.2,
)  # fmt: skip
ADAPTED = LoraConfig(rank=4, alpha=8.0)
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
KINDS = pytest.mark.parametrize("kind", ["int8", "nf4"])


def adapted(kind):
    return lora.with_lora(BASE, LoraConfig(rank=4, alpha=8.0, quantize=kind))


def quantized(kind, base=BASE):
    """The model of `random_params(base)`, quantized, with adapters whose B is not zero."""
    shapes = models.abstract(lora.with_lora(base, dataclasses.replace(ADAPTED, quantize=kind)))
    weights = dict(models.named_leaves(random_params(base)))
    for name, _ in models.named_leaves(shapes):
        if name.endswith("_scale"):
            name = name.removesuffix("_scale")
            dim = 2 if name.endswith(("layers.o", "delta_o")) else 1
            weights[name], weights[f"{name}_scale"] = quantize_weight(jnp.asarray(weights[name]), kind, dim)
    rng = np.random.default_rng(5)
    noise = lambda x: 0.1 * rng.standard_normal(x.shape, np.float32)
    leaves = [weights[n] if n in weights else noise(x) for n, x in models.named_leaves(shapes)]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def dequantized(params, base=BASE):
    """The same model with plain weights and the same adapters."""
    weights = dict(models.named_leaves(params))
    shapes = models.abstract(lora.with_lora(base, ADAPTED))
    plain = lambda n: (
        dequantize_weight(weights[n], weights[f"{n}_scale"], jnp.float32)
        if f"{n}_scale" in weights
        else weights[n]
    )
    leaves = [plain(name) for name, _ in models.named_leaves(shapes)]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


# --- numbers


def test_nf4_by_hand():
    weight = 2.0 * np.float32(LEVELS)[:, None]
    codes, scale = quantize_weight(jnp.asarray(weight), "nf4", 0)
    assert codes.dtype == jnp.uint4 and codes[:, 0].tolist() == list(range(16)) and scale.tolist() == [[2.0]]
    np.testing.assert_array_equal(dequantize_weight(codes, scale, jnp.float32), weight)
    codes, scale = quantize_weight(jnp.asarray([[4.0, 0.1, 2.6, -4.0]]), "nf4", 1)  # 0.025 is next to 0, 0.65
    assert codes.tolist() == [[15, 7, 14, 0]] and scale.tolist() == [[4.0]]  # to 0.72 rather than to 0.56
    np.testing.assert_allclose(
        dequantize_weight(codes, scale, jnp.float32), [[4.0, 0.0, 4 * LEVELS[14], -4.0]]
    )


def test_int8_by_hand():
    """The largest weight has code 127, or -127; 0.5 is 31.75 steps of 2 / 127."""
    codes, scale = quantize_weight(jnp.asarray([2.0, -2.0, 0.5, 0.0]), "int8", 0)
    assert codes.tolist() == [127, -127, 32, 0]
    np.testing.assert_allclose(scale, [2 / 127], rtol=3e-7)
    expected = np.array([2.0, -2.0, 64 / 127, 0])
    np.testing.assert_allclose(dequantize_weight(codes, scale, jnp.float32), expected, rtol=3e-7)


@KINDS
@pytest.mark.parametrize(("shape", "axis"), [((3, 192, 5), 1), ((2, 6, 96), 2), ((8, 3), 0)])
def test_numbers_are_those_of_qwix(kind, shape, axis):
    weight = jax.random.normal(jax.random.key(0), shape).astype(jnp.bfloat16)
    codes, scale = quantize_weight(weight, kind, axis)
    others = [i for i in range(len(shape)) if i != axis]
    tiles = {axis: tile_size(shape[axis])}
    qtype, method = {"nf4": ("nf4", "absmax"), "int8": (jnp.int8, f"absmax,{127.5 / 127}")}[kind]
    wide = weight.astype(jnp.float32)
    settings = {"channelwise_axes": others, "tiled_axes": tiles, "calibration_method": method}
    expected = jax.jit(lambda x: qwix.quantize(x, qtype, **settings))(wide)
    np.testing.assert_array_equal(codes, expected.qvalue)
    np.testing.assert_array_equal(scale, expected.scale)
    np.testing.assert_array_equal(dequantize_weight(codes, scale, jnp.float32), qwix.dequantize(expected))
    half = dequantize_weight(codes, scale, jnp.bfloat16)
    np.testing.assert_array_equal(half, qwix.dequantize(expected).astype(jnp.bfloat16))
    error = np.linalg.norm(dequantize_weight(codes, scale, jnp.float32) - wide) / np.linalg.norm(wide)
    assert error < {"int8": 0.01, "nf4": 0.11}[kind]


@pytest.mark.parametrize(("dim", "tile"), [(4096, 64), (896, 64), (128, 64), (96, 48), (80, 40), (8, 8)])
def test_a_tile_divides_its_dim(dim, tile):
    assert tile_size(dim) == tile


# --- models


@KINDS
def test_linear_layers_alone_are_quantized(kind):
    leaves = dict(models.named_leaves(models.abstract(adapted(kind))))
    integers = {name for name, x in leaves.items() if not jnp.issubdtype(x.dtype, jnp.floating)}
    assert integers == {f"layers.{name}" for name in MATRICES}
    assert leaves["layers.q_scale"].shape == (2, 1, 4, 8) and leaves["layers.o_scale"].shape == (2, 4, 1, 32)
    assert leaves["layers.down_scale"].shape == (2, 2, 32)
    axes = models.logical_axes(models.abstract(adapted(kind)))
    assert axes["layers.down_scale"] == axes["layers.down"] == ("layers", "mlp", "embed")


@pytest.mark.parametrize("kind", with_slow(["int8", "nf4"], {"int8"}))
def test_random_weights_are_those_of_the_plain_model_quantized(kind):
    init = jax.jit(models.init, static_argnums=0)
    plain = dict(models.named_leaves(init(BASE, jax.random.key(1))))
    ours = dict(models.named_leaves(init(adapted(kind), jax.random.key(1))))
    codes, scale = quantize_weight(plain["layers.o"], kind, 2)
    np.testing.assert_array_equal(ours["layers.o"], codes)
    np.testing.assert_array_equal(ours["layers.o_scale"], scale)
    np.testing.assert_array_equal(ours["embed"], plain["embed"])


def items():
    rng, result = np.random.default_rng(0), []
    for length in (24, 20, 11, 13, 24, 9, 6, 17):
        mask = np.ones(length, np.float32)
        mask[:3] = 0
        tokens = rng.integers(0, 64, length).astype(np.int32)
        signals = {"advantages": np.full(length, rng.normal(), np.float32), "rollout": -4 * mask}
        result.append(PackItem(tokens, mask, signals))
    return result


def gradients(params, mesh=None, **settings):
    """Return (loss, gradients of the adapters by name); SGD of rate 1."""
    mesh = mesh or MeshConfig(fsdp=1)
    size = int(np.prod([abs(n) for n in mesh.sizes.values()]))
    step = StepConfig(row_tokens=24, rows=8, max_grad_norm=0.0, **settings)
    built = make_mesh(mesh, jax.devices()[:size])
    learner = Learner(grpo.Config(kl_coef=0.0), params.config, optax.sgd(1.0), step, mesh=built)
    with jax.set_mesh(built):
        start = jax.device_put(jax.tree.map(np.asarray, params), learner.param_shardings)
        state, metrics = learner.update(learner.init_state(start), [items()])
        before, after = (dict(models.named_leaves(p)) for p in (params, jax.device_get(state.params)))
    change = {n: np.asarray(before[n]) - after[n] for n in before if "_lora_" in n}
    for name in before:
        if "_lora_" not in name:
            np.testing.assert_array_equal(before[name], after[name])
    return float(metrics["loss"]), change


@pytest.fixture(scope="module")
def on_one_device():
    return gradients(quantized("nf4"))


def check_equal(result, expected):
    assert result[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-7)
    for name, gradient in expected[1].items():
        error = np.linalg.norm(result[1][name] - gradient)
        assert error <= 1e-5 * np.linalg.norm(gradient) + 1e-7, name


@pytest.mark.slow
def test_gradients_are_those_of_the_dequantized_model(on_one_device):
    check_equal(on_one_device, gradients(dequantized(quantized("nf4"))))


RECURRENT = {
    "delta": ({"delta": DeltaConfig(2, 4, 8, 8), "attention_gate": True}, {"qkv", "z", "b", "a", "o"}),
    "conv": ({"conv": ConvConfig()}, {"in", "out"}),
    "mamba": ({"mamba": MambaConfig(4, 8, 8, 2)}, {"in"}),
}
"""Kind -> its sizes, and its linear layers; peft refuses adapters of Mamba's `out_proj`."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECURRENT)
def test_all_linear_layers_of_recurrent_layers_are_quantized_and_adapted(kind):
    """The gradients of all adapters are those of the dequantized model."""
    sizes, layers = RECURRENT[kind]
    base = dataclasses.replace(BASE, layer_kinds=(kind, "attention"), **sizes)
    params = quantized("nf4", base)
    loss, changes = gradients(params)
    stack = f"{kind}_layers.{kind}_"
    projections = {name.split("_lora_")[0] for name in changes if stack in name}
    assert projections == {f"{stack}{name}" for name in layers}
    assert all(x.any() for x in changes.values())
    check_equal((loss, changes), gradients(dequantized(params, base)))


@pytest.mark.slow
def test_layers_with_shared_keys_and_inputs_are_quantized_and_adapted():
    """Gemma 4's small models: gradients of the dequantized model, on one device and on a mesh."""
    base = dataclasses.replace(
        BASE, num_layers=4, window_layers=(True, False) * 2, sliding_window=6, local_rope=RopeConfig(),
        global_heads=GlobalHeads(1, 16), shared_kv_layers=2, wide_shared_mlp=True, per_layer_inputs=8,
    )  # fmt: skip
    params = quantized("nf4", base)
    stored = {name for name, _ in models.named_leaves(params) if name.endswith("_scale")}
    inputs = {f"{stack}.input_{part}_scale" for stack in layer_stacks(base) for part in ("gate", "proj")}
    assert len(layer_stacks(base)) == 4 and inputs <= stored
    result = gradients(params)
    assert all(x.any() for x in result[1].values())
    expected = gradients(dequantized(params, base))
    check_equal(result, expected)
    check_equal(gradients(params, MeshConfig(fsdp=2, tensor=2)), expected)


@pytest.mark.slow
def test_a_mesh_gives_the_update_of_one_device(on_one_device):
    check_equal(gradients(quantized("nf4"), MeshConfig(fsdp=4, tensor=2)), on_one_device)


@KINDS
def test_codes_and_scales_are_sharded_like_the_weight(kind):
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
    placed = dict(models.named_leaves(models.shardings(adapted(kind), mesh, TRAIN)))
    spec = lambda name: tuple(placed[f"layers.{name}"].spec)
    plain = dict(models.named_leaves(models.shardings(BASE, mesh, TRAIN)))
    for name in MATRICES:
        assert spec(name) == tuple(plain[f"layers.{name}"].spec)
    assert spec("down_scale") == ("stage", "tensor", spec("down")[2])
    assert spec("q_scale") == ("stage", None, "tensor", None)  # one tile of 32 inputs cannot be divided by 2


@KINDS
def test_the_merged_model_is_dequantized_and_added_in_float32(kind):
    params = quantized(kind)
    weights = dict(models.named_leaves(params))
    whole = dict(models.named_leaves(jax.jit(merged)(params)))
    a, b = (np.asarray(weights[f"layers.up_lora_{part}"]) for part in "ab")
    base = np.asarray(dequantize_weight(weights["layers.up"], weights["layers.up_scale"], jnp.float32))
    np.testing.assert_allclose(whole["layers.up"], base + 2.0 * np.einsum("lir,lro->lio", a, b), atol=1e-6)
    assert {x.dtype for x in whole.values()} == {np.dtype(np.float32)}


def test_the_fingerprint_is_of_codes_and_scales():
    prints = {lora.frozen_fingerprint(quantized(kind)) for kind in ("int8", "nf4")}
    prints.add(lora.frozen_fingerprint(dequantized(quantized("nf4"))))
    assert len(prints) == 3
    changed = jax.tree.map(lambda x: x[::-1] if x.shape == (2, 1, 4, 8) else x, quantized("nf4"))
    assert lora.frozen_fingerprint(changed) not in prints


def test_trained_weights_are_not_quantized():
    wrong = dict(problems(LoraConfig(quantize="nf4")))
    assert "only frozen weights can be quantized" in wrong["quantize"]
    assert not list(problems(LoraConfig(rank=1, quantize="nf4")))


# --- files


@pytest.mark.parametrize("kind", with_slow(["int8", "nf4"], {"nf4"}))
def test_loading_quantizes_what_is_in_the_folder(kind, tmp_path):
    base = random_params(BASE)
    save_model(base, BASE, tmp_path / "hf", dtype="float32")
    config = lora.frozen_config(BASE, kind)
    expected = dict(models.named_leaves(quantized(kind)))
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    for shardings in (None, models.shardings(config, mesh, TRAIN)):
        loaded = load_params(tmp_path / "hf", config, shardings, jnp.bfloat16)
        assert loaded.config == config
        for name, x in models.named_leaves(loaded):
            np.testing.assert_array_equal(x, expected[name].astype(x.dtype))
            assert x.dtype == jnp.float32 or "norm" not in name
        if shardings is not None:
            assert [x.sharding for x in jax.tree.leaves(loaded)] == jax.tree.leaves(shardings)


EXPERTS = dataclasses.replace(BASE, family="qwen3_moe", moe=MoEConfig(4, 2, expert_size=48))
LATENTS = dataclasses.replace(
    BASE, family="deepseek_v3", num_kv_heads=4, head_dim=12, qk_norm=False, mla=MLAConfig(16, 20, 8, 4, 6),
    moe=MoEConfig(4, 2, 48, 48, shared_gate=False, score="sigmoid", selection_bias=True, dense_layers=1),
)  # fmt: skip
GPT_OSS = dataclasses.replace(
    BASE, family="gpt_oss", mlp_size=48, qk_norm=False, qkv_bias=True, out_bias=True, attention_sinks=True,
    sliding_window=3, window_layers=(True, False),
    moe=MoEConfig(4, 2, 48, score="softmax_of_chosen", bias=True, swiglu_limit=7.0),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("base", [EXPERTS, LATENTS, GPT_OSS], ids=lambda config: config.family)
def test_experts_and_latents_are_loaded_as_codes_and_exported(base, tmp_path):
    base = dataclasses.replace(base, tie_embeddings=False)
    save_model(random_params(base), base, tmp_path / "hf", dtype="float32")
    params = with_quantized_base(random_params(base), dataclasses.replace(ADAPTED, quantize="nf4"))
    expected, config = dict(models.named_leaves(params)), lora.frozen_config(params.config)
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    for shardings in (None, models.shardings(config, mesh, TRAIN)):
        for name, x in models.named_leaves(load_params(tmp_path / "hf", config, shardings)):
            np.testing.assert_array_equal(x, expected[name], err_msg=name)
    save_model(params, base, tmp_path / "merged", dtype="float32")
    exported = dict(models.named_leaves(load_params(tmp_path / "merged", base)))
    for name, weight in models.named_leaves(jax.jit(merged)(params)):
        np.testing.assert_allclose(exported[name], weight, atol=1e-6, err_msg=name)


def test_an_export_is_merged_layer_by_layer(tmp_path):
    """Of any sharding, the file is that of the merged model."""
    params = quantized("nf4")
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
    placed = jax.device_put(params, models.shardings(params.config, mesh, TRAIN))
    save_model(placed, BASE, tmp_path / "hf", dtype="float32")
    exported = dict(models.named_leaves(load_params(tmp_path / "hf", BASE)))
    for name, weight in models.named_leaves(jax.jit(merged)(params)):
        np.testing.assert_allclose(exported[name], weight, atol=1e-6)


def test_adapters_merge_into_plain_weights_too(tmp_path):
    params = with_random_adapters(random_params(BASE), LoraConfig(rank=2, targets=("up_proj",)))
    save_model(params, BASE, tmp_path / "hf", dtype="float32")
    exported = dict(models.named_leaves(load_params(tmp_path / "hf", BASE)))
    np.testing.assert_allclose(exported["layers.up"], merged(params).layers.up[...], atol=1e-6)
    np.testing.assert_array_equal(exported["layers.down"], params.layers.down[...])


# --- memory


def learner_of(kind, mesh, remat="full", layers=6):
    config = TransformerConfig(
        vocab_size=64, hidden_size=64, mlp_size=256, num_layers=layers, num_heads=4, num_kv_heads=2,
        head_dim=32,
    )  # fmt: skip
    step = StepConfig(row_tokens=16, rows=2, dtype="bfloat16", remat=remat)
    model = lora.with_lora(config, LoraConfig(rank=2, quantize=kind))
    return Learner(grpo.Config(kl_coef=0.0), model, optax.sgd(1.0), step, mesh=mesh)


@pytest.mark.parametrize("kind", with_slow(["int8", "nf4"], {"int8"}))
def test_live_bytes_are_those_of_the_plan(kind):
    """Of 46,080 weights in a layer: a byte each on a CPU, and 4 for every 64 (32 in `o`) of them."""
    mesh = make_mesh(MeshConfig(fsdp=2), jax.devices()[:2])
    learner = learner_of(kind, mesh)
    init = jax.jit(models.init, static_argnums=0, out_shardings=learner.param_shardings)
    before = {id(x) for x in jax.live_arrays()}
    state = learner.init_state(init(learner.model, jax.random.key(0)))
    live = [x for x in jax.live_arrays() if id(x) not in before]
    on_first = sum(shard.data.nbytes for x in live for shard in x.addressable_shards[:1])
    assert on_first == bytes_per_device(learner.abstract_state())
    frozen = lora.split_params(learner.abstract_state().params)[1]
    sizes = {name: bytes_per_device(x) for name, x in models.named_leaves(frozen) if x is not None}
    layer = 64 * 128 + 2 * 64 * 64 + 128 * 64 + 3 * 64 * 256
    codes, scales = 6 * layer / 2, 6 * 4 * (layer - 128 * 64) / 64 + 6 * 4 * 128 * 64 / 32
    assert sum(sizes[f"layers.{name}"] for name in MATRICES) == codes
    assert scales / 2 <= sum(sizes[f"layers.{name}_scale"] for name in MATRICES) <= scales
    assert state.params.layers.q[...].dtype == {"int8": jnp.int8, "nf4": jnp.uint4}[kind]


@pytest.mark.parametrize(("platform", "size"), [("tpu", 6), ("gpu", 6), ("cpu", 11)])
def test_two_codes_share_a_byte_on_accelerators(platform, size):
    devices = [types.SimpleNamespace(platform=platform)]
    whole = lambda shape: shape
    sharding = types.SimpleNamespace(device_set=devices, shard_shape=whole, memory_kind="device")
    codes = types.SimpleNamespace(shape=(11,), dtype=np.dtype(jnp.uint4), sharding=sharding)
    assert bytes_per_device([codes]) == size


FLOAT_STACK = re.compile(r"\b(?:f32|bf16)\[6,(?:64,4,32|64,2,32|4,32,64|64,256|256,64)\]")
"""All layers of a linear layer's weight, dequantized."""


@pytest.mark.parametrize(
    ("kind", "remat"),
    [
        pytest.param("nf4", "none", marks=pytest.mark.slow),
        ("nf4", "dots"),
        pytest.param("int8", "full", marks=pytest.mark.slow),
        ("none", "full"),
    ],
)
def test_a_backward_pass_never_holds_a_dequantized_stack(kind, remat):
    config = learner_of(kind, make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])).model
    assert bool(FLOAT_STACK.search(backward_pass(config, remat))) == (kind == "none")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "remat"), [("nf4", "none"), ("nf4", "dots"), ("none", "full")])
def test_nor_a_stack_of_dequantized_experts(kind, remat):
    moe = MoEConfig(4, 2, expert_size=48)
    plain = dataclasses.replace(BASE, hidden_size=64, num_layers=6, moe=moe)
    text = backward_pass(lora.with_lora(plain, LoraConfig(rank=2, quantize=kind)), remat)
    assert bool(re.search(r"\b(?:f32|bf16)\[6,4,(?:64,48|48,64)\]", text)) == (kind == "none")


def backward_pass(config, remat):
    """Return the compiled text of the gradient of the adapters."""
    trained, frozen = lora.split_params(models.abstract(config))
    tokens = jnp.zeros((2, 16), jnp.int32)

    def loss(trained, frozen):
        model = lora.join_params(trained, frozen)
        return model(tokens, tokens, dtype=jnp.bfloat16, remat=remat).astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss)).lower(trained, frozen).compile().as_text()


def test_decoding_dequantizes_in_the_loop_over_tokens():
    """XLA would move what does not depend on the token out of it, and hold all layers dequantized."""
    c = learner_of("int8", make_mesh(MeshConfig(fsdp=1), jax.devices()[:1]), layers=2).model
    weights = jax.eval_shape(lambda p: decode.decode_weights(p, jnp.bfloat16), models.abstract(c))
    cache = jax.eval_shape(lambda: decode.init_ring_cache(c, 2, 8, jnp.bfloat16))

    def tokens(weights, cache, first):
        def one(i, carry):
            hidden, cache, _ = decode.decode_ring(c, weights, carry[0], carry[1], positions=jnp.full(2, i))
            logits = decode.next_token_logits(c, weights, hidden)
            return cache, jnp.argmax(logits, -1).astype(jnp.int32)

        return jax.lax.fori_loop(0, 8, one, (cache, first))[1]

    lowered = jax.jit(tokens).lower(weights, cache, jax.ShapeDtypeStruct((2,), jnp.int32))
    (loop,) = re.findall(r"%while\S* = (\(.*?\)) while\(", lowered.compile().as_text())
    assert loop.count("s8[64,256]") == 4 and "f32[64,256]" not in loop and "bf16[64,256]" not in loop


def test_weights_of_the_rollout_stay_quantized():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
    params = quantized("nf4")
    there = decode.decode_shardings(params.config, mesh, ROLLOUT)
    publish = jax.jit(lambda p: decode.decode_weights(p, jnp.bfloat16, there), out_shardings=there)
    with jax.set_mesh(mesh):
        weights = publish(jax.device_put(params, models.shardings(params.config, mesh, TRAIN)))
    layer = weights.layers[1]
    np.testing.assert_array_equal(layer.up[...], params.layers.up[...][1])
    np.testing.assert_array_equal(layer.up_scale[...], params.layers.up_scale[...][1])
    assert layer.up[...].dtype == jnp.uint4 and layer.up_scale[...].dtype == jnp.float32
    assert layer.up_lora_a[...].dtype == jnp.bfloat16
