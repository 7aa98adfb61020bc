"""Phases of a training step: the program of each, the arrays in memory beside it, calls and FLOPs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm import algos, models
from jaxrl_llm.algos.contract import old_logprobs
from jaxrl_llm.build.models import make_trainers, with_heads
from jaxrl_llm.config import TrainConfig, derived
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.trainer import Trainer, scores_before_update
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
    resident: Resident  # arrays in memory while it runs, its arguments included; no activations
    calls: int  # a step, at most; for "decode", tokens that a slot generates
    flops: float  # of one call, all devices together
    unit: str = "call"  # of `calls`: "call" or "token"


def phases(config: TrainConfig, mesh: Mesh) -> list[Phase]:
    """Return the phases of a training step, in their order. Traces the programs; compiles and allocates
    nothing.

    Numbers of calls and FLOPs are those of a step whose prompts and responses all have their full length.

    Raises:
        UserError: the recipe cannot run on this mesh, with the fix.
    """
    model = planned_model(config.model)
    check_model(config, mesh.shape, model.max_position, model.num_heads)
    model = with_heads(model, config.algo)
    _, trainer = make_trainers(config, model, mesh, ABSTRACT_MODELS)
    base = _always_resident(config, trainer)
    result = []
    if algos.of(config.algo).on_rollouts and config.rollout.engine == "native":
        result += _rollout(config, model, mesh, trainer.policy.abstract_state().params, base)
    result += _score(config, trainer, base)
    if trainer.critic:
        result += _update("critic", config, trainer.critic, trainer, base)
    result += _update("update", config, trainer.policy, trainer, base)
    return result


def _always_resident(config: TrainConfig, trainer: Trainer) -> Resident:
    """Return the arrays that are in memory during every phase."""
    state = trainer.policy.abstract_state()
    resident: Resident = {"parameters": [state.params], "optimizer": [state.opt_state], "frozen models": []}
    if trainer.critic:
        critic = trainer.critic.abstract_state()
        resident["parameters"].append(critic.params)
        resident["optimizer"].append(critic.opt_state)
    resident["frozen models"] += trainer.teachers
    if algos.requirements(config.algo).reference and not trainer.teachers:
        resident["frozen models"].append(_reference(config, trainer.policy))
    for reward in config.reward.models:
        model = ABSTRACT_MODELS.config(reward.path)
        shardings = models.shardings(model, trainer.policy.mesh, TRAIN)
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
    paged = "write" in calls
    prompts = calls["write"].args[1] if paged else calls["spread"].args[0]
    longest = last.shape[1] * rollout.page if paged else cache.length
    base = base | ({"rollout weights": params} if rollout.weight_noise else {})
    with_weights = base | {"rollout weights": [weights, base.get("rollout weights")]}
    full = with_weights | {"KV cache": [cache, prompts]}
    draws = algos.requirements(config.algo).draws
    samples = config.prompts_per_step * config.responses_per_prompt * draws
    rounds = math.ceil(samples / slots)
    prefills = math.ceil(config.prompts_per_step * draws / width[0])
    yield Phase("rollout: publish", calls["publish"], base, 1, 0.0)
    prefill = flops.forward(model, width[0] * width[1], width[1] / 2)
    yield Phase("rollout: prefill", calls["prefill"], full, prefills, prefill)
    if "lengthen" in calls:
        short = calls["lengthen"].args[0]
        resident = with_weights | {"KV cache": [short, prompts]}
        yield Phase("rollout: lengthen", calls["lengthen"], resident, 1, 0.0)
    if paged:
        yield Phase("rollout: write", calls["write"], full, prefills, 0.0)
        yield Phase("rollout: copy", calls["copy"], full, rounds, 0.0)
    else:
        yield Phase("rollout: spread", calls["spread"], full, rounds, 0.0)
        copied = with_weights | {"KV cache": [cache, prompts, calls["insert"].args[1]]}
        yield Phase("rollout: insert", calls["insert"], copied, rounds, 0.0)
    decode = flops.forward(model, slots, longest) + flops.head(model, slots)
    yield Phase("rollout: decode", calls["decode"], full, rounds * response, decode, "token")


def _score(config: TrainConfig, trainer: Trainer, base: Resident) -> Iterator[Phase]:
    """Yield the phases that score the batch before the first update."""
    algo, learner = config.algo, trainer.policy
    rows, times = _microbatches(config, learner)
    tokens = rows * config.row_tokens

    def phase(name, learner, params, outputs):
        program = learner.score_call(params, outputs)
        resident = base | {"batch": [program.args[1]] * times}
        work = flops.forward(learner.model, tokens, config.row_tokens / 2)
        work += flops.head(learner.model, tokens) * (outputs != ("values",))
        return Phase(f"score: {name}", program, resident, times, work)

    if outputs := scores_before_update(algo, config.minibatches_per_step):
        yield phase("policy", learner, learner.abstract_state().params, outputs)
    if trainer.critic:
        yield phase("critic", trainer.critic, trainer.critic.abstract_state().params, ("values",))
    if algos.requirements(algo).reference and not trainer.teachers:
        yield phase("reference", learner, _reference(config, learner), ("policy",))


def _update(
    name: str, config: TrainConfig, learner: Learner, trainer: Trainer, base: Held
) -> Iterator[Phase]:
    teachers = trainer.teachers if learner is trainer.policy else ()
    calls = learner.update_calls(_signals(config, trainer), teachers)
    grads, batch = calls["accumulate"].args[1:3]
    rows, times = _microbatches(config, learner)
    per_minibatch = times // config.minibatches_per_step
    resident = base | {"gradients": grads, "batch": [batch] * per_minibatch}
    tokens, with_logits = rows * config.row_tokens, algos.requirements(learner.algo).policy
    work = flops.update(learner.model, tokens, config.row_tokens / 2, config.model.remat, with_logits)
    yield Phase(f"{name}: accumulate", calls["accumulate"], resident, times, work)
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves(grads))
    yield Phase(f"{name}: apply", calls["apply"], resident, config.minibatches_per_step, 15.0 * weights)


def _microbatches(config: TrainConfig, learner: Learner) -> tuple[int, int]:
    """Return (rows of a micro-batch, most micro-batches of a step)."""
    sizes = derived(config, learner.mesh.size)
    return learner.config.rows, sizes["microbatches_per_update_at_most"] * config.minibatches_per_step


def _signals(config: TrainConfig, trainer: Trainer) -> tuple[str, ...]:
    """Return the optional arrays of a micro-batch of the update."""
    algorithm, requires = algos.of(config.algo), algos.requirements(config.algo)
    updates = config.minibatches_per_step
    names = ["labels"] * (algorithm.input != "tokens")
    if algorithm.on_rollouts:
        names = ["rollout", "advantages"]
    scores = scores_before_update(config.algo, updates)
    names += ["old"] * (old_logprobs(algorithm, requires, updates) != "policy")
    names += ["values", "returns"] * bool(trainer.critic or "values" in scores)
    names += ["reference"] * requires.reference
    return tuple(dict.fromkeys(names + ["labels"] * bool(trainer.teachers)))
