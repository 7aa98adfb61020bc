"""Advice and memory of a plan: which settings are named, and the bytes that they save."""

import dataclasses
import math

import jax
import pytest
from plan_recipe import CONFIG, SMALL

from jaxrl_kernels.chips import GIB
from jaxrl_llm import models
from jaxrl_llm.algos import grpo
from jaxrl_llm.builders.models import make_stages
from jaxrl_llm.builders.sizes import make_meshes
from jaxrl_llm.config import (
    ReferenceConfig,
    RolloutConfig,
    ScoreConfig,
)
from jaxrl_llm.learn.config import OptimConfig
from jaxrl_llm.models import LoraConfig, RopeConfig
from jaxrl_llm.models.config import GlobalHeads, MoEConfig
from jaxrl_llm.models.flops import layer_weights
from jaxrl_llm.models.mixer_config import DeltaConfig
from jaxrl_llm.plan.phases import phases
from jaxrl_llm.plan.plan import MEMORY_KINDS, PhaseCost, Plan
from jaxrl_llm.plan.report import advise, verdict
from jaxrl_llm.sharding.rules import bytes_per_device


def cost(name, **memory):
    memory = dict.fromkeys((*MEMORY_KINDS, "activations"), 0.0) | {
        k.replace("_", " "): v * GIB for k, v in memory.items()
    }
    return PhaseCost(
        name, memory, 1, "call", flops=1e12, collectives={}, roofline={}, compile_seconds=1.0, error=""
    )


def advice(*costs, memory=16.0, stages=1, **changes):
    config = dataclasses.replace(CONFIG, **{"tokens_per_device": 64, "prompts_per_step": 64} | changes)
    mesh = {"data": 1, "stage": stages, "fsdp": 4, "expert": 1, "tensor": 1, "sequence": 1}
    plan = advise(
        Plan("a model", "v5e-4", mesh, memory * GIB, phases=list(costs), derived={}, versions={}), config
    )
    return plan.fits, plan.advice


def test_what_fits_needs_no_advice():
    assert advice(cost("update: accumulate", parameters=4, optimizer=8, activations=3)) == (True, [])


def test_activations_that_do_not_fit():
    fits, lines = advice(cost("update: accumulate", parameters=2, optimizer=4, gradients=2, activations=16))
    assert not fits
    assert lines[0].startswith(
        "  1. --model.remat dots, then attention, then full, then offload: may be enough (activations of"
    )
    assert "may take 8.00 GiB, now 16.00 GiB" in lines[0]
    assert lines[1].startswith("  2. --tokens_per_device 32: may be enough if activations grow with tokens")
    assert "--mesh.sequence or --mesh.tensor" in lines[2]
    assert "does not help" in lines[3]


def test_advice_of_smaller_micro_batches_counts_the_tokens_they_have():
    """An update of 64 x 4 responses of 8 tokens is 512 tokens of each of 4 devices, whatever the budget."""
    _, lines = advice(cost("update: accumulate", parameters=8, activations=16), tokens_per_device=1 << 20)
    assert lines[1].startswith("  2. --tokens_per_device 256: may be enough")
    phase = cost("update: accumulate", parameters=4, gradients=4, activations=16)  # and a second gradient
    assert "--tokens_per_device 128: may" in advice(phase, tokens_per_device=1 << 20)[1][1]


def test_a_smaller_state_that_makes_room_for_the_activations():
    """3 GiB are missing; 8-bit moments of so small a model save 3.5 of 8 GiB."""
    _, lines = advice(cost("update: accumulate", parameters=4, optimizer=8, gradients=4, activations=3))
    assert [line.split("--")[1].split()[0] for line in lines if line.endswith("would fit.")] == [
        *("optim.offload", "optim.moments", "lora.rank")
    ]


def test_scores_that_do_not_fit_take_a_budget_of_their_own():
    _, lines = advice(cost("score: policy", parameters=2, activations=28), score=ScoreConfig(128))
    assert lines[0].startswith("  1. --score.tokens_per_device 64: may be enough")


@pytest.mark.parametrize(
    ("remat", "others"),
    [("dots", "attention, then full, then offload"), ("full", "offload"), ("offload", None)],
)
def test_advice_names_every_remat_that_keeps_less(remat, others):
    model = dataclasses.replace(CONFIG.model, remat=remat)
    _, lines = advice(cost("update: accumulate", parameters=2, activations=16), model=model)
    advised = [line.split(":")[0].removeprefix("  1. --model.remat ") for line in lines if "remat" in line]
    assert advised == ([others] if others else [])
    _, lines = advice(cost("update: accumulate", parameters=2, activations=16), model=model, stages=2)
    assert not any("offload" in line for line in lines if "remat" in line)


def test_a_state_that_does_not_fit():
    _, lines = advice(cost("update: apply", parameters=8, optimizer=16, gradients=8, activations=1))
    assert "Activations are not the bottleneck" in lines[0] and "32.00 GiB" in lines[0]
    assert lines[1].startswith("  2. --optim.moments int8: saves 6.93 GiB, 17.00 GiB are needed")
    assert lines[2].startswith("  3. --optim.grad_dtype bfloat16: saves 4.00 GiB")
    assert "--lora.rank 32" in lines[3]
    assert "--mesh.fsdp 16: 16 in all would fit" in lines[4]  # 32 / 4 + 1 is below 16, 32 / 2 + 1 is not


