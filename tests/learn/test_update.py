"""The layout never changes the answer: meshes, micro-batches, packing and padding give one gradient."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from random_weights import weights_for

from jaxrl_kernels.topology import gpu_devices, missing_compiler, tpu_devices
from jaxrl_llm import algos
from jaxrl_llm.algos import grpo, requirements, sft
from jaxrl_llm.algos.contract import choose_old_logprobs
from jaxrl_llm.algos.reduce import combine
from jaxrl_llm.data.packing import PackItem, counts, pack
from jaxrl_llm.learn.config import OptimConfig
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.optim import make_optimizer
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.learn.update import StepConfig, loss_inputs, model_outputs
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.plan.compiled import CollectiveStats, count_collectives
from jaxrl_llm.plan.hlo import parse
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import bytes_per_device, put_rows
from jaxrl_llm.structs import BatchTotals

MODEL = TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8
)
ONE = MeshConfig(fsdp=1)


def trajectories(n=16, seed=0, longest=24):
    rng = np.random.default_rng(seed)
    items = []
    for length in rng.integers(5, longest, n):
        mask = np.ones(length, np.float32)
        mask[:3] = 0
        signals = {
            "advantages": np.full(length, rng.normal(), np.float32),
            "rollout_logprobs": rng.normal(-4, 0.1, length).astype(np.float32),
        }
        items.append(PackItem(rng.integers(0, 64, length).astype(np.int32), mask, signals))
    return items


def long_trajectories(shortest, longest):
    lengths = iter((shortest, longest))
    return [
        dataclasses.replace(
            item,
            tokens=np.resize(item.tokens, n),
            mask=np.pad(np.zeros(3, np.float32), (0, n - 3), constant_values=1),
            signals={name: np.resize(values, n) for name, values in item.signals.items()},
        )
        for item, n in zip(trajectories(2, seed=1), lengths, strict=True)
    ]


def learner(mesh=ONE, rows=4, row_tokens=32, algo=None, *, optimizer=None, model=MODEL, **settings):
    devices = jax.devices()[: abs(math.prod(mesh.sizes.values()))]
    config = StepConfig(row_tokens=row_tokens, rows=rows, **settings)
    algo = algo or grpo.Config(kl_coef=0.0)
    # SGD with rate 1: the change of the weights is the gradient.
    optimizer = optimizer or optax.sgd(1.0)
    return Learner(algo, model, optimizer, config, mesh=make_mesh(mesh, devices))


def one_update(built, items=None, minibatches=1):
    """(loss, gradient) of one update from the same initial weights."""
    items = items or trajectories()
    with jax.set_mesh(built.mesh):
        params = weights_for(built)
        before = jax.tree.map(np.asarray, params)
        reference = before if requirements(built.algo).ref_logprobs else None
        state, metrics = full_step(built, built.init_state(params), [items] * minibatches, reference)
        after = jax.tree.map(np.asarray, state.params)
    return {k: float(v) for k, v in metrics.items()}, jax.tree.map(lambda a, b: a - b, before, after)


def full_step(built, state, minibatches, reference=None):
    """Scores before the first update, then the updates."""
    algorithm = algos.of(built.algo)
    old = choose_old_logprobs(algorithm, algos.requirements(built.algo), len(minibatches))
    built.config = dataclasses.replace(built.config, old_logprobs_source=old)
    stage = Stage(built)
    stage.score(state, [i for items in minibatches for i in items], reference)
    return stage.update(state, minibatches, step=0)


def assert_same(got, wanted, rel=1e-5):
    (metrics, gradient), (metrics_0, gradient_0) = got, wanted
    assert metrics["loss"] == pytest.approx(metrics_0["loss"], rel=rel, abs=1e-7)
    assert metrics["grad_norm"] == pytest.approx(metrics_0["grad_norm"], rel=rel)
    size = float(optax.tree.norm(gradient_0))
    apart = float(optax.tree.norm(jax.tree.map(lambda a, b: a - b, gradient, gradient_0)))
    assert apart <= rel * size


@pytest.fixture(scope="module")
def reference_update():
    return one_update(learner(max_grad_norm=0.0))


def long_and_short_items():
    return [*trajectories(60, longest=16), *long_trajectories(100, 120)]


@pytest.fixture(scope="module")
def update_of_long_and_short_rows():
    """Items with the log-probs of one device, its loss and gradient."""
    items = long_and_short_items()
    return items, one_update(learner(rows=2, row_tokens=128, max_grad_norm=0.0), items)


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(stage=2, fsdp=2, tensor=2),
        *(
            pytest.param(mesh, marks=pytest.mark.slow)
            for mesh in (
                MeshConfig(data=2, fsdp=2, tensor=2, slices=2),
                MeshConfig(fsdp=4, sequence=2),
                MeshConfig(data=8, fsdp=1),
                MeshConfig(fsdp=8),
                MeshConfig(fsdp=2, tensor=4),
                MeshConfig(fsdp=1, tensor=8),
                MeshConfig(stage=4, fsdp=1, tensor=2),
                MeshConfig(data=2, stage=3, fsdp=1),
                MeshConfig(data=2, stage=2, fsdp=1, sequence=2),
                MeshConfig(stage=2, fsdp=1, sequence=2, tensor=2, sequence_parallel="ulysses"),
            )
        ),
    ],
    ids=str,
)
def test_every_mesh_gives_the_gradient_of_one_device(mesh, reference_update):
    assert_same(one_update(learner(mesh, math.lcm(8, mesh.stage), max_grad_norm=0.0)), reference_update)


@pytest.mark.slow
def test_stages_divide_the_embedding_and_the_head():
    """Each of S devices holds 1 / S of the 64 x 32 weights of both, and as much of their momentum."""
    untied = dataclasses.replace(MODEL, tie_embeddings=False)
    expected = one_update(learner(model=untied, max_grad_norm=0.0))
    for stages in (2, 4):
        mesh, momentum = MeshConfig(stage=stages, fsdp=1), optax.sgd(1.0, momentum=0.9)
        built = learner(mesh, rows=8, model=untied, max_grad_norm=0.0, optimizer=momentum)
        state = built.abstract_state()
        for tree in (state.params, state.opt_state[0].trace):
            sizes = [bytes_per_device(weight) for weight in (tree.embed, tree.lm_head)]
            assert sizes == [4 * 64 * 32 / stages] * 2
        assert_same(one_update(built), expected)


def bytes_across(built, platform):
    """Return (program of an update -> bytes that one of 8 devices sends to the other slice, programs)."""
    across, programs = {}, built.update_programs(("advantages", "rollout_logprobs"))
    for name, program in programs.items():
        with jax.set_mesh(built.mesh):
            lowered = program.fn.trace(*program.args).lower(lowering_platforms=(platform,))
        counted = count_collectives(parse(lowered.compile().as_text()), 8, slices=[0] * 4 + [1] * 4)
        across[name] = sum(stats.across for stats in counted.values())
    return across, programs


@pytest.mark.slow
def test_gradients_cross_slices_once_an_update():
    """A micro-batch sends the log-probs of its 8 x 32 tokens, half of them to each of two slices; `add` sends
    every device's part of the gradients; `apply` sends metrics."""
    built = learner(MeshConfig(data=2, fsdp=4, slices=2), rows=8, max_grad_norm=0.0)
    across, programs = bytes_across(built, "cpu")
    assert across["accumulate"] <= 4 * 8 * 32 / 2
    assert across["add"] == bytes_per_device(programs["add"].args)
    assert across["apply"] <= 4 * 50


