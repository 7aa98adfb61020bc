"""Compilation of a run's scoring and update programs before its first step (`--rollout.warm_up True`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh

from jaxrl_llm import algos
from jaxrl_llm.data.packing import IN_LOSS
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.moe_losses import ROUTES
from jaxrl_llm.learn.scoring import Scorer, policy_scores
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.sharding.compile import ParallelCompiler, Program
from jaxrl_llm.structs import Params


def score_programs(
    stage: Stage, reference: Params | None = None
) -> Iterator[tuple[str, Scorer, list[Program]]]:
    """Yield (name, model, programs) of each forward pass before the first update; teachers not among them.

    There is a program for each shape of micro-batches.

    Args:
        reference: abstract weights of the frozen reference, where the stage needs one.
    """
    policy, critic = stage.policy, stage.critic
    if outputs := policy_scores(stage.requires, policy.config):
        params, replay = policy.abstract_state().params, ROUTES not in outputs
        yield "policy", policy.scorer, policy.scorer.score_programs(params, outputs, replay)
    if critic and stage.updates_critic:
        params = critic.abstract_state().params
        yield "critic", critic.scorer, critic.scorer.score_programs(params, ("values",))
    if stage.needs_reference:
        scored = stage.reference_model or policy.scorer
        yield "reference", scored, scored.score_programs(reference, ("logprobs",))


def update_programs(
    stage: Stage, learner: Learner, microbatches: int, *, kind: int = 0
) -> dict[str, Program]:
    """Return `Learner.update_programs` of the policy or the critic for so many micro-batches an update."""
    teachers = stage.loss_teachers if learner is stage.policy else ()
    return learner.update_programs(loss_signals(stage), teachers, microbatches, kind=kind)


def compile_stages(stages: Sequence[Stage], reference: Params) -> None:
    """Compile the programs of all stages, several at a time; none is run.

    Args:
        reference: abstract weights of the frozen reference.
    """
    with ParallelCompiler() as compiler:
        for stage in stages:
            for mesh, program in stage_programs(stage, reference):
                with jax.set_mesh(mesh):
                    compiler.start(program.fn, *program.args, **program.static)


def stage_programs(stage: Stage, reference: Params) -> Iterator[tuple[Mesh, Program]]:
    """Yield the programs of a stage's steps, each with its mesh.

    An update of one micro-batch and one of several are different programs, and so are those of long and short
    rows; a run may need all.
    """
    for _, model, programs in score_programs(stage, reference):
        for shape, program in zip(model.shapes(model.config.rows_scored), programs, strict=True):
            yield shape.mesh, program
    learners = [stage.policy, stage.critic] if stage.critic and stage.updates_critic else [stage.policy]
    for learner in learners:
        for kind, shape in enumerate(learner.scorer.shapes(learner.config.rows)):
            for microbatches in (1, 2):
                programs = update_programs(stage, learner, microbatches, kind=kind)
                yield shape.mesh, programs.pop("accumulate")
                if kind == 0:
                    yield from ((learner.mesh, program) for program in programs.values())


def loss_signals(stage: Stage) -> tuple[str, ...]:
    """Return the signals that the micro-batches of a stage's updates have (`structs.SIGNALS`)."""
    algorithm, requires = algos.of(stage.policy.algo), stage.requires
    critic = bool(stage.critic and stage.updates_critic)
    present = {
        "rollout_logprobs": algorithm.on_rollouts,
        "old_logprobs": stage.policy.config.old_logprobs_source != "policy",
        "ref_logprobs": requires.ref_logprobs,
        "values": critic or requires.values,
        "advantages": algorithm.on_rollouts,
        "returns": critic or requires.values,
        "labels": bool(stage.teachers) or algorithm.input in ("pairs", "labels") or algorithm.data == "steps",
    }
    return tuple(name for name in IN_LOSS if present[name])
