"""The mesh says what does not fit; the table refuses what it does not know."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import ROLLOUT, TRAIN, constrain, fit, spec


def test_minus_one_takes_the_rest():
    assert dict(make_mesh(MeshConfig(data=2, fsdp=-1, tensor=2)).shape) == {
        "data": 2, "fsdp": 2, "tensor": 2, "sequence": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MeshConfig(data=3, fsdp=1),
            r"data=3 x fsdp=1 x tensor=1 x sequence=1 needs 3 devices.*8 cpu devices",
        ),
        (MeshConfig(data=-1, fsdp=-1), "at most one -1"),
        (MeshConfig(tensor=0), "must be positive"),
        (MeshConfig(tensor=3), r"--mesh\.data / fsdp / tensor / sequence"),
    ],
)
def test_a_mesh_that_does_not_fit_says_how_it_would(config, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(config)


def test_specs_by_hand():
    assert spec(("layers", "embed", "heads", "head_dim"), TRAIN) == P(
        None, ("fsdp", "sequence"), "tensor", None
    )
    assert spec(("batch", "sequence", "hidden"), TRAIN) == P(("data", "fsdp"), "sequence", None)
    assert spec(("vocab", "embed"), ROLLOUT) == P("tensor", None)


def test_unknown_and_twice_used_axes_are_refused():
    with pytest.raises(ValueError, match=r"no rule for logical axis 'haeds'; known: \['batch'"):
        spec(("haeds",), TRAIN)
    with pytest.raises(ValueError, match="maps a mesh axis to two dims"):
        spec(("heads", "mlp"), TRAIN)


def test_a_dim_that_is_not_divided_evenly_stays_whole():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    assert fit(mesh, ("embed", "kv_heads"), (32, 2), TRAIN).spec == P(("fsdp", "sequence"), None)
    assert fit(mesh, ("embed", "kv_heads"), (32, 4), TRAIN).spec == P(("fsdp", "sequence"), "tensor")


def test_constrain_lays_out_under_a_mesh_and_is_nothing_without():
    x = jnp.zeros((8, 4, 2))
    assert constrain(x, "batch", "sequence", "hidden") is x
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x, "batch", "sequence", "hidden"))(x)
    assert y.sharding.shard_shape(y.shape) == (2, 4, 2)
