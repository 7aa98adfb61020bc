"""Training steps of long rows, compiled for TPU slices that are not here (`make test-compilers`)."""

import re

import jax
import optax
import pytest

from jaxrl_llm import models
from jaxrl_llm.algos import grpo
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.plan.compiled import count_collectives
from jaxrl_llm.plan.hlo import parse
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import num_shards

pytestmark = pytest.mark.compilers
GIB = 2**30


def qwen3(layers: int) -> models.TransformerConfig:
    """Qwen3-0.6B, but for its depth."""
    return models.TransformerConfig(
        vocab_size=151936, hidden_size=1024, mlp_size=3072, num_layers=layers, num_heads=16, num_kv_heads=8,
        head_dim=128, qk_norm=True, tie_embeddings=True, max_position=2**20,
    )  # fmt: skip


def compiled(devices: list, mesh_config: MeshConfig, tokens: int, layers: int, *, remat: str = "full"):
    """Forward and backward of one row a replica, GRPO, bfloat16."""
    mesh = make_mesh(mesh_config, devices)
    rows = num_shards("batch", mesh.shape)
    method = mesh_config.sequence_parallel
    step = StepConfig(tokens, rows, dtype="bfloat16", remat=remat, sequence_parallel=method)
    learner = Learner(grpo.Config(kl_coef=0.0), qwen3(layers), optax.adam(1e-6), step, mesh=mesh)
    program = learner.update_programs(("advantages", "rollout_logprobs"))["accumulate"]
    with jax.set_mesh(mesh):
        return program.fn.trace(*program.args).lower(lowering_platforms=("tpu",)).compile()


def results(program, operation: str) -> set[tuple[int, ...]]:
    """Shapes of the results of an operation."""
    found = re.findall(rf"= \(?\w+\[([\d,]+)\].* {operation}(?:-start)?\(", program.as_text())
    return {tuple(map(int, shape.split(","))) for shape in found}


@pytest.mark.parametrize("how", ["ring", "ulysses"])
def test_a_long_row_compiles_for_four_chips(how, tpu):
    """64k tokens over 4 chips of 16 GiB: what is one row's, only exchanges of parts of it move."""
    program = compiled(tpu("v5e:2x2"), MeshConfig(fsdp=1, sequence=4, sequence_parallel=how), 2**16, 2)
    assert program.memory_analysis().peak_memory_in_bytes < 15.75 * GIB
    gathered = results(program, "all-gather")
    # Weights, and at most a number a token: never the hidden states of a row.
    assert gathered and not any(2**16 in shape and len(shape) > 2 for shape in gathered)
    assert results(program, {"ring": "collective-permute", "ulysses": "all-to-all"}[how])


def test_offloaded_layer_inputs_leave_the_devices(tpu):
    """8 layers' inputs of a row of 4k tokens: 2 bytes x 8 x 2^12 x 1024 for each device."""
    plain, offloaded = [
        compiled(tpu("v5e:2x2"), MeshConfig(fsdp=4), 2**12, 8, remat=remat).memory_analysis()
        for remat in ("full", "offload")
    ]
    assert plain.host_temp_size_in_bytes == 0
    assert offloaded.host_temp_size_in_bytes == 2 * 8 * 2**12 * 1024
    assert plain.temp_size_in_bytes - offloaded.temp_size_in_bytes > 0.5 * offloaded.host_temp_size_in_bytes


def test_sums_over_tensor_are_scattered_between_blocks(tpu):
    """Two products of a layer are summed over tensor; their sums of all tokens would be 2^12 x 1024."""
    program = compiled(tpu("v5e:2x2"), MeshConfig(fsdp=1, tensor=4), 2**12, 2)
    collectives = count_collectives(parse(program.as_text()), 4)
    assert collectives["reduce-scatter"].count >= 2 * 2 + 2 * 2  # forward and backward
    assert collectives["all-gather"].count >= 2 * 2 + 2 * 2
    of_all_tokens = 2 * 3 / 4 * 2**12 * 1024 * 2  # bytes sent by an all-reduce over 4 devices, bfloat16
    assert collectives["all-reduce"].bytes < 3 * of_all_tokens  # embedding and log-probs; one a product: 8


@pytest.mark.slow
def test_a_million_tokens_compile_for_a_v5p_slice(tpu):
    program = compiled(tpu("v5p:4x4x8"), MeshConfig(fsdp=1, sequence=128), 2**20, 28)
    assert program.memory_analysis().peak_memory_in_bytes < 95 * GIB
