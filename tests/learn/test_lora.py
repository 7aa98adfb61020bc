"""Adapters: the model's output, what an update changes, layouts, and one base for several models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lora_models import merged
from slow_cases import with_slow

from jaxrl_llm import algos, models
from jaxrl_llm.algos import grpo, value
from jaxrl_llm.builders.models import make_stages, trained_config
from jaxrl_llm.builders.sizes import make_meshes
from jaxrl_llm.builders.warm_up import loss_signals
from jaxrl_llm.config import LoraConfig, MLAConfig, ModelConfig, MoEConfig, TrainConfig
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.reference import Reference
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig, lora
from jaxrl_llm.ranges import problems
from jaxrl_llm.recipe.checks import check_models
from jaxrl_llm.sharding.config import POLICY
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN

BASE = TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
MLA = MLAConfig(kv_rank=16, q_rank=20, nope_dim=8, rope_dim=4, value_dim=6)
LATENTS = dataclasses.replace(
    BASE, num_kv_heads=4, head_dim=12, qk_norm=False, mla=MLA,
    moe=MoEConfig(4, 2, 24, shared_size=16, shared_gate=False, dense_layers=1),
)  # fmt: skip
MODEL = lora.with_lora(BASE, LoraConfig(rank=4, alpha=8.0))
TOKENS, POSITIONS = jnp.arange(24).reshape(2, 12), jnp.tile(jnp.arange(12), (2, 1))
NAMES = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.fixture(scope="module")
def adapted():
    """A base, and it with adapters whose B is not zero."""
    base = jax.jit(models.init, static_argnums=0)(BASE, jax.random.key(0))
    fresh = jax.jit(lora.add_adapters, static_argnums=1)(base, MODEL, jax.random.key(1))
    keys = iter(jax.random.split(jax.random.key(2), 100))
    noise = lambda x: x + 0.05 * jax.random.normal(next(keys), x.shape)
    trained, frozen = lora.split_params(fresh)
    return base, fresh, lora.join_params(jax.tree.map(noise, trained), frozen)


@jax.jit
def hidden(params):
    return params(TOKENS, POSITIONS)


def test_each_linear_layer_gets_a_and_b(adapted):
    leaves = dict(models.named_leaves(adapted[1]))
    added = {name: leaf.shape for name, leaf in leaves.items() if "_lora_" in name}
    assert set(added) == {f"layers.{name}_lora_{part}" for name in NAMES for part in "ab"}
    assert added["layers.q_lora_a"] == (2, 32, 4) and added["layers.q_lora_b"] == (2, 4, 4, 8)
    assert added["layers.o_lora_a"] == (2, 4, 8, 4) and added["layers.o_lora_b"] == (2, 4, 32)
    a = np.asarray(leaves["layers.down_lora_a"])  # PEFT: uniform within 1 / sqrt(inputs)
    assert 0.95 / 8 < np.abs(a).max() <= 1 / 8 and abs(a.std() * 8 - 3**-0.5) < 0.05
    assert not np.asarray(leaves["layers.down_lora_b"]).any()


def test_the_backward_pass_saves_an_adapter_and_the_output_of_its_a():
    """With "dots", beside what the base saves: A and B, and 24 tokens x rank 4 of 7 adapters in 2 layers. The
    outputs of W and of B are saved as their sum."""

    def saved(config):
        loss = lambda params: params(TOKENS, POSITIONS, remat="dots").sum()
        backward = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], models.abstract(config))
        return num_bytes(backward)

    num_bytes = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    adapters = num_bytes(models.abstract(MODEL)) - num_bytes(models.abstract(BASE))
    assert saved(MODEL) - saved(BASE) == adapters + 24 * 4 * 7 * 2 * 4


def test_only_the_named_layers_are_adapted():
    config = LoraConfig(rank=2, targets=("v_proj", "q_proj"))
    names = [name for name, _ in models.named_leaves(models.abstract(lora.with_lora(BASE, config)))]
    assert [name for name in names if "_lora_" in name] == [
        f"layers.{name}_lora_{part}" for name in ("q", "v") for part in "ab"
    ]


@pytest.mark.parametrize(("stabilized", "scale"), [(False, 2.0), (True, 4.0)])
def test_the_scale_is_alpha_over_rank_or_its_root(stabilized, scale):
    assert LoraConfig(rank=4, alpha=8.0, rank_stabilized=stabilized).scale == scale


def test_outputs_of_new_adapters_of_merged_ones_and_of_the_base(adapted):
    base, fresh, trained = adapted
    np.testing.assert_array_equal(hidden(fresh), hidden(lora.base(trained)))
    np.testing.assert_allclose(hidden(fresh), hidden(base), atol=1e-6)
    whole = jax.jit(merged)(trained)
    assert type(whole.config) is TransformerConfig and whole.config == BASE
    assert np.abs(hidden(trained) - hidden(base)).max() > 0.1
    np.testing.assert_allclose(hidden(whole), hidden(trained), atol=2e-5)


@pytest.mark.parametrize("own_mesh", [False, True])
def test_a_run_that_starts_from_an_adapter_has_it_as_its_reference(adapted, own_mesh, tmp_path):
    """At the start, and of a restarted run whose weights are others by now; a new adapter's is the base."""
    base, fresh, start = adapted
    adapter = {name: np.asarray(x) for name, x in models.named_leaves(start) if "_lora_" in name}
    mesh = make_mesh(MeshConfig(fsdp=2), jax.devices()[:2]) if own_mesh else None

    def reference(adapter):
        return Reference(tmp_path, "float32", lambda: fresh, start, mesh=mesh, adapter=adapter)

    trained = lora.with_random_b(start, 0.5)
    assert np.abs(hidden(trained) - hidden(start)).max() > 0.1
    for step, current in enumerate((start, trained)):
        found = reference(adapter).params(0, step, current)
        np.testing.assert_allclose(hidden(found), hidden(start), atol=1e-5 * own_mesh)
        np.testing.assert_allclose(hidden(reference({}).params(0, step, current)), hidden(base), atol=1e-5)
    if not own_mesh:
        assert found.layers.q[...] is trained.layers.q[...]
        assert found.layers.q_lora_b[...] is not trained.layers.q_lora_b[...]


