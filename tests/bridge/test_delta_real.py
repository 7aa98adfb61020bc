"""Pushes of changed bits to a real SGLang server on a CPU (`make test-sglang`); vLLM: test_vllm_real.py."""

import jax
import numpy as np
import pytest
from real_sglang import MODEL, NEEDED, engine_on, started
from servers_shared import one_percent_moved, served_logprobs, until

from jaxrl_llm import models
from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.servers import Receiver
from jaxrl_llm.bridge.sglang import LOADER_FLAGS
from jaxrl_llm.bridge.transports.delta import DeltaTransport
from jaxrl_llm.bridge.transports.http_weights import HttpTransport
from jaxrl_llm.errors import ServerError
from jaxrl_llm.rollout.servers.kinds import KINDS

pytestmark = NEEDED
SOURCE = WeightSource(MODEL, "float32", 40_000)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    with started(tmp_path_factory.mktemp("sglang"), servers=1, more_flags=LOADER_FLAGS) as servers:
        yield servers


def test_pushes_of_changes_leave_what_a_full_push_leaves_and_an_error_ends_the_server(launched):
    engine = engine_on(launched.urls, DeltaTransport(SOURCE, KINDS["sglang"]), patience=0.0)
    params = models.init(MODEL, jax.random.key(0))
    assert engine.publish(params, 0)["bridge/full_pushes"] == 1
    for version in range(1, 51):
        params = one_percent_moved(params, version)
        metrics = engine.publish(params, version)
        assert metrics["bridge/full_pushes"] == 0 and metrics["bridge/sent_fraction"] < 0.05
        assert metrics["bridge/probe_mean_abs"] < 1e-5
    changed = served_logprobs(engine, 100)
    full = engine_on(launched.urls, HttpTransport(SOURCE, KINDS["sglang"]), patience=0.0)
    assert full.publish(params, 51)["bridge/sent_fraction"] == 1
    np.testing.assert_array_equal(changed, served_logprobs(full, 100))
    # SGLang has no reply for a failed loader: changes of another version end the server.
    assert engine.publish(one_percent_moved(params, 52), 52)["bridge/full_pushes"] == 1
    lost = next(engine.publisher.transport.parts(one_percent_moved(params, 53), "lost"))
    receiver, kind = Receiver(engine.pool, engine.pool.servers[0]), KINDS["sglang"]
    engine.pool.run(receiver.update("/begin_weight_update", {}))
    send = lambda: engine.pool.run(
        kind.send_bucket(receiver, lost.content.changes, last=False, options=kind.update_options)
    )
    send()
    with pytest.raises(ServerError):
        send()
    until(lambda: launched.processes[0].poll() is not None, 60.0)
    full.pool.close()
    engine.pool.close()
