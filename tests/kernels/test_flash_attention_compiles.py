"""The TPU kernels of attention through the real compiler, for every generation: `make test-compilers`.

Compiled, not run: proves that the blocks fit and that the chip supports every operation.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_kernels.chips import TPUS
from jaxrl_kernels.flash_attention import shapes
from jaxrl_kernels.flash_attention.api import flash_attention

pytestmark = pytest.mark.compilers
CHIPS = pytest.mark.parametrize("chip", TPUS)


@pytest.fixture
def mesh(chip, tpu):
    """One device of a chip that this machine lacks."""
    return Mesh(np.array(tpu(chip)[:1]), ("x",))


def compiled(mesh, dim, dtype, *, rows=1, length=4096, spec=None, heads=(8, 2), branches=False) -> str:
    """The program of attention and its gradients, packed rows, a traced window."""
    array = lambda *shape, kind=dtype: jax.ShapeDtypeStruct(
        shape, kind, sharding=NamedSharding(mesh, PartitionSpec())
    )
    q, k = (array(rows, length, count, dim) for count in heads)
    segments, window = array(rows, length, kind=jnp.int32), array(kind=jnp.int32)

    def loss(q, k, v, *of_rows):
        segments, window = of_rows
        out, lse = flash_attention(
            q,
            k,
            v,
            segments,
            segments if branches else None,
            scale=0.1,
            window=window,
            return_lse=True,
            **(spec or {}),
        )
        return out.astype(jnp.float32).sum() + lse.sum()

    with jax.set_mesh(mesh):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, segments, window)
        return traced.lower(lowering_platforms=("tpu",)).compile().as_text()


@CHIPS
@pytest.mark.parametrize(("dim", "dtype"), [*((d, "bfloat16") for d in shapes.HEAD_DIMS), (256, "float32")])
def test_every_head_dim_compiles(mesh, dim, dtype):
    """`choose` takes the kernels under a mesh of such a chip, and all three of them are in the program."""
    assert len(re.findall(r'custom_call_target="tpu_custom_call"', compiled(mesh, dim, dtype))) == 3


@CHIPS
def test_softcap_branches_and_an_odd_length_compile(mesh):
    compiled(mesh, 80, "float32", length=700, spec={"softcap": 30.0}, heads=(2, 2), branches=True)


@CHIPS
def test_the_largest_table_of_blocks_fits_scalar_memory(mesh):
    """Rows of 131,072 tokens in blocks of 512 queries and 1,024 keys, two of them: 2**16 numbers."""
    compiled(mesh, 128, "bfloat16", length=2**17, rows=2, heads=(1, 1), branches=True)


@CHIPS
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
def test_what_our_check_lets_pass_the_compiler_does_too(mesh, chip, kernel, monkeypatch):
    """The largest blocks: our own check reports an overflow of VMEM, never the compiler."""
    blocks = [shapes.Blocks(*b) for b in shapes.largest_blocks(kernel, 128, "bfloat16", chip)]
    monkeypatch.setattr(shapes, "SIZES", (*blocks[len(blocks) // 2 :][:1], shapes.Blocks(128, 128)))
    compiled(mesh, 128, "bfloat16")
