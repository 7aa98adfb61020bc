"""The kernels compiled, both passes, for chips that are not here: compiled, not run (make test-compilers)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_kernels import gpu_target
from jaxrl_kernels.linear_logprob.api import choose, linear_logprob

pytestmark = pytest.mark.compilers
TOKENS, DIM = 32768, 4096
TPUS = {
    "v4": ("v4:2x2x1", {"chip_config_name": "megacore"}),
    "v5e": ("v5e:2x2", {}),
    "v5p": ("v5p:2x2x1", {"chip_config_name": "megacore"}),
    "v6e": ("v6e:2x2", {}),
    "tpu7x": ("tpu7x:2x2x1", {}),
}


def compiled(devices, platform, vocab, tensor=1, dtype=jnp.bfloat16):
    """value_and_grad of a head over `tensor` devices, with the implementation that is chosen for them."""
    auto = (AxisType.Auto,) * 2
    mesh = Mesh(np.array(devices[:tensor]).reshape(1, tensor), ("data", "tensor"), axis_types=auto)
    layout = (PartitionSpec("data"), PartitionSpec("tensor")) if tensor > 1 else None
    like = lambda spec, dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        name, why = choose(DIM, dtype)
        assert name == {"tpu": "pallas_tpu", "cuda": "pallas_gpu"}[platform], why

        def loss(hidden, head, targets, mask):
            found = linear_logprob(hidden, head, targets, mask, temperature=0.7, softcap=30.0, layout=layout)
            return sum(x.sum() for x in found)

        return (
            jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
            .trace(
                like(PartitionSpec(), dtype, 1, TOKENS, DIM),
                like(PartitionSpec("tensor"), dtype, vocab, DIM),
                like(PartitionSpec(), jnp.int32, 1, TOKENS),
                like(PartitionSpec(), jnp.float32, 1, TOKENS),
            )
            .lower(lowering_platforms=(platform,))
            .compile()
        )


def temporaries(program) -> float:
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("chip", TPUS)
def test_tpu(chip, dtype, monkeypatch):
    """A vocabulary that no tile divides; half the memory of logits, most of it d_head."""
    pytest.importorskip("libtpu")
    for name, value in (("TPU_SKIP_MDS_QUERY", "1"), ("TPU_WORKER_HOSTNAMES", "localhost")):
        monkeypatch.setenv(name, value)
    name, settings = TPUS[chip]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **settings).devices
    vocab = 50001
    program = compiled(devices, "tpu", vocab, dtype=dtype)
    assert program.as_text().count("tpu_custom_call") == 2
    assert temporaries(program) < TOKENS * vocab * 4 / 2


@pytest.mark.skipif(gpu_target.unavailable() is not None, reason=str(gpu_target.unavailable()))
@pytest.mark.parametrize(("vocab", "tensor"), [(151936, 1), (50257, 1), (151936, 8)])
def test_h100(vocab, tensor):
    program = compiled(gpu_target.gpu_topology("h100", tensor).devices, "cuda", vocab, tensor)
    assert program.as_text().count('custom_call_target="mosaic_gpu') == 2
    assert temporaries(program) < TOKENS * vocab * 4 / 2
