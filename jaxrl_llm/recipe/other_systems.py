"""Flags of TRL and Hugging Face's Trainer, veRL, OpenRLHF and RL2, and their counterparts here."""

from __future__ import annotations

import re

MODEL = "--model.path"
STEPS = "--steps: a step is one set of --prompts_per_step prompts; epochs are not counted"
MICRO_BATCH = (
    "--tokens_per_device: micro-batches are measured in tokens, and gradients are accumulated over them"
)
MINIBATCHES = "--minibatches_per_step: optimizer updates a step"
PROMPTS = "--prompts_per_step"
RESPONSES = "--responses_per_prompt"
PROMPT_TOKENS, RESPONSE_TOKENS = "--max_prompt_tokens", "--max_response_tokens"
LENGTH = "--max_prompt_tokens and --max_response_tokens"
KL = "--algo.kl_coef"
DTYPE = "--model.dtype bfloat16 or float16, and --rollout.dtype for the rollout; master weights are float32"
RUN_DIR = "--run_dir"
SAVE = "--checkpoint.every"
EVAL = "--eval.every"
DATA, EVAL_DATA = "--data.path", "--data.eval_path"
REWARD = "--reward.name: a built-in reward, my_rewards.py:my_reward or the URL of a service"
WANDB = "--log.wandb PROJECT"
MESH = "--mesh.data, --mesh.fsdp, --mesh.tensor and --mesh.sequence: all devices that are visible are used"
SERVERS = "--rollout.engine sglang with --rollout.launch N or --rollout.servers http://host:port"
SERVER_FLAGS = "--sglang.flags, which are SGLang's own: '--tp 2 --mem-fraction-static 0.6'"
ESTIMATOR = "--algo NAME (grpo, rloo, ppo, ...), or --algo.advantage"
AGGREGATION = "--algo.aggregation"
SCHEDULE = "--optim.schedule"

