"""veRL: `python3 -m verl.trainer.main_ppo a.b=c` and its SFT trainers, as keys here."""

from __future__ import annotations

import json
from collections.abc import Mapping

from jaxrl_llm.importer.fields import Conversion, System
from jaxrl_llm.importer.values import source_path
from jaxrl_llm.importer.verl_fields import (
    ACTOR,
    ADVANTAGES,
    ALONE,
    CLIPPED,
    CORRECTION,
    CRITIC_DEFAULTS,
    LOSS_FIELDS,
    LOSSES,
    MANAGER,
    MODEL,
    PPO,
    PPO_DEFAULTS,
    REF,
    ROLLOUT,
    SCHEDULES,
    SFT,
    SFT_DEFAULTS,
)


def _rules_of_ppo(conv: Conversion) -> None:
    _algorithm(conv)
    _loss(conv)
    _kl(conv)
    _correction(conv)
    conv.devices = conv.devices or conv.get("trainer.n_gpus_per_node") * conv.get("trainer.nnodes")
    conv.put_mesh(
        conv.first(f"{ACTOR}.megatron.tensor_model_parallel_size"),
        conv.first(f"{ACTOR}.megatron.context_parallel_size", f"{ACTOR}.ulysses_sequence_parallel_size"),
        ulysses=conv.is_set(f"{ACTOR}.ulysses_sequence_parallel_size"),
    )
    fsdp = conv.get(f"{ACTOR}.fsdp_config.fsdp_size")
    if fsdp and fsdp > 0:
        conv.put("mesh.fsdp", fsdp, f"{ACTOR}.fsdp_config.fsdp_size")
        conv.put("mesh.data", -1, f"{ACTOR}.fsdp_config.fsdp_size", note="replicas on the other devices")
    prompts = conv.get("data.train_batch_size")
    if not prompts:  # of asynchronous training, whose trainer counts mini-batches
        prompts = conv.get(f"{ACTOR}.ppo_mini_batch_size")
        conv.put(
            "prompts_per_step", prompts, f"{ACTOR}.ppo_mini_batch_size", note="data.train_batch_size is 0"
        )
    conv.put_steps("trainer.total_epochs", "trainer.total_training_steps")
    updates = _minibatches(conv, prompts)
    _micro_batches(conv)
    _optimizer_rules(conv, f"{ACTOR}.optim", "optim", updates)
    if conv.algo in ("ppo", "pf_ppo"):
        _critic(conv, updates)
    else:
        for key in [key for key in conv.settings if key.startswith("critic.")]:
            conv.drop(key, f"{conv.algo} has no critic")
        conv.results = {key: result for key, result in conv.results.items() if not key.startswith("critic.")}
    _rewards(conv)
    _evaluation(conv)
    _lora(conv, MODEL)
    _data(conv)
    _outputs(conv)
    if conv.get(f"{REF}.fsdp_config.param_offload") or conv.get(f"{REF}.megatron.param_offload"):
        key = conv.first(f"{REF}.fsdp_config.param_offload", f"{REF}.megatron.param_offload")[0]
        conv.put("reference.offload", True, key)
    conv.put_engine(
        f"{ROLLOUT}.name",
        str(conv.get(f"{ROLLOUT}.name")),
        conv.get(f"{ROLLOUT}.tensor_model_parallel_size"),
        conv.get(f"{ROLLOUT}.gpu_memory_utilization"),
    )


def _algorithm(conv: Conversion) -> None:
    estimator, mode = "algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"
    algo, advantage = ADVANTAGES.get(str(conv.get(estimator)).lower(), ("grpo", "grpo"))
    if str(conv.get(estimator)).lower() not in ADVANTAGES:
        conv.drop(estimator, "no such estimator here; grpo is used: set --algo or --algo.advantage")
    loss = str(conv.get(mode)).replace("-", "_")
    conv.algo = LOSSES.get(loss, algo)
    if loss not in LOSSES and loss != "vanilla":
        conv.drop(mode, f"no such loss here; that of {algo} is used")
    if conv.get("algorithm.use_pf_ppo"):
        conv.algo = "pf_ppo"
        conv.put(
            "algo.filter", conv.get("algorithm.pf_ppo.reweight_method"), "algorithm.pf_ppo.reweight_method"
        )
        conv.put("algo.power", conv.get("algorithm.pf_ppo.weight_pow"), "algorithm.pf_ppo.weight_pow")
    responses = f"{ROLLOUT}.n"
    if conv.get(responses) == 1 and advantage in ALONE:
        note = "of one response veRL has no baseline: its advantage is the reward"
        conv.put("algo.advantage", "reward", estimator, responses, note=note)
        conv.notes.append(f"{conv.origin(responses)}: {note}")
        advantage = "reward"
    else:
        conv.put("algo.advantage", advantage, estimator)
    if advantage in ("grpo", "passk"):
        scaled = conv.get("algorithm.norm_adv_by_std_in_grpo")
        conv.put("algo.scale", "std" if scaled else "none", "algorithm.norm_adv_by_std_in_grpo")
    else:
        conv.drop("algorithm.norm_adv_by_std_in_grpo", f"{estimator} {advantage} does not read it")


