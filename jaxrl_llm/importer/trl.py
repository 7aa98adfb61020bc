"""Rules of TRL: batches in sequences, updates and epochs, losses, rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from jaxrl_llm.importer.fields import Conversion, System
from jaxrl_llm.importer.trl_fields import (
    DEFAULTS,
    DPO_LOSSES,
    LOSS_FIELDS,
    LOSSES,
    NO_DPO_LOSSES,
    REWARDS,
    SCHEDULES,
    SHAPING,
    TABLES,
)

ACCUMULATION, BATCH = "gradient_accumulation_steps", "per_device_train_batch_size"
LOWEST_RATIO = 1e-9  # of rollout over policy: no bound in practice
ALGORITHMS = {"reward": "reward_model"}
OPTIMIZERS = {"adafactor": "adafactor", "lion_32bit": "lion", "sgd": "sgd", "muon": "muon"}


def _sequences_per_update(conv: Conversion) -> int:
    """Return per-device batch x processes x accumulation, and note where the processes are assumed."""
    if conv.devices is None:
        conv.devices = 1
        conv.notes.append(
            f"the number of processes is not in the file: 1 is assumed, so that an update has {BATCH} x "
            f"{ACCUMULATION} sequences. import-config --devices N sets it"
        )
    return conv.get(BATCH) * conv.devices * conv.get(ACCUMULATION)


def _rules_of_rollouts(conv: Conversion) -> None:
    conv.algo = {"rloo": "rloo", "online_dpo": "online_dpo"}.get(conv.trainer, "grpo")
    if conv.trainer == "grpo":
        _grpo_loss(conv)
    elif conv.trainer == "rloo":
        conv.put("algo.kl_in", "reward", "beta")
        conv.put("algo.kl", "k1", note="TRL's RLOO")
        conv.put("algo.aggregation", "sequence_sum", note="TRL's RLOO")
        _clip(conv)
        if conv.get("normalize_advantages"):
            conv.put("algo.whiten", "unbiased", "normalize_advantages")
        if conv.get("reward_clip_range"):
            conv.put(
                "algo.reward_clip", tuple(map(float, conv.get("reward_clip_range"))), "reward_clip_range"
            )
    updates = _rollout_batch(conv)
    conv.put_tokens_per_device(conv.get(BATCH) * conv.row_tokens(), BATCH, note="x the tokens of a row")
    if not conv.is_set("max_prompt_length"):
        conv.notes.append(
            "TRL has no limit of prompts: max_prompt_tokens is 512; longer prompts are left out"
        )
    _rewards(conv)
    if conv.trainer == "grpo":
        _correction(conv)
        _off_policy_mask(conv)
    if options := conv.get("chat_template_kwargs"):
        options = options if isinstance(options, str) else json.dumps(options)
        conv.put("data.chat.template_options", options, "chat_template_kwargs")
    conv.put(
        "rollout.dtype", _dtype(conv), "bf16", "fp16", "dtype", note="TRL generates in the trainer's type"
    )
    _common(conv, updates)
    memory = conv.get("vllm_gpu_memory_utilization")
    conv.put_engine("use_vllm", "TRL's generation", conv.get("vllm_tensor_parallel_size") or 1, memory)


def _rollout_batch(conv: Conversion) -> int:
    """Set prompts and updates of a step; return the updates.

    A generation batch of B sequences is B / num_generations prompts, and is learned from in B / (sequences of
    an update) updates, num_iterations times.
    """
    per_update = _sequences_per_update(conv)
    micro_batch = conv.get(BATCH) * conv.devices
    size, steps = conv.get("generation_batch_size"), conv.get("steps_per_generation")
    size = size or micro_batch * (steps or conv.get(ACCUMULATION))
    n = conv.get("num_generations") or 2
    keys = [key for key in ("generation_batch_size", "steps_per_generation") if conv.is_set(key)]
    note = f"{size} sequences ({BATCH} {conv.get(BATCH)} x {conv.devices} processes x "
    note += f"{size // micro_batch} steps) / {n} generations"
    conv.put("prompts_per_step", max(size // n, 1), *keys, note=note)
    if size % n:
        conv.notes.append(f"{size} sequences of a generation are no multiple of {n}: TRL refuses this file")
    updates = conv.put_minibatches(max(size // n, 1) * n, per_update, ACCUMULATION, *keys, mixed=True)
    return updates * conv.get("num_iterations")


def _grpo_loss(conv: Conversion) -> None:
    loss = str(conv.get("loss_type"))
    if loss not in LOSSES:
        conv.drop("loss_type", "no such loss here; grpo's is used")
    conv.algo, aggregation = LOSSES.get(loss, LOSSES["grpo"])
    if conv.algo == "luspo" and conv.get("importance_sampling_level") != "sequence":
        level = conv.origin("importance_sampling_level")
        conv.notes.append(f"{level}: luspo's ratio here is that of the sequence, as in its paper")
    if conv.get("importance_sampling_level") == "sequence" and conv.algo == "grpo":
        conv.algo = "gspo"
    elif conv.get("multi_objective_aggregation") == "normalize_then_sum":
        conv.algo = "gdpo"
    conv.put("algo.aggregation", aggregation, "loss_type")
    if aggregation == "constant":
        constant = float(conv.value_of("max_response_tokens", 512))
        conv.put("algo.constant", constant, "loss_type", "max_completion_length")
    if conv.algo == "cispo":
        high = conv.get("epsilon_high") or conv.get("epsilon")
        conv.put(
            "algo.clip_high",
            max(high - 1, 0.0),
            "epsilon_high",
            "epsilon",
            note="TRL's bound of the ratio is 1 + this",
        )
        conv.put("algo.clip_low", 1.0, note="TRL's CISPO has no lower bound")
    else:
        _clip(conv)
    if conv.is_set("delta"):
        conv.drop(
            "delta", "TRL bounds the ratio from above; the dual clip here (--algo.dual_clip) is another rule"
        )
    for key, ours in LOSS_FIELDS.get(conv.algo, {}).items():
        conv.put(ours, conv.get(key), key)
    if conv.is_set("top_entropy_quantile"):
        note = "of the tokens of a step before its first update; TRL's are those of a micro-batch"
        conv.put("algo.top_entropy", conv.get("top_entropy_quantile"), "top_entropy_quantile", note=note)
    scale = str(conv.get("scale_rewards")).lower()
    names = {"false": "none", "none": "none", "batch": "batch_std"}
    conv.put("algo.scale", names.get(scale, "std"), "scale_rewards")


def _clip(conv: Conversion) -> None:
    if conv.algo in ("grpo", "gspo", "gdpo", "luspo", "rloo"):
        conv.put("algo.clip_low", conv.get("epsilon"), "epsilon")
        key = conv.first("epsilon_high", "epsilon")[0]
        conv.put("algo.clip_high", conv.get(key), key)


def _off_policy_mask(conv: Conversion) -> None:
    """Set the off-policy sequence mask of DeepSeek-V3.2.

    TRL drops a sequence of negative advantage where the mean over its tokens of rollout - policy is above the
    threshold, in nats; seq_mean_k1 is that mean, and its bounds are ratios.
    """
    key = "off_policy_mask_threshold"
    if not conv.is_set(key):
        return
    high = round(math.exp(conv.get(key)), 6)
    conv.put("algo.correction.reject", (("seq_mean_k1", LOWEST_RATIO, high),), key, note="exp(threshold)")
    conv.put("algo.correction.reject_only", "negative", key)
    if conv.value_of("algo.correction.weight", "none") == "none":
        conv.put("algo.correction.of", "policy", key)
    else:
        note = "before a step's updates, as the importance weights are; TRL masks in each update"
        conv.notes.append(f"{conv.origin(key)}: {note}")


def _correction(conv: Conversion) -> None:
    """Set the correction of vLLM's log-probs, which TRL applies where vLLM generates."""
    if not conv.get("use_vllm") or not conv.get("vllm_importance_sampling_correction"):
        return
    mode = "vllm_importance_sampling_mode"
    level, _, how = str(conv.get(mode)).partition("_")
    high = conv.first("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max")
    conv.put("algo.correction.weight", level, "vllm_importance_sampling_correction", mode)
    conv.put("algo.correction.cap", high[1] if high[1] is not None else float("inf"), high[0])
    conv.put("algo.correction.outside", "zero" if how == "mask" else "clip", mode)
    low = "vllm_importance_sampling_clip_min"
    if conv.is_set(low):
        conv.put("algo.correction.floor", conv.get(low), low)


