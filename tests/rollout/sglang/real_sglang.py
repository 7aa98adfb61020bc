"""Real SGLang servers on a CPU, of the interpreter JAXRL_SGLANG_PYTHON (scripts/sglang_cpu/install.sh)."""

import contextlib
import os

import jax
import numpy as np
import pytest
from test_sglang import TOKENIZER

from jaxrl_llm.hf.export import save_description
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.scorer import make_scorer
from jaxrl_llm.rollout.config import RolloutConfig, SGLangConfig
from jaxrl_llm.rollout.sglang.engine import SGLangEngine
from jaxrl_llm.rollout.sglang.launch import Launched
from jaxrl_llm.rollout.sglang.pool import ServerPool
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh

PYTHON = os.environ.get("JAXRL_SGLANG_PYTHON", "")
NEEDED = pytest.mark.skipif(not PYTHON, reason="JAXRL_SGLANG_PYTHON names no interpreter with SGLang")
FLAGS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --max-total-tokens 4096 "
    "--disable-overlap-schedule"
)
MODEL = TransformerConfig(
    vocab_size=128, hidden_size=64, mlp_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    initializer_range=0.3, max_position=256,
)  # fmt: skip
CONFIG = RolloutConfig(engine="sglang", launch=2, slots=8)


@contextlib.contextmanager
def started(folder, servers=2, flags=FLAGS, **settings):
    """Servers of our own that answer; they end with the block."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGLANG_USE_CPU_ENGINE", "1")
        shell = save_description(MODEL, folder / "shell", TOKENIZER, "float32")
        config = RolloutConfig(engine="sglang", launch=servers, slots=CONFIG.slots)
        launched = Launched(config, SGLangConfig(python=PYTHON, flags=flags, **settings), shell, folder)
        try:
            launched.wait()
            yield launched
        finally:
            launched.close()


def engine_on(urls, transport, **settings):
    """An engine that uses these servers, with a pool of its own."""
    sglang = SGLangConfig(python=PYTHON, flags=FLAGS, **settings)
    pool = ServerPool(urls, sglang.timeout, sglang.retries, CONFIG.slots, sglang.patience, sglang.router)
    scorer = make_scorer(MODEL, 1.0, "float32", make_mesh(MeshConfig(), jax.devices()[:1]))
    score = lambda params, ids: np.asarray(scorer(params, ids[None], np.array([len(ids)])))[0, :-1]
    return SGLangEngine(CONFIG, sglang, MODEL, pool, transport, score, lambda value: value, TOKENIZER)
