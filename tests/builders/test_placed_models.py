"""Reference, critic and teachers on meshes and devices of their own give the step of one device."""

import functools
from dataclasses import replace
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from jax._src.array import ArrayImpl
from slow_cases import with_slow

from jaxrl_llm import models
from jaxrl_llm.algos import gkd, grpo, ppo
from jaxrl_llm.builders.models import has_own_reference, make_stages, trained_config
from jaxrl_llm.builders.run import resident_bytes
from jaxrl_llm.builders.sizes import make_meshes
from jaxrl_llm.builders.weights import load_frozen
from jaxrl_llm.config import (
    CriticConfig,
    EvalConfig,
    LoraConfig,
    MeshConfig,
    OptimConfig,
    ReferenceConfig,
    RewardConfig,
    RewardModelConfig,
    RolloutConfig,
    TrainConfig,
    WarmStartConfig,
)
from jaxrl_llm.data.packing import PackItem, from_trajectory
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.export import save_description
from jaxrl_llm.learn.reference import Reference
from jaxrl_llm.learn.scoring import Scorer
from jaxrl_llm.learn.stage import Experience
from jaxrl_llm.models import TransformerConfig, lora
from jaxrl_llm.recipe.checks import architectures, check_models, check_on_devices
from jaxrl_llm.sharding.config import POLICY, REFERENCE, PlacementConfig
from jaxrl_llm.sharding.placement import devices_of
from jaxrl_llm.sharding.rules import TRAIN
from jaxrl_llm.structs import Trajectory
from jaxrl_llm.tools.devices import SeenDevice

MODEL = TransformerConfig(
    vocab_size=64, hidden_size=16, mlp_size=16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4,
    initializer_range=0.3,
)  # fmt: skip
OPTIM = OptimConfig(name="sgd", learning_rate=0.1, schedule="constant", warmup_steps=0)
BASE = TrainConfig(
    optim=OPTIM, prompts_per_step=2, responses_per_prompt=4, tokens_per_device=16, max_prompt_tokens=4,
    max_response_tokens=4, devices="0:1",
)  # fmt: skip
OTHER_LAYOUT = PlacementConfig(mesh=MeshConfig(tensor=2))
OTHER_DEVICES = PlacementConfig(mesh=MeshConfig(tensor=2), devices="4:8")
CASES = {
    "grpo": dict(algo=grpo.Config(kl_coef=0.1)),
    "adapters": dict(algo=grpo.Config(kl_coef=0.1), lora=LoraConfig(rank=2)),
    "ppo": dict(algo=ppo.Config(kl_coef=0.0), critic=CriticConfig(path="critic", optim=OPTIM)),
    "other": dict(algo=grpo.Config(kl_coef=0.1), reference=ReferenceConfig(path="other")),
    "gkd": dict(algo=gkd.Config(teachers=("teacher",))),
    "gkd of one sample": dict(algo=gkd.Config(teachers=("teacher",), form="policy_gradient")),
}
ROLES = {"grpo": "reference", "adapters": "reference", "ppo": "critic", "gkd": "teacher"}
ROLES["gkd of one sample"] = "teacher"


class RandomModels:
    """`hf.load.PretrainedModels` with random weights, a function of the name."""

    def config(self, path):
        return MODEL

    def params(self, path, config, shardings, dtype):
        make = jax.jit(models.init, static_argnums=0, out_shardings=shardings)
        return jax.tree.map(lambda w: w.astype(dtype), make(config, jax.random.key(len(path))))


