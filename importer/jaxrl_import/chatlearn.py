"""ChatLearn: `python chatlearn/entrypoint.py grpo --config-file F runtime_args.a=b`, as keys here."""

from __future__ import annotations

import json
from typing import Any

from jaxrl_import.fields import RUN_NAME, Conversion, Field, System
from jaxrl_import.values import (
    count,
    count_or_never,
    device_count,
    items,
    name_text,
    number,
    number_list,
    remat,
    source_path,
    switch,
    text,
    top_k,
    whole_number,
)

RUN_ID = "WANDB_RUN_ID in the environment"
NO_CAP = "the loss has no such bound; --algo.dual_clip bounds it where the advantage is negative"
ARGS, POLICY, TRAINER = "runtime_args", "models.policy", "models.policy_trainer"
GRPO: dict[str, Field] = {
    f"{ARGS}.num_episode": Field("", whole_number, "--steps"),
    f"{ARGS}.sample_per_episode": Field("", count, "--prompts_per_step x --responses_per_prompt"),
    f"{ARGS}.train_global_batch_size": Field("", count, "--minibatches_per_step"),
    f"{ARGS}.train_micro_batch_size": Field("", count, "--tokens_per_device, in tokens"),
    f"{ARGS}.num_inference_per_prompt": Field("", count, "--responses_per_prompt"),
    f"{ARGS}.num_training_epoch": Field("ppo_epochs", count),
    f"{ARGS}.save_episode_interval": Field("checkpoint.every", count_or_never),
    f"{ARGS}.eval_episode_interval": Field("eval.every", count_or_never),
    f"{ARGS}.data_path": Field("", items, "--data.path"),
    f"{ARGS}.eval_data_path": Field("", items, "--data.eval_path"),
    f"{ARGS}.data_shuffle": Field("data.shuffle", switch),
    f"{ARGS}.data_ratio": Field("", number_list, "--data.train.0.weight"),
    f"{ARGS}.output_dir": Field("", name_text, "--run_dir"),
    f"{ARGS}.exp_name": Field("", name_text, RUN_NAME),
    f"{ARGS}.train_backend": Field("", text, "one trainer: sharded by --mesh.fsdp and --mesh.tensor"),
    f"{ARGS}.rollout_backend": Field("", text, "--rollout.engine"),
    f"{ARGS}.log_args_dict.enable_wandb": Field("", switch, "--log.wandb PROJECT"),
    f"{ARGS}.log_args_dict.wandb_project": Field("", name_text, "--log.wandb PROJECT"),
    f"{ARGS}.log_args_dict.wandb_name": Field("", name_text, "--log.name"),
    f"{ARGS}.log_args_dict.wandb_id": Field("", name_text, RUN_ID),
    f"{ARGS}.log_args_dict.enable_tensorboard": Field("", switch, "--log.tensorboard"),
    f"{TRAINER}.load": Field("model.path", text),
    f"{TRAINER}.seed": Field("seed", whole_number),
    f"{TRAINER}.optimizer.lr": Field("optim.learning_rate", number),
    f"{TRAINER}.optimizer.min_lr": Field("", number, "--optim.final_fraction"),
    f"{TRAINER}.optimizer.clip_grad": Field("optim.max_grad_norm", number),
    f"{TRAINER}.optimizer.weight_decay": Field("optim.weight_decay", number),
    f"{TRAINER}.optimizer.adam_beta1": Field("optim.b1", number),
    f"{TRAINER}.optimizer.adam_beta2": Field("optim.b2", number),
    f"{TRAINER}.gradient_checkpointing": Field("model.remat", remat),
    f"{TRAINER}.recompute_granularity": Field("", text, "--model.remat"),
    f"{TRAINER}.num_gpu": Field("", device_count, "all devices that are visible are used"),
    f"{TRAINER}.fsdp_size": Field("", device_count, "--mesh.fsdp"),
    f"{TRAINER}.ulysses_sequence_parallel_size": Field("", whole_number, "--mesh.sequence"),
    f"{TRAINER}.tensor_model_parallel_size": Field("", whole_number, "--mesh.tensor"),
    f"{TRAINER}.context_parallel_size": Field("", whole_number, "--mesh.sequence"),
    f"{TRAINER}.packing": Field("", switch, "rows are always packed"),
    f"{TRAINER}.max_token_in_packing": Field("", count, "--tokens_per_device"),
    f"{TRAINER}.pos_clip_ratio": Field("algo.clip_high", number),
    f"{TRAINER}.neg_clip_ratio": Field("algo.clip_low", number),
    f"{TRAINER}.final_clip_ratio": Field("", number, "--algo.dual_clip"),
    f"{TRAINER}.entropy_coef": Field("algo.entropy_coef", number),
    f"{TRAINER}.kl_coef": Field("algo.kl_coef", number),
    f"{TRAINER}.use_group_sequence_policy": Field("", switch, "--algo gspo"),
    f"{POLICY}.load": Field("", text, "--model.path"),
    f"{POLICY}.num_inference_per_prompt": Field("", count, "--responses_per_prompt"),
    f"{POLICY}.max_prompt_tokens_length": Field("max_prompt_tokens", count),
    f"{POLICY}.max_response_tokens_length": Field("max_response_tokens", count),
    f"{POLICY}.temperature": Field("rollout.sampling.temperature", number),
    f"{POLICY}.top_p": Field("rollout.sampling.top_p", number),
    f"{POLICY}.top_k": Field("rollout.sampling.top_k", top_k),
    f"{POLICY}.eval_temperature": Field("eval.sampling.temperature", number),
    f"{POLICY}.eval_top_p": Field("eval.sampling.top_p", number),
    f"{POLICY}.eval_top_k": Field("eval.sampling.top_k", top_k),
    f"{POLICY}.enable_thinking": Field("", switch, "--data.chat.template_options"),
    f"{POLICY}.tensor_model_parallel_size": Field("", count, "--sglang.flags, of servers"),
    f"{POLICY}.gpu_memory_utilization": Field("", number, "--sglang.flags, of servers"),
    f"{POLICY}.vllm_prompt_key": Field("data.train.0.prompt_key", text),
    "models.ref_policy.load": Field("", text, "the reference is the policy's start"),
    "models.ref_policy.free_gpu_memory.offload_weights": Field("reference.offload", switch),
}
DEFAULTS: dict[str, Any] = {
    f"{ARGS}.num_episode": 200,
    f"{ARGS}.sample_per_episode": 512,
    f"{ARGS}.train_global_batch_size": 512,
    f"{ARGS}.train_micro_batch_size": 8,
    f"{ARGS}.num_inference_per_prompt": 32,
    f"{ARGS}.num_training_epoch": 1,
    f"{ARGS}.save_episode_interval": 200,
    f"{ARGS}.eval_episode_interval": 0,
    f"{ARGS}.exp_name": "CHATLEARN",
    f"{ARGS}.rollout_backend": "vllm",
    f"{ARGS}.log_args_dict.enable_wandb": False,
    f"{ARGS}.log_args_dict.enable_tensorboard": False,
    f"{TRAINER}.optimizer.lr": 2e-6,
    f"{TRAINER}.optimizer.clip_grad": 1.0,
    f"{TRAINER}.optimizer.weight_decay": 0.01,
    f"{TRAINER}.optimizer.adam_beta2": 0.95,
    f"{TRAINER}.gradient_checkpointing": True,
    f"{TRAINER}.num_gpu": 1,
    f"{TRAINER}.packing": False,
    f"{TRAINER}.max_token_in_packing": 32768,
    f"{TRAINER}.pos_clip_ratio": 0.2,
    f"{TRAINER}.neg_clip_ratio": 0.2,
    f"{TRAINER}.final_clip_ratio": 3.0,
    f"{TRAINER}.entropy_coef": 0.0,
    f"{TRAINER}.kl_coef": 0.0,
    f"{TRAINER}.use_group_sequence_policy": False,
    f"{POLICY}.max_prompt_tokens_length": 1024,
    f"{POLICY}.max_response_tokens_length": 2048,
    f"{POLICY}.temperature": 1.0,
    f"{POLICY}.eval_temperature": 0.6,
    f"{POLICY}.eval_top_p": 0.95,
    f"{POLICY}.eval_top_k": 20,
    f"{POLICY}.enable_thinking": False,
    f"{POLICY}.tensor_model_parallel_size": 1,
    f"{POLICY}.gpu_memory_utilization": 0.8,
}