@pytest.mark.slow
def test_stages_send_hidden_states_alone():
    """8 chunks of 32 tokens in 9 ticks, forward and backward: each sends one chunk to the next stage, and one
    towards the first. Weights of layers are sent nowhere."""
    built = learner(MeshConfig(stage=2, fsdp=1), rows=8, max_grad_norm=0.0)
    program = built.update_programs(("advantages", "rollout_logprobs"))["accumulate"]
    with jax.set_mesh(built.mesh):
        module = parse(program.fn.lower(*program.args).compile().as_text())
    sent, size = count_collectives(module, 2, slices=[0, 1]), 36 * 32 * 32 * 4
    assert sent.pop("collective-permute") == CollectiveStats(36, size, size)
    assert sum(stats.bytes for stats in sent.values()) < 32 * 1024  # rows, embedding and head


def learner_on(platform, mesh):
    """Return a learner in bfloat16, with the kernels of the platform, on 8 devices to compile for."""
    if problem := missing_compiler(platform):
        pytest.skip(problem)
    devices = tpu_devices("v5e", (2, 4)) if platform == "tpu" else gpu_devices("h100", 8)
    sizes = dict(vocab_size=2048, hidden_size=512, mlp_size=1024, num_layers=2, num_heads=4, num_kv_heads=4)
    model, config = (
        TransformerConfig(**sizes, head_dim=128),
        StepConfig(512, 8, dtype="bfloat16", remat="full"),
    )
    return Learner(grpo.Config(), model, optax.sgd(1.0), config, mesh=make_mesh(mesh, devices))


