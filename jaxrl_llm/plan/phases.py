"""Phases of a training step: program, resident arrays, number of calls and FLOPs of each."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_kernels.dispatch import choose
from jaxrl_kernels.linear_logprob.api import tokens_at_once
from jaxrl_llm import algos
from jaxrl_llm.builders.models import abstract_reference, abstract_rewards, kept_reference, reference_model
from jaxrl_llm.builders.sizes import derived, mean_context, rows_needed
from jaxrl_llm.builders.warm_up import score_programs, update_programs
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.moe_losses import reads_logits
from jaxrl_llm.learn.row_groups import RowShape
from jaxrl_llm.learn.scoring import Scorer
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.models import TransformerConfig, flops
from jaxrl_llm.models.lora import split_params
from jaxrl_llm.plan.experts import tile_trips
from jaxrl_llm.plan.floors import (
    Rows,
    bubble_of,
    forward_floor,
    kernel_flops,
    rollout_floors,
    rollout_rows,
    rows_flops,
    training_floor,
    work_with_bubble,
)
from jaxrl_llm.plan.hlo import NO_HINTS, Hints
from jaxrl_llm.plan.models import ABSTRACT_MODELS, planned_stage
from jaxrl_llm.plan.work import NO_WORK, ProgramWork
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.compile import Program
from jaxrl_llm.sharding.config import CRITIC, POLICY, ROLLOUT_ENGINE
from jaxrl_llm.sharding.rules import ROLLOUT, TRAIN, bytes_per_device, num_shards

DECODING = r"^jit\(_decode(_drafts)?\)/while$"
"""The loop over the tokens of a chunk of decoding, as `hlo.Instruction.source` names it."""
SHAPES = ("", " of short rows")
"""Ends of the names of phases with the micro-batches of each shape (`row_shapes`); the time of short rows is
counted with the long ones."""
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
    floor: ProgramWork = NO_WORK
    hints: Hints = NO_HINTS


def phases(config: TrainConfig, meshes: Mapping[str, Mesh]) -> list[Phase]:
    """Return the phases of a training step, in order: traced, not compiled or allocated.

    Args:
        meshes: `make_meshes`.

    Numbers of calls and FLOPs assume prompts and responses of full length.

    Raises:
        UserError: the recipe cannot run on these meshes, with the fix.
    """
    stage = planned_stage(config, meshes)
    base = always_resident(config, stage, meshes)
    result = []
    if algos.of(config.algo).on_rollouts and config.rollout.engine == "native":
        result += _rollout(
            config, stage.policy.model, meshes, stage.policy.abstract_state().params, base=base
        )
    result += _score(config, stage, base, meshes)
    if stage.critic:
        result += _update("critic", config, stage.critic, stage, base=base)
    result += _update("update", config, stage.policy, stage, base=base)
    return result


def always_resident(config: TrainConfig, stage: Stage, meshes: Mapping[str, Mesh]) -> Resident:
    """Return the arrays that are in memory during every phase."""
    state = stage.policy.abstract_state()
    resident: Resident = {"parameters": [state.params], "optimizer": [state.opt_state], "frozen models": []}
    if stage.critic:
        critic = stage.critic.abstract_state()
        shares_base = not stage.critic_params and stage.critic.mesh == stage.policy.mesh
        resident["parameters"].append(split_params(critic.params)[0] if shares_base else critic.params)
        resident["optimizer"].append(critic.opt_state)
    resident["frozen models"] += stage.teachers
    resident["frozen models"] += kept_reference(config, stage, meshes, ABSTRACT_MODELS)
    resident["frozen models"] += abstract_rewards(config, meshes, ABSTRACT_MODELS)
    return resident


def _rollout(
    config: TrainConfig, model, meshes: Mapping[str, Mesh], params, *, base: Resident
) -> Iterator[Phase]:
    mesh, rollout = meshes[ROLLOUT_ENGINE], config.rollout
    engine = NativeEngine(rollout, model, mesh, routes=config.routing.replay == "rollout")
    calls, response = _rollout_calls(config, engine, params), config.max_response_tokens
    # Memory: the cache, copies of the weights, prompts.
    weights, cache, state, inputs = calls["decode"].args
    slots, width = len(state.tokens), calls["prefill"].args[1].shape
    paged = "write_pages" in calls
    prompts = calls["write_pages"].args[1] if paged else calls["gather"].args[0]
    longest = inputs.table.shape[1] * rollout.page if paged else cache.length
    base = base | ({"rollout weights": params} if rollout.weight_noise else {})
    stale = [engine.transfer.versioned_weights(weights)] * rollout.max_staleness
    with_weights = base | {"rollout weights": [weights, stale, base.get("rollout weights")]}
    kept = calls["read_kept"].args[1] if "read_kept" in calls else None
    holding = lambda *caches: with_weights | {"KV cache": [*caches, prompts, kept]}
    full = holding(cache)
    # Calls of each program in a step.
    prompts_drawn = config.prompts_per_step * algos.requirements(config.algo).draws
    samples = prompts_drawn * config.responses_per_prompt
    rounds, prefills = math.ceil(samples / slots), math.ceil(prompts_drawn / width[0])
    computed = rollout_rows(calls, longest)
    floors = rollout_floors(model, mesh, calls, computed, page=rollout.page)

    def phase(program, name, resident, count, *, on=mesh):
        rows, decodes = computed.get(program), program in ("decode", "decode_drafts")
        kernels, work = (kernel_flops(model, mesh, rows), rows_flops(model, rows)) if rows else ({}, 0.0)
        steps, unit = (rollout.chunk, "token") if decodes else (1, "call")
        tiles = tile_trips(model, mesh, ROLLOUT, rollout.dtype, tokens=rows.tokens) if rows else {}
        hints = Hints({DECODING: steps, **tiles}, steps, kernels, reads_cache=decodes)
        make = functools.partial(Phase, flops=work, mesh=on, unit=unit, floor=floors[program], hints=hints)
        return make(f"rollout: {name}", calls[program], resident, count)

    # The phases, in order.
    sender = meshes[POLICY] if engine.transfer.is_needed(params) else mesh
    yield phase("publish", "publish", base, 1, on=sender)
    yield phase("prefill", "prefill", full, prefills)
    if "resize" in calls:
        yield phase("resize", "resize", holding(calls["resize"].args[0]), 1)
    if paged:
        yield phase("write_pages", "write", full, prefills)
        yield phase("copy_pages", "copy", full, math.ceil(samples / len(calls["copy_pages"].args[1])))
    else:
        yield phase("gather", "gather", full, rounds)
        yield phase("insert", "insert", holding(cache, calls["insert"].args[1]), rounds)
    if "extend" in calls:
        turns = math.ceil(samples * response / computed["extend"].tokens)
        for name in ("extend", *(("read_kept", "write_kept") if kept else ())):
            yield phase(name, name.replace("_", " "), full, turns)
    yield phase("decode", "decode", full, rounds * response)
    if "decode_drafts" in calls:  # in place of steps of decode: their time is counted there
        yield phase("decode_drafts", "drafts", full, 0)


def _rollout_calls(config: TrainConfig, engine: NativeEngine, params) -> dict[str, Program]:
    return engine.largest_calls(
        params,
        config.max_prompt_tokens,
        config.max_response_tokens,
        config.prompts_per_step,
        sampling=config.rollout.sampling,
        turns=config.env.active,
    )


def _score(config: TrainConfig, stage: Stage, base: Resident, meshes: Mapping[str, Mesh]) -> Iterator[Phase]:
    """Yield the phases that score the batch before the first update."""
    reference = abstract_reference(config, stage, meshes, ABSTRACT_MODELS) if stage.needs_reference else None
    for name, scored, programs in score_programs(stage, reference):
        model = (stage.critic if name == "critic" else stage.policy).model
        if name == "reference":
            model = reference_model(config, stage, ABSTRACT_MODELS)
        shapes = scored.shapes(scored.config.rows_scored)
        times = math.ceil(rows_needed(config, 1) / shapes[0].rows)
        for kind, shape, program in zip(SHAPES, shapes, programs, strict=False):
            resident = base | {"batch": [program.args[1]] * times}
            counted = _rows(config, model, shape, reads_logits(program.static["names"]))
            floor = forward_floor(model, shape.mesh, config.model.dtype, counted)
            hints = _hints(config, scored, model, shape, kernels=kernel_flops(model, shape.mesh, counted))
            work = work_with_bubble(functools.partial(rows_flops, model), counted)
            yield Phase(
                f"score: {name}{kind}",
                program,
                resident,
                calls=0 if kind else times,
                flops=work,
                mesh=shape.mesh,
                floor=floor,
                hints=hints,
            )


def _update(
    name: str, config: TrainConfig, learner: Learner, stage: Stage, *, base: Resident
) -> Iterator[Phase]:
    role = POLICY if learner is stage.policy else CRITIC
    sizes = derived(replace(config, mesh=config.mesh_of(role)), learner.mesh.size)
    rows, times = learner.config.rows, sizes["microbatches_per_update_at_most"] * config.minibatches_per_step
    per_minibatch, shapes = times // config.minibatches_per_step, learner.scorer.shapes(rows)
    kinds = [update_programs(stage, learner, per_minibatch, kind=kind) for kind in range(len(shapes))]
    calls = kinds[0]
    batch, grads = calls["accumulate"].args[2].batch, calls["apply"].args[1]
    resident = base | {"gradients": grads, "batch": [batch] * per_minibatch}
    remat, mesh, with_logits = config.model.remat, learner.mesh, algos.requirements(learner.algo).logprobs
    results = grads if per_minibatch == 1 else None  # otherwise they replace an argument
    size, state = bytes_per_device(grads), bytes_per_device(calls["apply"].args[0])
    added = 2 * size if results is None else size  # not read by the first addition
    # A micro-batch of each shape.
    for kind, shape, programs in zip(SHAPES, shapes, kinds, strict=False):
        counted = _rows(config, learner.model, shape, with_logits)
        work = work_with_bubble(
            lambda rows: flops.update_flops(learner.model, *rows[:2], remat, with_logits=rows.logits), counted
        )
        floor = training_floor(learner.model, shape.mesh, config.model.dtype, counted, grads=added)
        kernels = kernel_flops(learner.model, shape.mesh, counted, trained=True, remat=remat)
        hints = _hints(config, learner.scorer, learner.model, shape, kernels=kernels)
        yield Phase(
            f"{name}: accumulate{kind}",
            programs["accumulate"],
            resident,
            calls=0 if kind else times * config.ppo_epochs,
            flops=work,
            mesh=shape.mesh,
            results=results,
            floor=floor,
            hints=hints,
        )
    # Gradients of replicas are added, and the optimizer is applied, once a mini-batch.
    trained, replicas = calls["apply"].args[0].params, learner.replicas.count
    work, updates = 15.0 * sum(math.prod(x.shape) for x in jax.tree.leaves(trained)), config.updates_per_step
    if add := calls.get("add"):
        floor = ProgramWork(memory=2.0 * size, links=2 * (replicas - 1) / replicas * size)
        yield Phase(f"{name}: add", add, resident, updates, flops=0.0, mesh=mesh, results=grads, floor=floor)
    floor = ProgramWork(memory=2.0 * state + size)
    yield Phase(f"{name}: apply", calls["apply"], resident, updates, flops=work, mesh=mesh, floor=floor)


def _rows(config: TrainConfig, model: TransformerConfig, shape: RowShape, with_logits: bool) -> Rows:
    """Return the tokens of a micro-batch; tokens of short rows attend to fewer tokens."""
    context = mean_context(config) * shape.row_tokens / config.row_tokens
    bubble = bubble_of(model, shape.rows, shape.mesh.shape)
    return Rows(shape.rows * shape.row_tokens, context, with_logits, bubble)


def _hints(
    config: TrainConfig,
    scored: Scorer,
    model: TransformerConfig,
    shape: RowShape,
    *,
    kernels: dict[str, float],
) -> Hints:
    """Return the hints of a program that computes log-probs, in a loop over the tokens of the mask: all."""
    length, rows, mesh = shape
    with jax.set_mesh(mesh):
        name, _ = choose("linear_logprob", model.hidden_size, config.model.dtype)
    of_device = rows // num_shards("batch", mesh.shape), length // num_shards("sequence", mesh.shape)
    chunk = tokens_at_once(name, of_device, model.hidden_size, scored.config.chunk)
    tiles = tile_trips(model, mesh, TRAIN, config.model.dtype, tokens=rows * length)
    return Hints({"linear_logprob": math.ceil(math.prod(of_device) / chunk), **tiles}, kernels=kernels)
