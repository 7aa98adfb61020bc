"""Experts divided over a mesh, also where their number does not divide: the sums of one device."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from slow_cases import with_slow

from jaxrl_llm.models.experts import dispatch as experts_module
from jaxrl_llm.models.experts.dispatch import grouped_experts, sharded_experts
from jaxrl_llm.models.experts.weights import AdaptedMatrices, ExpertWeights, QuantizedMatrices
from jaxrl_llm.models.quantize import dequantize_weight
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import ROLLOUT, TRAIN, axes_of, dividing_spec, sharding_for

AXES = ("experts", "expert_embed", "expert_mlp")
MESHES = [
    MeshConfig(fsdp=8),
    MeshConfig(data=2, fsdp=4),
    MeshConfig(fsdp=1, sequence=8),
    MeshConfig(fsdp=2, expert=2, tensor=2),
    MeshConfig(fsdp=1, expert=4, sequence=2),
]

CASES = [
    (MESHES[1], 6, ROLLOUT),
    *((mesh, 6, ROLLOUT) for mesh in (MESHES[2], MESHES[3])),
    *((mesh, 6, TRAIN) for mesh in (MESHES[3], MESHES[4])),
    (MESHES[0], 8, ROLLOUT),
    (MESHES[4], 8, ROLLOUT),
]
QUICK = CASES[:1]


def name_of(value):
    """Return the id of a parameter: the axes of a mesh, or which rules they are."""
    if isinstance(value, MeshConfig):
        return " x ".join(f"{axis} {size}" for axis, size in value.sizes.items() if size > 1)
    return {id(ROLLOUT): "rollout", id(TRAIN): "train"}.get(id(value))


def mesh_of(config):
    return make_mesh(config, jax.devices()[:8])


@pytest.mark.parametrize("mesh_config", MESHES, ids=name_of)
@pytest.mark.parametrize("count", [60, 64])
def test_a_device_decodes_with_an_eighth_of_the_experts(mesh_config, count):
    """Qwen2-MoE has 60 experts of 1,408 hidden states: 4 divides the former, 8 the latter."""
    shape = (count, 2048, 1408)
    shards = sharding_for(mesh_of(mesh_config), AXES, shape, ROLLOUT).shard_shape(shape)
    assert math.prod(shards) == math.prod(shape) // 8 and shards[1] == 2048


def test_axes_that_do_not_divide_the_experts_divide_their_hidden_states():
    """6 experts on 2 x 4 devices: three each over data, and a quarter of each over fsdp."""
    spec = lambda config, rules, shape=(6, 32, 16): sharding_for(mesh_of(config), AXES, shape, rules).spec
    owners = "data", "stage", "sequence", "expert"
    assert spec(MESHES[1], ROLLOUT) == P(owners, None, ("tensor", "fsdp"))
    assert spec(MESHES[1], ROLLOUT, (6, 32, 6)) == P(owners, "fsdp", "tensor")
    assert spec(MESHES[1], ROLLOUT, (6, 30, 6)) == P(owners, None, "tensor")
    assert spec(MeshConfig(fsdp=1, expert=8), TRAIN)[2] == ("tensor", "expert")
    bias = sharding_for(mesh_of(MESHES[1]), ("experts", "expert_mlp"), (6, 16), ROLLOUT).spec
    assert bias == P(owners, ("tensor", "fsdp"))


@pytest.mark.parametrize(
    ("shape", "devices"),
    [((60, 2048, 1408), 256), ((128, 4096, 1408), 1024), ((128, 2048, 768), 512), ((32, 2880, 2880), 64)],
    ids=["Qwen2-MoE", "GLM-4.5-Air", "Qwen3-30B-A3B", "gpt-oss-20b"],
)
def test_no_device_of_a_large_slice_holds_all_experts(shape, devices):
    sizes = {"data": 1, "fsdp": devices, "sequence": 1, "expert": 1, "tensor": 1}
    dims = dividing_spec(sizes, AXES, shape, ROLLOUT)
    assert sum("fsdp" in axes_of(dim) for dim in dims) == 1


def test_two_axes_divide_what_one_does_not():
    """128 experts of 2,880 hidden states (gpt-oss-120b) on 256 devices."""
    sizes = {"data": 1, "fsdp": 256, "sequence": 1, "expert": 1, "tensor": 1}
    dims = lambda sizes: dividing_spec(sizes, AXES, (128, 2880, 2880), ROLLOUT)
    assert all("fsdp" not in axes_of(dim) for dim in dims(sizes))
    owners, embed, mlp = dims(sizes | {"fsdp": 128, "expert": 2})
    assert "fsdp" in axes_of(owners) and embed is None and axes_of(mlp) == ("tensor", "expert")


def drawn(count, width=16):
    """Return tokens [8, 8, 32], choices of 2 (`count` = none), weights, experts with biases and adapters.

    Outputs are of size 1, or rounding of the phase of their sine would be all of the difference.
    """
    draw = lambda i, *shape: 0.3 * jax.random.normal(jax.random.fold_in(jax.random.key(0), i), shape)
    chosen = jax.random.randint(jax.random.key(1), (8, 8, 2), 0, count + 1)
    up = AdaptedMatrices(draw(0, count, 32, width), draw(1, count, 32, 2), draw(2, count, 2, width), 0.5)
    biases = draw(5, count, width), draw(6, count, width), draw(7, count, 32)
    experts = ExpertWeights(draw(3, count, 32, width), up, draw(4, count, width, 32), *biases)
    return draw(8, 8, 8, 32), chosen, jax.nn.sigmoid(draw(9, 8, 8, 2)), experts


@pytest.mark.parametrize(
    ("mesh_config", "count", "rules"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
    ids=name_of,
)
def test_every_division_gives_the_sums_and_gradients_of_one_device(mesh_config, count, rules):
    """Tokens are divided over data, fsdp and expert, and over sequence."""
    check_on_mesh(mesh_config, rules, *drawn(count))


def test_inputs_of_experts_that_alone_divide_are_gathered():
    """A quarter of 32 inputs on each device of fsdp, which divides neither 6 experts nor 6 hidden states."""
    check_on_mesh(MESHES[1], ROLLOUT, *drawn(6, width=6))


def choose_grouped_products(monkeypatch):
    """Compute experts by grouped products, as where there is a kernel for them."""
    monkeypatch.setattr(experts_module, "choose", lambda *_: ("ragged_dot", "requested"))


@pytest.fixture
def grouped_products(monkeypatch):
    choose_grouped_products(monkeypatch)


def codes(count):
    """Return matrices [32, 16] of so many experts as codes, in two tiles."""
    values = jnp.arange(count * 32 * 16, dtype=jnp.int8).reshape(count, 32, 16)
    return QuantizedMatrices(values, jnp.full((count, 2, 16), 0.01), dequantize_weight)


@pytest.mark.parametrize(
    "case", [CASES[0], pytest.param(CASES[3], marks=pytest.mark.slow)], ids=["rollout", "train"]
)
def test_grouped_products_on_a_mesh(case, grouped_products):
    mesh_config, count, rules = case
    check_on_mesh(mesh_config, rules, *drawn(count))


@pytest.mark.parametrize("sizes", with_slow(["uneven", "one expert", "none"], {"none"}))
def test_tiles_equal_grouped_products(sizes, monkeypatch):
    """Tiles of 8 of 64 rows: of groups that end within a tile, of one that has all rows, of none."""
    h, chosen, weights, experts = drawn(6)
    chosen = {"one expert": jnp.full_like(chosen, 5), "none": jnp.full_like(chosen, 6)}.get(sizes, chosen)
    h, chosen, weights = (x[:4] for x in (h, chosen, weights))
    experts = experts._replace(gate=AdaptedMatrices(codes(6), experts.up.a, experts.up.b, 0.3))
    got = results_of(grouped_experts, chosen)(h, weights, experts)
    choose_grouped_products(monkeypatch)
    assert_equal_results(got, results_of(grouped_experts, chosen)(h, weights, experts))


def test_gradients_of_sorted_rows_are_sums_of_float32():
    """Assignments 3, 0, 2, 1 of two rows with two each; in bfloat16 256 + 1 is 256, 256 + 3 is 260."""
    order = jnp.array([3, 0, 2, 1])
    places = jnp.argsort(order)
    rows, backward = jax.vjp(
        lambda x: experts_module._sorted_rows(2, x, order, places), jnp.array([[5.0], [7]])
    )
    assert rows[:, 0].tolist() == [7, 5, 7, 5]
    assert backward(jnp.array([[1.0], [2], [3], [4]]))[0].tolist() == [[2 + 4], [1 + 3]]
    same = lambda x: experts_module._sorted_rows(4, x, order, places)
    _, backward = jax.vjp(same, jnp.ones((1, 1), jnp.bfloat16))
    assert backward(jnp.array([[1.0], [256], [1], [1]], jnp.bfloat16))[0].item() == 260


@pytest.mark.parametrize(
    ("mesh_config", "choice"),
    [
        (MeshConfig(fsdp=1, expert=8), None),
        pytest.param(MeshConfig(fsdp=1, expert=8), 3, marks=pytest.mark.slow),
        pytest.param(MeshConfig(fsdp=2, expert=4), 3, marks=pytest.mark.slow),
    ],
    ids=["even load", "all tokens to one expert", "all tokens to one expert of sharded ones"],
)
def test_rows_in_parts(mesh_config, choice, grouped_products, monkeypatch):
    """A part is a quarter, or half, of the 128 assignments; an expert that all tokens choose has at least 64.
    Of codes and scales there is no gradient."""
    monkeypatch.setattr(experts_module, "MIN_PART", 1)
    h, chosen, weights, experts = drawn(8)
    experts = experts._replace(gate=codes(8))
    chosen = chosen if choice is None else chosen.at[..., 0].set(choice)
    check_on_mesh(mesh_config, TRAIN, h, chosen, weights=weights, experts=experts)


def test_the_length_of_a_part():
    assert experts_module._part_length(65_536, 16) == 8192
    assert experts_module._part_length(65_536, 2) == 0  # all of them
    assert experts_module._part_length(4096, 16) == 0  # 512: decoding


def check_on_mesh(mesh_config, rules, h, chosen, weights, experts):
    """Compare the sums and the gradients of tokens, weights and experts with those of one device."""
    expected = results_of(grouped_experts, chosen)(h, weights, experts)
    with jax.set_mesh(mesh_of(mesh_config)):
        got = results_of(functools.partial(sharded_experts, rules=rules), chosen)(h, weights, experts)
    assert_equal_results(got, expected)


def results_of(compute, chosen):
    """Return the function of tokens, weights and experts that gives their gradients, and the sums."""

    def loss(h, weights, experts):
        out = compute(h, chosen, weights, experts, lambda gate, up: jnp.tanh(gate) * up)
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True, allow_int=True))


def assert_equal_results(got, expected):
    """Compare all but the gradients of codes, which have none."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if b.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=0)