def _rewards(conv: Conversion) -> None:
    functions = [name for name in conv.get("reward_funcs") or () if name]
    weights = [float(weight) for weight in conv.get("reward_weights") or ()] or [1.0] * len(functions)
    shaping, models, main = [], [], ""
    for name, weight in zip(functions, weights, strict=False):
        short = name.rpartition(".")[2]
        if short in SHAPING:
            shaping.append((SHAPING[short], weight))
        elif "/" in name and not name.endswith(".py") and ".py:" not in name:
            models.append((name, weight))
        elif not main:
            main = REWARDS.get(short) or _function(name)
            conv.put("reward.name", main, "reward_funcs")
            if weight != 1.0:
                conv.put("reward.weight", weight, "reward_weights")
        else:
            shaping.append((REWARDS.get(short) or _function(name), weight))
    for key in ("reward_model_name_or_path", "reward_model_path"):
        if conv.is_set(key):
            models.append((conv.get(key), 1.0))
    for i, (path, weight) in enumerate(models):
        conv.put(
            f"reward.models.{i}.path", path, "reward_funcs", "reward_model_name_or_path", "reward_model_path"
        )
        if weight != 1.0:
            conv.put(f"reward.models.{i}.weight", weight, "reward_weights")
    if models and not main:
        conv.put("reward.name", "none", note="reward models alone reward")
    if shaping:
        conv.put("reward.shaping", tuple(shaping), "reward_funcs", "reward_weights")
        if any(name == "overlong" for name, _ in shaping):
            conv.put("reward.overlong_from", 1024, note="TRL's get_soft_overlong_punishment")
            conv.put("reward.overlong_to", 1280, note="TRL's get_soft_overlong_punishment")


