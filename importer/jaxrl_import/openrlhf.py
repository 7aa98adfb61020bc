"""OpenRLHF: `python3 -m openrlhf.cli.train_ppo_ray --a.b c` and its SFT, DPO and reward-model trainers."""

from __future__ import annotations

from jaxrl_import.fields import NO_CLIP, OTHER_MUON, Conversion
from jaxrl_import.tables import load_system
from jaxrl_import.values import source_path

ESTIMATORS = {  # estimator -> algorithm, advantage, scale
    "gae": ("ppo", "gae", "std"),
    "reinforce": ("reinforce_pp", "reinforce_pp", "std"),
    "reinforce_baseline": ("reinforce_pp", "reinforce_pp_baseline", "std"),
    "rloo": ("rloo", "rloo", "std"),
    "group_norm": ("grpo", "grpo", "std"),
    "dr_grpo": ("grpo", "grpo", "none"),
    "flash_reinforce": ("grpo", "reinforce", "none"),  # reward - the batch's mean, in PPO's clip
}
ADVANTAGE, KL = "algo.advantage", "algo.kl"


def _rules_of_ppo(conv: Conversion) -> None:
    _algorithm(conv)
    _lengths(conv)
    conv.devices = conv.devices or (conv.get("actor.num_nodes") or 1) * (
        conv.get("actor.num_gpus_per_node") or 8
    )
    # Sizes and optimizers; only PPO has a critic.
    prompts, n = conv.get("rollout.batch_size"), conv.get("rollout.n_samples_per_prompt")
    conv.put_minibatches(
        prompts * n,
        conv.get("train.batch_size"),
        "rollout.batch_size",
        "rollout.n_samples_per_prompt",
        "train.batch_size",
        mixed=True,
    )
    conv.copy("ppo_epochs", "train.max_epochs")
    _limit_rows(conv)
    conv.put_steps("train.num_episodes")
    _optimizer(conv, "actor.", "optim")
    if conv.algo == "ppo":
        _optimizer(conv, "critic.", "critic.optim")
        conv.copy("critic.loss.value_clip", "critic.value_clip")
        if conv.get("critic.freezing_steps"):
            conv.copy("critic.warmup_steps", "critic.freezing_steps")
        _critic_path(conv)
    else:
        conv.drop_critic()
    # Rewards and data, then the rollout.
    _rewards(conv)
    conv.put_sources(map(source_path, conv.get("data.prompt_dataset") or ()), "data.prompt_dataset")
    _common(conv)
    if conv.get("train.async_enable") and conv.assumed.engine == "sglang":
        staleness = conv.get("train.async_queue_size")
        conv.put("rollout.max_staleness", staleness, "train.async_enable", "train.async_queue_size")
    elif conv.get("train.async_enable"):
        conv.lose("train.async_enable", "responses are of the newest weights: docs/asynchronous.md")
    conv.copy("rollout.dtype", "ds.param_dtype")
    tensor = conv.get("vllm.tensor_parallel_size")
    conv.put_engine("vllm.num_engines", "vLLM", tensor, conv.get("vllm.gpu_memory_utilization"))


def _algorithm(conv: Conversion) -> None:
    estimator, loss = f"{ADVANTAGE}.estimator", "actor.policy_loss_type"
    # Estimator and loss; GSPO decides its aggregation.
    name = str(conv.get(estimator))
    if name not in ESTIMATORS:
        conv.refuse(estimator, "there is no such estimator", instead="gae")
    conv.algo, advantage, scale = ESTIMATORS.get(name, ESTIMATORS["gae"])
    key, note = "actor.loss_agg_mode", ""
    aggregation = "sequence" if conv.get(key) == "seq-mean-token-mean" else "token"
    if conv.get(loss) == "gspo":
        conv.algo, aggregation, note = "gspo", "sequence", "OpenRLHF's GSPO is a mean over sequences"
    elif conv.get(loss) != "ppo":
        conv.refuse(loss, "there is no such loss", instead="ppo")
    conv.put("algo.advantage", advantage, estimator)
    if advantage in ("grpo", "reinforce"):
        conv.put("algo.scale", scale, estimator)
    conv.put("algo.aggregation", aggregation, loss, key, note=note)
    # Clip, and settings without counterpart.
    low_high = conv.get("actor.eps_clip_low_high")
    key = "actor.eps_clip_low_high" if low_high else "actor.eps_clip"
    low, high = low_high or [conv.get("actor.eps_clip")] * 2
    conv.put("algo.clip_low", low, key)
    conv.put("algo.clip_high", high, key)
    if conv.is_set("reward.clip_range"):
        conv.lose("reward.clip_range", NO_CLIP)
    else:
        conv.notes.append(f"{conv.origin('reward.clip_range')}: {NO_CLIP}")
    if conv.get(f"{ADVANTAGE}.no_std_norm") and name in ("gae", "reinforce", "reinforce_baseline"):
        conv.lose(f"{ADVANTAGE}.no_std_norm", "advantages are whitened with their deviation, or not at all")
    if conv.get("reward.normalize_enable"):
        reason = "--reward.models.0.mean, and 1 / std as its weight, both of the reward model's config.json"
        conv.lose("reward.normalize_enable", reason)
    if tuple(conv.get("algo.dynamic_filtering_range")) != (0, 1):
        reason = "groups of equal rewards are dropped; those with a mean outside a range are not"
        conv.lose("algo.dynamic_filtering_range", reason)
    _kl(conv)
    _correction(conv)


