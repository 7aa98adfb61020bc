"""Optimizers: one step by hand each, ranges of their settings, and updates that must be skipped."""

import dataclasses
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from family_cases import BASE, CASES
from random_weights import random_params
from slow_cases import with_slow

from jaxrl_llm import models
from jaxrl_llm.algos import grpo, sft
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.layouts import hf_shape, parse_layout
from jaxrl_llm.hf.names import MARK, hf_tensors, tensor_layout
from jaxrl_llm.learn.config import OptimConfig
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.optim import decayed, make_optimizer, make_schedule
from jaxrl_llm.learn.update import StepConfig, apply
from jaxrl_llm.models import LoraConfig, lora
from jaxrl_llm.models.mixer_config import ConvConfig, DeltaConfig, IndexConfig, MambaConfig, MLAConfig
from jaxrl_llm.ranges import problems
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.structs import TrainState

TINY = models.TransformerConfig(
    vocab_size=8,
    hidden_size=8,
    mlp_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    qkv_bias=True,
)
SETTINGS = {"learning_rate": 0.1, "weight_decay": 0.01, "b1": 0.9, "b2": 0.99}


def step(config, weight=2.0, gradient=0.5, steps=1):
    """The updates of a 2 x 2 matrix and of a norm with these equal entries, at the last of `steps`."""
    params = {"matrix": jnp.full((2, 2), weight), "norm": jnp.full(2, weight)}
    gradients = {"matrix": jnp.full((2, 2), gradient), "norm": jnp.full(2, gradient)}
    optimizer = make_optimizer(config, 10)
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(gradients, state, params)
    return float(updates["matrix"][0, 0]), float(updates["norm"][0])


DIRECTIONS = {
    "adamw": 1.0,  # m / sqrt(v) = 0.5 / 0.5
    "lion": 1.0,  # the sign
    "sgd": 0.5,  # the gradient
    "adafactor": 2.0,  # (0.5 / 0.5, RMS clipped to 1) times the weights' RMS of 2
    "adafactor_unscaled": 1.0,
    "rmsprop": 10.0,  # 0.5 / sqrt(0.01 x 0.25)
    "adagrad": 1.0,  # 0.5 / sqrt(0.25)
}


def test_every_optimizer_has_a_step_by_hand():
    """Muon's, of a model, is `test_muon_orthogonalizes_each_layer_by_itself`."""
    assert set(get_args(get_type_hints(OptimConfig)["name"])) == {*DIRECTIONS, "muon"}


@pytest.mark.parametrize(("name", "direction"), DIRECTIONS.items())
def test_one_step_by_hand(name, direction):
    """-rate (direction + decay weight), without decay for the norm; decay is 0.01 x 2."""
    matrix, norm = step(OptimConfig(name=name, **SETTINGS))
    assert matrix == pytest.approx(-0.1 * (direction + 0.02), rel=1e-5)
    assert norm == pytest.approx(-0.1 * direction, rel=1e-5)


