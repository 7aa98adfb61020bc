"""Keys of other systems that no table has: which of them change the result, and with which values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

OFF = (None, False, 0, "", "none", "null", "off", "disable", "disabled", "no", [], {})
ONE = (None, 1)
UNKNOWN_KEY = "import-config does not know this key; see what it changes there"

NO_PIPELINE = "there is no pipeline parallelism: those devices are on the mesh's fsdp axis"
NO_IMAGES = "there are no images: models are of text"
AGENTS = "tools and turns are the group env: --env.name and --env.tools, docs/agents.md"
ENGINE = "responses are sampled with temperature, top_p, top_k and min_p alone"
MODEL = "the model's shape is that of its config.json"
ROWS = "rows are read by their columns (--help data)"
ALL_ROWS = "all rows of a file are used: cut the file"
EXAMPLES = "the mean is over tokens, as in a trainer without it"
OWN_CODE = "what a script's own code does is not carried over"
ASYNC = "the rollout is at most --rollout.max_staleness steps behind: docs/asynchronous.md"
LORA = "adapters are LoRA of --lora.targets, without dropout, biases or further layers"


class Effect(NamedTuple):
    """Keys that change the result."""

    keys: str
    """Regular expression of whole keys."""
    neutral: tuple[Any, ...]
    """Values that change nothing."""
    reason: str
    """Counterpart, or what else there is."""


VERL = (
    Effect(
        r"(?!actor_rollout_ref\.ref\.|critic\.|.*rollout\.).*\bpipeline_model_parallel_size"
        r"|(actor_rollout_ref\.actor\.)?engine\.pp(_size)?",
        ONE,
        NO_PIPELINE,
    ),
    Effect(r".*\bexpert_tensor_parallel_size|engine\.etp", ONE, "experts are sharded by --mesh.expert alone"),
    Effect(r"optim", ("fsdp", "megatron", "veomni", "torchtitan"), "those defaults are not read: set them"),
    Effect(r".*\bqat\.enable", OFF, "there is no quantization-aware training"),
    Effect(r".*\bmoe_aux_loss_coeff|.*\brouter_aux_loss_coef", OFF, "--routing.balance_coef"),
    Effect(r".*\bmoe_router_(enable_expert_bias|bias_update_rate)", OFF, "--routing.bias_rate"),
    Effect(r".*\bmoe_router_load_balancing_type", OFF, "--routing.balance_coef"),
    Effect(r".*\bmoe_z_loss_coeff", OFF, "there is no z loss of routers"),
    Effect(r".*\b(fp8|fp4)\b.*|.*\benable_fp8", OFF, "training is in --model.dtype"),
    Effect(r"(?!.*fusion).*\b(\w*dropout\w*|\w+_pdrop)", OFF, "there is no dropout"),
    Effect(
        r".*\.override_config\.(?!(model_config\.)?max_position_embeddings|attn_implementation|_attn_imp).*",
        OFF,
        MODEL,
    ),
    Effect(r".*\bmodel\.(hf_config_path|external_lib)", OFF, MODEL),
    Effect(r".*\bmodel\.custom_chat_template", OFF, "--data.chat.chat_template FILE"),
    Effect(r".*\bmodel\.mtp\.(enable|enable_train)", OFF, "heads of multi-token prediction are not trained"),
    Effect(r".*\bmodel\.(lora\.)?exclude_modules|.*\bmodel\.lora\.type", ("lora", *OFF), LORA),
    Effect(r".*\b(model_dtype|master_weights)", ("fp32", "float32", True, None), "weights are in float32"),
    Effect(r".*\brollout\.do_sample", (True, None), "--rollout.sampling.temperature 0 is greedy"),
    Effect(r".*\brollout\.(over_sample_rate|seed_offset|repetition_penalty)", (1, *OFF), ENGINE),
    Effect(r".*\brollout\.quantization(_config_file)?", OFF, "--sglang.quantization"),
    Effect(
        r".*\brollout\.logprobs_mode",
        ("processed_logprobs", None),
        "log-probs are those of what is sampled from",
    ),
    Effect(r".*\bmulti_turn\.enable|.*\b(function_)?tool_config_path|.*\bfunction_tool_path", OFF, AGENTS),
    Effect(
        r".*\binteraction_config_path|.*\bagent_loop_config_path|.*\bcustom_async_server\.path", OFF, AGENTS
    ),
    Effect(r".*\bdefault_agent_loop", ("single_turn_agent", None), AGENTS),
    Effect(r".*\bmulti_turn\.max_user_turns", OFF, "--env.max_turns: turns of the policy"),
    Effect(r".*\bmulti_turn\.max_parallel_calls", ONE, "--env.max_calls"),
    Effect(r".*\bmulti_turn\.max_tool_response_length", (), "--env.max_observation_tokens"),
    Effect(r".*\bmulti_turn\.format", (), "--env.format"),
    Effect(r".*\bsingle_turn_response_length|.*\bper_turn_\w+", OFF, AGENTS),
    Effect(r"data\.(train|val)_max_samples", (-1, None), ALL_ROWS),
    Effect(r"data\.(image|video|audio)_key|data\.mm_processor_kwargs", OFF, NO_IMAGES),
    Effect(r"data\.(custom_cls|sampler|datagen)\..*", OFF, ROWS),
    Effect(r"data\.(reward_fn_key|tools_key)", ("data_source", "tools"), ROWS),
    Effect(r"data\.enable_thinking_\w+", OFF, "--data.chat.template_options"),
    Effect(r"critic\.loss_scale_factor", OFF, "--critic.loss.factor"),
    Effect(
        r"(actor_rollout_ref\.actor|critic)\.shuffle",
        OFF,
        "a step's mini-batches are in the order of its prompts",
    ),
    Effect(r"(reward\.)?sandbox_fusion\.url", OFF, "code runs in a reward of your own (docs/rewards.md)"),
    Effect(
        r"reward\.reward_manager\.(source|module\.path)", ("register", *OFF), "--reward.name FILE.py:FUNCTION"
    ),
    Effect(r"reward\.reward_kwargs\.(?!overlong_buffer_cfg\.log).*", OFF, "--reward.name FILE.py:FUNCTION"),
    Effect(r"algorithm\.gdpo_reward_(keys|weights)", OFF, "--algo.component_weights"),
    Effect(
        r"algorithm\.filter_groups\.metric",
        ("reward", "seq_reward", "seq_final_reward", "score", None),
        "groups are dropped whose rewards are equal, with all that shapes them",
    ),
    Effect(r"async_training\.(trigger_parameter_sync_step|require_batches)", ONE, ASYNC),
    Effect(r"async_training\.(staleness_threshold|partial_rollout)", OFF, ASYNC),
    Effect(r"trainer\.v1\.trainer_mode", ("sync", None), ASYNC),
    Effect(r"trainer\.v1\.(sampler|separate_async|colocate_async)\..*", (), ASYNC),
    Effect(r"trainer\.(val_only|checkpoint_callback_class)", OFF, OWN_CODE),
    Effect(r"trainer\.resume_from_path", OFF, "--model.path starts from other weights"),
    Effect(r"skip\..*\benable", OFF, "responses are generated, not read from a file"),
    Effect(
        r".*\b(optimizer|lr_decay|lr_wsd|weight_decay_incr|wd_incr|min_lr)_\w*style",
        ("constant", None),
        "--optim.schedule",
    ),
    Effect(
        r".*\boptim\.(lr_warmup_init|init_lr_ratio|start_weight_decay|end_weight_decay)",
        OFF,
        "--optim.warmup_steps, from 0",
    ),
    Effect(r".*\boptim\.num_cycles", (0.5, None), "--optim.schedule cosine is half a wave"),
    Effect(r".*\bdecoupled_weight_decay", (True, None), "--optim.weight_decay is decoupled"),
    Effect(
        r".*\b(exp_avg(_sq)?_dtype|main_grads_dtype)",
        ("fp32", "float32", *OFF),
        "--optim.moments, --optim.grad_dtype",
    ),
)
OPENRLHF = (
    Effect(r".*\blora\.dropout|lora_dropout", OFF, LORA),
    Effect(r"model\.aux_loss_coef|actor\.aux_loss_coef|aux_loss_coef", OFF, "--routing.balance_coef"),
    Effect(r"reward\.stop_properly_penalty_coef", OFF, "--algo.drop_truncated, or a reward of your own"),
    Effect(r"data\.image_key|data\.max_images_per_prompt|actor\.freeze_visual_encoder", OFF, NO_IMAGES),
    Effect(r"(train|rollout)\.partial_rollout_enable|partial_rollout", OFF, ASYNC),
    Effect(r"(\w+\.)?(muon\.(momentum|ns_steps)|muon_\w+)", (0.95, 5, None), "--optim.b1 is Muon's momentum"),
    Effect(r"(\w+\.)?muon\.(no_)?nesterov", (), "Muon has Nesterov's momentum"),
    Effect(r"data\.(disable_fast_tokenizer|use_ms)|use_ms", OFF, ROWS),
    Effect(r"ds\.value_head_prefix|value_head_prefix", ("score", None), "the value head is `score`"),
    Effect(r"ds\.grad_accum_dtype", ("fp32", None), "--optim.grad_dtype"),
    Effect(
        r"train\.pretrain_\w+|pretrain_data|ptx_coef|data\.pretrain_\w+",
        OFF,
        "there is no pretraining loss beside the policy's",
    ),
    Effect(r"model\.(pretrain_mode|loss_type|compute_fp32_loss)|pretrain_mode", ("sigmoid", *OFF), "--algo"),
    Effect(r"ckpt\.best_metric_key", OFF, "--checkpoint.best_metric keeps the best checkpoint"),
)
TRL = (
    Effect(r"lora_dropout|use_dora|lora_modules_to_save|lora_target_parameters", OFF, LORA),
    Effect(r"peft\.(?!task_type|inference_mode|base_model_name_or_path|revision).*", OFF, LORA),
    Effect(r"sync_ref_model", OFF, "the reference stays as it was at the start"),
    Effect(r"neftune_noise_alpha|optim_args|optim_target_modules", OFF, "there is none"),
    Effect(r"label_smoothing_factor", OFF, "targets are not smoothed"),
    Effect(
        r"(teacher_)?model_init_kwargs(\.(?!(revision|(torch_)?dtype|attn_implementation|trust_remote_code"
        r"|use_cache|device_map|quantization_config)$).*)?",
        OFF,
        MODEL,
    ),
    Effect(r"router_aux_loss_coef", OFF, "--routing.balance_coef"),
    Effect(r"generation_kwargs(\..*)?|vllm_structured_outputs_regex", OFF, ENGINE),
    Effect(r"repetition_penalty", (1, *OFF), ENGINE),
    Effect(
        r"train_sampling_strategy",
        ("random", None),
        "rows are drawn at random; --data.shuffle False in order",
    ),
    Effect(r"load_best_model_at_end|metric_for_best_model", OFF, "--checkpoint.best_metric keeps the best"),
    Effect(
        r"packing",
        OFF,
        "there an update has that many packed rows of max_length tokens, here --prompts_per_step rows",
    ),
    Effect(r"eos_token|pad_token", OFF, "the tokenizer's own; set it in its files"),
    Effect(r"dataset_kwargs(\..*)?|formatting_func|data_collator|columns", OFF, ROWS),
    Effect(r"rollout_func|environment_factory|tools|environments?", OFF, AGENTS),
    Effect(
        r"callbacks|rollout_worker|optimizers|optimizer_cls_and_kwargs|compute_loss_func|compute_metrics",
        OFF,
        OWN_CODE,
    ),
    Effect(r"ref_model", OFF, "--reference.path"),
    Effect(r"resume_from_checkpoint", OFF, "--model.path starts from other weights"),
    Effect(r"judge|judge_\w+|missing_eos_penalty", OFF, "--reward.models.0.kind generative"),
    Effect(r"seq_kd", OFF, "the teacher scores; its own responses are data of --algo sft"),
    Effect(r"average_tokens_across_devices", (True, None), EXAMPLES),
    Effect(
        r"activation_checkpointing_kwargs|parallelism_config(\..*)?|fsdp_config(\..*)?|fsdp|deepspeed",
        OFF,
        "--mesh.fsdp, --mesh.tensor and --mesh.sequence",
    ),
    Effect(r"dataset\.\w+", OFF, OWN_CODE),
)
CHANGES: Mapping[str, tuple[Effect, ...]] = {"verl": VERL, "openrlhf": OPENRLHF, "trl": TRL}
HARMLESS: Mapping[str, str] = {
    "verl": r"""
        (ray_kwargs|transfer_queue|global_profiler|skip|async_training|hydra|ray_init|wandb|swanlab)\..*
        | .*\b(profiler|checkpoint|checkpoint_engine|engine_kwargs|trace|prometheus|disaggregation
            |hybrid_rollout)\..*
        | .*\b(override_transformer_config|override_mcore_model_config|override_ddp_config
            |override_optimizer_config)\..*
        | .*\b(backend_config|moe_config|impl_cfg|turbo_config|wrap_policy|fused_kernel_options
            |tiled_mlp|mtp|qat)\..*
        | .*\boverride_config\.(model_config\.)?(max_position_embeddings|_?attn_implementation)
        | .*_implementation | .*\battention_backend_override | model | [\w/]+@[\w.]+ | rollout\.(n|test_freq)
        | .*\b(micro_batch_size|micro_batch_size_per_gpu|ppo_micro_batch_size(_per_gpu)?|forward_\w+)
        | .*\b(log_prob_\w+|ppo_max_token_len_per_gpu|max_token_len_per_gpu|use_dynamic_bsz
            |balance_\w+|pad_\w+)
        | .*\b(use_\w+|enable_\w+|entropy_\w+|\w*_?offload\w*|offload_policy|reshard_\w+|forward_prefetch)
        | .*\b(strategy|distributed_strategy|model_engine|engine|optim|device|seed|full_determinism
            |timeout|nccl_timeout)
        | .*\b(gpu_memory_utilization|standalone_gpu_memory_utilization|\w*parallel\w*|fsdp_size
            |dp_size|dp_replicate_size)
        | .*\b([tecdp]p_size|[tec]p|vpp|nnodes|n_gpus_per_node|num_workers|num_replicas
            |dataloader_num_workers|num_gpus)
        | .*\b(max_num_batched_tokens|max_num_seqs|max_model_len|enforce_eager|free_cache_engine
            |load_format|mode|name)
        | .*\b(cudagraph_capture_sizes|disable_log_stats|layered_summon|multi_stage_wake_up
            |skip_tokenizer_init)
        | .*\b(hybrid_engine|trust_remote_code|vanilla_mbridge|meta_init|dist_checkpointing_\w+
            |moe_load_balance_\w+)
        | .*\b(calculate_\w+|return_\w+|layer_name_map|custom_backend_module|router_config_path
            |scheduling_policy)
        | .*\b(prompt_length|response_length|rollout_n|dtype|mixed_precision\.\w+|temperature
            |limit_images|full_rank)
        | .*\b(optimizer_impl|zero_indexed_step|foreach|fused|muon_\w+|store_param_remainders
            |total_training_steps)
        | .*\b(lora_[AB]_init_method|dropout_position|a2a_experimental|merge|freeze_\w+
            |attn_implementation|activation_checkpointing)
        | .*\b(tokenization_sanity_check_mode|tool_response_truncate_side|num_repeat_rollouts|agent\.\w+)
        | data\.(gen_batch_size|val_batch_size|validation_shuffle|filter_overlong_\w+
            |image_patch_size|output_path|n_samples)
        | data\.(num_workers|ignore_input_ids_mismatch|dataloader_\w+|\w*cache\w*)
        | trainer\.(?!v1|val_only|resume_from_path|checkpoint_callback).*
        | (actor_rollout_ref\.actor|critic)\.(data_loader_seed|checkpoint|strategy|enable|rollout_n)
        | critic\.(?!loss|optim|shuffle|model\.path|ppo_epochs|ppo_mini_batch_size|cliprange).*
        | actor_rollout_ref\.(ref|rollout\.mtp|rollout\.qat|rollout\.agent)\..*
        | reward\.(num_workers|reward_model\.(rollout\..*|n_gpus_per_node|nnodes
            |enable_resource_pool|num_workers)|reward_kwargs\.overlong_buffer_cfg\.log)
        | reward\.reward_manager\.module\.name | (reward\.)?sandbox_fusion\.(max_concurrent|memory_limit_mb)
        | reward_model\.(strategy|micro_\w+|max_length|forward_\w+|launch_reward_fn_async
            |n_gpus_per_node|nnodes|rollout\..*|model\.(fsdp_config|input_tokenizer
            |trust_remote_code|use_\w+)\S*)
        | distillation\.(n_gpus_per_node|nnodes|teacher_models\.\w+\.(inference\..*|num_replicas))
        | algorithm\.filter_groups\.max_inflight_gen_batches
        """,
    "openrlhf": r"""
        (ref|reward|critic|vllm|ds|ckpt|logger|deepspeed)\.\w+
        | (actor|critic|model)\.(num_\w+|gradient_checkpointing_\w+|save_\w+|offload|use_\w+)
        | train\.(colocate_\w+|full_determinism_enable|dynamic_batch_enable|\w+_max_tokens|use_\w+)
        | rollout\.(vllm_generate_batch_size|micro_batch_size|max_tokens_per_gpu)
        | data\.(dataloader_\w+|num_workers|\w*cache\w*) | local_rank | logger\..*
        | (load_checkpoint|save|use|disable|flash|grad|zero|bf16|vllm|colocate|packing|overlap
            |deepcompile)\w*
        | (ref|reward|critic|actor)_num_\w+
        | aux_loss_log | perf | ring_\w+ | logging_steps | full_determinism | ckpt_path | ds_\w+ 
            | universal_ckpt
        """,
    "trl": r"""
        (teacher_)?model_init_kwargs\..* | reward_processing_classes
        | (hub|push|log|logging|report|trackio|disable_tqdm|project|run|save|eval|debug|skip_memory)_?\w*
        | (dataloader|ddp|torch|tf32|fsdp_min|include|batch_eval|ignore_(data|bias)|label_names
            |length_column)_?\w*
        | (vllm_\w+|use_vllm|use_liger_kernel|use_cache|use_cpu|use_mps|use_transformers_\w+
            |transformers_cont\w+|cache_impl\w+)
        | (trust_remote_code|attn_implementation|ds3_gather_for_generation|pad_to_multiple_of
            |padding_free|packing\w*)
        | (eval_packing|dataset_num_proc|num_completions_to_print|precompute_ref_\w+
            |activation_offloading|padding_value)
        | (no_)?remove_unused_columns | (full_determinism|data_seed|accelerator_config\S*
            |restore_callback_\w+)
        | (bnb_4bit_\w+|use_bnb_nested_quant|teacher_model_revision|disable_dropout
            |cast_lm_head_to_fp32|gradient_checkpointing_kwargs\S*)
        | (do_(train|eval|predict)|local_rank|past_index|jit_mode_eval|bf16_full_eval
            |fp16_full_eval|prediction_loss_only)
        | (liger_kernel_config|auto_find_batch_size|enable_jit_checkpoint|dataset_streaming
            |streaming|is_encoder_decoder)
        | (generate_during_eval|num_generations_eval|metric_\w+|greater_is_better|request_timeout
            |weight_sync_\w+|heartbeat_\w+)
        | (queue_maxsize|max_inflight_tasks|fork_threshold_tokens|token_budget|processing_class
            |eval_dataset|args|peft\.(task_type|inference_mode)|lora_task_type|config)
        """,
}
"""System -> verbose regular expression of the keys that change no result."""


def changes_result(system: str, key: str, value: Any) -> tuple[bool, str]:
    """Return whether a key that no table has changes the result with this value, and what is here instead.

    A key that is not known counts as one that does, of the systems whose keys are listed here.
    """
    for effect in CHANGES.get(system, ()):
        if re.fullmatch(effect.keys, key):
            return value not in effect.neutral, effect.reason
    harmless = HARMLESS.get(system)
    if harmless is None or re.fullmatch(harmless, key, re.VERBOSE):
        return False, ""
    return True, UNKNOWN_KEY
