"""FP8 weights: blocks as torch rounds them, the same numbers on servers and in the probe, and refusals."""

import contextlib
import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_sglang import FakeServer
from fake_weights import dequantized
from hf_tensors import tensors_of
from random_weights import random_params
from servers_shared import TOKENIZER, engine_for, one_device

from jaxrl_llm import models
from jaxrl_llm.bridge import fp8
from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.bridge.transports.http_weights import HttpTransport
from jaxrl_llm.bridge.transports.process_group import GroupTransport
from jaxrl_llm.builders import engines
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import ServerError, UserError
from jaxrl_llm.hf import export
from jaxrl_llm.learn.scoring import sequence_scorer
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.recipe.checks import check_models
from jaxrl_llm.rollout.config import RolloutConfig, ServersConfig
from jaxrl_llm.rollout.servers.kinds import KINDS
from jaxrl_llm.sharding.config import POLICY
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN

torch = pytest.importorskip("torch")

MODEL = TransformerConfig(
    vocab_size=96, hidden_size=136, mlp_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64,
    initializer_range=0.1, max_position=128,
)  # fmt: skip
EXPERTS = dataclasses.replace(
    MODEL, family="qwen3_moe", moe=MoEConfig(4, 2, expert_size=128), tie_embeddings=False
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def check_blocks(weight, codes, scales):
    """Compare a block after the other with torch. A scale may differ in its last bit: XLA multiplies by
    1 / 448."""
    weight = torch.from_numpy(np.array(weight, np.float32))
    codes, scales = torch.from_numpy(np.array(codes).view(np.uint8)), torch.from_numpy(np.array(scales))
    assert scales.shape == tuple(-(-size // 128) for size in weight.shape) and codes.shape == weight.shape
    for p, rows in enumerate(zip(weight.split(128), codes.split(128), strict=True)):
        for q, (block, ours) in enumerate(zip(*(part.split(128, 1) for part in rows), strict=True)):
            expected = block.abs().max() / 448 if block.any() else torch.tensor(1.0)
            torch.testing.assert_close(scales[p, q], expected, rtol=2e-7, atol=0)
            theirs = (block / scales[p, q]).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert (ours == theirs.view(torch.uint8)).all()


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (5, 640), (257, 3)])
def test_blocks_are_those_of_torch(shape):
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    weight *= np.exp(np.arange(shape[0]) / 20)[:, None]  # blocks of different size
    weight[:128, 128:256] = 0
    codes, scales = jax.jit(fp8.quantize_blocks)(weight)
    assert scales.dtype == jnp.float32 and codes.dtype == jnp.float8_e4m3fn
    check_blocks(weight, codes, scales)


def test_a_block_by_hand():
    """The largest number is 448 scales: a scale is 2. Codes have 3 bits after the first: 2.3 is 2.25."""
    codes, scales = fp8.quantize_blocks(jnp.array([[896.0, -4.6, 0.0], [2.0, 0.0, -30.0]]))
    assert scales.tolist() == [[2.0]]
    assert codes.astype(jnp.float32).tolist() == [[448.0, -2.25, 0.0], [1.0, 0.0, -15.0]]
    assert fp8.dequantize_blocks(codes, scales).tolist() == [[896.0, -4.5, 0.0], [2.0, 0.0, -30.0]]


def test_zeros_stay_zeros_and_what_is_not_finite_does_not_pass_for_a_number():
    codes, scales = fp8.quantize_blocks(jnp.zeros((3, 2)).at[0, 0].set(1e-39))
    assert scales.tolist() == [[1.0]] and not codes.astype(jnp.float32).any()
    for bad in (jnp.nan, jnp.inf):
        codes, _ = fp8.quantize_blocks(jnp.ones((3, 2)).at[1, 1].set(bad))
        assert jnp.isnan(codes.astype(jnp.float32)[1, 1])


@functools.cache
def sharded(config):
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2) if config.moe else MeshConfig(fsdp=4, tensor=2))
    return jax.device_put(random_params(config), models.shardings(config, mesh, TRAIN))


