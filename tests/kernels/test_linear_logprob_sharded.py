"""Eight devices give the log-probs and gradients of one, and none holds logits of all the vocabulary."""

import re

import jax
import jax.numpy as jnp
import kernel_oracles as oracles
import numpy as np
import pytest
from jax.sharding import NamedSharding
from kernel_oracles import assert_close

from jaxrl_kernels.linear_logprob.api import _scatter, linear_logprob
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN, logprob_specs, sharding_for

FAST = {"xla_backend_optimization_level": 0}  # of compilation
B, T, D, V = 4, 24, 12, 4 * 251
MESHES = {
    "fsdp": MeshConfig(fsdp=4, data=2),
    "tensor": MeshConfig(data=1, fsdp=2, tensor=4),
    "all": MeshConfig(fsdp=2, tensor=2, sequence=2),
    "rows_not_divided": MeshConfig(data=1, fsdp=8),  # 4 rows, 12 columns: neither is a multiple of 8
}


WEIGHTS = np.cos(np.arange(B * T)).reshape(B, T).astype(np.float32)


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    hidden, head = (rng.normal(size=(*shape, D)).astype(dtype) for shape in ((B, T), (V,)))
    mask = rng.uniform(size=(B, T)) < 0.4
    mask[2] = False
    return hidden, head, rng.integers(0, V, (B, T)).astype(np.int32), mask.astype(np.float32)


def step(hidden, head, targets, mask, *, partition_specs):
    """(gradients, (log-prob, entropy))"""

    def loss(hidden, head):
        settings = {"temperature": 0.7, "softcap": 4.0, "chunk": 5, "partition_specs": partition_specs}
        found = linear_logprob(hidden, head, targets, mask, **settings)
        return jnp.sum(WEIGHTS * (found[0] + 0.3 * found[1])), found

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)


def on_mesh(config, arrays):
    """(the compiled step, its sharded arguments)"""
    mesh = make_mesh(config)
    rows = "batch", "sequence"
    axes = [(*rows, "hidden"), ("vocab", "table_embed"), rows, rows]
    shardings = tuple(
        sharding_for(mesh, names, x.shape, TRAIN) for names, x in zip(axes, arrays, strict=True)
    )
    with jax.set_mesh(mesh):
        run = jax.jit(
            lambda *x: step(*x, partition_specs=logprob_specs(*x[:2])),
            in_shardings=shardings,
            out_shardings=(shardings[:2], NamedSharding(mesh, jax.P())),
            compiler_options=FAST,
        )
        return run.lower(*arrays).compile(), jax.device_put(arrays, shardings)


CASES = [*((name, jnp.float32) for name in MESHES), ("all", jnp.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=[f"{name}-{dtype.__name__}" for name, dtype in CASES])
def test_eight_devices_give_the_log_probs_and_gradients_of_the_oracle(name, dtype):
    hidden, head, targets, mask = inputs(dtype)
    run, arguments = on_mesh(MESHES[name], (hidden, head, targets, mask))
    gradients, found = run(*arguments)
    weights = WEIGHTS * mask
    wanted = oracles.logprob(
        hidden, head, targets, temperature=0.7, softcap=4.0, d_logprob=weights, d_entropy=0.3 * weights
    )
    wanted = *(x * mask for x in wanted[:2]), *wanted[2:]
    for got, expected in zip((*found, *gradients), wanted, strict=True):
        assert_close(got, expected, dtype)
    assert all(x.dtype == dtype for x in gradients) and all(x.dtype == jnp.float32 for x in found)


def test_a_device_has_its_own_shard_of_the_vocabulary():
    """With the vocabulary on 4 devices no array of the program has a dim of V; collectives carry a shard of
    the head (over fsdp), [rows, T] statistics and d_hidden."""
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


def test_each_device_skips_masked_tokens():
    """NaNs in a fully masked row reach nothing."""
    hidden, head, targets, mask = inputs()
    hidden[2] = np.nan
    run, arguments = on_mesh(MESHES["fsdp"], (hidden, head, targets, mask))
    gradients, found = run(*arguments)
    assert all(np.isfinite(x).all() for x in (*found, *gradients))
    assert (np.asarray(gradients[0])[2] == 0).all() and (np.asarray(gradients[0])[0] != 0).any()


def test_a_gradient_with_padded_rows_is_scattered_without_them():
    """As for the kernel of TPUs: the sum over the devices, each with its own columns of all rows."""
    mesh = make_mesh(MESHES["rows_not_divided"])
    parts = np.random.default_rng(0).normal(size=(8, V, 16)).astype(np.float32)
    scatter = lambda part: _scatter("pallas_tpu", part[0], ("fsdp",))
    specs = {"in_specs": jax.P("fsdp"), "out_specs": jax.P(None, "fsdp"), "check_vma": False}
    found = jax.jit(jax.shard_map(scatter, mesh=mesh, **specs))(parts)
    np.testing.assert_allclose(found, parts.sum(0), atol=1e-5)
