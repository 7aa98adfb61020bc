"""Pushes of changed bits to a real SGLang server on a CPU (`make test-sglang`); vLLM: test_vllm_real.py."""

import jax
import numpy as np
import pytest
from real_sglang import MODEL, NEEDED, engine_on, started
from servers_shared import until

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


def trained(params, seed):
    """The weights after a step: 1% of the entries moves, of some tensors none."""
    rng = np.random.default_rng(seed)

    def moved(leaf):
        values = np.array(leaf)
        chosen = rng.random(values.shape) < 0.01 * (rng.random() < 0.8)
        values[chosen] += rng.normal(0, 1e-2, chosen.sum()).astype(np.float32)
        return jax.numpy.asarray(values)

    return jax.tree.map(moved, params)


def scores(engine):
    """Log-probs of 99 tokens."""
    tokens = ((np.arange(100) * 7919 + 3) % MODEL.vocab_size).tolist()
    receiver = Receiver(engine.pool, engine.pool.servers[0])
    return np.array(engine.pool.run(engine.pool.kind.score(receiver, tokens, ""))[1])


def test_pushes_of_changes_leave_what_a_full_push_leaves_and_an_error_ends_the_server(launched):
    engine = engine_on(launched.urls, DeltaTransport(SOURCE, KINDS["sglang"]), patience=0.0)
    params = models.init(MODEL, jax.random.key(0))
    assert engine.publish(params, 0)["bridge/full_pushes"] == 1
    for version in range(1, 51):
        params = trained(params, version)
        metrics = engine.publish(params, version)
        assert metrics["bridge/full_pushes"] == 0 and metrics["bridge/sent_fraction"] < 0.05
        assert metrics["bridge/probe_mean_abs"] < 1e-5
    changed = scores(engine)
    full = engine_on(launched.urls, HttpTransport(SOURCE, KINDS["sglang"]), patience=0.0)
    assert full.publish(params, 51)["bridge/sent_fraction"] == 1
    np.testing.assert_array_equal(changed, scores(full))
    # SGLang has no reply for a failed loader: changes of another version end the server.
    assert engine.publish(trained(params, 52), 52)["bridge/full_pushes"] == 1
    lost = next(engine.publisher.transport.parts(trained(params, 53), "lost"))
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
