"""The models of a stage: the critic learns beside the policy, the frozen ones are evaluated only once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import models
from jaxrl_llm.algos import distill, dpo, ppo, value
from jaxrl_llm.data.packing import PackItem, from_trajectory
from jaxrl_llm.learn import credit
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.structs import Trajectory

MODEL = TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8
)
VALUED = dataclasses.replace(MODEL, value_head=True)
STEP = StepConfig(row_tokens=32, rows=4)


ONE = MeshConfig(fsdp=1)


def learner(algo, model=MODEL, rate=0.3, mesh=ONE, devices=1):
    return Learner(algo, model, optax.sgd(rate), STEP, make_mesh(mesh, jax.devices()[:devices]))


def trajectories(n=8):
    rng = np.random.default_rng(0)
    return [
        Trajectory(
            prompt_ids=rng.integers(1, 64, 3), response_ids=rng.integers(1, 64, 4), logprobs=np.full(4, -4.0),
            mask=np.ones(4), versions=np.zeros(4), prompt_index=i // 4, response_index=i % 4, finish="stop",
            reward=float(i % 2),
        )
        for i in range(n)
    ]  # fmt: skip


def ppo_steps(stage, params, steps):
    """(states, metrics) of each step on the same trajectories."""
    with jax.set_mesh(stage.policy.mesh):
        state, found = stage.init_state(params), []
        for step in range(steps):
            batch = trajectories()
            items = [from_trajectory(t) for t in batch]
            stage.score(state, items, None)
            items = credit.assign_credit(stage.policy.algo, items, batch, 0.0, seed=step)
            state, metrics = stage.update(state, [items], step)
            found.append((jax.tree.map(np.asarray, state), jax.device_get(metrics)))
    return found


@pytest.mark.parametrize(("mesh", "devices"), [(ONE, 1), (MeshConfig(fsdp=2, tensor=2), 4)])
def test_the_critic_learns_on_its_own_mesh_and_warms_up_alone(mesh, devices):
    algo = ppo.Config(kl_coef=0.0, lam=1.0)
    critic = learner(value.Config(value_clip=None), VALUED, mesh=mesh, devices=devices)
    stage = Stage(learner(algo), critic=critic, critic_warmup=2)
    params = models.init(MODEL, jax.random.key(0))
    before = np.asarray(params.layers.q)
    steps = ppo_steps(stage, params, 4)
    errors = [float(metrics["critic/value_error"]) for _, metrics in steps]
    assert errors[0] == pytest.approx(0.5)  # new values are 0, half the returns 1
    assert errors[-1] < 0.8 * errors[0]
    assert "loss" not in steps[1][1] and "loss" in steps[2][1]
    np.testing.assert_array_equal(steps[1][0].params.layers.q[...], before)
    assert np.abs(steps[2][0].params.layers.q[...] - before).max() > 0
    assert int(steps[-1][0].version) == 2 and int(steps[-1][0].critic.version) == 4


def test_a_shared_backbone_learns_both():
    stage = Stage(
        learner(ppo.Config(kl_coef=0.0, lam=1.0, critic="shared", vf_coef=1.0, value_clip=10.0), VALUED)
    )
    steps = ppo_steps(stage, models.init(VALUED, jax.random.key(0)), 3)
    losses = [float(metrics["value_loss"]) for _, metrics in steps]
    assert losses[0] == pytest.approx(0.25) and losses[-1] < losses[0]
    assert steps[0][0].critic is None


def pair(seed):
    rng = np.random.default_rng(seed)
    mask = np.array([0, 0, 1, 1, 1], np.float32)
    return [PackItem(rng.integers(1, 64, 5).astype(np.int32), mask) for _ in range(2)]


def test_a_frozen_reference_is_asked_once_for_a_row(monkeypatch):
    stage = Stage(learner(dpo.Config()))
    asked = []
    real = stage.policy.start
    monkeypatch.setattr(
        stage.policy, "start", lambda params, items, *a: asked.append(len(items)) or real(params, items, *a)
    )
    with jax.set_mesh(stage.policy.mesh):
        params = models.init(MODEL, jax.random.key(0))
        state = stage.init_state(jax.tree.map(jnp.copy, params))
        first, again = [*pair(0), *pair(1)], [*pair(1), *pair(2)]
        stage.score(state, first, params)
        stage.score(state, again, params)
    assert asked == [4, 2]
    np.testing.assert_array_equal(first[2].signals["reference"], again[0].signals["reference"])


def test_each_row_learns_from_its_own_teacher():
    """The divergence from a teacher that is the student itself is 0, from another it is not."""
    stage = Stage(learner(distill.Config(teachers=("a", "b"))))
    with jax.set_mesh(stage.policy.mesh):
        student, other = (models.init(MODEL, jax.random.key(i)) for i in range(2))
        stage.teachers = (jax.tree.map(jnp.copy, student), other)
        state = stage.init_state(student)
        found = []
        for teacher in (0, 1):
            item = pair(0)[0]
            item.signals["labels"] = np.full(5, float(teacher), np.float32)
            found.append(float(stage.measure(state, [item], None)["divergence"]))
    assert found[0] == pytest.approx(0.0, abs=1e-6)
    assert found[1] > 1e-4
