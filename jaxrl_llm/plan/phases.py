"""Phases of a training step: program, resident arrays, number of calls and FLOPs of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm import algos, models
from jaxrl_llm.build.models import has_own_reference, make_stages, trained_config
from jaxrl_llm.build.sizes import derived, rows_needed
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.routing import ROUTES, reads_logits
from jaxrl_llm.learn.scoring import ScoringModel
from jaxrl_llm.learn.stage import Stage, loss_signals, policy_scores
from jaxrl_llm.models import TransformerConfig, flops
from jaxrl_llm.plan.models import ABSTRACT_MODELS, planned_model
from jaxrl_llm.recipe.checks import check_model
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.config import CRITIC, POLICY, REFERENCE, ROLLOUT_ENGINE, reward_role
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
    mesh: Mesh  # that the program runs on
    unit: str = "call"  # of `calls`: "call" or "token"
    results: Any = None  # outputs that `resident` counts


def phases(config: TrainConfig, meshes: Mapping[str, Mesh]) -> list[Phase]:
    """Return the phases of a training step, in order: traced, not compiled or allocated.

    Args:
        meshes: `make_meshes`.

    Numbers of calls and FLOPs are those of a step whose prompts and responses all have their full length.

    Raises:
        UserError: the recipe cannot run on these meshes, with the fix.
    """
    model = planned_model(config.model)
    check_model(
        config, {role: mesh.shape for role, mesh in meshes.items()}, model.max_position, model.num_heads
    )
    model = trained_config(model, config)
    stage = make_stages(config, model, meshes, ABSTRACT_MODELS)[-1]
    base = _always_resident(config, stage, meshes)
    result = []
    if algos.of(config.algo).on_rollouts and config.rollout.engine == "native":
        result += _rollout(config, model, meshes, stage.policy.abstract_state().params, base)
    result += _score(config, stage, base, meshes)
    if stage.critic:
        result += _update("critic", config, stage.critic, stage, base)
    result += _update("update", config, stage.policy, stage, base)
    return result


def _always_resident(config: TrainConfig, stage: Stage, meshes: Mapping[str, Mesh]) -> Resident:
    """Return the arrays that are in memory during every phase."""
    state = stage.policy.abstract_state()
    resident: Resident = {"parameters": [state.params], "optimizer": [state.opt_state], "frozen models": []}
    if stage.critic:
        critic = stage.critic.abstract_state()
        resident["parameters"].append(critic.params)
        resident["optimizer"].append(critic.opt_state)
    resident["frozen models"] += stage.teachers
    if stage.needs_reference and has_own_reference(config, stage.policy.model, meshes):
        resident["frozen models"].append(_reference(config, stage, meshes))
    for i, reward in enumerate(config.reward.models):
        model = ABSTRACT_MODELS.config(reward.path)
        shardings = models.shardings(model, meshes[reward_role(i)], TRAIN)
        params = ABSTRACT_MODELS.params(reward.path, model, shardings, config.model.dtype)
        resident["frozen models"].append(params)
    return resident


def _reference(config: TrainConfig, stage: Stage, meshes: Mapping[str, Mesh]) -> Any:
    """Return the abstract reference: with adapters, the policy's own arrays (`models.lora.base`)."""
    dtype, mesh = jnp.dtype(config.model.dtype), meshes[REFERENCE]
    if not has_own_reference(config, stage.policy.model, meshes):
        return stage.policy.abstract_state().params
    model = _reference_config(config, stage)
    params = ABSTRACT_MODELS.params("", model, models.shardings(model, mesh, TRAIN), dtype)
    return models.to_host(params) if config.reference.offload else params


def _reference_config(config: TrainConfig, stage: Stage) -> TransformerConfig:
    return ABSTRACT_MODELS.config(path) if (path := config.reference.path) else stage.policy.model


