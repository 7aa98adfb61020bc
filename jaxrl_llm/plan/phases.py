"""Phases of a training step: program, resident arrays, number of calls and FLOPs of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm import algos, models
from jaxrl_llm.build.models import make_stages, trained_config
from jaxrl_llm.config import TrainConfig, derived
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.stage import Stage, loss_signals, policy_scores
from jaxrl_llm.plan import flops
from jaxrl_llm.plan.models import ABSTRACT_MODELS, planned_model
from jaxrl_llm.recipe.checks import check_model
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.rules import TRAIN
from jaxrl_llm.structs import Program

Resident = dict[str, Any]
"""Kind of memory (`plan.MEMORY_KINDS`) -> tree of abstract arrays."""


@dataclass(frozen=True)
class Phase:
    """One program of a training step, such as "rollout: decode" or "update: accumulate"."""

    name: str
    program: Program
    resident: Resident  # arrays in memory while it runs, including its arguments, without activations
    calls: int  # a step, at most; for "decode", tokens that a slot generates
    flops: float  # of one call, all devices together
    unit: str = "call"  # of `calls`: "call" or "token"


def phases(config: TrainConfig, mesh: Mesh) -> list[Phase]:
    """Return the phases of a training step, in order: traced, not compiled or allocated.

    Numbers of calls and FLOPs are those of a step whose prompts and responses all have their full length.

    Raises:
        UserError: the recipe cannot run on this mesh, with the fix.
    """
    model = planned_model(config.model)
    check_model(config, {role: mesh.shape for role in config.placements}, model.max_position, model.num_heads)
    model = trained_config(model, config)
    stage = make_stages(config, model, mesh, ABSTRACT_MODELS)[-1]
    base = _always_resident(config, stage)
    result = []
    if algos.of(config.algo).on_rollouts and config.rollout.engine == "native":
        result += _rollout(config, model, mesh, stage.policy.abstract_state().params, base)
    result += _score(config, stage, base)
    if stage.critic:
        result += _update("critic", config, stage.critic, stage, base)
    result += _update("update", config, stage.policy, stage, base)
    return result


def _always_resident(config: TrainConfig, stage: Stage) -> Resident:
    """Return the arrays that are in memory during every phase."""
    state = stage.policy.abstract_state()
    resident: Resident = {"parameters": [state.params], "optimizer": [state.opt_state], "frozen models": []}
    if stage.critic:
        critic = stage.critic.abstract_state()
        resident["parameters"].append(critic.params)
        resident["optimizer"].append(critic.opt_state)
    resident["frozen models"] += stage.teachers
    if stage.needs_reference and not stage.policy.model.lora:
        resident["frozen models"].append(_reference(config, stage.policy))
    for reward in config.reward.models:
        model = ABSTRACT_MODELS.config(reward.path)
        shardings = models.shardings(model, stage.policy.mesh, TRAIN)
        params = ABSTRACT_MODELS.params(reward.path, model, shardings, config.model.dtype)
        resident["frozen models"].append(params)
    return resident


def _reference(config: TrainConfig, learner: Learner) -> Any:
    dtype = jnp.dtype(config.model.dtype)
    return ABSTRACT_MODELS.params("", learner.model, learner.param_shardings, dtype)


def _rollout(config: TrainConfig, model, mesh: Mesh, params, base: Resident) -> Iterator[Phase]:
    rollout, engine = config.rollout, NativeEngine(config.rollout, model, mesh)
    prompt, response = config.max_prompt_tokens, config.max_response_tokens
    calls = engine.largest_calls(
        params, prompt, response, config.prompts_per_step, rollout.sampling, config.env.active
    )
    weights, cache, state, *_, last = calls["decode"].args
    slots, width = len(state.tokens), calls["prefill"].args[1].shape
    paged = "write_pages" in calls
    prompts = calls["write_pages"].args[1] if paged else calls["gather"].args[0]
    longest = last.shape[1] * rollout.page if paged else cache.length
    base = base | ({"rollout weights": params} if rollout.weight_noise else {})
    stale = [engine.transfer.own_weights(weights)] * rollout.max_staleness  # versions of steps begun earlier
    with_weights = base | {"rollout weights": [weights, stale, base.get("rollout weights")]}
    full = with_weights | {"KV cache": [cache, prompts]}
    draws = algos.requirements(config.algo).draws
    samples = config.prompts_per_step * config.responses_per_prompt * draws
    rounds = math.ceil(samples / slots)
    prefills = math.ceil(config.prompts_per_step * draws / width[0])
    yield Phase("rollout: publish", calls["publish"], base, 1, 0.0)
    prefill = flops.forward_flops(model, width[0] * width[1], width[1] / 2)
    yield Phase("rollout: prefill", calls["prefill"], full, prefills, prefill)
    if "resize" in calls:
        short = calls["resize"].args[0]
        resident = with_weights | {"KV cache": [short, prompts]}
        yield Phase("rollout: resize", calls["resize"], resident, 1, 0.0)
    if paged:
        yield Phase("rollout: write", calls["write_pages"], full, prefills, 0.0)
        yield Phase("rollout: copy", calls["copy_pages"], full, rounds, 0.0)
    else:
        yield Phase("rollout: gather", calls["gather"], full, rounds, 0.0)
        copied = with_weights | {"KV cache": [cache, prompts, calls["insert"].args[1]]}
        yield Phase("rollout: insert", calls["insert"], copied, rounds, 0.0)
    decode = flops.forward_flops(model, slots, longest) + flops.head_flops(model, slots)
    yield Phase("rollout: decode", calls["decode"], full, rounds * response, decode, "token")


def _score(config: TrainConfig, stage: Stage, base: Resident) -> Iterator[Phase]:
    """Yield the phases that score the batch before the first update."""
    learner = stage.policy
    rows, times = _microbatches(config, learner)
    tokens = rows * config.row_tokens

    def phase(name, learner, params, outputs):
        program = learner.score_program(params, outputs)
        resident = base | {"batch": [program.args[1]] * times}
        work = flops.forward_flops(learner.model, tokens, config.row_tokens / 2)
        work += flops.head_flops(learner.model, tokens) * (outputs != ("values",))
        return Phase(f"score: {name}", program, resident, times, work)

    if outputs := policy_scores(stage.requires, learner.config.old):
        yield phase("policy", learner, learner.abstract_state().params, outputs)
    if stage.critic:
        yield phase("critic", stage.critic, stage.critic.abstract_state().params, ("values",))
    if stage.needs_reference:
        yield phase("reference", learner, _reference(config, learner), ("policy",))


def _update(
    name: str, config: TrainConfig, learner: Learner, stage: Stage, base: Resident
) -> Iterator[Phase]:
    teachers = stage.teachers if learner is stage.policy else ()
    calls = learner.update_programs(loss_signals(stage), teachers)
    grads, batch = calls["accumulate"].args[1:3]
    rows, times = _microbatches(config, learner)
    per_minibatch = times // config.minibatches_per_step
    resident = base | {"gradients": grads, "batch": [batch] * per_minibatch}
    tokens, with_logits = rows * config.row_tokens, algos.requirements(learner.algo).policy
    work = flops.update_flops(learner.model, tokens, config.row_tokens / 2, config.model.remat, with_logits)
    yield Phase(f"{name}: accumulate", calls["accumulate"], resident, times, work)
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves(grads))
    yield Phase(f"{name}: apply", calls["apply"], resident, config.minibatches_per_step, 15.0 * weights)


def _microbatches(config: TrainConfig, learner: Learner) -> tuple[int, int]:
    """Return (rows of a micro-batch, maximum micro-batches of a step)."""
    sizes = derived(config, learner.mesh.size)
    return learner.config.rows, sizes["microbatches_per_update_at_most"] * config.minibatches_per_step
