"""Saving and restoring: bit for bit, on any mesh; the chosen steps are kept, and changed settings refused."""

import dataclasses
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.checkpoint.config import CheckpointConfig
from jaxrl_llm.checkpoint.folder import rank_steps
from jaxrl_llm.checkpoint.manifest import read_manifest
from jaxrl_llm.checkpoint.params import restore_params, transformer_config
from jaxrl_llm.checkpoint.resume import check_resume
from jaxrl_llm.checkpoint.state import Checkpointer
from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.learn.config import OptimConfig
from jaxrl_llm.learn.optim import make_optimizer
from jaxrl_llm.models import LoraConfig, RopeConfig, TransformerConfig, init
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.lora import with_lora
from jaxrl_llm.plan.models import PRESETS
from jaxrl_llm.ranges import problems
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.structs import TrainState

TINY = TransformerConfig(
    vocab_size=64,
    hidden_size=32,
    mlp_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    sliding_window=16,
    window_layers=(True, False),
    rope=RopeConfig(theta=100.0),
)
META = {"model": dataclasses.asdict(TINY), "config": {"seed": 0}}


def checkpointer(tmp_path, **settings) -> Checkpointer:
    return Checkpointer(CheckpointConfig(**settings), tmp_path)


def small_state(value: float = 0.0, sharding=None) -> dict:
    """Every kind of leaf there is: sharded float32, bfloat16, integers, a typed key."""
    rows = jnp.arange(64.0).reshape(8, 8) / 7 + value
    state = {
        "w": rows,
        "half": rows.astype(jnp.bfloat16),
        "count": jnp.int32(7),
        "key": jax.random.key(3),
    }
    if sharding is not None:
        spread = lambda x: jax.device_put(x, sharding if x.ndim == 2 else _replicated(sharding.mesh))
        state = jax.tree.map(spread, state)
    return state


