"""Compilation of a run's scoring and update programs before its first step (`--rollout.warm_up True`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh

from jaxrl_llm.learn.programs import score_programs, update_programs
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.sharding.compile import ParallelCompiler
from jaxrl_llm.structs import Params, Program


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

    An update of one micro-batch and one of several are different programs; a run may need both.
    """
    for _, model, program in score_programs(stage, reference):
        yield model.mesh, program
    learners = [stage.policy, stage.critic] if stage.critic and stage.updates_critic else [stage.policy]
    for learner in learners:
        for microbatches in (1, 2):
            for program in update_programs(stage, learner, microbatches).values():
                yield learner.mesh, program
