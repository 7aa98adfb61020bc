"""Construction of a run from its config; input that cannot work is refused before expensive work."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import algos, models
from jaxrl_llm.build.engines import make_engine
from jaxrl_llm.build.models import (
    check_own_algorithm,
    check_vocabularies,
    load_model_config,
    make_stages,
    step_of,
    trained_config,
    with_new_adapters,
)
from jaxrl_llm.build.placement import POLICY, REFERENCE, ROLLOUT_ENGINE, make_meshes, reward_role
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.template import set_template
from jaxrl_llm.envs.check import check_env
from jaxrl_llm.envs.load import Conversations, make_conversations
from jaxrl_llm.errors import UserError
from jaxrl_llm.experience.dataset import DatasetSource, dataset_items
from jaxrl_llm.experience.evaluate import HeldOutAccuracy, HeldOutLoss
from jaxrl_llm.experience.reward_models import RewardModel, load_reward_model
from jaxrl_llm.experience.rollouts import RolloutSource
from jaxrl_llm.experience.score import Scorer, reward_sample
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.export import check_export_folder, save_model
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.peft import load_adapter, save_adapter
from jaxrl_llm.hf.tokenizer import generation_end_ids
from jaxrl_llm.host.processes import on_first
from jaxrl_llm.learn.reference import Reference
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig, lora
from jaxrl_llm.models.kernels import check_kernels_setting
from jaxrl_llm.recipe.checks import check_held_out, check_model
from jaxrl_llm.rewards.load import choose_reward
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.keys import Purpose, run_key
from jaxrl_llm.sharding.rules import TRAIN, bytes_per_device, with_shardings
from jaxrl_llm.structs import Params, TrainState
from jaxrl_llm.user_file import expand_home

Evaluator = HeldOutAccuracy | HeldOutLoss


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

    @property
    def total(self) -> int:
        """Steps of all stages."""
        return self.stages[-1].end

    def stage(self, step: int) -> Stage:
        """Return the stage of a step."""
        return next(s for s in self.stages if s.start <= step < s.end)

    @property
    def mesh(self) -> Mesh:
        """Mesh of the policy."""
        return self.meshes[POLICY]

    def initial_params(self, role: str = POLICY) -> Params:
        """Return pretrained or random weights, float32; each device reads or initialises only its shard.

        Args:
            role: of the model whose mesh they are for.
        """
        mesh, base = self.meshes[role], lora.base_config(self.model)
        with jax.set_mesh(mesh):
            if self.folder is not None:
                params = self._pretrained(base, mesh)
            else:
                shardings = models.shardings(base, mesh, TRAIN)
                make = jax.jit(models.init, static_argnums=0, out_shardings=shardings)
                params = make(base, run_key(self.config.seed, Purpose.WEIGHTS))
        params = with_new_adapters(params, self.model, mesh, self.config.seed)
        return lora.replace_weights(params, self.adapter)

    def _pretrained(self, base: TransformerConfig, mesh: Mesh) -> Params:
        """Return the folder's weights; a missing value head is initialised with zeros."""
        saved, shardings = read_config(self.folder), models.shardings(base, mesh, TRAIN)
        params = load_params(self.folder, saved, models.shardings(saved, mesh, TRAIN), jnp.float32)
        if saved == base:
            return params
        fit = functools.partial(models.with_heads, config=base)
        return jax.jit(fit, out_shardings=shardings, donate_argnums=0)(params)

    def exported(self, params: Params) -> Params:
        """Return the weights to export: adapters merged, and a policy without its value head."""
        if self.model.lora:
            shardings = models.shardings(lora.base_config(self.model), self.mesh, TRAIN)
            params = jax.jit(lora.merge, out_shardings=shardings)(params)
        return self._without_value_head(params)

    def export(self, params: Params) -> None:
        """Write the model to run_dir/hf, and its adapters, if it has some, to run_dir/adapter.

        Raises:
            OSError, UserError, RunError: as `save_model`.
        """
        run_dir, whole = Path(self.config.run_dir), self.exported(params)
        save_model(whole, whole.config, run_dir / "hf", self.tokenizer, dtype=self.config.model.dtype)
        if self.model.lora:
            save_adapter(self._without_value_head(params), run_dir / "adapter", self.config.model.path)

    def _without_value_head(self, params: Params) -> Params:
        """Return a policy without its value head; other models keep theirs."""
        return models.without_value_head(params) if algos.requirements(self.config.algo).policy else params

    def reference(self) -> Reference:
        """Return the frozen reference of the last stage; its weights are loaded at their first use."""
        run_dir, dtype = Path(self.config.run_dir), self.config.model.dtype
        abstract, mesh = self.stages[0].policy.abstract_state().params, self.meshes[REFERENCE]
        initial = functools.partial(self.initial_params, REFERENCE)
        return Reference(run_dir, dtype, initial, abstract, mesh if mesh != self.mesh else None)

    def initial_state(self) -> TrainState:
        return self.stages[0].init_state(self.initial_params())

    def complete(self, state: TrainState, meta: Mapping[str, Any]) -> TrainState:
        """Return the state of a checkpoint with the frozen weights, which a checkpoint does not hold.

        Raises:
            UserError: they are not those that its adapters were trained on.
        """
        if self.model.lora is None:
            return state
        whole = lora.with_frozen_of(state, self.initial_state())
        saved, now = meta.get("frozen", ""), lora.frozen_fingerprint(whole.params)
        if saved != now:
            raise UserError(
                f"{self.config.model.path or 'the random weights'}: not the weights that the adapters of "
                f"{self.config.run_dir} were trained on (fingerprint {now}, not {saved}). Put them back, or "
                "start a new run with another --run_dir."
            )
        return whole


