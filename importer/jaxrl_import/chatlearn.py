"""ChatLearn: `python chatlearn/entrypoint.py grpo --config-file F runtime_args.a=b`, as keys here."""

from __future__ import annotations

import json

from jaxrl_import.fields import Conversion
from jaxrl_import.tables import load_system
from jaxrl_import.values import source_path

RUN_ID = "WANDB_RUN_ID in the environment"
NO_CAP = "the loss has no such bound; --algo.dual_clip bounds it where the advantage is negative"
ARGS, POLICY, TRAINER = "runtime_args", "models.policy", "models.policy_trainer"


def _rules_of_grpo(conv: Conversion) -> None:
    # The algorithm, with ChatLearn's fixed choices.
    conv.algo = "gspo" if conv.get(f"{TRAINER}.use_group_sequence_policy") else "grpo"
    conv.put("algo.advantage", "grpo", note="ChatLearn's only estimator")
    conv.put("algo.scale", "population_std", note="ChatLearn's standard deviation (numpy)")
    conv.put("algo.aggregation", "token", note="ChatLearn's mean over tokens")
    conv.put("algo.kl", "k3", note="ChatLearn's estimator")
    conv.lose(f"{TRAINER}.final_clip_ratio", NO_CAP)
    if conv.get(f"{ARGS}.train_backend") == "megatron" and conv.is_set(f"{POLICY}.load"):
        note = "the Hugging Face folder; models.policy_trainer.load is Megatron's"
        conv.copy("model.path", f"{POLICY}.load", note=note)
    reference = conv.get("models.ref_policy.load")
    if reference and reference not in (conv.value_of("model.path", ""), conv.get(f"{TRAINER}.load")):
        conv.put("reference.path", reference, "models.ref_policy.load")
    # Sizes and the mesh.
    _batches(conv)
    conv.copy("steps", f"{ARGS}.num_episode", stated=True)
    conv.devices = conv.devices or conv.get(f"{TRAINER}.num_gpu")
    sequence = conv.first(f"{TRAINER}.context_parallel_size", f"{TRAINER}.ulysses_sequence_parallel_size")
    conv.put_mesh(
        conv.first(f"{TRAINER}.tensor_model_parallel_size"),
        sequence,
        ulysses="ulysses" in sequence[0],
        stage=conv.first(f"{TRAINER}.pipeline_model_parallel_size"),
    )
    if conv.get(f"{TRAINER}.packing"):
        key = f"{TRAINER}.max_token_in_packing"
        conv.put_tokens_per_device(conv.get(key), key)
    else:
        key = f"{ARGS}.train_micro_batch_size"
        conv.put_rows_per_device(conv.get(key), key)
    # Memory, the learning rate, data and rollout.
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
    names = ("tensor_model_parallel_size", "gpu_memory_utilization")
    tensor, memory = (conv.get(f"{POLICY}.{name}") for name in names)
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
    conv.put_weights(conv.get(f"{ARGS}.data_ratio") or (), f"{ARGS}.data_ratio")
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
        conv.copy_set("log.name", f"{wandb}.wandb_name")
        conv.drop(f"{wandb}.wandb_id", RUN_ID)


SYSTEM = load_system("chatlearn", "ChatLearn", rules={"grpo": _rules_of_grpo})
