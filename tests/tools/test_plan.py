"""`python -m jaxrl_llm plan`: collectives parsed from HLO, a plan on the CPU, advice."""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributed import with_devices
from plan_recipe import CONFIG, SMALL

from jaxrl_kernels import dispatch
from jaxrl_kernels.chips import CHIPS, GIB
from jaxrl_kernels.topology import missing_compiler
from jaxrl_llm import models
from jaxrl_llm.builders.models import make_stages
from jaxrl_llm.builders.sizes import make_meshes
from jaxrl_llm.config import (
    ModelConfig,
    ReferenceConfig,
    SamplingConfig,
)
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.export import save_description
from jaxrl_llm.learn.reference import freeze
from jaxrl_llm.models import LoraConfig, TransformerConfig, flops
from jaxrl_llm.models.lora import join_params, split_params, with_lora
from jaxrl_llm.plan.compiled import (
    CollectiveStats,
    CompiledStats,
    bytes_needed,
    open_target,
)
from jaxrl_llm.plan.experts import expert_gather
from jaxrl_llm.plan.models import preset
from jaxrl_llm.plan.phases import phases
from jaxrl_llm.plan.plan import device_groups, phase_cost
from jaxrl_llm.plan.topology import parse_topology
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import bytes_per_device
from jaxrl_llm.structs import Batch
from jaxrl_llm.tools import plan as command
from jaxrl_llm.tools.arguments import check_output_path

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory. Used 34.63G of 15.75G hbm. Exceeded by 18.88G.",
            34.63 * 2**30,
        ),
        ("RESOURCE_EXHAUSTED: E1000: HLO temporaries (300.00G) exceeds available HBM (15.75G).", 300 * 2**30),
        ("RESOURCE_EXHAUSTED: E1001: scoped vmem limit", None),
        ("INVALID_ARGUMENT: 3G exceeds available HBM", None),
    ],
)
def test_out_of_memory_errors_have_their_bytes(message, needed):
    assert bytes_needed(message) == needed


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-0.6B", 0.596),
        ("Qwen/Qwen3-4B", 4.022),
        ("Qwen/Qwen3-8B-Base", 8.191),
        ("Qwen/Qwen3-32B", 32.762),
        ("Qwen/Qwen3-30B-A3B-Base", 30.532),
        ("Qwen/Qwen3-235B-A22B", 235.094),
        ("meta-llama/Llama-3.1-70B-Instruct", 70.554),
    ],
)
def test_shapes_that_are_known_have_the_published_number_of_weights(name, billions):
    assert num_weights(name) / 1e9 == pytest.approx(billions, abs=5e-4)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3.5-9B", 8.95),
        ("google/gemma-4-31B-it", 30.7),
        ("google/gemma-4-26B-A4B-it", 25.2),
        ("google/gemma-4-E2B-it", 5.1 - 0.45),
        ("google/gemma-4-E4B-it", 7.5),
    ],
)
def test_shapes_of_models_whose_number_of_weights_is_published_rounded(name, billions):
    """Without the layer that predicts further tokens and towers: E2B's have 0.15 (images) and 0.3 (audio)."""
    assert num_weights(name) / 1e9 == pytest.approx(billions, abs=0.05)


def num_weights(name):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(models.abstract(preset(name))))


