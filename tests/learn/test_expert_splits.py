"""Policy and balance loss of experts: no mesh, micro-batch split or packing changes the gradient."""

import dataclasses
import functools
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from distributed import run_processes
from gradients import SUM, assert_same_gradients, gradients_of
from tiny_models import random_params

from jaxrl_llm.algos import grpo
from jaxrl_llm.data.packing import PackItem, pack
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.moe_losses import Replay
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.experts.router import route_spec, unknown_route
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

MODEL = TransformerConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.3,
    moe=MoEConfig(num_experts=4, experts_per_token=2, expert_size=16, shared_size=16, latent_size=24),
)  # fmt: skip
ONE = MeshConfig(fsdp=1)
REPLAY = Replay("rollout", route_spec(MODEL))
SPLIT = {"rows": 4, "row_tokens": 64, "share_prefixes": True}


@functools.cache
def trajectories(prompts=4, responses=4, prompt_tokens=12):
    """Return responses of 4 to 16 tokens to each prompt, off policy; half the tokens have random routes."""
    rng = np.random.default_rng(0)
    spec, items = route_spec(MODEL), []
    draw_tokens = lambda n: rng.integers(0, 64, n).astype(np.int32)
    for _ in range(prompts):
        prompt, prompt_routes = draw_tokens(prompt_tokens), draw_routes(rng, spec, prompt_tokens)
        for length in rng.integers(4, 17, responses):
            size = prompt_tokens + length
            signals = {
                "advantages": np.full(size, rng.normal(), np.float32),
                "rollout_logprobs": rng.normal(-4, 2, size).astype(np.float32),
                "ref_logprobs": rng.normal(-4, 2, size).astype(np.float32),
                "old_logprobs": rng.normal(-4, 2, size).astype(np.float32),
            }
            items.append(
                PackItem(
                    np.concatenate([prompt, draw_tokens(length)]),
                    (np.arange(size) >= prompt_tokens).astype(np.float32),
                    signals,
                    np.concatenate([prompt_routes, draw_routes(rng, spec, length)]),
                )
            )
    return items


def draw_routes(rng, spec, count):
    """Return distinct experts for each token and layer; for about half of the tokens none."""
    numbers = rng.permuted(np.tile(np.arange(4), (count, spec.shape[0], 1)), axis=-1)[..., : spec.shape[1]]
    is_known = rng.random((count, 1, 1)) < 0.5
    return np.where(is_known, np.sort(numbers), unknown_route(spec.dtype)).astype(spec.dtype)


def learner(mesh=ONE, rows=16, row_tokens=32, devices=None, **settings):
    mesh = make_mesh(mesh, devices or jax.devices()[: math.prod(mesh.sizes.values())])
    settings = {"max_grad_norm": 0.0, "balance_coef": 2.0, **settings}
    step = StepConfig(row_tokens=row_tokens, rows=rows, **settings)
    return Learner(grpo.Config(kl_coef=0.05), MODEL, SUM, step, mesh=mesh)


def one_update(built):
    """(metrics, gradients by name) of one update from the same weights."""
    put = lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    items = [dataclasses.replace(item, signals=dict(item.signals)) for item in trajectories()]
    with jax.set_mesh(built.mesh):
        state = built.init_state(jax.tree.map(put, random_params(MODEL), built.param_shardings))
        state, metrics = built.update(state, [items])
        state = jax.jit(lambda state: state, out_shardings=built.replicated)(state)
    return jax.device_get(metrics), gradients_of(state)


@functools.cache
def reference_update(**settings):
    """All rows as one micro-batch on one device, each trajectory with a prompt of its own."""
    return one_update(learner(**settings))


def num_microbatches(config):
    return len(pack(trajectories(), config.row_tokens, config.rows, share=config.share_prefixes))