def sent(config, limit=200_000):
    """Tensors of a push of sharded weights, with their buckets."""
    parts = list(WeightSource(config, "bfloat16", limit, fp8.quantized_tensors).parts(sharded(config)))
    return {t.name: a for p in parts for t, a in zip(p.content.tensors, p.content.arrays, strict=True)}, parts


@pytest.mark.parametrize(
    "config", [pytest.param(MODEL, marks=pytest.mark.slow), EXPERTS], ids=["dense", "experts"]
)
def test_a_push_of_sharded_weights_has_blocks_of_linear_layers_and_all_else_as_it_is(config):
    found, parts = sent(config)
    plain = tensors_of(config, jax.device_get(sharded(config)))
    layers = [name for name in plain if any(f"{part}.weight" in name for part in PROJECTIONS)]
    assert len(layers) == config.num_layers * (4 + 3 * (config.moe.num_experts if config.moe else 1))
    assert found.keys() == plain.keys() | {f"{name}_scale_inv" for name in layers}
    for name in layers:
        check_blocks(plain[name], found[name], found[f"{name}_scale_inv"])
    assert all(found[name].dtype == jnp.bfloat16 for name in plain.keys() - set(layers))
    size = sum(array.nbytes for array in found.values())
    assert sum(part.num_bytes for part in parts) == size < 1.2 * sum(plain[name].size for name in layers)


def test_a_folder_holds_what_is_sent_in_buckets(tmp_path):
    from safetensors.torch import load_file

    disk = DiskTransport(tmp_path, "bfloat16", encode=fp8.quantized_tensors)
    (part,) = disk.parts(sharded(EXPERTS), "1")
    stored, (found, parts) = load_file(part.content / "model.safetensors"), sent(EXPERTS)
    assert stored.keys() == found.keys() and part.num_bytes == sum(each.num_bytes for each in parts)
    for name, tensor in stored.items():
        assert str(tensor.dtype) == f"torch.{found[name].dtype}"
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == found[name].tobytes()


@pytest.mark.parametrize("config", [MODEL, EXPERTS], ids=["dense", "experts"])
def test_the_probe_is_of_the_weights_that_servers_compute_with(config):
    found, _ = sent(config)
    served = fp8.rounded_params(sharded(config), "float32")
    pairs = zip(jax.tree.leaves(served), jax.tree.leaves(sharded(config)), strict=True)
    assert all(one.sharding == other.sharding for one, other in pairs)
    ours = tensors_of(config, jax.device_get(served))
    theirs = dequantized({name: array.astype(np.float32) for name, array in found.items()})
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        rounded = tensor if f"{name}_scale_inv" in found else tensor.astype(jnp.bfloat16)
        np.testing.assert_allclose(rounded.astype(np.float32), theirs[name], rtol=2e-7, err_msg=name)


SERVED = dataclasses.replace(MODEL, num_layers=1)
ROUNDED = functools.partial(fp8.rounded_params, dtype="float32")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    return FakeServer(model_path=export.save_description(SERVED, tmp_path_factory.mktemp("shell")))


@contextlib.contextmanager
def engine_on(server, transport, served):
    """An engine whose probe is of the weights of `served`."""
    source = WeightSource(SERVED, "float32", 100_000, fp8.quantized_tensors)
    group = transport == "group"
    made, kind = HttpTransport(source, KINDS["sglang"]), KINDS["sglang"]
    if group:
        made = GroupTransport(source, kind, python=sys.executable, timeout=30.0)
    engine = engine_for([server.url], made, SERVED)
    engine.publisher.score, engine.publisher.served_params = sequence_scorer("float32", one_device()), served
    yield engine
    if group:
        made.close()
    engine.pool.close()


