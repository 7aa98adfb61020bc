"""Construction of a run from its config; input that cannot work is refused before expensive work."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import algos, models
from jaxrl_llm.builders.data import open_loaders, try_first_rows, with_steps
from jaxrl_llm.builders.engines import make_engine
from jaxrl_llm.builders.evaluation import Evaluator, make_evaluators, open_judge
from jaxrl_llm.builders.exports import check_export_folders, export_due, export_models, export_step, push_run
from jaxrl_llm.builders.models import (
    abstract_reference,
    abstract_rewards,
    check_frozen_models,
    check_own_algorithm,
    kept_reference,
    load_model_config,
    make_stages,
    step_of,
    trained_config,
)
from jaxrl_llm.builders.moments import adopt_moments, check_initial_moments, restart_moments
from jaxrl_llm.builders.pin import pin_date
from jaxrl_llm.builders.rewards import open_rewards
from jaxrl_llm.builders.sizes import make_meshes, with_prefixes
from jaxrl_llm.builders.warm_up import compile_stages
from jaxrl_llm.builders.weights import (
    check_critic_files,
    check_frequencies,
    check_frozen,
    load_frozen,
    load_with_heads,
    with_new_adapters,
)
from jaxrl_llm.config import GENERATIVE, TrainConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.template import set_template
from jaxrl_llm.envs.load import DialogueSource, make_conversations, make_gateway
from jaxrl_llm.experience.dataset import DatasetSource
from jaxrl_llm.experience.reward_models import RewardModel, load_reward_model
from jaxrl_llm.experience.rewards import Rewarder
from jaxrl_llm.experience.rollouts import RolloutSource
from jaxrl_llm.hf.hub import check_repository
from jaxrl_llm.hf.load import PRETRAINED
from jaxrl_llm.hf.peft import load_adapter
from jaxrl_llm.hf.tokenizer import generation_end_ids
from jaxrl_llm.host.devices import check_host_memory
from jaxrl_llm.host.processes import on_first
from jaxrl_llm.learn.reference import Reference
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig, lora
from jaxrl_llm.models.kernels import check_kernels_setting
from jaxrl_llm.recipe.checks import architectures, check_models, check_on_devices
from jaxrl_llm.recipe.dump import dump
from jaxrl_llm.report.prometheus import Prometheus
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.keys import Purpose, run_key
from jaxrl_llm.sharding.config import POLICY, REFERENCE, ROLLOUT_ENGINE
from jaxrl_llm.sharding.rules import HOST, TRAIN, bytes_per_device
from jaxrl_llm.structs import Params, TrainState
from jaxrl_llm.user_file import expand_home


@dataclass
class Run:
    """Inputs of the training loop."""

    config: TrainConfig
    meshes: dict[str, Mesh]  # `make_meshes`
    model: TransformerConfig
    tokenizer: Any
    folder: Path | None  # of the pretrained weights
    stages: list[Stage]
    evaluators: list[Evaluator]
    loaders: dict[str, Loader]  # "train", "warm_start", "eval"
    adapter: dict[str, np.ndarray]  # weights of the adapter to start from; {} = new ones
    env: DialogueSource | None = None
    exporter: Prometheus | None = None
    fingerprints: dict[str, str] | None = None  # of the frozen weights; None = not computed yet

    @property
    def total(self) -> int:
        """Steps of all stages."""
        return self.stages[-1].end

    def stage(self, step: int) -> Stage:
        """Return the stage of a step."""
        return next(s for s in self.stages if s.start <= step < s.end)

    @property
    def devices(self) -> list[jax.Device]:
        """Devices of all models, once each."""
        return sorted({d for mesh in self.meshes.values() for d in mesh.devices.flat}, key=lambda d: d.id)

    @property
    def mesh(self) -> Mesh:
        """Mesh of the policy."""
        return self.meshes[POLICY]

    def initial_params(self, role: str = POLICY) -> Params:
        """Return pretrained or random weights, float32; each device reads or initialises only its shard.

        Args:
            role: of the model whose mesh they are for.
        """
        mesh, base = self.meshes[role], lora.frozen_config(self.model)
        if self.folder is not None:
            params = load_with_heads(self.folder, base, mesh)
        else:
            shardings = models.shardings(base, mesh, TRAIN)
            make = jax.jit(models.init, static_argnums=0, out_shardings=shardings)
            with jax.set_mesh(mesh):
                params = make(base, run_key(self.config.seed, Purpose.WEIGHTS))
        params = with_new_adapters(params, self.model, mesh, self.config.seed)
        return lora.replace_weights(params, self.adapter)

    def export(self, state: TrainState, step: int | None = None) -> None:
        """Export the model at the end of the run, or at a step where --checkpoint.hf_every has one due.

        Raises:
            OSError, UserError, RunError: as `save_model` and `push_run`.
        """
        if step is None:
            export_models(self.config, self.tokenizer, state, Path(self.config.run_dir))
            push_run(Path(self.config.run_dir), self.config.hub)
        elif export_due(self.config.checkpoint, step):
            export_step(self.config, self.tokenizer, state, step)

    def reference(self) -> Reference:
        """Return the frozen reference of the last stage; its weights are loaded at their first use."""
        run_dir, dtype = Path(self.config.run_dir), self.config.model.dtype
        abstract, mesh = self.stages[0].policy.abstract_state().params, self.meshes[REFERENCE]
        own = mesh if mesh != self.mesh else None
        initial = functools.partial(self.initial_params, REFERENCE)
        path, offload = self.config.reference.path, self.config.reference.offload
        pretrained = functools.partial(load_frozen, self.config, path, mesh) if path else None
        return Reference(
            run_dir,
            dtype,
            initial,
            abstract,
            mesh=own,
            offload=offload,
            pretrained=pretrained,
            adapter=self.adapter,
        )

    def initial_state(self) -> TrainState:
        """Return the state before the first step."""
        state = self.stages[0].init_state(self.initial_params())
        return adopt_moments(self.config, self.stages[0], state)

    def complete(self, state: TrainState, meta: Mapping[str, Any]) -> TrainState:
        """Complete the state of a checkpoint with frozen weights, and new moments if it has none.

        Raises:
            UserError: the adapters were trained on other weights, or the model has other frequencies.
        """
        check_frequencies(meta.get("model", {}), self.model, self.config)
        if self.model.lora:
            state = lora.with_frozen_of(state, self.stages[0].init_state(self.initial_params()))
            config, now = self.config, self.frozen_fingerprints(state)
            check_frozen(meta.get("frozen", ""), now["frozen"], config.model.path, config.run_dir)
            own = now["frozen_critic"]
            check_frozen(meta.get("frozen_critic", own), own, config.critic.path, config.run_dir)
        return restart_moments(self.stages[-1], state)

    def checkpoint_meta(self, state: TrainState) -> dict[str, Any]:
        """Return the metadata of the run's checkpoints."""
        return {"config": dump(self.config), "model": asdict(self.model), **self.frozen_fingerprints(state)}

    def frozen_fingerprints(self, state: TrainState) -> dict[str, str]:
        """Return checksums of the frozen weights, which are computed once: they do not change.

        Returns: of the policy, and of a critic from a folder, which shares none of them ("" without one).
        """
        if self.fingerprints is None:
            critic = state.critic if self.stages[0].critic_params else None
            self.fingerprints = {
                "frozen": lora.frozen_fingerprint(state.params),
                "frozen_critic": lora.frozen_fingerprint(critic.params) if critic else "",
            }
        return self.fingerprints