def assert_same(got, expected):
    (metrics, gradient), (expected_metrics, expected_gradient) = got, expected
    for name in ("loss", "kl", "clip_fraction", "grad_norm", "moe/balance", "moe/load_max"):
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5), name
    assert_same_gradients(gradient, expected_gradient)


@pytest.mark.slow
def test_the_loss_has_both_parts():
    """A fifth of the tokens or more are clipped; two layers have a balance loss above 1 each."""
    metrics, gradient = reference_update()
    assert 0.2 < metrics["clip_fraction"] < 0.8 and metrics["kl"] > 0.1 and metrics["moe/balance"] > 1.01
    policy_loss = metrics["loss"] - 2 * 2 * metrics["moe/balance"]
    assert abs(policy_loss - 0.05 * metrics["kl"]) > 0.01
    assert all(np.any(x) for x in gradient.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        (ONE, {"rows": 2, "row_tokens": 48, "share_prefixes": True}),
        (MeshConfig(fsdp=2, tensor=2, sequence=2), SPLIT),
        (MeshConfig(data=2, fsdp=1, expert=4), {"rows": 8}),
        (MeshConfig(fsdp=2, expert=2, tensor=2), {"rows": 4, "row_tokens": 64}),
        (MeshConfig(fsdp=1, data=2, expert=2, sequence=2), {**SPLIT, "sequence_parallel": "ulysses"}),
    ],
    ids=["one device", "fsdp tensor sequence", "data expert", "fsdp expert tensor", "data expert ulysses"],
)
def test_no_split_changes_the_gradient(mesh, settings):
    """Of two micro-batches or more; rows have each prompt once, or one for each response."""
    built = learner(mesh, **settings)
    assert num_microbatches(built.config) >= 2
    metrics, gradient = one_update(built)
    assert (metrics.get("packing/shared_fraction", 0) > 0.1) == built.config.share_prefixes
    assert_same((metrics, gradient), reference_update())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        (MeshConfig(fsdp=2, expert=2, tensor=2), SPLIT),
        (MeshConfig(data=2, fsdp=2, sequence=2), {"rows": 8}),
    ],
    ids=["fsdp expert tensor", "data fsdp sequence"],
)
def test_no_split_changes_the_gradient_of_replayed_routes(mesh, settings):
    """Other experts than the routers choose, for half of the tokens."""
    expected = reference_update(replay=REPLAY)
    router = expected[1]["layers.router"]
    assert np.abs(router - reference_update()[1]["layers.router"]).max() > 0.1 * np.abs(router).max()
    built = learner(mesh, replay=REPLAY, **settings)
    assert num_microbatches(built.config) >= 2
    got = one_update(built)
    assert got[0]["moe/route_agreement"] == pytest.approx(expected[0]["moe/route_agreement"], rel=1e-6)
    assert 0.3 < got[0]["moe/route_agreement"] < 0.7
    assert_same(got, expected)


SCRIPT = """
import sys
import jax, numpy as np
sys.path.insert(0, sys.argv[1])
from test_expert_splits import SPLIT, MeshConfig, learner, one_update

built = learner(MeshConfig(fsdp=1, tensor=2, sequence=2), **SPLIT)
assert [device.process_index for device in built.mesh.devices.flat] == [0, 0, 1, 1]
metrics, gradient = one_update(built)
if jax.process_index() == 0:
    np.savez(sys.argv[2], **metrics, **gradient)
"""


@pytest.mark.slow
def test_two_processes_give_the_update_of_one_device(tmp_path):
    """Two micro-batches; tensor divides the experts over the processes, sequence the tokens inside each."""
    assert num_microbatches(learner(**SPLIT).config) == 2
    run_processes(SCRIPT, 2, [str(Path(__file__).parent), str(tmp_path / "update.npz")], devices=2)
    with np.load(tmp_path / "update.npz") as got:
        metrics, gradient = reference_update()
        assert_same((got, {name: got[name] for name in gradient}), (metrics, gradient))
