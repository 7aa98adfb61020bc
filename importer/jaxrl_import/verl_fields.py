"""Keys and defaults of veRL (verl/trainer/config of version 0.9.1), with their older names."""

from __future__ import annotations

from typing import Any

from jaxrl_import.fields import RUN_NAME, Field
from jaxrl_import.values import (
    choice,
    count,
    count_or_never,
    device_count,
    dtype,
    items,
    lora_targets,
    name_text,
    number,
    path_text,
    paths,
    remat,
    same,
    switch,
    text,
    top_k,
    two_numbers,
    whole_number,
)

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, REF = "actor_rollout_ref.model", "actor_rollout_ref.ref"
CORRECTION = "algorithm.rollout_correction"
MANAGER = "reward.reward_kwargs.overlong_buffer_cfg"
DISTILLATION = "distillation.distillation_loss"
ULYSSES = "--mesh.sequence, with --mesh.sequence_parallel ulysses"
SCHEDULES = {
    **dict.fromkeys(("constant", "constant_with_warmup"), ("constant", 1.0)),
    **{name: (name, 0.0) for name in ("cosine", "linear")},
}
ADVANTAGES = {  # estimator -> algorithm, advantage
    "gae": ("ppo", "gae"),
    "grpo": ("grpo", "grpo"),
    "grpo_vectorized": ("grpo", "grpo"),
    "grpo_passk": ("passk", "passk"),
    "rloo": ("rloo", "rloo"),
    "rloo_vectorized": ("rloo", "rloo"),
    "reinforce_plus_plus": ("reinforce_pp", "reinforce_pp"),
    "reinforce_plus_plus_baseline": ("reinforce_pp", "reinforce_pp_baseline"),
    "remax": ("remax", "remax"),
    "opo": ("opo", "opo"),
    "gpg": ("gpg", "gpg"),
    "gdpo": ("gdpo", "gdpo"),
    "optimal_token_baseline": ("otb", "otb"),
    "tir_optimal_token_baseline": ("otb", "otb_ta"),
}
ALONE = {"grpo", "rloo", "opo"}
"""Advantages that leave the only response to a prompt its reward, in veRL."""
LOSSES = {  # policy loss -> algorithm; vanilla: that of the estimator
    "gspo": "gspo", "sapo": "sapo", "gpg": "gpg", "clip_cov": "clip_cov", "kl_cov": "kl_cov",
    "geo_mean": "gmpo", "cispo": "cispo", "dro": "dro", "dppo_tv": "dppo", "dppo_kl": "dppo",
}  # fmt: skip
LOSS_FIELDS = {  # algorithm -> key of veRL -> key here
    "sapo": {f"{ACTOR}.tau_pos": "algo.tau_positive", f"{ACTOR}.tau_neg": "algo.tau_negative"},
    "clip_cov": {
        f"{ACTOR}.policy_loss.clip_cov_ratio": "algo.fraction",
        f"{ACTOR}.policy_loss.clip_cov_lb": "algo.covariance_low",
        f"{ACTOR}.policy_loss.clip_cov_ub": "algo.covariance_high",
    },
    "kl_cov": {
        f"{ACTOR}.policy_loss.kl_cov_ratio": "algo.fraction",
        f"{ACTOR}.policy_loss.ppo_kl_coef": "algo.penalty",
    },
    "dro": {f"{ACTOR}.policy_loss.dro_beta": "algo.beta"},
    "dppo": {f"{ACTOR}.clip_ratio_c": "algo.ratio_cap"},
}
CLIPPED = {"ppo", "grpo", "passk", "rloo", "reinforce_pp", "remax", "opo", "gdpo", "otb", "pf_ppo", "gspo"}
KL = choice(
    kl="k1", k1="k1", abs="abs", mse="k2", k2="k2", low_var_kl="k3", k3="k3",
    kl_plus="k1+", k1_plus="k1+", low_var_kl_plus="k3+", k3_plus="k3+",
)  # fmt: skip
AGGREGATION = choice(
    token_mean="token",
    seq_mean_token_sum="sequence_sum",
    seq_mean_token_mean="sequence",
    seq_mean_token_sum_norm="constant",
    token_sum="token_sum",
)


