"""A row divided among devices gives the loss and the gradients of one that is whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import models
from jaxrl_llm.algos import grpo
from jaxrl_llm.data.packing import PackItem, counts, pack
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN, put_rows
from jaxrl_llm.step import StepConfig, loss_and_metrics
from jaxrl_llm.structs import Whole

MODEL = models.TransformerConfig(
    vocab_size=64,
    hidden_size=32,
    mlp_size=48,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    initializer_range=0.3,
    sliding_window=24,
    window_layers=(True, False),
)
ROW, ROWS = 96, 4
LENGTHS = (96, 50, 30, 16, 70, 20, 61)  # one row full, two packed, one with much padding
MESHES = {
    "ring of 4 x fsdp 2": MeshConfig(sequence=4),
    "ring of 2 x fsdp 2 x tensor 2": MeshConfig(sequence=2, tensor=2),
    "ring of 8": MeshConfig(sequence=8),
    "ring of 2 x tensor 4, more than kv heads": MeshConfig(sequence=2, tensor=4),
    "ulysses of 4 x fsdp 2, more than kv heads": MeshConfig(sequence=4, sequence_parallel="ulysses"),
    "ulysses of 2 x fsdp 2 x tensor 2": MeshConfig(sequence=2, tensor=2, sequence_parallel="ulysses"),
}
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def items():
    rng = np.random.default_rng(0)
    made = []
    for length in LENGTHS:
        signals = {
            "advantages": np.full(length, rng.normal(), np.float32),
            "rollout": rng.normal(-4, 0.1, length).astype(np.float32),
        }
        mask = (np.arange(length) > 3).astype(np.float32)
        made.append(PackItem(rng.integers(0, 64, length).astype(np.int32), mask, signals))
    return made


def update(config: MeshConfig, devices: int):
    """(loss, gradient) of the micro-batch that the items fill."""
    mesh = make_mesh(config, jax.devices()[:devices])
    (batch,) = pack(items(), ROW, ROWS)
    settings = {
        "algo": grpo.Config(kl_coef=0.0),
        "config": StepConfig(ROW, ROWS, sequence_parallel=config.sequence_parallel, chunk=48),
    }
    layout = models.shardings(MODEL, mesh, TRAIN)
    whole = Whole(*[np.float32(x) for x in counts(items())], np.float32(0))
    loss = functools.partial(loss_and_metrics, **settings)
    with jax.set_mesh(mesh):
        params = jax.device_put(initial(), layout)
        run = quick(lambda *args: jax.grad(loss, has_aux=True)(*args), out_shardings=(layout, None))
        gradient, metrics = run(params, put_rows(mesh, batch), whole, ())
    return float(metrics["loss"]), jax.tree.map(np.asarray, gradient)


@functools.cache
def initial():
    return jax.tree.map(np.asarray, quick(models.init, static_argnums=0)(MODEL, jax.random.key(0)))


@functools.cache
def on_one_device():
    return update(MeshConfig(fsdp=1), 1)


@pytest.mark.parametrize("config", MESHES.values(), ids=MESHES)
def test_a_divided_row_gives_the_loss_and_gradients_of_a_whole_one(config):
    (loss, gradient), (loss_0, gradient_0) = update(config, 8), on_one_device()
    assert loss == pytest.approx(loss_0, rel=1e-5)
    apart = optax.tree.norm(jax.tree.map(lambda a, b: a - b, gradient, gradient_0))
    assert apart <= 1e-5 * optax.tree.norm(gradient_0)