def _kl(conv: Conversion) -> None:
    """Set the place of the KL, and its estimator, with the gradient of k2 if it should be unbiased."""
    in_loss, unbiased = f"{KL}.use_loss", f"{KL}.unbiased_gradient"
    conv.put("algo.kl_in", "loss" if conv.get(in_loss) else "reward", in_loss)
    estimator = conv.get(f"{KL}.estimator")
    if conv.get(unbiased) and conv.get(in_loss) and estimator in ("k1", "k3"):
        conv.put("algo.kl", f"{estimator}+", f"{KL}.estimator", unbiased)
    if conv.get(unbiased) and conv.get(in_loss):
        conv.lose(unbiased, "from a step's second update on, its gradient is weighed by policy / old there")


def _correction(conv: Conversion) -> None:
    """Set weights and rejection for vLLM's log-probs: levels and gates, or the kinds of version 0.11.0."""
    names = ("level", "mode", "gating", "threshold", "type", "enable")
    level, mode, gating, threshold, kind, old = (f"{ADVANTAGE}.is_correction_{name}" for name in names)
    # Bounds, and their kind by version.
    bounds = conv.get(threshold)
    low, high = bounds if len(bounds) == 2 else (0.0, bounds[0])
    if conv.get(old):
        sequence, clip = conv.get(kind) == "seq-mask-tis", conv.get(kind) == "tis"
        gate, keys = "ratio", (old, kind, threshold)
    elif conv.get(level) != "off":
        sequence, clip = conv.get(level) == "seq", conv.get(mode) == "clip"
        gate, keys = conv.get(gating), (level, mode, gating, threshold)
    else:
        return
    if conv.algo == "gspo":
        conv.put("algo.old", "rollout", *keys, note="OpenRLHF's GSPO: policy / rollout, without a weight")
        return
    group = "algo.correction"
    conv.put(f"{group}.weight", "token", *keys)
    if gate == "ratio" and not sequence:
        conv.put(f"{group}.floor", low, threshold)
        conv.put(f"{group}.cap", high, threshold)
        conv.put(f"{group}.outside", "clip" if clip else "zero", *keys)
        return
    conv.put(f"{group}.cap", float("inf"), *keys, note="weights are not clipped")
    rule, bounds = f"{'seq_mean' if sequence else 'token'}_{gate}", (low, high)
    if gate == "ratio":  # there bounds of old / rollout, here of rollout / old
        rule, bounds = "seq_mean_k1", (1 / (high or 1.0), 1 / (low or 1e-6))
    conv.put(f"{group}.reject", ((rule, *bounds),), *keys)


def _lengths(conv: Conversion) -> None:
    total, response = conv.get("data.max_len"), conv.get("rollout.max_new_tokens")
    if conv.is_set("prompt_max_len"):
        conv.put("max_response_tokens", response or 1024, "rollout.max_new_tokens")
    elif response and response < total:
        conv.put("max_response_tokens", response, "rollout.max_new_tokens")
        conv.put("max_prompt_tokens", total - response, "data.max_len", "rollout.max_new_tokens")
    else:
        conv.put_lengths(total, "data.max_len")
        conv.notes.append(
            "OpenRLHF lets a response take all that its prompt leaves of data.max_len; here half"
        )


def _limit_rows(conv: Conversion) -> None:
    limit = conv.get("data.max_samples")
    if limit and limit < 10**6:
        conv.lose("data.max_samples", "all rows of the files are used: cut the files")


def _critic_path(conv: Conversion) -> None:
    """Set the critic's start: unless given, a reward model's weights."""
    path, key = conv.get("critic.model_name_or_path"), "critic.model_name_or_path"
    if not path and not conv.is_set("reward.remote_url") and conv.is_set("reward.model_name_or_path"):
        path, key = conv.get("reward.model_name_or_path")[0], "reward.model_name_or_path"
    if path:
        conv.put(
            "critic.path", path, key, note="there the critic starts from it, too" if "reward" in key else ""
        )


