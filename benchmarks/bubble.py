"""Processor time of a pipeline: S stages compute C chunks of rows in C + S - 1 ticks (docs/placement.md).

    python benchmarks/bubble.py --save      # 2 minutes on a CPU

A micro-batch forward and backward on virtual CPU devices, one row a chunk. In the bubble a device computes
numbers that nothing reads, so the processor time, which other programs hardly change, grows with the ticks.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from machine import measure_cases

from jaxrl_llm.algos import grpo
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

MODEL = TransformerConfig(
    vocab_size=64, hidden_size=256, mlp_size=1024, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=64
)
CASES = {f"{stages} stages": stages for stages in (2, 4, 8)}


def measure_stages(stages: int, repetitions: int) -> dict[str, Any]:
    """Return the least processor milliseconds of a tick on a device, for S, 2 S and 4 S chunks."""
    return {f"{rows} chunks": _tick(stages, rows, repetitions) for rows in (stages, 2 * stages, 4 * stages)}


def _tick(stages: int, rows: int, repetitions: int) -> float:
    mesh = make_mesh(MeshConfig(stage=stages, fsdp=1), jax.devices()[:stages])
    step = StepConfig(row_tokens=64, rows=rows, remat="full")
    built = Learner(grpo.Config(kl_coef=0.0), MODEL, optax.sgd(1.0), step, mesh=mesh)
    program = built.update_programs(("advantages", "rollout_logprobs"))["accumulate"]
    ones = lambda x: jax.device_put(jnp.ones(x.shape, x.dtype), x.sharding)
    with jax.set_mesh(mesh):
        compiled = program.fn.lower(*program.args).compile()
        seconds = []
        for _ in range(repetitions):
            args = jax.block_until_ready(jax.tree.map(ones, program.args))
            start = time.process_time()
            jax.block_until_ready(compiled(*args))
            seconds.append(time.process_time() - start)
    return 1e3 * min(seconds) / (rows + stages - 1) / stages


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(CASES.values()))
    measure_cases("bubble", __doc__, CASES, measure_stages, part="cases", repetitions=5)
