"""transformers' generate and TRL's GRPO trainer, on torch, on the shared work."""

# ruff: noqa: E402  (stdout is taken before anything can print)
from __future__ import annotations

from serve import open_channel

channel = open_channel()

import os
import tempfile
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.simplefilter("ignore")

import torch
import work
from datasets import Dataset
from peft import LoraConfig
from serve import Gate, serve
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from trl import GRPOConfig, GRPOTrainer
from work import LONG, SMALL, SMOLLM2, Work, hf_config

STEPS = 10_000


CONFIG = Qwen3Config(**hf_config(SMALL))
LLAMA = LlamaConfig(**hf_config(SMOLLM2))
MIXTURE = Qwen3MoeConfig(
    **hf_config(SMALL),
    num_experts=work.EXPERTS,
    num_experts_per_tok=work.EXPERTS_PER_TOKEN,
    moe_intermediate_size=work.EXPERT_SIZE,
    norm_topk_prob=True,
)
DELTA = Qwen3_5TextConfig(**work.DELTA)
ADAPTERS = LoraConfig(
    r=work.LORA_RANK,
    lora_alpha=work.LORA_ALPHA,
    target_modules=list(work.LORA_TARGETS),
    task_type="CAUSAL_LM",
)


def model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float()


def rollout(new_tokens_of, config: PreTrainedConfig = CONFIG, size: Work = SMALL):
    """Return the rollout: the batch decodes until its longest response has ended."""
    policy = model(config).eval()

    @torch.no_grad()
    def run(repetition: int) -> None:
        steps = new_tokens_of(repetition)
        torch.manual_seed(repetition)
        ids = torch.tensor(work.prompts(size, repetition))
        out = policy.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_return_sequences=size.group,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=steps,
            max_new_tokens=steps,
        )
        assert out.shape == (size.batch, size.prompt_tokens + steps), out.shape

    return run


def trainer(reward, adapters: LoraConfig | None, config: PreTrainedConfig, size: Work) -> GRPOTrainer:
    """Return TRL's trainer, with logging, saving and gradient checkpointing turned off."""
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=size.batch,
        num_generations=size.group,
        max_completion_length=size.new_tokens,
        temperature=1.0,
        beta=0.0,
        epsilon=work.CLIP,
        learning_rate=work.LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=work.B1,
        adam_beta2=work.B2,
        adam_epsilon=work.EPS,
        weight_decay=work.WEIGHT_DECAY,
        max_grad_norm=0.0,
        max_steps=STEPS,
        generation_kwargs={"min_new_tokens": size.new_tokens},
        use_cache=True,  # of keys and values: transformers 5 turns it off by default, in generation too
        report_to="none",
        save_strategy="no",
        logging_steps=STEPS,
        disable_tqdm=True,
    )
    rows = [{"prompt": work.text(ids)} for i in range(64) for ids in work.prompts(size, i)]
    return GRPOTrainer(
        model=model(config),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=work.tokenizer(),
        peft_config=adapters,
    )


def no_reward(completions, **_):
    return [0.0] * len(completions)


def score(config: PreTrainedConfig = CONFIG, size: Work = SMALL):
    """Return the log-probs of responses as TRL computes old and reference ones."""
    loop = trainer(no_reward, None, config, size)
    policy = loop.model.eval()

    @torch.no_grad()
    def run(repetition: int) -> None:
        ids = torch.tensor(work.training_ids(size, repetition))
        logprobs, *_ = loop._get_per_token_logps_and_entropies(
            policy, ids, torch.ones_like(ids), size.new_tokens
        )
        assert logprobs.shape == (size.batch, size.new_tokens) and (logprobs < 0).all()

    return run


def train_step(
    adapters: LoraConfig | None = None,
    config: PreTrainedConfig = CONFIG,
    size: Work = SMALL,
    ids_of=work.training_ids,
):
    """Return a step of TRL's loss, backward and the trainer's own optimizer."""
    loop = trainer(no_reward, adapters, config, size)
    loop.current_gradient_accumulation_steps = 1
    policy = loop.model.train()
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    assert bool(adapters) == (len(trained) == 2 * size.layers * len(work.LORA_TARGETS))
    optimizer = loop.create_optimizer()

    def run(repetition: int) -> None:
        ids = torch.tensor(ids_of(size, repetition))
        inputs = {
            "prompt_ids": ids[:, : size.prompt_tokens],
            "prompt_mask": torch.ones(size.batch, size.prompt_tokens, dtype=torch.long),
            "completion_ids": ids[:, size.prompt_tokens :],
            "completion_mask": torch.ones(size.batch, size.new_tokens, dtype=torch.long),
            "advantages": torch.tensor(work.training_advantages(size, repetition)),
            "num_items_in_batch": torch.tensor(size.batch * size.new_tokens),
        }
        loop.compute_loss(policy, inputs).backward()
        assert any(weight.grad.norm() > 0 for weight in trained)
        optimizer.step()
        optimizer.zero_grad()

    return run


def grpo_step(adapters: LoraConfig | None = None, config: PreTrainedConfig = CONFIG, size: Work = SMALL):
    gate = Gate()

    def reward(completions, **_):
        assert all(len(text.split()) <= size.new_tokens for text in completions)
        gate.arrive()
        return [work.reward(text) for text in completions]

    gate.start(lambda: trainer(reward, adapters, config, size).train())
    return gate.step


if __name__ == "__main__":
    serve(
        channel,
        ("torch", "transformers", "trl", "accelerate", "peft"),
        {
            "rollout_fixed": lambda: rollout(lambda _: SMALL.new_tokens),
            "rollout_ragged": lambda: rollout(lambda i: max(work.ragged_lengths(i))),
            "score": score,
            "train_step": train_step,
            "grpo_step": grpo_step,
            "moe_rollout_fixed": lambda: rollout(lambda _: SMALL.new_tokens, MIXTURE),
            "moe_rollout_ragged": lambda: rollout(lambda i: max(work.ragged_lengths(i)), MIXTURE),
            "moe_score": lambda: score(MIXTURE),
            "moe_train_step": lambda: train_step(config=MIXTURE),
            "moe_grpo_step": lambda: grpo_step(config=MIXTURE),
            "delta_rollout_fixed": lambda: rollout(lambda _: SMALL.new_tokens, DELTA),
            "delta_rollout_ragged": lambda: rollout(lambda i: max(work.ragged_lengths(i)), DELTA),
            "delta_score": lambda: score(DELTA),
            "delta_train_step": lambda: train_step(config=DELTA),
            "delta_grpo_step": lambda: grpo_step(config=DELTA),
            "lora_train_step": lambda: train_step(ADAPTERS),
            "lora_grpo_step": lambda: grpo_step(ADAPTERS),
            "long_train_step": lambda: train_step(size=LONG, ids_of=work.grouped_ids),
            "smollm2_rollout_fixed": lambda: rollout(lambda _: SMOLLM2.new_tokens, LLAMA, SMOLLM2),
            "smollm2_score": lambda: score(LLAMA, SMOLLM2),
            "smollm2_train_step": lambda: train_step(config=LLAMA, size=SMOLLM2),
            "smollm2_grpo_step": lambda: grpo_step(config=LLAMA, size=SMOLLM2),
        },
    )