def build(config: TrainConfig, closing: contextlib.ExitStack, reward: Callable | None = None) -> Run:
    """Open model config, tokenizer, data, rewards and environment; then make learners, engine and evaluators.

    Args:
        closing: collects the resources to close at the end.
        reward: Python function that replaces `reward.name`.

    Raises:
        UserError: input that cannot work, with the fix.
    """
    # Refuse bad exports, names and devices before anything is loaded.
    check_kernels_setting()
    on_first(lambda: check_export_folders(config))
    if config.hub.push:
        on_first(lambda: check_repository(config.hub.push, config.hub.private))
    sized, meshes = check_on_devices(config, jax.devices()), make_meshes(config)
    model, tokenizer, folder = load_model_config(config.model)
    config = replace(config, model=replace(config.model, architecture=model))  # a recipe may state another
    set_template(tokenizer, config.data.chat)
    config = pin_date(config, tokenizer)
    tokenizer.end_ids = ends = generation_end_ids(folder) if folder else ()
    check_frozen_models(config, tokenizer)
    check_critic_files(config)
    read = lambda path: model if path == config.model.path else PRETRAINED.config(path)
    check_models(sized, architectures(config, read))
    exporter = open_exporter(config, closing)
    # Data, environment and rewards, tried on the first rows.
    model = trained_config(model, config)
    start = config.model.adapter
    adapter = load_adapter(expand_home(start), model, trains=True) if start else {}
    env = make_environment(config, tokenizer)
    loaders = open_loaders(config, tokenizer, closing.enter_context(env).columns if env else {})
    config = with_steps(config, loaders["train"])
    rows = try_first_rows(config, loaders)
    rolls_out = algos.of(config.algo).on_rollouts
    generates = rolls_out or (bool(config.eval.every) and algos.requirements(config.algo).logprobs)
    engine = rewarder = judge = None
    if generates:
        rewards = open_rewards(config, loaders, reward, closing)
        judge = open_judge(config, rows, closing)
    config = with_prefixes(config, model, meshes[POLICY])
    # Learners and the engine.
    stages = make_stages(config, model, meshes)
    check_own_algorithm(stages[-1])
    check_offload(config, stages[-1], meshes)
    check_initial_moments(config, stages[0])
    if generates:
        resident = resident_bytes(config, stages[-1], meshes)
        engine = make_engine(
            config, model, meshes, tokenizer, eos_ids=ends, closing=closing, folder=folder, resident=resident
        )
        rewarder = Rewarder(rewards, load_reward_models(config, stages[-1].policy.config, meshes, tokenizer))
    if config.rollout.warm_up:
        compile_stages(stages, abstract_reference(config, stages[-1], meshes))
    # The source of experience of each stage, and evaluators.
    set_sources(config, stages, loaders, engine, rewarder=rewarder, env=env)
    evaluators = make_evaluators(
        config, loaders.get("eval"), stages[-1], engine, rewarder=rewarder, env=env, judge=judge
    )
    return Run(
        config, meshes, model, tokenizer, exporter=exporter,
        folder=folder, stages=stages, evaluators=evaluators, loaders=loaders, adapter=adapter, env=env,
    )  # fmt: skip