def test_flops_are_those_of_xla():
    """XLA counts the same for one layer and the head, where attention is a fiftieth of it."""
    c = TransformerConfig(
        vocab_size=512, hidden_size=256, mlp_size=512, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64
    )
    tokens = 32

    def forward(params):
        ids = jnp.zeros((1, tokens), jnp.int32)
        return params(ids, ids) @ params.head.T

    counted = jax.jit(forward).lower(models.abstract(c)).compile().cost_analysis()["flops"]
    analytic = flops.forward_flops(c, tokens, tokens) + flops.head_flops(c, tokens)
    assert counted == pytest.approx(analytic, rel=0.04)
    assert flops.attention_flops(c, 8, 4) == 2 * 2 * 8 * 4 * 4 * 64  # scores and values
    assert flops.attention_flops(dataclasses.replace(c, sliding_window=3), 8, 4) == 2 * 2 * 8 * 3 * 4 * 64
    forward, attention, head = (
        flops.forward_flops(c, 8, 4),
        flops.attention_flops(c, 8, 4),
        flops.head_flops(c, 8),
    )
    recomputed = {"none": 0, "dots": 0, "attention": forward - attention, "full": forward, "offload": forward}
    for remat, again in recomputed.items():
        assert flops.update_flops(c, 8, 4, remat, with_logits=True) == 3 * forward + again + 4 * head, remat
    assert flops.update_flops(c, 8, 4, "none", with_logits=False) == 3 * forward


def test_flops_of_adapters_are_those_of_xla():
    """Frozen weights have no gradients: two of three products. Of one layer, q, k and v need no gradient of
    their inputs, either."""
    model = TransformerConfig(
        vocab_size=512, hidden_size=256, mlp_size=512, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64
    )
    c, tokens = with_lora(model, LoraConfig(rank=8)), 32

    def loss(trained, frozen):
        ids = jnp.zeros((1, tokens), jnp.int32)
        return jnp.sum(jnp.sin(join_params(trained, frozen)(ids, ids)))

    compiled = jax.jit(jax.grad(loss)).lower(*split_params(models.abstract(c))).compile()
    counted = compiled.cost_analysis()["flops"] + 2 * tokens * 256 * (4 + 2 + 2) * 64
    frozen = 256 * 64 * 2 * (4 + 2) + 3 * 256 * 512
    analytic = flops.update_flops(c, tokens, tokens, "none", with_logits=False)
    attention = flops.attention_flops(c, tokens, tokens)
    assert analytic == 2 * tokens * (2 * frozen + 3 * flops.adapter_weights(c)) + 3 * attention
    assert counted == pytest.approx(analytic, rel=0.04)
    head = flops.update_flops(c, tokens, tokens, "none", with_logits=True) - analytic
    assert head == 3 * 2 * tokens * 256 * 512


@pytest.mark.parametrize(
    ("topology", "model", "mesh", "gathered", "least"),
    [
        # All 29.91B weights of the layers for 2.73B that a token passes: 989.4e12 / 450e9 * 10.95.
        ("h100x8", "Qwen/Qwen3-30B-A3B", MeshConfig(fsdp=8), 29.91e9, 24_084),
        # A quarter of the 28.99B in experts: 0.92B + 28.99B / 4.
        ("v5p-16", "Qwen/Qwen3-30B-A3B", MeshConfig(fsdp=2, expert=4), 8.166e9, 2_288),
    ],
)
def test_tokens_from_which_gathering_experts_hides_behind_computing(
    topology, model, mesh, gathered, *, least
):
    config = dataclasses.replace(
        CONFIG,
        mesh=mesh,
        tokens_per_device=3 * CONFIG.row_tokens,
        model=ModelConfig(path=model, dtype="bfloat16"),
    )
    sizes, chip = mesh.resolved_sizes(8), CHIPS[parse_topology(topology).kind]
    numbers = expert_gather(config, preset(model), sizes, chip)
    assert numbers.gathered == pytest.approx(gathered, rel=1e-3)
    assert numbers.least_tokens == pytest.approx(least, rel=1e-3)
    assert numbers.tokens == CONFIG.row_tokens  # 8 trajectories of an update on 8 devices
    assert f"longer than computing: {numbers.tokens:.0f} tokens per device" in numbers.describe()
    assert "no longer" in dataclasses.replace(numbers, tokens=least + 1.0).describe()
    assert expert_gather(config, preset("Qwen/Qwen3-8B"), sizes, chip) is None
    assert expert_gather(config, preset(model), MeshConfig(fsdp=1, expert=8).resolved_sizes(8), chip) is None


