"""Keys and defaults of TRL 1.16 (trl/trainer and trl/experimental), by trainer."""

from __future__ import annotations

from typing import Any

from jaxrl_import.algorithm_names import NO_ALGORITHM
from jaxrl_import.fields import NO_CLIP, RUN_NAME, Field
from jaxrl_import.values import (
    count,
    dtype,
    items,
    lora_targets,
    name_text,
    number,
    number_list,
    path_text,
    remat,
    same,
    switch,
    text,
    top_k,
    two_numbers,
    whole_number,
)

SCHEDULES = {
    "linear": ("linear", 0.0),
    "cosine": ("cosine", 0.0),
    "constant": ("constant", 1.0),
    "constant_with_warmup": ("constant", 1.0),
    "cosine_with_min_lr": ("cosine", 0.1),
}
LOSSES = {  # loss_type of GRPO -> algorithm, aggregation
    "grpo": ("grpo", "sequence"),
    "bnpo": ("grpo", "token"),
    "dapo": ("grpo", "token"),
    "dr_grpo": ("grpo", "constant"),
    "cispo": ("cispo", "token"),
    "sapo": ("sapo", "sequence"),
    "vespo": ("vespo", "token"),
    "luspo": ("luspo", "sequence_sum"),
}
LOSS_FIELDS = {
    "sapo": {"sapo_temperature_pos": "algo.tau_positive", "sapo_temperature_neg": "algo.tau_negative"},
    "vespo": {
        "vespo_k_pos": "algo.k_positive",
        "vespo_lambda_pos": "algo.lambda_positive",
        "vespo_k_neg": "algo.k_negative",
        "vespo_lambda_neg": "algo.lambda_negative",
    },
}
NO_DPO_LOSSES = dict.fromkeys(("aot", "aot_unpaired", "aot_pair"), f"there is no AOT: {NO_ALGORITHM['aot']}")
"""loss_type of DPO that is not here -> why."""
DPO_LOSSES = {
    "sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "robust": "robust", "bco_pair": "bco",
    "nca_pair": "nca", "sppo_hard": "sppo", "exo_pair": "exo", "apo_zero": "apo_zero", "apo_down": "apo_down",
    "discopop": "discopop", "sigmoid_norm": "sigmoid",
}  # fmt: skip
OPTIMIZERS = {  # optim of transformers -> optimizer, settings that go with it
    **dict.fromkeys(
        ("adamw_hf", "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused",
         "adamw_apex_fused", "paged_adamw", "paged_adamw_32bit"), ("adamw", {}),
    ),
    **dict.fromkeys(
        ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"),
        ("adamw", {"moments": "int8"}),
    ),
    **dict.fromkeys(("lion_32bit", "paged_lion", "paged_lion_32bit"), ("lion", {})),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), ("lion", {"moments": "int8"})),
    "adafactor": ("adafactor_unscaled", {}),  # transformers sets scale_parameter=False
    "sgd": ("sgd", {"b1": 0.0}),
    "rmsprop": ("rmsprop", {"b2": 0.99, "eps": 1e-8}),  # torch's defaults: transformers passes the rate alone
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_32bit"), ("rmsprop", {"b2": 0.99, "eps": 1e-8})),
    "rmsprop_bnb_8bit": ("rmsprop", {"b2": 0.99, "eps": 1e-8, "moments": "int8"}),
    "adagrad": ("adagrad", {"eps": 1e-10}),
}  # fmt: skip
LOSS_TYPE = (
    "--algo.aggregation, or another algorithm (--algo cispo, sapo, vespo, luspo); of pairs --algo.loss"
)
OF_MATH = (
    "here math, by the same library: TRL counts LaTeX alone (\\boxed{{4}}, $4$), math a plain number, too; "
    "TRL leaves out a row whose solution it cannot read. TRL's own is --reward.name FILE.py:{}, with "
    "`from trl.rewards import {}` in that file"
)
REWARDS = {  # TRL's own functions -> reward here
    "accuracy_reward": "math",
    "reasoning_accuracy_reward": "math",
}
SHAPING = {"think_format_reward": "format", "get_soft_overlong_punishment": "overlong"}
COMMON: dict[str, Field] = {
    "model_name_or_path": Field("model.path", path_text),
    "model": Field("model.path", path_text),
    "model_revision": Field("", text, "--model.path MODEL@REVISION"),
    "dtype": Field("", dtype, "--model.dtype; master weights are float32"),
    "bf16": Field("", switch, "--model.dtype bfloat16"),
    "fp16": Field("", switch, "--model.dtype float16"),
    "learning_rate": Field("optim.learning_rate", number),
    "weight_decay": Field("optim.weight_decay", number),
    "adam_beta1": Field("optim.b1", number),
    "adam_beta2": Field("optim.b2", number),
    "adam_epsilon": Field("optim.eps", number),
    "max_grad_norm": Field("optim.max_grad_norm", number),
    "optim": Field("", text, "--optim.name"),
    "lr_scheduler_type": Field("", text, "--optim.schedule"),
    "lr_scheduler_kwargs": Field("", same, "--optim.final_fraction"),
    "warmup_steps": Field("", number, "--optim.warmup_steps, in updates"),
    "warmup_ratio": Field("", number, "--optim.warmup_ratio"),
    "per_device_train_batch_size": Field("", count, "--tokens_per_device: micro-batches in tokens"),
    "gradient_accumulation_steps": Field("", count, "--tokens_per_device: gradients are accumulated"),
    "per_device_eval_batch_size": Field("", whole_number, "--rollout.slots: sequences at once"),
    "num_train_epochs": Field("", number, "--epochs"),
    "max_steps": Field("", whole_number, "--steps"),
    "seed": Field("seed", whole_number),
    "gradient_checkpointing": Field("model.remat", remat),
    "output_dir": Field("run_dir", name_text),
    "run_name": Field("", name_text, RUN_NAME),
    "report_to": Field("", items, "--log.wandb PROJECT, --log.mlflow, --log.swanlab and --log.tensorboard"),
    "project": Field("", name_text, "--log.wandb PROJECT"),
    "save_steps": Field("", number, "--checkpoint.every"),
    "save_strategy": Field("", text, "--checkpoint.every"),
    "save_only_model": Field("", switch, "--checkpoint.optimizer False"),
    "save_total_limit": Field("checkpoint.keep", whole_number),
    "eval_steps": Field("", number, "--eval.every"),
    "eval_strategy": Field("", text, "--eval.every"),
    "dataset_name": Field("", same, "--data.path hub:OWNER/NAME"),
    "datasets": Field("", same, "--data.train.0.path and --data.train.0.weight"),
    "test_split_size": Field("data.holdout", number),
    "dataset_config": Field("data.train.0.subset", text),
    "dataset_train_split": Field("data.train.0.split", text),
    "dataset_test_split": Field("", text, "--data.eval_path, data.eval in the recipe, or --data.holdout 200"),
    "use_peft": Field("", switch, "--lora.rank"),
    "lora_r": Field("", whole_number, "--lora.rank"),
    "lora_alpha": Field("", number, "--lora.alpha"),
    "lora_target_modules": Field("", lora_targets, "--lora.targets"),
    "lora_dropout": Field("", number, "adapters have no dropout"),
    "use_rslora": Field("", switch, "--lora.rank_stabilized"),
    "load_in_4bit": Field("", switch, "--lora.quantize nf4, with --lora.rank"),
    "load_in_8bit": Field("", switch, "--lora.quantize int8, with --lora.rank"),
}
ROLLOUTS: dict[str, Field] = {
    **COMMON,
    "num_generations": Field("responses_per_prompt", count),
    "max_completion_length": Field("max_response_tokens", count),
    "max_new_tokens": Field("max_response_tokens", count),
    "max_prompt_length": Field("max_prompt_tokens", count),
    "generation_batch_size": Field("", count, "--prompts_per_step"),
    "steps_per_generation": Field("", count, "--minibatches_per_step: updates a step"),
    "num_iterations": Field("ppo_epochs", count),
    "shuffle_dataset": Field("data.shuffle", switch),
    "temperature": Field("rollout.sampling.temperature", number),
    "top_p": Field("rollout.sampling.top_p", number),
    "top_k": Field("rollout.sampling.top_k", top_k),
    "min_p": Field("rollout.sampling.min_p", number),
    "beta": Field("algo.kl_coef", number, "--algo.kl_coef; of DPO and its like --algo.beta"),
    "epsilon": Field("", number, "--algo.clip_low"),
    "epsilon_high": Field("", number, "--algo.clip_high"),
    "mask_truncated_completions": Field("algo.drop_truncated", switch),
    "reward_funcs": Field("", items, "--reward.name, --reward.shaping and --reward.models.0.path"),
    "reward_model_name_or_path": Field("", text, "--reward.models.0.path FOLDER"),
    "reward_weights": Field("", number_list, "--reward.shaping NAME WEIGHT ..."),
    "log_completions": Field("", switch, "--log.samples"),
    "use_vllm": Field(
        "", switch, "--rollout.engine native, or sglang with --rollout.launch N; there is no vLLM"
    ),
    "vllm_mode": Field("", text, "--sglang.colocated; there is no vLLM"),
    "vllm_tensor_parallel_size": Field("", count, "--sglang.flags, of servers"),
    "vllm_gpu_memory_utilization": Field("", number, "--sglang.flags, of servers"),
    "chat_template_kwargs": Field("", same, "--data.chat.template_options"),
    "max_staleness": Field("", whole_number, "--rollout.max_staleness"),
}
GRPO = {
    **ROLLOUTS,
    "delta": Field("", number, "--algo.dual_clip"),
    "loss_type": Field("", text, LOSS_TYPE),
    "importance_sampling_level": Field("", text, "--algo gspo"),
    "scale_rewards": Field("", text, "--algo.scale"),
    "entropy_coef": Field("algo.entropy_coef", number),
    "use_adaptive_entropy": Field("", switch, "--algo.entropy_target"),
    "entropy_target": Field("", number, "--algo.entropy_target"),
    "entropy_coef_delta": Field("", number, "--algo.entropy_delta"),
    "entropy_coef_max": Field("", number, "the adaptive coefficient is at most 1"),
    "entropy_coef_min": Field("", number, "--algo.entropy_target: the coefficient falls to 0"),
    "multi_objective_aggregation": Field("", text, "--algo gdpo"),
    "top_entropy_quantile": Field("", number, "--algo.top_entropy"),
    "off_policy_mask_threshold": Field(
        "", number, "--algo.correction.reject seq_mean_k1, with --algo.correction.reject_only negative"
    ),
    "use_bias_correction_kl": Field("", switch, "--algo.kl_importance"),
    "vllm_importance_sampling_correction": Field("", switch, "--algo.correction.weight token"),
    "vllm_importance_sampling_mode": Field("", text, "--algo.correction.weight and .outside"),
    "vllm_importance_sampling_clip_max": Field("", number, "--algo.correction.cap"),
    "vllm_importance_sampling_clip_min": Field("", number, "--algo.correction.floor"),
    "vllm_importance_sampling_cap": Field("", number, "--algo.correction.cap"),
    "max_tool_calling_iterations": Field("env.max_turns", whole_number),
    **{
        key: Field("", number, f"--{ours}") for fields in LOSS_FIELDS.values() for key, ours in fields.items()
    },
}
RLOO = {
    **ROLLOUTS,
    "reward_clip_range": Field("", two_numbers, NO_CLIP),
    "normalize_advantages": Field("", switch, "--algo.whiten"),
}
EXAMPLES: dict[str, Field] = {
    **COMMON,
    "max_length": Field("", count, "--max_prompt_tokens and --max_response_tokens"),
    "truncation_mode": Field("", text, "--data.overlong cut and --data.cut_side"),
    "shuffle_dataset": Field("", switch, "--data.shuffle"),
    "chat_template_path": Field("", path_text, "--data.chat.chat_template FILE"),
}
SFT = {
    **EXAMPLES,
    "dataset_text_field": Field("", text, "--data.train.0.prompt_key"),
    "completion_only_loss": Field("", switch, "--data.chat.loss"),
    "assistant_only_loss": Field("", switch, "--data.chat.loss"),
    "loss_type": Field("", text, "--algo.loss"),
}
DPO = {
    **EXAMPLES,
    "beta": Field("algo.beta", number),
    "label_smoothing": Field("algo.label_smoothing", number),
    "loss_type": Field("", items, "--algo.loss"),
    "loss_weights": Field("", number_list, "--algo.nll_coef"),
    "ld_alpha": Field("algo.tail_coef", number),
    "f_divergence_type": Field("", text, "--algo.divergence"),
    "f_alpha_divergence_coef": Field("algo.alpha", number),
    "discopop_tau": Field("algo.tau", number),
    "rpo_alpha": Field("algo.nll_coef", number),
    "reference_free": Field("algo.reference_free", switch),
    "use_weighting": Field("algo.weighted", switch),
}
KTO = {
    **EXAMPLES,
    "train_sampling_strategy": Field("", text, "--data.shuffle False: rows in order"),
    "beta": Field("algo.beta", number),
    "loss_type": Field("", text, "--algo.baseline"),
    "desirable_weight": Field("algo.desirable_weight", number),
    "undesirable_weight": Field("algo.undesirable_weight", number),
}
REWARD = {**EXAMPLES, "center_rewards_coefficient": Field("algo.center_coef", number)}
ORPO = {**EXAMPLES, "beta": Field("algo.beta", number)}
CPO = {
    **EXAMPLES,
    "beta": Field("algo.beta", number),
    "label_smoothing": Field("algo.label_smoothing", number),
    "loss_type": Field("", text, "--algo.loss, or --algo simpo"),
    "cpo_alpha": Field("algo.nll_coef", number),
    "simpo_gamma": Field("", number, "--algo.gamma, of --algo simpo"),
    "alpha": Field("", number, "--algo.alpha, of --algo simpo"),
}
GKD = {
    **EXAMPLES,
    "teacher_model_name_or_path": Field("", path_text, "--algo.teachers, of --algo gkd and --algo distill"),
    "beta": Field("algo.beta", number),
    "temperature": Field("", number, "--rollout.sampling.temperature"),
    "lmbda": Field("", number, "--algo gkd or --algo distill"),
    "max_new_tokens": Field("", count, "--max_response_tokens"),
}
DISTILLATION = {
    **{key: field for key, field in ROLLOUTS.items() if key not in ("num_generations", "num_iterations")},
    "teacher_model_name_or_path": GKD["teacher_model_name_or_path"],
    "beta": Field("algo.beta", number),
}
ONLINE_DPO = {
    **ROLLOUTS,
    "beta": Field("", number_list, "--algo.dpo.beta"),
    "max_length": Field("", count, "--max_prompt_tokens"),
    "loss_type": Field("", text, "--algo.dpo.loss"),
    "reward_model_path": Field("", text, "--reward.models.0.path FOLDER"),
    "judge": Field("", text, "--reward.models.0.kind generative"),
    "missing_eos_penalty": Field("", number, "--algo.drop_truncated"),
}