def _function(name: str) -> str:
    """Return module.function of Python as file.py:function."""
    if ":" in name or name.endswith(".py"):
        return name
    module, _, function = name.rpartition(".")
    return f"{module.replace('.', '/')}.py:{function}" if module else f"FILE.py:{name}"


def _rules_of_examples(conv: Conversion) -> None:
    conv.algo = ALGORITHMS.get(conv.trainer, conv.trainer)
    if conv.trainer == "dpo":
        _dpo_loss(conv)
    elif conv.trainer == "cpo":
        _cpo_loss(conv)
    elif conv.trainer == "kto" and conv.get("loss_type") == "apo_zero_unpaired":
        conv.drop("loss_type", "there is no apo_zero of single responses; kto is used")
    elif conv.trainer == "gkd":
        _gkd(conv)
    key, length = conv.first("max_seq_length", "max_length")
    if conv.trainer != "gkd":
        conv.put_lengths(length or 1024, key)
    if key == "max_length" and conv.trainer in ("sft", "dpo"):
        conv.put("data.overlong", "cut", "truncation_mode")
        side = "left" if conv.get("truncation_mode") == "keep_end" else "right"
        conv.put("data.cut_side", side, "truncation_mode")
    per_update = _sequences_per_update(conv)
    note = f"{BATCH} {conv.get(BATCH)} x {conv.devices} processes x {ACCUMULATION} {conv.get(ACCUMULATION)}"
    conv.put("prompts_per_step", per_update, note=note)
    conv.put_tokens_per_device(conv.get(BATCH) * conv.row_tokens(), BATCH, note="x the tokens of a row")
    _common(conv, 1)