def test_optimizers_of_torch():
    """Three steps with gradients of 1, 1e-3 and 1e-6, as torch and transformers make them."""
    torch = pytest.importorskip("torch")
    from transformers import Adafactor

    of_torch = {
        "rmsprop": (lambda w: torch.optim.RMSprop(w, lr=0.1), {"b2": 0.99, "eps": 1e-8}),
        "adagrad": (lambda w: torch.optim.Adagrad(w, lr=0.1), {"eps": 1e-10}),
        "adafactor_unscaled": (
            lambda w: Adafactor(w, lr=0.1, scale_parameter=False, relative_step=False), {},
        ),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    start = rng.normal(size=(128, 130)).astype(np.float32)
    for name, (make, settings) in of_torch.items():
        weight = torch.tensor(start, requires_grad=True)
        theirs = make([weight])
        params = {"matrix": jnp.asarray(start)}
        optimizer = make_optimizer(OptimConfig(name=name, learning_rate=0.1, **settings), 10)
        state = optimizer.init(params)
        for size in (1.0, 1e-3, 1e-6):
            gradient = (size * rng.normal(size=start.shape)).astype(np.float32)
            weight.grad = torch.tensor(gradient)
            theirs.step()
            updates, state = optimizer.update({"matrix": jnp.asarray(gradient)}, state, params)
            params = {"matrix": params["matrix"] + updates["matrix"]}
        np.testing.assert_allclose(
            params["matrix"], weight.detach().numpy(), rtol=2e-5, atol=2e-5, err_msg=name
        )


def test_momentum_of_sgd():
    matrix, _ = step(OptimConfig(name="sgd", **SETTINGS), steps=2)
    assert matrix == pytest.approx(-0.1 * (0.5 + 0.9 * 0.5 + 0.02))
    plain, _ = step(OptimConfig(name="sgd", **SETTINGS | {"b1": 0.0}), steps=2)
    assert plain == pytest.approx(-0.1 * (0.5 + 0.02))


def test_the_first_update_of_a_warm_up_changes_nothing():
    for name in ("adamw", "lion", "sgd", "adafactor"):
        matrix, norm = step(OptimConfig(name=name, **SETTINGS, warmup_steps=5))
        assert (matrix, norm) == (0.0, 0.0), name


@pytest.mark.parametrize(
    "bad",
    [
        {"b1": 1.0},
        {"b2": 1.0},
        {"b1": -0.1},
        {"learning_rate": 1e39},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"eps": float("nan")},
        {"eps": 0.0},
        {"weight_decay": float("inf")},
        {"warmup_steps": -1},
        {"final_fraction": 1.5},
        {"max_grad_norm": float("inf")},
        {"max_nonfinite": 0},
    ],
)
def test_every_field_has_a_range(bad):
    assert [field for field, _ in problems(OptimConfig(**bad))] == list(bad)


def nan_updates():
    return optax.stateless(lambda updates, params: {name: x * jnp.nan for name, x in updates.items()})


@pytest.mark.parametrize("by_leaf", [True, False])
@pytest.mark.parametrize(
    ("weight", "gradient", "loss", "optimizer"),
    [
        (1.0, jnp.nan, 1.0, optax.sgd(0.1)),
        (1.0, 1.0, jnp.inf, optax.sgd(0.1, momentum=0.9)),
        (1.0, 1.0, 1.0, nan_updates()),  # a finite gradient, and an optimizer that makes NaN of it
        (1.0, 2.0, 1.0, optax.sgd(3e38)),
        (3e38, -1.0, 1.0, optax.sgd(3e38)),  # update and weight are finite, their sum is not
        (jnp.nan, 1.0, 1.0, optax.sgd(0.1)),
    ],
)
def test_an_update_that_is_not_finite_is_skipped_and_counted(weight, gradient, loss, optimizer, *, by_leaf):
    """Moments and KL controller stay, too, though the KL is twice its target."""
    algo = grpo.Config(kl_coef=0.1, kl_target=0.1, kl_horizon=10.0)
    params = {"w": jnp.full(2, weight)}
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(params, optimizer.init(params), zero + 3, zero, kl_coef=jnp.float32(0.1))
    settings = {"algo": algo, "optimizer": optimizer, "max_grad_norm": 0.0, "by_leaf": by_leaf}
    metrics = {"loss": jnp.float32(loss), "kl": jnp.float32(0.2)}
    for skipped in (1, 2):
        state, metrics = apply(state, {"w": jnp.full(2, gradient)}, metrics, jnp.float32(1), **settings)
        np.testing.assert_array_equal(state.params["w"], params["w"])
        jax.tree.map(np.testing.assert_array_equal, state.opt_state, optimizer.init(params))
        assert state.kl_coef == jnp.float32(0.1)
        assert (int(state.version), int(state.nonfinite), float(metrics["nonfinite"])) == (3, skipped, 1.0)


