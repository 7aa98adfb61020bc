"""The kernels compiled, both passes, for chips that are not here: compiled, not run (make test-compilers)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_kernels import topology
from jaxrl_kernels.chips import TPUS
from jaxrl_kernels.dispatch import choose
from jaxrl_kernels.linear_logprob import pallas_gpu, pallas_tpu
from jaxrl_kernels.linear_logprob.api import linear_logprob
from jaxrl_kernels.linear_logprob.reference import LogprobSpec

pytestmark = pytest.mark.compilers
DIM = 4096
CALL = {"tpu": 'custom_call_target="tpu_custom_call"', "cuda": 'custom_call_target="mosaic_gpu'}
MISSING = topology.missing_compiler("cuda")
gpu = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def compiled(fn, devices, platform, *shapes):
    """shapes: (PartitionSpec, dtype, *sizes) each, over a mesh with one axis, "tensor"."""
    mesh = Mesh(np.array(devices), ("tensor",), axis_types=(AxisType.Auto,))
    args = [
        jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for spec, dtype, *sizes in shapes
    ]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        name, reason = choose("linear_logprob", DIM, jnp.bfloat16)
        assert name == {"tpu": "pallas_tpu", "cuda": "pallas_gpu"}[platform], reason
        return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).compile()


def compile_kernels(module, devices, platform, dtype):
    """Of 4096 tokens and a vocabulary that no tile divides."""
    spec, column = LogprobSpec(0.7, 30.0), ((), jnp.float32, 4096)
    arrays = ((), dtype, 4096, DIM), ((), dtype, 50257, DIM), ((), jnp.int32, 4096)
    forward = functools.partial(module.forward, spec)
    d_logits = functools.partial(module.d_logits, spec)
    for program in (
        compiled(lambda *x: forward(*x, x[2][0]), devices[:1], platform, *arrays),
        compiled(d_logits, devices[:1], platform, *arrays, *[column] * 4),
    ):
        assert CALL[platform] in program.as_text()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("chip", TPUS)
def test_kernels_for_tpu(chip, dtype, tpu):
    compile_kernels(pallas_tpu, tpu(chip), "tpu", dtype)


@gpu
def test_kernels_for_h100():
    compile_kernels(pallas_gpu, topology.gpu_devices("h100"), "cuda", jnp.bfloat16)


def compile_step(devices, platform):
    """Values and gradients of 32k tokens, the vocabulary over the devices: no [T, V / devices] anywhere."""
    tokens, vocab, count = 2**15, 151936, len(devices)
    specs = (PartitionSpec(), PartitionSpec("tensor"))

    def loss(hidden, head, targets, mask):
        found = linear_logprob(hidden, head, targets, mask, temperature=0.7, partition_specs=specs)
        return sum(x.sum() for x in found)

    arrays = ((), jnp.bfloat16, 1, tokens, DIM), (("tensor",), jnp.bfloat16, vocab, DIM)
    numbers = ((), jnp.int32, 1, tokens), ((), jnp.float32, 1, tokens)
    step = jax.value_and_grad(loss, argnums=(0, 1))
    program = compiled(step, devices, platform, *arrays, *numbers)
    text = program.as_text()
    assert f"[{vocab}" not in text and f"{vocab}]" not in text
    assert f"[{tokens},{vocab // count}]" not in text and f"[{vocab // count},{tokens}]" not in text
    assert text.count(CALL[platform]) == 2


def test_a_step_for_tpu(tpu):
    compile_step(tpu("v5e"), "tpu")


@gpu
def test_a_step_for_eight_h100():
    compile_step(topology.gpu_devices("h100", 8), "cuda")