def abstract_of(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same_bits(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _replicated(mesh):
    return NamedSharding(mesh, PartitionSpec())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_train_state_comes_back_bit_for_bit(tmp_path, name):
    params = init(TINY, jax.random.key(0))
    opt_state = make_optimizer(OptimConfig(name=name), 10).init(params)
    state = TrainState(params, opt_state, jnp.int32(5), jnp.int32(0), kl_coef=jnp.float32(0.1))
    with_nan = dataclasses.replace(
        state, opt_state=jax.tree.map(lambda x: x / jnp.zeros_like(x), state.opt_state)
    )
    saver = checkpointer(tmp_path)
    assert saver.save(5, with_nan, {**META, "cursor": [1, {"a": 0.1}]}, {"eval/accuracy": 0.5})
    saver.close()
    targets = {5: abstract_of(with_nan)}  # a stage's state may have arrays that another's lacks
    step, back, meta = checkpointer(tmp_path).restore(lambda step: targets[step])
    assert step == 5 and meta["cursor"] == [1, {"a": 0.1}]
    assert_same_bits(back, with_nan)


def test_manifest_names_arrays_files_and_versions(tmp_path):
    params = init(TINY, jax.random.key(0))
    saver = checkpointer(tmp_path)
    saver.save(
        1, TrainState(params, (), jnp.int32(1), jnp.int32(0), kl_coef=jnp.float32(0.1)), META, {"loss": 2.5}
    )
    saver.close()
    manifest = read_manifest(tmp_path / "checkpoints/1")
    assert manifest.step == 1 and manifest.metrics == {"loss": 2.5}
    assert manifest.arrays["params.layers.q"] == "float32[2,32,4,8]"
    assert manifest.arrays["version"] == "int32[]"
    assert manifest.versions["jax"] == jax.__version__
    on_disk = {
        str(p.relative_to(tmp_path / "checkpoints/1"))
        for p in (tmp_path / "checkpoints/1").rglob("*")
        if p.is_file()
    }
    assert set(manifest.files) == on_disk - {"manifest.json"}


def test_one_checkpoint_serves_every_mesh(tmp_path):
    meshes = [make_mesh(MeshConfig(fsdp=8)), make_mesh(MeshConfig(fsdp=4, tensor=2))]
    layouts = [
        NamedSharding(meshes[0], PartitionSpec("fsdp")),
        NamedSharding(meshes[1], PartitionSpec("tensor", "fsdp")),
        NamedSharding(make_mesh(MeshConfig(), jax.devices()[:1]), PartitionSpec()),
    ]
    state = small_state(sharding=layouts[0])
    for step, (source, target) in enumerate(itertools.pairwise(layouts), start=1):
        saver = checkpointer(tmp_path)
        saver.save(
            step,
            jax.device_put(state, jax.tree.map(lambda x: x.sharding, small_state(sharding=source))),
            META,
            {},
        )
        saver.close()
        found, state, _ = checkpointer(tmp_path).restore(abstract_of(small_state(sharding=target)))
        assert found == step
        assert state["w"].sharding.is_equivalent_to(target, 2)
        assert_same_bits(state, small_state())


def test_arrays_may_be_donated_or_deleted_once_save_returns(tmp_path):
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    sharding = NamedSharding(make_mesh(MeshConfig(fsdp=8)), PartitionSpec("fsdp"))
    saver = checkpointer(tmp_path, keep=10)
    big = lambda n: {"a": jax.device_put(jnp.full((512, 256), n), sharding), "b": jnp.full((300, 700), n)}
    for step in range(1, 7):
        state = big(float(step))
        assert saver.save(step, state, META, {})
        if step % 2:
            for _ in range(3):
                state = update(state)
        else:
            jax.tree.map(lambda x: x.delete(), state)
    saver.close()
    for step in range(6, 0, -1):
        found, state, _ = checkpointer(tmp_path, keep=10).restore(abstract_of(big(0.0)))
        assert found == step
        assert_same_bits(state, big(float(step)))
        (tmp_path / f"checkpoints/{step}").rename(tmp_path / f"seen{step}")


def test_meta_is_a_snapshot_and_must_be_json(tmp_path):
    saver = checkpointer(tmp_path)
    meta = {"queue": [1]}
    saver.save(1, small_state(), meta, {})
    meta["queue"].append(2)
    with pytest.raises(TypeError, match="not JSON serializable"):
        saver.save(2, small_state(), {"x": object()}, {})
    saver.close()
    assert saver.restore(abstract_of(small_state()))[2] == {"queue": [1]}


def test_newest_and_best_are_kept(tmp_path):
    saver = checkpointer(tmp_path, keep=2, best_metric="eval/accuracy", keep_best=2)
    scores = {1: 0.2, 2: 0.9, 3: float("nan"), 4: 0.9, 5: 0.1, 6: None, 7: 0.3}
    for step, score in scores.items():
        saver.save(step, small_state(step), META, {} if score is None else {"eval/accuracy": score})
        if step == 3:
            saver.wait()
            assert saver.steps() == [1, 2, 3]  # 1 is the second best yet, 2 the best, 2 and 3 the newest
    saver.wait()
    assert saver.steps() == [2, 4, 6, 7]
    assert saver.latest() == 7
    assert sorted(p.name for p in saver.folder.iterdir()) == ["2", "4", "6", "7"]

    assert rank_steps(saver.folder, "eval/accuracy", "max") == [4, 2, 7]
    assert rank_steps(saver.folder, "eval/accuracy", "min") == [7, 4, 2]
    assert rank_steps(saver.folder, "", "max") == []


def test_a_save_that_failed_does_not_keep_the_thread(tmp_path):
    saver = checkpointer(tmp_path)

    def failing(step, start, response, shapes, **written):
        response.result()
        raise OSError("no such device")

    saver._finish = failing
    saver.save(1, small_state(), META, {})
    with pytest.raises(OSError, match=r"the checkpoint of step 1 failed: .*no such device"):
        saver.close()
    assert not any(thread.is_alive() for thread in saver._thread._threads)


def test_saves_that_cannot_be_the_best_are_named_once(tmp_path, capsys):
    saver = checkpointer(tmp_path / "typo", best_metric="reward/men")
    for step in (1, 2):
        saver.save(step, small_state(), META, {"reward/mean": 0.5, "loss": 0.1})
    saver.close()
    assert capsys.readouterr().err == (
        "checkpoint: step 1 is not ranked by reward/men (--checkpoint.best_metric): it has no such number; "
        "metrics.jsonl has the names. Did you mean reward/mean?\n"
    )
    saver = checkpointer(tmp_path / "held_out", best_metric="eval/pass@1")
    for step, metrics in {2: {"eval/pass@1": 0.5}, 3: {"loss": 0.1}, 5: {"loss": 0.1}}.items():
        saver.save(step, small_state(), META, metrics)
    saver.save(6, small_state(), META, {"eval/pass@k": 0.5})
    saver.close()
    first, second = capsys.readouterr().err.splitlines()
    assert first == (
        "checkpoint: step 3 is not ranked by eval/pass@1 (--checkpoint.best_metric): it was not evaluated. "
        "Saves on evaluated steps are ranked, which --eval.every sets."
    )
    assert second.startswith("checkpoint: step 6 is not") and second.endswith("Did you mean eval/pass@k?")


def test_a_step_is_saved_once(tmp_path):
    saver = checkpointer(tmp_path, keep=5)
    assert saver.save(1, small_state(1.0), META, {})
    assert not saver.save(1, small_state(2.0), META, {})
    saver.close()
    again = checkpointer(tmp_path)
    assert not again.save(1, small_state(3.0), META, {})
    assert_same_bits(again.restore(abstract_of(small_state()))[1], small_state(1.0))


def test_synchronous_save_is_there_when_save_returns(tmp_path):
    saver = checkpointer(tmp_path, async_save=False)
    saver.save(3, small_state(), META, {})
    assert saver.steps() == [3] and saver.longest_save > 0


def test_a_folder_that_has_disappeared_is_made_anew(tmp_path):
    saver = checkpointer(tmp_path / "run", async_save=False)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert saver.save(1, small_state(), {}, {}) and saver.steps() == [1]
    saver.close()


def test_nothing_to_restore_is_a_fresh_start(tmp_path):
    assert checkpointer(tmp_path).restore(abstract_of(small_state())) is None
    assert checkpointer(tmp_path).latest() is None


def test_another_state_is_refused_path_by_path(tmp_path):
    saver = checkpointer(tmp_path)
    saver.save(1, small_state(), META, {})
    saver.close()
    target = abstract_of(small_state())
    target["w"] = jax.ShapeDtypeStruct((8, 9), jnp.float32, sharding=target["w"].sharding)
    target["half"] = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=target["w"].sharding)
    target["new"] = target.pop("count")
    with pytest.raises(ValueError) as error:
        saver.restore(target)
    lines = str(error.value).splitlines()
    assert lines[1:5] == [
        "  count: saved int32[], this run has no such array",
        "  half: saved bfloat16[8,8], this run needs float32[8,8]",
        "  new: not in the checkpoint, this run needs int32[]",
        "  w: saved float32[8,8], this run needs float32[8,9]",
    ]
    assert "--run_dir" in lines[5]


def test_changed_settings_are_printed_or_refused(tmp_path, capsys):
    old = {
        "seed": 0,
        "steps": 10,
        "optim": {"learning_rate": 1e-6},
        "model": {"dtype": "float32", "remat": "none", "architecture": {"num_layers": 2}},
        "data": {"train": [{"path": "a", "weight": 1.0}]},
    }
    harmless = json.loads(json.dumps(old))
    harmless |= {"steps": 20, "optim": {"learning_rate": 2e-6, "b1": 0.9}}
    harmless["model"]["remat"] = "full"
    assert check_resume(old, old, 5) == []
    assert check_resume(old, harmless, 5) == [
        'model.remat: was "none", now "full"',
        "optim.b1: was (absent), now 0.9",
        "optim.learning_rate: was 1e-06, now 2e-06",
        "steps: was 10, now 20",
    ]
    other = json.loads(json.dumps(old))
    old["optim"]["name"], other["optim"]["name"] = "adamw", "sgd"
    other |= {"seed": 1, "steps": 20, "run_dir": "runs/a"}
    other["model"] |= {"dtype": "bfloat16", "architecture": {"num_layers": 3}}
    other["data"]["train"][0]["path"] = "b"
    with pytest.raises(ValueError) as error:
        check_resume(old, other, 5)
    assert str(error.value).startswith("the checkpoints in runs/a were made with other settings")
    assert str(error.value).splitlines()[1:] == [
        '  data.train.0.path: was "a", now "b"',
        "  model.architecture.num_layers: was 2, now 3",
        '  model.dtype: was "float32", now "bfloat16"',
        '  optim.name: was "adamw", now "sgd"',
        "  seed: was 0, now 1",
        "Put the old values back, or start a new run with another --run_dir.",
    ]
    two = json.loads(json.dumps(old))
    two["data"]["train"].append({"path": "b", "weight": 1.0})
    with pytest.raises(ValueError, match=r"data\.train: was "):
        check_resume(old, two, 5)

    saver = checkpointer(tmp_path)
    saver.save(1, small_state(), {"config": old}, {})
    target = abstract_of(small_state())
    with pytest.raises(ValueError, match="seed: was 0, now 1"):
        saver.restore(target, compatible=other)
    assert saver.restore(target, compatible={**old, "steps": 20})[0] == 1
    assert "checkpoint: resuming with steps: was 10, now 20\n" in capsys.readouterr().err


def test_weights_alone_for_export(tmp_path):
    params = init(TINY, jax.random.key(1))
    saver = checkpointer(tmp_path, keep=3)
    for step in (1, 2):
        grown = jax.tree.map(lambda x, step=step: x * step, params)
        saver.save(
            step,
            TrainState(
                grown, optax.adam(1e-3).init(params), jnp.int32(step), jnp.int32(0), kl_coef=jnp.float32(0.1)
            ),
            META,
            {},
        )
    saver.close()
    step, weights, config, _ = restore_params(tmp_path)
    assert step == 2 and config == TINY
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(weights))
    assert_same_bits(weights, jax.tree.map(lambda x: x * 2, params))
    assert_same_bits(restore_params(tmp_path, 1)[1], params)
    with pytest.raises(ValueError, match=re.escape("no checkpoint of step 7; there are [1, 2]")):
        restore_params(tmp_path, 7)
    with pytest.raises(ValueError, match="no checkpoint; give the run_dir of a run"):
        restore_params(tmp_path / "elsewhere")


