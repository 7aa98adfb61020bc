"""Gradients between the micro-batches of an update: one buffer at most, in the type that is set."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import models
from jaxrl_llm.algos import sft
from jaxrl_llm.data.packing import PackItem, counts, pack
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import bytes_per_device

WIDE = TransformerConfig(
    vocab_size=256, hidden_size=256, mlp_size=1024, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=64
)
TINY = dataclasses.replace(WIDE, hidden_size=16, mlp_size=32, num_heads=2, num_kv_heads=2, head_dim=8)


def learner(model, rows, **settings):
    config = StepConfig(row_tokens=16, rows=rows, max_grad_norm=0.0, **settings)
    return Learner(
        sft.Config(), model, optax.sgd(1.0), config, make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    )


@functools.cache
def compiled_bytes(microbatches, **settings):
    """(gradients, arguments, peak) of the compiled `accumulate`, in bytes; outputs in donated arguments
    count once."""
    built = learner(WIDE, 1, **settings)
    programs = built.update_programs((), microbatches=microbatches)
    fn, args, _ = programs["accumulate"]
    with jax.set_mesh(built.mesh):
        memory = fn.lower(*args).compile().memory_analysis()
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    gradients = bytes_per_device(programs["apply"].args[1])
    return gradients, memory.argument_size_in_bytes, peak - memory.alias_size_in_bytes


def test_a_single_micro_batch_has_no_buffer_to_be_added_to():
    """Neither zeros among the arguments nor a second copy: the peak falls by the gradients."""
    gradients, one_arguments, one = compiled_bytes(1)
    assert gradients == 4 * sum(x.size for x in jax.tree.leaves(models.abstract(WIDE)))
    same, arguments, several = compiled_bytes(2)
    assert same == gradients and arguments - one_arguments == gradients
    assert several - one >= 0.95 * gradients


@pytest.mark.parametrize("microbatches", [1, 2])
def test_bfloat16_gradients_take_half(microbatches):
    full, _, _ = compiled_bytes(microbatches)
    half, _, _ = compiled_bytes(microbatches, grad_dtype="bfloat16")
    assert half == full / 2


def gradient(rows, **settings):
    """The change of the weights under SGD with rate 1, from 4 rows in micro-batches of `rows`."""
    built = learner(TINY, rows, **settings)
    rng = np.random.default_rng(0)
    items = [PackItem(rng.integers(0, 256, 16).astype(np.int32), np.ones(16, np.float32)) for _ in range(4)]
    params = models.init(TINY, jax.random.key(0))
    before = jax.tree.map(np.asarray, params)
    batches = [built.put(batch) for batch in pack(items, 16, rows)]
    with jax.set_mesh(built.mesh):
        state, metrics, _ = built.update_minibatch(built.init_state(params), batches, *counts(items))
    change = jax.tree.map(lambda a, b: a - np.asarray(b), before, state.params)
    return np.concatenate([x.ravel() for x in jax.tree.leaves(change)]), metrics


@pytest.mark.slow
def test_gradients_in_bfloat16_are_rounded_sums():
    """A rounding to 8 bits a micro-batch: 2^-9 of a sum, relative, at each; the norm is that of float32."""
    exact, metrics = gradient(4)
    for rows, roundings in ((4, 1), (1, 4)):
        rounded, other = gradient(rows, grad_dtype="bfloat16")
        error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
        assert 2**-12 < error < roundings * 2**-9
        assert float(other["grad_norm"]) == pytest.approx(float(metrics["grad_norm"]), rel=1e-3)
        assert other["grad_norm"].dtype == jnp.float32
