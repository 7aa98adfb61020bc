"""Builds the parts of a run from its config. All that can be refused is refused here, before any step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm import algos, models
from jaxrl_llm.algos import sft
from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.checkpoint import hf
from jaxrl_llm.config import ConfigError, ModelConfig, TrainConfig, derived
from jaxrl_llm.config_check import check_lengths
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.evaluate import Evaluator
from jaxrl_llm.experience import RolloutSource, Source, SupervisedSource
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.names import read_config
from jaxrl_llm.optim import OptimConfig, make_optimizer
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rollout.native import NativeEngine
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.step import Learner, StepConfig
from jaxrl_llm.structs import Params, TrainState


@dataclass
class Stage:
    """A stretch of steps under one learner: the supervised start, then the run itself."""

    kind: str  # "warm_start" or "train"
    start: int  # first step, in [0, total)
    steps: int
    learner: Learner
    source: Source

    @property
    def end(self) -> int:
        return self.start + self.steps


@dataclass
class Parts:
    """All that the loop needs."""

    config: TrainConfig
    mesh: Mesh
    model: TransformerConfig
    tokenizer: Any
    folder: Path | None  # of the pretrained weights
    stages: list[Stage]
    evaluator: Evaluator | None
    loaders: list[Loader]

    @property
    def total(self) -> int:
        return self.stages[-1].end

    def stage(self, step: int) -> Stage:
        """The stage that this step belongs to."""
        return next(s for s in self.stages if s.start <= step < s.end)

    def initial_params(self) -> Params:
        """Pretrained weights, or random ones; float32, each device making or reading only its shard."""
        shardings = self.stages[0].learner.param_shardings
        if self.folder is not None:
            return hf.load(self.folder, self.model, shardings, jnp.float32)
        make = jax.jit(models.init, static_argnums=0, out_shardings=shardings)
        return make(self.model, jax.random.fold_in(jax.random.key(self.config.seed), 0))

    def initial_state(self) -> TrainState:
        return self.stages[0].learner.init_state(self.initial_params())


def build(config: TrainConfig, closing: contextlib.ExitStack) -> Parts:
    """Read model config and tokenizer, open the data, make the mesh, the learners and the engine.

    Args:
        closing: gets what must be closed at the end.

    Raises:
        ValueError: anything that cannot work, with the fix.
    """
    mesh = make_mesh(config.mesh)
    model, tokenizer, folder = load_model_config(config.model)
    check_lengths(config, model.max_position)
    learner = make_learner(config, config.algo, config.optim, model, mesh)
    on_policy = algos.module_of(config.algo).INPUT == "rollouts"
    engine = rewards = None
    if on_policy or config.eval.every:
        ends = hf.end_ids(folder) if folder else ()
        engine = NativeEngine(config.rollout, model, mesh, tokenizer, ends)
        rewards = closing.enter_context(RewardPool(config.reward, Path(config.run_dir) / "rewards.log"))
    loader = make_loader(config, tokenizer)
    if on_policy:
        source = RolloutSource(
            loader, engine, rewards, config.algo, config.rollout.sampling,
            jax.random.fold_in(jax.random.key(config.seed), 1),
            config.prompts_per_step, config.responses_per_prompt,
            config.max_response_tokens, config.minibatches_per_step,
        )  # fmt: skip
    else:
        source = SupervisedSource(loader, config.prompts_per_step, config.minibatches_per_step)
    loaders, stages = [loader], []
    if config.warm_start.steps:
        warm = warm_start_stage(config, model, tokenizer, mesh)
        stages.append(warm)
        loaders.append(warm.source.loader)
    stages.append(Stage("train", config.warm_start.steps, config.steps, learner, source))
    evaluator = None
    if config.eval.every:
        held_out = make_loader(config, tokenizer, split="eval")
        loaders.append(held_out)
        evaluator = Evaluator(
            held_out.eval_set(config.eval.prompts), engine, rewards, config.eval.sampling,
            config.eval.samples, config.max_response_tokens,
            jax.random.fold_in(jax.random.key(config.seed), 2),
        )  # fmt: skip
    return Parts(config, mesh, model, tokenizer, folder, stages, evaluator, loaders)


def load_model_config(config: ModelConfig) -> tuple[TransformerConfig, Any, Path | None]:
    """(model config, tokenizer, folder of the weights or None); reads no weights."""
    folder = hf.resolve(config.path) if config.path else None
    model = read_config(folder) if folder else config.architecture
    if config.tokenizer == "tiny" or not (config.tokenizer or folder):
        tokenizer = make_tokenizer()
    else:
        tokenizer = hf.load_tokenizer(hf.resolve(config.tokenizer) if config.tokenizer else folder)
    if len(tokenizer) > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens but the model's vocabulary is {model.vocab_size}: "
            "they do not belong together; set --model.tokenizer to the folder of this model's tokenizer."
        )
    return model, tokenizer, folder


def make_learner(
    config: TrainConfig, algo: AlgoConfig, optim: OptimConfig, model: TransformerConfig, mesh: Mesh
) -> Learner:
    """The learner of one stage; both stages have the same shapes, so a checkpoint fits either."""
    updates = config.steps * config.minibatches_per_step
    temperature = config.rollout.sampling.temperature or 1.0
    step = StepConfig(
        row_tokens=config.row_tokens,
        rows=derived(config, mesh.size)["rows_per_microbatch"],
        dtype=config.model.dtype,
        remat=config.model.remat,
        temperature=temperature if algos.module_of(algo).INPUT == "rollouts" else 1.0,
        chunk=config.model.logprob_chunk,
        max_grad_norm=config.optim.max_grad_norm,
    )
    return Learner(algo, model, make_optimizer(optim, updates), step, mesh)


def warm_start_stage(config: TrainConfig, model: TransformerConfig, tokenizer: Any, mesh: Mesh) -> Stage:
    """Supervised updates at a constant rate."""
    warm = config.warm_start
    optim = replace(config.optim, learning_rate=warm.learning_rate, schedule="constant", warmup_steps=0)
    learner = make_learner(config, sft.Config(), optim, model, mesh)
    data = replace(config.data, train=warm.sources, path="") if warm.sources else config.data
    loader = make_loader(replace(config, data=data), tokenizer)
    return Stage("warm_start", 0, warm.steps, learner, SupervisedSource(loader, warm.examples_per_step))


def make_loader(config: TrainConfig, tokenizer: Any, split: str = "train") -> Loader:
    return Loader(
        config.data, tokenizer, config.seed, config.max_prompt_tokens, split, max_tokens=config.row_tokens
    )


def data_report(loaders: Sequence[Loader]) -> list[str]:
    """One line a loader: rows, and how many were left out and why."""
    return [", ".join(f"{name} {count}" for name, count in loader.stats().items()) for loader in loaders]
