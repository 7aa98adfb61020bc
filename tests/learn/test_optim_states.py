"""Optimizer states in fewer bytes: codes by hand, error bounds, regression, resume and meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from random_weights import random_params

from jaxrl_llm import models
from jaxrl_llm.algos import sft
from jaxrl_llm.checkpoint.config import CheckpointConfig
from jaxrl_llm.checkpoint.state import Checkpointer
from jaxrl_llm.config import DataConfig, ModelConfig, TrainConfig
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.learn.config import OptimConfig
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.optim import make_optimizer
from jaxrl_llm.learn.optim_states import (
    MasterState,
    Quantized,
    averaged_weights,
    dequantize,
    float32_params,
    master_weights,
    quantize_first,
    quantize_second,
    store_remainders,
    stored_weights,
)
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import LoraConfig, TransformerConfig
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.transformer import cast_weights
from jaxrl_llm.ranges import problems
from jaxrl_llm.recipe.checks import check_config
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import bytes_per_device

# -- codes


def row(*values, size=64):
    return jnp.zeros((1, size), jnp.float32).at[0, : len(values)].set(jnp.array(values, jnp.float32))


def test_first_moments_by_hand():
    """127 x 2y / (1 + |y|), y = m / 4: 127 at the largest, 127 x 0.8 / 1.4 = 72.57 at 1.6, 0.25 at 0.004."""
    moment = quantize_first(row(4.0, -4.0, 1.6, 0.004))
    assert moment.codes.dtype == jnp.int8 and moment.scale.tolist() == [[4.0]]
    assert moment.codes[0, :5].tolist() == [127, -127, 73, 0, 0]
    y = 73 / 127 / (2 - 73 / 127)
    np.testing.assert_allclose(dequantize(moment)[0, :3], [4.0, -4.0, 4 * y], rtol=1e-6)


def test_second_moments_by_hand():
    """A code is 40 / 254 of an octave: 1/4 is 2 octaves below the largest, 12.7 codes."""
    moment = quantize_second(row(0.5, 0.125, 0.5 * 2.0**-40, 1e-30), 0)
    assert moment.codes.dtype == jnp.uint8 and moment.scale.tolist() == [[0.5]]
    first, quarter, *smallest, zero = moment.codes[0, :5].tolist()
    assert (first, smallest, zero) == (255, [1, 1], 0) and quarter in (242, 243)
    values = dequantize(moment)[0]
    np.testing.assert_allclose(values[:1], 0.5)
    np.testing.assert_allclose(values[2:5], [0.5 * 2.0**-40] * 2 + [0.0])


def companded(x):
    return np.asarray(dequantize(quantize_second(jnp.asarray(x), 7)))


def linear(x):
    """Return the values after 255 equal steps a block."""
    blocks = x.reshape(-1, 128)
    scale = blocks.max(-1, keepdims=True)
    return (np.round(blocks / scale * 255) / 255 * scale).reshape(x.shape)


def square_root(x):
    """Return the values after FlashOptim's algorithm 3."""
    return linear(np.sqrt(x)) ** 2


def test_second_moments_keep_relative_accuracy_over_twelve_decades():
    """The linear code, and FlashOptim's, make zeros of most, by which Adam then divides."""
    rng = np.random.default_rng(0)
    x = (10 ** rng.uniform(-12, 0, (64, 256))).astype(np.float32)
    error = lambda code: np.abs(code(x) / x - 1)
    assert error(companded).max() < 1 / 6 and error(companded).mean() < 0.06
    assert (companded(x) > 0).all()
    for code, lost in ((linear, 0.7), (square_root, 0.4)):
        assert (error(code) == 1).mean() > lost


def test_first_moments_are_within_a_hundredth_of_the_largest():
    x = np.random.default_rng(1).normal(size=(64, 256)).astype(np.float32)
    largest = np.abs(x.reshape(64, 2, 128)).max(-1, keepdims=True)
    error = np.abs(np.asarray(dequantize(quantize_first(jnp.asarray(x)))) - x).reshape(64, 2, 128) / largest
    assert error.max() < 1 / 127 and error[np.abs(x.reshape(error.shape)) < 0.1 * largest].max() < 0.003


