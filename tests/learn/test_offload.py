"""Moments and frozen models in host memory: the numbers of the plain run, also from a checkpoint."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxrl_kernels.topology import gpu_devices
from jaxrl_llm import models
from jaxrl_llm.algos import gkd, sft
from jaxrl_llm.checkpoint.config import CheckpointConfig
from jaxrl_llm.checkpoint.state import Checkpointer
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.learn.config import OptimConfig
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.optim import make_optimizer
from jaxrl_llm.learn.reference import Reference
from jaxrl_llm.learn.update import LossArrays, StepConfig
from jaxrl_llm.models import LoraConfig, TransformerConfig, lora
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import HOST, TRAIN, bytes_per_device, with_shardings

MODEL = TransformerConfig(
    vocab_size=64, hidden_size=16, mlp_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8
)


REPLICAS, STAGES = MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(stage=2, fsdp=2, tensor=2)


def learner(offload: bool, mesh=REPLICAS, *, model=MODEL, moments="float32") -> Learner:
    step = StepConfig(row_tokens=16, rows=8, offload=offload)
    optimizer = make_optimizer(OptimConfig(learning_rate=0.01, moments=moments), 10)
    return Learner(sft.Config(), model, optimizer, step, mesh=make_mesh(mesh))


def batch(seed: int) -> list[PackItem]:
    rng = np.random.default_rng(seed)
    return [PackItem(rng.integers(0, 64, 12).astype(np.int32), np.ones(12, np.float32)) for _ in range(8)]


def start(built: Learner):
    make = jax.jit(models.init, static_argnums=0, out_shardings=built.param_shardings)
    return built.init_state(make(built.model, jax.random.key(0)))


def updates(built: Learner, state, steps):
    with jax.set_mesh(built.mesh):
        for step in steps:
            state, _ = built.update(state, [batch(step)])
    return state


def assert_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def plain():
    built = learner(offload=False)
    return jax.tree.map(np.asarray, updates(built, start(built), range(4)))


@pytest.mark.slow
def test_offloaded_updates_are_those_of_the_plain_run_also_from_a_checkpoint(plain, tmp_path):
    built = learner(offload=True)
    state = updates(built, start(built), range(2))
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(state.params))
    assert {x.sharding.memory_kind for x in moments} == {"pinned_host"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {"device"}
    saver = Checkpointer(CheckpointConfig(async_save=False), tmp_path)
    assert saver.save(2, state, {"config": {}}, {})
    assert_equal(updates(built, state, range(2, 4)), plain)

    _, restored, _ = saver.restore(built.abstract_state())
    assert {x.sharding.memory_kind for x in jax.tree.leaves(restored.opt_state) if x.ndim} == {"pinned_host"}
    assert_equal(updates(built, restored, range(2, 4)), plain)
    saver.close()


@pytest.mark.slow
def test_a_checkpoint_may_be_continued_with_or_without(plain, tmp_path):
    built, other = learner(offload=False), learner(offload=True)
    saver = Checkpointer(CheckpointConfig(async_save=False), tmp_path)
    assert saver.save(2, updates(built, start(built), range(2)), {"config": {}}, {})
    assert_equal(updates(other, saver.restore(other.abstract_state())[1], range(2, 4)), plain)
    saver.close()


def test_moments_count_as_host_memory():
    """Two float32 moments of 1 / 4 (fsdp x tensor) of each matrix; two step counters stay."""
    off, on = learner(offload=True).abstract_state(), learner(offload=False).abstract_state()
    moments = bytes_per_device(off.opt_state, "pinned_host")
    assert moments == 2 * bytes_per_device(off.params)
    assert bytes_per_device(off.opt_state) == bytes_per_device(on.opt_state) - moments == 8
    assert bytes_per_device(on, "pinned_host") == 0


LARGE = replace(MODEL, hidden_size=64, mlp_size=128, head_dim=32)  # its matrices have moments of 8 bits


def test_scales_of_8_bit_moments_are_in_host_memory_too():
    """Of each moment codes of 81,920 numbers, scales of the 1,408 last dims of these matrices, and 4,544
    float32 of embedding and norms; three counters stay on the device."""
    mesh = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    step, optim = StepConfig(row_tokens=16, rows=8, offload=True), OptimConfig(moments="int8")
    built = Learner(sft.Config(), LARGE, make_optimizer(optim, 10), step, mesh=mesh)
    moments = built.abstract_state().opt_state
    assert bytes_per_device(moments, HOST) == 2 * (81_920 + 4 * 1_408 + 4 * 4_544)
    assert bytes_per_device(moments) == 3 * 4


@pytest.mark.slow
def test_offloaded_8_bit_moments_give_the_weights_of_those_on_the_devices(tmp_path):
    plain, built = (learner(x, model=LARGE, moments="int8") for x in (False, True))
    expected = jax.tree.map(np.asarray, updates(plain, start(plain), range(4)))
    state = updates(built, start(built), range(2))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim} == {HOST}
    saver = Checkpointer(CheckpointConfig(async_save=False), tmp_path)
    assert saver.save(2, state, {"config": {}}, {})
    assert_equal(updates(built, saver.restore(built.abstract_state())[1], range(2, 4)), expected)
    saver.close()


@pytest.mark.compilers
def test_an_update_does_not_hold_all_moments_at_once():
    """Compiled for an H100: all at once would take their bytes, and new ones as many again."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    wide = replace(MODEL, hidden_size=1024, mlp_size=4096, num_layers=4, head_dim=64)
    mesh, step = make_mesh(MeshConfig(), gpu_devices("h100")), StepConfig(row_tokens=16, rows=8, offload=True)
    built = Learner(sft.Config(), wide, make_optimizer(OptimConfig(), 10), step, mesh=mesh)
    apply = built.update_programs([])["apply"]
    with jax.set_mesh(mesh):
        memory = apply.fn.lower(*apply.args).compile().memory_analysis()
    moments = bytes_per_device(apply.args[0].opt_state, HOST)
    assert memory.host_alias_size_in_bytes == moments
    assert memory.temp_size_in_bytes < 0.8 * moments