def test_a_finite_update_is_applied_and_its_norms_are_reported():
    params = {"w": jnp.array([3.0, 4.0])}
    zero = jnp.zeros((), jnp.int32)
    optimizer = optax.sgd(1.0)
    state = TrainState(params, optimizer.init(params), zero, zero + 1, kl_coef=jnp.float32(0))
    settings = {"algo": sft.Config(), "optimizer": optimizer, "max_grad_norm": 0.5}
    state, metrics = apply(
        state, {"w": jnp.array([0.6, 0.8])}, {"loss": jnp.float32(1)}, jnp.float32(1), **settings
    )
    np.testing.assert_allclose(state.params["w"], [2.7, 3.6], rtol=1e-6)
    assert (int(state.version), int(state.nonfinite)) == (1, 0)
    norms = {name: float(metrics[name]) for name in ("grad_norm", "update_norm", "param_norm")}
    assert norms == pytest.approx({"grad_norm": 1.0, "update_norm": 0.5, "param_norm": 4.5})


def test_the_norm_of_bfloat16_gradients_is_a_float32_sum():
    """Of 1,001 ones; the nearest bfloat16 is 1,000."""
    params, zero, optimizer = {"w": jnp.zeros(1001)}, jnp.zeros((), jnp.int32), optax.sgd(1.0)
    state = TrainState(params, optimizer.init(params), zero, zero, kl_coef=jnp.float32(0))
    settings = {"algo": sft.Config(), "optimizer": optimizer, "max_grad_norm": 0.0}
    grads, loss = {"w": jnp.ones(1001, jnp.bfloat16)}, {"loss": jnp.float32(1)}
    _, metrics = apply(state, grads, loss, jnp.float32(1), **settings)
    assert float(metrics["grad_norm"]) == pytest.approx(1001**0.5, rel=1e-6)


def test_schedules():
    rate = make_schedule(OptimConfig(learning_rate=1.0, schedule="cosine", warmup_steps=10), 110)
    assert [float(rate(i)) for i in (0, 5, 10, 60, 110)] == pytest.approx([0, 0.5, 1, 0.55, 0.1], abs=1e-6)
    assert float(make_schedule(OptimConfig(learning_rate=0.5), 9)(7)) == 0.5


def test_a_warm_up_by_ratio():
    """7% of 100 updates are 7, though 0.07 x 100 is 7.000000000000001; 3% of 110 are 3.3, rounded up."""
    linear = OptimConfig(learning_rate=1.0, schedule="linear", final_fraction=0.0)
    rate = make_schedule(dataclasses.replace(linear, warmup_steps=0.07), 100)
    assert [float(rate(i)) for i in (0, 1, 7, 100)] == pytest.approx([0, 1 / 7, 1, 0], abs=1e-6)
    assert float(rate(7 + 31)) == pytest.approx(1 - 31 / 93)
    rate = make_schedule(dataclasses.replace(linear, warmup_steps=0.03), 110)
    assert [float(rate(i)) for i in (2, 4, 57)] == pytest.approx([0.5, 1, 0.5])
    half = dataclasses.replace(linear, warmup_steps=5.5)
    assert list(problems(half)) == [
        ("warmup_steps", "is 5.5: it must be a number of updates, or a fraction below 1.")
    ]


@pytest.mark.slow
def test_decay_spares_norms_biases_and_sinks():
    model = dataclasses.replace(TINY, attention_sinks=True, qkv_bias=True)
    params = jax.tree.map(lambda x: x + 1, models.init(model, jax.random.key(0)))
    optimizer = make_optimizer(OptimConfig(learning_rate=1.0, weight_decay=0.1), 10)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    moved = {name for name, u in models.named_leaves(updates) if float(jnp.abs(u).max()) > 0}
    assert moved == {"embed", *(f"layers.{w}" for w in ("q", "k", "v", "o", "gate", "up", "down"))}