def open_exporter(config: TrainConfig, closing: contextlib.ExitStack) -> Prometheus | None:
    """Return the server of metrics; None without one, or in another process than the first."""
    if not config.log.prometheus or jax.process_index() > 0:
        return None
    name = config.log.name or Path(config.run_dir).name
    return closing.enter_context(contextlib.closing(Prometheus(config.log, name)))


def make_environment(config: TrainConfig, tokenizer: Any) -> DialogueSource | None:
    """Return the other side of conversations; None if the policy writes one turn. Raises UserError."""
    if not config.env.gateway.active:
        return make_conversations(config.env, tokenizer, config.data.chat)
    return make_gateway(
        config.env,
        tokenizer,
        config.data.chat,
        max_prompt_tokens=config.max_prompt_tokens,
        max_response_tokens=config.max_response_tokens,
        slots=config.rollout.slots,
        sampling=config.rollout.sampling,
    )


def set_sources(
    config: TrainConfig,
    stages: Sequence[Stage],
    loaders: Mapping[str, Loader],
    engine: Engine | None,
    *,
    rewarder: Rewarder | None,
    env: DialogueSource | None,
) -> None:
    """Give each stage its source of experience: the policy's responses, or a dataset."""
    last, train = stages[-1], loaders["train"]
    if stages[0] is not last:
        examples = config.warm_start.examples_per_step
        stages[0].source = dataset_source(stages[0], loaders["warm_start"], examples)
    if algos.of(config.algo).on_rollouts:
        rewarding = [model for model in rewarder.reward_models if model.config.weight]
        rewarder = Rewarder(rewarder.pool, rewarding)
        last.source = make_rollout_source(config, train, engine, rewarder, env=env)
    else:
        last.source = dataset_source(last, train, config.prompts_per_step)