SAME = {
    # TRL and Hugging Face's Trainer
    "num_generations": RESPONSES,
    "max_completion_length": RESPONSE_TOKENS,
    "max_new_tokens": RESPONSE_TOKENS,
    "max_tokens": LENGTH,
    "max_length": LENGTH,
    "max_seq_length": LENGTH,
    "max_prompt_length": PROMPT_TOKENS,
    "per_device_train_batch_size": MICRO_BATCH,
    "per_device_eval_batch_size": "--eval.prompts, with --rollout.slots sequences at once",
    "gradient_accumulation_steps": MICRO_BATCH,
    "generation_batch_size": PROMPTS,
    "batch_size": PROMPTS,
    "steps_per_generation": MINIBATCHES,
    "beta": f"{KL}; of DPO and its like --algo.beta",
    "epsilon": "--algo.clip_low",
    "epsilon_high": "--algo.clip_high",
    "delta": "--algo.dual_clip",
    "loss_type": f"{AGGREGATION}, or another algorithm: --algo dr_grpo, --algo dapo",
    "importance_sampling_level": "--algo gspo",
    "scale_rewards": "--algo.scale",
    "mask_truncated_completions": "--algo.drop_truncated",
    "vllm_importance_sampling_correction": "--algo.correction.weight token",
    "lr_scheduler_type": SCHEDULE,
    "warmup_ratio": "--optim.warmup_steps, in updates",
    "adam_beta1": "--optim.b1",
    "adam_beta2": "--optim.b2",
    "adam_epsilon": "--optim.eps",
    "optimizer": "--optim.name",
    "num_train_epochs": STEPS,
    "max_steps": "--steps",
    "output_dir": RUN_DIR,
    "run_name": RUN_DIR,
    "logging_dir": RUN_DIR,
    "report_to": f"{WANDB}, --log.mlflow EXPERIMENT and --log.tensorboard",
    "log_completions": "--log.samples",
    "push_to_hub": "--hub.push ORG/NAME",
    "hub_model_id": "--hub.push ORG/NAME",
    "hub_private_repo": "--hub.private",
    "hub_token": "the environment variable HF_TOKEN",
    "save_steps": SAVE,
    "save_strategy": SAVE,
    "save_total_limit": "--checkpoint.keep",
    "eval_steps": EVAL,
    "eval_strategy": EVAL,
    "load_best_model_at_end": "--checkpoint.best_metric",
    "bf16": DTYPE,
    "fp16": DTYPE,
    "torch_dtype": DTYPE,
    "gradient_checkpointing": "--model.remat",
    "fsdp_config": MESH,
    "deepspeed": MESH,
    "accelerate": MESH,
    "ddp": MESH,
    "num_processes": MESH,
    "model": MODEL,
    "model_name": MODEL,
    "model_name_or_path": MODEL,
    "tokenizer_name": "--model.tokenizer",
    "tokenizer": "--model.tokenizer",
    "teacher_model_name_or_path": "--algo.teachers, of --algo gkd and --algo distill",
    "dataset": DATA,
    "dataset_name": f"{DATA} hub:OWNER/NAME",
    "dataset_config": "--data.train.0.subset",
    "dataset_train_split": "--data.train.0.split",
    "dataset_test_split": f"{EVAL_DATA}, or data.eval in the recipe",
    "dataset_text_field": "--data.train.0.prompt_key",
    "completion_only_loss": "--data.chat.loss",
    "assistant_only_loss": "--data.chat.loss",
    "chat_template_path": "--data.chat.chat_template",
    "reward_funcs": REWARD,
    "reward_weights": "--reward.shaping NAME WEIGHT ...",
    "reward_model_path": "--reward.models.0.path FOLDER",
    "use_vllm": f"{SERVERS}; there is no vLLM",
    "vllm_mode": "--sglang.colocated; there is no vLLM",
    "vllm_server_base_url": "--rollout.servers http://host:port, of SGLang servers; there is no vLLM",
    "vllm_tensor_parallel_size": SERVER_FLAGS,
    "vllm_gpu_memory_utilization": SERVER_FLAGS,
    "vllm_max_model_len": LENGTH,
    # veRL, by the last parts of the key
    "train_batch_size": PROMPTS,
    "train_files": DATA,
    "val_files": EVAL_DATA,
    "prompt_key": "--data.train.0.prompt_key",
    "max_response_length": RESPONSE_TOKENS,
    "filter_overlong_prompts": "--data.overlong",
    "truncation": "--data.overlong",
    "rollout.n": RESPONSES,
    "rollout.name": "--rollout.engine",
    "n": RESPONSES,
    "ppo_mini_batch_size": MINIBATCHES,
    "ppo_micro_batch_size": MICRO_BATCH,
    "ppo_micro_batch_size_per_gpu": MICRO_BATCH,
    "log_prob_micro_batch_size_per_gpu": MICRO_BATCH,
    "ppo_max_token_len_per_gpu": MICRO_BATCH,
    "use_kl_loss": f"{KL}, with --algo.kl_in loss",
    "use_kl_in_reward": f"{KL}, with --algo.kl_in reward",
    "kl_loss_coef": KL,
    "kl_loss_type": "--algo.kl",
    "kl_penalty": "--algo.kl",
    "kl_ctrl.kl_coef": KL,
    "target_kl": "--algo.kl_target",
    "clip_ratio": "--algo.clip_low and --algo.clip_high",
    "clip_ratio_low": "--algo.clip_low",
    "clip_ratio_high": "--algo.clip_high",
    "clip_ratio_c": "--algo.dual_clip",
    "cliprange": "--algo.clip_low and --algo.clip_high",
    "cliprange_value": "--algo.value_clip, or --critic.loss.value_clip",
    "entropy_coeff": "--algo.entropy_coef",
    "loss_agg_mode": AGGREGATION,
    "adv_estimator": ESTIMATOR,
    "norm_adv_by_std_in_grpo": "--algo.scale",
    "filter_groups.enable": "--algo.dynamic_sampling",
    "max_num_gen_batches": "--algo.max_draws",
    "rollout_is": "--algo.correction.weight",
    "rollout_is_threshold": "--algo.correction.cap",
    "critic_warmup": "--critic.warmup_steps",
    "total_epochs": STEPS,
    "total_training_steps": "--steps",
    "n_gpus_per_node": MESH,
    "nnodes": MESH,
    "save_freq": SAVE,
    "test_freq": EVAL,
    "val_before_train": "--eval.every: evaluation starts before the first step",
    "logger": WANDB,
    "project_name": WANDB,
    "experiment_name": RUN_DIR,
    "default_local_dir": RUN_DIR,
    "tensor_model_parallel_size": f"--mesh.tensor, of servers {SERVER_FLAGS}",
    "gpu_memory_utilization": SERVER_FLAGS,
    "ulysses_sequence_parallel_size": "--mesh.sequence, with --mesh.sequence_parallel ulysses",
    "enable_gradient_checkpointing": "--model.remat",
    "custom_reward_function.path": REWARD,
    "max_assistant_turns": "--env.max_turns",
    "hybrid_engine": "--sglang.colocated",
    # OpenRLHF
    "pretrain": MODEL,
    "reward_pretrain": "--reward.models.0.path FOLDER",
    "critic_pretrain": "--critic.path",
    "remote_rm_url": REWARD,
    "n_samples_per_prompt": RESPONSES,
    "micro_train_batch_size": MICRO_BATCH,
    "micro_rollout_batch_size": "--rollout.slots",
    "rollout_batch_size": PROMPTS,
    "num_episodes": STEPS,
    "prompt_max_len": PROMPT_TOKENS,
    "generate_max_len": RESPONSE_TOKENS,
    "actor_learning_rate": "--optim.learning_rate",
    "critic_learning_rate": "--critic.optim.learning_rate",
    "init_kl_coef": KL,
    "kl_estimator": "--algo.kl",
    "advantage_estimator": ESTIMATOR,
    "eps_clip": "--algo.clip_low and --algo.clip_high",
    "eps_clip_low_high": "--algo.clip_low and --algo.clip_high",
    "lambd": "--algo.lam",
    "normalize_reward": "--algo.reward_scale",
    "dynamic_filtering": "--algo.dynamic_sampling",
    "zero_stage": MESH,
    "vllm_num_engines": SERVERS,
    "colocate_all_models": "--sglang.colocated",
    "async_train": "--rollout.max_staleness",
    "prompt_data": DATA,
    "input_key": "--data.train.0.prompt_key",
    "label_key": "--data.train.0.answer_key",
    "input_template": "--data.train.0.input_template",
    "apply_chat_template": "--data.chat.render chat",
    "save_path": RUN_DIR,
    "ckpt_path": RUN_DIR,
    "use_wandb": WANDB,
    # RL2
    "prompts_per_rollout": PROMPTS,
    "update_per_rollout": MINIBATCHES,
    "max_length_per_device": MICRO_BATCH,
    "tp_size": "--mesh.tensor",
    "cp_size": "--mesh.sequence",
    "sp_size": "--mesh.sequence",
    "ddp_size": "--mesh.data",
    "tis_coef": "--algo.correction.weight token and --algo.correction.cap",
    "avg_level": AGGREGATION,
    "n_epochs": STEPS,
    "use_peft": "--lora.rank",
    "optimizer_offload": "--optim.offload",
    "adam_offload": "--optim.offload",
    "lora": "--lora.rank",
    "lora_r": "--lora.rank",
    "lora_rank": "--lora.rank",
    "lora_alpha": "--lora.alpha",
    "lora_target_modules": "--lora.targets",
    "target_modules": "--lora.targets",
    "use_rslora": "--lora.rank_stabilized",
    "load_in_4bit": "--lora.quantize nf4, with --lora.rank",
    "load_in_8bit": "--lora.quantize int8, with --lora.rank",
    "bnb_4bit_quant_type": "--lora.quantize nf4, with --lora.rank",
}
"""Flag of another system -> the key here."""

