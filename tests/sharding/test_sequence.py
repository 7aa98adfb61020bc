"""A row divided among devices gives the loss and the gradients of one that is whole."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_kernels.flash_attention.reference import attention
from jaxrl_kernels.flash_attention.spec import Place, Spec
from jaxrl_llm import models
from jaxrl_llm.algos import grpo
from jaxrl_llm.data.packing import PackItem, counts, pack
from jaxrl_llm.learn.update import StepConfig, loss_and_metrics
from jaxrl_llm.sharding import sequence
from jaxrl_llm.sharding.mesh import MeshConfig, make_mesh
from jaxrl_llm.sharding.ring import Ring
from jaxrl_llm.sharding.rules import TRAIN, put_rows
from jaxrl_llm.structs import BatchTotals

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
    "ring of 2 x fsdp 2 x tensor 2": MeshConfig(sequence=2, tensor=2),
    "ulysses of 2 x fsdp 2 x tensor 2, more than kv heads": MeshConfig(
        sequence=2, tensor=2, sequence_parallel="ulysses"
    ),
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
    whole = BatchTotals(*[np.float32(x) for x in counts(items())], np.float32(0))
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


ATTENTION = {
    "ring of 2 x tensor 4, more than kv heads": ("ring", MeshConfig(sequence=2, tensor=4)),
    "ring of 3 x fsdp 2": ("ring", MeshConfig(sequence=3, fsdp=2)),
    "ulysses of 8, more than kv heads": ("ulysses", MeshConfig(sequence=8)),
}


def attention_inputs():
    """q, k, v, segments, window: packed rows, one of them mostly padding, seen through a window."""
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = [(2, ROW, 8, 8), (2, ROW, 2, 8), (2, ROW, 2, 8)]
    qkv = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    segments = np.stack([np.repeat([1, 2, 3, 0], [41, 11, 40, 4]), np.repeat([1, 2, 0], [5, 20, 71])])
    return (*qkv, segments.astype(np.int32), np.int32(30))


def loss_of(attend):
    """Gradient of something of what it returns, and what it returns."""
    weights = jnp.cos(jnp.arange(8.0))

    def loss(q, k, v, segments, window):
        out = attend(q, k, v, segments, window=window, scale=0.4)
        return jnp.sum(out * weights), out

    return quick(lambda *args: jax.grad(loss, (0, 1, 2), has_aux=True)(*args))


@functools.cache
def dense():
    def attend(q, k, v, segments, window, scale):
        distance = jnp.arange(ROW)[:, None] - jnp.arange(ROW)
        seen = (segments[:, :, None] == segments[:, None]) & (segments[:, :, None] > 0)
        return attention(q, k, v, seen & (distance >= 0) & (distance < window), scale=scale)

    return jax.tree.map(np.asarray, loss_of(attend)(*attention_inputs()))


@pytest.mark.parametrize(("division", "config"), ATTENTION.values(), ids=ATTENTION)
def test_attention_of_divided_rows_is_that_of_whole_ones(division, config):
    def attend(q, k, v, segments, **settings):
        q, k, v, segments = [sequence.arrange_rows(x, division) for x in (q, k, v, segments)]
        out = sequence.row_attention(q, k, v, segments, division=division, **settings)
        return sequence.restore_rows(out, division)

    devices = int(np.prod([abs(size) for size in config.sizes.values()]))
    mesh = make_mesh(config, jax.devices()[:devices])
    with jax.set_mesh(mesh):
        assert sequence.row_division(ROW, division) == division
        found = loss_of(attend)(*attention_inputs())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, dense())


def test_zigzag_by_hand():
    """Of 4 devices: chunks 0 and 7, 1 and 6, 2 and 5, 3 and 4."""
    mesh = make_mesh(MeshConfig(fsdp=1, sequence=4), jax.devices()[:4])
    with jax.set_mesh(mesh):
        row = put_rows(mesh, np.arange(16, dtype=np.int32)[None])
        there = jax.jit(lambda x: sequence.arrange_rows(x, "ring"))(row)
        back = jax.jit(lambda x: sequence.restore_rows(x, "ring"))(there)
    assert there.tolist() == [[0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]]
    assert back.tolist() == row.tolist()


class Counting:
    """An implementation whose log-sum-exps, joined, count the calls: log(1 + 1 + ...)."""

    @staticmethod
    def forward(spec, q, k, v, q_segments, kv_segments, place):
        return jnp.zeros(q.shape), jnp.zeros((*q_segments.shape[:1], q.shape[2], q.shape[1]))


def test_chunks_that_do_not_meet_are_left_out():
    """Products of chunks of 10 tokens on each of 4 devices."""

    def calls(q, segments, window):
        place = Place(window=window)
        lse = Ring(Counting, "sequence").forward(Spec(1.0), q, q, q, segments, segments, place)[1]
        return jnp.exp(lse[0, :, ::10])

    mesh = make_mesh(MeshConfig(fsdp=1, sequence=4), jax.devices()[:4])
    tokens, everywhere = PartitionSpec(None, "sequence"), PartitionSpec()
    specs = {"in_specs": (tokens, tokens, everywhere), "out_specs": tokens}
    run = quick(jax.shard_map(calls, mesh=mesh, check_vma=False, **specs))

    def found(window, segments):
        row = np.asarray(segments, np.int32)[None]
        with jax.set_mesh(mesh):
            row = sequence.arrange_rows(put_rows(mesh, row), "ring")
            counts = run(jnp.zeros((1, 80, 1, 1)), row, np.int32(window))
        return np.round(counts).reshape(4, 2).sum(axis=1).tolist()

    assert found(2**30, [1] * 80) == [9, 9, 9, 9]  # 36 of the 64 pairs of 8 chunks, all devices alike
    assert found(11, [1] * 80) == [3, 4, 4, 4]  # each chunk sees itself and the one before, if there is one
    assert found(2**30, np.repeat([1, 2, 3, 4], 20)) == [3, 3, 3, 3]  # two chunks a segment
    assert found(2**30, [0] * 80) == [0, 0, 0, 0]


def test_no_device_gathers_a_row_and_keys_go_around_once():
    mesh = make_mesh(MeshConfig(fsdp=1, sequence=8))
    abstract = lambda *shape: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "sequence"))
    )

    def compiled(division):
        attend = functools.partial(sequence.row_attention, scale=1.0, window=2**30, division=division)
        segments = jax.ShapeDtypeStruct((1, ROW), jnp.int32, sharding=abstract(1, ROW).sharding)
        run = quick(lambda q, k, v, segments: attend(q, k, v, segments))
        with jax.set_mesh(mesh):
            return run.lower(*[abstract(1, ROW, 8, 8)] * 3, segments).compile().as_text()

    count = lambda text, name: len(re.findall(rf" {name}(?:-start)?\(", text))
    ring, ulysses = compiled("ring"), compiled("ulysses")
    assert count(ring, "all-gather") == 0
    assert count(ring, "collective-permute") == 3  # k, v and segments, in the loop of 7 steps only
    assert count(ulysses, "all-to-all") == 4  # q, k, v, out
    assert count(ulysses, "all-gather") == 1  # segments


def test_a_row_that_does_not_divide_stays_whole():
    with jax.set_mesh(make_mesh(MeshConfig(sequence=4))):
        assert sequence.row_division(24, "ring") == "ring"
        assert sequence.row_division(20, "ring") == "whole"  # 8 chunks
        assert sequence.row_division(20, "ulysses") == "ulysses"
    assert sequence.row_division(24, "ring") == "whole"  # no mesh


def test_ulysses_refuses_heads_that_do_not_divide():
    x = jnp.zeros((2, 16, 6, 8))
    with (
        jax.set_mesh(make_mesh(MeshConfig(sequence=4))),
        pytest.raises(ValueError, match="the 6 query heads among tensor x sequence = 4 devices"),
    ):
        sequence.row_attention(x, x, x, jnp.ones((2, 16), jnp.int32), scale=1.0, window=8, division="ulysses")


def test_what_attention_found_may_be_kept():
    """With remat "attention" the backward pass does not go around the ring again for the output."""
    tokens = jnp.ones((4, ROW), jnp.int32)

    def exchanges(remat):
        loss = lambda params: params(tokens, tokens, tokens, remat=remat).sum()
        with jax.set_mesh(make_mesh(MeshConfig(sequence=4))):
            return str(jax.make_jaxpr(jax.grad(loss))(models.abstract(MODEL))).count("ppermute")

    assert exchanges("full") - exchanges("attention") == 3  # keys, values, segments