def test_the_device_that_kernels_are_chosen_for_is_that_of_the_mesh():
    assert dispatch.device() == ("cpu", "cpu")
    abstract = jax.sharding.AbstractMesh(
        (1,), ("x",), abstract_device=jax.sharding.AbstractDevice("TPU v5 lite", 1, platform="tpu")
    )
    with jax.sharding.use_abstract_mesh(abstract):
        assert dispatch.device() == ("tpu", "TPU v5 lite")


def described(tree):
    """Shape, type and sharding of every array; host numbers have none."""

    def one(x):
        sharding = getattr(x, "sharding", None)
        return x.shape, np.dtype(x.dtype), sharding and str(sharding.devices_indices_map(x.shape))

    return [one(x) for x in jax.tree.leaves(tree)]


@pytest.mark.slow
def test_a_plan_compiles_what_training_calls(monkeypatch):
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(fsdp=4, tensor=2))
    meshes = make_meshes(config)
    planned = {phase.name: described(phase.program.args) for phase in phases(config, meshes)}
    rollout = [f"rollout: {name}" for name in ("publish", "prefill", "gather", "insert", "decode")]
    learned = ["score: policy", "score: reference", "update: accumulate", "update: apply"]
    assert list(planned) == rollout + learned
    learner = (stage := make_stages(config, SMALL, meshes)[-1]).policy
    called = {}

    def spy(owner, name):
        run = getattr(owner, name)

        def recorded(*args, **static):
            called.setdefault(name, []).append(described(args))
            return run(*args, **static)

        monkeypatch.setattr(owner, name, recorded)

    for owner, name in ((learner.scorer, "run"), (learner, "_accumulate"), (learner, "_apply")):
        spy(owner, name)
    ones = np.ones(8, np.float32)
    items = [
        PackItem(np.ones(8, np.int32), ones, {"rollout_logprobs": ones, "advantages": ones})
        for _ in range(16)
    ]
    with jax.set_mesh(learner.mesh):
        make = jax.jit(models.init, static_argnums=0, out_shardings=learner.param_shardings)
        state = stage.init_state(make(SMALL, jax.random.key(0)))
        stage.score(state, items, freeze(state.params, "bfloat16"))
        stage.update(state, [items[:8], items[8:]], 0)
    assert called["run"][0] == planned["score: policy"]
    assert called["run"][-1] == planned["score: reference"]
    assert set(map(str, called["_accumulate"])) == {str(planned["update: accumulate"])}
    assert set(map(str, called["_apply"])) == {str(planned["update: apply"])}


def sizes(model):
    """Numbers in the norms, which are float32 and whole on each device, and in all other weights."""
    counts = {name: math.prod(w.shape) for name, w in models.named_leaves(models.abstract(model))}
    norms = sum(count for name, count in counts.items() if "norm" in name)
    return norms, sum(counts.values()) - norms


def test_memory_is_that_of_the_devices_that_a_phase_runs_on():
    """Trainer on devices 0 to 3, rollout and reference on 4 to 7; nothing is compiled."""
    own = ReferenceConfig(devices="4:8")
    rollout = dataclasses.replace(CONFIG.rollout, devices="4:8", mesh=MeshConfig(tensor=2))
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(), devices="0:4", reference=own, rollout=rollout)
    meshes, target = make_meshes(config), open_target(parse_topology("cpu"))
    groups = device_groups(meshes)
    assert [[device.id for device in group] for group in groups] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    nothing = CompiledStats(0.0, 0.0, 0.0, {}, seconds=0.0)
    costs = {p.name: phase_cost(p, nothing, target, groups) for p in phases(config, meshes)}
    norms, matrices = sizes(SMALL)
    size = norms + matrices
    update, decode = costs["update: accumulate"], costs["rollout: decode"]
    assert {name for name, cost in costs.items() if cost.devices == "4:8"} == {
        *(name for name in costs if name.startswith("rollout") and name != "rollout: publish"),
        "score: reference",
    }
    assert update.memory["parameters"] == pytest.approx(4 * size / 4, rel=0.05)  # norms are not divided
    assert update.memory["frozen models"] == update.memory["rollout weights"] == 0
    assert decode.memory["parameters"] == decode.memory["optimizer"] == 0
    assert decode.memory["frozen models"] == 2 * matrices / 4 + 4 * norms  # bfloat16
    assert decode.memory["rollout weights"] == pytest.approx(4 * size / 2, rel=0.05)