def saved_model(run_dir, model, **changes):
    """A run directory with one checkpoint of the weights of a model, which it describes with some changes."""
    saver = checkpointer(run_dir)
    state = TrainState(init(model, jax.random.key(1)), (), jnp.int32(1), jnp.int32(0), kl_coef=jnp.float32(0))
    saver.save(1, state, {"model": {**dataclasses.asdict(model), **changes}, "config": {}}, {})
    saver.close()
    return run_dir


def test_weights_of_a_model_with_experts(tmp_path):
    experts = MoEConfig(4, 2, expert_size=16)
    model = dataclasses.replace(TINY, family="qwen3_moe", moe=experts, tie_embeddings=False)
    _, weights, config, _ = restore_params(saved_model(tmp_path, model))
    assert config == model
    assert_same_bits(weights, init(model, jax.random.key(1)))


@pytest.mark.parametrize(
    "model", [*PRESETS.values(), with_lora(TINY, LoraConfig(rank=2, targets=("q_proj",)))]
)
def test_every_architecture_is_read_from_a_checkpoint_as_it_was(model):
    assert transformer_config(json.loads(json.dumps(dataclasses.asdict(model)))) == model


def test_a_model_of_a_later_version_is_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"checkpoints/1: .* another version of this program: depth_scale$"):
        restore_params(saved_model(tmp_path, TINY, depth_scale=2))


