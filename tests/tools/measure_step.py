"""Print, as JSON, the peak memory of a step's phases as planned and as this process measures them.

Measured is the growth of the resident set (VmHWM, reset before each phase) over its size when all arrays are
freed; the least of several steps, since the allocator only adds to it. Run in a process of its own with
MALLOC_MMAP_THRESHOLD_ set, so that freed arrays are returned to the system at once.
"""

import contextlib
import ctypes
import gc
import json
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm import models
from jaxrl_llm.algos import grpo
from jaxrl_llm.builders.models import make_stages
from jaxrl_llm.builders.sizes import make_meshes
from jaxrl_llm.config import ModelConfig, RolloutConfig, TrainConfig, TransformerConfig
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.plan.compiled import open_target
from jaxrl_llm.plan.plan import make_plan
from jaxrl_llm.plan.topology import parse_topology
from jaxrl_llm.rollout.engine import Request
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.config import POLICY

MODEL = TransformerConfig(
    vocab_size=4096, hidden_size=512, mlp_size=2048, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64
)
CONFIG = TrainConfig(
    algo=grpo.Config(kl_coef=0.0),
    prompts_per_step=2,
    responses_per_prompt=8,
    minibatches_per_step=2,
    tokens_per_device=512,
    max_prompt_tokens=64,
    max_response_tokens=64,
    model=ModelConfig(architecture=MODEL, tokenizer="tiny", dtype="float32"),
    rollout=RolloutConfig(slots=16, warm_up=True),
)


def resident(name: str) -> int:
    """Return bytes: VmRSS (now) or VmHWM (the peak since it was reset)."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024


def trim() -> None:
    """Return freed memory to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


@contextlib.contextmanager
def measured(peaks: dict[str, int], name: str):
    """Record the peak of a phase if it is the least so far."""
    trim()
    Path("/proc/self/clear_refs").write_text("5")
    yield
    peaks[name] = min(resident("VmHWM"), peaks.get(name, 2**62))


def items() -> list[PackItem]:
    rng = np.random.default_rng(0)
    ones, length = np.ones(CONFIG.max_tokens, np.float32), CONFIG.max_tokens
    ids = lambda: rng.integers(0, MODEL.vocab_size, length).astype(np.int32)
    return [
        PackItem(ids(), ones, {"rollout_logprobs": -8 * ones, "advantages": ones})
        for _ in range(CONFIG.trajectories_per_step)
    ]


def main() -> None:
    meshes = make_meshes(CONFIG)
    mesh = meshes[POLICY]
    plan = make_plan(CONFIG, open_target(parse_topology("cpu")))
    planned: dict[str, float] = {}
    for phase in plan.phases:
        group = phase.name.split(":")[0]
        planned[group] = max(planned.get(group, 0.0), phase.peak)
    stage = make_stages(CONFIG, MODEL, meshes)[-1]
    engine = NativeEngine(CONFIG.rollout, MODEL, mesh)
    with jax.set_mesh(mesh):
        make = jax.jit(models.init, static_argnums=0, out_shardings=stage.policy.param_shardings)
        state = stage.init_state(make(MODEL, jax.random.key(0)))
    prompts = [Request(tuple(range(1, CONFIG.max_prompt_tokens + 1)), i, 8, 64) for i in range(2)]
    engine.warm_up(CONFIG.max_prompt_tokens, CONFIG.max_response_tokens, [CONFIG.rollout.sampling])
    for step in range(4):
        if step < 2:  # the first compiles
            peaks: dict[str, int] = {}
        with measured(peaks, "rollout"):
            engine.publish(state.params, 0)
            engine.generate(prompts, CONFIG.rollout.sampling, jax.random.key(0))
        engine.release_memory()
        batch = items()
        with measured(peaks, "score"):
            stage.score(state, batch, None)
        with measured(peaks, "update"):
            state, metrics = stage.update(state, [batch[:8], batch[8:]], 0)
            jax.block_until_ready((state, metrics))
    del state, metrics, make
    trim()
    base = resident("VmRSS")
    print(json.dumps({name: [planned[name], peaks[name] - base] for name in peaks}))


if __name__ == "__main__":
    main()