@pytest.mark.parametrize("case", with_slow(CASES, CASES.keys() - {"gemma4 moe", "gemma4 small", "nemotron"}))
def test_matrices_and_convolutions_of_every_family_decay_and_vectors_do_not(case):
    """By the shapes of Hugging Face's files; the indexer is frozen."""
    family, changes = CASES[case]
    raw = {"model_type": family, **BASE, **changes}
    raw.pop("num_hidden_layers" if family == "nemotron_h" else "", None)  # it lists its layers
    config = read_config(raw)
    shapes = {name: x.shape for name, x in models.named_leaves(models.abstract(config))}
    expected = set()
    for tensor in hf_tensors(config):
        for (ours, index), layout in zip(tensor.parts, tensor.layouts, strict=True):
            if len(hf_shape(shapes[ours][len(index) :], layout)) > 1 and "index_" not in ours:
                expected.add(ours)
    mask = zip(shapes, jax.tree.leaves(decayed(models.abstract(config))), strict=True)
    assert {name for name, decays in mask if decays} == expected


INDEXED = dataclasses.replace(
    TINY, num_kv_heads=2, head_dim=6, qk_norm=False, mla=MLAConfig(6, 5, 4, 2, 4), index=IndexConfig(2, 3, 4)
)


@pytest.mark.slow
@pytest.mark.parametrize("name", get_args(get_type_hints(OptimConfig)["name"]))
@pytest.mark.parametrize("moments", get_args(get_type_hints(OptimConfig)["moments"]))
def test_no_optimizer_moves_an_indexer(name, moments):
    """Three updates with weight decay: index weights keep every bit, all others move."""
    config = OptimConfig(name, learning_rate=0.1, weight_decay=0.1, moments=moments, ema=0.5)
    if any(problems(config)):
        pytest.skip("these moments are for other optimizers")
    optimizer, first = make_optimizer(config, 10), random_params(INDEXED)
    gradient = jax.grad(lambda p: jnp.sum(p(jnp.arange(6)[None], jnp.arange(6)[None]) ** 3))

    @jax.jit
    def update(params, state):
        updates, state = optimizer.update(gradient(params), state, params)
        return optax.apply_updates(params, updates), state

    params, state = first, optimizer.init(first)
    for _ in range(3):
        params, state = update(params, state)
    pairs = zip(models.named_leaves(first), models.named_leaves(params), strict=True)
    moved = {before[0]: bool(np.any(before[1] != after[1])) for before, after in pairs}
    assert moved == {name: ".index_" not in name for name in moved} | {"layers.kv_a_bias": True}
    for before, after in zip(models.named_leaves(first), models.named_leaves(state.ema), strict=True):
        assert ".index_" not in before[0] or np.array_equal(before[1], after[1])


# -- Muon

STATES = {
    "delta": (DeltaConfig(2, 4, 8, 8), {"qkv", "z", "b", "a", "o"}, "conv"),
    "conv": (ConvConfig(conv_bias=True), {"in", "out"}, "kernel"),
    "mamba": (MambaConfig(4, 8, 8, 2), {"in", "out"}, "kernel"),
}
"""Kind -> its sizes, the names of its matrices, and of its convolution."""


@pytest.mark.parametrize(("kind", "of_kind"), STATES.items())
def test_convolutions_and_decays_of_states_are_no_matrices(kind, of_kind):
    """Muon takes the projections; weight decay takes the convolution, too, but neither decays nor skips."""
    sizes, matrices, convolution = of_kind
    model = dataclasses.replace(MUON, layer_kinds=(kind, "attention"), **{kind: sizes})
    params, stack = models.abstract(model), f"{kind}_layers."
    names = [name for name, _ in models.named_leaves(params)]
    of_stack = lambda on: {n.removeprefix(stack) for n, x in zip(names, on, strict=True) if x and stack in n}
    matrices = {"gate", "up", "down", *(f"{kind}_{name}" for name in matrices)}
    assert of_stack(models.layer_matrices(params)) == matrices
    assert of_stack(jax.tree.leaves(decayed(params))) == matrices | {f"{kind}_{convolution}"}