def test_the_architecture_of_a_stored_model_is_no_setting():
    """Its files say it; runs of earlier versions recorded that of the recipe."""
    configs = [{"model": {"path": "org/model", "architecture": a}} for a in (None, {"num_layers": 2})]
    assert check_resume(*configs, 5) == []
    for config in configs:
        config["model"]["path"] = ""
    with pytest.raises(UserError, match=r"model\.architecture: was null, now "):
        check_resume(*configs, 5)


def test_another_algorithm_needs_another_run_directory():
    old = {"algo": {"name": "grpo", "kl_coef": 0.1}, "run_dir": "runs/tiny"}
    new = {"algo": {"name": "rloo", "beta": 0.1}, "run_dir": "runs/tiny/"}
    with pytest.raises(UserError) as error:
        check_resume(old, new, 5)
    assert str(error.value) == (
        "runs/tiny/ holds a run of grpo, and this one is of rloo: another algorithm needs another "
        "run directory. Add --run_dir runs/tiny_rloo."
    )
    mine = {"algo": {"name": "/a/my_algo.py"}}
    assert check_resume(mine, {"algo": {"name": "/b/my_algo.py"}}, 5) == [
        'algo.name: was "/a/my_algo.py", now "/b/my_algo.py"'
    ]
    assert check_resume({}, new, 5)  # written before algorithms had names