def test_bytes_between_slices_take_the_time_of_slow_links():
    """900 GB, of which half leave a host: 450 GB/s of an H100's NVLink, 50 GB/s of its network adapter."""
    meshes, target = make_meshes(CONFIG), open_target(parse_topology("cpu"))._replace(chip=CHIPS["h100"])
    sent = {"all-gather": CollectiveStats(1, 900e9, across=450e9)}
    stats = CompiledStats(0.0, 0.0, 0.0, sent, seconds=0.0)
    roofline = phase_cost(phases(CONFIG, meshes)[0], stats, target, device_groups(meshes)).roofline
    assert (roofline["interconnect"], roofline["links between slices"]) == (1.0, 9.0)


def test_a_plan_counts_the_epochs_of_a_step():
    """16 trajectories in two mini-batches of 8, a micro-batch of 8 rows of 8 tokens on each; three passes."""
    config = dataclasses.replace(CONFIG, ppo_epochs=3, mesh=MeshConfig(fsdp=4, tensor=2))
    calls = {phase.name: phase.calls for phase in phases(config, make_meshes(config))}
    assert calls["score: policy"] == calls["score: reference"] == 2
    assert calls["update: accumulate"] == calls["update: apply"] == 2 * 3


def test_a_plan_has_the_forward_over_drafts():
    """8 slots of 64 read 4 tokens each. Decode is counted for all tokens, drafts in place of it not again."""
    rollout = dataclasses.replace(CONFIG.rollout, slots=64, page=32, draft_tokens=3)
    config = dataclasses.replace(CONFIG, rollout=rollout, mesh=MeshConfig(fsdp=4, tensor=2))
    planned = {phase.name: phase for phase in phases(config, make_meshes(config))}
    drafts, decode = planned["rollout: drafts"], planned["rollout: decode"]
    assert drafts.flops == pytest.approx(8 * 4 / 64 * decode.flops) and drafts.calls == 0
    assert drafts.resident == decode.resident


@pytest.mark.slow
def test_a_plan_has_a_prompt_once_for_its_responses():
    """8 rows of 8 + 7 (4 + 1) tokens, rounded up to 48, in place of 64 rows of 8.

    4 tokens of the prompt read 2 keys on average, 32 of responses 6: 200 / 36, in place of 4.
    """
    sizes = {"prompts_per_step": 8, "minibatches_per_step": 1, "tokens_per_device": 64}
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(fsdp=4, tensor=2), **sizes)
    apart, shared = (
        {phase.name: phase for phase in phases(c, make_meshes(c))}
        for c in (config, dataclasses.replace(config, share_prefixes=True))
    )
    for name, passes in (("score: reference", 1), ("update: accumulate", 3)):
        is_batch = lambda x: isinstance(x, Batch)
        arrays = jax.tree.leaves(shared[name].program.args, is_leaf=is_batch)
        batch = next(filter(is_batch, arrays))
        assert batch.last.shape == batch.tokens.shape == (4, 48) and shared[name].calls == 2
        more = passes * flops.attention_flops(SMALL, 4 * 48, 200 / 36 - 4)
        assert shared[name].flops == pytest.approx(48 / 64 * apart[name].flops + more)
        assert apart[name].calls == 2


