"""Builds the parts of a run from its config. All that can be refused is refused here, before any step."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm import algos, models
from jaxrl_llm.build.engines import make_engine
from jaxrl_llm.build.models import check_vocabularies, load_model_config, make_trainers, with_heads
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.envs.load import Conversations, make_conversations
from jaxrl_llm.experience.evaluate import Answers, HeldOutLoss
from jaxrl_llm.experience.reward_models import load_reward_model
from jaxrl_llm.experience.rollouts import RolloutSource
from jaxrl_llm.experience.source import DatasetSource, Experience, Source, dataset_items
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.tokenizer import generation_end_ids
from jaxrl_llm.learn import credit
from jaxrl_llm.learn.reference import Reference
from jaxrl_llm.learn.trainer import Trainer
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.recipe.checks import check_model
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.sharding.rules import TRAIN, bytes_per_device
from jaxrl_llm.structs import Params, TrainState


@dataclass
class Stage:
    """A stretch of steps under one algorithm: the supervised start, then the run itself."""

    kind: str  # "warm_start" or "train"
    start: int  # first step, in [0, total)
    steps: int
    trainer: Trainer
    source: Source
    minibatches: int = 1  # updates a step

    @property
    def end(self) -> int:
        return self.start + self.steps

    def assign(self, experience: Experience, kl_coef: float, seed: int) -> list[list[PackItem]]:
        """Mini-batches of what is learned from, with their advantages."""
        learner = self.trainer.policy
        items = credit.assign(learner.algo, experience.items, experience.trajectories, kl_coef, seed)
        return credit.split(items, self.minibatches, seed, learner.unit)


@dataclass
class Parts:
    """All that the loop needs."""

    config: TrainConfig
    mesh: Mesh
    model: TransformerConfig
    tokenizer: Any
    folder: Path | None  # of the pretrained weights
    stages: list[Stage]
    evaluators: list[Answers | HeldOutLoss]
    loaders: dict[str, Loader]  # by what they are for

    @property
    def total(self) -> int:
        return self.stages[-1].end

    def stage(self, step: int) -> Stage:
        """The stage that this step belongs to."""
        return next(s for s in self.stages if s.start <= step < s.end)

    def initial_params(self) -> Params:
        """Pretrained weights, or random ones; float32, each device making or reading only its shard."""
        shardings = self.stages[0].trainer.policy.param_shardings
        if self.folder is not None:
            return self._pretrained(shardings)
        make = jax.jit(models.init, static_argnums=0, out_shardings=shardings)
        return make(self.model, jax.random.fold_in(jax.random.key(self.config.seed), 0))

    def _pretrained(self, shardings: Params) -> Params:
        """The folder's weights; a value head that it lacks starts with zeros."""
        stored = read_config(self.folder)
        params = load_params(self.folder, stored, models.shardings(stored, self.mesh, TRAIN), jnp.float32)
        if stored == self.model:
            return params
        fit = functools.partial(models.with_heads, config=self.model)
        return jax.jit(fit, out_shardings=shardings, donate_argnums=0)(params)

    def exported(self, params: Params) -> Params:
        """The weights as others load them: a policy without the value head that helped it learn."""
        return models.without_value_head(params) if self.config.algo.needs_policy else params

    def reference(self) -> Reference:
        """Make the frozen reference of the last stage; its weights are loaded when first asked for."""
        abstract = self.stages[0].trainer.policy.abstract_state().params
        return Reference(Path(self.config.run_dir), self.config.model.dtype, self.initial_params, abstract)

    def initial_state(self) -> TrainState:
        return self.stages[0].trainer.init_state(self.initial_params())


