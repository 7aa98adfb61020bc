"""Gradients between the micro-batches of an update: one buffer at most, in the type that is set, that each
micro-batch's are added to in place.
"""

import copy
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers
from family_cases import BASE, CASES, SPECIAL
from random_weights import weights_for
from slow_cases import with_slow

from jaxrl_llm import models
from jaxrl_llm.algos import sft
from jaxrl_llm.data.packing import PackItem, counts, pack
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.update import LossArrays, StepConfig
from jaxrl_llm.models import TransformerConfig, lora
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.lora import with_lora
from jaxrl_llm.models.lora_config import LoraConfig
from jaxrl_llm.models.mixer_config import DeltaConfig
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import bytes_per_device, put_rows

WIDE = TransformerConfig(
    vocab_size=256, hidden_size=256, mlp_size=1024, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=64
)
TINY = dataclasses.replace(WIDE, hidden_size=16, mlp_size=32, num_heads=2, num_kv_heads=2, head_dim=8)


ONE = MeshConfig(fsdp=1)


def learner(model, rows, mesh=ONE, **settings):
    config = StepConfig(row_tokens=16, rows=rows, max_grad_norm=0.0, **settings)
    devices = jax.devices()[: mesh.fsdp * mesh.tensor * mesh.expert * mesh.stage]
    return Learner(sft.Config(), model, optax.sgd(1.0), config, mesh=make_mesh(mesh, devices))


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


def test_gradients_of_all_layers_exist_once():
    """One micro-batch has no buffer to be added to. Of several, the new gradients of one layer are beside it:
    here half of all but those of the embedding; adding whole gradients would take twice that."""
    gradients, one_arguments, one = compiled_bytes(1)
    assert gradients == 4 * sum(x.size for x in jax.tree.leaves(models.abstract(WIDE)))
    same, arguments, several = compiled_bytes(2)
    assert same == gradients and arguments - one_arguments == gradients
    assert several - one <= 0.55 * gradients


@pytest.mark.parametrize("microbatches", with_slow([1, 2], {1}))
def test_bfloat16_gradients_take_half(microbatches):
    full, _, _ = compiled_bytes(microbatches)
    half, _, _ = compiled_bytes(microbatches, grad_dtype="bfloat16")
    assert half == full / 2


def sequences(count):
    rng = np.random.default_rng(0)
    return [
        PackItem(rng.integers(0, 256, 16).astype(np.int32), np.ones(16, np.float32)) for _ in range(count)
    ]


UNTIED = dataclasses.replace(TINY, tie_embeddings=False)
EXPERTS = dataclasses.replace(UNTIED, family="qwen3_moe", moe=MoEConfig(4, 2, 16))
# A layer with attention, and a run of twice two layers: all delta layers, but not all with attention.
HYBRID = dataclasses.replace(
    TINY, num_layers=5, attention_gate=True, layer_kinds=("attention", *("delta", "attention") * 2),
    delta=DeltaConfig(2, 4, 8, 8),
)  # fmt: skip
VARIANTS = {
    "every matrix product kept": (TINY, ONE, {"remat": "dots"}),
    "float16, whose loss is scaled": (UNTIED, ONE, {"remat": "full", "dtype": "float16"}),
    "sharded": (TINY, MeshConfig(fsdp=4, tensor=2), {"remat": "full", "dtype": "bfloat16"}),
    "adapters": (with_lora(TINY, LoraConfig(2, 4.0)), ONE, {"remat": "attention"}),
    "adapters of int8": (with_lora(TINY, LoraConfig(2, 4.0, quantize="int8")), ONE, {}),
    "layer inputs in host memory": (TINY, ONE, {"remat": "offload"}),
    "sums in bfloat16": (TINY, ONE, {"grad_dtype": "bfloat16"}),
    "a run with a part of a stack": (HYBRID, ONE, {"remat": "full"}),
    "stages after a layer": (
        dataclasses.replace(TINY, num_layers=3),
        MeshConfig(stage=2, fsdp=2),
        {"remat": "full"},
    ),
    "experts": (EXPERTS, ONE, {"remat": "dots"}),
    "sharded experts": (EXPERTS, MeshConfig(fsdp=2, expert=4), {"dtype": "bfloat16"}),
}
QUICK = ("every matrix product kept",)


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in VARIANTS]
)
def test_a_micro_batch_adds_its_gradients(variant):
    """To any buffer: the difference is what the program without a buffer returns."""
    model, mesh, settings = VARIANTS[variant]
    built, items = learner(model, 8, mesh, **settings), sequences(8)
    (batch,) = [put_rows(built.mesh, batch) for batch in pack(items, 16, 8)]
    state = built.init_state(weights_for(built))
    trained, frozen = lora.split_params(state.params)
    rng, dtype = np.random.default_rng(1), jnp.dtype(built.config.grad_dtype)
    before = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(dtype), trained)
    with jax.set_mesh(built.mesh):
        arrays = LossArrays(batch, built._totals([batch], *counts(items), state), (), frozen)
        alone, *expected = built._accumulate(trained, None, arrays)
        sums, *others = built._accumulate(trained, jax.device_put(before, built.grad_shardings), arrays)
    for got, start, new in zip(*map(jax.tree.leaves, (sums, before, alone)), strict=True):
        assert got.dtype == dtype and got.sharding == new.sharding
        got, start, new = map(np.float32, (got, start, new))
        rounding = 2 * float(jnp.finfo(dtype).eps) * (np.abs(start) + np.abs(new))
        assert (np.abs(got - (start + new)) <= rounding + 1e-6).all()
    assert np.linalg.norm(np.concatenate([np.ravel(x) for x in jax.tree.leaves(alone)])) > 1e-3
    jax.tree.map(np.testing.assert_array_equal, expected, others)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_each_family_adds_its_gradients(case):
    """Traced, not run: all weights, and adapters."""
    family, changes = CASES[case]
    raw = transformers.AutoConfig.for_model(family, **copy.deepcopy({**BASE, **SPECIAL, **changes}))
    model = read_config(json.loads(json.dumps(raw.to_dict())))
    for trained in (model, with_lora(model, LoraConfig(2, 4.0))):
        built = learner(trained, 2, remat="full")
        programs = built.update_programs((), microbatches=2)
        shapes = lambda tree: [x.shape for x in jax.tree.leaves(tree)]
        trained_weights, _ = lora.split_params(built.abstract_state().params)
        assert shapes(programs["apply"].args[1]) == shapes(trained_weights)


def gradient(rows, **settings):
    """The change of the weights under SGD with rate 1, from 4 rows in micro-batches of `rows`."""
    built, items = learner(TINY, rows, **settings), sequences(4)
    params = weights_for(built)
    before = jax.tree.map(np.array, params)
    batches = [put_rows(built.mesh, batch) for batch in pack(items, 16, rows)]
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