@pytest.mark.compilers
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_accelerators_send_gradients_to_other_slices_once_an_update(platform):
    """Log-probs may be sent to all devices one by one."""
    built = learner_on(platform, MeshConfig(data=2, fsdp=2, tensor=2, slices=2))
    across, programs = bytes_across(built, platform)
    assert across["accumulate"] <= 4 * 8 * 512
    assert across["add"] == bytes_per_device(programs["add"].args)


@pytest.mark.compilers
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_accelerators_send_hidden_states_to_other_stages(platform):
    """4 chunks in 5 ticks: 20 times half a chunk of 512 tokens; at most 3 MiB of embedding, head and their
    gradients."""
    built = learner_on(platform, MeshConfig(stage=2, fsdp=2, tensor=2, slices=2))
    across, _ = bytes_across(built, platform)
    assert 20 * 512 * 512 <= across["accumulate"] <= 20 * 512 * 512 + 3 * 2048 * 512, across


@pytest.mark.parametrize(
    ("rows", "row_tokens"),
    [
        (1, 24),
        pytest.param(2, 32, marks=pytest.mark.slow),
        pytest.param(16, 32, marks=pytest.mark.slow),
        (3, 64),
        pytest.param(1, 512, marks=pytest.mark.slow),
    ],
    ids=lambda x: str(x),
)
def test_microbatches_packing_and_padding_change_nothing(rows, row_tokens, reference_update):
    assert_same(one_update(learner(rows=rows, row_tokens=row_tokens, max_grad_norm=0.0)), reference_update)


def test_the_update_writes_the_logprobs_that_its_metrics_compare():
    """Bit for bit, over packed rows, micro-batches and devices: mismatch/ is computed of the same numbers."""
    items = trajectories()
    metrics, _ = one_update(learner(MeshConfig(fsdp=2), rows=2, max_grad_norm=0.0), items)
    trained = np.concatenate([item.mask for item in items]) > 0
    policy, rollout = (
        np.concatenate([i.signals[name] for i in items])[trained] for name in ("logprobs", "rollout_logprobs")
    )
    assert metrics["mismatch/max_abs"] == np.abs(policy - rollout).max() > 0.1
    assert metrics["mismatch/mean_abs"] == pytest.approx(np.abs(policy - rollout).mean(), rel=1e-6)
    assert policy.mean() == pytest.approx(-math.log(64), abs=0.05)  # random weights


@pytest.mark.parametrize("settings", [{"remat": "full"}, {"remat": "dots"}, {"chunk": 7}], ids=str)
def test_what_is_recomputed_changes_nothing(settings, reference_update):
    assert_same(one_update(learner(max_grad_norm=0.0, **settings)), reference_update)


def test_order_of_the_trajectories_changes_nothing(reference_update):
    assert_same(one_update(learner(max_grad_norm=0.0), trajectories()[::-1]), reference_update)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token", "sequence", "sequence_sum", "constant"])