def build(config: TrainConfig, closing: contextlib.ExitStack) -> Parts:
    """Read model config and tokenizer, open the data, make the mesh, the learners and the engine.

    Args:
        closing: gets what must be closed at the end.

    Raises:
        ValueError: anything that cannot work, with the fix.
    """
    mesh = make_mesh(config.mesh)
    model, tokenizer, folder = load_model_config(config.model)
    check_vocabularies(config, tokenizer)
    check_model(config, mesh.shape, model.max_position, model.num_heads)
    model = with_heads(model, config.algo)
    warm_trainer, trainer = make_trainers(config, model, mesh)
    on_policy = algos.module_of(config.algo).INPUT == "rollouts"
    engine = rewards = None
    env = make_conversations(config.env, tokenizer, config.data.chat)
    columns = closing.enter_context(env).columns if env else {}
    if on_policy or (config.eval.every and config.algo.needs_policy):
        ends = generation_end_ids(folder) if folder else ()
        engine = make_engine(config, model, mesh, tokenizer, ends, closing, folder, resident(config, trainer))
        rewards = closing.enter_context(RewardPool(config.reward, Path(config.run_dir) / "rewards.log"))
    loader = make_loader(config, tokenizer, columns)
    if on_policy:
        source = RolloutSource(
            loader, engine, rewards, config.algo, config.rollout.sampling,
            jax.random.fold_in(jax.random.key(config.seed), 1),
            config.prompts_per_step, config.responses_per_prompt, config.max_response_tokens,
            [
                load_reward_model(one, trainer.policy.config, mesh, tokenizer, config.data.chat)
                for one in config.reward.models
            ],
            config.rollout.weight_noise, env, config.rollout.max_staleness, config.steps,
        )  # fmt: skip
    else:
        source = DatasetSource(loader, config.prompts_per_step, config.algo)
    loaders, stages, start = {"train": loader}, [], config.warm_start
    if warm_trainer:
        data = replace(config.data, train=start.sources, path="") if start.sources else config.data
        loaders["warm_start"] = make_loader(replace(config, data=data), tokenizer, columns)
        examples = DatasetSource(loaders["warm_start"], start.examples_per_step, warm_trainer.policy.algo)
        stages.append(Stage("warm_start", 0, start.steps, warm_trainer, examples, 1))
    stages.append(Stage("train", start.steps, config.steps, trainer, source, config.minibatches_per_step))
    evaluators = []
    if config.eval.every:
        loaders["eval"] = make_loader(config, tokenizer, columns, split="eval")
        evaluators = make_evaluators(config, loaders["eval"], trainer, engine, rewards, env)
    return Parts(config, mesh, model, tokenizer, folder, stages, evaluators, loaders)


def resident(config: TrainConfig, trainer: Trainer) -> int:
    """Bytes that each device holds from the first step to the last: states, and the frozen reference."""
    state = trainer.abstract_state()
    found = bytes_per_device(state)
    if config.algo.needs_reference and not trainer.teachers:
        found += bytes_per_device(state.params) * jnp.dtype(config.model.dtype).itemsize // 4
    return found


def make_evaluators(
    config: TrainConfig,
    held_out: Loader,
    trainer: Trainer,
    engine: Engine | None,
    rewards: RewardPool | None,
    env: Conversations | None,
) -> list[Answers | HeldOutLoss]:
    """Answers to prompts that have one, if a policy learns; loss on examples, if examples are learned."""
    evaluators: list[Answers | HeldOutLoss] = []
    if engine is not None and config.reward.name != "none":
        prompts = [p for p in held_out.eval_set(config.eval.prompts) if p.example.answer is not None]
        key = jax.random.fold_in(jax.random.key(config.seed), 2)
        if prompts:
            sampling, samples = config.eval.sampling, config.eval.samples
            evaluators.append(
                Answers(prompts, engine, rewards, sampling, samples, config.max_response_tokens, key, env)
            )
    if algos.module_of(config.algo).INPUT != "rollouts":
        items = dataset_items(held_out, config.algo, 0, config.eval.prompts)
        evaluators.append(HeldOutLoss(items, trainer))
    return evaluators


def make_loader(
    config: TrainConfig, tokenizer: Any, columns: dict[str, Any], split: Literal["train", "eval"] = "train"
) -> Loader:
    longest = config.max_prompt_tokens
    return Loader(config.data, tokenizer, config.seed, longest, split, config.max_tokens, columns)


def data_report(loaders: dict[str, Loader]) -> list[str]:
    """One line a loader: rows, and how many were left out and why."""
    said = lambda counts: ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return [f"{name}: {said(loader.stats())}" for name, loader in loaders.items()]