COMMON_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "seed": 42,
    "gradient_checkpointing": True,
    "save_steps": 500,
    "save_strategy": "steps",
    "eval_strategy": "no",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "report_to": "none",
}
ROLLOUT_DEFAULTS = {
    **COMMON_DEFAULTS,
    "learning_rate": 1e-6,
    "max_completion_length": 512,
    "num_iterations": 1,
    "epsilon": 0.2,
    "temperature": 1.0,
    "use_vllm": False,
    "vllm_tensor_parallel_size": 1,
}
GRPO_DEFAULTS = {
    **ROLLOUT_DEFAULTS,
    "num_generations": 8,
    "beta": 0.0,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "use_bias_correction_kl": True,
    "entropy_coef": 0.0,
    "entropy_target": 0.2,
    "entropy_coef_delta": 0.005,
    "entropy_coef_max": 1.0,
    "entropy_coef_min": 0.0,
    "multi_objective_aggregation": "sum_then_normalize",
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}
RLOO_DEFAULTS = {**ROLLOUT_DEFAULTS, "num_generations": 2, "beta": 0.05, "normalize_advantages": False}
EXAMPLE_DEFAULTS = {
    **COMMON_DEFAULTS,
    "learning_rate": 1e-6,
    "max_length": 1024,
    "truncation_mode": "keep_start",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": GRPO_DEFAULTS,
    "rloo": RLOO_DEFAULTS,
    "online_dpo": {
        **ROLLOUT_DEFAULTS, "learning_rate": 5e-7, "beta": 0.1, "max_new_tokens": 64, "temperature": 0.9,
        "num_generations": 2, "loss_type": "sigmoid", "max_completion_length": None, "max_length": 512,
    },
    "async_grpo": {
        **GRPO_DEFAULTS, "lr_scheduler_type": "constant", "max_completion_length": 2048, "max_staleness": 4,
        "use_bias_correction_kl": False, "vllm_importance_sampling_correction": False,
    },
    "gmpo": {**GRPO_DEFAULTS, "epsilon": 0.4, "use_bias_correction_kl": False},
    "distillation": {**ROLLOUT_DEFAULTS, "beta": 1.0},
    "sft": {**EXAMPLE_DEFAULTS, "learning_rate": 2e-5, "loss_type": "nll", "assistant_only_loss": False},
    "dpo": {**EXAMPLE_DEFAULTS, "beta": 0.1, "loss_type": "sigmoid", "label_smoothing": 0.0},
    "kto": {
        **EXAMPLE_DEFAULTS, "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0,
        "loss_type": "kto", "train_sampling_strategy": "sequential",
    },
    "reward": {**EXAMPLE_DEFAULTS, "learning_rate": 1e-4},
    "orpo": {**EXAMPLE_DEFAULTS, "beta": 0.1},
    "cpo": {**EXAMPLE_DEFAULTS, "beta": 0.1, "loss_type": "sigmoid", "cpo_alpha": 1.0, "simpo_gamma": 0.5},
    "gkd": {
        **EXAMPLE_DEFAULTS, "learning_rate": 2e-5, "beta": 0.5, "lmbda": 0.5, "temperature": 0.9,
        "max_new_tokens": 128,
    },
}  # fmt: skip
TABLES = {
    "grpo": GRPO,
    "async_grpo": GRPO,
    "gmpo": GRPO,
    "distillation": DISTILLATION,
    "rloo": RLOO,
    "online_dpo": ONLINE_DPO,
    "sft": SFT,
    "dpo": DPO,
    "kto": KTO,
    "reward": REWARD,
    "orpo": ORPO,
    "cpo": CPO,
    "gkd": GKD,
}