def test_aggregations_keep_the_promise_too(aggregation):
    algo = grpo.Config(kl_coef=0.1, aggregation=aggregation, constant=24.0)
    wanted = one_update(learner(rows=16, algo=algo, max_grad_norm=0.0))
    got = one_update(learner(MeshConfig(fsdp=2, tensor=2), 2, 64, algo, max_grad_norm=0.0))
    assert_same(got, wanted)


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(fsdp=2),
        pytest.param(MeshConfig(fsdp=4, tensor=2), marks=pytest.mark.slow),
        pytest.param(MeshConfig(data=2, stage=2, tensor=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bfloat16_stays_near_float32(mesh, reference_update):
    metrics, gradient = one_update(learner(mesh, 8, dtype="bfloat16", max_grad_norm=0.0))
    assert metrics["loss"] == pytest.approx(reference_update[0]["loss"], abs=2e-2)
    assert metrics["grad_norm"] == pytest.approx(reference_update[0]["grad_norm"], rel=2e-2)
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {np.dtype("float32")}


@pytest.mark.slow
def test_old_log_probs_of_later_minibatches_are_those_before_the_first():
    """With a ratio of one everywhere nothing is clipped; after a large first update much is."""
    algo = grpo.Config(kl_coef=0.0, clip_low=0.01, clip_high=0.01)
    single, _ = one_update(learner(algo=algo))
    assert single["clip_fraction"] == 0.0
    assert single["policy_kl"] == 0.0
    double, _ = one_update(learner(algo=algo), minibatches=2)
    assert double["clip_fraction"] > 0.05
    assert double["policy_kl"] != 0.0


def test_kl_to_the_reference_starts_at_zero():
    metrics, _ = one_update(learner(algo=grpo.Config(kl_coef=0.1)))
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)


def test_mismatch_is_measured_on_trained_tokens():
    """Rollout log-probs that are off by 0.25 on one token show as such."""
    built = learner()
    items = trajectories(4)
    (batch,) = pack(items, 32, 4)
    with jax.set_mesh(built.mesh):
        params = weights_for(built)
        exact = np.array(
            model_outputs(params, put_rows(built.mesh, batch), built.config, ("logprobs",))["logprobs"]
        )
    exact[0, np.flatnonzero(batch.mask[0])[0]] += 0.25
    batch = dataclasses.replace(batch, rollout_logprobs=exact, advantages=np.ones_like(exact))
    with jax.set_mesh(built.mesh):
        tokens, sequences = counts(items)
        _, metrics, _ = built.update_minibatch(
            built.init_state(params), [put_rows(built.mesh, batch)], tokens, sequences
        )
    assert float(metrics["mismatch/max_abs"]) == pytest.approx(0.25, abs=1e-5)
    assert float(metrics["mismatch/mean_abs"]) == pytest.approx(0.25 / tokens, rel=1e-3)


def test_padding_under_the_mask_reaches_no_gradient():
    (batch,) = pack(trajectories(3), 32, 4)
    spoilt = dataclasses.replace(
        batch, rollout_logprobs=np.where(batch.mask > 0, batch.rollout_logprobs, np.float32(np.nan))
    )
    policy = np.where(batch.mask > 0, np.float32(-1.0), np.float32(np.nan))

    def loss(policy):
        whole = BatchTotals(jnp.float32(9), jnp.float32(3), jnp.float32(0))
        rows = jax.tree.map(jnp.asarray, spoilt)
        inputs = loss_inputs(rows, {"logprobs": policy, "entropy": policy}, whole)
        return grpo.loss(inputs, grpo.Config(kl_coef=0.0))[0]

    assert np.isfinite(jax.jit(jax.grad(loss))(policy)).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_nonfinite_step_is_skipped_and_counted(poison):
    built = learner(optimizer=make_optimizer(OptimConfig(learning_rate=0.1), 10))
    bad = trajectories()
    bad[3].signals["advantages"][:] = poison
    with jax.set_mesh(built.mesh):
        state = built.init_state(weights_for(built))
        before = jax.tree.map(np.asarray, (state.params, state.opt_state))
        for skipped in (1, 2):
            state, metrics = built.update(state, [bad])
            assert (int(state.nonfinite), int(state.version)) == (skipped, 0)
            assert float(metrics["nonfinite"]) == 1.0
        same = jax.tree.map(
            lambda a, b: bool((a == np.asarray(b)).all()), before, (state.params, state.opt_state)
        )
        assert all(jax.tree.leaves(same))
        state, metrics = built.update(state, [trajectories()])
    assert (int(state.nonfinite), int(state.version), float(metrics["nonfinite"])) == (0, 1, 0.0)


def test_gradients_are_clipped_to_the_norm():
    metrics, clipped = one_update(learner(max_grad_norm=0.01))
    assert metrics["grad_norm"] > 0.1  # reported before clipping
    assert float(optax.tree.norm(clipped)) == pytest.approx(0.01, rel=1e-3)


def test_nothing_compiles_after_the_first_step():
    """Lengths, counts and the number of micro-batches vary; shapes do not."""
    built = learner(rows=2, algo=grpo.Config(kl_coef=0.1))
    with jax.set_mesh(built.mesh):
        params = weights_for(built)
        frozen = jax.tree.map(jnp.copy, params)
        start = built.init_state(params)
        state, _ = full_step(built, start, [trajectories(12), trajectories(12, 1)], frozen)
        sizes = [f._cache_size() for f in (built.scorer.run, built._accumulate, built._apply, built._zeros)]
        for seed in range(2, 5):
            items = trajectories(10 + seed, seed)
            state, _ = full_step(built, state, [items[:6], items[6:]], frozen)
    assert [
        f._cache_size() for f in (built.scorer.run, built._accumulate, built._apply, built._zeros)
    ] == sizes


def test_one_microbatch_needs_no_buffer_of_zeros(monkeypatch):
    built = learner(rows=8)
    monkeypatch.setattr(built, "_zeros", None)
    _, metrics = built.update(built.init_state(weights_for(built)), [trajectories()])
    assert metrics["grad_norm"] > 0.1


def test_state_is_donated():
    built = learner()
    with jax.set_mesh(built.mesh):
        state = built.init_state(weights_for(built))
        built.update(state, [trajectories()])
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))


