"""Several passes over a step's mini-batches, against a loop written by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_models import random_params

from jaxrl_llm import models
from jaxrl_llm.algos import grpo
from jaxrl_llm.data.packing import from_trajectory
from jaxrl_llm.learn.credit import split_minibatches
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.stage import Experience, Stage
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.structs import TrainState, Trajectory

MODEL = TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8
)
RATE, CLIP, EPOCHS, SEED = 0.5, 0.05, 3, 7


def trajectories():
    """Two groups of four responses, of 3 to 6 tokens after 3; rewards 0 and 1 in turn."""
    rng = np.random.default_rng(0)
    return [
        Trajectory(
            prompt_ids=rng.integers(1, 64, 3), response_ids=rng.integers(1, 64, n := 3 + i % 4),
            logprobs=np.full(n, -4.0), mask=np.ones(n), versions=np.zeros(n), prompt_index=i // 4,
            response_index=i % 4, finish="stop", reward=float(i % 2),
        )
        for i in range(8)
    ]  # fmt: skip


def built(algo, model=MODEL, **settings):
    step = StepConfig(row_tokens=32, rows=4, max_grad_norm=0.0, **settings)
    return Learner(algo, model, optax.sgd(RATE), step, mesh=make_mesh(MeshConfig(fsdp=1), jax.devices()[:1]))


def stepped(stage, params):
    """State and metrics after one step."""
    items = [from_trajectory(t) for t in trajectories()]
    with jax.set_mesh(stage.policy.mesh):
        state = stage.init_state(jax.tree.map(jnp.copy, params))
        experience = Experience(items, {}, 0, [], trajectories=trajectories())
        minibatches = stage.prepare(state, experience, None, seed=SEED)
        state, metrics = stage.update(state, minibatches, 0)
    return state, {name: float(x) for name, x in metrics.items()}


def by_hand(params, epochs):
    """Weights and mean loss of GRPO with plain SGD: one sequence a row, no micro-batches."""
    rows = [np.concatenate([t.prompt_ids, t.response_ids]) for t in trajectories()]
    tokens = jnp.asarray(np.stack([np.pad(row, (0, 9 - len(row))) for row in rows]))
    mask = jnp.asarray([[3 <= place < len(row) for place in range(1, 9)] for row in rows])
    advantages = jnp.arange(8)[:, None] % 2 - 0.5  # reward minus the mean of its group

    def logprobs(params):
        hidden = params(tokens, jnp.tile(jnp.arange(9), (8, 1)))
        logits = jax.nn.log_softmax(hidden @ params.head.T)
        return jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], 2)[..., 0]

    old = logprobs(params)

    def loss(params, chosen):
        ratio = jnp.exp(logprobs(params) - old)
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        counted = mask & chosen[:, None]
        objective = jnp.minimum(ratio * advantages, clipped * advantages)
        return -jnp.where(counted, objective, 0.0).sum() / counted.sum()

    losses, step = [], jax.jit(jax.value_and_grad(loss))
    for epoch in range(epochs):
        order = np.random.default_rng([SEED, epoch]).permutation(8)
        for chosen in (order[:4], order[4:]):
            value, gradient = step(params, jnp.zeros(8, bool).at[chosen].set(True))
            params = jax.tree.map(lambda p, g: p - RATE * g, params, gradient)
            losses.append(float(value))
    return params, np.mean(losses)


@pytest.mark.slow
def test_epochs_are_those_of_a_loop_by_hand():
    algo = grpo.Config(kl_coef=0.0, scale="none", aggregation="token", clip_low=CLIP, clip_high=CLIP)
    stage = Stage(built(algo, old_logprobs_source="recompute"), minibatches=2, epochs=EPOCHS)
    params = jax.tree.map(jnp.asarray, random_params(MODEL))
    state, metrics = stepped(stage, params)
    expected, loss = by_hand(params, EPOCHS)
    assert int(state.version) == 2 * EPOCHS
    assert metrics["loss"] == pytest.approx(loss, abs=2e-6)
    assert metrics["clip_fraction"] > 0.05  # of epochs in which the policy has moved
    for name, leaf in models.named_leaves(state.params):
        np.testing.assert_allclose(leaf, dict(models.named_leaves(expected))[name], atol=2e-6, err_msg=name)
    change = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), expected, params)
    assert max(jax.tree.leaves(change)) > 0.01


class Recorder:
    """A model that counts its updates."""

    algo = grpo.Config()

    def update(self, state, minibatches, teachers=()):
        return dataclasses.replace(state, version=state.version + len(minibatches)), {}


def test_the_critic_learns_in_every_epoch():
    state = TrainState({}, (), 0, 0, kl_coef=0.0, critic=TrainState({}, (), 0, 0, kl_coef=0.0))
    minibatches = split_minibatches([from_trajectory(t) for t in trajectories()], 2, SEED, epochs=EPOCHS)
    state, _ = Stage(Recorder(), critic=Recorder(), critic_warmup=1).update(state, minibatches, step=1)
    assert (state.version, state.critic.version) == (6, 6)
