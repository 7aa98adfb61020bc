"""Models of a run, made from its config: policy, critic and teachers."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm import algos, models
from jaxrl_llm.algos.config import AlgoConfig
from jaxrl_llm.algos.contract import choose_old_logprobs, renamed
from jaxrl_llm.builders.sizes import derived
from jaxrl_llm.builders.warm_up import loss_signals
from jaxrl_llm.builders.weights import load_frozen, load_with_heads, read_architecture, with_new_adapters
from jaxrl_llm.config import ModelConfig, TrainConfig
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.load import PRETRAINED, PretrainedModels
from jaxrl_llm.hf.resolve import resolve_model
from jaxrl_llm.hf.tokenizer import has_tokenizer, load_tokenizer, vocabulary_difference
from jaxrl_llm.host.processes import print_on_first
from jaxrl_llm.learn.config import OptimConfig
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.moe_losses import Replay
from jaxrl_llm.learn.optim import make_optimizer
from jaxrl_llm.learn.scoring import Scorer
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.attention import for_length, original_length, with_yarn
from jaxrl_llm.models.experts.router import route_spec
from jaxrl_llm.models.kernels import prefix_sharing
from jaxrl_llm.models.lora import base_config, frozen_config, with_lora
from jaxrl_llm.sharding.config import CRITIC, POLICY, REFERENCE, TEACHER
from jaxrl_llm.sharding.rules import TRAIN, with_shardings
from jaxrl_llm.structs import Params


def load_model_config(config: ModelConfig) -> tuple[TransformerConfig, Any, Any]:
    """Return (model config, tokenizer, folder of the weights or None), without reading weights.

    Raises:
        ConfigError: the tokenizer does not fit the model.
    """
    # The architecture, with the recipe's YaRN.
    folder = resolve_model(config.path) if config.path else None
    stored = read_config(folder) if folder else config.architecture
    model = with_yarn(stored, config.yarn_factor, config.yarn_original)
    if folder and stored.rope.scaling == "yarn" and model.rope != stored.rope:
        print_on_first(
            f"--model.yarn_factor {config.yarn_factor:g} over {original_length(model):,} positions replaces "
            f"the YaRN of {config.path}: {stored.rope.factor:g} over {original_length(stored):,}"
        )
    # The tokenizer, which must be the model's.
    if config.tokenizer == "tiny" or not (config.tokenizer or folder):
        tokenizer = make_tokenizer()
    else:
        tokenizer = load_tokenizer(resolve_model(config.tokenizer) if config.tokenizer else folder)
    has_own = folder and config.tokenizer and has_tokenizer(folder)
    model_tokenizer = load_tokenizer(folder) if has_own else tokenizer
    if difference := vocabulary_difference(model_tokenizer, tokenizer):
        raise ConfigError(
            f"--model.tokenizer {config.tokenizer} is not the tokenizer of --model.path {config.path}: "
            f"{difference}. Set --model.tokenizer '' to use the model's own."
        )
    if len(tokenizer) > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens but the model's vocabulary is {model.vocab_size}: "
            "they do not belong together; set --model.tokenizer to the folder of this model's tokenizer."
        )
    return model, tokenizer, folder


def make_stages(
    config: TrainConfig,
    model: TransformerConfig,
    meshes: Mapping[str, Mesh],
    stored: PretrainedModels = PRETRAINED,
) -> list[Stage]:
    """Return the stages of a run without their sources: the SFT warm-up, if any, and the run itself.

    Their states have the same shapes.

    Args:
        meshes: `make_meshes`.
        stored: source of the weights of teachers and of a pretrained critic.
    """
    mesh = meshes[POLICY]
    updates = config.steps * config.updates_per_step
    requires, warm = algos.requirements(config.algo), config.warm_start
    # The models: a separate critic, then the policy, which is not updated while the critic warms up.
    critic, critic_params, critic_warmup = None, None, 0
    if requires.critic:
        critic, critic_params = make_critic(config, model, meshes[CRITIC], updates, stored=stored)
        critic_warmup = config.critic.warmup_steps
    updates -= min(critic_warmup, config.steps) * config.updates_per_step
    policy = make_learner(config, config.algo, config.optim, updates, model=model, mesh=mesh)
    # The run, after its SFT warm-up.
    paths, teachers_mesh = requires.teachers, meshes[TEACHER]
    stages = [
        Stage(
            policy,
            "train",
            start=warm.steps,
            steps=config.steps,
            minibatches=config.minibatches_per_step,
            epochs=config.ppo_epochs,
            whole_prompts=config.minibatches_of == "prompts",
            critic=critic,
            critic_params=critic_params,
            critic_warmup=critic_warmup,
            teachers=tuple(load_frozen(config, path, teachers_mesh, stored) for path in paths),
            reference_model=scoring_model(config, policy, REFERENCE, meshes),
            teacher_model=scoring_model(config, policy, TEACHER, meshes),
        )
    ]
    # The SFT warm-up, before the run.
    if warm.steps:
        optim = replace(config.optim, learning_rate=warm.learning_rate, schedule="constant", warmup_steps=0)
        learner = make_learner(config, algos.sft.Config(), optim, warm.steps, model=model, mesh=mesh)
        warm_up = Stage(
            learner,
            "warm_start",
            steps=warm.steps,
            critic=critic,
            critic_params=critic_params,
            updates_critic=False,
        )
        stages.insert(0, warm_up)
    return stages


def scoring_model(
    config: TrainConfig, policy: Learner, role: str, meshes: Mapping[str, Mesh]
) -> Scorer | None:
    """Return the forward pass of a role on its mesh; None if it shares the policy's mesh."""
    if meshes[role] == meshes[POLICY]:
        return None
    return Scorer(step_of(config, policy.config, role, meshes[role]), meshes[role], policy.group_size)