def test_a_state_that_does_not_fit_beside_the_gradients():
    """Moments leave the device but for `apply`; adapters also halve weights in bfloat16."""
    model = dataclasses.replace(CONFIG.model, dtype="bfloat16")
    _, lines = advice(
        cost("update: accumulate", parameters=6, optimizer=12, gradients=6, activations=1), model=model
    )
    assert lines[1] == "  2. --optim.offload True: saves 12.00 GiB, 9.00 GiB are needed: would fit."
    assert lines[4].endswith(
        "adapters in place of the weights: saves 21.00 GiB, 9.00 GiB are needed: would fit."
    )


def test_a_reference_that_does_not_fit_beside_the_gradients():
    phase = cost("update: accumulate", parameters=8, gradients=8, frozen_models=4, activations=1)
    _, lines = advice(phase)
    assert lines[1] == "  2. --reference.offload True: saves 4.00 GiB, 5.00 GiB are needed: not enough alone."
    assert not any("reference" in x for x in advice(phase, algo=grpo.Config(kl_coef=0.0))[1])


@pytest.mark.slow
def test_an_offloaded_reference_is_on_the_host_but_for_its_norms():
    """bfloat16: 2 bytes a weight of the matrices, 4 of the norms."""
    model = dataclasses.replace(CONFIG.model, dtype="bfloat16")
    config = dataclasses.replace(CONFIG, model=model, reference=ReferenceConfig(offload=True))
    step = phases(config, make_meshes(config, jax.devices()[:1]))
    (score,) = (phase for phase in step if phase.name == "score: reference")
    frozen = score.resident["frozen models"]
    norms = 5 * 32 + 4 * 8  # two a layer and the final one, of queries and keys
    matrices = 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert bytes_per_device(frozen, "pinned_host") == 2 * matrices
    assert bytes_per_device(frozen) == bytes_per_device(score.program.args[0]) == 4 * norms


def test_a_state_on_the_host_that_does_not_fit_may_leave_its_remainders_there():
    model = dataclasses.replace(CONFIG.model, dtype="bfloat16")
    _, lines = advice(
        cost("update: accumulate", parameters=12, gradients=6, activations=1),
        model=model,
        optim=OptimConfig(offload=True),
    )
    assert lines[1].startswith("  2. --optim.grad_dtype bfloat16: saves 3.00 GiB, 3.00 GiB are needed")
    assert lines[2].startswith(
        "  3. --optim.store_param_remainders True: saves 6.00 GiB, 3.00 GiB are needed"
    )


@pytest.mark.slow
def test_states_of_recurrent_layers_are_counted_beside_keys_and_values():
    """For each slot and prompt 4 x 8 x 6 numbers in float32, and 2 inputs of 2 x 2 x 8 + 4 x 6 channels in
    bfloat16, as 2 x 2 x 8 numbers for each token in the layer with attention; 4 bytes for the cursor."""
    delta = DeltaConfig(2, 4, 8, 6, conv_width=3)
    hybrid = dataclasses.replace(SMALL, delta=delta, layer_kinds=("delta", "attention"))
    model = dataclasses.replace(CONFIG.model, architecture=hybrid)
    rollout = dataclasses.replace(CONFIG.rollout, cache_dtype="bfloat16")
    config = dataclasses.replace(CONFIG, model=model, rollout=rollout)
    steps = {phase.name: phase for phase in phases(config, make_meshes(config, jax.devices()[:1]))}
    prompts, width = steps["rollout: prefill"].program.args[1].shape
    decode = steps["rollout: decode"]
    length = decode.program.args[1].length
    tokens, states = 4 * length + prompts * width, 4 + prompts
    expected = 2 * tokens * 2 * 2 * 8 + states * (4 * 4 * 8 * 6 + 2 * 2 * 56)
    assert bytes_per_device(decode.resident["KV cache"]) == expected + 4