def test_an_average_over_a_thousand_steps_follows_its_input():
    """b2 = 0.999 moves a moment by a hundredth of a code a step, which rounding to the nearest would undo."""
    target = jnp.asarray(10 ** np.random.default_rng(2).uniform(-6, 0, (1, 4096)), jnp.float32)
    average = lambda moment: 0.999 * moment + 0.001 * target

    def step(moments, count):
        exact, short = moments
        return (average(exact), quantize_second(average(dequantize(short)), count)), None

    start = target[:, ::-1]  # up and down by many decades
    (exact, short), _ = jax.lax.scan(step, (start, quantize_second(start, 0)), jnp.arange(3000))
    error = np.asarray(jnp.log(dequantize(short) / exact))
    assert np.abs(error.mean()) < 0.1 and error.std() < 0.2 and np.abs(error).max() < 1
    assert np.abs(np.log(start / exact)).mean() > 2  # of a code that is stuck where it began


# -- weights in bfloat16


def split_bits(values):
    """(stored weights, remainders) of float32 weights in a row of their own."""
    weights = {"w": jnp.asarray(values, jnp.float32)}
    state = store_remainders(optax.identity()).init(weights)
    return stored_weights(weights, state)["w"], state.remainders["w"]


def test_remainders_by_hand():
    """1 + 2^-8 is midway of 1 and 1 + 2^-7: away from 0, 0x8000 bits back; 1 + 2^-9 is 0x4000 above 1."""
    stored, low = split_bits([1.0, 1 + 2**-9, 1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-9])
    assert stored.dtype == jnp.bfloat16 and low.dtype == jnp.int16
    assert stored.tolist() == [1, 1, 1 + 2**-7, -1 - 2**-7, 1 + 2**-7]
    assert low.tolist() == [0, 0x4000, -0x8000, -0x8000, -0x4000]


def test_every_float32_comes_back():
    bits = np.random.default_rng(5).integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    edges = [0.0, -0.0, 1e-45, 3.4028235e38, -3.4028235e38, 1.1754944e-38, 2.0 - 2**-23]
    values = np.concatenate([values[np.isfinite(values)], np.float32(edges)])
    stored, low = split_bits(values)
    back = master_weights({"w": stored}, MasterState({"w": low}, ()))["w"]
    np.testing.assert_array_equal(np.asarray(back).view(np.uint32), values.view(np.uint32))


def test_steps_of_1e_6_are_not_lost():
    """A residual of 8 bits resolves 2^-10 / 254 at 0.2, 3.8e-6: FlashOptim's would drop each of these."""
    optimizer = make_optimizer(
        OptimConfig(name="sgd", b1=0.0, learning_rate=1e-6, store_param_remainders=True), 9
    )
    params, gradient = {"w": jnp.float32([0.2])}, {"w": jnp.float32([1.0])}
    state = optimizer.init(params)
    params = stored_weights(params, state)
    for _ in range(100):
        masters = master_weights(params, state)
        updates, state = optimizer.update(gradient, state, masters)
        params = stored_weights(optax.apply_updates(masters, updates), state)
    assert params["w"].dtype == jnp.bfloat16
    assert float(master_weights(params, state)["w"][0]) == pytest.approx(0.2 - 1e-4, abs=2e-6)


# -- optimizers


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_the_first_step_is_that_of_float32_and_then_moments_are_codes(name):
    """Moments are rounded after they were used. Adam's and Lion's first direction is the sign."""
    weights = {name: jnp.ones((64, 64)) for name in ("matrix", "embed", "mamba_a_log", "mamba_skip")}
    weights["norm"] = jnp.ones(64)
    gradient = jax.tree.map(lambda w: jnp.linspace(-1.0, 2.0, w.size).reshape(w.shape), weights)
    plain, short = (
        make_optimizer(OptimConfig(name=name, learning_rate=0.1, weight_decay=0.01, moments=moments), 10)
        for moments in ("float32", "int8")
    )
    expected, _ = plain.update(gradient, plain.init(weights), weights)
    updates, state = short.update(gradient, short.init(weights), weights)
    for one, other in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    moments = getattr(state[0].inner[0], "mu", None) or state[0].inner[0].trace
    assert isinstance(moments["matrix"], Quantized)
    assert {moments[name].dtype for name in weights if name != "matrix"} == {jnp.dtype("float32")}