def _dpo_loss(conv: Conversion) -> None:
    losses = list(conv.get("loss_type") or ("sigmoid",))
    weights = [float(weight) for weight in conv.get("loss_weights") or [1.0] * len(losses)]
    if "sft" in losses and len(losses) > 1:
        at = losses.index("sft")
        conv.put("algo.nll_coef", weights.pop(at) / (sum(weights) or 1.0), "loss_type", "loss_weights")
        losses.pop(at)
    known = [loss for loss in losses if loss in DPO_LOSSES]
    loss = known[0] if known else "sigmoid"
    reasons = [NO_DPO_LOSSES.get(name, f"there is no {name}") for name in losses if name not in DPO_LOSSES]
    reasons += ["there is one loss at a time"] * (len(known) > 1)
    if reasons:
        conv.drop("loss_type", f"{'; '.join(reasons)}; {loss} is used")
    conv.put("algo.loss", DPO_LOSSES[loss], "loss_type")
    if loss == "ipo":
        conv.put("algo.length_normalized", True, "loss_type", note="TRL's IPO averages over tokens")
    divergences = {"reverse_kl": "reverse_kl", "js_divergence": "js", "alpha_divergence": "alpha"}
    if conv.is_set("f_divergence_type"):
        name = str(conv.get("f_divergence_type"))
        conv.put("algo.divergence", divergences.get(name, name), "f_divergence_type")


def _cpo_loss(conv: Conversion) -> None:
    loss = conv.get("loss_type")
    if loss in ("simpo", "alphapo"):
        conv.algo = "simpo"
        conv.put("algo.gamma", conv.get("simpo_gamma"), "simpo_gamma")
        if loss == "alphapo":
            conv.put("algo.alpha", conv.get("alpha") or 0.0, "alpha")
    elif loss == "ipo":
        conv.drop("loss_type", "cpo has no ipo loss here; sigmoid is used")
    else:
        conv.put("algo.loss", loss, "loss_type")


def _gkd(conv: Conversion) -> None:
    if conv.get("lmbda") == 0:
        conv.algo = "distill"
        conv.put_lengths(conv.get("max_length") or 1024, "max_length")
    else:
        conv.put("rollout.sampling.temperature", conv.get("temperature"), "temperature")
        conv.put("max_response_tokens", conv.get("max_new_tokens"), "max_new_tokens")
        rest = max((conv.get("max_length") or 1024) - conv.get("max_new_tokens"), 1)
        conv.put("max_prompt_tokens", rest, "max_length", "max_new_tokens")
        conv.put("responses_per_prompt", 1, note="TRL's GKD")
        if conv.get("lmbda") != 1:
            conv.drop(
                "lmbda", "all responses are the student's own here (lmbda 1), or none (0: --algo distill)"
            )
    if conv.is_set("teacher_model_name_or_path"):
        conv.put("algo.teachers", (conv.get("teacher_model_name_or_path"),), "teacher_model_name_or_path")


def _dtype(conv: Conversion) -> str:
    if conv.get("fp16"):
        return "float16"
    name = conv.get("dtype")
    return "float32" if conv.is_set("bf16") and not conv.get("bf16") and name != "bfloat16" else "bfloat16"


