"""google-tunix 0.1.7 on the shared work, through its public API."""

# ruff: noqa: E402  (stdout is taken before anything can print)
from __future__ import annotations

from serve import open_channel

channel = open_channel()

import dataclasses
import logging
import os
import warnings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
import work
from flax import nnx
from serve import Gate, serve
from tunix.generate import sampler as sampler_lib
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common, rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout
from work import SMALL

SAMPLING = dict(temperature=1.0, top_p=1.0, top_k=None)
SPARE = 8  # cache positions that Tunix needs beyond prompt + new tokens
FOREVER = 10**6
MODEL = qwen3.ModelConfig(
    num_layers=SMALL.layers,
    vocab_size=SMALL.vocab,
    embed_dim=SMALL.width,
    hidden_dim=SMALL.mlp,
    num_heads=SMALL.heads,
    num_kv_heads=SMALL.kv_heads,
    head_dim=SMALL.head_dim,
    rope_theta=SMALL.rope_theta,
    norm_eps=SMALL.norm_eps,
    use_tied_embedding=True,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
)
MIXTURE = dataclasses.replace(
    MODEL, num_experts=work.EXPERTS, num_experts_per_tok=work.EXPERTS_PER_TOKEN, hidden_dim=work.EXPERT_SIZE
)
"""On a CPU Tunix passes every token through every expert (its grouped kernel is for TPUs)."""


def model(config=MODEL):
    return qwen3.Qwen3(config, rngs=nnx.Rngs(0))


def mixture():
    return model(MIXTURE)


def adapted():
    """Return the model with qwix's adapters, as `tunix.cli` makes it."""
    base = model()
    adapters = qwix.LoraProvider(
        module_path="|".join(f".*{name}" for name in work.LORA_TARGETS),
        rank=work.LORA_RANK,
        alpha=work.LORA_ALPHA,
    )
    policy = qwix.apply_lora_to_model(base, adapters, **base.get_model_input(), rngs=nnx.Rngs(1))
    leaves = jax.tree.leaves(nnx.state(policy, nnx.LoRAParam))
    assert len(leaves) == 2 * SMALL.layers * len(work.LORA_TARGETS)
    return policy


def rollout(most_new_tokens: int, new_tokens_of, make=model):
    """Return the rollout: the batch decodes until its longest response has ended, in a cache for the cap."""
    cache = sampler_lib.CacheConfig(
        cache_size=SMALL.prompt_tokens + most_new_tokens + SPARE,
        num_layers=SMALL.layers,
        num_kv_heads=SMALL.kv_heads,
        head_dim=SMALL.head_dim,
    )
    sampler = sampler_lib.Sampler(make(), work.tokenizer(), cache)

    def run(repetition: int) -> None:
        steps = new_tokens_of(repetition)
        prompts = [work.text(ids) for ids in work.prompts(SMALL, repetition) for _ in range(SMALL.group)]
        out = sampler(
            prompts,
            max_generation_steps=steps,
            max_prompt_length=SMALL.prompt_tokens,
            eos_tokens=[-1],
            seed=repetition,
            **SAMPLING,
        )
        jax.block_until_ready(out.tokens)
        assert [len(tokens) for tokens in out.tokens] == [steps] * SMALL.batch

    return run


def learner(mesh, reward, actor):
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adamw(
                work.LEARNING_RATE, work.B1, work.B2, work.EPS, weight_decay=work.WEIGHT_DECAY
            ),
            eval_every_n_steps=FOREVER,
            max_steps=FOREVER,
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=SMALL.new_tokens,
            max_prompt_length=SMALL.prompt_tokens,
            kv_cache_size=SMALL.prompt_tokens + SMALL.new_tokens + SPARE,
            eos_tokens=[-1],
            **SAMPLING,
        ),
    )
    cluster = rl_cluster.RLCluster(
        actor=actor, reference=None, tokenizer=work.tokenizer(), cluster_config=config
    )
    algorithm = grpo_learner.GRPOConfig(
        num_generations=SMALL.group, num_iterations=1, beta=0.0, epsilon=work.CLIP
    )
    return grpo_learner.GRPOLearner(rl_cluster=cluster, reward_fns=reward, algo_config=algorithm), cluster


def one_device():
    return jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def score(make=model):
    """Return the log-probs of responses as Tunix computes old and reference ones."""
    graph, state = nnx.split(make())

    def run(repetition: int) -> None:
        ids = np.array(work.training_ids(SMALL, repetition), np.int32)
        prompts, responses = jnp.split(jnp.asarray(ids), [SMALL.prompt_tokens], axis=1)
        logprobs = common.compute_per_token_logps(graph, state, prompts, responses, pad_id=0, eos_id=-1)
        assert logprobs.shape == responses.shape and (np.asarray(logprobs) < 0).all()

    return run


def train_step(make=model):
    mesh = one_device()
    with mesh:
        _, cluster = learner(mesh, lambda prompts, completions, **_: [0.0] * len(completions), make())
        trainer = cluster.actor_trainer
        step, _ = trainer.jit_train_and_eval_step(False, True)

    def run(repetition: int) -> None:
        ids = np.array(work.training_ids(SMALL, repetition), np.int32)
        example = grpo_learner.TrainExample(
            prompt_ids=jnp.asarray(ids[:, : SMALL.prompt_tokens]),
            prompt_mask=jnp.ones((SMALL.batch, SMALL.prompt_tokens), bool),
            completion_ids=jnp.asarray(ids[:, SMALL.prompt_tokens :]),
            completion_mask=jnp.ones((SMALL.batch, SMALL.new_tokens), bool),
            advantages=jnp.asarray(work.training_advantages(SMALL, repetition), jnp.float32),
            ref_per_token_logps=None,
            old_per_token_logps=None,
        )
        with mesh:
            out = step(example)
            jax.block_until_ready((out, nnx.state(trainer.optimizer), nnx.state(trainer.model)))
        assert float(out[2]) > 0  # gradient norm

    return run


def grpo_step(make=model):
    mesh, gate = one_device(), Gate()

    def reward(prompts, completions, **_):
        gate.arrive()
        return [work.reward(text) for text in completions]

    def train():
        with mesh:
            loop, _ = learner(mesh, reward, make())
            loop.train(
                {"prompts": np.array([work.text(ids) for ids in work.prompts(SMALL, i)])}
                for i in range(FOREVER)
            )

    gate.start(train)
    return gate.step


if __name__ == "__main__":
    serve(
        channel,
        ("google-tunix", "jax", "flax", "optax", "qwix", "transformers"),
        {
            "rollout_fixed": lambda: rollout(SMALL.new_tokens, lambda _: SMALL.new_tokens),
            "rollout_ragged": lambda: rollout(work.RAGGED_MAX, lambda i: max(work.ragged_lengths(i))),
            "score": score,
            "train_step": train_step,
            "grpo_step": grpo_step,
            "lora_train_step": lambda: train_step(adapted),
            "lora_grpo_step": lambda: grpo_step(adapted),
            "moe_rollout_fixed": lambda: rollout(SMALL.new_tokens, lambda _: SMALL.new_tokens, mixture),
            "moe_rollout_ragged": lambda: rollout(
                work.RAGGED_MAX, lambda i: max(work.ragged_lengths(i)), mixture
            ),
            "moe_score": lambda: score(mixture),
            "moe_train_step": lambda: train_step(mixture),
            "moe_grpo_step": lambda: grpo_step(mixture),
        },
    )