def load_reward_models(
    config: TrainConfig, step: StepConfig, meshes: Mapping[str, Mesh], tokenizer: Any
) -> list[RewardModel]:
    """Return the reward models, each on its mesh."""
    loaded = []
    for role, model in config.reward_models.items():
        compares = config.eval.judge == GENERATIVE and model.kind == GENERATIVE
        role_step = step_of(config, step, role, meshes[role])
        loaded.append(
            load_reward_model(
                model,
                role_step,
                meshes[role],
                tokenizer,
                chat=config.data.chat,
                responses=1 + compares,
                longest=config.max_tokens,
            )
        )
    return loaded


def check_offload(config: TrainConfig, stage: Stage, meshes: Mapping[str, Mesh]) -> None:
    """Refuse optimizer state and a reference that the memory of the hosts is short for. A collective.

    Raises:
        UserError: names the bytes and the fix.
    """
    needed = {
        "--optim.offload": bytes_per_device(stage.abstract_state(), HOST),
        "--reference.offload": bytes_per_device(kept_reference(config, stage, meshes), HOST),
    }
    settings = [name for name, size in needed.items() if size]
    if settings:
        smaller = "--optim.moments int8, " if "--optim.offload" in settings else ""
        smaller = "" if config.optim.moments == "int8" else smaller
        fix = f"Set {smaller}a larger --mesh.fsdp over more hosts, or {' or '.join(settings)} False."
        check_host_memory(sum(needed.values()) * jax.local_device_count(), " and ".join(settings), fix)


def dataset_source(stage: Stage, loader: Loader, examples: int) -> DatasetSource:
    """Return the source of experience of a stage that learns from a dataset."""
    return DatasetSource(loader, examples, stage.policy.algo, stage.reference_cache)


def make_rollout_source(
    config: TrainConfig, loader: Loader, engine: Engine, rewarder: Rewarder, *, env: DialogueSource | None
) -> RolloutSource:
    """Return the source of experience of a run that learns from its own responses."""
    return RolloutSource(
        loader=loader,
        engine=engine,
        rewarder=rewarder,
        algo=config.algo,
        sampling=config.rollout.sampling,
        key=run_key(config.seed, Purpose.ROLLOUT),
        prompts=config.prompts_per_step,
        responses=config.responses_per_prompt,
        max_tokens=config.max_response_tokens,
        weight_noise=config.rollout.weight_noise,
        env=env,
        max_staleness=config.rollout.max_staleness,
        oversample=config.rollout.oversample,
        steps=config.steps,
    )


def resident_bytes(config: TrainConfig, stage: Stage, meshes: Mapping[str, Mesh]) -> int:
    """Return the bytes on each device of the rollout that a run keeps and has not loaded yet: states, frozen
    reference and reward models."""
    kept = stage.abstract_state(), kept_reference(config, stage, meshes), abstract_rewards(config, meshes)
    return bytes_per_device(kept, devices=frozenset(meshes[ROLLOUT_ENGINE].devices.flat))