@pytest.mark.slow
def test_layers_that_read_the_keys_of_others_have_no_cache_in_a_plan():
    """Gemma 4's small models, of 5 layers: two with a window have 2 heads of 8, one without has one of 16,
    and the last two have none. Keys and values of each token in bfloat16; 4 bytes for the cursor."""
    small = dataclasses.replace(
        SMALL, num_layers=5, window_layers=(True, False, True, True, False), sliding_window=4,
        local_rope=RopeConfig(), global_heads=GlobalHeads(1, 16), shared_kv_layers=2, wide_shared_mlp=True,
        per_layer_inputs=6,
    )  # fmt: skip
    model = dataclasses.replace(CONFIG.model, architecture=small)
    rollout = dataclasses.replace(CONFIG.rollout, cache_dtype="bfloat16")
    lora = LoraConfig(rank=4, quantize="nf4")
    config = dataclasses.replace(CONFIG, model=model, rollout=rollout, lora=lora)
    steps = {phase.name: phase for phase in phases(config, make_meshes(config, jax.devices()[:1]))}
    prompts, width = steps["rollout: prefill"].program.args[1].shape
    decode = steps["rollout: decode"]
    of_windows, of_others = 2 * 2 * 8, 16
    ring = 4 * (4 * of_windows + decode.program.args[1].length * of_others)  # 4 slots, windows of 4 tokens
    cached = ring + prompts * width * (of_windows + of_others)
    assert bytes_per_device(decode.resident["KV cache"]) == 2 * cached * 2 + 4
    # The second embedding is 64 rows of 5 x 6 numbers, and a token is multiplied with all other matrices.
    weights = dict(models.named_leaves(models.abstract(small)))
    assert weights["per_layer_embed"].shape == (64, 30)
    kinds = ("norm", "scalar", "embed")
    matrices = {n: math.prod(x.shape) for n, x in weights.items() if not n.rpartition(".")[2].endswith(kinds)}
    assert sum(matrices.values()) == layer_weights(small)


def test_bytes_of_a_compressed_state_in_a_plan():
    """Weights 2 bytes, remainders 2 more, and a gradient of one micro-batch 2."""
    optim = OptimConfig(moments="int8", store_param_remainders=True)
    config = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(CONFIG.model, dtype="bfloat16"),
        optim=optim,
        tokens_per_device=1024,
        prompts_per_step=1,
    )
    update = next(p for p in phases(config, make_meshes(config, jax.devices()[:1])) if "accum" in p.name)
    norms = sum(x.size for name, x in models.named_leaves(models.abstract(SMALL)) if "norm" in name)
    weights = sum(x.size for x in jax.tree.leaves(models.abstract(SMALL)))
    size = {
        kind: bytes_per_device(update.resident[kind]) for kind in ("parameters", "optimizer", "gradients")
    }
    assert size["parameters"] == size["gradients"] == 2 * (weights + norms)
    assert update.program.args[1] is None and update.results is update.resident["gradients"]
    learner = make_stages(config, SMALL, make_meshes(config, jax.devices()[:1]))[-1].policy
    assert size["optimizer"] == bytes_per_device(learner.abstract_state().opt_state) < 9 * weights


def test_a_frozen_state_that_does_not_fit():
    """Layers of SMALL have 18,432 weights, its embedding 2,048: 90% of 20 GiB takes 4.5 bits, not 16."""
    _, lines = advice(
        cost("update: accumulate", parameters=20, activations=1),
        model=dataclasses.replace(CONFIG.model, dtype="bfloat16"),
        lora=LoraConfig(rank=4),
    )
    nf4 = next(line for line in lines if "--lora.quantize nf4" in line)
    assert nf4.endswith("in 4 bits: saves 12.94 GiB, 5.00 GiB are needed: would fit.")
    _, lines = advice(
        cost("update: accumulate", parameters=20, activations=1), lora=LoraConfig(rank=4, quantize="nf4")
    )
    assert not [line for line in lines if "--lora" in line]


def test_the_verdict_names_host_memory():
    phase = dataclasses.replace(cost("update: accumulate", parameters=4), host=2.0 * GIB)
    plan = Plan("a model", "v5e-4", {}, 16 * GIB, phases=[phase], derived={}, versions={})
    assert verdict(plan)[0] == "Host memory: 2.00 GiB for each device, offloaded."
    assert verdict(plan)[1].startswith("Fits: at most 4.00 GiB")


def test_a_rollout_that_does_not_fit():
    rollout = RolloutConfig(slots=64)
    _, lines = advice(cost("rollout: decode", parameters=2, rollout_weights=4, KV_cache=20), rollout=rollout)
    assert lines[0] == "  1. --rollout.dtype bfloat16: saves 12.00 GiB, 10.00 GiB are needed: would fit."
    assert lines[1] == "  2. --rollout.slots 32: saves 10.00 GiB, 10.00 GiB are needed: would fit."


@pytest.mark.parametrize(
    ("moe", "sharded_by"),
    [
        (None, "which only tensor parallelism shards."),
        (MoEConfig(8, 2, 16), "which tensor parallelism shards; experts are divided over 4 of 4 devices."),
        (MoEConfig(6, 2, 16), "which tensor parallelism shards; experts are divided over 4 of 4 devices."),
        (MoEConfig(6, 2, 18), "which tensor parallelism shards; experts are divided over 4 of 4 devices."),
    ],
    ids=["dense", "experts", "hidden states of experts", "inputs of experts"],
)
def test_what_shards_the_rollouts_weights(moe, sharded_by):
    """fsdp is 4."""
    model = dataclasses.replace(CONFIG.model, architecture=dataclasses.replace(SMALL, moe=moe))
    _, lines = advice(cost("rollout: decode", rollout_weights=20), model=model)
    line = next(line for line in lines if "--rollout.mesh" in line)
    assert line.endswith(f"above 1: each device holds 20.00 GiB of rollout weights, {sharded_by}")