def _rules_of_grpo(conv: Conversion) -> None:
    conv.algo = "gspo" if conv.get(f"{TRAINER}.use_group_sequence_policy") else "grpo"
    conv.put("algo.advantage", "grpo", note="ChatLearn's only estimator")
    conv.put("algo.scale", "population_std", note="ChatLearn's standard deviation (numpy)")
    conv.put("algo.aggregation", "token", note="ChatLearn's mean over tokens")
    conv.put("algo.kl", "k3", note="ChatLearn's estimator")
    conv.lose(f"{TRAINER}.final_clip_ratio", NO_CAP)
    if conv.get(f"{ARGS}.train_backend") == "megatron" and conv.is_set(f"{POLICY}.load"):
        note = "the Hugging Face folder; models.policy_trainer.load is Megatron's"
        conv.put("model.path", conv.get(f"{POLICY}.load"), f"{POLICY}.load", note=note)
    reference = conv.get("models.ref_policy.load")
    if reference and reference not in (conv.value_of("model.path", ""), conv.get(f"{TRAINER}.load")):
        conv.put("reference.path", reference, "models.ref_policy.load")
    _batches(conv)
    conv.put("steps", conv.get(f"{ARGS}.num_episode"), f"{ARGS}.num_episode", stated=True)
    conv.devices = conv.devices or conv.get(f"{TRAINER}.num_gpu")
    sequence = conv.first(f"{TRAINER}.context_parallel_size", f"{TRAINER}.ulysses_sequence_parallel_size")
    conv.put_mesh(
        conv.first(f"{TRAINER}.tensor_model_parallel_size"), sequence, ulysses="ulysses" in sequence[0]
    )
    if conv.get(f"{TRAINER}.packing"):
        key = f"{TRAINER}.max_token_in_packing"
        conv.put_tokens_per_device(conv.get(key), key)
    else:
        key = f"{ARGS}.train_micro_batch_size"
        conv.put_tokens_per_device(conv.get(key) * conv.row_tokens(), key, note="x the tokens of a row")
    if conv.is_set(f"{TRAINER}.recompute_granularity"):
        kind = conv.get(f"{TRAINER}.recompute_granularity")
        conv.put("model.remat", "full" if kind == "full" else "attention", f"{TRAINER}.recompute_granularity")
    rates = conv.get(f"{TRAINER}.optimizer.min_lr"), conv.get(f"{TRAINER}.optimizer.lr")
    if rates[0] is not None and rates[0] < rates[1]:
        conv.drop(f"{TRAINER}.optimizer.min_lr", "the rate is constant here, unless optim.schedule is set")
    conv.put("rollout.dtype", "bfloat16", note="ChatLearn's type")
    _data(conv)
    _outputs(conv)
    backend = f"{ARGS}.rollout_backend"
    tensor, memory = (
        conv.get(f"{POLICY}.tensor_model_parallel_size"),
        conv.get(f"{POLICY}.gpu_memory_utilization"),
    )
    conv.put_engine(backend, str(conv.get(backend)), tensor, memory)


