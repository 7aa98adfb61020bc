"""Model FLOPs of a training step, from the sequences that it generated, scored and learned from."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.experience.rollouts import RolloutSource
from jaxrl_llm.learn.routing import reads_logits
from jaxrl_llm.learn.stage import Experience, Stage, policy_scores
from jaxrl_llm.models.flops import sequence_flops, training_flops
from jaxrl_llm.rollout.native.asynchronous import AsynchronousEngine
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.structs import Params


def step_flops(
    stage: Stage,
    experience: Experience,
    minibatches: Sequence[Sequence[PackItem]],
    step: int,
    reference: Params | None,
) -> float:
    """Return the model FLOPs of a step on the devices of the run, for perf/mfu.

    Forward passes of rollout, reward models, old and reference log-probs, values and teachers; forward and
    backward passes of policy and critic. Not counted are recomputation, padding, evaluation, and responses of
    SGLang servers, whose devices are not the run's.

    Args:
        step: of the stage, from 0.
        reference: weights of the frozen reference; None where the algorithm needs none.
    """
    done = generation_flops(stage, experience) + scoring_flops(stage, experience.items, reference)
    return done + learning_flops(stage, minibatches, step)


def generation_flops(stage: Stage, experience: Experience) -> float:
    """Return the FLOPs of responses and of their reward models.

    Each prompt is read once for all its responses. Responses that dynamic sampling dropped, and greedy ones,
    count as those that are there on average.
    """
    source, trajectories = stage.source, experience.trajectories
    if not isinstance(source, RolloutSource) or not trajectories:
        return 0.0
    generated = len(experience.prompts) * (source.responses + stage.requires.greedy)
    lengths = [t.num_tokens for t in trajectories]
    model, total = stage.policy.model, 0.0
    native = isinstance(source.engine, NativeEngine | AsynchronousEngine)
    if native:
        prompts = sequence_flops(model, (len(t.prompt_ids) for t in trajectories))
        total += sequence_flops(model, lengths) - prompts
    for reward in source.scorer.reward_models:
        total += sequence_flops(reward.params.config, lengths, logits=False)
    total *= generated / len(trajectories)
    if native:
        total += sequence_flops(model, (len(p.ids) for p in experience.prompts), logits=False)
    return total


def scoring_flops(stage: Stage, items: Sequence[PackItem], reference: Params | None) -> float:
    """Return the FLOPs of `Stage.score`."""
    lengths, policy, critic = [len(item.tokens) for item in items], stage.policy, stage.critic
    total = 0.0
    if outputs := policy_scores(stage.requires, policy.config):
        total += sequence_flops(policy.model, lengths, logits=reads_logits(outputs))
    if critic and stage.updates_critic:
        total += sequence_flops(critic.model, lengths, logits=False)
    if stage.requires.reference and stage.teachers:
        for index, teacher in enumerate(stage.teachers):
            chosen = [len(i.tokens) for i in items if round(float(i.signals["labels"][0])) == index]
            total += sequence_flops(teacher.config, chosen)
    elif reference is not None:
        computed = lengths if isinstance(stage.source, RolloutSource) else stage.reference_cache.computed
        total += sequence_flops(reference.config, computed)
    return total


def learning_flops(stage: Stage, minibatches: Sequence[Sequence[PackItem]], step: int) -> float:
    """Return the FLOPs of `Stage.update`, with those of the teachers that the loss reads."""
    lengths = [len(item.tokens) for items in minibatches for item in items]
    total = 0.0
    if stage.critic and stage.updates_critic:
        total += training_flops(stage.critic.model, lengths, logits=False)
    if not stage.critic or step >= stage.critic_warmup:
        total += training_flops(stage.policy.model, lengths, logits=stage.requires.policy)
        if stage.policy.config.balance_coef:  # loads before the update
            total += sequence_flops(stage.policy.model, lengths, logits=False)
        if stage.requires.divergence:
            total += sum(sequence_flops(teacher.config, lengths) for teacher in stage.teachers)
    return total