def frequency(value: Any) -> int:
    """Return a number of steps between events; none where they are at the ends of epochs."""
    return 0 if value == "after_each_epoch" else count_or_never(value)


def megatron_targets(value: Any) -> tuple[str, ...]:
    """Return the layers with adapters of Megatron's names, each of which may be several here."""
    names = {
        "linear_qkv": ("q_proj", "k_proj", "v_proj"),
        "linear_proj": ("o_proj",),
        "linear_fc1": ("gate_proj", "up_proj"),
        "linear_fc2": ("down_proj",),
    }
    return tuple(name for item in lora_targets(value) for name in names.get(item, (item,)))


ROUTING = choice(disabled="none", r2="old", r3="rollout")
OPTIMIZERS = {
    "adamw": "adamw", "adam": "adamw", "fusedadam": "adamw", "adafactor": "adafactor", "sgd": "sgd",
    "lion": "lion", "muon": "muon",
}  # fmt: skip


def bounds(value: Any) -> tuple[float, ...]:
    """Return one upper bound, or the lower and the upper one of "0.5_2.0"."""
    return tuple(map(number, str(value).split("_")[:2]))


def bounds_list(value: Any) -> list[tuple[float, ...]]:
    """Return the bounds of several rules."""
    return list(map(bounds, items(value)))


def optimizer_fields(group: str, ours: str) -> dict[str, Field]:
    """Return the fields of an optimizer of veRL: those of a group of keys there, of a group here."""
    return {
        f"{group}.lr": Field(f"{ours}.learning_rate", number),
        f"{group}.weight_decay": Field(f"{ours}.weight_decay", number),
        f"{group}.betas": Field("", two_numbers, f"--{ours}.b1 and --{ours}.b2"),
        f"{group}.lr_scheduler_type": Field("", text, f"--{ours}.schedule"),
        f"{group}.warmup_style": Field("", text, f"--{ours}.schedule"),
        f"{group}.lr_scheduler": Field("", text, f"--{ours}.schedule"),
        f"{group}.lr_decay_style": Field("", text, f"--{ours}.schedule"),
        f"{group}.lr_warmup_steps": Field("", whole_number, f"--{ours}.warmup_steps, in updates"),
        f"{group}.lr_warmup_steps_ratio": Field("", number, f"--{ours}.warmup_ratio"),
        f"{group}.min_lr_ratio": Field("", number, f"--{ours}.final_fraction"),
        f"{group}.min_lr": Field("", number, f"--{ours}.final_fraction"),
        f"{group}.total_training_steps": Field("", whole_number, "--steps"),
        f"{group}.lr_decay_steps": Field("", whole_number, "--steps"),
        f"{group}.clip_grad": Field("", number, f"--{ours}.max_grad_norm"),
        f"{group}.optimizer": Field("", text, f"--{ours}.name"),
        f"{group}.eps": Field(f"{ours}.eps", number),
    }