def step_of(config: TrainConfig, step: StepConfig, role: str, mesh: Mesh) -> StepConfig:
    """Return the policy's settings with the micro-batch of another role."""
    role_config = replace(config, mesh=config.mesh_of(role))
    sizes = derived(role_config, mesh.size)
    return replace(
        step,
        rows=sizes["rows_per_microbatch"],
        score_rows=sizes["rows_per_scored_microbatch"],
        sequence_parallel=role_config.mesh.sequence_parallel,
    )


def check_own_algorithm(stage: Stage) -> None:
    """Trace the loss of a user's own algorithm on abstract arrays; compiles nothing.

    Raises:
        UserError: the loss raises, or returns something else than (scalar, metrics); names the line, if any.
    """
    path = Path(algos.of(stage.policy.algo).name)
    if path.suffix != ".py":
        return
    try:
        stage.policy.update_programs(loss_signals(stage), stage.loss_teachers)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f":{frame.lineno}" for frame in frames if frame.filename == str(path)]
        where = f"{path}{(lines or [': loss(inputs, config) -> (scalar, dict of metrics)'])[-1]}"
        text = str(error).partition("\n")[0] + renamed(error)
        raise UserError(f"--algo: {where}: {type(error).__name__}: {text}") from error


def check_frozen_models(config: TrainConfig, tokenizer: Any) -> None:
    """Check that teachers, reference and critic have the policy's tokenizer, whose token ids they read.

    Raises:
        ConfigError: names the first tokens that differ.
    """
    requires = algos.requirements(config.algo)
    paths = [("teacher", path) for path in requires.teachers]
    paths += [("reference", config.reference.path)] if requires.ref_logprobs and config.reference.path else []
    paths += [("critic", config.critic.path)] if requires.critic and config.critic.path else []
    for role, path in paths:
        folder = resolve_model(path)
        if difference := vocabulary_difference(tokenizer, load_tokenizer(folder, read_config(folder))):
            raise ConfigError(
                f"the {role} {path} has another tokenizer than the policy, whose tokens it reads: "
                f"{difference}. Give a {role} of the same model family."
            )


def has_own_reference(config: TrainConfig, model: TransformerConfig, meshes: Mapping[str, Mesh]) -> bool:
    """Return whether a reference has separate weights, unlike one that is the adapters' base."""
    return bool(config.reference.path) or not model.lora or meshes[REFERENCE] != meshes[POLICY]


def make_critic(
    config: TrainConfig, model: TransformerConfig, mesh: Mesh, updates: int, *, stored: PretrainedModels
) -> tuple[Learner, Callable[[], Params] | None]:
    """Return the learner of a critic with its own backbone, mesh and optimizer, and the function that loads
    its weights; None = they are the policy's."""
    critic = config.critic
    base = read_architecture(config, critic.path, stored) if critic.path else base_config(model)
    model = with_lora(config_with_heads(base, critic.loss), config.lora)
    config = replace(config, mesh=config.mesh_of(CRITIC))
    learner = make_learner(config, critic.loss, critic.optim, updates, model=model, mesh=mesh)

    def load() -> Params:
        params = load_with_heads(critic.path, frozen_config(model), mesh, stored)
        return with_new_adapters(params, model, mesh, config.seed)

    return learner, load if critic.path else None


def trained_config(model: TransformerConfig, config: TrainConfig) -> TransformerConfig:
    """Return the policy's architecture: heads that the algorithm needs, and adapters (`lora.rank`)."""
    return with_lora(config_with_heads(for_length(model, config.max_tokens), config.algo), config.lora)