MUON = models.TransformerConfig(
    vocab_size=16,
    hidden_size=12,
    mlp_size=20,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    qkv_bias=True,
    qk_norm=True,
    tie_embeddings=False,
    value_head=True,
)
ADAPTED = lora.with_lora(MUON, LoraConfig(rank=4))
MATRICES = {  # of one layer, as [inputs, outputs]
    "layers.q": (12, 16),
    "layers.k": (12, 8),
    "layers.v": (12, 8),
    "layers.o": (16, 12),
    "layers.gate": (12, 20),
    "layers.up": (12, 20),
    "layers.down": (20, 12),
}
MUON_OPTIM = OptimConfig(name="muon", learning_rate=0.1, b1=0.95, b2=0.99, eps=1e-6, weight_decay=0.01)


def numpy_muon(gradients, beta=0.95):
    """The direction after these gradients [inputs, outputs]: Nesterov momentum as optax corrects its bias,
    five Newton-Schulz steps with the coefficients of Jordan (2024), times 0.2 sqrt(max(inputs, outputs))."""
    mean = np.zeros_like(gradients[0])
    for gradient in gradients:
        mean = beta * mean + (1 - beta) * gradient
    t = len(gradients)
    x = beta * mean / (1 - beta ** (t + 1)) + (1 - beta) * gradients[-1] / (1 - beta**t)
    x = x / np.linalg.norm(x)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return 0.2 * np.sqrt(max(x.shape)) * x


def numpy_adam(gradients, b1=0.95, b2=0.99, eps=1e-6):
    """Adam's direction after these gradients."""
    mean, square = 0.0, 0.0
    for gradient in gradients:
        mean, square = b1 * mean + (1 - b1) * gradient, b2 * square + (1 - b2) * gradient**2
    t = len(gradients)
    return mean / (1 - b1**t) / (np.sqrt(square / (1 - b2**t)) + eps)


def trained_weights(config, seed=0):
    """Normal numbers in the tree of a model's trained weights."""
    rng = np.random.default_rng(seed)
    trained, _ = lora.split_params(models.abstract(config))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), trained)


def named_arrays(tree):
    return {name: np.asarray(x, np.float64) for name, x in models.named_leaves(tree) if x is not None}


@pytest.fixture(scope="module")
def muon_updates():
    """Weights, two gradients and the second update."""
    params, *gradients = [trained_weights(MUON, seed) for seed in range(3)]
    optimizer = make_optimizer(MUON_OPTIM, 10)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
    return [named_arrays(tree) for tree in (params, *gradients, updates)]


@pytest.mark.parametrize("name", MATRICES)
def test_muon_orthogonalizes_each_layer_by_itself(muon_updates, name):
    """-rate (direction + decay weight): the decay comes after Newton-Schulz and before the rate."""
    params, first, second, updates = (tree[name] for tree in muon_updates)
    for layer in range(2):
        direction = numpy_muon([g[layer].reshape(MATRICES[name]) for g in (first, second)])
        expected = -0.1 * (direction + 0.01 * params[layer].reshape(MATRICES[name]))
        np.testing.assert_allclose(updates[layer].reshape(MATRICES[name]), expected, atol=1e-6)
        assert np.linalg.svd(direction)[1].min() / (0.2 * np.sqrt(max(MATRICES[name]))) > 0.6


def test_weights_other_than_matrices_of_the_layers_get_adams_step(muon_updates):
    params, first, second, updates = muon_updates
    others = updates.keys() - MATRICES.keys()
    assert {"embed", "lm_head", "value", "norm", "layers.q_norm", "layers.q_bias"} <= others
    for name in others:
        decay = 0.0 if "norm" in name or "bias" in name else 0.01
        expected = -0.1 * (numpy_adam([first[name], second[name]]) + decay * params[name])
        np.testing.assert_allclose(updates[name], expected, atol=1e-6, err_msg=name)


