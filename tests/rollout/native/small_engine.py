"""One small model, its engines, requests and results, shared by the tests of the native engine.

An engine compiles for seconds, so tests that need no other setting share `engine()` and `base()`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from random_weights import random_params

from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig
from jaxrl_llm.rollout.engine import Request
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

MODEL = TransformerConfig(
    vocab_size=128, hidden_size=32, mlp_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.3, max_position=128,
)  # fmt: skip
EOS = 1
KEY = jax.random.key(7)
VERSION = 7
LIMIT = 40  # response tokens
WIDTH = 80  # longest prompt and response together; the ring grows from 64 to 80


def params():
    return random_params(MODEL)


def new_engine(mesh=(1, 1, 1), **settings):
    data, fsdp, tensor = mesh
    mesh = make_mesh(MeshConfig(data, fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor])
    return NativeEngine(RolloutConfig(**settings), MODEL, mesh, make_tokenizer())


@functools.cache
def engine(mesh=(1, 1, 1), **settings):
    """The engine with weights; by default of two slots, so that responses wait, are refilled and shrink."""
    built = new_engine(mesh, **{"slots": 2, "chunk": 8, **settings})
    built.publish(params(), VERSION)
    return built


@functools.cache
def requests():
    """Three responses each to prompts of 5, 1, 9, 40 tokens; and to the last one again, as another group."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 128, n).astype(np.int32) for n in (5, 1, 9, 40)]
    return [Request(prompt, 10 + i, 3, LIMIT) for i, prompt in enumerate([*prompts, prompts[-1]])]


@functools.cache
def base(temperature=1.0):
    return engine().generate(requests(), SamplingConfig(temperature=temperature), KEY)


@functools.cache
def forward():
    def logprobs(tokens, temperature):
        hidden = params()(tokens[None], jnp.arange(WIDTH)[None])
        return jax.nn.log_softmax(hidden[0] @ params().head.T / temperature)

    return jax.jit(logprobs)


def expected_logprobs(prompt, response, temperature=1.0):
    """[R, V] of the training forward, at the places that predict the response."""
    tokens = np.zeros(WIDTH, np.int32)
    tokens[: len(prompt)] = prompt
    tokens[len(prompt) : len(prompt) + len(response)] = response
    return np.asarray(forward()(tokens, temperature))[len(prompt) - 1 :][: len(response)]


def ids(trajectories):
    return [t.response_ids.tolist() for t in trajectories]


def assert_same(got, expected, atol=2e-5):
    """Same text, ends and, to rounding, log-probs."""
    assert ids(got) == ids(expected)
    assert [t.finish for t in got] == [t.finish for t in expected]
    for t, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(t.logprobs, other.logprobs, atol=atol)