def _loss(conv: Conversion) -> None:
    low, high = (conv.first(f"{ACTOR}.clip_ratio_{side}", f"{ACTOR}.clip_ratio") for side in ("low", "high"))
    if conv.algo not in ("gpg", "sapo", "kl_cov"):
        conv.put("algo.clip_low", low[1], low[0])
        conv.put("algo.clip_high", high[1], high[0])
    if conv.algo in CLIPPED and conv.algo != "gspo":
        conv.put("algo.dual_clip", conv.get(f"{ACTOR}.clip_ratio_c"), f"{ACTOR}.clip_ratio_c")
    for key, ours in LOSS_FIELDS.get(conv.algo, {}).items():
        conv.put(ours, conv.get(key), key)
    aggregation = f"{ACTOR}.loss_agg_mode"
    if conv.get(aggregation) == "constant":
        factor = conv.get(f"{ACTOR}.loss_scale_factor")
        if factor:
            conv.put("algo.constant", factor, f"{ACTOR}.loss_scale_factor")
        else:
            conv.put("algo.constant", float(conv.value_of("max_response_tokens", 512)), aggregation)
        conv.notes.append(_sum_note(conv, aggregation, "optim"))
    if conv.algo in ("gspo", "sapo", "gmpo"):  # veRL's code forces the mean over sequences
        conv.put("algo.aggregation", "sequence", aggregation, note=f"{conv.algo} is a mean over sequences")


def _sum_note(conv: Conversion, aggregation: str, optimizer: str) -> str:
    return (
        f"{conv.origin(aggregation)}: veRL sums over the sequences of a micro-batch, here it is their mean: "
        f"scale {optimizer}.learning_rate if the optimizer is not Adam"
    )


