"""Preference, reward-model and distillation losses from rows of data to gradients: no layout changes them."""

import json
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from gradients import SUM, assert_same, gradients_of
from random_weights import weights_for
from slow_cases import with_slow

from jaxrl_llm import algos
from jaxrl_llm.algos import distill, dpo, kto, reward_model
from jaxrl_llm.data.config import DataConfig, SourceConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.experience.dataset import dataset_items
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

MODEL = TransformerConfig(
    vocab_size=128, hidden_size=16, mlp_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8
)
CASES = {
    "dpo": (dpo.Config(nll_coef=0.1), ("preference",)),
    "kto": (kto.Config(), ("preference", "reverse")),
    "reward_model": (reward_model.Config(center_coef=0.1), ("preference",)),
    "distill": (distill.Config(beta=0.3, top_k=5, nll_coef=0.1), ("preference", "reverse")),
}


def items_of(algo, tasks, size):
    options = {"preference": {"digits": 1}}
    sources = tuple(
        SourceConfig(path=f"task:{name}", options=json.dumps(options.get(name, {})), teacher=i)
        for i, name in enumerate(tasks)
    )
    loader = Loader(DataConfig(train=sources), make_tokenizer(), 0, 24, max_tokens=32)
    return dataset_items(loader, algo, 0, size)


def gradient(algo, items, devices=1, **settings):
    """(metrics, gradients by name) of one update."""
    model = replace(MODEL, initializer_range=0.3, value_head=algos.requirements(algo).values)
    mesh = make_mesh(MeshConfig(fsdp=devices), jax.devices()[:devices])
    built = Learner(algo, model, SUM, StepConfig(max_grad_norm=0.0, **settings), mesh=mesh)
    with jax.set_mesh(mesh):
        teachers = (
            (weights_for(built, 1), weights_for(built, 2)) if algos.requirements(algo).divergence else ()
        )
        stage, state = Stage(built, teachers=teachers), built.init_state(weights_for(built, 0))
        stage.score(state, items, weights_for(built, 3) if algos.requirements(algo).ref_logprobs else None)
        state, metrics = stage.update(state, [items], step=0)
    return {k: float(v) for k, v in metrics.items()}, gradients_of(state)


@pytest.mark.parametrize(
    "name", with_slow(["dpo", "kto", "reward_model", "distill"], {"kto", "reward_model", "distill"})
)
def test_rows_packing_order_and_devices_change_nothing(name):
    algo, tasks = CASES[name]
    wanted, wanted_gradient = gradient(algo, items_of(algo, tasks, 6), rows=2, row_tokens=64)
    assert wanted["grad_norm"] > 1e-3
    turned = items_of(algo, tasks, 6)
    size = algos.of(algo).group_size
    turned = [item for i in range(len(turned) - size, -1, -size) for item in turned[i : i + size]]
    metrics, found = gradient(algo, turned, rows=4, row_tokens=72, chunk=7, devices=2, share_prefixes=True)
    assert metrics.pop("packing/shared_fraction") > 0.05
    assert_same((metrics, found), (wanted, wanted_gradient))


@pytest.mark.slow
def test_a_pair_with_an_empty_side_changes_nothing():
    algo, tasks = CASES["dpo"]
    items = items_of(algo, tasks, 4)
    without, _ = gradient(algo, items[:6], rows=2, row_tokens=64)
    items[7].mask = np.zeros_like(items[7].mask)
    metrics, _ = gradient(algo, items, rows=2, row_tokens=64)
    names = ("loss", "grad_norm", "margin", "accuracy", "chosen_nll")
    assert {n: metrics[n] for n in names} == {n: pytest.approx(without[n], rel=1e-5) for n in names}


@pytest.mark.slow
def test_a_policy_that_is_its_reference_has_the_loss_of_a_coin():
    algo = dpo.Config()
    mesh = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    built = Learner(algo, MODEL, optax.adam(2e-2), StepConfig(row_tokens=64, rows=4), mesh=mesh)
    items = items_of(algo, ("preference",), 4)
    with jax.set_mesh(mesh):
        reference, state = weights_for(built, 0), built.init_state(weights_for(built, 0))
        stage, seen = Stage(built), []
        for step in range(60):
            stage.score(state, items, reference)
            state, metrics = stage.update(state, [items], step)
            seen.append({k: float(v) for k, v in metrics.items()})
    assert seen[0]["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert seen[0]["margin"] == pytest.approx(0.0, abs=1e-6)
    assert seen[-1]["accuracy"] == 1.0 and seen[-1]["margin"] > 0.5 and seen[-1]["loss"] < 0.5
