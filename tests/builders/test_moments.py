"""Moments of another run, checkpoints without moments, and exports in between."""

import dataclasses
import errno

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import random_params

from jaxrl_llm import models
from jaxrl_llm.algos import sft
from jaxrl_llm.builders import exports
from jaxrl_llm.builders.exports import export_due, export_step
from jaxrl_llm.builders.moments import adopt_moments, check_initial_moments, restart_moments
from jaxrl_llm.checkpoint.config import CheckpointConfig
from jaxrl_llm.checkpoint.params import restore_params
from jaxrl_llm.checkpoint.state import Checkpointer
from jaxrl_llm.config import ModelConfig, TrainConfig
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.learn.config import OptimConfig
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.optim import make_optimizer
from jaxrl_llm.learn.optim_states import averaged_weights
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import LoraConfig, TransformerConfig, lora
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

MODEL = TransformerConfig(
    vocab_size=160, hidden_size=16, mlp_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8
)
OPTIM = OptimConfig(learning_rate=0.01, warmup_steps=3)


def stage_of(optim=OPTIM, model=MODEL):
    step, mesh = StepConfig(row_tokens=16, rows=1), make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    return Stage(Learner(sft.Config(), model, make_optimizer(optim, 10), step, mesh=mesh))


def trained(stage, updates):
    """The state after some updates from the same weights."""
    state = stage.init_state(jax.tree.map(jnp.asarray, random_params(stage.policy.model)))
    rng = np.random.default_rng(0)
    items = [PackItem(rng.integers(0, 64, 12).astype(np.int32), np.ones(12, np.float32))]
    with jax.set_mesh(stage.policy.mesh):
        for step in range(updates):
            state, _ = stage.update(state, [items], step)
    return state


def saved(run_dir, state, optim=OPTIM, **settings):
    """Save a state as a run does; return its Checkpointer."""
    saver = Checkpointer(CheckpointConfig(async_save=False, **settings), run_dir)
    config = {"optim": dataclasses.asdict(optim)}
    assert saver.save(4, lora.trained_state(state), {"config": config, "model": model_fields(state)}, {})
    return saver


def model_fields(state):
    return dataclasses.asdict(state.params.config)


