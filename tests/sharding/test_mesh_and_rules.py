"""The mesh says what does not fit; the table refuses what it does not know."""

import ast
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxrl_llm.sharding
from jaxrl_kernels.topology import gpu_devices, missing_compiler
from jaxrl_llm.errors import UserError
from jaxrl_llm.ranges import problems
from jaxrl_llm.sharding.placement import AXES, MeshConfig, device_array, make_mesh, with_whole_rows
from jaxrl_llm.sharding.rules import (
    ROLLOUT,
    TRAIN,
    bytes_per_device,
    constrain,
    constrain_residual,
    num_shards,
    on_host,
    partition_spec,
    sharding_for,
)


def test_minus_one_takes_the_rest():
    assert dict(make_mesh(MeshConfig(data=2, fsdp=-1, tensor=2)).shape) == {
        "data": 2, "stage": 1, "fsdp": 2, "expert": 1, "tensor": 2, "sequence": 1,
    }  # fmt: skip


WRONG = {
    r"^--mesh: data=3 x stage=1 x fsdp=1 x expert=1 .* 8 cpu device.* Set --mesh.data 8.$": MeshConfig(3, 1),
    r"Set --mesh.fsdp 2.$": MeshConfig(fsdp=4, tensor=4),
    r"Set --mesh.tensor 2.$": MeshConfig(tensor=3),
    r"Set --mesh.stage 2.$": MeshConfig(stage=3),
    r"divisors of 8 \(1, 2, 4, 8\) and one axis, such as --mesh.fsdp, to -1": MeshConfig(data=3, tensor=3),
    r"^--mesh.fsdp is -1, and so is mesh.data: .* Set this one to 1.$": MeshConfig(data=-1),
    r"^--mesh.tensor is 0: it must be at least 1, or -1 for all remaining devices.$": MeshConfig(tensor=0),
    r"Set --mesh.sequence 8": MeshConfig(sequence=2**20),
    r"^--mesh.data is 2: it must be a multiple of mesh.slices 4, or -1.$": MeshConfig(data=2, slices=4),
    r"^--mesh.data is 1: it times mesh.stage 2 must be a multiple of mesh.slices 4": (
        MeshConfig(stage=2, slices=4)
    ),
    r"^--mesh.slices 2 divides .* --mesh.data times --mesh.stage is 1. Set one of them to a multiple of 2": (
        MeshConfig(data=-1, fsdp=8, slices=2)
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_mesh_that_does_not_fit_is_refused_with_the_flag_and_the_fix(message):
    with pytest.raises(UserError, match=message):
        make_mesh(WRONG[message])


@pytest.mark.parametrize("size", [2**31, -2])
def test_sizes_out_of_range_are_refused_before_any_device_is_asked_for(size):
    ((name, problem),) = problems(MeshConfig(sequence=size))
    assert name == "sequence" and "must be at least -1 and at most 1,048,576" in problem
    assert not list(problems(MeshConfig(data=2, fsdp=-1, tensor=4)))


def test_replicas_are_divided_among_the_slices_of_the_devices():
    """Listed in the order of a cluster that mixes its slices."""
    devices = [
        SimpleNamespace(platform="tpu", process_index=0, number=i, slice_index=i % 2) for i in range(8)
    ]
    grid = device_array(MeshConfig(data=2, fsdp=4, slices=2), devices, "--mesh")
    numbers = [[device.number for device in row.flat] for row in grid]
    assert numbers == [[0, 2, 4, 6], [1, 3, 5, 7]]
    with pytest.raises(UserError, match=r"^--mesh.slices is 4, and .* in 2 slices. Set --mesh.slices 2.$"):
        device_array(MeshConfig(data=4, fsdp=2, slices=4), devices, "--mesh")


def test_shards_of_a_logical_axis_by_hand():
    sizes = MeshConfig(data=2, fsdp=-1, tensor=3, sequence=5).resolved_sizes(120)
    assert sizes == {"data": 2, "stage": 1, "fsdp": 4, "expert": 1, "tensor": 3, "sequence": 5}
    shards = {axis: num_shards(axis, sizes) for axis in ("batch", "sequence", "heads", "embed", "norm")}
    assert shards == {"batch": 8, "sequence": 5, "heads": 3, "embed": 20, "norm": 1}
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    assert num_shards("batch", mesh.shape) == 2 and num_shards("embed", mesh.shape, ROLLOUT) == 1


def test_nothing_outside_sharding_names_a_mesh_axis():
    """Neither as `sizes["fsdp"]` or `mesh.shape["fsdp"]` nor in a PartitionSpec."""
    package = Path(jaxrl_llm.sharding.__path__[0]).parent
    for file in sorted(package.rglob("*.py")):
        named = []
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(
                ("sizes", "mesh", "shape")
            ):
                named.append(node.slice)
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("PartitionSpec", "jax.P")):
                named += node.args
        axes = {node.value for node in named if isinstance(node, ast.Constant)} & set(AXES)
        assert not axes or file.parent.name == "sharding", f"{file} names {axes}: use sharding.rules"


def test_specs_by_hand():
    assert partition_spec(("layers", "embed", "heads", "head_dim"), TRAIN) == P(
        "stage", ("fsdp", "sequence", "rows", "expert"), "tensor", None
    )
    assert partition_spec(("batch", "sequence", "hidden"), TRAIN) == P(
        ("data", "fsdp", "expert", "stage", "rows"), "sequence", None
    )
    assert partition_spec(("vocab", "table_embed"), ROLLOUT) == P("tensor", None)
    assert partition_spec(("layers", "embed", "mlp"), ROLLOUT) == P(None, None, "tensor")
    assert ROLLOUT["batch"] == TRAIN["batch"]  # each stage is a replica


def test_rows_of_a_device_use_the_same_shards_of_weights():
    mesh = make_mesh(MeshConfig(fsdp=2, sequence=4), jax.devices()[:8])
    whole = with_whole_rows(mesh)
    axes = ("embed", "heads", "head_dim")
    shardings = [sharding_for(m, axes, (16, 4, 8), TRAIN) for m in (mesh, whole)]
    assert shardings[0].is_equivalent_to(shardings[1], 3)
    assert num_shards("batch", whole.shape) == 8 and num_shards("sequence", whole.shape) == 1


def test_unknown_and_twice_used_axes_are_refused():
    with pytest.raises(ValueError, match=r"no rule for logical axis 'haeds'; known: \['batch'"):
        partition_spec(("haeds",), TRAIN)
    with pytest.raises(ValueError, match="maps a mesh axis to two dims"):
        partition_spec(("heads", "mlp"), TRAIN)


EMBED = ("fsdp", "sequence", "expert")


@pytest.mark.parametrize(
    ("layers", "spec"), [(28, P("stage", EMBED, "tensor")), (30, P(None, (*EMBED, "stage"), "tensor"))]
)
def test_stages_divide_the_layers_or_each_layer(layers, spec):
    mesh = make_mesh(MeshConfig(stage=4, fsdp=2), jax.devices()[:8])
    assert sharding_for(mesh, ("layers", "embed", "mlp"), (layers, 64, 128), TRAIN).spec == spec


def test_a_dim_that_is_not_divided_evenly_stays_whole():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    assert sharding_for(mesh, ("embed", "kv_heads"), (32, 2), TRAIN).spec == P(
        ("fsdp", "sequence", "expert"), None
    )
    assert sharding_for(mesh, ("embed", "kv_heads"), (32, 4), TRAIN).spec == P(
        ("fsdp", "sequence", "expert"), "tensor"
    )


def test_constrain_lays_out_under_a_mesh_and_is_nothing_without():
    x = jnp.zeros((8, 4, 2))
    assert constrain(x, "batch", "sequence", "hidden") is x
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x, "batch", "sequence", "hidden"))(x)
    assert y.sharding.shard_shape(y.shape) == (2, 4, 2)


