"""Two processes of four devices run one schedule and get the text of one device."""

import json

import pytest
from distributed import run_processes

SCRIPT = """
import json, sys
import jax, numpy as np
from jaxrl_llm import models
from jaxrl_llm.rollout.engine import Request
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN

model = models.TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.3,
)
data, fsdp, tensor = json.loads(sys.argv[1])
mesh = make_mesh(MeshConfig(data, fsdp, tensor))
make = jax.jit(models.init, static_argnums=0, out_shardings=models.shardings(model, mesh, TRAIN))
engine = NativeEngine(RolloutConfig(slots=4, chunk=8), model, mesh, eos_ids=(1,))
engine.publish(make(model, jax.random.key(0)), 0)
prompts = [np.arange(2, 2 + n, dtype=np.int32) for n in (5, 9)]
requests = [Request(p, i, 3, 12) for i, p in enumerate(prompts)]
out = engine.generate(requests, SamplingConfig(), jax.random.key(1))
print(json.dumps([t.response_ids.tolist() for t in out]))
"""


@pytest.mark.slow
def test_two_processes_get_the_text_of_one_device():
    both = run_processes(SCRIPT, 2, ["[2, 1, 2]"], devices=2)
    alone = run_processes(SCRIPT, 1, ["[1, 1, 1]"], devices=1)
    first, second, expected = (json.loads(out.splitlines()[-1]) for out in both + alone)
    assert first == second == expected
    assert len(expected) == 6