def size_of(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def assert_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_moments_start_anew_where_a_checkpoint_has_none(tmp_path):
    """Weights, their averages and the place in the learning-rate schedule continue; Adam's count does not."""
    optim = dataclasses.replace(OPTIM, ema=0.9)
    stage = stage_of(optim)
    state = trained(stage, 2)
    bare, full = (saved(tmp_path / name, state, optim, optimizer=name == "full") for name in ("bare", "full"))
    assert size_of(bare.folder) < 0.6 * size_of(full.folder)  # 2 instead of 4 numbers a weight
    target = stage.abstract_state()
    assert_equal(restart_moments(stage, full.restore(target)[1]), state)
    restored = bare.restore(target)[1]
    assert isinstance(restored.opt_state.inner[0].count, jax.ShapeDtypeStruct)
    resumed = restart_moments(stage, restored)
    assert_equal((resumed.params, resumed.version), (state.params, state.version))
    assert_equal(averaged_weights(resumed.opt_state), averaged_weights(state.opt_state))
    adam, _, schedule = resumed.opt_state.inner
    assert (int(adam.count), int(schedule.count)) == (0, 2)
    assert not any(np.any(x) for x in jax.tree.leaves((adam.mu, adam.nu)))
    again = restore_params(tmp_path / "bare", ema=True).params
    assert_equal(again, averaged_weights(state.opt_state))
    with pytest.raises(UserError, match="has no optimizer state"):
        check_initial_moments(config_of(tmp_path, tmp_path / "bare"), stage)


def config_of(tmp_path, source, **optim):
    optim = dataclasses.replace(OPTIM, init_from=str(source), **optim)
    return TrainConfig(run_dir=str(tmp_path / "new"), optim=optim)


def test_a_run_starts_with_the_moments_of_another(tmp_path):
    """Its schedule starts at 0, its averages at its own weights."""
    other = trained(stage_of(), 2)
    saved(tmp_path / "other", other)
    config = config_of(tmp_path, tmp_path / "other", ema=0.9)
    stage = stage_of(config.optim)
    fresh = trained(stage, 0)
    weights = jax.tree.map(np.asarray, fresh.params)
    state = adopt_moments(config, stage, fresh)
    adam, _, schedule = state.opt_state.inner
    assert_equal(adam, other.opt_state[0])
    assert (int(adam.count), int(schedule.count), int(state.version)) == (2, 0, 0)
    assert_equal((state.params, averaged_weights(state.opt_state)), (weights, weights))
    assert float(jnp.abs(adam.mu.layers.q[...]).max()) > 0


def test_moments_that_do_not_fit_are_refused_before_anything_is_read(tmp_path):
    stage, fix = stage_of(), "Set --optim.init_from to a run of the same model, adapters and optimizer"
    other = tmp_path / "other"
    saved(other, trained(stage, 0))
    check_initial_moments(config_of(tmp_path, other), stage)
    with pytest.raises(UserError, match=f"4: its optimizer is adamw, this run's is lion. {fix}"):
        check_initial_moments(config_of(tmp_path, other, name="lion"), stage)
    adapters = stage_of(model=lora.with_lora(MODEL, LoraConfig(rank=2)))
    with pytest.raises(UserError, match=rf"q_lora_a: not in the checkpoint(.|\n)*{fix}"):
        check_initial_moments(config_of(tmp_path, other), adapters)
    with pytest.raises(
        UserError, match=rf"--optim.init_from {other}/hf: .*give the run_dir .* saved one: {other}$"
    ):
        check_initial_moments(config_of(tmp_path, other / "hf"), stage)
    with pytest.raises(UserError, match=r"no checkpoint; give the run_dir of a run that has saved one$"):
        check_initial_moments(config_of(tmp_path, tmp_path / "none"), stage)
    (tmp_path / "new" / "checkpoints" / "3").mkdir(parents=True)  # the run continues: nothing is needed
    check_initial_moments(config_of(tmp_path, tmp_path / "none"), stage)


def test_exports_in_between(tmp_path, capsys, monkeypatch):
    """Weights and averages every 5 steps of 20, the last two kept; a full disk does not end the run."""
    checkpoint = CheckpointConfig(hf_every=5, hf_keep=2)
    assert [step for step in range(1, 21) if export_due(checkpoint, step)] == [5, 10, 15, 20]
    assert not any(export_due(CheckpointConfig(), step) for step in range(1, 21))
    model = ModelConfig(architecture=MODEL, tokenizer="tiny", dtype="float32")
    config = TrainConfig(run_dir=str(tmp_path), model=model, checkpoint=checkpoint)
    state = trained(stage_of(dataclasses.replace(OPTIM, ema=0.9)), 2)
    for step in (5, 10, 15, 10):  # a run that continues comes to a step again
        export_step(config, make_tokenizer(), state, step)
    folder = tmp_path / "exports"
    assert sorted(str(p.relative_to(folder)) for p in folder.glob("*/*")) == [
        "10/hf", "10/hf_ema", "15/hf", "15/hf_ema",
    ]  # fmt: skip
    plain = dict(models.named_leaves(load_params(folder / "15/hf", MODEL)))
    average = dict(models.named_leaves(load_params(folder / "15/hf_ema", MODEL)))
    for name, weight in models.named_leaves(state.params):
        np.testing.assert_array_equal(plain[name], weight)
    for name, weight in models.named_leaves(averaged_weights(state.opt_state)):
        np.testing.assert_array_equal(average[name], weight)
    assert np.abs(plain["layers.q"] - average["layers.q"]).max() > 1e-4
    (folder / "20" / "hf").mkdir(parents=True)
    (folder / "20" / "hf" / "mine.txt").touch()
    export_step(config, make_tokenizer(), state, 20)
    assert "step 20 is NOT exported" in capsys.readouterr().err
    stop = dataclasses.replace(config, checkpoint=dataclasses.replace(checkpoint, on_full_disk="stop"))
    with pytest.raises(UserError, match=r"holds mine.txt"):
        export_step(stop, make_tokenizer(), state, 20)

    def fails(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(exports, "save_model", fails)
    export_step(config, make_tokenizer(), state, 30)
    with pytest.raises(RunError, match=r"step 30 is not exported: .*Input/output error"):
        export_step(stop, make_tokenizer(), state, 30)
