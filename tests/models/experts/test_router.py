"""Experts: routing by hand, dispatch over every mesh, padding, strict mode, decoding."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from lora_models import merged, with_quantized_base, with_random_adapters
from random_weights import random_params

from jaxrl_llm import models
from jaxrl_llm.learn.optim import decayed
from jaxrl_llm.models import LoraConfig, TransformerConfig
from jaxrl_llm.models.attention import RopeTables, apply_rope
from jaxrl_llm.models.config import MoEConfig, RopeConfig
from jaxrl_llm.models.decode import decode_ring, decode_shardings, decode_weights, init_ring_cache
from jaxrl_llm.models.experts.dispatch import grouped_experts
from jaxrl_llm.models.experts.router import choose_experts, expert_weights, gate_fn, router_logits, sparse_mlp
from jaxrl_llm.models.experts.weights import AdaptedMatrices, ExpertWeights
from jaxrl_llm.models.lora import base, join_params, split_params, with_lora
from jaxrl_llm.models.mixer_config import MLAConfig
from jaxrl_llm.models.remat import REMAT
from jaxrl_llm.models.transformer import cast_weights
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import ROLLOUT, TRAIN, put_rows

CONFIG = TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.3, moe=MoEConfig(num_experts=8, experts_per_token=3, expert_size=16),
)  # fmt: skip
GPT_OSS = dataclasses.replace(
    CONFIG, num_layers=2, qk_norm=False, qkv_bias=True, out_bias=True, attention_sinks=True,
    sliding_window=3, window_layers=(True, False),
    moe=MoEConfig(8, 3, 16, score="softmax_of_chosen", bias=True, swiglu_limit=1.0),
)  # fmt: skip
DEEPSEEK = dataclasses.replace(
    CONFIG, num_layers=2, num_kv_heads=4, head_dim=12, qk_norm=False, mla=MLAConfig(16, 20, 8, 4, 6),
    moe=MoEConfig(
        8, 3, 16, 24, shared_gate=False, score="sigmoid", groups=4, groups_kept=2, selection_bias=True,
        dense_layers=1,
    ),
)  # fmt: skip
QWEN2 = dataclasses.replace(
    CONFIG, qk_norm=False, qkv_bias=True, moe=MoEConfig(8, 3, 16, 24, normalize=False)
)  # fmt: skip
OLMOE = dataclasses.replace(
    CONFIG, num_kv_heads=4, qk_norm_over_heads=True, moe=MoEConfig(8, 3, 16, normalize=False)
)  # fmt: skip
GLM = dataclasses.replace(
    CONFIG, num_layers=2, qkv_bias=True, rope=RopeConfig(partial_rotary=0.5),
    moe=dataclasses.replace(DEEPSEEK.moe, scale=1.5),
)  # fmt: skip
MESHES = [
    MeshConfig(fsdp=2, expert=2, tensor=2),
    MeshConfig(fsdp=1, expert=8),
    MeshConfig(fsdp=2, expert=2, sequence=2),
    MeshConfig(data=2, fsdp=4),
]


def test_routing_by_hand():
    """Logits 0, log 2, log 4, log 4: of the largest two equal ones both; probabilities 4/11 each."""
    logits = jnp.log(jnp.array([[[1.0, 2, 4, 4], [4, 4, 4, 1]]]))
    moe = MoEConfig(4, 2, 8)
    chosen = choose_experts(moe, logits)
    np.testing.assert_array_equal(chosen, [[[2, 3], [0, 1]]])  # of equal ones the lower numbers
    np.testing.assert_allclose(expert_weights(moe, logits, chosen), np.full((1, 2, 2), 0.5), rtol=1e-6)
    plain = MoEConfig(4, 2, 8, normalize=False)
    np.testing.assert_allclose(
        expert_weights(plain, logits, chosen), [[[4 / 11] * 2, [4 / 13] * 2]], rtol=1e-6
    )


def logits_of(*scores):
    """Return the logits [1, 1, X] of these sigmoids."""
    return jnp.log(jnp.array([[scores]]) / (1 - jnp.array([[scores]])))


def test_selection_bias_by_hand():
    """Sigmoids 0.5, 0.8, 0.2, 0.9 and the bias choose 0 and 2; their weights are of the scores alone."""
    logits, bias = logits_of(0.5, 0.8, 0.2, 0.9), jnp.array([0.45, 0, 0.71, 0])
    moe = MoEConfig(4, 2, 8, score="sigmoid", scale=2.5, selection_bias=True)
    chosen = choose_experts(moe, logits, bias)
    np.testing.assert_array_equal(chosen, [[[0, 2]]])  # 0.95, 0.91; then 0.9 and 0.8
    weights = expert_weights(moe, logits, chosen)
    np.testing.assert_allclose(weights, [[[2.5 * 5 / 7, 2.5 * 2 / 7]]], rtol=1e-6)
    alone = expert_weights(MoEConfig(4, 2, 8, score="sigmoid", normalize=False), logits, chosen)
    np.testing.assert_allclose(alone, [[[0.5, 0.2]]], rtol=1e-6)
    never = expert_weights(moe, jnp.full((1, 1, 4), -200.0), chosen)
    np.testing.assert_array_equal(never, np.zeros((1, 1, 2)))  # sigmoids of 0: no division by 0
    exact = dataclasses.replace(moe, scale=1.0, added_to_sum=0.0)  # MiniMax-M2: small scores, too, sum to 1
    small = jnp.array([[[-60.0, 0, -60 - jnp.log(3), 0]]])
    np.testing.assert_allclose(expert_weights(exact, small, chosen), [[[0.75, 0.25]]], rtol=1e-5)


def test_softmax_of_chosen_by_hand():
    moe = MoEConfig(4, 2, 8, score="softmax_of_chosen")
    logits = jnp.log(jnp.array([[[1.0, 8, 2, 4]]]))
    chosen = choose_experts(moe, logits)
    np.testing.assert_array_equal(chosen, [[[1, 3]]])
    np.testing.assert_allclose(expert_weights(moe, logits, chosen), [[[2 / 3, 1 / 3]]], rtol=1e-6)


@pytest.mark.parametrize("bias", [0.0, -1.0])
def test_groups_by_hand(bias):
    """Of two groups the second has the larger sum of two, 1.1 > 1.03, but not of three. With a bias of -1 all
    scores are negative, and the groups left out must not come in with 0."""
    moe = MoEConfig(6, 2, 8, score="sigmoid", groups=2, groups_kept=1, selection_bias=True)
    logits = logits_of(0.52, 0.51, 0.5, 0.8, 0.3, 0.1)
    np.testing.assert_array_equal(choose_experts(moe, logits, jnp.full(6, bias)), [[[3, 4]]])


@pytest.mark.slow
def test_the_selection_bias_chooses_experts_in_every_mode_and_gets_no_gradient():
    """A bias that leaves one choice; each mode gives the sum over these experts."""
    moe = dataclasses.replace(DEEPSEEK.moe, dense_layers=0)
    c = dataclasses.replace(CONFIG, moe=moe)
    params = random_params(c)
    w = jax.tree.map(lambda x: x[0], params.layers)
    h = jax.random.normal(jax.random.key(2), (1, 5, 32))
    bias = jnp.array([9.0, 0, 0, 0, 0, 0, 8, 8])
    chosen = jnp.broadcast_to(jnp.array([0, 6, 7]), (1, 5, 3))

    @functools.partial(jax.jit, static_argnames="strict")
    def apply(w, bias, strict=False):
        w.router_bias[...] = bias
        return sparse_mlp(c, w, h, jax.nn.silu, valid=None, rules=TRAIN, strict=strict)[0]

    @jax.jit
    def expected(w):
        weights = expert_weights(moe, router_logits(w, h), chosen)
        hidden = [jax.nn.silu(h @ w.expert_gate[x]) * (h @ w.expert_up[x]) for x in (0, 6, 7)]
        outs = [y @ w.expert_down[x] for x, y in zip((0, 6, 7), hidden, strict=True)]
        return sum(weights[..., i, None] * out for i, out in enumerate(outs))

    for strict in (False, True):
        np.testing.assert_allclose(apply(w, bias, strict), expected(w), atol=1e-5)
    to_bias, to_weights = jax.jit(jax.grad(lambda bias, w: jnp.sum(apply(w, bias)), (0, 1)))(bias, w)
    assert not np.any(to_bias)
    np.testing.assert_array_equal(np.any(to_weights.router[...], axis=0), bias > 0)
    assert not decayed(params).layers.router_bias.get_value()
    kept = jax.eval_shape(lambda layers: cast_weights(layers, jnp.bfloat16), params.layers)
    types = [getattr(kept, name).get_value().dtype for name in ("router_bias", "router")]
    assert types == [jnp.float32, jnp.bfloat16]


def test_rotations_by_hand():
    """By 90 degrees, of the first four of five dims: pairs (1, 3), (2, 4), and interleaved (1, 2), (3, 4)."""
    x, rope = jnp.array([[[[1.0, 2, 3, 4, 5]]]]), RopeTables(jnp.zeros((1, 1, 2)), jnp.ones((1, 1, 2)), None)
    np.testing.assert_array_equal(apply_rope(x, rope)[0, 0, 0], [-3, -4, 1, 2, 5])
    np.testing.assert_array_equal(apply_rope(x, rope, interleaved=True)[0, 0, 0], [-2, -4, 1, 3, 5])


@pytest.mark.slow
def test_grouped_products_equal_a_loop_over_experts():
    """Assignments to no expert, and to experts of other devices, add nothing, nor do their biases."""
    rng = np.random.default_rng(0)
    h = rng.normal(size=(2, 5, 4)).astype(np.float32)
    gate, up = (rng.normal(size=(3, 4, 6)).astype(np.float32) for _ in range(2))
    down = rng.normal(size=(3, 6, 4)).astype(np.float32)
    chosen = rng.integers(-1, 5, (2, 5, 2))
    weights = rng.uniform(size=(2, 5, 2)).astype(np.float32)
    biases = [rng.normal(size=(3, size)).astype(np.float32) for size in (6, 6, 4)]
    experts = ExpertWeights(*map(jnp.asarray, (gate, up, down, *biases)))
    gated = gate_fn(MoEConfig(3, 2, 6, swiglu_limit=1.5, swiglu_alpha=2.0), jax.nn.silu)

    def total(experts):
        out = grouped_experts(*map(jnp.asarray, (h, chosen, weights)), experts, gated)
        return jnp.sum(out), out

    gradient, out = jax.grad(total, has_aux=True)(experts)
    expected = np.zeros((2, 5, 4))
    for b, t, k in np.ndindex(2, 5, 2):
        if 0 <= (x := chosen[b, t, k]) < 3:
            g, u = h[b, t] @ gate[x] + biases[0][x], h[b, t] @ up[x] + biases[1][x]
            g, u = np.minimum(g, 1.5), np.clip(u, -1.5, 1.5)
            hidden = (u + 1) * g / (1 + np.exp(-2.0 * g))
            expected[b, t] += weights[b, t, k] * (hidden @ down[x] + biases[2][x])
    np.testing.assert_allclose(out, expected, atol=1e-5)
    each = [np.full(4, weights[chosen == x].sum()) for x in range(3)]
    np.testing.assert_allclose(gradient.down_bias, each, rtol=1e-5)


@functools.cache
def params(config=CONFIG):
    return models.init(config, jax.random.key(0)) if config is CONFIG else random_params(config)


def rows(garbage=0):
    """8 rows of 16 tokens: trajectories of 7 and 5 tokens, then padding."""
    tokens = np.random.default_rng(0).integers(0, 64, (8, 16), np.int32)
    tokens[:, 12:] = garbage
    positions = np.concatenate([np.arange(7), np.arange(5), np.zeros(4)]).astype(np.int32)
    segments = np.repeat([1, 2, 0], [7, 5, 4]).astype(np.int32)
    return tokens, np.tile(positions, (8, 1)), np.tile(segments, (8, 1))


@functools.partial(jax.jit, static_argnames="strict")
def loss_and_gradient(params, *row, strict=False):
    def loss(params):
        hidden = params(*row, strict=strict)
        return jnp.sum(jnp.where(row[2][..., None] > 0, jnp.sin(hidden @ params.head.T), 0)) / 100

    return jax.value_and_grad(loss)(params)


@functools.cache
def adapted():
    """With adapters: rank 6 of attention, 6 / 3 of experts."""
    return with_random_adapters(params(), LoraConfig(rank=6, alpha=4.0))


@functools.cache
def adapted_latents():
    """With adapters of all linear layers, leading dense ones and the shared expert among them."""
    return with_random_adapters(latents(), LoraConfig(rank=6, alpha=4.0))


@functools.cache
def adapted_gpt_oss():
    return with_random_adapters(gpt_oss(), LoraConfig(rank=6, alpha=4.0))


@functools.cache
def quantized(of, kind="nf4"):
    """With frozen weights of all linear layers and experts in codes."""
    return with_quantized_base(of(), LoraConfig(rank=6, alpha=4.0, quantize=kind))


@functools.cache
def dequantized(of):
    """The same with the weights of these codes."""
    plain = dict(models.named_leaves(merged(base(quantized(of)))))
    tree = with_random_adapters(of(), LoraConfig(rank=6, alpha=4.0))
    leaves = [plain.get(name, x) for name, x in models.named_leaves(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def gpt_oss():
    return params(GPT_OSS)


def latents():
    return params(DEEPSEEK)


def qwen2():
    return tiny_models.random_params(QWEN2)  # with norms of different weights


def olmoe():
    return tiny_models.random_params(OLMOE)


def glm():
    return tiny_models.random_params(GLM)


@functools.cache
def on_one_device(of=params):
    return jax.device_get(loss_and_gradient(of(), *rows()))


def assert_close(got, expected, rel=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=rel * np.abs(b).max() + 1e-8, rtol=0)


def rounding(of):
    """Return the bound of gradients: without AVX-512 one number of adapted latents differs by 1.2e-5."""
    return 1.5e-5 if of is adapted_latents else 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "mesh_config"),
    [
        *((of, mesh) for of in (params, gpt_oss) for mesh in MESHES),
        *((adapted, MESHES[i]) for i in (0, 3)),
        (latents, MeshConfig(fsdp=2, tensor=2)),
        *((of, MESHES[0]) for of in (qwen2, olmoe, glm)),
        *((adapted_latents, MESHES[i]) for i in (0, 2)),
        (adapted_gpt_oss, MESHES[0]),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_every_mesh_gives_the_gradient_of_one_device(of, mesh_config):
    devices = math.prod((mesh_config.data, mesh_config.fsdp, mesh_config.expert, mesh_config.tensor))
    mesh = make_mesh(mesh_config, jax.devices()[: devices * mesh_config.sequence])
    sharded = jax.device_put(of(), models.shardings(of().config, mesh, TRAIN))
    with jax.set_mesh(mesh):
        got = loss_and_gradient(sharded, *put_rows(mesh, rows()))
    if of is latents:
        assert sharded.layers.kv_b[...].sharding.shard_shape((1, 16, 4, 14)) == (1, 8, 2, 14)
    if of is adapted_latents:
        shards = mesh_config.fsdp * mesh_config.expert * mesh_config.sequence
        assert sharded.layers.kv_b_lora_a[...].sharding.shard_shape((1, 16, 6)) == (1, 16 // shards, 6)
    assert_close(got, on_one_device(of), rounding(of))


def test_gradients_of_gathered_experts_are_scattered():
    """An all-reduce would send twice as much. The matrices are [8, 32, 16], and [8, 16, 32] of the third."""
    mesh = make_mesh(MeshConfig(fsdp=8), jax.devices()[:8])
    sharded = jax.device_put(params(), models.shardings(CONFIG, mesh, TRAIN))
    with jax.set_mesh(mesh):
        hlo = loss_and_gradient.lower(sharded, *put_rows(mesh, rows())).compile().as_text()
    results = {
        name: " ".join(re.findall(rf" = (.*) {name}(?:-start)?\(", hlo))
        for name in ("all-gather", "all-reduce", "reduce-scatter")
    }
    assert not re.search(r"\[8,(32,16|16,32)\]", results["all-reduce"])
    scattered = sorted(re.findall(r"\[8,\d+,\d+\]", results["reduce-scatter"]))
    assert scattered == ["[8,16,4]", "[8,4,16]", "[8,4,16]"]
    assert len(re.findall(r"\[8,(?:32,16|16,32)\]", results["all-gather"])) == 3


def test_padding_passes_no_expert():
    assert_close(loss_and_gradient(params(), *rows(garbage=63)), on_one_device())


@pytest.mark.slow
def test_adapters_of_experts_by_hand():
    """(x W + 0.5 x A B) of the expert, with A = [1, 2]^T and B = [10, 20]: x A = 5 of x = [1, 2]."""
    weight, a, b = jnp.zeros((2, 2, 2)), jnp.array([[[1.0], [2]]] * 2), jnp.array([[[10.0, 20]], [[0, 0]]])
    up = AdaptedMatrices(weight.at[0].set(jnp.eye(2)), a, b, 0.5)
    ones = jnp.ones((2, 2, 2))
    chosen, weights = jnp.array([[[0], [1]]]), jnp.ones((1, 2, 1))
    experts, gated = ExpertWeights(ones, up, ones), lambda gate, up: up
    out = grouped_experts(jnp.array([[[1.0, 2], [1, 2]]]), chosen, weights, experts, gated=gated)
    np.testing.assert_allclose(out, [[[1 + 25 + 2 + 50] * 2, [0, 0]]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "base"), [(adapted, params), (adapted_latents, latents), (adapted_gpt_oss, gpt_oss)]
)
def test_adapters_equal_merged_weights_and_the_strict_pass(of, base):
    expected = np.asarray(params_forward(merged(of()), *rows()))[:, :12]
    assert np.abs(expected - params_forward(base(), *rows())[:, :12]).max() > 0.1
    for strict in (False, True):
        got = params_forward(of(), *rows(), strict=strict)
        np.testing.assert_allclose(got[:, :12], expected, atol=2e-5)
    assert_close(loss_and_gradient(of(), *rows(), strict=True), on_one_device(of), rounding(of))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "kind"), [(params, "nf4"), (params, "int8"), (latents, "nf4"), (gpt_oss, "nf4")]
)
def test_quantized_experts_and_latents_are_those_of_their_codes(of, kind):
    params = quantized(of, kind)
    integers = {name for name, x in models.named_leaves(params) if not jnp.issubdtype(x.dtype, jnp.floating)}
    assert {f"layers.expert_{name}" for name in ("gate", "up", "down")} < integers
    assert ("layers.kv_b" in integers) == (of is latents) and not {"layers.router", "embed"} & integers
    expected = np.asarray(params_forward(merged(params), *rows()))[:, :12]
    for strict in (False, True):
        got = params_forward(params, *rows(), strict=strict)
        np.testing.assert_allclose(got[:, :12], expected, atol=1e-5 * np.abs(expected).max())


@jax.jit
def gradient_of_adapters(params, *row):
    trained, frozen = split_params(params)
    loss = lambda trained: jnp.sum(jnp.sin(join_params(trained, frozen)(*row) * (row[2][..., None] > 0)))
    return jax.grad(loss)(trained)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "mesh_config"), [(params, None), (params, MESHES[0]), (params, MESHES[3]), (latents, MESHES[0])]
)
def test_gradients_of_adapters_are_those_of_the_dequantized_experts(of, mesh_config):
    """16 hidden states of an expert are one tile, which the mesh divides by 2; 32 inputs, divided by 4."""
    expected, params = gradient_of_adapters(dequantized(of), *rows()), quantized(of)
    if mesh_config is None:
        return assert_close(gradient_of_adapters(params, *rows()), expected)
    mesh = make_mesh(mesh_config, jax.devices()[:8])
    sharded = jax.device_put(params, models.shardings(params.config, mesh, TRAIN))
    with jax.set_mesh(mesh):
        got = gradient_of_adapters(sharded, *put_rows(mesh, rows()))
    assert_close(got, expected)


@functools.partial(jax.jit, static_argnames="strict")
def params_forward(params, *row, strict=False):
    return params(*row, strict=strict)


@pytest.mark.slow
@pytest.mark.parametrize("of", [params, gpt_oss])
def test_strict_has_the_plain_gradient_and_the_bits_of_any_batch(of):
    assert_close(loss_and_gradient(of(), *rows(), strict=True), on_one_device(of))
    forward = jax.jit(lambda *row: of()(*row, strict=True))
    whole, alone = forward(*rows()), forward(*(x[:1] for x in rows()))
    np.testing.assert_array_equal(whole[:1, :12], alone[:, :12])


@pytest.mark.parametrize(
    ("config", "mesh_config"),
    [
        (CONFIG, None),
        pytest.param(GPT_OSS, MESHES[0], marks=pytest.mark.slow),
        *(
            pytest.param(with_lora(of, LoraConfig(4, 4.0, quantize=kind)), MESHES[0], marks=pytest.mark.slow)
            for of, kind in ((DEEPSEEK, "none"), (DEEPSEEK, "nf4"), (GPT_OSS, "nf4"))
        ),
    ],
    ids=[
        *("one device", "gpt-oss on a mesh", "latents with adapters on a mesh"),
        *("latents in nf4 on a mesh", "gpt-oss in nf4 on a mesh"),
    ],
)
def test_decoding_gives_the_hidden_states_of_the_forward_pass(config, mesh_config):
    """The rollout's copy divides the experts over all axes but tensor, which divides their hidden states."""
    tokens = rows()[0][:, :6]
    positions = np.tile(np.arange(6), (8, 1))
    expected = params(config)(jnp.asarray(tokens), jnp.asarray(positions))
    mesh = make_mesh(mesh_config or MeshConfig(fsdp=1), jax.devices()[: 8 if mesh_config else 1])
    trained = jax.device_put(params(config), models.shardings(config, mesh, TRAIN))
    with jax.set_mesh(mesh):
        shardings = decode_shardings(config, mesh, ROLLOUT)
        weights = jax.jit(lambda p: decode_weights(p, jnp.float32), out_shardings=shardings)(trained)
        if mesh_config:
            assert weights.layers[1].expert_gate[...].sharding.shard_shape((8, 32, 16)) == (2, 32, 8)
        cache, step = (
            init_ring_cache(config, 8, 6, jnp.float32),
            jax.jit(functools.partial(decode_ring, config)),
        )
        for t in range(6):
            hidden, cache, _ = step(weights, cache, tokens[:, t], positions[:, t])
            np.testing.assert_allclose(hidden, expected[:, t], atol=2e-5)


def test_remat_dots_keeps_grouped_products():
    """A loop over the experts forward and one backward; only with "full" the first is there again."""
    key, chosen = jax.random.key(0), jnp.array([[[0, 1], [1, 3]]])
    draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape)
    experts = ExpertWeights(draw(0, 4, 8, 6), draw(1, 4, 8, 6), draw(2, 4, 6, 8))

    def loops(remat):
        layer = lambda h, experts: grouped_experts(
            h, chosen, jnp.ones((1, 2, 2)), experts, gated=jnp.multiply
        )
        layer = jax.checkpoint(layer, policy=REMAT[remat], prevent_cse=False)
        loss = lambda *args: jnp.sum(layer(*args) ** 2)
        text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(draw(3, 1, 2, 8), experts))
        return text.count("scan[")

    assert loops("none") == loops("dots") == 2 and loops("full") == 3
