"""Eight devices give the log-probs and gradients of one, and none holds logits of all the vocabulary."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxrl_kernels.linear_logprob.api import linear_logprob
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN, fit, prediction_layout

B, T, D, V = 4, 24, 12, 4 * 251
MESHES = {
    "fsdp": MeshConfig(fsdp=4, data=2),
    "tensor": MeshConfig(data=1, fsdp=2, tensor=4),
    "all": MeshConfig(fsdp=2, tensor=2, sequence=2),
    "rows_not_divided": MeshConfig(data=1, fsdp=8),  # 4 rows, 12 columns: neither is a multiple of 8
}


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (B, T, D), dtype)
    head = jax.random.normal(keys[1], (V, D), dtype)
    mask = (jax.random.uniform(keys[3], (B, T)) < 0.4).at[2].set(False)
    return hidden, head, jax.random.randint(keys[2], (B, T), 0, V), mask.astype(jnp.float32)


def step(hidden, head, targets, mask, layout=None):
    """((loss, (log-prob, entropy)), gradients)"""

    def loss(hidden, head):
        found = linear_logprob(
            hidden, head, targets, mask, temperature=0.7, softcap=4.0, chunk=5, layout=layout
        )
        return jnp.sum(jnp.cos(found[0]) + 0.3 * found[1] ** 2), found

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)


def on_mesh(config, arrays):
    """(the compiled step, its arguments laid out)"""
    mesh = make_mesh(config)
    axes = [("batch", "sequence", "hidden"), ("vocab", "embed"), ("batch", "sequence"), ("batch", "sequence")]
    places = tuple(fit(mesh, names, x.shape, TRAIN) for names, x in zip(axes, arrays, strict=True))
    with jax.set_mesh(mesh):
        run = jax.jit(
            lambda *x: step(*x, layout=prediction_layout(*x[:2])),
            in_shardings=places,
            out_shardings=(NamedSharding(mesh, jax.P()), places[:2]),
        )
        return run.lower(*arrays).compile(), jax.device_put(arrays, places)


CASES = [*((name, jnp.float32) for name in MESHES), ("all", jnp.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=[f"{name}-{dtype.__name__}" for name, dtype in CASES])
def test_eight_devices_equal_one(name, dtype):
    arrays = inputs(dtype)
    run, placed = on_mesh(MESHES[name], arrays)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == jnp.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for a, b in zip(jax.tree.leaves(run(*placed)), jax.tree.leaves(jax.jit(step)(*arrays)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), **close)


def test_a_device_sees_its_own_slice_of_the_vocabulary():
    """With the vocabulary on 4 devices no array of the program has a dim of V; between devices pass a slice
    of the head (over fsdp), [rows, T] statistics and d_hidden."""
    run, _ = on_mesh(MESHES["tensor"], inputs())
    program = run.as_text()
    assert not re.search(rf"\b{V}\b", program), "an array over the whole vocabulary"
    moved = re.findall(
        r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(", program
    )
    of_vocab = {
        (kind, shape) for shapes, kind in moved for shape in re.findall(r"\w+\[[\d,]*251[\d,]*\]", shapes)
    }
    assert {kind for kind, _ in of_vocab} <= {"all-gather", "reduce-scatter", "all-reduce"}
    assert {shape for _, shape in of_vocab} <= {
        f"f32[251,{D}]",
        f"f32[251,{D // 2}]",
        f"f32[{D},251]",
        f"f32[{D // 2},251]",
    }
    assert of_vocab and len(moved) > len(of_vocab)


def test_each_device_leaves_out_what_its_mask_leaves_out():
    """NaNs in a row that no token of which is wanted reach nothing."""
    hidden, head, targets, mask = inputs()
    run, placed = on_mesh(MESHES["fsdp"], (hidden.at[2].set(jnp.nan), head, targets, mask))
    (loss, found), grads = run(*placed)
    assert jnp.isfinite(loss) and all(jnp.isfinite(x).all() for x in (*found, *grads))
    assert (grads[0][2] == 0).all() and (grads[0][0] != 0).any()
