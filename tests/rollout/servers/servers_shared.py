"""A tiny model, its requests, and engines for it: what the tests of SGLang share."""

import functools
import time
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm import models
from jaxrl_llm.bridge import vllm
from jaxrl_llm.bridge.adapters import AdapterPublisher, server_problem
from jaxrl_llm.bridge.probe import tolerance_of
from jaxrl_llm.bridge.push import Publisher
from jaxrl_llm.bridge.servers import Receiver
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.learn.scoring import sequence_scorer
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig, ServersConfig
from jaxrl_llm.rollout.engine import Request
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.servers.engine import ServerEngine
from jaxrl_llm.rollout.servers.kinds import KINDS
from jaxrl_llm.rollout.servers.launch import ServerProcesses
from jaxrl_llm.rollout.servers.pool import ServerPool
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

TOKENIZER = make_tokenizer()
MODEL = TransformerConfig(
    vocab_size=128, hidden_size=32, mlp_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.3, max_position=128,
)  # fmt: skip
KEY = jax.random.key(3)
GREEDY = SamplingConfig(temperature=0.0)
STUB = str(Path(__file__).parent / "stub")
ROLLOUT = RolloutConfig(engine="sglang", servers=("http://x",))


@functools.cache
def one_device():
    return make_mesh(MeshConfig(), jax.devices()[:1])


@functools.cache
def score_of(model):
    return sequence_scorer("float32", one_device())


def engine_for(
    urls, transport, model=MODEL, slots=4, *, rollout=ROLLOUT, routes=True, folder=None, **settings
):
    """An engine with a pool of its own, which asks for the routes of a model with experts; `settings`
    are of ServersConfig."""
    config = ServersConfig(**settings)
    pool = ServerPool(
        urls,
        config.timeout,
        config.retries,
        slots,
        patience=config.patience,
        router=config.router,
        kind=KINDS[rollout.engine],
    )
    tolerance = tolerance_of("float32", config.probe_tolerance)
    on_first = lambda work: work()
    publisher = Publisher(
        pool, transport, config.pause, model, tolerance=tolerance, score=score_of(model), on_first=on_first
    )
    if model.lora and folder:
        size = {"rank": model.lora.rank, "max_versions": 2}
        publisher.problem = functools.partial(vllm.adapter_problem, **size)
        publisher = AdapterPublisher(publisher, "float32", folder)
    elif model.lora:
        publisher.problem = functools.partial(server_problem, lora=model.lora, max_versions=2)
        publisher = AdapterPublisher(publisher, "float32")
    routes = routes and bool(model.moe)
    return ServerEngine(
        rollout,
        config,
        model,
        pool,
        publisher=publisher,
        on_first=on_first,
        tokenizer=TOKENIZER,
        routes=routes,
    )


def weights(seed=0, model=MODEL):
    return models.init(model, jax.random.key(seed))


def requests(prompts=3, responses=2, tokens=12):
    rng = np.random.default_rng(0)
    return [
        Request(rng.integers(2, 90, 4 + i).astype(np.int32), i, responses, tokens) for i in range(prompts)
    ]


@functools.cache
def native_engine(model):
    return NativeEngine(RolloutConfig(slots=4), model, one_device(), TOKENIZER, routes=bool(model.moe))


def native(params, sampling, todo=None, model=MODEL):
    """The same by the native engine."""
    engine = native_engine(model)
    engine.publish(params, 0)
    return engine.generate(todo or requests(), sampling, KEY)


def ids(trajectories):
    return [t.response_ids.tolist() for t in trajectories]


def until(true, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def launch(tmp_path, count=1, **settings):
    """Server processes of a model that is a folder with a config.json."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = RolloutConfig(engine="sglang", launch=count)
    return ServerProcesses(config, ServersConfig(**settings), model, tmp_path / "logs")


def one_percent_moved(params, seed):
    """The weights after a step: 1% of the entries moves, of some tensors none."""
    rng = np.random.default_rng(seed)

    def moved(leaf):
        values = np.array(leaf)
        chosen = rng.random(values.shape) < 0.01 * (rng.random() < 0.8)
        values[chosen] += rng.normal(0, 1e-2, chosen.sum()).astype(np.float32)
        return jax.numpy.asarray(values)

    return jax.tree.map(moved, params)


def served_logprobs(engine, count, vocab_size=MODEL.vocab_size):
    """Return the first server's log-probs of `count` fixed tokens but the first."""
    tokens = ((np.arange(count) * 7919 + 3) % vocab_size).tolist()
    receiver = Receiver(engine.pool, engine.pool.servers[0])
    return np.array(engine.pool.run(engine.pool.kind.score(receiver, tokens, ""))[1])
