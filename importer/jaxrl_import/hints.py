"""Answers to flags of other systems: what each is here, or what there is in its place."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

from jaxrl_import.systems import fields_by_name

PROMPTS = "--prompts_per_step"
RESPONSES = "--responses_per_prompt"
LENGTH = "--max_prompt_tokens and --max_response_tokens"
RUN_DIR = "--run_dir"
WANDB = "--log.wandb PROJECT"
MESH = "--mesh.data, --mesh.fsdp, --mesh.tensor and --mesh.sequence: all devices that are visible are used"
SERVER_FLAGS = "--sglang.flags, which are SGLang's own: '--tp 2 --mem-fraction-static 0.6'"

SAME = {
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy"), "--hub.push ORG/NAME"),
    "hub_private_repo": "--hub.private",
    "gguf_file": "--model.path FILE.gguf, or ORG/NAME/FILE.gguf of the hub",
    "wandb_name": "--log.name",
    "wandb_group": "--log.group",
    "wandb_tags": "--log.tags",
    "wandb_id": "WANDB_RUN_ID in the environment",
    "wandb_dir": "WANDB_DIR in the environment",
    **dict.fromkeys(("wandb_entity", "wandb_org"), "--log.wandb ENTITY/PROJECT"),
    "hub_token": "the environment variable HF_TOKEN",
    "num_ppo_epochs": "--ppo_epochs",
    "max_epochs": "--ppo_epochs, passes over the responses of a step, or --epochs of examples",
    "ref_model": "--reference.path",
    "save_contents": "--checkpoint.hf_every and --checkpoint.optimizer",
    "save_hf_ckpt": "--checkpoint.hf_every",
    "max_tokens": LENGTH,
    "batch_size": PROMPTS,
    "optimizer": "--optim.name",
    "logging_dir": RUN_DIR,
    "load_best_model_at_end": "--checkpoint.best_metric",
    "fsdp_config": MESH,
    "deepspeed": MESH,
    "accelerate": MESH,
    "ddp": MESH,
    "num_processes": MESH,
    "model.name": "--model.path",
    "tokenizer_name": "--model.tokenizer",
    "tokenizer": "--model.tokenizer",
    "vllm_server_base_url": "--rollout.servers http://host:port, of SGLang servers; there is no vLLM",
    "vllm_max_model_len": LENGTH,
    "prompt_key": "--data.train.0.prompt_key",
    "truncation": "--data.overlong",
    "n": RESPONSES,
    "cliprange": "--algo.clip_low and --algo.clip_high",
    "n_gpus_per_node": MESH,
    "nnodes": MESH,
    "val_before_train": "--eval.every: evaluation starts before the first step",
    "logger": WANDB,
    "tensor_model_parallel_size": f"--mesh.tensor, of servers {SERVER_FLAGS}",
    "hybrid_engine": "--sglang.colocated",
    "normalize_reward": "--algo.scale batch_std",
    "colocate_all_models": "--sglang.colocated",
    "input_template": "--data.train.0.input_template",
    "ckpt_path": RUN_DIR,
    "use_wandb": WANDB,
    "sp_size": "--mesh.sequence",
    **dict.fromkeys(("expert_model_parallel_size", "expert_parallel_size", "ep_size"), "--mesh.expert"),
    **dict.fromkeys(("aux_loss_coef", "router_aux_loss_coef"), "--routing.balance_coef"),
    **dict.fromkeys(("enable_rollout_routing_replay", "router_replay.mode"), "--routing.replay"),
    "lora": "--lora.rank",
    "bnb_4bit_quant_type": "--lora.quantize nf4, with --lora.rank",
}
"""Flag of another system -> the key here, of flags that no table of a system has."""

LORA = (
    "Here this is the group lora: --lora.rank, --lora.alpha, --lora.targets, --lora.rank_stabilized, "
    "--lora.quantize"
)
OF_WANDB = (
    "--log.wandb PROJECT, with --log.name, --log.group and --log.tags; its other "
    "settings are wandb's environment variables"
)
NO_OFFLOAD = (
    "Trained weights stay on the devices: --optim.offload, --reference.offload, --mesh.fsdp, --model.remat "
    "and a smaller --tokens_per_device save memory"
)
NO_NEED = "There is no such switch: it is always so"
NO_RESUME = "There is no such switch: the same command continues what is in --run_dir"

NO_PIPELINE = (
    "There is no pipeline parallelism: --mesh.fsdp, --mesh.tensor and --mesh.sequence shard the model"
)
NO_MEGATRON = "There is no Megatron: --mesh.tensor and its like shard the model, --model.remat saves memory"
NO_EXPERTS = "There is no such setting of experts: docs/experts.md has what there is"
NO_IMAGES = "There are no images: models are of text"
NO_ENGINE_FLAG = "Flags of the servers' engine are --sglang.flags, which are SGLang's own"
NO_PLACEMENT = "Models share all devices, unless --MODEL.devices is set (docs/placement.md)"
SCORING = "--score.tokens_per_device sets the micro-batches of log-probs, in tokens"
PROFILER = "--profile 3:5 traces steps 3 to 5"
NO_MEMORY_SWITCH = "There is no such switch: memory is freed as programs end"

MISSING = {
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
    **dict.fromkeys(
        ("early_stopping", "early_stopping_patience", "early_stopping_threshold"),
        "There is no early stopping: --checkpoint.best_metric keeps the best checkpoint",
    ),
    "device": "There is no such switch: jax chooses; JAX_PLATFORMS=cpu in the environment is for the CPU",
    "local_rank": "There is no launcher: start the same command on each host (docs/launching.md)",
    **dict.fromkeys(
        (
            "log_prob_micro_batch_size",
            "log_prob_max_token_len_per_gpu",
            "log_prob_use_dynamic_bsz",
            "ref.log_prob_micro_batch_size_per_gpu",
            "forward_max_token_len_per_gpu",
            "forward_micro_batch_size_per_gpu",
        ),
        SCORING,
    ),
    **dict.fromkeys(
        (
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "pipeline_model_parallel_layout",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ),
        NO_PIPELINE,
    ),
    **dict.fromkeys(
        (
            "expert_tensor_parallel_size",
            "moe_router_force_load_balancing",
            "moe_router_dtype",
            "moe_permute_fusion",
            "moe_token_dispatcher_type",
            "moe_enable_deepep",
            "moe_grouped_gemm",
            "groupgemm",
        ),
        NO_EXPERTS,
    ),
    **dict.fromkeys(
        (
            "image_key",
            "video_key",
            "max_images_per_prompt",
            "freeze_vision_tower",
            "freeze_visual_encoder",
            "return_multi_modal_inputs",
        ),
        NO_IMAGES,
    ),
    **dict.fromkeys(
        (
            "enforce_eager",
            "enable_chunked_prefill",
            "max_num_batched_tokens",
            "free_cache_engine",
            "load_format",
            "disable_log_stats",
            "enable_prefix_caching",
            "vllm_enable_sleep_mode",
            "enable_sleep",
            "sync_backend",
            "max_model_len",
            "cudagraph_capture_sizes",
            "multi_stage_wake_up",
            "vllm_max_model_length",
            "vllm_importance_sampling_min",
        ),
        NO_ENGINE_FLAG,
    ),
    **dict.fromkeys(
        (
            "rollout.nnodes",
            "rollout.n_gpus_per_node",
            "ref.num_nodes",
            "ref.num_gpus_per_node",
            "reward.num_nodes",
            "reward.num_gpus_per_node",
            "critic.num_nodes",
            "critic.num_gpus_per_node",
            "colocate_actor_ref",
            "colocate_critic_reward",
            "colocation",
            "gpu_per_process",
            "policy.num_gpu",
            "ref_policy.num_gpu",
            "cpu_per_process",
            "num_cpu",
            "ref_num_nodes",
            "ref_num_gpus_per_node",
            "reward_num_nodes",
            "reward_num_gpus_per_node",
            "critic_num_nodes",
            "critic_num_gpus_per_node",
        ),
        NO_PLACEMENT,
    ),
    **dict.fromkeys(
        (
            "grad_offload",
            "offload_model",
            "offload_weights",
            "offload_optimizer_states",
            "free_grad_buffers",
            "enable_activation_offload",
        ),
        NO_OFFLOAD,
    ),
    **dict.fromkeys(
        (
            "return_raw_chat",
            "use_fused_kernels",
            "use_torch_compile",
            "calculate_log_probs",
            "use_mbridge",
            "vanilla_mbridge",
            "balance_batch",
            "entropy_checkpointing",
            "entropy_from_logits_with_chunking",
            "sequence_parallel",
            "use_distributed_optimizer",
            "save_hf",
            "trainable",
            "train_backend",
            "use_shm",
            "use_legacy_worker_impl",
            "use_rollout_log_probs",
            "meta_init",
            "layered_summon",
            "data_rerank",
            "remove_unused_columns",
            "no_remove_unused_columns",
            "dataset_num_proc",
            "dataloader_num_workers",
            "filter_overlong_prompts_workers",
            "log_val_generations",
            "num_completions_to_print",
            "logging_first_step",
            "padding_free",
            "ref.ulysses_sequence_parallel_size",
            "ref.megatron.tensor_model_parallel_size",
            "ref.megatron.context_parallel_size",
            "enable_eval_before_training",
            "overlong_buffer_cfg.log",
            "overlong_buffer.log",
            "rollout.mode",
            "multi_turn.enable",
        ),
        NO_NEED,
    ),
    **dict.fromkeys(
        (
            "profiler.enable",
            "profiler.ranks",
            "profiler.all_ranks",
            "global_profiler.tool",
            "global_profiler.steps",
        ),
        PROFILER,
    ),
    **dict.fromkeys(
        ("use_expandable_segments", "torch_empty_cache_steps"),
        NO_MEMORY_SWITCH,
    ),
    **dict.fromkeys(
        (
            "load_ckpt_from",
            "resume_from_path",
            "enable_resume_training",
            "load_enable",
            "data_checkpoint_path",
        ),
        NO_RESUME,
    ),
}
"""Flag of another system -> what is there in its place."""

GROUPS = {
    "actor_rollout_ref": "Here these are the groups model, algo, optim, rollout and mesh: --help GROUP",
    "deepspeed": f"Here it is {MESH}",
    "fsdp": f"Here it is {MESH}",
    "lora": LORA,
    "peft": LORA,
    "wandb": f"Here it is {OF_WANDB}",
    "vllm": "There is no vLLM: the rollout engines are --rollout.engine native and --rollout.engine sglang",
}
"""First word of a flag of another system, which has many that begin with it -> the answer."""


INSIDE = {
    "override_transformer_config": NO_MEGATRON,
    "megatron.": NO_MEGATRON,
    "override_optimizer_config": "Memory of the optimizer: --optim.offload, --optim.moments int8",
    "override_config": "The model's shape is that of its config.json",
    "engine_kwargs": NO_ENGINE_FLAG,
    "profiler": PROFILER,
    "async_training": "Asynchronous rollout is --rollout.max_staleness, of steps: docs/asynchronous.md",
    "partial_rollout": "Responses are not cut between steps: docs/asynchronous.md has what overlaps",
    "reward_model.": "Reward models are part of the run: --reward.models.0.path and its fields",
    "rollout_manager": "The engine spreads requests itself",
    "multi_turn": "Tools and turns are the group env: docs/agents.md",
    "custom_cls": "Rows are read by their columns: --help data",
    "wandb_": OF_WANDB,
    "ref_policy.": "The reference has --reference.mesh, --reference.devices and --reference.offload",
    "critic.": "The critic has --critic.mesh and --critic.devices; its micro-batches are the policy's",
    "actor.strategy": "There is one: sharded by --mesh.fsdp and its like",
    "checkpoint": "Checkpoints are whole: --checkpoint.every and --checkpoint.keep",
}
"""Part of a key of another system -> what is there in the place of all such keys."""


def translate(key: str, known: Container[str] = ()) -> str:
    """Return what a flag of another system is here, as a sentence; "" = no such flag is known.

    The whole key is looked up, then without its first part and so on; at last its first word.

    Args:
        known: keys of the recipe. A flag that several trainers have (loss_type) is the one of its algorithm.
    """
    fields = fields_by_name()
    for tail in tails(key):
        if tail in SAME:
            return f"Here it is {SAME[tail]}."
        if tail in MISSING:
            return f"{MISSING[tail]}."
        answers = [field.hint or f"--{field.ours}" for field in fields.get(tail, ())]
        if answers := [answer for answer in answers if answer.startswith("--")]:
            own = (answer for answer in answers if _option_of_algorithm(answer) in known)
            return f"Here it is {next(own, answers[0])}."
    group = _group(key)
    return group and f"{group}."


def _option_of_algorithm(answer: str) -> str:
    """Return the key that an answer begins with, if it is one of an algorithm's settings; else ""."""
    found = re.match(r"--(algo\.[\w.]*\w)", answer)
    return found[1] if found else ""


def missing_reason(key: str) -> str:
    """Return what there is in the place of a key without counterpart; "" = nothing is known."""
    for tail in tails(key):
        if answer := MISSING.get(tail, SAME.get(tail, "")):
            return answer
    return next((answer for part, answer in INSIDE.items() if part in key), "")


def tails(key: str) -> Iterator[str]:
    """Yield the key, and it without its first part, without two and so on."""
    parts = key.lower().replace("-", "_").split(".")
    yield from (".".join(parts[i:]) for i in range(len(parts)))


def _group(key: str) -> str:
    name = key.lower().replace("-", "_")
    return next((answer for word, answer in GROUPS.items() if re.match(rf"{word}(_|\.|$)", name)), "")