def test_one_layer_by_hand(adapted):
    """y = W x + alpha / rank B A x, of the merged weight of one head."""
    leaves = {name: np.asarray(x, np.float64) for name, x in models.named_leaves(adapted[2])}
    expected = leaves["layers.q"][1, :, 3] + 2.0 * (
        leaves["layers.q_lora_a"][1] @ leaves["layers.q_lora_b"][1, :, 3]
    )
    weight = dict(models.named_leaves(merged(adapted[2])))["layers.q"][1, :, 3]
    np.testing.assert_allclose(weight, expected, atol=1e-6)


# --- updates


def items(n=8):
    rng = np.random.default_rng(0)
    result = []
    for length in rng.integers(6, 20, n):
        mask = np.ones(length, np.float32)
        mask[:3] = 0
        advantages = np.full(length, rng.normal(), np.float32)
        tokens = rng.integers(0, 64, length).astype(np.int32)
        result.append(PackItem(tokens, mask, {"advantages": advantages, "rollout_logprobs": -4 * mask}))
    return result


ONE = MeshConfig(fsdp=1)


def learner(mesh=ONE, optimizer=None, **settings):
    size = int(np.prod([abs(n) for n in mesh.sizes.values()]))
    step = StepConfig(row_tokens=24, rows=8, max_grad_norm=0.0, **settings)
    built = make_mesh(mesh, jax.devices()[:size])
    return Learner(grpo.Config(kl_coef=0.0), MODEL, optimizer or optax.sgd(1.0), step, mesh=built)


def one_update(built, params):
    """Return (state before, after, metrics) on the host; with SGD of rate 1 the change is the gradient."""
    with jax.set_mesh(built.mesh):
        state = built.init_state(jax.device_put(jax.tree.map(np.asarray, params), built.param_shardings))
        before = jax.tree.map(np.asarray, state)
        after, metrics = Stage(built).update(state, [items()], step=0)
        return before, jax.tree.map(np.asarray, after), {k: float(v) for k, v in metrics.items()}


@pytest.fixture(scope="module")
def updated(adapted):
    return one_update(learner(), adapted[2])


def test_an_update_changes_the_adapters_alone(updated):
    before, after, metrics = updated
    for (name, old), (_, new) in zip(
        models.named_leaves(before.params), models.named_leaves(after.params), strict=True
    ):
        assert (np.abs(new - old).max() > 0) == ("_lora_" in name), name
    assert metrics["grad_norm"] == pytest.approx(metrics["update_norm"])