@pytest.mark.slow
def test_a_plan_holds_the_reference_of_another_model(tmp_path):
    """Beside adapters, whose base is otherwise the reference: bfloat16 matrices, divided by 8 devices."""
    larger = dataclasses.replace(SMALL, num_layers=5)
    path = str(save_description(larger, tmp_path / "larger"))
    config = dataclasses.replace(CONFIG, lora=LoraConfig(rank=2), mesh=MeshConfig(fsdp=8))
    score = lambda config: {p.name: p for p in phases(config, make_meshes(config))}["score: reference"]
    own, other = score(config), score(dataclasses.replace(config, reference=ReferenceConfig(path=path)))
    assert bytes_per_device(own.resident["frozen models"]) == 0
    norms, matrices = sizes(larger)
    assert bytes_per_device(other.resident["frozen models"]) == 2 * matrices / 8 + 4 * norms
    head, adapters = flops.head_flops(SMALL, 8 * 8), flops.adapter_weights(with_lora(SMALL, config.lora))
    base = own.flops - head - 2 * 8 * 8 * adapters  # its B are zeros, and multiplied all the same
    assert (other.flops - head) / base == pytest.approx(5 / 2)


def test_a_plan_compiles_what_rollout_calls(monkeypatch):
    """Every planned call is one that a warm-up makes, which is all that a run makes; nothing is compiled."""
    engine = NativeEngine(CONFIG.rollout, SMALL, make_mesh(MeshConfig(fsdp=1), jax.devices()[:1]))
    shapes = lambda args, static: str(
        [(x.shape, np.dtype(x.dtype)) for x in jax.tree.leaves(args)] + [static]
    )
    params = models.abstract(SMALL)
    planned = engine.largest_calls(params, 40, 60, 2, sampling=SamplingConfig(), turns=False)
    assert set(planned) == {"publish", "prefill", "gather", "resize", "insert", "decode"}
    warmed = {}

    def fake(name):
        real, warmed[name] = getattr(engine.programs, name), set()

        def called(*args, **static):
            warmed[name].add(shapes(args, static))
            fixed = name == "empty_cache"  # its arguments are static
            make = functools.partial(real, *args * fixed, **static)
            return jax.tree.map(
                lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(make, *args * (not fixed))
            )

        monkeypatch.setattr(engine.programs, name, called)

    for name in ("prefill", "gather", "insert", "resize", "decode", "uniforms"):
        fake(name)
    engine.warm_up(40, 60)
    for name, call in planned.items():
        if name != "publish":  # for which a warm-up has no weights
            assert shapes(call.args, call.static) in warmed[name], name


WEIGHTS = 131_456  # of the tiny recipe's model