TRAINER = {
    "trainer.total_epochs": Field("", number, "--epochs"),
    "trainer.total_training_steps": Field("", whole_number, "--steps"),
    "trainer.save_freq": Field("checkpoint.every", frequency),
    "trainer.test_freq": Field("", frequency, "--eval.every"),
    "trainer.logger": Field("", items, "--log.wandb PROJECT, --log.mlflow EXPERIMENT and --log.tensorboard"),
    "trainer.project_name": Field("", name_text, "--log.wandb PROJECT"),
    "trainer.experiment_name": Field("", name_text, RUN_NAME),
    "trainer.default_local_dir": Field("", name_text, "--run_dir"),
    "trainer.n_gpus_per_node": Field("", device_count, "all devices that are visible are used"),
    "trainer.nnodes": Field("", device_count, "all devices that are visible are used"),
    "trainer.seed": Field("seed", whole_number),
    "data.train_files": Field("", paths, "--data.path"),
    "data.val_files": Field("", paths, "--data.eval_path, or --data.holdout 200"),
    "data.truncation": Field("", text, "--data.overlong and --data.cut_side"),
    "data.apply_chat_template_kwargs": Field("", same, "--data.chat.template_options"),
}
PPO: dict[str, Field] = {
    "data.train_batch_size": Field("prompts_per_step", whole_number),
    f"{ROLLOUT}.n": Field("responses_per_prompt", count),
    "data.max_prompt_length": Field("max_prompt_tokens", count),
    "data.max_response_length": Field("max_response_tokens", count),
    **TRAINER,
    "data.prompt_key": Field("data.train.0.prompt_key", text),
    "data.shuffle": Field("data.shuffle", switch),
    "data.seed": Field("seed", whole_number),
    "data.filter_overlong_prompts": Field("", switch, "--data.overlong"),
    "data.tokenizer": Field("model.tokenizer", path_text),
    f"{MODEL}.tokenizer_path": Field("model.tokenizer", path_text),
    f"{MODEL}.path": Field("model.path", path_text),
    f"{MODEL}.lora_rank": Field("lora.rank", whole_number),
    f"{MODEL}.lora_alpha": Field("", number, "--lora.alpha"),
    f"{MODEL}.target_modules": Field("", lora_targets, "--lora.targets"),
    f"{MODEL}.lora_adapter_path": Field("model.adapter", path_text),
    f"{MODEL}.lora.rank": Field("lora.rank", whole_number),
    f"{MODEL}.lora.alpha": Field("lora.alpha", number),
    f"{MODEL}.lora.target_modules": Field("lora.targets", megatron_targets),
    f"{MODEL}.enable_gradient_checkpointing": Field("model.remat", remat),
    **optimizer_fields(f"{ACTOR}.optim", "optim"),
    f"{ACTOR}.grad_clip": Field("optim.max_grad_norm", number),
    f"{ACTOR}.fsdp_config.optimizer_offload": Field("optim.offload", switch),
    f"{ACTOR}.megatron.optimizer_offload": Field("optim.offload", switch),
    f"{REF}.veomni.param_offload": Field("", switch, "--reference.offload"),
    f"{REF}.fsdp_config.param_offload": Field("", switch, "--reference.offload"),
    f"{REF}.megatron.param_offload": Field("", switch, "--reference.offload"),
    f"{ACTOR}.ppo_mini_batch_size": Field("", count, "--minibatches_per_step: updates a step"),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": Field("", count, "--tokens_per_device, in tokens"),
    f"{ACTOR}.ppo_micro_batch_size": Field("", whole_number, "--tokens_per_device, in tokens"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": Field("", count, "--tokens_per_device"),
    f"{ACTOR}.use_dynamic_bsz": Field("", switch, "--tokens_per_device"),
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": Field("", whole_number, "--score.tokens_per_device"),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": Field("", count, "--score.tokens_per_device"),
    f"{ACTOR}.ppo_epochs": Field("ppo_epochs", count),
    f"{ACTOR}.fsdp_config.fsdp_size": Field("", device_count, "--mesh.fsdp and --mesh.data"),
    f"{ACTOR}.ulysses_sequence_parallel_size": Field("", whole_number, ULYSSES),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": Field("", whole_number, ULYSSES),
    f"{ACTOR}.fsdp_config.dtype": Field("", dtype, "--model.dtype"),
    f"{ACTOR}.megatron.tensor_model_parallel_size": Field("", whole_number, "--mesh.tensor"),
    f"{ACTOR}.megatron.context_parallel_size": Field("", whole_number, "--mesh.sequence"),
    **{
        f"{ACTOR}.{key}": Field("", device_count, "--mesh.expert")
        for key in (
            "megatron.expert_model_parallel_size",
            "veomni.expert_parallel_size",
            "fsdp_config.turbo_config.distributed.expert_parallel_size",
            "engine.ep",
        )
    },
    f"{ACTOR}.veomni.ulysses_parallel_size": Field("", whole_number, ULYSSES),
    f"{ACTOR}.fsdp_config.turbo_config.distributed.ulysses_parallel_size": Field("", whole_number, ULYSSES),
    f"{ACTOR}.engine.tp": Field("", whole_number, "--mesh.tensor"),
    f"{ACTOR}.engine.cp": Field("", whole_number, "--mesh.sequence"),
    f"{ACTOR}.veomni.fsdp_size": Field("", device_count, "--mesh.fsdp and --mesh.data"),
    f"{ACTOR}.veomni.optimizer_offload": Field("optim.offload", switch),
    f"{ACTOR}.megatron.router_replay.mode": Field("routing.replay", ROUTING),
    f"{ACTOR}.veomni.router_replay.mode": Field("routing.replay", ROUTING),
    f"{ACTOR}.router_replay.mode": Field("routing.replay", ROUTING),
    f"{ROLLOUT}.enable_rollout_routing_replay": Field("", switch, "--routing.replay rollout"),
    "rollout.total_rollout_steps": Field("", whole_number, "--steps"),
    "async_training.staleness_threshold": Field("", number, "--rollout.max_staleness"),
    "async_training.require_batches": Field("", count, "--prompts_per_step"),
    f"{ACTOR}.clip_ratio": Field("", number, "--algo.clip_low and --algo.clip_high"),
    f"{ACTOR}.clip_ratio_low": Field("", number, "--algo.clip_low"),
    f"{ACTOR}.clip_ratio_high": Field("", number, "--algo.clip_high"),
    f"{ACTOR}.clip_ratio_c": Field("", number, "--algo.dual_clip"),
    f"{ACTOR}.entropy_coeff": Field("algo.entropy_coef", number),
    f"{ACTOR}.use_kl_loss": Field("", switch, "--algo.kl_coef, with --algo.kl_in loss"),
    f"{ACTOR}.kl_loss_coef": Field("", number, "--algo.kl_coef"),
    f"{ACTOR}.kl_loss_type": Field("", KL, "--algo.kl"),
    f"{ACTOR}.loss_agg_mode": Field("algo.aggregation", AGGREGATION),
    f"{ACTOR}.loss_scale_factor": Field("", number, "--algo.constant"),
    f"{ACTOR}.policy_loss.loss_mode": Field("", text, "--algo NAME"),
    **{
        key: Field("", number, f"--{ours}") for fields in LOSS_FIELDS.values() for key, ours in fields.items()
    },
    "algorithm.adv_estimator": Field("", text, "--algo NAME (grpo, rloo, ppo, ...), or --algo.advantage"),
    "algorithm.gamma": Field("algo.gamma", number),
    "algorithm.lam": Field("algo.lam", number),
    "algorithm.norm_adv_by_std_in_grpo": Field("", switch, "--algo.scale"),
    "algorithm.use_kl_in_reward": Field("", switch, "--algo.kl_coef, with --algo.kl_in reward"),
    "algorithm.kl_penalty": Field("", KL, "--algo.kl"),
    "algorithm.kl_ctrl.type": Field("", text, "--algo.kl_target, for an adaptive coefficient"),
    "algorithm.kl_ctrl.kl_coef": Field("", number, "--algo.kl_coef"),
    "algorithm.kl_ctrl.target_kl": Field("", number, "--algo.kl_target"),
    "algorithm.kl_ctrl.horizon": Field("", number, "--algo.kl_horizon"),
    "algorithm.filter_groups.enable": Field("algo.dynamic_sampling", switch),
    "algorithm.filter_groups.max_num_gen_batches": Field("", whole_number, "--algo.max_draws"),
    "algorithm.use_pf_ppo": Field("", switch, "--algo pf_ppo"),
    "algorithm.pf_ppo.reweight_method": Field("", text, "--algo.filter, of --algo pf_ppo"),
    "algorithm.pf_ppo.weight_pow": Field("", number, "--algo.power, of --algo pf_ppo"),
    f"{CORRECTION}.rollout_is": Field("", text, "--algo.correction.weight"),
    f"{CORRECTION}.rollout_is_threshold": Field("", bounds, "--algo.correction.cap"),
    f"{CORRECTION}.rollout_is_batch_normalize": Field("", switch, "--algo.correction.normalize"),
    f"{CORRECTION}.rollout_rs": Field("", items, "--algo.correction.reject"),
    f"{CORRECTION}.rollout_rs_threshold": Field("", bounds_list, "--algo.correction.reject"),
    f"{CORRECTION}.bypass_mode": Field("", switch, "--algo.old rollout"),
    f"{CORRECTION}.loss_type": Field("", text, "--algo reinforce, with --algo.old rollout"),
    f"{ACTOR}.tis_imp_ratio_cap": Field(
        "", number, "--algo.correction.weight token and --algo.correction.cap"
    ),
    f"{ROLLOUT}.response_length": Field("", count, "--max_response_tokens"),
    f"{ROLLOUT}.prompt_length": Field("", count, "--max_prompt_tokens"),
    f"{ROLLOUT}.temperature": Field("rollout.sampling.temperature", number),
    f"{ROLLOUT}.top_p": Field("rollout.sampling.top_p", number),
    f"{ROLLOUT}.top_k": Field("rollout.sampling.top_k", top_k),
    f"{ROLLOUT}.ignore_eos": Field("rollout.sampling.ignore_eos", switch),
    f"{ROLLOUT}.dtype": Field("rollout.dtype", dtype),
    f"{ROLLOUT}.max_num_seqs": Field("rollout.slots", whole_number),
    f"{ROLLOUT}.name": Field("", text, "--rollout.engine"),
    f"{ROLLOUT}.tensor_model_parallel_size": Field("", count, "--sglang.flags, of servers"),
    f"{ROLLOUT}.gpu_memory_utilization": Field("", number, "--sglang.flags, of servers"),
    f"{ROLLOUT}.val_kwargs.n": Field("", whole_number, "--eval.samples"),
    f"{ROLLOUT}.val_kwargs.do_sample": Field("", switch, "--eval.sampling.temperature; 0 = greedy"),
    f"{ROLLOUT}.val_kwargs.temperature": Field("", number, "--eval.sampling.temperature"),
    f"{ROLLOUT}.val_kwargs.top_p": Field("", number, "--eval.sampling.top_p"),
    f"{ROLLOUT}.val_kwargs.top_k": Field("", top_k, "--eval.sampling.top_k"),
    f"{ROLLOUT}.multi_turn.max_assistant_turns": Field("env.max_turns", whole_number),
    **optimizer_fields("critic.optim", "critic.optim"),
    "critic.model.path": Field("", path_text, "--critic.path"),
    "critic.grad_clip": Field("critic.optim.max_grad_norm", number),
    "critic.cliprange_value": Field("critic.loss.value_clip", number),
    "critic.loss_agg_mode": Field("critic.loss.aggregation", AGGREGATION),
    "trainer.critic_warmup": Field("critic.warmup_steps", whole_number),
    "trainer.max_actor_ckpt_to_keep": Field("checkpoint.keep", whole_number),
    "reward.custom_reward_function.path": Field("", path_text, "--reward.name my_rewards.py:my_reward"),
    "reward.custom_reward_function.name": Field("", text, "--reward.name my_rewards.py:my_reward"),
    "reward.reward_manager.name": Field("", text, "--reward.name auto, or --reward.shaping overlong 1.0"),
    "reward.reward_model.enable": Field("", switch, "--reward.models.0.path FOLDER"),
    "reward.reward_model.model_path": Field("", path_text, "--reward.models.0.path FOLDER"),
    f"{MANAGER}.enable": Field("", switch, "--reward.shaping overlong 1.0"),
    f"{MANAGER}.len": Field("", whole_number, "--reward.overlong_from"),
    f"{MANAGER}.penalty_factor": Field("", number, "--reward.shaping overlong 1.0"),
    "reward.reward_kwargs.max_resp_len": Field("", whole_number, "--reward.overlong_to"),
    "distillation.enabled": Field("", switch, "--algo gkd, with --algo.teachers"),
    "distillation.teacher_key": Field("", text, "--data.train.0.teacher: by source"),
    **{
        f"{DISTILLATION}.{key}": Field("", convert, hint)
        for key, convert, hint in (
            ("loss_mode", text, "--algo.form and --algo.beta, of --algo gkd"),
            ("topk", whole_number, "--algo.top_k, of --algo gkd"),
            ("use_task_rewards", switch, "--algo.reward_coef, of --algo gkd"),
            ("distillation_loss_coef", number, "--algo.reward_coef, of --algo gkd"),
            ("use_policy_gradient", switch, "--algo.form policy_gradient, of --algo gkd"),
            ("policy_loss_mode", text, "--algo.form policy_gradient, of --algo gkd"),
            ("loss_max_clamp", number, "divergences are not clamped"),
            ("log_prob_min_clamp", number, "log-probs are not clamped"),
            ("clip_ratio_low", number, "--algo.clip_low, of --algo gkd"),
            ("clip_ratio_high", number, "--algo.clip_high, of --algo gkd"),
            ("clip_ratio", number, "--algo.clip_low and --algo.clip_high, of --algo gkd"),
        )
    },
}
PPO_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    f"{ROLLOUT}.n": 1,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    f"{MODEL}.enable_gradient_checkpointing": True,
    f"{MODEL}.lora_alpha": 16,
    f"{MODEL}.target_modules": "all-linear",
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.optim.lr_scheduler_type": "constant",
    f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.0,
    f"{ACTOR}.optim.min_lr_ratio": 0.0,
    f"{ACTOR}.grad_clip": 1.0,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.tau_pos": 1.0,
    f"{ACTOR}.tau_neg": 1.05,
    f"{ACTOR}.policy_loss.clip_cov_ratio": 0.0002,
    f"{ACTOR}.policy_loss.clip_cov_lb": 1.0,
    f"{ACTOR}.policy_loss.clip_cov_ub": 5.0,
    f"{ACTOR}.policy_loss.kl_cov_ratio": 0.0002,
    f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.pf_ppo.reweight_method": "pow",
    "algorithm.pf_ppo.weight_pow": 2.0,
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    f"{CORRECTION}.loss_type": "ppo_clip",
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.dtype": "bfloat16",
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.val_kwargs.n": 1,
    f"{ROLLOUT}.val_kwargs.do_sample": False,
    f"{ROLLOUT}.val_kwargs.temperature": 0,
    "reward.custom_reward_function.name": "compute_score",
    "reward.reward_manager.name": "naive",
    f"{MANAGER}.penalty_factor": 1.0,
    f"{DISTILLATION}.loss_mode": "k3",
    f"{DISTILLATION}.topk": 32,
    f"{DISTILLATION}.use_task_rewards": True,
    f"{DISTILLATION}.distillation_loss_coef": 1.0,
    f"{DISTILLATION}.policy_loss_mode": "vanilla",
    f"{DISTILLATION}.clip_ratio_low": 0.2,
    f"{DISTILLATION}.clip_ratio_high": 0.2,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.logger": "console,wandb",
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "data.seed": None,
}
CRITIC_DEFAULTS = {
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.optim.lr_scheduler_type": "constant",
    "critic.cliprange_value": 0.5,
}