def test_asynchronous_rollout_shares_no_device():
    def refusal(rollout, **fields):
        config = replace(BASE, rollout=RolloutConfig(max_staleness=1, devices=rollout), **fields)
        with pytest.raises(UserError) as raised:
            check_on_devices(config, devices)
        return str(raised.value)

    devices = jax.devices()
    assert "--rollout.devices 0:2 and --devices have 1 device(s) in common. Set --devices to" in refusal(
        "0:2"
    )
    shared = refusal("4:8", reference=PlacementConfig(devices="6:8"))
    assert "--rollout.devices 4:8 and --reference.devices have 2 device(s) in common" in shared
    alone = replace(BASE, devices="0:2", rollout=RolloutConfig(max_staleness=1, devices="4:8"))
    assert make_meshes(alone)["rollout."].size == 4
    devices = [SeenDevice(i, i // 8, "cpu") for i in range(16)]
    assert "on CPUs with several processes the rollout must" in refusal("4:8", devices="0:2")


def trajectories(seed, n=8):
    rng = np.random.default_rng(seed)
    ids = lambda length: rng.integers(1, 64, length).astype(np.int32)
    return [
        Trajectory(
            prompt_ids=ids(3), response_ids=ids(4), logprobs=np.full(4, -4.0, np.float32), mask=np.ones(4),
            versions=np.zeros(4), prompt_index=i // 4, response_index=i % 4, finish="stop",
            reward=float(i % 2),
        )
        for i in range(n)
    ]  # fmt: skip


def built(case, role=None, placement=None, tmp_path=Path(), *, offload=False):
    """(stage, state, reference) of a case, one role placed elsewhere than the policy."""
    config = replace(BASE, model=replace(BASE.model, dtype="float32"), **CASES[case])
    config = replace(config, reference=replace(config.reference, offload=offload))
    if role:
        own = getattr(config, role)
        placed = {"mesh": placement.mesh, "devices": placement.devices}
        config = replace(config, devices="0:4", **{role: replace(own, **placed)})
    meshes = make_meshes(config)
    model = trained_config(MODEL, config)
    stage = make_stages(config, model, meshes, RandomModels())[-1]

    def initial(role=POLICY):
        with jax.set_mesh(meshes[role]):
            shardings = models.shardings(model, meshes[role], TRAIN)
            return jax.jit(models.init, static_argnums=0, out_shardings=shardings)(model, jax.random.key(0))

    other = meshes[REFERENCE] if meshes[REFERENCE] != meshes[POLICY] else None
    first = functools.partial(initial, REFERENCE)
    abstract, path = stage.policy.abstract_state().params, config.reference.path
    load = functools.partial(load_frozen, config, path, meshes[REFERENCE], RandomModels()) if path else None
    reference = Reference(
        tmp_path, "float32", first, abstract, mesh=other, offload=config.reference.offload, pretrained=load
    )
    with jax.set_mesh(meshes[POLICY]):
        state = stage.init_state(initial())
        if config.lora.rank:  # B is zero at first
            noisy = jax.tree.map(lambda w: w + 0.01, lora.split_params(state.params)[0])
            state = lora.with_frozen(replace(state, params=noisy), lora.split_params(state.params)[1])
    return stage, state, reference


def steps(stage, state, reference, count=2):
    """(metrics of each step, final weights, weights of the reference)."""
    collected, frozen = [], None
    with jax.set_mesh(stage.policy.mesh):
        for step in range(count):
            if stage.needs_reference:
                frozen = reference.params(0, step, state.params)
            batch = trajectories(step)
            items = [from_trajectory(t) for t in batch]
            if stage.teachers:
                for item in items:
                    item.signals["labels"] = np.zeros(len(item.tokens), np.float32)
            minibatches = stage.prepare(
                state, Experience(items, {}, 0, [], trajectories=batch), frozen, seed=step
            )
            state, metrics = stage.update(state, minibatches, step)
            collected.append(jax.device_get(metrics))
    return collected, jax.tree.map(np.asarray, state.params), frozen


def test_a_pretrained_critic_is_read_for_a_new_state_alone():
    """A resumed run, which restores the critic, would keep what it read beside it."""
    read = []

    class Counted(RandomModels):
        def params(self, path, *args):
            read.append(path)
            return super().params(path, *args)

    config = replace(BASE, warm_start=WarmStartConfig(steps=1), **CASES["ppo"])
    warm, train = make_stages(config, trained_config(MODEL, config), make_meshes(config), Counted())
    assert read == []
    with jax.set_mesh(warm.policy.mesh):
        state = warm.init_state(models.init(MODEL, jax.random.key(0)))
        assert read == ["critic"]
        assert train.init_state(state.params, state.critic).critic is state.critic
    assert read == ["critic"]


def rates(optimizer, updates):
    """The learning rates of sgd: how far a gradient of 1 moves a weight."""
    weight = {"w": np.float32(1.0)}
    state, moved = optimizer.init(weight), []
    for _ in range(updates):
        update, state = optimizer.update(weight, state, weight)
        moved.append(-float(update["w"]))
    return moved


@pytest.mark.parametrize(("warmup", "last"), [(0, 1 / 10), (2, 1 / 6), (5, 0.0)])
def test_the_schedule_of_the_policy_spans_the_steps_after_the_warm_up_of_the_critic(warmup, last):
    """5 steps of 2 updates; after 2 steps of the critic alone, the rate falls by 1/6 an update."""
    optim = OptimConfig(name="sgd", b1=0.0, learning_rate=1.0, schedule="linear", final_fraction=0.0)
    critic = CriticConfig(optim=optim, warmup_steps=warmup)
    config = replace(BASE, algo=ppo.Config(kl_coef=0.0), optim=optim, critic=critic, steps=5, ppo_epochs=2)
    stage = make_stages(config, trained_config(MODEL, config), make_meshes(config), RandomModels())[-1]
    assert rates(stage.critic.optimizer, 10)[-1] == pytest.approx(1 / 10)
    assert [0.0, *rates(stage.policy.optimizer, (5 - warmup) * 2)][-1] == pytest.approx(last)


@functools.cache
def on_one_device(case):
    return steps(*built(case))[:2]


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(OTHER_LAYOUT, id="layout", marks=pytest.mark.slow),
        pytest.param(OTHER_DEVICES, id="devices"),
    ],
)
@pytest.mark.parametrize("case", with_slow(ROLES, {"adapters", "ppo", "gkd", "gkd of one sample"}))
def test_a_model_of_any_placement_gives_the_step_of_one_device(case, placement):
    stage, state, reference = built(case, ROLES[case], placement)
    metrics, params, frozen = steps(stage, state, reference)
    for mine, other in zip(metrics, on_one_device(case)[0], strict=True):
        assert mine.keys() == other.keys() and mine["grad_norm"] > 1e-3
        for name, value in other.items():
            np.testing.assert_allclose(mine[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    for w, other in zip(*map(jax.tree.leaves, (params, on_one_device(case)[1])), strict=True):
        np.testing.assert_allclose(w, other, rtol=1e-5, atol=2e-6)
    place = set(jax.devices()[4:8] if placement.devices else jax.devices()[:4])
    weights = {"critic": state.critic and state.critic.params, "teacher": stage.teachers, "reference": frozen}
    assert devices_of(weights[ROLES[case]]) == place


@pytest.mark.parametrize(
    "lora, offload",
    [(LoraConfig(), True), pytest.param(LoraConfig(rank=2), False, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_reference_of_another_model_scores_with_its_own_weights(monkeypatch, lora, offload):
    """Of the second step, too, and with adapters it is a second model."""
    monkeypatch.setitem(CASES, "other", CASES["other"] | {"lora": lora})
    stage, state, reference = built("other", "reference", OTHER_DEVICES, offload=offload)
    own = RandomModels().params("other", MODEL, None, "float32")
    items = [from_trajectory(t) for t in trajectories(3)]
    expected = [score["logprobs"] for score in stage.policy.scorer.start(own, items)()]
    with jax.set_mesh(stage.policy.mesh):
        for step in range(2):
            stage.score(state, items, reference.params(0, step, state.params))
            for item, logprobs in zip(items, expected, strict=True):
                np.testing.assert_allclose(item.signals["ref_logprobs"], logprobs, atol=1e-5)
    config = replace(BASE, **CASES["other"])
    assert has_own_reference(config, stage.policy.model, make_meshes(config))
    assert has_own_reference(replace(config, reference=ReferenceConfig()), MODEL, make_meshes(config))
    config = replace(config, reference=ReferenceConfig())
    assert has_own_reference(config, stage.policy.model, make_meshes(config)) == (not lora.rank)


@pytest.mark.parametrize("weight, every, loaded", [(1.0, 0, True), (0.0, 10, True), (0.0, 0, False)])
def test_the_cache_of_the_rollout_leaves_memory_for_reward_models(tmp_path, weight, every, loaded):
    """They are loaded after its size is known: matrices in bfloat16, the rest in float32."""
    judge = replace(MODEL, value_head=True, tie_embeddings=True)
    model = RewardModelConfig(path=str(save_description(judge, tmp_path / "judge")), weight=weight)
    alone = replace(BASE, eval=EvalConfig(every=every))
    config = replace(alone, reward=RewardConfig(models=(model,)))
    meshes = make_meshes(config)
    stage = make_stages(alone, MODEL, meshes)[-1]
    matrices = 64 * 16 + 16 * 4 * (4 + 2 + 2 + 4) + 3 * 16 * 16  # embedding, attention, feed-forward
    others = 3 * 16 + 2 * 4 + 16  # norms, of queries and keys too, and the score head
    added = resident_bytes(config, stage, meshes) - resident_bytes(alone, stage, meshes)
    assert added == loaded * (2 * matrices + 4 * others)


def test_a_frozen_model_whose_layers_stages_do_not_divide_is_refused():
    """It has one layer; the policy has two."""
    two_layers = replace(BASE.model, architecture=replace(MODEL, num_layers=2))
    config = replace(BASE, model=two_layers, mesh=MeshConfig(stage=2))
    for role, case in (("reference.", CASES["other"]), ("teacher.0.", CASES["gkd"])):
        config = replace(config, **case)
        known = architectures(config, RandomModels().config)
        assert known.keys() == {POLICY, role}
        line = rf"^--mesh.stage is 2: .* the 1 layers .* Set --mesh.stage 1. The layers are of {role}$"
        with pytest.raises(UserError, match=line):
            check_models(config, known)


def test_models_are_all_started_before_the_first_is_waited_for(monkeypatch):
    """No host sync separates them, so that those on disjoint devices run at the same time."""
    stage, state, _ = built("ppo", "critic", OTHER_DEVICES)
    stage.policy.config = replace(stage.policy.config, old_logprobs_source="recompute")
    events, start, value = [], Scorer.start, ArrayImpl._value.fget
    started = lambda *args, **settings: events.append("start") or start(*args, **settings)
    monkeypatch.setattr(Scorer, "start", started)
    monkeypatch.setattr(ArrayImpl, "_value", property(lambda x: events.append("read") or value(x)))
    with jax.set_mesh(stage.policy.mesh):
        stage.score(state, [from_trajectory(t) for t in trajectories(0)], None)
    assert events[:2] == ["start", "start"] and set(events[2:]) == {"read"}


@pytest.mark.parametrize(
    "case, role", [pytest.param("grpo", "reference", marks=pytest.mark.slow), ("gkd", "teacher")]
)
def test_models_elsewhere_in_host_memory_give_the_same_bits(case, role):
    on_devices, in_host_memory = (
        steps(*built(case, role, OTHER_DEVICES, offload=offload), count=1) for offload in (False, True)
    )
    chex.assert_trees_all_equal(on_devices, in_host_memory)


def test_a_critic_with_weights_of_its_own_survives_the_border_of_the_warm_up():
    """Its weights are donated to its state once; the warm-up does not train it."""
    config = replace(
        BASE,
        model=replace(BASE.model, dtype="float32"),
        warm_start=WarmStartConfig(steps=1),
        **CASES["ppo"],
    )
    meshes = make_meshes(config)
    warm, train = make_stages(config, trained_config(MODEL, config), meshes, RandomModels())
    with jax.set_mesh(meshes[POLICY]):
        state = warm.init_state(jax.jit(models.init, static_argnums=0)(MODEL, jax.random.key(0)))
        before = [np.asarray(w) for w in jax.tree.leaves(state.critic.params)]
        after = train.init_state(state.params, state.critic).critic.params
    for old, new in zip(before, jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_first_steps_of_the_sft_warm_up_are_not_the_critics():
    """Every step of it trains the policy; then the critic has its steps alone."""
    critic = CriticConfig(warmup_steps=2)
    config = replace(BASE, algo=ppo.Config(kl_coef=0.0), critic=critic, warm_start=WarmStartConfig(steps=2))
    meshes = make_meshes(config)
    warm, train = make_stages(config, trained_config(MODEL, config), meshes, RandomModels())
    item = PackItem(np.arange(1, 9, dtype=np.int32), np.ones(8, np.float32))
    with jax.set_mesh(meshes[POLICY]):
        state = warm.init_state(jax.jit(models.init, static_argnums=0)(MODEL, jax.random.key(0)))
        for step in range(2):
            state, metrics = warm.update(state, [[item]], step)
            assert int(state.version) == step + 1 and float(metrics["loss"]) > 0
    assert (train.start, train.critic_warmup) == (2, 2)
