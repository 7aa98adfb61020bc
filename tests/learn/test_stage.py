"""The models of a stage: the critic learns beside the policy, the frozen ones are evaluated only once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import models
from jaxrl_llm.algos import distill, dpo, grpo, ppo, sft, value
from jaxrl_llm.builders.warm_up import loss_signals
from jaxrl_llm.data.packing import PackItem, from_trajectory
from jaxrl_llm.learn import credit
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.reference import freeze
from jaxrl_llm.learn.scoring import policy_scores
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.structs import Trajectory

MODEL = TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8
)
VALUED = dataclasses.replace(MODEL, value_head=True)
STEP = StepConfig(row_tokens=32, rows=4)


ONE = MeshConfig(fsdp=1)


def learner(algo, model=MODEL, rate=0.3, mesh=ONE, *, devices=1):
    return Learner(algo, model, optax.sgd(rate), STEP, mesh=make_mesh(mesh, jax.devices()[:devices]))


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


@pytest.mark.parametrize(
    ("mesh", "devices"), [(ONE, 1), pytest.param(MeshConfig(fsdp=2, tensor=2), 4, marks=pytest.mark.slow)]
)
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
    real = stage.policy.scorer.start
    monkeypatch.setattr(
        stage.policy.scorer,
        "start",
        lambda params, items, *a: asked.append(len(items)) or real(params, items, *a),
    )
    with jax.set_mesh(stage.policy.mesh):
        params = models.init(MODEL, jax.random.key(0))
        state = stage.init_state(jax.tree.map(jnp.copy, params))
        first, again = [*pair(0), *pair(1)], [*pair(1), *pair(2)]
        stage.score(state, first, params)
        stage.score(state, again, params)
    assert asked == [4, 2]
    np.testing.assert_array_equal(first[2].signals["ref_logprobs"], again[0].signals["ref_logprobs"])


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


def test_scores_do_not_depend_on_the_size_of_their_microbatches():
    """20 trajectories of 7 tokens, 4 in a row of 32: as 2 micro-batches of 4 rows, 5 of 1, or 1 of 16."""
    items = [from_trajectory(t) for t in trajectories(20)]
    params, results = models.init(VALUED, jax.random.key(0)), {}
    for rows in (0, 1, 16):
        step, mesh = dataclasses.replace(STEP, score_rows=rows), make_mesh(ONE, jax.devices()[:1])
        built = Learner(ppo.Config(), VALUED, optax.sgd(0.1), step, mesh=mesh)
        [program] = built.scorer.score_programs(params, ("logprobs", "values"))
        assert program.args[1].tokens.shape == (rows or 4, 32)
        calls, run = [], built.scorer.run
        built.scorer.run = lambda p, batch, run=run, calls=calls, **kw: (
            calls.append(batch) or run(p, batch, **kw)
        )
        results[rows] = built.scorer.start(params, items, ("logprobs", "values"))()
        assert [len(batch.tokens) for batch in calls] == {0: [4, 4], 1: [1] * 5, 16: [16]}[rows]
    for rows in (1, 16):
        for one, other in zip(results[0], results[rows], strict=True):
            for name in ("logprobs", "values"):
                np.testing.assert_allclose(one[name], other[name], atol=1e-6)
    assert np.abs(results[0][0]["logprobs"]).max() > 3


def test_entropy_is_scored_before_the_update_and_steers_its_bonus():
    """A random model's entropy is near log 64 = 4.16 nats, below the target of 4.5."""
    algo = grpo.Config(
        kl_coef=0.0, top_entropy=0.25, entropy_target=4.5, entropy_coef=0.01, entropy_delta=0.02
    )
    stage = Stage(learner(algo))
    assert policy_scores(stage.requires, StepConfig(1, 1)) == ("entropy",)
    with jax.set_mesh(stage.policy.mesh):
        state, batch = stage.init_state(models.init(MODEL, jax.random.key(0))), trajectories()
        items, applied = [from_trajectory(t) for t in batch], []
        for step in range(2):
            stage.score(state, items, None)
            trained = credit.assign_credit(algo, items, batch, 0.0, seed=step)
            state, metrics = stage.update(state, [trained], step)
            applied.append(float(metrics["entropy_coef"]))
    entropy = np.concatenate([item.signals["entropy"][3:] for item in items])
    advantages = np.concatenate([item.signals["advantages"][3:] for item in trained])
    assert (advantages != 0).sum() == 8 == len(entropy) // 4
    assert entropy[advantages != 0].min() >= entropy[advantages == 0].max()
    np.testing.assert_allclose(applied, [0.0, 0.03], atol=1e-7)
    np.testing.assert_allclose(state.entropy_coef, [0.05, 0.05], atol=1e-7)


def test_a_frozen_reference_computes_what_the_policy_computes_in_bfloat16():
    """The policy reads its norms in float32; weights that are no numbers of bfloat16, as after a warm-up."""
    params = models.init(MODEL, jax.random.key(0))
    drawn = jax.random.normal(jax.random.key(1), params.layers.attention_norm.shape)
    params.layers.attention_norm[...] += 0.003 * drawn
    tokens, positions = jnp.arange(1, 9)[None], jnp.arange(8)[None]
    run = jax.jit(lambda weights: weights(tokens, positions, jnp.ones_like(tokens), dtype=jnp.bfloat16))
    np.testing.assert_array_equal(run(freeze(params, "bfloat16")), run(params))


def test_a_critic_that_is_not_updated_adds_no_signals_and_no_kl_needs_no_reference():
    """The warm-up is supervised, with the critic only in its state; teachers stand in for the reference."""
    supervised, critic = learner(sft.Config()), learner(value.Config(), VALUED)
    assert loss_signals(Stage(supervised, critic=critic, updates_critic=False)) == ()
    assert set(loss_signals(Stage(supervised, critic=critic))) == {"values", "returns"}
    assert set(loss_signals(Stage(supervised))) == set()
    wanted = {0.0: False, 0.1: True}
    assert {coef: Stage(learner(grpo.Config(kl_coef=coef))).needs_reference for coef in wanted} == wanted
    assert not Stage(learner(grpo.Config(kl_coef=0.1)), teachers=(None,)).needs_reference
