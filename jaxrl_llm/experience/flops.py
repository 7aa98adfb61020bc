"""Model FLOPs of a training step, from the sequences that it generated, scored and learned from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxrl_llm.data.packing import PackItem, branches_of
from jaxrl_llm.experience.metrics import group_by_prompt
from jaxrl_llm.experience.rollouts import RolloutSource
from jaxrl_llm.learn.moe_losses import reads_logits
from jaxrl_llm.learn.scoring import policy_scores
from jaxrl_llm.learn.stage import Experience, Stage
from jaxrl_llm.models.flops import sequence_flops, training_flops
from jaxrl_llm.rollout.native.asynchronous import AsynchronousEngine
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.structs import Params


def step_flops(
    stage: Stage,
    experience: Experience,
    minibatches: Sequence[Sequence[PackItem]],
    step: int,
    *,
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
    count as the average of the kept responses.
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
    again = [len(t.prompt_ids) for group in group_by_prompt(trajectories) for t in group[1:]]
    for reward in source.rewarder.reward_models:
        shared = again if reward.scorer.config.share_prefixes else ()
        total += sequence_flops(reward.params.config, lengths, logits=False)
        total -= sequence_flops(reward.params.config, shared, logits=False)
    total *= generated / len(trajectories)
    if native:
        total += sequence_flops(model, (len(p.ids) for p in experience.prompts), logits=False)
    return total


def scoring_flops(stage: Stage, items: Sequence[PackItem], reference: Params | None) -> float:
    """Return the FLOPs of `Stage.score`."""
    policy, critic, distinct = stage.policy, stage.critic, _distinct(stage, [items])
    total = 0.0
    if outputs := policy_scores(stage.requires, policy.config):
        total += distinct(sequence_flops, policy.model, reads_logits(outputs))
    if critic and stage.updates_critic:
        total += distinct(sequence_flops, critic.model, False)
    if stage.requires.ref_logprobs and stage.teachers:
        for index, teacher in enumerate(stage.teachers):
            chosen = [i for i in items if round(float(i.signals["labels"][0])) == index]
            total += _distinct(stage, [chosen])(sequence_flops, teacher.config)
    elif reference is not None and isinstance(stage.source, RolloutSource):
        total += distinct(sequence_flops, reference.config)
    elif reference is not None:
        total += sequence_flops(reference.config, stage.reference_cache.computed)
    return total


def learning_flops(stage: Stage, minibatches: Sequence[Sequence[PackItem]], step: int) -> float:
    """Return the FLOPs of `Stage.update`, including teachers that the loss reads."""
    distinct, total = _distinct(stage, minibatches), 0.0
    if stage.critic and stage.updates_critic:
        total += distinct(training_flops, stage.critic.model, False)
    if not stage.critic or step >= stage.critic_warmup:
        total += distinct(training_flops, stage.policy.model, stage.requires.logprobs)
        if stage.policy.config.balance_coef:  # loads before the update
            total += distinct(sequence_flops, stage.policy.model, False)
        if stage.requires.divergence:
            total += sum(distinct(sequence_flops, teacher.config) for teacher in stage.teachers)
    return total


def _distinct(stage: Stage, minibatches: Sequence[Sequence[PackItem]]) -> Callable[..., float]:
    """Return (flops, model, logits) -> FLOPs of the items, each token of a row counted once."""
    lengths = [len(branch.item.tokens) for items in minibatches for branch in branches_of(items)]
    shared = [length for items in minibatches for length in stage.policy.scorer.shared_tokens(items)]
    return lambda flops, c, logits=True: flops(c, lengths, logits) - flops(c, shared, logits)