def planned(devices, argv, tmp_path, monkeypatch):
    """Exit code, and the phases by name."""
    here = jax.devices()[:devices]
    monkeypatch.setattr(jax, "devices", lambda *_: here)
    out = tmp_path / "plan.json"
    argv = ["--config", "grpo_tiny.py", "--topology", "cpu", "--json", str(out), *argv]
    code = command.main([*argv, "--run_dir", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
    plan = json.loads(out.read_text())
    assert plan["label"] == "compiled, not run"
    return code, {phase["name"]: phase for phase in plan["phases"]}


def test_a_plan_on_one_cpu(tmp_path, monkeypatch, capsys):
    argv = ["--only", "decode,accumulate", "--model.remat", "attention"]
    code, phases = planned(1, argv, tmp_path, monkeypatch)
    assert code == 0 and list(phases) == ["rollout: decode", "update: accumulate"]
    memory = phases["update: accumulate"]["memory"]
    assert memory["parameters"] == memory["gradients"] == 4 * WEIGHTS
    assert memory["optimizer"] == pytest.approx(8 * WEIGHTS, abs=16)
    assert memory["activations"] > 2**20
    assert all(phase["collectives"] == {} for phase in phases.values())
    table = capsys.readouterr().out
    assert "compiled, not run" in table and "update: accumulate" in table and "Fits: at most" in table
    assert "attention blockwise, log-probs chunked (cpu: plain JAX, there are no kernels for it)" in table


@pytest.mark.slow
def test_asynchronous_rollout_holds_a_version_for_each_stale_step():
    def rollout_bytes(k, **fields):
        rollout = dataclasses.replace(CONFIG.rollout, max_staleness=k, devices="1:2" if k else "")
        config = dataclasses.replace(CONFIG, devices="0:1", rollout=rollout, **fields)
        found = phases(config, make_meshes(config, jax.devices()[:2]))
        decode = next(phase for phase in found if phase.name == "rollout: decode")
        return bytes_per_device(decode.resident["rollout weights"])

    weights = bytes_per_device(models.abstract(SMALL))
    adapters = 4 * 2 * 2 * (32 + 32)  # rank 2 on q of two layers
    lora = LoraConfig(rank=2, targets=("q_proj",))
    assert [rollout_bytes(k) for k in (0, 1, 2)] == [weights, 2 * weights, 3 * weights]
    assert [rollout_bytes(k, lora=lora) for k in (0, 1, 2)] == [weights + n * adapters for n in (1, 2, 3)]


@pytest.mark.slow
def test_a_plan_on_eight_cpus(tmp_path, monkeypatch):
    argv = ["--mesh.tensor", "2", "--only", "decode,accumulate"]
    code, phases = planned(8, argv, tmp_path, monkeypatch)
    assert code == 0 and list(phases) == ["rollout: decode", "update: accumulate"]
    update = phases["update: accumulate"]
    assert update["memory"]["parameters"] == pytest.approx(4 * WEIGHTS / 8, rel=0.03)  # norms are replicated
    assert update["collectives"]["all-gather"]["count"] >= 7 * 2  # matrices of two layers
    assert phases["rollout: decode"]["memory"]["rollout weights"] == pytest.approx(4 * WEIGHTS / 2, rel=0.03)


def test_a_missing_compiler_is_named_with_the_fix(monkeypatch, capsys):
    from jaxrl_llm.host.command import run_command

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name))
    assert run_command(command.main, ["--config", "grpo_tiny.py", "--topology", "v5e-16"]) == 2
    assert "pip install 'jaxrl-llm[plan]'" in capsys.readouterr().err


