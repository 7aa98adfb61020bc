"""Keys and defaults of veRL's SFT trainers (verl/trainer/config/sft_trainer_engine.yaml of version 0.9.1)."""

from __future__ import annotations

from typing import Any

from jaxrl_import.fields import Field
from jaxrl_import.values import (
    count,
    device_count,
    dtype,
    items,
    lora_targets,
    number,
    path_text,
    remat,
    switch,
    text,
    whole_number,
)
from jaxrl_import.verl_fields import TRAINER, ULYSSES, optimizer_fields

SFT = {
    "data.train_batch_size": Field("prompts_per_step", count),
    "data.max_length": Field("", count, "--max_prompt_tokens and --max_response_tokens"),
    "data.micro_batch_size_per_gpu": Field("", count, "--tokens_per_device, in tokens"),
    "data.micro_batch_size": Field("", count, "--tokens_per_device, in tokens"),
    "data.max_token_len_per_gpu": Field("", count, "--tokens_per_device"),
    "data.use_dynamic_bsz": Field("", switch, "--tokens_per_device"),
    "data.prompt_key": Field("data.train.0.prompt_key", text),
    "data.response_key": Field("data.train.0.response_key", text),
    "data.prompt_dict_keys": Field("", items, "--data.train.0.prompt_key"),
    "data.response_dict_keys": Field("", items, "--data.train.0.response_key"),
    "data.multiturn.enable": Field("", switch, "rows of messages are recognized"),
    "data.multiturn.messages_key": Field("", text, "--data.train.0.prompt_key"),
    "data.messages_key": Field("", text, "--data.train.0.prompt_key"),
    **TRAINER,
    "model.partial_pretrain": Field("model.path", path_text),
    "model.path": Field("model.path", path_text),
    "model.lora_rank": Field("lora.rank", whole_number),
    "model.lora_alpha": Field("", number, "--lora.alpha"),
    "model.target_modules": Field("", lora_targets, "--lora.targets"),
    "model.enable_gradient_checkpointing": Field("model.remat", remat),
    **optimizer_fields("optim", "optim"),
    "ulysses_sequence_parallel_size": Field("", whole_number, ULYSSES),
    "engine.ulysses_sequence_parallel_size": Field("", whole_number, ULYSSES),
    **{f"engine.{key}": Field("", whole_number, ULYSSES) for key in ("ulysses_parallel_size",)},
    **{
        f"engine.{key}": Field("", device_count, "--mesh.expert")
        for key in ("expert_model_parallel_size", "expert_parallel_size", "ep_size", "ep")
    },
    **{f"engine.{key}": Field("", whole_number, "--mesh.tensor") for key in ("tp_size", "tp")},
    **{f"engine.{key}": Field("", whole_number, "--mesh.sequence") for key in ("cp_size", "cp")},
    "engine.fsdp_size": Field("", device_count, "--mesh.fsdp and --mesh.data"),
    "engine.dtype": Field("model.dtype", dtype),
    "engine.optimizer_offload": Field("optim.offload", switch),
    "engine.tensor_model_parallel_size": Field("", whole_number, "--mesh.tensor"),
    "engine.context_parallel_size": Field("", whole_number, "--mesh.sequence"),
    "trainer.max_ckpt_to_keep": Field("checkpoint.keep", whole_number),
}
FSDP_SFT_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 256,
    "data.max_length": 1024,
    "data.micro_batch_size_per_gpu": 4,
    "data.truncation": "error",
    "model.enable_gradient_checkpointing": True,
    "model.lora_alpha": 16,
    "model.target_modules": "all-linear",
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.weight_decay": 0.01,
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.lr_scheduler_type": "cosine",
    "optim.clip_grad": 1.0,
    "trainer.total_epochs": 4,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.logger": "console,wandb",
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "trainer.seed": 1,
}
"""Of the SFT trainer before version 0.7."""
SFT_DEFAULTS: dict[str, Any] = {
    **FSDP_SFT_DEFAULTS,
    "data.messages_key": "messages",
    "data.use_dynamic_bsz": True,
    "data.max_token_len_per_gpu": 8192,
    "optim.lr": 1e-3,
    "optim.betas": [0.9, 0.999],
    "optim.lr_warmup_steps_ratio": 0.0,
    "optim.lr_scheduler_type": "constant",
}