def build(config: TrainConfig, closing: contextlib.ExitStack, reward: Callable | None = None) -> Run:
    """Open model config, tokenizer, data, rewards and environment; then make learners, engine and evaluators.

    Args:
        closing: collects the resources to close at the end.
        reward: Python function that replaces `reward.name`.

    Raises:
        UserError: input that cannot work, with the fix.
    """
    check_kernels_setting()
    on_first(lambda: check_export_folder(Path(config.run_dir) / "hf"))
    if config.lora.rank:
        on_first(lambda: check_export_folder(Path(config.run_dir) / "adapter", "adapter_config.json"))
    meshes = make_meshes(config)
    model, tokenizer, folder = load_model_config(config.model)
    set_template(tokenizer, config.data.chat)
    check_vocabularies(config, tokenizer)
    check_model(
        config, {role: own.shape for role, own in meshes.items()}, model.max_position, model.num_heads
    )
    model = trained_config(model, config)
    adapter = load_adapter(expand_home(config.model.adapter), model) if config.model.adapter else {}
    env = make_conversations(config.env, tokenizer, config.data.chat)
    loaders = open_loaders(config, tokenizer, closing.enter_context(env).columns if env else {})
    rows = try_first_rows(config, loaders)
    rolls_out = algos.of(config.algo).on_rollouts
    generates = rolls_out or (bool(config.eval.every) and algos.requirements(config.algo).policy)
    engine = rewards = None
    if generates:
        rewards = open_rewards(config, rows, reward, closing)
    stages = make_stages(config, model, meshes)
    check_own_algorithm(stages[-1])
    if generates:
        ends = generation_end_ids(folder) if folder else ()
        resident = resident_bytes(config, stages[-1], meshes)
        engine = make_engine(config, model, meshes, tokenizer, ends, closing, folder, resident)
    if stages[0] is not stages[-1]:
        examples = config.warm_start.examples_per_step
        stages[0].source = DatasetSource(loaders["warm_start"], examples, stages[0].policy.algo)
    if rolls_out:
        scorer = Scorer(rewards, load_reward_models(config, stages[-1].policy.config, meshes, tokenizer))
        stages[-1].source = make_rollout_source(config, loaders["train"], engine, scorer, env)
    else:
        stages[-1].source = DatasetSource(loaders["train"], config.prompts_per_step, config.algo)
    evaluators = []
    if config.eval.every:
        evaluators = make_evaluators(config, loaders["eval"], stages[-1], engine, rewards, env)
    return Run(config, meshes, model, tokenizer, folder, stages, evaluators, loaders, adapter)


def load_reward_models(
    config: TrainConfig, step: StepConfig, meshes: Mapping[str, Mesh], tokenizer: Any
) -> list[RewardModel]:
    """Return the reward models, each on its mesh."""
    loaded = []
    for i, model in enumerate(config.reward.models):
        role = reward_role(i)
        own = step_of(config, step, role, meshes[role])
        loaded.append(load_reward_model(model, own, meshes[role], tokenizer, config.data.chat))
    return loaded


def open_loaders(config: TrainConfig, tokenizer: Any, columns: dict[str, Any]) -> dict[str, Loader]:
    """Open the data: "train", and "warm_start" and "eval" of runs that have them.

    Args:
        columns: columns that every row gets, such as the tools that the chat template shows.
    """

    def loader(data=config.data, split: Literal["train", "eval"] = "train") -> Loader:
        longest = config.max_prompt_tokens
        return Loader(data, tokenizer, config.seed, longest, split, config.max_tokens, columns)

    loaders, warm = {"train": loader()}, config.warm_start
    if warm.steps:
        loaders["warm_start"] = loader(
            replace(config.data, train=warm.sources, path="") if warm.sources else config.data
        )
    if config.eval.every:
        loaders["eval"] = loader(split="eval")
        check_held_out(config, loaders["eval"].stats()["rows"])
    return loaders