def test_optimizer_state_lies_where_the_weights_lie():
    built = learner(MeshConfig(fsdp=8), rows=8, optimizer=make_optimizer(OptimConfig(), 10))
    abstract = built.abstract_state()
    moments = [x for x in jax.tree.leaves(abstract.opt_state) if x.shape == (4, 32, 64)]
    assert len(moments) == 4  # mean and square of gate and up
    assert {tuple(x.sharding.spec) for x in moments} == {("stage", ("fsdp", "sequence", "expert"), "tensor")}


def test_sft_learns_a_short_text_by_heart():
    built = learner(algo=sft.Config(), optimizer=make_optimizer(OptimConfig(learning_rate=1e-2), 10))
    items = trajectories(4)
    with jax.set_mesh(built.mesh):
        state = built.init_state(weights_for(built))
        losses = []
        for _ in range(30):
            state, metrics = built.update(state, [items])
            losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(math.log(64), abs=0.3)
    assert losses[-1] < 0.5


def test_metrics_of_microbatches_add_or_take_the_maximum():
    parts = [{"loss": 1.0, "x/max": 2.0}, {"loss": 3.0, "x/max": 1.0}]
    assert combine(parts) == {"loss": 4.0, "x/max": 2.0}


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        (MeshConfig(fsdp=2, sequence=4), {}),
        pytest.param(
            MeshConfig(data=2, fsdp=1, sequence=2, tensor=2), {"share_prefixes": True}, marks=pytest.mark.slow
        ),
        pytest.param(
            MeshConfig(fsdp=2, sequence=4), {"sequence_parallel": "ulysses"}, marks=pytest.mark.slow
        ),
        pytest.param(MeshConfig(stage=2, fsdp=1, sequence=4), {}, marks=pytest.mark.slow),
    ],
)
def test_long_and_short_rows_in_one_update(mesh, settings, update_of_long_and_short_rows):
    """The value and the gradient of one device, and its log-probs in the order of the items."""
    items, (expected_items, expected) = long_and_short_items(), update_of_long_and_short_rows
    built = learner(mesh=mesh, rows=2, row_tokens=128, max_grad_norm=0.0, **settings)
    kinds = {batch.tokens.sharding.mesh.axis_names[-1] for batch in built.scorer.batches(items, 2)}
    assert kinds == {"sequence", "rows"}
    assert_same(one_update(built, items), expected)
    for item, other in zip(items, expected_items, strict=True):
        logprobs = (x.signals["logprobs"] * x.mask for x in (item, other))
        np.testing.assert_allclose(*logprobs, atol=1e-4, rtol=0)


def test_programs_of_several_cpus_run_one_after_the_other(monkeypatch):
    """A full queue of programs with collectives would wait for ever in runs of several processes."""
    built, results = learner(mesh=MeshConfig(data=2, fsdp=2)), []

    def record(program):
        def run(*args, **static):
            assert all(x.is_ready() for x in jax.tree.leaves(results))
            outputs = program(*args, **static)
            results.append(outputs[1] if isinstance(outputs, tuple) else outputs)
            return outputs

        return run

    monkeypatch.setattr(built, "_accumulate", record(built._accumulate))
    monkeypatch.setattr(built.scorer, "run", record(built.scorer.run))
    one_update(built, trajectories(60))
    with jax.set_mesh(built.mesh):
        params = weights_for(built)
    built.scorer.start(params, trajectories(60))()
    assert len(results) > 8
