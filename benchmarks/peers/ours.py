"""jaxrl_llm on the shared work."""

# ruff: noqa: E402  (stdout is taken before anything can print)
from __future__ import annotations

from serve import open_channel

channel = open_channel()

import os
from dataclasses import replace

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import work
from serve import serve
from work import LONG, SMALL, SMOLLM2, Work

from jaxrl_llm import models
from jaxrl_llm.algos import grpo
from jaxrl_llm.data.packing import PackItem, from_trajectory
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.learn import credit
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.optim import decayed
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import RopeConfig, TransformerConfig
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.lora import with_lora
from jaxrl_llm.models.lora_config import LoraConfig
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import Request
from jaxrl_llm.rollout.native.engine import NativeEngine, RolloutConfig
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh


def model_of(size: Work, family: str) -> TransformerConfig:
    """Return the config of a model without biases, the embedding tied."""
    return TransformerConfig(
        family=family,
        vocab_size=size.vocab,
        hidden_size=size.width,
        mlp_size=size.mlp,
        num_layers=size.layers,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        rope=RopeConfig(theta=float(size.rope_theta)),
        norm_eps=size.norm_eps,
        qk_norm=family == "qwen3",
    )


MODEL = model_of(SMALL, "qwen3")
LLAMA = model_of(SMOLLM2, "llama")
MIXTURE = replace(
    MODEL, family="qwen3_moe", moe=MoEConfig(work.EXPERTS, work.EXPERTS_PER_TOKEN, work.EXPERT_SIZE)
)
ADAPTED = with_lora(MODEL, LoraConfig(work.LORA_RANK, work.LORA_ALPHA))
SAMPLING = SamplingConfig(ignore_eos=True)
ALGO = grpo.Config(kl_coef=0.0, clip_low=work.CLIP, clip_high=work.CLIP)
MICROBATCH = 1600  # tokens: the backward pass keeps little, and gradients are added a few times


def hybrid() -> TransformerConfig:
    """Return the model of the delta suite. Reading its config imports transformers, and so torch if it is
    installed: 200 MB that the other suites do not need."""
    return read_config(work.DELTA)


