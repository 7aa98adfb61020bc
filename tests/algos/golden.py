"""The small case that veRL, OpenRLHF and ChatLearn were run on, and a step of rollouts to go with it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algos import of
from jaxrl_llm.structs import LossInputs, Rollouts

POLICY = jnp.array([[-0.5, -1, -2, -0.1], [-1.5, -0.3, -0.7, -0.2]])
OLD = jnp.array([[-0.7, -0.9, -2.5, -0.1], [-1, -0.3, -1.2, -0.9]])
ROLLOUT = jnp.array([[-0.6, -1.1, -2.2, -0.15], [-1.2, -0.25, -1, -0.8]])
MASK = jnp.array([[1.0, 1, 1, 0], [1, 1, 1, 1]])
ADVANTAGES = jnp.array([[1.0] * 4, [-1.0] * 4])
SEGMENTS = jnp.ones((2, 4), jnp.int32)


def loss_inputs(logprobs=POLICY, **kwargs):
    """Two sequences of 3 and 4 tokens, a row each."""
    fields = dict(
        mask=MASK,
        segments=SEGMENTS,
        lengths=jnp.array([[3.0] * 4, [4.0] * 4]),
        num_tokens=jnp.float32(7),
        num_sequences=jnp.float32(2),
        old_logprobs=OLD,
        advantages=ADVANTAGES,
        ref_logprobs=OLD,
        entropy=jnp.ones((2, 4)),
    )
    return LossInputs(logprobs=logprobs, **{**fields, **kwargs})


LENGTHS = np.array([3, 5, 2, 4])
OWN = jnp.asarray(np.arange(5) < LENGTHS[:, None], jnp.float32)
VALUES = jnp.array([[0.1, 0.2, 0.3, 0, 0], [0.5, 0.4, 0.3, 0.2, 0.1], [0, 0.1, 0, 0, 0], [0.2] * 4 + [0]])

TURNS = dict(
    turns=jnp.array([[0, 0, 1, 0, 0], [0, 0, 1, 1, 2], [0, 1, 0, 0, 0], [0, 0, 1, 1, 0]]),
    turn_rewards=jnp.array([[0, 0.3, 0, 0, 0], [0, 0, 0, -0.5, 0.5], [0, 2, 0, 0, 0], [0, 0.2, 0, 0, 0]]),
    states=jnp.array([[0, 0, 1, 0, 0], [0, 0, 1, 1, 1], [2, 3, 0, 0, 0], [2, 2, 3, 3, 0]]),
)
"""Turns of the rollouts' responses; the places that no response has are 0."""


def rollouts(**kwargs):
    """Two prompts with two responses each."""
    random = np.random.default_rng(0)
    logprobs = lambda: -jnp.asarray(random.uniform(0.1, 2, OWN.shape), jnp.float32) * OWN
    fields = dict(
        rewards=jnp.array([1.0, 0.0, 2.0, 0.5]),
        group=jnp.array([0, 0, 1, 1]),
        mask=OWN,
        valid=jnp.ones(4),
        truncated=jnp.array([0.0, 1, 0, 0]),
        components=jnp.array([[1.0, 0], [0, 0], [1, 1], [0, 0.5]]),
        greedy=jnp.array([0.25, 0.25, 1, 1]),
        old_logprobs=logprobs(),
        rollout_logprobs=logprobs(),
        ref_logprobs=logprobs(),
        values=VALUES,
        sum_pi_squared=jnp.asarray(random.uniform(0.1, 0.9, OWN.shape), jnp.float32) * OWN,
        kl_coef=jnp.float32(0.5),
    )
    return Rollouts(**{**fields, **kwargs})


@functools.partial(jax.jit, static_argnums=1)
def advantages(rollouts, config):
    """Those of the config's algorithm, compiled as in a run."""
    return of(config).advantages(rollouts, config)