@pytest.mark.parametrize(
    ("tokens", "tokens_of_a_device"),
    [(48, 12), (6, 3), (5, 5), (1, 1)],
    ids=["sequence 2 x tensor 2", "sequence alone", "neither", "a step of decoding"],
)
def test_tokens_between_blocks_are_divided_over_tensor_too_where_it_divides_them(tokens, tokens_of_a_device):
    x = jnp.zeros((3, tokens, 8))  # 3 rows: fsdp 2 does not divide them
    assert constrain_residual(x) is x
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=2, tensor=2, sequence=2))):
        y = jax.jit(constrain_residual)(x)
    assert y.sharding.shard_shape(y.shape) == (3, tokens_of_a_device, 8)


@pytest.mark.compilers
def test_host_memory_of_gpus_that_are_only_compiled_for():
    if problem := missing_compiler("cuda"):
        pytest.skip(problem)
    mesh = make_mesh(MeshConfig(fsdp=2), gpu_devices("h100", 2))
    sharding = on_host(sharding_for(mesh, ("embed", "mlp"), (8, 8), TRAIN))
    assert sharding.memory_kind == "pinned_host" and sharding.shard_shape((8, 8)) == (4, 8)


def test_arrays_over_an_abstract_mesh_are_counted_on_the_host():
    """As `on_host` gives them for GPUs of a compile-only topology, for any devices: 32 of 64 numbers,
    and 4-bit ones two a byte, as on every device but a CPU."""
    devices = jax.devices()[:2]
    mesh = make_mesh(MeshConfig(fsdp=2), devices).abstract_mesh
    sharding = NamedSharding(mesh, P("fsdp"), memory_kind="pinned_host")
    arrays = [jax.ShapeDtypeStruct((8, 8), dtype, sharding=sharding) for dtype in (jnp.float32, jnp.int4)]
    assert [bytes_per_device([x], "pinned_host", devices[:1]) for x in arrays] == [128, 16]
    assert bytes_per_device(arrays, "device", devices[:1]) == 0