def test_a_regression_ends_where_adamw_ends():
    """Least squares with columns from 1 to 1e-3, whose second moments span 6 decades."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(256, 64)) * np.logspace(0, -3, 64), jnp.float32)
    solution = jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)
    loss = lambda w: jnp.mean((x @ (w - solution)) ** 2)

    def final(moments):
        optimizer = make_optimizer(
            OptimConfig(learning_rate=0.02, schedule="linear", final_fraction=0.0, moments=moments), 600
        )

        def step(carry, _):
            weights, state = carry
            updates, state = optimizer.update(jax.grad(loss)(weights["w"]), state["w"], weights["w"])
            return ({"w": weights["w"] + updates}, {"w": state}), loss(weights["w"])

        start = {"w": jnp.zeros((64, 64))}
        _, losses = jax.lax.scan(step, (start, {"w": optimizer.init(start["w"])}), length=600)
        return np.asarray(losses)

    plain, short = final("float32"), final("int8")
    assert plain[-1] < 1e-3 * plain[0]
    assert short[-1] < 1.1 * plain[-1]
    np.testing.assert_allclose(short[::50], plain[::50], rtol=0.1)


@pytest.mark.parametrize("name", ["adafactor", "adafactor_unscaled", "adagrad"])
def test_some_optimizers_have_no_moments_to_store(name):
    assert [field for field, _ in problems(OptimConfig(name=name, moments="int8"))] == ["moments"]


def test_remainders_are_of_the_weights_that_the_forward_pass_rounds():
    """All others are stored as they are: sinks too, whose lowest bits it reads."""
    experts = MoEConfig(num_experts=4, experts_per_token=2, expert_size=8, selection_bias=True)
    sizes = dict(vocab_size=32, hidden_size=16, mlp_size=32, num_layers=2, num_heads=4, head_dim=8)
    model = TransformerConfig(**sizes, num_kv_heads=2, moe=experts, attention_sinks=True, value_head=True)
    params = random_params(model)
    stored = stored_weights(params, store_remainders(optax.identity()).init(params))
    read = {name: x.dtype for name, x in models.named_leaves(cast_weights(params, jnp.bfloat16))}
    assert {name: x.dtype for name, x in models.named_leaves(stored)} == read
    norms = {f"layers.{name}_norm" for name in ("attention", "mlp", "q", "k")} | {"norm"}
    others = {"layers.sinks", "layers.router_bias", "value"}
    assert {name for name, dtype in read.items() if dtype == jnp.float32} == norms | others


def test_remainders_need_bfloat16_and_no_adapters():
    config = TrainConfig(
        data=DataConfig(path="task:sums"),
        optim=OptimConfig(store_param_remainders=True),
        model=ModelConfig(dtype="float32", architecture=MODEL, tokenizer="tiny"),
        lora=LoraConfig(rank=2),
    )
    with pytest.raises(ConfigError) as caught:
        check_config(config, writes=False)
    assert "--optim.store_param_remainders is True: it needs --model.dtype bfloat16." in str(caught.value)
    assert "--optim.store_param_remainders is True: it is not for adapters." in str(caught.value)


# -- averages of the weights


@pytest.mark.parametrize("remainders", [False, True])
def test_averages_by_hand(remainders):
    """w = 2, 1.5, 1; e = 2, 2 + 0.1 (1.5 - 2) = 1.95, 1.95 + 0.1 (1 - 1.95) = 1.855."""
    config = OptimConfig(name="sgd", b1=0.0, learning_rate=0.5, ema=0.9, store_param_remainders=remainders)
    optimizer, weights = make_optimizer(config, 10), {"w": jnp.full((2, 2), 2.0)}
    state = optimizer.init(weights)
    collected = [averaged_weights(state)["w"]]
    for _ in range(2):
        updates, state = optimizer.update({"w": jnp.ones((2, 2))}, state, weights)
        weights = optax.apply_updates(weights, updates)
        collected.append(averaged_weights(state)["w"])
    np.testing.assert_allclose([e[0, 0] for e in collected], [2.0, 1.95, 1.855], rtol=1e-6)
    assert float(weights["w"][0, 0]) == 1.0
    assert averaged_weights(make_optimizer(OptimConfig(), 10).init(weights)) is None


@pytest.mark.slow
def test_averages_change_no_weight_and_are_sharded_like_them():
    """They are 4 bytes a weight of the optimizer state."""
    one = MeshConfig(fsdp=1)
    plain, averaged = learner(one), learner(one, ema=0.9)
    state, trajectory = start(plain), []
    for step in range(3):
        trajectory.append(jax.tree.map(np.asarray, state.params))
        state = updated(plain, state, [step]) if step < 2 else state
    state = updated(averaged, start(averaged), range(2))
    assert_equal(state.params, trajectory[2])
    e = trajectory[0]
    for weights in trajectory[1:]:
        e = jax.tree.map(lambda a, b: a + 0.1 * (b - a), e, weights)
    for x, y in zip(jax.tree.leaves(averaged_weights(state.opt_state)), jax.tree.leaves(e), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
    plain, averaged = learner(), learner(ema=0.9)  # on eight devices; nothing is compiled
    abstract = averaged.abstract_state()
    assert [x.sharding for x in jax.tree.leaves(abstract.opt_state.ema)] == [
        x.sharding for x in jax.tree.leaves(abstract.params)
    ]
    size = bytes_per_device(abstract.opt_state) - bytes_per_device(plain.abstract_state().opt_state)
    assert size == bytes_per_device(abstract.params)


# -- runs

MODEL = TransformerConfig(
    vocab_size=64, hidden_size=64, mlp_size=128, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16
)


EIGHT = MeshConfig(data=2, fsdp=2, tensor=2)


@functools.cache
def learner(mesh=EIGHT, offload=False, dtype="float32", by_leaf=True, **settings) -> Learner:
    optim = OptimConfig(learning_rate=0.01, offload=offload, **settings)
    step = StepConfig(row_tokens=16, rows=8, dtype=dtype, offload=offload, update_by_leaf=by_leaf)
    devices = jax.devices()[: abs(np.prod(list(mesh.sizes.values())))]
    return Learner(sft.Config(), MODEL, make_optimizer(optim, 10), step, mesh=make_mesh(mesh, devices))


def start(built: Learner):
    make = jax.jit(models.init, static_argnums=0, out_shardings=built.param_shardings)
    return built.init_state(make(MODEL, jax.random.key(0)))


def updated(built: Learner, state, steps):
    for step in steps:
        rng = np.random.default_rng(step)
        tokens = rng.integers(0, 64, (8, 12)).astype(np.int32)
        items = [PackItem(row, np.ones(12, np.float32)) for row in tokens]
        with jax.set_mesh(built.mesh):
            state, _ = built.update(state, [items])
    return state


def assert_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def check_resume_and_offload(tmp_path, **settings):
    """Four steps, also from a checkpoint after two, with the state in host memory and without: one result."""
    built, other = learner(**settings), learner(offload=True, **settings)
    state = updated(built, start(built), range(2))
    saver = Checkpointer(CheckpointConfig(async_save=False), tmp_path)
    assert saver.save(2, state, {"config": {}}, {})
    end = jax.tree.map(np.asarray, updated(built, state, range(2, 4)))
    for resumed in (built, other):
        restored = saver.restore(resumed.abstract_state())[1]
        assert_equal(updated(resumed, restored, range(2, 4)), end)
    saver.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_eight_bits_resume_bit_equal_and_live_on_the_host(name, tmp_path):
    check_resume_and_offload(tmp_path, name=name, moments="int8")


@pytest.mark.slow
def test_remainders_resume_bit_equal_and_live_on_the_host(tmp_path):
    """So do averages of the weights beside them."""
    settings = {"moments": "int8", "store_param_remainders": True, "dtype": "bfloat16", "ema": 0.9}
    check_resume_and_offload(tmp_path, **settings)


@pytest.mark.slow
def test_bfloat16_weights_with_remainders_train_as_float32_masters():
    """The same gradients but for ties of rounding and the sum over both uses of a tied embedding."""
    one = MeshConfig(fsdp=1)
    settings = {"name": "sgd", "dtype": "bfloat16"}
    plain, split = (learner(one, store_param_remainders=value, **settings) for value in (False, True))
    before = dict(models.named_leaves(models.init(MODEL, jax.random.key(0))))
    expected, state = (updated(built, start(built), range(3)) for built in (plain, split))
    stored, masters = (dict(models.named_leaves(x)) for x in (state.params, float32_params(state)))
    float32 = {name for name, x in stored.items() if x.dtype == jnp.float32}
    assert float32 == {name for name in stored if "norm" in name} and len(stored) > len(float32)
    for name, x in models.named_leaves(expected.params):
        error = np.linalg.norm(masters[name] - x) / np.linalg.norm(x - before[name])
        assert error < 0.03, name


BY_LEAF = {
    "adamw, decay, clipping, average": {"weight_decay": 0.1, "max_grad_norm": 0.01, "ema": 0.9},
    "adafactor": {"name": "adafactor"},
    "lion": {"name": "lion"},
    "sgd": {"name": "sgd"},
    "compressed": {"moments": "int8", "store_param_remainders": True, "dtype": "bfloat16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", BY_LEAF.values(), ids=BY_LEAF)
def test_updates_by_leaf_are_those_of_the_whole_tree(settings):
    """A skipped one leaves everything as it was."""
    built, whole = (learner(MeshConfig(fsdp=1), by_leaf=by_leaf, **settings) for by_leaf in (True, False))
    state, expected = (updated(x, start(x), range(1)) for x in (built, whole))
    for a, b in zip(*(jax.tree.leaves(float32_params(x)) for x in (state, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)  # of steps of 0.01
    before = jax.tree.map(np.asarray, state)
    programs = built.update_programs((), microbatches=1)["apply"]
    grads = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), programs.args[1])
    metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), programs.args[2])
    with jax.set_mesh(built.mesh):
        after, metrics = built._apply(state, grads, metrics, jnp.float32(1))
    assert (int(after.nonfinite), float(metrics["nonfinite"])) == (1, 1.0)
    assert_equal((after.params, after.opt_state), (before.params, before.opt_state))


def test_codes_are_sharded_like_their_weights():
    """A scale in 16 for q, k and v (head_dim), else in a row; where devices divide a block, all hold it."""
    state = learner(moments="int8").abstract_state()
    is_quantized = lambda x: isinstance(x, Quantized)
    leaves = jax.tree.leaves(state.opt_state[0].inner, is_leaf=is_quantized)
    moments = [x for x in leaves if is_quantized(x)]
    weights = {x.shape: x.sharding for x in jax.tree.leaves(state.params)}
    assert len(moments) == 2 * 7
    for codes, scale in moments:
        assert codes.sharding == weights[codes.shape]
        row = codes.shape[-1]  # over fsdp in "o" and "down" (64), over tensor in "gate" and "up" (128)
        assert scale.shape == (*codes.shape[:-1], 1)
        assert bytes_per_device(scale) == bytes_per_device(codes) * 4 / row * (1 if row == 16 else 2)


@pytest.mark.slow
def test_every_mesh_gives_the_codes_of_one_device():
    """Blocks are those of whole rows, also where a device holds half a block (64 / 4 of hidden_size)."""
    rng = np.random.default_rng(4)
    gradient = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), models.abstract(MODEL)
    )
    params = models.init(MODEL, jax.random.key(0))
    results = []
    for mesh in (MeshConfig(fsdp=1), MeshConfig(fsdp=4, tensor=2)):
        built = learner(mesh, moments="int8")
        with jax.set_mesh(built.mesh):
            put = functools.partial(jax.device_put, device=built.param_shardings)
            shardings = built.state_shardings.opt_state
            state = jax.jit(built.optimizer.init, out_shardings=shardings)(put(params))
            update = jax.jit(built.optimizer.update, out_shardings=(built.param_shardings, shardings))
            for _ in range(2):
                updates, state = update(put(gradient), state, put(params))
        results.append(jax.tree.map(np.asarray, (updates, state)))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        if one.dtype == jnp.float32:
            np.testing.assert_allclose(one, other, rtol=1e-5)
        else:  # a difference in the last bit of a gradient may round a code the other way
            apart = np.abs(one.astype(int) - other)
            assert apart.max() <= 1 and apart.mean() < 1e-3
