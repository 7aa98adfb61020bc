"""FP8 weights to real SGLang servers on a CPU: loaded by SGLang's own code, dequantized to multiply."""

import contextlib
import functools
import sys

import jax
import numpy as np
import pytest
from real_sglang import FLAGS, NEEDED, engine_on, started
from servers_shared import one_device
from test_bridge_real import TRANSPORTS
from test_fp8 import EXPERTS, MODEL

from jaxrl_llm import models
from jaxrl_llm.bridge import fp8
from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.push import make_receiver
from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.bridge.transports.http_weights import HttpTransport
from jaxrl_llm.bridge.transports.process_group import GroupTransport
from jaxrl_llm.learn.scoring import sequence_scorer
from jaxrl_llm.rollout.servers.kinds import KINDS

pytestmark = NEEDED
TOLERANCE = 0.02  # nats: both compute in bfloat16


@pytest.fixture(scope="module", params=[MODEL, EXPERTS], ids=["dense", "experts"])
def launched(request, tmp_path_factory):
    """(model, a server of it)"""
    flags = f"{FLAGS} --dtype bfloat16"
    with started(tmp_path_factory.mktemp("fp8"), 1, flags, fp8.FLAGS, model=request.param) as servers:
        yield request.param, servers


@contextlib.contextmanager
def engine_by(launched, transport, folder):
    model, servers = launched
    source = WeightSource(model, "bfloat16", 100_000, fp8.quantized_tensors)
    made = {
        "disk": lambda: DiskTransport(folder, "bfloat16", encode=fp8.quantized_tensors),
        "http": lambda: HttpTransport(source, KINDS["sglang"]),
        "group": lambda: GroupTransport(source, KINDS["sglang"], python=sys.executable, timeout=60.0),
    }[transport]()
    engine = engine_on(servers.urls, made, model, probe_tolerance=TOLERANCE)
    engine.publisher.problem = fp8.quantization_problem
    served = functools.partial(fp8.rounded_params, dtype="bfloat16")
    engine.publisher.score, engine.publisher.served_params = sequence_scorer("bfloat16", one_device()), served
    yield engine
    if transport == "group":
        made.close()
    engine.pool.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_pushes_and_servers_compute_with_the_rounded_weights(launched, transport, tmp_path):
    plain = sequence_scorer("bfloat16", one_device())
    with engine_by(launched, transport, tmp_path) as engine:
        for seed in (0, 1):
            params = models.init(launched[0], jax.random.key(seed))
            difference = engine.publish(params, seed)["bridge/probe_mean_abs"]
            ids = engine.publisher.probe_ids
            effect = np.abs(plain(engine.publisher.served_params(params), ids) - plain(params, ids)).mean()
            print(transport, f"probe {difference:.2g}, effect of rounding {effect:.2g}")
            assert difference < TOLERANCE and difference < effect / 3


def test_a_server_says_that_it_has_the_flags(launched, tmp_path):
    with engine_by(launched, "http", tmp_path) as engine:
        pool = engine.pool
        pool.run(make_receiver(pool, pool.servers[0], fp8.quantization_problem))