def test_updates_of_muon_have_the_rms_of_adamw():
    """About 0.2 (arXiv 2502.16982), for every shape and size of gradient; a matrix of zeros stays."""
    gradients = trained_weights(MUON)
    scale = dict(zip(MATRICES, (1e-4, 1.0, 1e4, 1.0, 1.0, 1.0, 0.0), strict=True))
    leaves = [scale.get(name, 1.0) * x for name, x in models.named_leaves(gradients)]
    gradients = jax.tree.unflatten(jax.tree.structure(gradients), leaves)
    optimizer = make_optimizer(OptimConfig(name="muon", learning_rate=1.0), 10)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(gradients), gradients)
    updates = named_arrays(updates)
    assert not updates["layers.down"].any()
    for name in MATRICES.keys() - {"layers.down"}:  # k and v [12, 8] have 8 singular values, not 12
        assert np.sqrt(np.mean(updates[name] ** 2)) == pytest.approx(0.2, rel=0.3), name


def test_inputs_and_outputs_of_a_matrix_are_those_of_hugging_face():
    """HF keeps [outputs, inputs]; norms, biases, embeddings and heads are no matrices of the layers."""
    params = models.abstract(ADAPTED)
    names = [name for name, _ in models.named_leaves(params)]
    found = dict(zip(names, models.layer_matrices(params), strict=True))
    assert found["layers.o"] == ((1, 2), (3,)) and found["layers.q_lora_b"] == ((1,), (2, 3))
    matrices = {name for name, dims in found.items() if dims}
    assert matrices == {*MATRICES, *(f"{name}{MARK}{part}" for name in MATRICES for part in "ab")}
    for name in matrices:
        source, groups = parse_layout(tensor_layout(name))
        outputs, inputs = (tuple(1 + source.index(dim) for dim in group) for group in groups)
        assert found[name] == (inputs, outputs), name


@pytest.mark.parametrize(
    "model", [pytest.param(MUON, id="full"), pytest.param(ADAPTED, id="adapters", marks=pytest.mark.slow)]
)
def test_muon_on_a_mesh(model):
    """Moments have the shardings of their weights, and updates are those of one device."""
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
    optimizer = make_optimizer(MUON_OPTIM, 10)
    learner = Learner(sft.Config(), model, optimizer, StepConfig(row_tokens=8, rows=2), mesh=mesh)
    shardings = learner.state_shardings.opt_state
    muon, adam = (shardings[0].inner_states[name].inner_state for name in ("muon", "adam"))
    of_weights = dict(models.named_leaves(learner.param_shardings))
    moments = [
        (name, sharding)
        for tree in (muon[0].mu, adam.mu, adam.nu)
        for name, sharding in models.named_leaves(tree)
        if jax.tree.leaves(sharding)
    ]
    assert all(sharding == of_weights[name] for name, sharding in moments)
    trained = {name for name in of_weights if lora.is_trained(name, model)}
    assert {name for name, _ in moments} == trained

    params, gradients = trained_weights(model, 0), trained_weights(model, 1)
    state = optimizer.init(params)
    alone, _ = jax.jit(optimizer.update)(gradients, state, params)
    put = lambda tree: jax.device_put(tree, lora.split_params(learner.param_shardings)[0])
    with jax.set_mesh(mesh):
        update = jax.jit(optimizer.update, out_shardings=(None, shardings))
        sharded, state = update(put(gradients), jax.device_put(state, shardings), put(params))
    expected = named_arrays(alone)
    for name, x in named_arrays(sharded).items():
        np.testing.assert_allclose(x, expected[name], atol=1e-5, err_msg=name)