def try_first_rows(config: TrainConfig, loaders: dict[str, Loader]) -> list[Example]:
    """Return a row of each training source, after rendering, tokenizing and resetting the environment for it.

    Raises:
        UserError: no row of a source can be used, or an environment or tool fails; with the fix.
    """
    algorithm = algos.of(config.algo)
    kind = "prompts" if algorithm.on_rollouts else algorithm.data
    kinds = {"train": kind, "warm_start": "tokens", "eval": kind}
    rows = {name: loader.check_first_rows(kinds[name]) for name, loader in loaders.items()}
    on_first(lambda: check_env(config.env, rows["train"]))
    return rows["train"]


def open_rewards(
    config: TrainConfig, rows: Sequence[Example], function: Callable | None, closing: contextlib.ExitStack
) -> RewardPool:
    """Return the pool of reward workers, after it has scored the first rows.

    Raises:
        RewardLoadError: the reward cannot be found, imported, or called on any of the rows.
        UserError: nothing rewards the responses that the run learns from.
    """
    samples = [reward_sample(row) for row in rows]
    needed = algos.of(config.algo).on_rollouts and not (config.reward.models or config.env.name)
    settings = config.reward if function else choose_reward(config.reward, samples, required=needed)
    if needed and not function and settings.name == "none" and not algos.requirements(config.algo).teachers:
        raise UserError(
            "--reward.name is none and nothing else rewards, so no response would have a reward. Set a "
            "verifier (--reward.name auto), a reward model (--reward.models.0.path FOLDER) or an environment "
            "(--env.name)."
        )
    log = Path(config.run_dir) / "rewards.log"
    pool = closing.enter_context(RewardPool(settings, log, function))
    on_first(lambda: pool.check(samples))
    return pool


def make_rollout_source(
    config: TrainConfig, loader: Loader, engine: Engine, scorer: Scorer, env: Conversations | None
) -> RolloutSource:
    """Return the source of experience of a run that learns from its own responses."""
    return RolloutSource(
        loader=loader,
        engine=engine,
        scorer=scorer,
        algo=config.algo,
        sampling=config.rollout.sampling,
        key=run_key(config.seed, Purpose.ROLLOUT),
        prompts=config.prompts_per_step,
        responses=config.responses_per_prompt,
        max_tokens=config.max_response_tokens,
        weight_noise=config.rollout.weight_noise,
        env=env,
        max_staleness=config.rollout.max_staleness,
        steps=config.steps,
    )


def resident_bytes(config: TrainConfig, stage: Stage, meshes: Mapping[str, Mesh]) -> int:
    """Return the bytes on each device of the rollout during the whole run: states and frozen reference."""
    state, devices = stage.abstract_state(), frozenset(meshes[ROLLOUT_ENGINE].devices.flat)
    size = bytes_per_device(state, devices=devices)
    if stage.needs_reference and (meshes[REFERENCE] != meshes[POLICY] or not stage.policy.model.lora):
        shardings = models.shardings(stage.policy.model, meshes[REFERENCE], TRAIN)
        weights = bytes_per_device(with_shardings(state.params, shardings), devices=devices)
        size += weights * jnp.dtype(config.model.dtype).itemsize // 4
    return size


def make_evaluators(
    config: TrainConfig,
    held_out: Loader,
    stage: Stage,
    engine: Engine | None,
    rewards: RewardPool | None,
    env: Conversations | None,
) -> list[Evaluator]:
    """Return the evaluators: accuracy on prompts with answers for a policy; loss for a dataset algorithm."""
    evaluators: list[Evaluator] = []
    if engine is not None and rewards.config.name != "none":
        prompts = [p for p in held_out.eval_set(config.eval.prompts) if p.example.answer is not None]
        key = run_key(config.seed, Purpose.EVALUATION)
        if prompts:
            sampling, samples = config.eval.sampling, config.eval.samples
            longest = config.max_response_tokens
            evaluators.append(HeldOutAccuracy(prompts, engine, rewards, sampling, samples, longest, key, env))
    if not algos.of(config.algo).on_rollouts:
        items = dataset_items(held_out, config.algo, 0, held_out.eval_rows(config.eval.prompts))
        evaluators.append(HeldOutLoss(items, stage))
    return evaluators