def test_gradients_are_those_of_the_merged_weight(updated, adapted):
    """dL/dB = scale A^T dL/dW and dL/dA = scale dL/dW B^T, of the model with its adapters merged."""
    before, after, _ = updated
    change = lambda name: (
        dict(models.named_leaves(before.params))[name] - dict(models.named_leaves(after.params))[name]
    )
    plain = learner()
    whole = Learner(plain.algo, BASE, plain.optimizer, plain.config, mesh=plain.mesh)
    old, new, _ = one_update(whole, merged(adapted[2]))
    weights = dict(models.named_leaves(adapted[2]))
    for name in ("up", "down"):
        full = np.asarray(
            dict(models.named_leaves(old.params))[f"layers.{name}"]
            - dict(models.named_leaves(new.params))[f"layers.{name}"]
        )
        a, b = (np.asarray(weights[f"layers.{name}_lora_{part}"]) for part in "ab")
        for part, expected in (
            ("b", 2.0 * np.einsum("lir,lio->lro", a, full)),
            ("a", 2.0 * np.einsum("lio,lro->lir", full, b)),
        ):
            error = np.linalg.norm(change(f"layers.{name}_lora_{part}") - expected)
            assert error < 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(data=2, fsdp=2, tensor=2),
        pytest.param(MeshConfig(fsdp=2, sequence=2, tensor=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_mesh_gives_the_update_of_one_device(mesh, updated, adapted):
    _, after, metrics = one_update(learner(mesh), adapted[2])
    assert metrics["loss"] == pytest.approx(updated[2]["loss"], rel=1e-5, abs=1e-7)
    for got, wanted in zip(jax.tree.leaves(after.params), jax.tree.leaves(updated[1].params), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-6)


def test_moments_are_of_the_adapters_and_the_base_takes_the_compute_type():
    built = learner(optimizer=optax.adam(1e-3), dtype="bfloat16")
    state = built.abstract_state()
    adapters = sum(x.size for name, x in models.named_leaves(state.params) if "_lora_" in name)
    assert sum(x.size for x in jax.tree.leaves(state.opt_state)) == 2 * adapters + 1
    types = {name: str(x.dtype) for name, x in models.named_leaves(state.params)}
    assert {types[f"layers.{name}"] for name in NAMES} | {types["embed"]} == {"bfloat16"}
    assert {t for name, t in types.items() if "_lora_" in name or "norm" in name} == {"float32"}


@pytest.mark.slow
def test_critic_and_policy_share_one_base(adapted):
    """Neither starts with a copy of it, nor gets one by an update."""
    policy = learner(optimizer=optax.adam(1e-2))
    headed = dataclasses.replace(MODEL, value_head=True)
    critic = Learner(value.Config(), headed, optax.adam(1e-2), policy.config, mesh=policy.mesh)
    stage = Stage(policy, critic=critic)
    with jax.set_mesh(policy.mesh):
        params = jax.device_put(jax.tree.map(np.asarray, adapted[1]), policy.param_shardings)
        state = stage.init_state(params)
        for item in (batch := items()):
            item.signals |= {"values": item.mask, "returns": item.mask}
        state, _ = stage.update(state, [batch], step=0)
    where = lambda params, name: dict(models.named_leaves(params))[name].unsafe_buffer_pointer()
    for name in ("embed", "layers.q", "layers.down", "norm"):
        assert where(state.params, name) == where(state.critic.params, name)
    assert where(state.params, "layers.q_lora_a") != where(state.critic.params, "layers.q_lora_a")
    assert np.abs(state.critic.params.value[...]).max() > 0


# --- configuration


ALGORITHMS = ("grpo", "ppo", "sft", "dpo", "kto", "reward_model", "online_dpo")


@pytest.mark.parametrize("name", with_slow(ALGORITHMS, {"sft", "kto", "online_dpo"}))
def test_every_kind_of_algorithm_trains_adapters(name):
    """Its update is traced, not compiled; gradients and moments are of the adapters (and a value head)."""
    config = TrainConfig(
        algo=algos.ALGOS[name].Config(),
        lora=LoraConfig(rank=4),
        model=ModelConfig(architecture=BASE, tokenizer="tiny"),
        mesh=MeshConfig(fsdp=1),
        max_prompt_tokens=8,
        max_response_tokens=8,
        prompts_per_step=2,
        responses_per_prompt=2,
    )
    meshes = make_meshes(config, jax.devices()[:1])
    stage = make_stages(config, trained_config(BASE, config), meshes)[-1]
    for built in filter(None, (stage.policy, stage.critic)):
        gradients = built.update_programs(loss_signals(stage))["accumulate"].args[1]
        names = [name for name, x in models.named_leaves(gradients) if x is not None]
        assert all("_lora_" in name or name == "value" for name in names)
        assert ("value" in names) == built.model.value_head


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(rank=1, targets=("q",)), "has 'q': it must be of all, q_proj, k_proj"),
        (LoraConfig(rank=1, targets=()), "is empty"),
        (LoraConfig(rank=-1), "at least 0"),
        (LoraConfig(rank=1, alpha=0.0), "above 0"),
    ],
)
def test_adapters_that_cannot_be(config, message):
    assert message in " ".join(text for _, text in problems(config))