def test_the_warm_up_is_fixed_from_its_first_step_to_its_last():
    old = {"warm_start": {"steps": 10, "examples_per_step": 8, "learning_rate": 1e-3}}
    longer = {"warm_start": {**old["warm_start"], "steps": 20}}
    larger = {"warm_start": {**old["warm_start"], "examples_per_step": 16}}
    faster = {"warm_start": {**old["warm_start"], "learning_rate": 1e-2}}
    assert check_resume(old, longer, 0) == ["warm_start.steps: was 10, now 20"]
    for step in (1, 10, 11):
        with pytest.raises(UserError, match=r"warm_start\.steps: was 10, now 20"):
            check_resume(old, longer, step)
        assert check_resume(old, faster, step)
    with pytest.raises(UserError, match=r"warm_start\.examples_per_step: was 8, now 16"):
        check_resume(old, larger, 9)
    assert check_resume(old, larger, 0) and check_resume(old, larger, 10)


def test_masked_secrets_take_no_part():
    old = {"model": {"path": "https://user:***@host/model"}, "data": {"path": "***"}, "seed": 1}
    new = {"model": {"path": "https://user:new@host/model"}, "data": {"path": "/secret/rows"}, "seed": 1}
    assert check_resume(old, new, 1) == check_resume(new, old, 1) == []
    with pytest.raises(UserError, match=r"model\.path"):
        check_resume(old, {**new, "model": {"path": "https://user:new@host/other"}}, 1)


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    """The optimizer's own state may start with infinity."""
    saver = checkpointer(tmp_path)
    params = {"w": jnp.ones(8), "half": jnp.ones(8, jnp.bfloat16), "count": jnp.int32(1)}
    state = TrainState(params, (jnp.full(3, jnp.inf),), jnp.int32(1), jnp.int32(0), kl_coef=jnp.float32(0.1))
    assert saver.save(1, state, META, {})
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        broken = dataclasses.replace(state, params={**params, "half": params["half"].at[7].set(bad)})
        with pytest.raises(RunError) as error:
            saver.save(2, broken, META, {})
        assert str(error.value) == (
            "step 2 is NOT saved: 1 of 3 arrays hold NaN or Inf (params.half); the newest checkpoint is 1. "
            "Lower --optim.learning_rate and run the same command again."
        )
    critic = dataclasses.replace(state, critic=dataclasses.replace(state, kl_coef=jnp.float32(jnp.nan)))
    with pytest.raises(RunError, match=r"1 of 6 arrays hold NaN or Inf \(critic\.kl_coef\)"):
        saver.save(2, critic, META, {})
    saver.close()
    assert saver.steps() == [1]


@pytest.mark.parametrize(("field", "value"), [("every", -1), ("keep", 0), ("keep", 2**40), ("keep_best", -1)])
def test_ranges_of_the_settings(field, value):
    assert list(problems(CheckpointConfig())) == []
    ((name, text),) = problems(dataclasses.replace(CheckpointConfig(), **{field: value}))
    assert name == field and text.startswith(f"is {value}: it must be at least ")