LORA = (
    "Here this is the group lora: --lora.rank, --lora.alpha, --lora.targets, --lora.rank_stabilized, "
    "--lora.quantize"
)
NO_EPOCHS = (
    "There are no PPO epochs: a response is learned from once; --minibatches_per_step sets the updates"
)
NO_OFFLOAD = (
    "Trained weights stay on the devices: --optim.offload, --reference.offload, --mesh.fsdp, --model.remat "
    "and a smaller --tokens_per_device save memory"
)
NO_NEED = "There is no such switch: it is always so"
NO_RESUME = "There is no such switch: the same command continues what is in --run_dir"

MISSING = {
    "ppo_epochs": NO_EPOCHS,
    "num_ppo_epochs": NO_EPOCHS,
    "num_iterations": NO_EPOCHS,
    "max_epochs": NO_EPOCHS,
    "lora_dropout": "There is no dropout of adapters",
    "attn_implementation": "There is no such switch: the attention kernel is chosen for the device",
    "flash_attn": "There is no such switch: the attention kernel is chosen for the device",
    "use_liger_kernel": "There is no such switch: the kernel is chosen for the device",
    "packing": NO_NEED,
    "packing_samples": NO_NEED,
    "use_remove_padding": NO_NEED,
    "use_dynamic_bsz": NO_NEED,
    "logging_steps": "There is no such switch: every step is logged",
    "sync_ref_model": "There is no update of the reference model: it stays as it was at the start",
    "resume_from_checkpoint": NO_RESUME,
    "resume_mode": NO_RESUME,
    "load_checkpoint": NO_RESUME,
    "resume": NO_RESUME,
    "param_offload": NO_OFFLOAD,
    "trust_remote_code": "There is no remote code: README.md lists the model families",
    "device": "There is no such switch: jax chooses; JAX_PLATFORMS=cpu in the environment is for the CPU",
    "local_rank": "There is no launcher: start the same command on each host (docs/recipes.md)",
}
"""Flag of another system -> what is there in its place."""

GROUPS = {
    "actor_rollout_ref": "Here these are the groups model, algo, optim, rollout and mesh: --help GROUP",
    "deepspeed": f"Here it is {MESH}",
    "fsdp": f"Here it is {MESH}",
    "lora": LORA,
    "peft": LORA,
    "vllm": "There is no vLLM: the rollout engines are --rollout.engine native and --rollout.engine sglang",
}
"""First word of a flag of another system, which has many that begin with it -> the answer."""


def translate(key: str) -> str:
    """Return what a flag of another system is here, as a sentence; "" = no such flag is known.

    The whole key is looked up, then without its first part and so on; at last its first word.
    """
    name = key.lower().replace("-", "_")
    parts = name.split(".")
    for tail in (".".join(parts[i:]) for i in range(len(parts))):
        if tail in SAME:
            return f"Here it is {SAME[tail]}."
        if tail in MISSING:
            return f"{MISSING[tail]}."
    group = next((answer for word, answer in GROUPS.items() if re.match(rf"{word}(_|\.|$)", name)), "")
    return group and f"{group}."