def _batches(conv: Conversion) -> None:
    """Set prompts, responses and updates from the samples of an episode and of an update."""
    samples, batch = f"{ARGS}.sample_per_episode", f"{ARGS}.train_global_batch_size"
    responses, n = conv.first(f"{POLICY}.num_inference_per_prompt", f"{ARGS}.num_inference_per_prompt")
    conv.put("responses_per_prompt", n, responses)
    prompts = max(conv.get(samples) // n, 1)
    conv.put("prompts_per_step", prompts, samples, responses, note="samples / responses")
    conv.put_minibatches(prompts * n, conv.get(batch), samples, batch)


def _data(conv: Conversion) -> None:
    for key, split in ((f"{ARGS}.data_path", "train"), (f"{ARGS}.eval_data_path", "eval")):
        if conv.is_set(key):
            conv.put_sources(map(source_path, conv.get(key)), key, split)
    for i, ratio in enumerate(conv.get(f"{ARGS}.data_ratio") or ()):
        if f"data.train.{i}.path" in conv.results:
            conv.put(f"data.train.{i}.weight", float(ratio), f"{ARGS}.data_ratio")
    options = {"enable_thinking": conv.get(f"{POLICY}.enable_thinking")}
    conv.put("data.chat.template_options", json.dumps(options), f"{POLICY}.enable_thinking")


def _outputs(conv: Conversion) -> None:
    folder, name = f"{ARGS}.output_dir", f"{ARGS}.exp_name"
    if conv.is_set(folder):
        conv.put("run_dir", conv.get(folder) or "runs/chatlearn", folder)
    else:
        conv.put("run_dir", f"runs/{conv.get(name)}", name)
    wandb = f"{ARGS}.log_args_dict"
    if conv.get(f"{wandb}.enable_wandb"):
        project = conv.get(f"{wandb}.wandb_project") or "chatlearn"
        conv.put("log.wandb", project, f"{wandb}.enable_wandb", f"{wandb}.wandb_project")
        if conv.is_set(f"{wandb}.wandb_name"):
            conv.put("log.name", conv.get(f"{wandb}.wandb_name"), f"{wandb}.wandb_name")
        conv.drop(f"{wandb}.wandb_id", RUN_ID)


SYSTEM = System(
    name="chatlearn",
    title="ChatLearn",
    tables={"grpo": GRPO},
    defaults={"grpo": DEFAULTS},
    rules={"grpo": _rules_of_grpo},
    aliases={},
)