def test_the_file_of_an_earlier_plan_is_replaced(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    check_output_path(tmp_path / "plan.json", flag="--json")
    with pytest.raises(UserError, match=r"^--json .*: a folder"):
        check_output_path(tmp_path, flag="--json")


def test_an_unknown_model_is_refused_before_anything_is_compiled(capsys):
    from jaxrl_llm.host.command import run_command

    argv = ["--config", "grpo_qwen.py", "--model.path", "nobody/nothing", "--topology", "cpu"]
    assert run_command(command.main, argv) == 2
    assert "Qwen/Qwen3-0.6B" in capsys.readouterr().err


def test_an_unknown_teacher_is_not_called_the_model_that_is_trained(capsys):
    from jaxrl_llm.host.command import run_command

    argv = ["--config", "gkd_tiny.py", "--algo.teachers", "runs/none/hf", "--topology", "cpu"]
    assert run_command(command.main, argv) == 2
    error = capsys.readouterr().err
    assert "runs/none/hf: no such folder, and no architecture" in error and "--model.path" not in error


@pytest.mark.slow
def test_the_predicted_peak_is_within_a_tenth_of_what_the_process_measures():
    env = with_devices(1)
    env |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": ""}
    script = [sys.executable, str(ROOT / "tests/tools/measure_step.py")]
    out = subprocess.run(script, env=env, capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(out.stdout.splitlines()[-1])
    assert set(found) == {"rollout", "score", "update"}
    for phase, (planned, measured) in found.items():
        assert measured == pytest.approx(planned, rel=0.1), phase


def run_plan(out: Path, flags: str, expected_code: int = 0) -> tuple[dict, str]:
    """Return (the plan, what was printed) of the command with a real compiler."""
    argv = [sys.executable, "-m", "jaxrl_llm", "plan", *flags.split(), "--json", str(out)]
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == expected_code, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.mark.compilers
@pytest.mark.parametrize(
    "topology",
    ["v5e-4", "2xv5e-4", "v4-8", "v5p-8", "v6e-4", "tpu7x-8", "h100x8", "h200", "h200x16", "a100", "t4"],
)
def test_a_real_compiler_plans_the_tiny_recipe(topology, tmp_path):
    _, platform, kind, *_ = parse_topology(topology)
    if problem := missing_compiler(platform):
        pytest.skip(problem)
    plan, _ = run_plan(tmp_path / "plan.json", f"--config grpo_tiny.py --topology {topology}")
    assert plan["fits"] and plan["step_seconds"] > 0
    kernels = {  # the recipe's float32 is no type of wgmma, nor of cuDNN
        "h100": "attention blockwise, log-probs chunked (wgmma",
        "h200": "attention blockwise, log-probs chunked (wgmma",
        "a100": "attention blockwise (cuDNN attention takes bfloat16 and float16, not float32)",
        "t4": "attention blockwise, log-probs chunked (Tesla T4: plain JAX",
    }
    assert plan["kernels"].startswith(kernels.get(kind, "attention pallas_tpu, log-probs pallas_tpu ("))
    phases = {phase["name"]: phase for phase in plan["phases"]}
    assert set(phases) >= {"rollout: decode", "update: accumulate", "update: apply"}
    assert ("all-gather" in phases["update: accumulate"]["collectives"]) == (
        topology not in ("h200", "a100", "t4")
    )  # those are one device


@pytest.mark.compilers
def test_a_program_too_large_for_the_chip_does_not_fit(tmp_path):
    pytest.importorskip("libtpu")
    sizes = "--rollout.slots 65536 --max_response_tokens 8000 --tokens_per_device 8192"
    flags = (
        f"--config grpo_tiny.py --topology v5e-1 --only decode {sizes} --model.architecture.max_position 8192"
    )
    plan, printed = run_plan(tmp_path / "plan.json", flags, expected_code=1)
    (phase,) = plan["phases"]
    assert phase["error"].startswith("RESOURCE_EXHAUSTED") and phase["peak"] > 16 * GIB
    assert "--rollout.slots" in printed


@pytest.mark.compilers
def test_decoding_on_a_tpu7x_copies_no_weights(tmp_path):
    pytest.importorskip("libtpu")
    sizes = {"num_layers": 4, "hidden_size": 2048, "moe.expert_size": 768, "moe.num_experts": 64}
    architecture = " ".join(f"--model.architecture.{name} {size}" for name, size in sizes.items())
    flags = (
        f"--config grpo_moe_tiny.py --topology tpu7x-8 --only decode --rollout.dtype bfloat16 {architecture}"
    )
    plan, _ = run_plan(tmp_path / "plan.json", flags)
    (phase,) = plan["phases"]
    assert phase["memory"]["activations"] < 0.25 * phase["memory"]["rollout weights"]


@pytest.mark.compilers
@pytest.mark.parametrize("topology", ["v5e-8", "v6e-8", "v5p-16", "tpu7x-8"])
def test_eight_shards_of_a_weight_are_gathered_beside_the_products(topology, tmp_path):
    """Not multiplied one by one, which is XLA's default from 8 on; Qwen's vocabulary is reduce-scattered."""
    pytest.importorskip("libtpu")
    sizes = {"num_layers": 4, "hidden_size": 1024, "mlp_size": 3072, "vocab_size": 151936}
    architecture = " ".join(f"--model.architecture.{name} {size}" for name, size in sizes.items())
    rows = "--tokens_per_device 8192 --model.dtype bfloat16"
    flags = f"--config grpo_tiny.py --topology {topology} --only update {rows} {architecture}"
    plan, _ = run_plan(tmp_path / "plan.json", flags)
    update = next(phase for phase in plan["phases"] if phase["name"] == "update: accumulate")
    sent = update["collectives"]
    assert "collective-permute" not in sent
    assert sent["all-reduce"]["bytes"] < 0.01 * sent["reduce-scatter"]["bytes"]  # gradients of norms
    waited = sum(one["bytes"] for one in update["synchronous"] if one["kind"] == "all-gather")
    assert waited < 0.2 * sent["all-gather"]["bytes"]
