"""Rules of TRL: batches in sequences, updates and epochs, losses, rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from jaxrl_import.fields import Conversion
from jaxrl_import.tables import load_system
from jaxrl_import.trl_data import put_data, put_rewards
from jaxrl_import.trl_losses import (
    off_policy_mask,
    rollout_correction,
    set_async_grpo,
    set_cpo,
    set_distillation,
    set_dpo,
    set_gkd,
    set_gmpo,
    set_grpo,
    set_online_dpo,
    set_prm,
    set_rloo,
    set_sft,
)
from jaxrl_import.trl_ppo import EPISODES, ppo_updates, put_models, put_ppo_schedule, set_ppo

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


ACCUMULATION, BATCH = "gradient_accumulation_steps", "per_device_train_batch_size"
ALGORITHMS = {"reward": "reward_model"}
OF_ROLLOUTS = {"rloo": "rloo", "online_dpo": "online_dpo", "gmpo": "gmpo", "distillation": "gkd"}
LOSSES_OF = {
    "grpo": set_grpo,
    "async_grpo": set_async_grpo,
    "gmpo": set_gmpo,
    "rloo": set_rloo,
    "online_dpo": set_online_dpo,
    "distillation": set_distillation,
    "dpo": set_dpo,
    "cpo": set_cpo,
    "gkd": set_gkd,
    "prm": set_prm,
    "sft": set_sft,
}
NO_LIMIT = "TRL has no limit of prompts: max_prompt_tokens is 512; longer prompts are left out"
COUPLED = ("rmsprop", "adagrad")
"""Optimizers whose weight decay torch adds to the gradient."""


def _sequences_per_update(conv: Conversion) -> int:
    """Return per-device batch x processes x accumulation, and note where the processes are assumed."""
    if conv.devices is None:
        conv.devices = 1
        conv.notes.append(
            f"the number of processes is not in the file: 1 is assumed, so that an update has {BATCH} x "
            f"{ACCUMULATION} sequences. import-config --devices N sets it"
        )
    return conv.get(BATCH) * conv.devices * conv.get(ACCUMULATION)


def _step_of_update(conv: Conversion) -> int:
    """Set the prompts of a step to the sequences of an update, and return their number."""
    count = _sequences_per_update(conv)
    note = f"{BATCH} {conv.get(BATCH)} x {conv.devices} processes x {ACCUMULATION} {conv.get(ACCUMULATION)}"
    conv.put("prompts_per_step", count, note=note)
    return count


def _rules_of_rollouts(conv: Conversion) -> None:
    conv.algo = OF_ROLLOUTS.get(conv.trainer, "grpo")
    LOSSES_OF[conv.trainer](conv)
    updates = _rollout_batch(conv)
    conv.put_rows_per_device(conv.get(BATCH), BATCH)
    if not conv.is_set("max_prompt_length"):
        conv.notes.append(NO_LIMIT)
    if conv.trainer != "distillation":
        put_rewards(conv)
    if conv.trainer == "grpo":
        rollout_correction(conv)
        off_policy_mask(conv)
    if conv.trainer == "rloo" and updates > 1:
        conv.lose("epsilon", "the clip is of a token's ratio; TRL's of the whole response's")
    if options := conv.get("chat_template_kwargs"):
        options = options if isinstance(options, str) else json.dumps(options)
        conv.put("data.chat.template_options", options, "chat_template_kwargs")
    conv.put(
        "rollout.dtype", _dtype(conv), "bf16", "fp16", "dtype", note="TRL generates in the trainer's type"
    )
    _common(conv, updates, conv.get("max_steps"))
    memory = conv.get("vllm_gpu_memory_utilization")
    conv.put_engine("use_vllm", "TRL's generation", conv.get("vllm_tensor_parallel_size") or 1, memory)


def _rules_of_ppo(conv: Conversion) -> None:
    """Set PPO: a step has one response to each prompt of a batch, and num_ppo_epochs passes over them."""
    conv.algo = "ppo"
    batch, episodes = _step_of_update(conv), conv.get(EPISODES)
    set_ppo(conv)
    updates = ppo_updates(conv)
    conv.put("responses_per_prompt", 1, note="TRL's PPO")
    conv.put_minibatches(batch, -(-batch // updates), ACCUMULATION)
    conv.put_rows_per_device(conv.get(BATCH), BATCH)
    conv.notes.append(NO_LIMIT)
    put_models(conv)
    conv.put(
        "rollout.dtype", _dtype(conv), "bf16", "fp16", "dtype", note="TRL generates in the trainer's type"
    )
    total = -(-episodes // batch) if episodes else None
    _common(conv, 1, total)
    put_ppo_schedule(conv, updates * conv.get("num_ppo_epochs"), total)
    conv.put_engine("", "TRL's generation", 1, None)


def _rollout_batch(conv: Conversion) -> int:
    """Set prompts and updates of a step; return the updates.

    A generation batch of B sequences is B / num_generations prompts, and is learned from in B / (sequences of
    an update) updates, num_iterations times.
    """
    per_update = _sequences_per_update(conv)
    micro_batch = conv.get(BATCH) * conv.devices
    size, steps = conv.get("generation_batch_size"), conv.get("steps_per_generation")
    size = size or micro_batch * (steps or conv.get(ACCUMULATION))
    n = 1 if conv.trainer == "distillation" else conv.get("num_generations") or 2
    keys = [key for key in ("generation_batch_size", "steps_per_generation") if conv.is_set(key)]
    note = f"{size} sequences ({BATCH} {conv.get(BATCH)} x {conv.devices} processes x "
    note += f"{size // micro_batch} steps) / {n} generations"
    conv.put("prompts_per_step", max(size // n, 1), *keys, note=note)
    if size % n:
        conv.notes.append(f"{size} sequences of a generation are no multiple of {n}: TRL refuses this file")
    updates = conv.put_minibatches(max(size // n, 1) * n, per_update, ACCUMULATION, *keys, mixed=True)
    return updates * (conv.get("num_iterations") or 1)


def _rules_of_examples(conv: Conversion) -> None:
    # The algorithm and its loss.
    conv.algo = ALGORITHMS.get(conv.trainer, conv.trainer)
    if conv.trainer in LOSSES_OF:
        LOSSES_OF[conv.trainer](conv)
    elif conv.trainer == "kto" and conv.get("loss_type") != "kto":
        conv.refuse("loss_type", "of single responses there is kto alone", instead="kto")
    if conv.trainer == "kto" and conv.get("train_sampling_strategy") == "sequential":
        conv.put("data.shuffle", False, "train_sampling_strategy")
    if conv.get("chat_template_path"):
        path = conv.get("chat_template_path")
        if path.endswith((".jinja", ".jinja2", ".j2")):
            conv.put("data.chat.chat_template", path, "chat_template_path")
        else:
            conv.lose(
                "chat_template_path", "--data.chat.chat_template takes a file, not a tokenizer's folder"
            )
    # Lengths, and the number of examples of an update.
    key, length = "max_length", conv.get("max_length") or 1024
    if conv.trainer != "gkd":
        conv.put_lengths(length, key)
    if key in conv.settings and not conv.is_set(key):
        conv.lose(key, f"rows have at most {length} tokens; there as many as they have")
    if conv.trainer in ("sft", "dpo"):
        conv.put("data.overlong", "cut", "truncation_mode")
        side = "left" if conv.get("truncation_mode") == "keep_end" else "right"
        conv.put("data.cut_side", side, "truncation_mode")
    _step_of_update(conv)
    conv.put_rows_per_device(conv.get(BATCH), BATCH)
    _common(conv, 1, conv.get("max_steps"))


def _dtype(conv: Conversion) -> str:
    if conv.get("fp16"):
        return "float16"
    name = conv.get("dtype")
    return "float32" if conv.is_set("bf16") and not conv.get("bf16") and name != "bfloat16" else "bfloat16"


def _common(conv: Conversion, updates: int, total: int | None) -> None:
    """Set what all trainers share; TRL counts `total` and intervals in updates, of which a step here has
    `updates`."""
    conv.put("model.dtype", _dtype(conv), "bf16", "fp16", "dtype")
    if conv.is_set("dtype") and conv.get("dtype") != "float32" and not conv.get("use_peft"):
        conv.lose("dtype", "trained weights are in float32; --model.dtype is the type of computing")
    revision, path = conv.get("model_revision"), conv.value_of("model.path", "")
    if revision not in (None, "main") and path:
        conv.put("model.path", f"{path}@{revision}", "model_name_or_path", "model", "model_revision")
    # The length of the run, its schedule, and its intervals.
    if total and total > 0:
        note = f"/ {updates} updates a step" if updates > 1 else ""
        conv.put("steps", max(-(-total // updates), 1), "max_steps", note=note, stated=True)
    else:
        conv.put_steps("num_train_epochs")
    conv.put_schedule("lr_scheduler_type")
    _end_of_schedule(conv)
    _warmup(conv, total)
    _optimizer(conv)
    if conv.get("save_only_model"):
        conv.put("checkpoint.optimizer", False, "save_only_model")
    for ours, every, strategy in (
        ("checkpoint.every", "save_steps", "save_strategy"),
        ("eval.every", "eval_steps", "eval_strategy"),
    ):
        _interval(conv, ours, every, strategy, updates=updates, total=total)
    put_data(conv)
    if conv.get("use_peft"):
        _lora(conv)
    for logger in ("wandb", "mlflow", "swanlab", "trackio"):
        if logger in conv.get("report_to") or "all" in conv.get("report_to"):
            project = conv.get("project") or conv.get("run_name") or "huggingface"
            conv.put(f"log.{logger}", project, "report_to", "project", "run_name")
            conv.copy_set("log.name", "run_name")


def _end_of_schedule(conv: Conversion) -> None:
    """Set the last learning rate where lr_scheduler_kwargs has it."""
    key = "lr_scheduler_kwargs"
    options = dict(conv.get(key)) if isinstance(conv.get(key), Mapping) else {}
    lowest = float(options.pop("min_lr", 0.0)) / (conv.get("learning_rate") or 1.0)
    fraction = float(options.pop("min_lr_rate", lowest))
    if fraction:
        conv.put("optim.final_fraction", fraction, key)
    if options:
        conv.lose(key, f"there is no {', '.join(map(str, options))}: --optim.schedule and .final_fraction")


def _warmup(conv: Conversion, total: int | None) -> None:
    """Set the warm-up, a number of updates or a ratio, which transformers rounds up; of "constant" none."""
    if conv.get("lr_scheduler_type") == "constant":
        return
    key, value = "warmup_steps", conv.get("warmup_steps")
    if not value:
        key, value = "warmup_ratio", conv.get("warmup_ratio")
    if value and value < 1 and not (total and total > 0):
        conv.put("optim.warmup_steps", value, key)
    elif value:
        note = f"of {total} updates, rounded up" if value < 1 else ""
        updates = math.ceil(total * value) if value < 1 else int(value)
        conv.put("optim.warmup_steps", updates, key, note=note)


def _optimizer(conv: Conversion) -> None:
    """Set the optimizer with what transformers fixes of it."""
    if not conv.is_set("optim"):
        return
    name = conv.get("optim").removeprefix("OptimizerNames.").lower()
    if name not in OPTIMIZERS:
        conv.refuse("optim", "there is no such optimizer", instead="adamw_torch")
    ours, fixed = OPTIMIZERS.get(name, ("adamw", {}))
    conv.put("optim.name", ours, "optim")
    for key, value in fixed.items():
        conv.put(f"optim.{key}", value, "optim", note=f"transformers' {name}")
    if ours in COUPLED and conv.get("weight_decay"):
        conv.lose(
            "weight_decay", f"it is decoupled from the gradient; torch's {name} adds it to the gradient"
        )
    if ours == "adafactor_unscaled":
        conv.notes.append(
            "adafactor: a step's RMS is bounded over all layers of a kind here, there per matrix"
        )


def _interval(
    conv: Conversion, ours: str, every: str, strategy: str, *, updates: int, total: int | None
) -> None:
    """Set steps between events, which TRL counts in updates; below 1 they are a ratio of `total`.

    Evaluation without an interval takes that of logging (transformers' TrainingArguments.__post_init__).
    """
    # Events that are not counted in steps.
    when = str(conv.get(strategy))
    if when == "no":
        conv.put(ours, 0, strategy)
        return
    if when == "epoch":
        conv.put(ours, 0, strategy, note="at the end alone: events are counted in steps")
        return
    # The interval in updates; as there, 0 saves no checkpoint before the last.
    keys, interval = [every], conv.get(every)
    if every == "eval_steps" and not interval:
        keys, interval = [every, "logging_steps"], conv.get("logging_steps")
    if interval and interval < 1:
        total = max(total or 0, 0)
        if not total:
            conv.notes.append(f"{keys[-1]} {interval} is a ratio of updates that are not known: {ours} is 1")
        interval = max(math.ceil(interval * total), updates)
    steps = max(round(interval / updates), 1) if interval else 0
    conv.put(ours, steps, *keys, note=f"/ {updates} updates a step" if updates > 1 else "")


def _lora(conv: Conversion) -> None:
    conv.put("lora.rank", conv.get("lora_r"), "use_peft", "lora_r")
    conv.copy("lora.alpha", "lora_alpha")
    if conv.get("lora_dropout"):
        conv.lose("lora_dropout", "adapters have no dropout")
    targets, note = conv.get("lora_target_modules"), ""
    if not targets:
        targets, note = ("q_proj", "v_proj"), "peft's default for Llama, Qwen, Mistral and Gemma"
    if not all(map(str.isidentifier, targets)):
        conv.lose("lora_target_modules", "--lora.targets has names of layers, no patterns; here all")
        targets = ("all",)
    conv.put("lora.targets", targets, "lora_target_modules", note=note)
    if conv.get("use_rslora"):
        conv.put("lora.rank_stabilized", True, "use_rslora")
    for key, kind in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if conv.get(key):
            conv.put("lora.quantize", kind, key)


ROLLOUT_TRAINERS = ("grpo", "async_grpo", "gmpo", "rloo", "online_dpo", "distillation")
EXAMPLE_TRAINERS = ("sft", "dpo", "kto", "reward", "orpo", "cpo", "gkd", "prm")
SYSTEM = load_system(
    "trl",
    "TRL",
    rules={
        **dict.fromkeys(ROLLOUT_TRAINERS, _rules_of_rollouts),
        **dict.fromkeys(EXAMPLE_TRAINERS, _rules_of_examples),
        "ppo": _rules_of_ppo,
    },
)