@pytest.mark.parametrize("transport", ["http", pytest.param("group", marks=pytest.mark.slow)])
def test_servers_compute_with_the_blocks_that_are_pushed(server, transport):
    with engine_on(server, transport, ROUNDED) as engine:
        metrics = engine.publish(models.init(SERVED, jax.random.key(1)), 1)
    assert metrics["bridge/probe_mean_abs"] < 1e-5
    quantized = {name for name, kind in server.types.items() if kind == "torch.float8_e4m3fn"}
    assert {name.split(".")[4] for name in quantized} == set(PROJECTIONS)
    assert {server.types[name] for name in server.types.keys() - quantized} == {"torch.float32"}


def test_a_probe_of_the_weights_as_they_are_would_fail(server):
    with (
        engine_on(server, "http", lambda params: params) as engine,
        pytest.raises(ServerError, match=r"trainer's by 0\.0"),
    ):
        engine.publish(models.init(SERVED, jax.random.key(1)), 1)


def test_a_server_without_the_flags_is_refused_with_them():
    flags, problem = engines._requirements(MODEL, RolloutConfig(), False, True, changes=False)
    quantization, fp8_name, override, config = flags
    assert (quantization, fp8_name, override) == (
        "--quantization", "fp8", "--json-model-override-args"
    )  # fmt: skip
    started = {"quantization": "fp8", "json_model_override_args": config}
    assert not problem(started)
    blocks = json.loads(config)["quantization_config"]
    assert blocks["weight_block_size"] == [128, 128] and blocks["quant_method"] == "fp8"
    other = json.dumps({"quantization_config": {**blocks, "weight_block_size": [1, 128]}})
    for wrong in (
        {}, {"quantization": "fp8"}, {**started, "quantization": None},
        {**started, "json_model_override_args": other}, {**started, "json_model_override_args": "[]"},
    ):  # fmt: skip
        assert problem(wrong).endswith(
            "Start it with --quantization fp8 --json-model-override-args "
            """'{"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", """
            """"weight_block_size": [128, 128]}}' --load-format dummy"""
        )


def test_the_engine_of_a_run_pushes_blocks_and_probes_rounded_weights(server, tmp_path):
    rollout = RolloutConfig(engine="sglang", servers=(server.url,), dtype="bfloat16")
    servers = ServersConfig(quantization="fp8", transport="http")
    config = TrainConfig(run_dir=str(tmp_path), rollout=rollout, servers=servers)
    make = lambda closing: engines.make_engine(
        config, SERVED, {POLICY: one_device()}, TOKENIZER, eos_ids=(), closing=closing
    )
    with contextlib.ExitStack() as closing, pytest.raises(UserError, match="Start it with --quantization"):
        make(closing)
    server.info = {"quantization": "fp8", "json_model_override_args": fp8.FLAGS[-1]}
    params = models.init(SERVED, jax.random.key(1))
    with contextlib.ExitStack() as closing:
        engine = make(closing)
        difference = engine.publish(params, 1)["bridge/probe_mean_abs"]
        served = engine.publisher.served_params(params)
        expected = engine.publisher.score(served, engine.publisher.probe_ids, 1.0)
    plain = sequence_scorer("bfloat16", one_device())(params, engine.publisher.probe_ids)
    assert difference < np.abs(expected - plain).mean() / 3
    assert engine.publisher.tolerance == 0.4
    assert server.types["model.layers.0.self_attn.q_proj.weight"] == "torch.float8_e4m3fn"
    assert server.types["model.embed_tokens.weight"] == "torch.bfloat16"


def test_layers_that_are_joined_need_whole_blocks_of_outputs():
    lengths = dict(max_prompt_tokens=8, max_response_tokens=8)
    config = TrainConfig(servers=ServersConfig(quantization="fp8"), **lengths)
    check_models(config, {POLICY: MODEL})
    check_models(config, {POLICY: EXPERTS})
    narrow = dataclasses.replace(MODEL, num_kv_heads=1)
    with pytest.raises(UserError, match=r"0.self_attn.k_proj.weight has 64 outputs, .* multiple of 128. Set"):
        check_models(config, {POLICY: narrow})
    with pytest.raises(UserError, match="not for gpt_oss, whose layers SGLang reads in another form"):
        check_models(config, {POLICY: dataclasses.replace(EXPERTS, family="gpt_oss")})