@pytest.mark.parametrize("mesh", [REPLICAS, pytest.param(STAGES, marks=pytest.mark.slow)], ids=str)
def test_a_model_in_host_memory_scores_as_on_the_devices(mesh):
    built = learner(offload=False, mesh=mesh)
    plain = start(built).params
    moved = models.to_host(plain)
    kinds = {name: x.sharding.memory_kind for name, x in models.named_leaves(moved)}
    on_device = {name for name, kind in kinds.items() if kind == "device"}
    assert on_device == {n for n in kinds if "norm" in n} and kinds["layers.q"] == kinds["embed"] == HOST
    for one, other in zip(*(built.scorer.start(x, batch(0))() for x in (plain, moved)), strict=True):
        np.testing.assert_array_equal(one["logprobs"], other["logprobs"])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshConfig(fsdp=4, tensor=2), STAGES], ids=str)
def test_a_teacher_in_host_memory_gives_the_gradient_of_one_on_the_devices(mesh):
    step = StepConfig(row_tokens=16, rows=8, remat="full")
    optimizer, mesh = make_optimizer(OptimConfig(), 10), make_mesh(mesh)
    built = Learner(gkd.Config(teachers=("t",)), MODEL, optimizer, step, mesh=mesh)
    student, other = start(built), jax.tree.map(lambda w: 2 * w, start(built).params)
    items = batch(0)
    for item in items:
        item.signals = {"labels": np.zeros(12, np.float32)}
    totals = (np.float32(96), np.float32(8))
    rows = built.scorer.batches(items, 8)
    grads = []
    with jax.set_mesh(mesh):
        for teacher in (other, models.to_host(other)):
            trained, frozen = lora.split_params(student.params)
            arrays = LossArrays(rows[0], built._totals(rows, *totals, student), (teacher,), frozen)
            grads.append(built._accumulate(trained, built._zeros(trained), arrays)[0])
    assert_equal(*grads)
    assert max(np.abs(g).max() for g in jax.tree.leaves(grads[0])) > 1e-3


def test_a_reference_in_host_memory_is_that_of_the_devices_also_after_a_restart(tmp_path):
    built = learner(offload=False)
    current, abstract = start(built).params, built.abstract_state().params
    reference = lambda offload: Reference(tmp_path, "bfloat16", lambda: current, abstract, offload=offload)
    plain = reference(False).params(0, 0, current)
    assert_equal(reference(True).params(0, 0, current), plain)
    assert not (tmp_path / "reference").exists()  # initial weights can be had again
    after_warm_up = reference(True).params(3, 3, current)  # saves it
    assert_equal(after_warm_up, plain)
    kept, other = reference(True), jax.tree.map(jax.numpy.zeros_like, current)
    restored = kept.params(3, 5, other)
    assert kept.params(3, 6, other) is restored  # read once
    assert restored.layers.q[...].sharding.memory_kind == HOST
    assert_equal(restored, plain)


def test_adapters_alone_go_to_host_memory():
    """The reference of a run with adapters, after its warm-up: their weights without the frozen ones."""
    config = lora.with_lora(MODEL, LoraConfig(rank=2))
    shardings = models.shardings(config, make_mesh(MeshConfig(fsdp=8)), TRAIN)
    adapters = lora.split_params(with_shardings(models.abstract(config), shardings))[0]
    moved = jax.tree.leaves(models.to_host(adapters))
    assert len(moved) == 2 * 7 and {x.sharding.memory_kind for x in moved} == {HOST}