def config_with_heads(model: TransformerConfig, algo: AlgoConfig) -> TransformerConfig:
    """Return the model with the heads that the algorithm needs.

    Critics and reward models use the embedding as LM head.
    """
    requires = algos.requirements(algo)
    tied = model.tie_embeddings or not requires.logprobs
    return replace(
        model,
        value_head=requires.values,
        tie_embeddings=tied,
        normalize_head=model.normalize_head and not tied,
    )


def make_learner(
    config: TrainConfig,
    algo: AlgoConfig,
    optim: OptimConfig,
    updates: int,
    *,
    model: TransformerConfig,
    mesh: Mesh,
) -> Learner:
    """Return the learner of a model. Learners on meshes of one size have micro-batches of one shape."""
    # The settings of a step: sizes, types, and options that depend on the algorithm.
    algorithm, requires = algos.of(algo), algos.requirements(algo)
    on_rollouts, sizes = algorithm.on_rollouts, derived(config, mesh.size)
    rolls_out = algos.updates_policy(algo)  # so the rollout knows its routes and kept sets
    replays = rolls_out and config.routing.replay != "none"
    shares = config.share_prefixes and algorithm.input in ("pairs", "labels")
    shares = config.shares_prompts if on_rollouts else shares
    step = StepConfig(
        row_tokens=config.row_tokens,
        rows=sizes["rows_per_microbatch"],
        score_rows=sizes["rows_per_scored_microbatch"],
        dtype=config.model.dtype,
        remat=config.model.remat,
        sequence_parallel=config.mesh.sequence_parallel,
        strict=config.strict and rolls_out,
        share_prefixes=shares and prefix_sharing(model, config.model.dtype, mesh),
        whole_sequences=requires.sequences,
        temperature=(config.rollout.sampling.temperature or 1.0) if on_rollouts else 1.0,
        chunk=config.model.logprob_chunk,
        num_kept=config.rollout.sampling.num_kept if rolls_out else 0,
        # Of the optimizer, of experts, and of old log-probs.
        max_grad_norm=optim.max_grad_norm,
        grad_dtype=optim.grad_dtype,
        offload=optim.offload,
        replay=Replay(config.routing.replay, route_spec(model)) if replays else None,
        balance_coef=config.routing.balance_coef if model.moe else 0.0,
        update_by_leaf=optim.name != "muon",  # which would orthogonalize twice
        old_logprobs_source=choose_old_logprobs(
            algorithm, requires, config.updates_per_step, config.is_on_policy
        ),
    )
    return Learner(algo, model, make_optimizer(optim, updates, config.routing.bias_rate), step, mesh=mesh)


def reference_model(
    config: TrainConfig, stage: Stage, stored: PretrainedModels = PRETRAINED
) -> TransformerConfig:
    """Return the reference's model: `reference.path`, or the policy's."""
    path = config.reference.path
    return read_architecture(config, path, stored) if path else stage.policy.model


def abstract_reference(
    config: TrainConfig, stage: Stage, meshes: Mapping[str, Mesh], stored: PretrainedModels = PRETRAINED
) -> Params:
    """Return the abstract reference weights; with adapters the policy's weights, whose base it shares."""
    if not has_own_reference(config, stage.policy.model, meshes):
        return stage.policy.abstract_state().params
    params = _abstract_frozen(config, reference_model(config, stage, stored), meshes[REFERENCE])
    return models.to_host(params) if config.reference.offload else params


def kept_reference(
    config: TrainConfig, stage: Stage, meshes: Mapping[str, Mesh], stored: PretrainedModels = PRETRAINED
) -> list[Params]:
    """Return the abstract weights that a run keeps for the reference alone: [] if it needs none, or shares
    the policy's."""
    if stage.needs_reference and has_own_reference(config, stage.policy.model, meshes):
        return [abstract_reference(config, stage, meshes, stored)]
    return []


def abstract_rewards(
    config: TrainConfig, meshes: Mapping[str, Mesh], stored: PretrainedModels = PRETRAINED
) -> list[Params]:
    """Return the abstract weights of the reward models that a run loads."""
    rewards = config.reward_models.items()
    return [_abstract_frozen(config, stored.config(reward.path), meshes[role]) for role, reward in rewards]


def _abstract_frozen(config: TrainConfig, model: TransformerConfig, mesh: Mesh) -> Params:
    """Return the abstract weights of a model that is not trained, on the devices in the compute type."""
    frozen = functools.partial(models.cast_weights, dtype=config.model.dtype)
    shapes = jax.eval_shape(frozen, models.abstract(model))
    return with_shardings(shapes, models.shardings(model, mesh, TRAIN))