def test_a_rank_above_a_dimension_is_refused():
    with pytest.raises(ConfigError, match=r"--lora.rank is 17: the model's num_kv_heads \* head_dim is 16"):
        check_models(TrainConfig(lora=LoraConfig(rank=17)), {POLICY: BASE})
    with pytest.raises(ConfigError, match=r"--lora.rank is 17: the model's mla.kv_rank is 16"):
        check_models(TrainConfig(lora=LoraConfig(rank=17)), {POLICY: LATENTS})


def test_latent_attention_has_adapters_of_its_own_layers():
    """A of a leading dense layer is [L, D, R] likewise, and k_proj and v_proj there are none."""
    attention = ("q_a", "q_b", "kv_a", "kv_b", "o")
    for mla, names in ((MLA, attention), (dataclasses.replace(MLA, q_rank=0), ("q", *attention[2:]))):
        model = trained_config(dataclasses.replace(LATENTS, mla=mla), TrainConfig(lora=LoraConfig(rank=2)))
        leaves = models.named_leaves(models.abstract(model))
        shapes = {name: leaf.shape for name, leaf in leaves if "_lora_" in name}
        experts = [f"expert_{name}" for name in NAMES[4:]]
        adapted = [f"layers.{name}" for name in (*names, *NAMES[4:], *experts)]
        adapted += [f"dense_layers.{name}" for name in (*names, *NAMES[4:])]
        assert set(shapes) == {f"{name}_lora_{part}" for name in adapted for part in "ab"}
        assert shapes["layers.kv_b_lora_a"] == (1, 16, 2) and shapes["layers.kv_b_lora_b"] == (1, 2, 4, 14)
        assert shapes["dense_layers.o_lora_a"] == (1, 4, 6, 2)
        assert shapes["layers.expert_up_lora_a"] == (1, 4, 32, 1)
    some = trained_config(LATENTS, TrainConfig(lora=LoraConfig(rank=2, targets=("kv_b_proj", "q_a_proj"))))
    assert list(some.adapters) == ["q_a", "kv_b"]


@pytest.mark.parametrize(
    ("model", "lora_config", "message"),
    [
        (
            BASE,
            LoraConfig(rank=2, targets=("kv_b_proj",)),
            "has kv_b_proj: the model has no such layers.*q_proj k_proj",
        ),
        (
            LATENTS,
            LoraConfig(rank=2, targets=("q_proj",)),
            "has q_proj: .* Set it to all, .* of .* kv_b_proj",
        ),
    ],
)
def test_layers_that_a_model_lacks_are_refused(model, lora_config, message):
    with pytest.raises(ConfigError, match=message):
        check_models(TrainConfig(lora=lora_config), {POLICY: model})


def test_the_fingerprint_is_of_the_frozen_weights_whatever_the_sharding(adapted):
    base, fresh, trained = adapted
    assert lora.frozen_fingerprint(base) == ""
    assert lora.frozen_fingerprint(fresh) == lora.frozen_fingerprint(trained) != ""
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    sharded = jax.device_put(jax.tree.map(np.asarray, trained), models.shardings(MODEL, mesh, TRAIN))
    assert lora.frozen_fingerprint(sharded) == lora.frozen_fingerprint(trained)
    swapped = jax.tree.map(lambda x: x[::-1] if x.shape == (64, 32) else x, trained)
    assert lora.frozen_fingerprint(swapped) != lora.frozen_fingerprint(trained)
