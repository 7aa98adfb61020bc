"""Donated arguments of compiled programs: all their bytes are reused by results, so nothing is copied."""

import jax
import numpy as np
import pytest
from random_weights import random_params
from slow_cases import with_slow

from jaxrl_llm.algos import sft
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.learn.config import OptimConfig
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.optim import make_optimizer
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import LoraConfig, TransformerConfig
from jaxrl_llm.models.lora import with_lora
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

MODEL = TransformerConfig(
    vocab_size=128, hidden_size=64, mlp_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)
ADAPTED = with_lora(MODEL, LoraConfig(rank=4, alpha=8.0))


def one_device():
    return make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])


def of_update(name, model=MODEL, dtype="float32", **optim):
    """(mesh, program) of an update in several micro-batches."""
    optim = OptimConfig(**optim)
    step = StepConfig(row_tokens=16, rows=2, dtype=dtype)
    built = Learner(sft.Config(), model, make_optimizer(optim, 10), step, mesh=one_device())
    return built.mesh, built.update_programs(())[name]


def of_rollout(name, **settings):
    """(mesh, program) of the native engine, for prompts and responses of 40 tokens."""
    mesh = one_device()
    engine = NativeEngine(RolloutConfig(slots=2, chunk=8, **settings), MODEL, mesh, make_tokenizer())
    return mesh, engine.largest_calls(
        random_params(MODEL), 40, 40, 2, sampling=SamplingConfig(), turns=False
    )[name]


PAGED = {"cache": "paged", "page": 8}
CASES = {
    "accumulate": (of_update, {}),
    "accumulate adapters": (of_update, {"name": "accumulate", "model": ADAPTED}),
    "apply": (of_update, {}),
    "apply 8-bit moments": (of_update, {"name": "apply", "moments": "int8"}),
    "apply bfloat16 weights with remainders": (
        of_update,
        {"name": "apply", "moments": "int8", "store_param_remainders": True, "dtype": "bfloat16"},
    ),
    "apply adapters": (of_update, {"name": "apply", "model": ADAPTED}),
    "decode": (of_rollout, {}),
    "insert": (of_rollout, {}),
    "decode pages": (of_rollout, {"name": "decode", **PAGED}),
    "write_pages": (of_rollout, PAGED),
}
SLOW = {
    *("accumulate adapters", "apply adapters", "apply 8-bit moments", "decode pages"),
    "apply bfloat16 weights with remainders",
}


@pytest.mark.parametrize("case", with_slow(CASES, SLOW))
def test_all_donated_bytes_are_reused(case):
    make, settings = CASES[case]
    mesh, (function, args, static) = make(**{"name": case, **settings})
    with jax.set_mesh(mesh):
        lowered = function.lower(*args, **static)
    donated = [x for x in jax.tree.leaves(lowered.args_info) if x.donated]
    size = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in donated)
    assert size > 10_000
    assert lowered.compile().memory_analysis().alias_size_in_bytes == size


def test_an_update_writes_weights_and_moments_in_place():
    """Beside the donated weights and two moments of AdamW it holds its updates, as large as the weights, at
    most: not copies of the moments, which would be twice that."""
    mesh, (function, args, static) = of_update("apply")
    with jax.set_mesh(mesh):
        memory = function.lower(*args, **static).compile().memory_analysis()
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 2