def one_response(size: Work) -> dict[str, int]:
    """Return the rows of a micro-batch, of one response each."""
    row_tokens = size.prompt_tokens + size.new_tokens
    return {"row_tokens": row_tokens, "rows": MICROBATCH // row_tokens}


def all_responses(size: Work) -> dict[str, int]:
    """Return the rows of a micro-batch, of a prompt and all its responses each."""
    row_tokens = size.prompt_tokens + size.new_tokens + (size.group - 1) * (size.new_tokens + 1)
    return {
        "row_tokens": row_tokens,
        "rows": min(MICROBATCH * 3 // 2 // row_tokens, size.prompts),
        "share_prefixes": True,
    }


def learner(model: TransformerConfig, rows: dict[str, int]) -> Learner:
    optimizer = optax.adamw(
        work.LEARNING_RATE, work.B1, work.B2, work.EPS, weight_decay=work.WEIGHT_DECAY, mask=decayed
    )
    config = StepConfig(
        **rows,
        remat="dots",  # as in configs/grpo_tiny.py: on a CPU, keeping less is faster
        max_grad_norm=0.0,
    )
    return Learner(ALGO, model, optimizer, config, mesh=make_mesh(MeshConfig()))


def fresh_state(trainer: Learner):
    make = jax.jit(models.init, static_argnums=0, out_shardings=trainer.param_shardings)
    return trainer.init_state(make(trainer.model, jax.random.key(0)))


def engine(model: TransformerConfig, size: Work, mesh, tokenizer=None) -> NativeEngine:
    return NativeEngine(RolloutConfig(slots=size.batch), model, mesh, tokenizer)


def rollout(requests_of, model: TransformerConfig = MODEL, size: Work = SMALL):
    mesh = make_mesh(MeshConfig())
    roll = engine(model, size, mesh)
    roll.publish(models.init(model, jax.random.key(0)), version=0)

    def run(repetition: int) -> None:
        requests = requests_of(size, repetition)
        trajectories = roll.generate(requests, SAMPLING, jax.random.key(repetition))
        lengths = [r.max_tokens for r in requests for _ in range(r.num_responses)]
        assert [len(t.response_ids) for t in trajectories] == lengths

    return run


def fixed(size: Work, repetition: int) -> list[Request]:
    prompts = [np.array(ids, np.int32) for ids in work.prompts(size, repetition)]
    return [Request(ids, i, size.group, size.new_tokens) for i, ids in enumerate(prompts)]


def ragged(size: Work, repetition: int) -> list[Request]:
    """Return a request for each sample: lengths differ, so prompts are not shared here."""
    prompts = [np.array(ids, np.int32) for ids in work.prompts(size, repetition)]
    lengths = work.ragged_lengths(repetition)
    return [Request(prompts[i // size.group], i, 1, length) for i, length in enumerate(lengths)]


def items_of(size: Work, repetition: int, ids_of=work.training_ids) -> list[PackItem]:
    mask = np.r_[np.zeros(size.prompt_tokens), np.ones(size.new_tokens)].astype(np.float32)
    advantages = work.training_advantages(size, repetition)
    return [
        PackItem(np.array(ids, np.int32), mask, {"advantages": mask * advantage})
        for ids, advantage in zip(ids_of(size, repetition), advantages, strict=True)
    ]


def score(model: TransformerConfig = MODEL, size: Work = SMALL):
    trainer = learner(model, one_response(size))
    params = models.init(model, jax.random.key(0))

    def run(repetition: int) -> None:
        scores = trainer.scorer.start(params, items_of(size, repetition))()
        assert all((scored["logprobs"][size.prompt_tokens :] < 0).all() for scored in scores)

    return run


def train_step(
    model: TransformerConfig = MODEL, size: Work = SMALL, rows_of=one_response, ids_of=work.training_ids
):
    trainer = learner(model, rows_of(size))
    state = fresh_state(trainer)

    def run(repetition: int) -> None:
        nonlocal state
        state, metrics = trainer.update(state, [items_of(size, repetition, ids_of)])
        jax.block_until_ready(state)
        assert float(metrics["grad_norm"]) > 0 and not float(metrics["nonfinite"])

    return run


def grpo_step(model: TransformerConfig = MODEL, size: Work = SMALL):
    trainer = learner(model, all_responses(size))
    state = fresh_state(trainer)
    roll = engine(model, size, trainer.mesh, work.tokenizer())

    def run(repetition: int) -> None:
        nonlocal state
        roll.publish(state.params, int(state.version))
        trajectories = roll.generate(fixed(size, repetition), SAMPLING, jax.random.key(repetition))
        for trajectory in trajectories:
            trajectory.reward = work.reward(trajectory.text)
        items = [from_trajectory(t) for t in trajectories]
        items = credit.assign_credit(ALGO, items, trajectories, kl_coef=0.0, seed=repetition)
        state, metrics = trainer.update(state, [items])
        jax.block_until_ready(state)
        assert float(metrics["grad_norm"]) > 0 and float(metrics["mismatch/max_abs"]) < 1e-2

    return run


if __name__ == "__main__":
    assert jnp.zeros(()).dtype == jnp.float32
    serve(
        channel,
        ("jaxrl-llm", "jax", "flax", "optax"),
        {
            "rollout_fixed": lambda: rollout(fixed),
            "rollout_ragged": lambda: rollout(ragged),
            "score": score,
            "train_step": train_step,
            "grpo_step": grpo_step,
            "moe_rollout_fixed": lambda: rollout(fixed, MIXTURE),
            "moe_rollout_ragged": lambda: rollout(ragged, MIXTURE),
            "moe_score": lambda: score(MIXTURE),
            "moe_train_step": lambda: train_step(MIXTURE),
            "moe_grpo_step": lambda: grpo_step(MIXTURE),
            "delta_rollout_fixed": lambda: rollout(fixed, hybrid()),
            "delta_rollout_ragged": lambda: rollout(ragged, hybrid()),
            "delta_score": lambda: score(hybrid()),
            "delta_train_step": lambda: train_step(hybrid()),
            "delta_grpo_step": lambda: grpo_step(hybrid()),
            "lora_train_step": lambda: train_step(ADAPTED),
            "lora_grpo_step": lambda: grpo_step(ADAPTED),
            "long_train_step": lambda: train_step(MODEL, LONG, all_responses, work.grouped_ids),
            "smollm2_rollout_fixed": lambda: rollout(fixed, LLAMA, SMOLLM2),
            "smollm2_score": lambda: score(LLAMA, SMOLLM2),
            "smollm2_train_step": lambda: train_step(LLAMA, SMOLLM2),
            "smollm2_grpo_step": lambda: grpo_step(LLAMA, SMOLLM2),
        },
    )