def _rewards(conv: Conversion) -> None:
    urls = conv.get("reward.remote_url") or ()
    for url in urls[:1]:
        function = f"{url}:reward_func" if url.endswith(".py") else url
        conv.put("reward.name", function, "reward.remote_url")
    models = conv.get("reward.model_name_or_path") or ()
    for i, path in enumerate(models if not urls else ()):
        conv.put(f"reward.models.{i}.path", path, "reward.model_name_or_path")
        conv.put("reward.name", "none", "reward.model_name_or_path", note="reward models alone reward")
    if length := conv.get("reward.overlong_buffer_len"):
        longest = conv.value_of("max_response_tokens", 1024)
        factor = conv.get("reward.overlong_penalty_factor")
        conv.put("reward.shaping", (("overlong", factor),), "reward.overlong_penalty_factor")
        conv.put("reward.overlong_to", longest, "reward.overlong_buffer_len")
        conv.put("reward.overlong_from", int(longest - length), "reward.overlong_buffer_len")


def _rules_of_examples(conv: Conversion) -> None:
    conv.algo = {"sft": "sft", "dpo": "dpo", "rm": "reward_model"}[conv.trainer]
    if conv.trainer == "dpo" and conv.get("model.ipo_enable"):
        conv.put("algo.loss", "ipo", "model.ipo_enable")
    conv.put_lengths(conv.get("data.max_len"), "data.max_len")
    _limit_rows(conv)
    conv.put_steps("train.max_epochs")
    _optimizer(conv, "", "optim")
    conv.put_sources(map(source_path, conv.get("data.dataset") or ()), "data.dataset")
    if conv.get("data.apply_chat_template"):
        conv.results.pop("data.train.0.input_template", None)
    _common(conv)


def _optimizer(conv: Conversion, group: str, ours: str) -> None:
    name = conv.get(f"{group}optim")
    if name == "muon":
        conv.put(f"{ours}.name", "muon", f"{group}optim")
        conv.put(f"{ours}.learning_rate", conv.get(f"{group}muon.lr") or 0.02, f"{group}muon.lr")
        conv.lose(f"{group}muon.lr", OTHER_MUON)
    elif name != "adam":
        conv.refuse(f"{group}optim", "there is no such optimizer", instead="adam")
    conv.put_schedule(f"{group}lr_scheduler", ours)
    if conv.get(f"{group}lr_scheduler") == "cosine_with_min_lr":
        conv.copy(f"{ours}.final_fraction", f"{group}min_lr_ratio")
    for beta, value in zip(("b1", "b2"), conv.get(f"{group}adam.betas"), strict=False):
        conv.put(f"{ours}.{beta}", float(value), f"{group}adam.betas")
    if name == "muon":
        momentum = f"{group}muon.momentum"
        conv.put(f"{ours}.b1", conv.get(momentum) or 0.95, momentum, note="Muon's; also of its AdamW here")


def _common(conv: Conversion) -> None:
    conv.copy("model.dtype", "ds.param_dtype")
    if conv.get("train.enable_ema"):
        conv.put("optim.ema", conv.get("train.ema_beta"), "train.enable_ema", "train.ema_beta")
    conv.put_mesh(conv.first("ds.tensor_parallel_size"), conv.first("ds.ring_attn_size"), ulysses=False)
    if conv.get("train.dynamic_batch_enable") and conv.get("train.max_tokens_per_gpu"):
        conv.put_tokens_per_device(conv.get("train.max_tokens_per_gpu"), "train.max_tokens_per_gpu")
    else:
        conv.put_rows_per_device(conv.get("train.micro_batch_size") or 1, "train.micro_batch_size")
    # Data, adapters and loggers.
    probs = conv.get("data.prompt_probs") or conv.get("data.dataset_probs") or ()
    conv.put_weights(probs, *({"data.prompt_probs", "data.dataset_probs"} & set(conv.table)))
    if conv.get("data.apply_chat_template"):
        conv.put("data.chat.render", "chat", "data.apply_chat_template")
    if conv.is_set("eval.dataset"):
        conv.put_sources(map(source_path, conv.get("eval.dataset")), "eval.dataset", "eval")
        conv.copy("data.eval.0.split", "eval.split")
    if conv.is_set("data.tokenizer_chat_template"):
        conv.lose("data.tokenizer_chat_template", "--data.chat.chat_template FILE: put the text into a file")
    if conv.value_of("lora.rank", 0):
        conv.copy("lora.alpha", "ds.lora.alpha")
        conv.copy("lora.targets", "ds.lora.target_modules")
        if conv.get("ds.load_in_4bit"):
            conv.put("lora.quantize", "nf4", "ds.load_in_4bit")
    if conv.is_set("logger.wandb.key"):
        conv.copy("log.wandb", "logger.wandb.project")
        conv.copy_set("log.name", "logger.wandb.run_name")


SYSTEM = load_system(
    "openrlhf",
    "OpenRLHF",
    rules={"ppo": _rules_of_ppo, **dict.fromkeys(("sft", "dpo", "rm"), _rules_of_examples)},
)