def _rollout(
    config: TrainConfig, model, meshes: Mapping[str, Mesh], params, base: Resident
) -> Iterator[Phase]:
    mesh, rollout = meshes[ROLLOUT_ENGINE], config.rollout
    engine = NativeEngine(rollout, model, mesh, routes=config.routing.replay == "rollout")
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
    stale = [engine.transfer.versioned_weights(weights)] * rollout.max_staleness
    with_weights = base | {"rollout weights": [weights, stale, base.get("rollout weights")]}
    full = with_weights | {"KV cache": [cache, prompts]}
    draws = algos.requirements(config.algo).draws
    samples = config.prompts_per_step * config.responses_per_prompt * draws
    rounds = math.ceil(samples / slots)
    prefills = math.ceil(config.prompts_per_step * draws / width[0])
    sender = meshes[POLICY] if engine.transfer.is_needed(params) else mesh
    yield Phase("rollout: publish", calls["publish"], base, 1, 0.0, sender)
    prefill = flops.forward_flops(model, width[0] * width[1], width[1] / 2)
    yield Phase("rollout: prefill", calls["prefill"], full, prefills, prefill, mesh)
    if "resize" in calls:
        short = calls["resize"].args[0]
        resident = with_weights | {"KV cache": [short, prompts]}
        yield Phase("rollout: resize", calls["resize"], resident, 1, 0.0, mesh)
    if paged:
        yield Phase("rollout: write", calls["write_pages"], full, prefills, 0.0, mesh)
        yield Phase("rollout: copy", calls["copy_pages"], full, rounds, 0.0, mesh)
        if "extend" in calls:
            read = math.prod(calls["extend"].args[3].shape)
            extend, count = flops.forward_flops(model, read, longest), math.ceil(samples * response / read)
            yield Phase("rollout: extend", calls["extend"], full, count, extend, mesh)
    else:
        yield Phase("rollout: gather", calls["gather"], full, rounds, 0.0, mesh)
        copied = with_weights | {"KV cache": [cache, prompts, calls["insert"].args[1]]}
        yield Phase("rollout: insert", calls["insert"], copied, rounds, 0.0, mesh)
    decode = flops.forward_flops(model, slots, longest) + flops.head_flops(model, slots)
    yield Phase("rollout: decode", calls["decode"], full, rounds * response, decode, mesh, "token")


def _score(config: TrainConfig, stage: Stage, base: Resident, meshes: Mapping[str, Mesh]) -> Iterator[Phase]:
    """Yield the phases that score the batch before the first update."""
    policy, critic = stage.policy, stage.critic

    def phase(name, scored, model, params, outputs, replay=False):
        rows = scored.config.rows_scored
        needed = rows_needed(config, config.trajectories_per_step)
        times, tokens = math.ceil(needed / rows), rows * config.row_tokens
        program = scored.score_program(params, outputs, replay)
        resident = base | {"batch": [program.args[1]] * times}
        work = flops.forward_flops(model, tokens, config.max_tokens / 2)
        work += flops.head_flops(model, tokens) * reads_logits(outputs)
        return Phase(f"score: {name}", program, resident, times, work, scored.mesh)

    if outputs := policy_scores(stage.requires, policy.config):
        params, replay = policy.abstract_state().params, ROUTES not in outputs
        yield phase("policy", policy, policy.model, params, outputs, replay)
    if critic:
        yield phase("critic", critic, critic.model, critic.abstract_state().params, ("values",))
    if stage.needs_reference:
        scored, params = stage.reference_model or policy, _reference(config, stage, meshes)
        yield phase("reference", scored, _reference_config(config, stage), params, ("policy",))


def _update(
    name: str, config: TrainConfig, learner: Learner, stage: Stage, base: Resident
) -> Iterator[Phase]:
    teachers, role = (stage.loss_teachers, POLICY) if learner is stage.policy else ((), CRITIC)
    rows, times = _microbatches(config, learner, role)
    per_minibatch = times // config.minibatches_per_step
    calls = learner.update_programs(loss_signals(stage), teachers, per_minibatch)
    batch, grads = calls["accumulate"].args[2], calls["apply"].args[1]
    resident = base | {"gradients": grads, "batch": [batch] * per_minibatch}
    tokens, with_logits = rows * config.row_tokens, algos.requirements(learner.algo).policy
    work = flops.update_flops(learner.model, tokens, config.max_tokens / 2, config.model.remat, with_logits)
    results = grads if per_minibatch == 1 else None  # otherwise they replace an argument
    accumulate, times = calls["accumulate"], times * config.ppo_epochs
    yield Phase(f"{name}: accumulate", accumulate, resident, times, work, learner.mesh, results=results)
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves(grads))
    updates = config.updates_per_step
    yield Phase(f"{name}: apply", calls["apply"], resident, updates, 15.0 * weights, learner.mesh)


def _microbatches(config: TrainConfig, model: ScoringModel, role: str) -> tuple[int, int]:
    """Return (rows of a micro-batch, maximum micro-batches of a pass over a step)."""
    sizes = derived(replace(config, mesh=config.mesh_of(role)), model.mesh.size)
    return model.config.rows, sizes["microbatches_per_update_at_most"] * config.minibatches_per_step
