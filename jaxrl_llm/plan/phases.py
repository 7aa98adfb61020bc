"""A recipe's step as phases: which program runs, what lies in memory meanwhile, how often, how much work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm import algos, models
from jaxrl_llm.build.models import make_stages, with_heads
from jaxrl_llm.config import TrainConfig, derived
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.stage import Stage, loss_signals, policy_scores
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.plan import flops
from jaxrl_llm.plan.models import SHAPES, shape_of
from jaxrl_llm.recipe.checks import check_model
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.rules import TRAIN
from jaxrl_llm.structs import Program

Held = dict[str, Any]
"""What of it lies in memory -> tree of abstract arrays."""


@dataclass(frozen=True)
class Phase:
    """One program of a step."""

    name: str
    call: Program
    held: Held  # all that lies in memory while it runs, its arguments included; no activations
    times: int  # calls a step at most; of "decode", tokens that a slot writes
    flops: float  # of one call, all devices together
    per: str = "call"  # what one of `times` is


def phases(config: TrainConfig, mesh: Mesh) -> list[Phase]:
    """The phases of a training step, in their order. Traces the programs, compiles and makes nothing.

    Numbers of calls and FLOPs are those of a step whose prompts and responses all have their full length.

    Raises:
        ConfigError, ValueError: the recipe cannot run on this mesh, with the fix.
    """
    model = shape_of(config.model)
    check_model(config, mesh.shape, model.max_position, model.num_heads)
    model = with_heads(model, config.algo)
    stage = make_stages(config, model, mesh, SHAPES)[-1]
    base = _resident(config, model, stage)
    found = []
    if algos.of(config.algo).on_rollouts and config.rollout.engine == "native":
        found += _rollout(config, model, mesh, stage.policy.abstract_state().params, base)
    found += _score(config, stage, base)
    if stage.critic:
        found += _update("critic", config, stage.critic, stage, base)
    found += _update("update", config, stage.policy, stage, base)
    return found


def _resident(config: TrainConfig, model: TransformerConfig, stage: Stage) -> Held:
    """What is there from the first step to the last."""
    state = stage.policy.abstract_state()
    held: Held = {"parameters": [state.params], "optimizer": [state.opt_state], "frozen models": []}
    if stage.critic:
        critic = stage.critic.abstract_state()
        held["parameters"].append(critic.params)
        held["optimizer"].append(critic.opt_state)
    held["frozen models"] += stage.teachers
    if stage.needs_reference:
        held["frozen models"].append(_reference(config, stage.policy))
    for judge in config.reward.models:
        shape = SHAPES.config(judge.path)
        shardings = models.shardings(shape, stage.policy.mesh, TRAIN)
        held["frozen models"].append(SHAPES.params(judge.path, shape, shardings, config.model.dtype))
    return held


def _reference(config: TrainConfig, learner: Learner) -> Any:
    return SHAPES.params("", learner.model, learner.param_shardings, jnp.dtype(config.model.dtype))


def _rollout(config: TrainConfig, model, mesh: Mesh, params, base: Held) -> Iterator[Phase]:
    rollout, engine = config.rollout, NativeEngine(config.rollout, model, mesh)
    prompt, response = config.max_prompt_tokens, config.max_response_tokens
    calls = engine.largest_calls(
        params, prompt, response, config.prompts_per_step, rollout.sampling, config.env.active
    )
    weights, cache, state, *_, last = calls["decode"].args
    slots, width = len(state.tokens), calls["prefill"].args[1].shape
    paged = "write" in calls
    prompts = calls["write"].args[1] if paged else calls["spread"].args[0]
    longest = last.shape[1] * rollout.page if paged else cache.length
    base = base | ({"rollout weights": params} if rollout.weight_noise else {})
    held = base | {"rollout weights": [weights, base.get("rollout weights")]}
    full = held | {"KV cache": [cache, prompts]}
    draws = algos.requirements(config.algo).draws
    samples = config.prompts_per_step * config.responses_per_prompt * draws
    rounds = math.ceil(samples / slots)
    read = math.ceil(config.prompts_per_step * draws / width[0])
    yield Phase("rollout: publish", calls["publish"], base, 1, 0.0)
    one = flops.forward(model, width[0] * width[1], width[1] / 2)
    yield Phase("rollout: prefill", calls["prefill"], full, read, one)
    if "lengthen" in calls:
        short = calls["lengthen"].args[0]
        yield Phase("rollout: lengthen", calls["lengthen"], held | {"KV cache": [short, prompts]}, 1, 0.0)
    if paged:
        yield Phase("rollout: write", calls["write"], full, read, 0.0)
        yield Phase("rollout: copy", calls["copy"], full, rounds, 0.0)
    else:
        yield Phase("rollout: spread", calls["spread"], full, rounds, 0.0)
        copied = held | {"KV cache": [cache, prompts, calls["insert"].args[1]]}
        yield Phase("rollout: insert", calls["insert"], copied, rounds, 0.0)
    one = flops.forward(model, slots, longest) + flops.head(model, slots)
    yield Phase("rollout: decode", calls["decode"], full, rounds * response, one, "token")


def _score(config: TrainConfig, stage: Stage, base: Held) -> Iterator[Phase]:
    """Questions to the models before the first update."""
    learner = stage.policy
    rows, times = _microbatches(config, learner)
    scored = lambda model, speaks: (
        flops.forward(model, rows * config.row_tokens, config.row_tokens / 2)
        + flops.head(model, rows * config.row_tokens) * speaks
    )

    def phase(name, learner, params, wants):
        call = learner.score_program(params, wants)
        held = base | {"batch": [call.args[1]] * times}
        return Phase(f"score: {name}", call, held, times, scored(learner.model, wants != ("values",)))

    if wants := policy_scores(stage.requires, learner.config.old):
        yield phase("policy", learner, learner.abstract_state().params, wants)
    if stage.critic:
        yield phase("critic", stage.critic, stage.critic.abstract_state().params, ("values",))
    if stage.needs_reference:
        yield phase("reference", learner, _reference(config, learner), ("policy",))


def _update(name: str, config: TrainConfig, learner: Learner, stage: Stage, base: Held) -> Iterator[Phase]:
    teachers = stage.teachers if learner is stage.policy else ()
    calls = learner.update_programs(loss_signals(stage), teachers)
    grads, batch = calls["accumulate"].args[1:3]
    rows, times = _microbatches(config, learner)
    a_minibatch = times // config.minibatches_per_step
    held = base | {"gradients": grads, "batch": [batch] * a_minibatch}
    tokens, speaks = rows * config.row_tokens, algos.requirements(learner.algo).policy
    one = flops.update(learner.model, tokens, config.row_tokens / 2, config.model.remat, speaks)
    yield Phase(f"{name}: accumulate", calls["accumulate"], held, times, one)
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves(grads))
    yield Phase(f"{name}: apply", calls["apply"], held, config.minibatches_per_step, 15.0 * weights)


def _microbatches(config: TrainConfig, learner: Learner) -> tuple[int, int]:
    """(rows of one, how many a step has at most)."""
    found = derived(config, learner.mesh.size)
    return learner.config.rows, found["microbatches_per_update_at_most"] * config.minibatches_per_step