def _common(conv: Conversion, updates: int) -> None:
    """Set what all trainers share; TRL counts steps in updates, a step here has `updates` of them."""
    conv.put("model.dtype", _dtype(conv), "bf16", "fp16", "dtype")
    total = conv.get("max_steps")
    if total and total > 0:
        note = f"/ {updates} updates a step" if updates > 1 else ""
        conv.put("steps", max(-(-total // updates), 1), "max_steps", note=note, stated=True)
    else:
        conv.put_steps("num_train_epochs", "")
    conv.put_schedule(SCHEDULES, "lr_scheduler_type")
    options = conv.get("lr_scheduler_kwargs")
    if isinstance(options, Mapping) and "min_lr_rate" in options:
        conv.put("optim.final_fraction", float(options["min_lr_rate"]), "lr_scheduler_kwargs")
    elif isinstance(options, Mapping) and "min_lr" in options:
        fraction = float(options["min_lr"]) / (conv.get("learning_rate") or 1.0)
        conv.put("optim.final_fraction", fraction, "lr_scheduler_kwargs")
    steps = conv.get("warmup_steps")
    if steps and steps < 1:  # of transformers 5
        conv.put("optim.warmup_ratio", steps, "warmup_steps")
    elif steps and not conv.get("warmup_ratio"):
        conv.put_warmup(round(steps), "warmup_steps")
    if conv.get("save_only_model"):
        conv.put("checkpoint.optimizer", False, "save_only_model")
    if conv.is_set("optim"):
        name = conv.get("optim")
        conv.put(
            "optim.name", next((ours for word, ours in OPTIMIZERS.items() if word in name), "adamw"), "optim"
        )
    for ours, every, strategy in (
        ("checkpoint.every", "save_steps", "save_strategy"),
        ("eval.every", "eval_steps", "eval_strategy"),
    ):
        _interval(conv, ours, every, strategy, updates)
    if conv.is_set("dataset_name"):
        conv.put_sources([conv.get("dataset_name")], "dataset_name")
        if conv.value_of("eval.every", 0):
            conv.put_sources([conv.get("dataset_name")], "dataset_name", "eval")
            conv.put("data.eval.0.split", conv.get("dataset_test_split") or "test", "dataset_test_split")
            if conv.is_set("dataset_config"):
                conv.put("data.eval.0.subset", conv.get("dataset_config"), "dataset_config")
    if conv.get("use_peft"):
        _lora(conv)
    for logger in ("wandb", "mlflow", "swanlab"):
        if logger in conv.get("report_to") or "all" in conv.get("report_to"):
            project = conv.get("project") or conv.get("run_name") or "huggingface"
            conv.put(f"log.{logger}", project, "report_to", "project", "run_name")
            if conv.is_set("run_name"):
                conv.put("log.name", conv.get("run_name"), "run_name")


def _interval(conv: Conversion, ours: str, every: str, strategy: str, updates: int) -> None:
    """Set steps between events, which TRL counts in updates; below 1 they are a ratio of max_steps."""
    interval, when = conv.get(every) or 500, str(conv.get(strategy))
    if interval < 1:
        interval = max(interval * (conv.get("max_steps") or 0), updates)
    interval = max(round(interval / updates), 1)
    if when == "no":
        conv.put(ours, 0, strategy)
    elif when == "epoch":
        conv.put(ours, 0, strategy, note="at the end alone: events are counted in steps")
    else:
        conv.put(ours, interval, every, note=f"/ {updates} updates a step" if updates > 1 else "")


def _lora(conv: Conversion) -> None:
    conv.put("lora.rank", conv.get("lora_r"), "use_peft", "lora_r")
    conv.put("lora.alpha", conv.get("lora_alpha"), "lora_alpha")
    targets, note = conv.get("lora_target_modules"), ""
    if not targets:
        targets, note = ("q_proj", "v_proj"), "peft's default for Llama, Qwen, Mistral and Gemma"
    conv.put("lora.targets", targets, "lora_target_modules", note=note)
    if conv.get("use_rslora"):
        conv.put("lora.rank_stabilized", True, "use_rslora")
    for key, kind in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if conv.get(key):
            conv.put("lora.quantize", kind, key)


ROLLOUT_TRAINERS = ("grpo", "rloo", "online_dpo")
SYSTEM = System(
    name="trl",
    title="TRL",
    tables=TABLES,
    defaults=DEFAULTS,
    rules={
        trainer: _rules_of_rollouts if trainer in ROLLOUT_TRAINERS else _rules_of_examples
        for trainer in TABLES
    },
    aliases={
        "torch_dtype": "dtype",
        "eval_batch_size": "per_device_eval_batch_size",
        "evaluation_strategy": "eval_strategy",
        "lora_rank": "lora_r",
    },
)