def _kl(conv: Conversion) -> None:
    in_loss, in_reward = conv.get(f"{ACTOR}.use_kl_loss"), conv.get("algorithm.use_kl_in_reward")
    if in_loss:
        conv.put("algo.kl_coef", conv.get(f"{ACTOR}.kl_loss_coef"), f"{ACTOR}.kl_loss_coef")
        conv.put("algo.kl", conv.get(f"{ACTOR}.kl_loss_type"), f"{ACTOR}.kl_loss_type")
        conv.put("algo.kl_in", "loss", f"{ACTOR}.use_kl_loss")
        if in_reward:
            conv.drop(
                "algorithm.use_kl_in_reward", "KL is in the loss or in the reward, not both; in the loss"
            )
    elif in_reward:
        conv.put("algo.kl_coef", conv.get("algorithm.kl_ctrl.kl_coef"), "algorithm.kl_ctrl.kl_coef")
        conv.put("algo.kl", conv.get("algorithm.kl_penalty"), "algorithm.kl_penalty")
        conv.put("algo.kl_in", "reward", "algorithm.use_kl_in_reward")
        if conv.get("algorithm.kl_ctrl.type") == "adaptive":
            conv.put("algo.kl_target", conv.get("algorithm.kl_ctrl.target_kl"), "algorithm.kl_ctrl.target_kl")
            conv.put("algo.kl_horizon", conv.get("algorithm.kl_ctrl.horizon"), "algorithm.kl_ctrl.horizon")
    else:
        conv.put("algo.kl_coef", 0.0, f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")


def _correction(conv: Conversion) -> None:
    weight, cap = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_is_threshold"
    if conv.get(f"{ACTOR}.tis_imp_ratio_cap") and conv.get(f"{ACTOR}.tis_imp_ratio_cap") > 0:
        conv.put("algo.correction.weight", "token", f"{ACTOR}.tis_imp_ratio_cap")
        conv.put("algo.correction.cap", conv.get(f"{ACTOR}.tis_imp_ratio_cap"), f"{ACTOR}.tis_imp_ratio_cap")
    if conv.get(weight) in ("token", "sequence"):
        conv.put("algo.correction.weight", conv.get(weight), weight)
        bounds = conv.get(cap)
        conv.put("algo.correction.cap", bounds[-1], cap)
        if len(bounds) == 2:
            conv.put("algo.correction.floor", bounds[0], cap)
            conv.put("algo.correction.outside", "zero", cap, note="two bounds are IcePop")
        if conv.get(f"{CORRECTION}.rollout_is_batch_normalize"):
            conv.put("algo.correction.normalize", True, f"{CORRECTION}.rollout_is_batch_normalize")
    if rules := conv.get(f"{CORRECTION}.rollout_rs"):
        thresholds = conv.get(f"{CORRECTION}.rollout_rs_threshold") or [(2.0,)]
        pairs = [(rule, thresholds[min(i, len(thresholds) - 1)]) for i, rule in enumerate(rules)]
        conv.put(
            "algo.correction.reject",
            tuple((rule, *_bounds(rule, bound)) for rule, bound in pairs),
            f"{CORRECTION}.rollout_rs",
            f"{CORRECTION}.rollout_rs_threshold",
        )
    if conv.get(f"{CORRECTION}.bypass_mode"):
        conv.put("algo.old", "rollout", f"{CORRECTION}.bypass_mode")
        if "algo.correction.weight" in conv.results:
            note = "without old log-probs the ratio is of the present policy"
            conv.put("algo.correction.of", "policy", f"{CORRECTION}.bypass_mode", note=note)


def _bounds(rule: str, threshold: tuple[float, ...]) -> tuple[float, float]:
    """Return the bounds of a rule: of k1 a ratio, whose lower bound is the inverse where one is given."""
    if len(threshold) == 2:
        return threshold[0], threshold[1]
    high = threshold[0]
    return (1 / high if high else 0.0, high) if rule.endswith("k1") else (0.0, high)


def _minibatches(conv: Conversion, prompts: int) -> int:
    key, n = f"{ACTOR}.ppo_mini_batch_size", conv.get(f"{ROLLOUT}.n")
    mini = min(conv.get(key), prompts)
    updates = conv.put_minibatches(prompts * n, mini * n, "data.train_batch_size", key, f"{ROLLOUT}.n")
    return updates * conv.get(f"{ACTOR}.ppo_epochs")


def _micro_batches(conv: Conversion) -> None:
    dynamic, limit = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"
    micro = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    if conv.get(dynamic):
        conv.put_tokens_per_device(conv.get(limit), limit)
        log_probs = f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
        if conv.is_set(log_probs):
            shards = max(conv.value_of("mesh.sequence", 1), 1)
            conv.put(
                "score.tokens_per_device",
                max(conv.get(log_probs), -(-conv.row_tokens() // shards)),
                log_probs,
            )
    else:
        size = (
            conv.get(micro) or (conv.get(f"{ACTOR}.ppo_micro_batch_size") or 8) // max(conv.devices, 1) or 1
        )
        conv.put_tokens_per_device(size * conv.row_tokens(), micro, note="x the tokens of a row")


def _optimizer_rules(conv: Conversion, group: str, ours: str, updates: int) -> None:
    """Set schedule, warm-up and moments. veRL counts both in steps; here they are in updates."""
    scheduler = conv.first(
        f"{group}.warmup_style",
        f"{group}.lr_decay_style",
        f"{group}.lr_scheduler",
        f"{group}.lr_scheduler_type",
    )[0]
    conv.put_schedule(SCHEDULES, scheduler, ours)
    if conv.value_of(f"{ours}.schedule", "constant") != "constant":
        key, fraction = conv.first(f"{group}.min_lr_ratio")
        if conv.is_set(f"{group}.min_lr"):
            key, fraction = f"{group}.min_lr", conv.fraction(f"{group}.min_lr", f"{group}.lr")
        conv.put(f"{ours}.final_fraction", fraction or 0.0, key)
    warmup = f"{group}.lr_warmup_steps"
    if (conv.get(warmup) or -1) > 0:
        conv.results.pop(f"{ours}.warmup_ratio", None)  # veRL reads the ratio where there are no steps
        conv.put_warmup(conv.get(warmup) * updates, warmup, note=f"x {updates} updates a step", prefix=ours)
    for name, beta in zip(("b1", "b2"), conv.get(f"{group}.betas") or (), strict=False):
        conv.put(f"{ours}.{name}", float(beta), f"{group}.betas")
    if conv.get(f"{group}.clip_grad") is not None:
        conv.put(f"{ours}.max_grad_norm", conv.get(f"{group}.clip_grad"), f"{group}.clip_grad")


def _critic(conv: Conversion, updates: int) -> None:
    conv.defaults = {**conv.defaults, **CRITIC_DEFAULTS}
    conv.put("critic.optim.learning_rate", conv.get("critic.optim.lr"), "critic.optim.lr")
    conv.put("critic.optim.weight_decay", conv.get("critic.optim.weight_decay"), "critic.optim.weight_decay")
    conv.put("critic.loss.value_clip", conv.get("critic.cliprange_value"), "critic.cliprange_value")
    aggregation = "critic.loss_agg_mode"
    if conv.get(aggregation) == "constant":  # of the value loss the padded length, whatever the actor's is
        longest = float(conv.value_of("max_response_tokens", 512))
        conv.put("critic.loss.aggregation", "sequence_sum", aggregation)
        conv.put("critic.loss.factor", 0.5 / longest, aggregation)
        conv.notes.append(_sum_note(conv, aggregation, "critic.optim"))
    _optimizer_rules(conv, "critic.optim", "critic.optim", updates)
    path = conv.get("critic.model.path")
    if path and path != conv.get(f"{MODEL}.path"):
        conv.put("critic.path", path, "critic.model.path")


def _rewards(conv: Conversion) -> None:
    path, function = "custom_reward_function.path", "custom_reward_function.name"
    if conv.is_set(path):
        conv.put("reward.name", f"{conv.get(path)}:{conv.get(function)}", path, function)
    if conv.get("reward_model.enable") and conv.is_set("reward_model.model.path"):
        conv.put("reward.models.0.path", conv.get("reward_model.model.path"), "reward_model.model.path")
        if not conv.is_set(path):
            note = "the reward model alone rewards"
            conv.put("reward.name", "none", "reward_model.enable", note=note)
    for group in (MANAGER, "reward_model.overlong_buffer"):
        if conv.get(f"{group}.enable") and conv.get(f"{group}.len"):
            longest = conv.get("reward_model.reward_kwargs.max_resp_len") or conv.get(
                "data.max_response_length"
            )
            conv.put(
                "reward.shaping",
                (("overlong", conv.get(f"{group}.penalty_factor")),),
                f"{group}.penalty_factor",
            )
            conv.put("reward.overlong_to", longest, "reward_model.reward_kwargs.max_resp_len", f"{group}.len")
            conv.put("reward.overlong_from", longest - conv.get(f"{group}.len"), f"{group}.len")


def _evaluation(conv: Conversion) -> None:
    group = f"{ROLLOUT}.val_kwargs"
    conv.put("eval.every", conv.get("trainer.test_freq"), "trainer.test_freq")
    temperature = conv.get(f"{group}.temperature") if conv.get(f"{group}.do_sample") else 0.0
    conv.put("eval.sampling.temperature", temperature, f"{group}.do_sample", f"{group}.temperature")
    if temperature:
        conv.put("eval.samples", conv.get(f"{group}.n"), f"{group}.n")
    for name in ("top_p", "top_k"):
        if conv.is_set(f"{group}.{name}"):
            conv.put(f"eval.sampling.{name}", conv.get(f"{group}.{name}"), f"{group}.{name}")
    if conv.value_of("eval.every", 0):
        conv.notes.append("veRL evaluates on all rows of data.val_files; here on eval.prompts of them (64)")


def _lora(conv: Conversion, model: str) -> None:
    if conv.value_of("lora.rank", 0) and conv.is_set(f"{model}.lora_rank"):
        conv.put("lora.alpha", conv.get(f"{model}.lora_alpha"), f"{model}.lora_alpha")
        conv.put("lora.targets", conv.get(f"{model}.target_modules"), f"{model}.target_modules")


def _data(conv: Conversion) -> None:
    for key, split in (("data.train_files", "train"), ("data.val_files", "eval")):
        if conv.is_set(key):
            conv.put_sources(map(source_path, conv.get(key)), key, split)
    truncation = str(conv.get("data.truncation"))
    if conv.get("data.filter_overlong_prompts"):
        conv.put("data.overlong", "filter", "data.filter_overlong_prompts")
    elif truncation == "error":
        conv.put("data.overlong", "fail", "data.truncation")
    else:
        conv.put("data.overlong", "cut", "data.truncation")
        conv.put("data.cut_side", "right" if truncation == "right" else "left", "data.truncation")
    options = conv.get("data.apply_chat_template_kwargs")
    options = dict(options) if isinstance(options, Mapping) else {}
    if conv.is_set("data.apply_chat_template_kwargs.enable_thinking"):
        options["enable_thinking"] = conv.get("data.apply_chat_template_kwargs.enable_thinking")
    if options:
        key = "data.apply_chat_template_kwargs"
        conv.put("data.chat.template_options", json.dumps(options), key, f"{key}.enable_thinking")
    draws = "algorithm.filter_groups.max_num_gen_batches"
    if conv.is_set(draws) and conv.get(draws) > 0:
        conv.put("algo.max_draws", conv.get(draws), draws)
    elif conv.is_set(draws):
        conv.drop(draws, "0 is no limit; here there is one: --algo.max_draws")


def _outputs(conv: Conversion) -> None:
    folder, name = "trainer.default_local_dir", "trainer.experiment_name"
    if conv.is_set(folder):
        conv.put("run_dir", conv.get(folder) or "runs/verl", folder)
    else:
        conv.put("run_dir", f"runs/{conv.get(name) or 'verl'}", name)
    loggers = conv.get("trainer.logger")
    for logger in ("wandb", "mlflow"):
        if logger in "".join(loggers):
            conv.put(
                f"log.{logger}", conv.get("trainer.project_name"), "trainer.logger", "trainer.project_name"
            )


def _rules_of_sft(conv: Conversion) -> None:
    conv.algo = "sft"
    conv.put_lengths(conv.get("data.max_length"), "data.max_length")
    sequence = conv.first(
        "engine.context_parallel_size",
        "engine.ulysses_sequence_parallel_size",
        "ulysses_sequence_parallel_size",
    )
    conv.put_mesh(conv.first("engine.tensor_model_parallel_size"), sequence, ulysses="ulysses" in sequence[0])
    if conv.is_set("data.max_token_len_per_gpu"):
        conv.put_tokens_per_device(conv.get("data.max_token_len_per_gpu"), "data.max_token_len_per_gpu")
    else:
        key, size = conv.first("data.micro_batch_size", "data.micro_batch_size_per_gpu")
        conv.put_tokens_per_device(size * conv.row_tokens(), key, note="x the tokens of a row")
    conv.put_steps("trainer.total_epochs", "trainer.total_training_steps")
    _optimizer_rules(conv, "optim", "optim", 1)
    for name in ("prompt", "response"):
        keys, inner = conv.get(f"data.{name}_key"), conv.get(f"data.{name}_dict_keys")
        if keys and inner:
            column = f"{keys}.{inner[0]}"
            conv.put(f"data.train.0.{name}_key", column, f"data.{name}_key", f"data.{name}_dict_keys")
    messages = conv.first("data.multiturn.messages_key", "data.messages_key")
    if messages[1]:
        conv.put("data.train.0.prompt_key", messages[1], messages[0])
    conv.put("eval.every", conv.get("trainer.test_freq"), "trainer.test_freq")
    _lora(conv, "model")
    _data(conv)
    _outputs(conv)


SYSTEM = System(
    name="verl",
    title="veRL",
    tables={"ppo": PPO, "sft": SFT},
    defaults={"ppo": PPO_DEFAULTS, "sft": SFT_DEFAULTS},
    rules={"ppo": _rules_of_ppo, "sft": _rules_of_sft},
    aliases={
        f"{ROLLOUT}.val_kwargs.num_samples": f"{ROLLOUT}.val_kwargs.n",
        "algorithm.rollout_is": f"{CORRECTION}.rollout_is",
        "algorithm.rollout_is_threshold": f"{CORRECTION}.rollout_is_threshold",
        "algorithm.rollout_rs": f"{CORRECTION}.rollout_rs",
    },
)
